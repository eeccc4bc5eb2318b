//! Runs a sampled product on a device and checks every value, including those that must not change.

use super::{SddmmCase, SddmmData, SddmmReference};
use crate::attention::written;
use crate::bsr::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload, view, view_mut};
use crate::number::{encode, poison};
use crate::placement::{Placed, Placement};
use crate::tolerance::check;
use blockflash_ops::{BsrPattern, BsrSddmm, DType, Error, Operation, Stream, Tensor};
use blockflash_sys::{Kernel, Major};

/// The operands of a sampled product on a device.
pub struct SddmmInputs {
    case: SddmmCase,
    pattern: BsrPattern,
    /// A and B.
    dense: [Tensor; 2],
}

fn placed(case: &SddmmCase) -> [Placed; 2] {
    let ([m, n, k], [a, b]) = (case.mnk, case.placements());
    [a.place(&[m, k]), b.place(&[k, n])]
}

/// The values have one block before them and one behind them that must not be touched.
fn placed_values(case: &SddmmCase, data: &SddmmData) -> Placed {
    let (blocks, size) = (data.structure.col_idx.len(), case.block_size);
    Placement { order: Vec::new(), padding: vec![(1, 1)] }.place(&[blocks, size, size])
}

fn bits(dtype: DType, values: &[f32]) -> Vec<u32> {
    values.iter().map(|&x| encode(dtype, x)).collect()
}

/// The bits of A and B in memory, NaN in every gap.
fn scattered(case: &SddmmCase, data: &SddmmData) -> [Vec<u32>; 2] {
    let ([a, b], filler) = (placed(case), poison(case.dtype));
    [a.scatter(bits(case.dtype, &data.a), filler), b.scatter(bits(case.dtype, &data.b), filler)]
}

/// The pattern, without values that nothing would read.
fn pattern(case: &SddmmCase, data: &SddmmData, stream: &Stream) -> Result<BsrPattern, String> {
    let ([m, n, _], structure) = (case.mnk, &data.structure);
    BsrPattern::from_parts(m, n, case.block_size, &structure.row_ptr, &structure.col_idx)
        .and_then(|pattern| pattern.to(stream))
        .map_err(|error| format!("pattern: {error}"))
}

impl SddmmInputs {
    /// Uploads the data of a case; the gaps of A and B hold NaN.
    pub fn upload(case: &SddmmCase, data: &SddmmData, stream: &Stream) -> Result<Self, String> {
        let (placed, [a, b]) = (placed(case), scattered(case, data));
        Ok(Self {
            case: case.clone(),
            pattern: pattern(case, data, stream)?,
            dense: [
                upload(stream, case.dtype, &a, &placed[0].physical)?,
                upload(stream, case.dtype, &b, &placed[1].physical)?,
            ],
        })
    }

    /// Replaces A and B in place, as a replayed graph needs it.
    pub fn refill(&mut self, data: &SddmmData, stream: &Stream) -> Result<(), String> {
        let bits = scattered(&self.case, data);
        self.dense.iter_mut().zip(&bits).try_for_each(|(tensor, bits)| refill(tensor, stream, bits))
    }

    /// Contents of the values before the product: the case's old values, and poison around them, or
    /// everywhere when beta is 0.
    pub fn old_values(&self, data: &SddmmData, stream: &Stream) -> Result<Tensor, String> {
        let (case, placed) = (&self.case, placed_values(&self.case, data));
        if case.beta == 0.0 {
            return poisoned(stream, case.values_dtype, &placed.physical);
        }
        let physical =
            placed.scatter(bits(case.values_dtype, &data.old), poison(case.values_dtype));
        upload(stream, case.values_dtype, &physical, &placed.physical)
    }

    /// The call.
    pub fn product(&self) -> BsrSddmm<'_> {
        let [a, b] = placed(&self.case);
        let [a, b] = [view(&self.dense[0], &a), view(&self.dense[1], &b)];
        BsrSddmm {
            alpha: self.case.alpha,
            beta: self.case.beta,
            ..BsrSddmm::new(&self.pattern, a, b)
        }
    }

    /// The refusal that is due from a kernel for matrices of these layouts.
    fn refusal(
        &self,
        values: &mut Tensor,
        data: &SddmmData,
        majors: [Major; 2],
    ) -> Result<Option<&'static str>, String> {
        let case = &self.case;
        let problem = self.product().problem(&view_mut(values, &placed_values(case, data)));
        let problem = problem.map_err(|error| format!("{error}\n    {case:?}"))?;
        Ok(if [problem.a.major, problem.b.major] != majors {
            Some("the kernel takes a ")
        } else if !(problem.a.aligned && problem.b.aligned || problem.k == 0) {
            // Matrices without elements need no tensor map.
            Some("tensor map")
        } else {
            None
        })
    }

    /// Queues the computation.
    pub fn launch(
        &self,
        values: &mut Tensor,
        data: &SddmmData,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let values = view_mut(values, &placed_values(&self.case, data));
        match kernel {
            Choice::Selected => self.product().sddmm_into(values, stream),
            Choice::This(kernel) => self.product().run_with(kernel, values, stream),
        }
    }
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
    let values = written(&placed_values(case, data), &bits, case.values_dtype, |_| true)?;
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
    let (inputs, mut values) = uploaded(case, data, stream)?;
    let run = |inputs, values| {
        run_and_check_on(inputs, values, data, reference, Choice::This(kernel), stream)
    };
    let Some(majors) = tile.majors else { return run(&inputs, values) };
    if let Some(expected) = inputs.refusal(&mut values, data, majors)? {
        match inputs.launch(&mut values, data, Choice::This(kernel), stream) {
            Err(Error::Unsupported { what, .. }) if what.contains(expected) => {}
            other => {
                return Err(format!("not refused for its {expected}: {other:?}\n    {case:?}"));
            }
        }
        let (inputs, mut values) = uploaded(&case.clone().aligned(), data, stream)?;
        return match inputs.refusal(&mut values, data, majors)? {
            None => run(&inputs, values),
            Some(_) => Ok(0),
        };
    }
    run(&inputs, values)
}

/// The operands on the device, and the values as they are before the product.
fn uploaded(
    case: &SddmmCase,
    data: &SddmmData,
    stream: &Stream,
) -> Result<(SddmmInputs, Tensor), String> {
    let inputs = SddmmInputs::upload(case, data, stream)?;
    let values = inputs.old_values(data, stream)?;
    Ok((inputs, values))
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
    let (inputs, values) =
        uploaded(case, data, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    run_and_check_on(&inputs, values, data, reference, kernel, stream)
}

/// The same with the operands on the device.
fn run_and_check_on(
    inputs: &SddmmInputs,
    mut values: Tensor,
    data: &SddmmData,
    reference: &SddmmReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let case = &inputs.case;
    let story = |what: &str| {
        let kernel = match kernel {
            Choice::Selected => format!("bsr_sddmm on {}", stream.device()),
            Choice::This(kernel) => kernel.image_name(),
        };
        format!("{kernel}: {what}\n    {} blocks of {case:?}", data.structure.col_idx.len())
    };
    let mut run = || {
        inputs
            .launch(&mut values, data, kernel, stream)
            .map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs"))?;
        check_values(&values, case, data, reference, stream)
    };
    run().map_err(|error| story(&error))
}

/// The same from the case alone.
pub fn run_case(case: &SddmmCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = SddmmData::generate(case);
    let reference = SddmmReference::compute(case, &data, 2e8);
    run_and_check(case, &data, &reference, kernel, stream)
}
