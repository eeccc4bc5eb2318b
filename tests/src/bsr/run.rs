//! Runs a product on a device and checks every element, including those that must not be written.

use super::{BiasKind, BsrCase, BsrData, BsrReference, NanInB, Workspace};
use crate::attention::written;
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload, view, view_mut};
use crate::number::{encode, poison};
use crate::placement::Placed;
use crate::tolerance::check;
use blockflash_ops::bsr_matmul::{
    Bias, BsrMatmul, BsrMatrix, BsrProblem, BsrTranspose, BsrWorkspace,
};
use blockflash_ops::{DType, Device, Error, Major, Operation, Stream, Tensor};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{BsrMatmulTile, Variant};

/// The kernel that computes a product.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    /// The kernel that the library selects; on the CPU, the CPU backend.
    Selected,
    /// This kernel of the table.
    This(&'static Kernel),
}

/// The operands of a product on a device.
pub struct BsrInputs {
    case: BsrCase,
    a: BsrMatrix,
    index: Option<BsrTranspose>,
    b: Tensor,
    bias: Option<Tensor>,
    workspace: Option<BsrWorkspace>,
}

fn placed(case: &BsrCase) -> [Placed; 2] {
    let [m, n, k] = case.mnk;
    [case.placements[0].place(&[k, n]), case.placements[1].place(&[m, n])]
}

fn bits(dtype: DType, values: &[f32]) -> Vec<u32> {
    values.iter().map(|&x| encode(dtype, x)).collect()
}

impl BsrData {
    /// The block-sparse matrix on a device, built from its parts on the host; the transposed one
    /// for a case that multiplies with that. Where the seed is odd, its values were written again.
    pub fn matrix(&self, case: &BsrCase, stream: &Stream) -> Result<BsrMatrix, String> {
        let host = Device::cpu().stream().map_err(|error| error.to_string())?;
        let (size, [m, _, k]) = (case.block_size, case.mnk);
        let shape = [self.col_idx.len(), size, size];
        let build = |[rows, cols]: [usize; 2], row_ptr: &[i32], col_idx: &[i32], values: &[f32]| {
            let values = upload(&host, case.dtype, &bits(case.dtype, values), &shape)?;
            Ok::<_, String>(BsrMatrix::from_parts(
                rows,
                cols,
                size,
                row_ptr,
                col_idx,
                values.view(),
            ))
        };
        let matrix = if case.transposed {
            let (row_ptr, col_idx, values) = self.transposed(case);
            build([k, m], &row_ptr, &col_idx, &values)?
        } else {
            build([m, k], &self.row_ptr, &self.col_idx, &self.values)?
        };
        let upload = |matrix: BsrMatrix| {
            let mut on_device = matrix.to(stream)?;
            // Kernels may read values ahead that are as they were when they came from the host.
            if case.seed % 2 == 1 {
                on_device.set_values(matrix.values(), stream)?;
            }
            Ok(on_device)
        };
        matrix.and_then(upload).map_err(|error| format!("matrix: {error}"))
    }
}

fn workspace(case: &BsrCase, stream: &Stream) -> Result<Option<BsrWorkspace>, Error> {
    Ok(match case.workspace {
        Workspace::None => None,
        Workspace::Estimate => Some(BsrWorkspace::new(stream)?),
        Workspace::Parts(parts) => Some(BsrWorkspace::new(stream)?.with_parts(parts)?),
    })
}

impl BsrInputs {
    /// Uploads the data of a case; the gaps of B hold NaN.
    pub fn upload(case: &BsrCase, data: &BsrData, stream: &Stream) -> Result<Self, String> {
        let [b, _] = placed(case);
        let physical = b.scatter(bits(case.dtype, &data.b), poison(case.dtype));
        let bias = bits(case.dtype, &data.bias);
        let a = data.matrix(case, stream)?;
        let index = case.transposed.then(|| BsrTranspose::new(&a, stream)).transpose();
        Ok(Self {
            case: case.clone(),
            index: index.map_err(|error| format!("index: {error}"))?,
            a,
            b: upload(stream, case.dtype, &physical, &b.physical)?,
            bias: match case.bias {
                BiasKind::None => None,
                _ => Some(upload(stream, case.dtype, &bias, &[bias.len()])?),
            },
            workspace: workspace(case, stream).map_err(|error| format!("workspace: {error}"))?,
        })
    }

