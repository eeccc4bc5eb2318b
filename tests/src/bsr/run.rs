//! Runs a product on a device and checks every element, including those that must not be written.

use super::{BsrCase, BsrData, BsrReference, NanInB, Workspace};
use crate::attention::{Choice, written};
use crate::gpu::wait;
use crate::host::{cpu, download};
use crate::tolerance::check;
use blockflash_cases::case::{BsrOperands, Operands};
use blockflash_cases::{Error, Result as Made};
use blockflash_ops::bsr_matmul::{BsrMatrix, BsrWorkspace};
use blockflash_ops::{Major, Stream, Tensor};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{BsrMatmulTile, Variant};

fn workspace(case: &BsrCase, stream: &Stream) -> Made<Option<BsrWorkspace>> {
    Ok(match case.workspace {
        Workspace::None => None,
        Workspace::Estimate => Some(BsrWorkspace::new(stream)?),
        Workspace::Parts(parts) => Some(BsrWorkspace::new(stream)?.with_parts(parts)?),
    })
}

impl BsrData {
    /// The block-sparse matrix on a device, built from its parts on the host. Where the seed is
    /// odd, its values were written again.
    pub fn matrix(&self, case: &BsrCase, stream: &Stream) -> Result<BsrMatrix, String> {
        let made = || -> Made<BsrMatrix> {
            let data = self.stored(case);
            let mut matrix = data.matrix(stream)?;
            if case.seed % 2 == 1 {
                matrix.set_values(&data.values.upload(&cpu())?, stream)?;
            }
            Ok(matrix)
        };
        made().map_err(|error| format!("matrix: {error}"))
    }

    /// The operands of a case on a device, with NaN in every gap: C holds what it held before the
    /// product. Where the seed is odd, the values of A were written again.
    pub fn operands(&self, case: &BsrCase, stream: &Stream) -> Result<BsrOperands, String> {
        let made = || -> Made<BsrOperands> {
            let operands = BsrOperands::new(case.call(), self.stored(case), stream)?;
            let mut operands = operands.with_workspace(workspace(case, stream)?);
            // Kernels may read values ahead that are as they were when they came from the host.
            if case.seed % 2 == 1 {
                operands.rewrite_values(stream)?;
            }
            operands.reset(None, stream)?;
            Ok(operands)
        };
        made().map_err(|error| format!("operands: {error}"))
    }
}

/// Judges C; returns how many outputs were compared.
pub fn check_output(
    c: &Tensor,
    case: &BsrCase,
    data: &BsrData,
    reference: &BsrReference,
    stream: &Stream,
) -> Result<usize, String> {
    let [m, n, _] = case.mnk;
    let placed = case.placements[1].place(&[m, n]);
    let c = written(&placed, &download(stream, c)?, case.c_dtype, |_| true)?;
    let rows = &reference.rows;
    let got: Vec<f64> =
        rows.iter().flat_map(|&i| &c[i * n..][..n]).map(|&x| f64::from(x)).collect();
    let name = |i: usize| format!("c[{}, {}]", rows[i / n], i % n);
    check(&got, &reference.c, &BsrReference::rounding(case, data), name)?;
    match c.iter().position(|x| !x.is_finite() && case.nan_in_b != NanInB::One) {
        Some(at) => {
            Err(format!("c[{}, {}] is {}, nothing there is NaN or infinite", at / n, at % n, c[at]))
        }
        None => Ok(1),
    }
}

/// Runs a case on a kernel, with A and B transposed as this tile takes them. If the kernel needs a
/// tensor map that does not describe B, it must say so, and the case runs with another B.
pub fn run_on_kernel(
    case: &BsrCase,
    data: &BsrData,
    reference: &BsrReference,
    (kernel, tile): (&'static Kernel, &BsrMatmulTile),
    stream: &Stream,
) -> Result<usize, String> {
    let as_it_is = case.clone().in_layouts_of(kernel, tile);
    let fitting = as_it_is.clone().for_kernel(kernel, tile);
    for case in [as_it_is, fitting] {
        let told = |error: Error| format!("{error}\n    {case:?}");
        let mut operands = data.operands(&case, stream)?;
        let problem = operands.problem(None).map_err(told)?;
        // A single column counts as one of rows, whatever memory it was cut from.
        let fits =
            kernel.takes_any_layout() || (problem.b_major == Major::Column) == tile.b_column_major;
        // A B without elements needs no tensor map, and a portable kernel none at all.
        let hopper = matches!(kernel.variant, Variant::BsrMatmulHopper(_));
        let aligned = problem.b_vectorized || problem.n == 0 || problem.k == 0 || !hopper;
        if fits && aligned {
            return run_and_check_on(
                operands,
                &case,
                data,
                reference,
                Choice::This(kernel),
                stream,
            );
        }
        let reason = if fits { "tensor map" } else { "-major b" };
        match operands.launch(Some(kernel), stream) {
            Err(Error::Ops(blockflash_ops::Error::Unsupported { what, .. }))
                if what.contains(reason) => {}
            other => {
                return Err(format!("no refusal because of {reason}: {other:?}\n    {case:?}"));
            }
        }
    }
    Ok(0)
}

/// Uploads, runs, waits and checks a case whose data and reference are given. Returns the number of
/// compared outputs, or a complete description of the failure.
pub fn run_and_check(
    case: &BsrCase,
    data: &BsrData,
    reference: &BsrReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let operands = data.operands(case, stream);
    let operands = operands.map_err(|error| story(case, data, kernel, stream, error))?;
    run_and_check_on(operands, case, data, reference, kernel, stream)
}

/// The same with the operands on the device.
fn run_and_check_on(
    mut operands: BsrOperands,
    case: &BsrCase,
    data: &BsrData,
    reference: &BsrReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let story = |what: String| story(case, data, kernel, stream, what);
    let mut run = || {
        let launched = operands.launch(kernel.kernel(), stream);
        launched.map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs".to_owned()))?;
        check_output(operands.c(), case, data, reference, stream)
    };
    run().map_err(story)
}

/// A complete description of a failure.
fn story(case: &BsrCase, data: &BsrData, kernel: Choice, stream: &Stream, what: String) -> String {
    let kernel = match kernel {
        Choice::Selected => format!("bsr_matmul on {}", stream.device()),
        Choice::This(kernel) => kernel.image_name(),
    };
    format!("{kernel}: {what}\n    {} stored blocks of {case:?}", data.col_idx.len())
}

/// The same from the case alone.
pub fn run_case(case: &BsrCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = BsrData::generate(case);
    let reference = BsrReference::compute(case, &data, 2e8);
    run_and_check(case, &data, &reference, kernel, stream)
}
