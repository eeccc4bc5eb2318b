//! Runs a sampled product on a device and checks every value, including those that must not change.

use super::{SddmmCase, SddmmData, SddmmReference};
use crate::attention::written;
use crate::bsr::Choice;
use crate::gpu::wait;
use crate::host::download;
use crate::tolerance::check;
use blockflash_cases::Error;
use blockflash_cases::case::{Operands, SddmmOperands};
use blockflash_ops::{Stream, Tensor};
use blockflash_sys::{Kernel, Major};

impl SddmmData {
    /// The operands of a case on a device, with NaN in every gap: the values are what they were
    /// before the product.
    pub fn operands(&self, case: &SddmmCase, stream: &Stream) -> Result<SddmmOperands, String> {
        let made = SddmmOperands::new(case.call(), self.stored(case), stream);
        let reset = made.and_then(|mut operands| {
            operands.reset(None, stream)?;
            Ok(operands)
        });
        reset.map_err(|error| format!("{error}\n    {case:?}"))
    }
}

/// The refusal that is due from a kernel for matrices of these layouts.
fn refusal(
    operands: &mut SddmmOperands,
    majors: [Major; 2],
) -> Result<Option<&'static str>, String> {
    let problem = operands.problem(None).map_err(|error| error.to_string())?;
    Ok(if [problem.a.major, problem.b.major] != majors {
        Some("the kernel takes a ")
    } else if !(problem.a.aligned && problem.b.aligned || problem.k == 0) {
        // Matrices without elements need no tensor map.
        Some("tensor map")
    } else {
        None
    })
}

/// Judges the values; returns how many outputs were compared.
pub fn check_values(
    values: &Tensor,
    case: &SddmmCase,
    data: &SddmmData,
    reference: &SddmmReference,
    stream: &Stream,
) -> Result<usize, String> {
    let size = case.block_size;
    let bits = download(stream, values)?;
    let placed = case.call().values.place(&[data.structure.col_idx.len(), size, size]);
    let values = written(&placed, &bits, case.values_dtype, |_| true)?;
    let rows = &reference.rows;
    let got: Vec<f64> =
        rows.iter().flat_map(|&row| &values[row * size..][..size]).map(|&x| f64::from(x)).collect();
    let name = |at: usize| {
        let row = rows[at / size];
        format!("values[{}, {}, {}]", row / size, row % size, at % size)
    };
    check(&got, &reference.values, &SddmmReference::rounding(case), name)?;
    let wrong = |&at: &usize| match data.position(case, at) {
        Some(_) => !values[at].is_finite() && !case.nan_inside,
        None => values[at].to_bits() != 0,
    };
    match (0..values.len()).find(wrong) {
        Some(at) => Err(format!(
            "value {at} at {:?} of the matrix is {}",
            data.position(case, at),
            values[at]
        )),
        None => Ok(1),
    }
}

/// Runs a case on a kernel. A kernel that refuses the matrices, because tensor maps cannot describe
/// them, gets others. A single row or column counts as row-major and as column-major, so another
/// kernel may be due: then nothing is compared.
pub fn run_on_kernel(
    case: &SddmmCase,
    data: &SddmmData,
    reference: &SddmmReference,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let Some(tile) = kernel.bsr_sddmm_tile() else {
        return Err(format!("{kernel:?} is another kernel"));
    };
    let run = |operands, case: &SddmmCase| {
        run_and_check_on(operands, case, data, reference, Choice::This(kernel), stream)
    };
    let mut operands = data.operands(case, stream)?;
    let Some(majors) = tile.majors else { return run(operands, case) };
    let Some(expected) = refusal(&mut operands, majors)? else { return run(operands, case) };
    match operands.launch(Some(kernel), stream) {
        Err(Error::Ops(blockflash_ops::Error::Unsupported { what, .. }))
            if what.contains(expected) => {}
        other => return Err(format!("not refused for its {expected}: {other:?}\n    {case:?}")),
    }
    let case = &case.clone().aligned();
    let mut operands = data.operands(case, stream)?;
    match refusal(&mut operands, majors)? {
        None => run(operands, case),
        Some(_) => Ok(0),
    }
}

/// Uploads, runs, waits and checks a case whose data and reference are given. Returns the number of
/// compared outputs, or a complete description of the failure.
pub fn run_and_check(
    case: &SddmmCase,
    data: &SddmmData,
    reference: &SddmmReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    run_and_check_on(data.operands(case, stream)?, case, data, reference, kernel, stream)
}

/// The same with the operands on the device.
fn run_and_check_on(
    mut operands: SddmmOperands,
    case: &SddmmCase,
    data: &SddmmData,
    reference: &SddmmReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let story = |what: &str| {
        let kernel = match kernel {
            Choice::Selected => format!("bsr_sddmm on {}", stream.device()),
            Choice::This(kernel) => kernel.image_name(),
        };
        format!("{kernel}: {what}\n    {} blocks of {case:?}", data.structure.col_idx.len())
    };
    let mut run = || {
        let launched = operands.launch(kernel.kernel(), stream);
        launched.map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs"))?;
        check_values(operands.values(), case, data, reference, stream)
    };
    run().map_err(|error| story(&error))
}

/// The same from the case alone.
pub fn run_case(case: &SddmmCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = SddmmData::generate(case);
    let reference = SddmmReference::compute(case, &data, 2e8);
    run_and_check(case, &data, &reference, kernel, stream)
}