    /// Replaces B in place, as a replayed graph needs it.
    pub fn refill(&mut self, data: &BsrData, stream: &Stream) -> Result<(), String> {
        let [b, _] = placed(&self.case);
        refill(
            &mut self.b,
            stream,
            &b.scatter(bits(self.case.dtype, &data.b), poison(self.case.dtype)),
        )
    }

    /// Contents of C before the product: the case's old C, and poison in the gaps, or everywhere
    /// when beta is 0.
    pub fn old_c(&self, data: &BsrData, stream: &Stream) -> Result<Tensor, String> {
        let (case, [_, c]) = (&self.case, placed(&self.case));
        if case.beta == 0.0 {
            return poisoned(stream, case.c_dtype, &c.physical);
        }
        let physical = c.scatter(bits(case.c_dtype, &data.c), poison(case.c_dtype));
        upload(stream, case.c_dtype, &physical, &c.physical)
    }

    /// The call.
    pub fn product(&self) -> BsrMatmul<'_> {
        let case = &self.case;
        let bias = self.bias.as_ref().map(Tensor::view);
        BsrMatmul {
            alpha: case.alpha,
            beta: case.beta,
            bias: match (case.bias, bias) {
                (BiasKind::PerRow, Some(bias)) => Bias::PerRow(bias),
                (BiasKind::PerColumn, Some(bias)) => Bias::PerColumn(bias),
                _ => Bias::None,
            },
            activation: case.activation,
            transpose: self.index.as_ref(),
            workspace: self.workspace.as_ref(),
            ..BsrMatmul::new(&self.a, view(&self.b, &placed(case)[0]))
        }
    }

    /// The call as plain numbers.
    pub fn problem(&self, c: &mut Tensor) -> Result<BsrProblem, String> {
        let problem = self.product().problem(&view_mut(c, &placed(&self.case)[1]));
        problem.map_err(|error| format!("{error}\n    {:?}", self.case))
    }

    /// Queues the computation.
    pub fn launch(
        &self,
        c: &mut Tensor,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), blockflash_ops::Error> {
        let c = view_mut(c, &placed(&self.case)[1]);
        match kernel {
            Choice::Selected => self.product().matmul_into(c, stream),
            Choice::This(kernel) => self.product().run_with(kernel, c, stream),
        }
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
    let n = case.mnk[1];
    let c = written(&placed(case)[1], &download(stream, c)?, case.c_dtype, |_| true)?;
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
        let inputs = BsrInputs::upload(&case, data, stream)?;
        let mut c = inputs.old_c(data, stream)?;
        let problem = inputs.problem(&mut c)?;
        // A single column counts as one of rows, whatever memory it was cut from.
        let fits =
            kernel.takes_any_layout() || (problem.b_major == Major::Column) == tile.b_column_major;
        // A B without elements needs no tensor map, and a portable kernel none at all.
        let hopper = matches!(kernel.variant, Variant::BsrMatmulHopper(_));
        let aligned = problem.b_vectorized || problem.n == 0 || problem.k == 0 || !hopper;
        if fits && aligned {
            return run_and_check_on(&inputs, c, data, reference, Choice::This(kernel), stream);
        }
        let reason = if fits { "tensor map" } else { "-major b" };
        match inputs.launch(&mut c, Choice::This(kernel), stream) {
            Err(Error::Unsupported { what, .. }) if what.contains(reason) => {}
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
    let uploaded = || {
        let inputs = BsrInputs::upload(case, data, stream)?;
        let c = inputs.old_c(data, stream)?;
        Ok((inputs, c))
    };
    let (inputs, c) = uploaded().map_err(|error| story(case, data, kernel, stream, error))?;
    run_and_check_on(&inputs, c, data, reference, kernel, stream)
}

/// The same with the operands on the device, and C as it is before the product.
fn run_and_check_on(
    inputs: &BsrInputs,
    mut c: Tensor,
    data: &BsrData,
    reference: &BsrReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let case = &inputs.case;
    let story = |what: String| story(case, data, kernel, stream, what);
    let mut run = || {
        inputs.launch(&mut c, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs".to_owned()))?;
        check_output(&c, case, data, reference, stream)
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
