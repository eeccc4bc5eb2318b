//! Runs one operation on its operands: computes, times, writes and checks the results, reports.

use crate::args::Common;
use crate::failure::{Failure, Result, bail};
use crate::measure;
use crate::output::{RunReport, print};
use crate::outputs::Outputs;
use crate::progress::Progress;
use blockflash_bench::case::Operands;
use blockflash_bench::io::Array;
use blockflash_ops::{Device, Kernel, Stream};
use blockflash_sys::manifest;
use std::process::ExitCode;

/// How the operation of a command is run.
pub struct Run<'a> {
    /// Name of the command.
    pub operation: &'static str,
    pub common: &'a Common,
    /// Text of `--kernel`.
    pub kernel: Option<&'a str>,
    /// The files to write.
    pub outputs: Outputs,
    pub device: &'a Device,
    pub stream: &'a Stream,
}

impl Run<'_> {
    /// Runs the operation and prints its report. The exit code is 1 if a check failed.
    pub fn of(self, operands: &mut dyn Operands) -> Result<ExitCode> {
        let Self { operation, common, outputs, device, stream, .. } = &self;
        let kernel = self.kernel(operands)?;
        let forced = kernel.filter(|_| self.kernel.is_some());
        let first_us = measure::first(operation, stream, || Ok(operands.launch(forced, stream)?))?;
        // Further runs may change what is added to.
        let results = match outputs.is_empty() && !common.check {
            true => Vec::new(),
            false => operands.results(kernel, stream)?,
        };
        let again = || Ok(operands.launch(forced, stream)?);
        let label = format!("{operation}, again");
        let timing = measure::repeat(&label, stream, first_us, common.repeat, again)?;

        let named: Vec<(&str, &Array)> =
            results.iter().map(|(name, array)| (*name, array)).collect();
        let written = outputs.save(&named)?;
        let mut checks = Vec::new();
        if common.check {
            let (names, arrays): (Vec<_>, Vec<_>) = results.into_iter().unzip();
            let progress = Progress::fractions("checking");
            let progress = |done| progress.fraction(done);
            let comparisons = operands.compare(&arrays, common.seed, &progress)?;
            checks = names.into_iter().zip(comparisons).collect();
        }
        let report = RunReport {
            operation,
            device,
            note: common.device.note(device),
            kernel,
            tensors: operands.inputs(),
            details: operands.details()?,
            flops: operands.flops()?,
            timing,
            checks,
            written,
        };
        print(&report.render(common.json)?)?;
        Ok(report.exit_code())
    }

    /// The kernel that computes the operands: the first one whose name contains the text of
    /// `--kernel`, or the selected one. `None` on the CPU, and where there is nothing to compute.
    fn kernel(&self, operands: &mut dyn Operands) -> Result<Option<&'static Kernel>> {
        let gpu = match operands.is_empty()? {
            true => None,
            false => self.device.cuda_properties(),
        };
        let (gpu, name) = match (gpu, self.kernel) {
            (Some(gpu), Some(name)) => (gpu, name),
            (Some(gpu), None) => return Ok(Some(operands.select(gpu)?)),
            (None, None) => return Ok(None),
            (None, Some(_)) => {
                bail!("--kernel names a GPU kernel, but this is not computed on a GPU");
            }
        };
        for kernel in manifest::kernels().iter().filter(|kernel| kernel.symbol().contains(name)) {
            if operands.accepts(kernel, gpu)? {
                return Ok(Some(kernel));
            }
        }
        let message = format!("no kernel whose name contains {name} computes this on this GPU");
        Err(Failure::new(message))
    }
}
