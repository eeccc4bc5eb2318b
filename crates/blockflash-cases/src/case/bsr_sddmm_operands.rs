//! One product of two dense matrices at the stored blocks of a sparse one (SDDMM), with its data.
//! Suites, the command and tests share it.

use super::bsr_operands::factor;
use super::operands::{Operands, Progress, TensorInfo, launched, reset};
use crate::error::Result;
use crate::io::Array;
use crate::memory::count;
use crate::placement::{Dense, Placed, Placement};
use blockflash_ops::bsr_sddmm::{self, BsrSddmmProblem};
use blockflash_ops::{
    BsrPattern, BsrSddmm, CudaProperties, DType, Kernel, Major, Operation, PreparedBsrSddmm,
    Stream, Tensor, ViewMut, bsr_sddmm_flops,
};
use blockflash_oracle::{self as oracle, Comparison, SddmmCase};

/// What is computed: `values = alpha·a·b + beta·values` at the stored blocks.
#[derive(Clone, Debug)]
pub struct SddmmCall {
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the previous values; with 0, they are only written.
    pub beta: f32,
    /// Element type of the values.
    pub values_dtype: DType,
    /// Memory layout of A and of B.
    pub placements: [Placement; 2],
    /// Memory layout of the values.
    pub values: Placement,
}

impl SddmmCall {
    /// `values = a·b` for A and B without gaps, whose rows or columns are contiguous.
    pub fn new(values_dtype: DType, majors: [Major; 2]) -> Self {
        let placements = majors.map(Placement::of_major);
        Self { alpha: 1.0, beta: 0.0, values_dtype, placements, values: Placement::default() }
    }
}

/// The data of one product, in host memory.
#[derive(Clone, Debug)]
pub struct SddmmData {
    /// `[block rows + 1]`.
    pub row_ptr: Vec<i32>,
    /// `[blocks]`.
    pub col_idx: Vec<i32>,
    /// Rows and columns of a block.
    pub block: usize,
    /// `[m, k]`.
    pub a: Array,
    /// `[k, n]`.
    pub b: Array,
    /// `[blocks, block, block]`, the previous values.
    pub old: Option<Array>,
}

impl SddmmData {
    /// A and B for a product of sizes m, n, k, drawn in the order of memory by `draw` from a name,
    /// a shape and the random stream of the seed.
    ///
    /// # Errors
    /// Those of `draw`.
    pub fn drawn<E>(
        [m, n, k]: [usize; 3],
        block: usize,
        (row_ptr, col_idx): (Vec<i32>, Vec<i32>),
        majors: [Major; 2],
        draw: impl Fn(&'static str, &[usize], u64) -> Result<Array, E>,
    ) -> Result<Self, E> {
        let matrix = |name, major, [rows, cols]: [usize; 2], lane| {
            if major == Major::Row {
                return draw(name, &[rows, cols], lane);
            }
            let stored = draw(name, &[cols, rows], lane)?;
            Ok(stored.transposed().unwrap_or(stored)) // a matrix has a transpose
        };
        let (a, b) = (matrix("a", majors[0], [m, k], 0)?, matrix("b", majors[1], [k, n], 1)?);
        Ok(Self { row_ptr, col_idx, block, a, b, old: None })
    }

    /// m, n and k.
    pub fn sizes(&self) -> [usize; 3] {
        let of = |array: &Array, dim: usize| array.shape().get(dim).copied().unwrap_or(0);
        [of(&self.a, 0), of(&self.b, 1), of(&self.a, 1)]
    }
}

/// Inputs and the output values on a device.
#[derive(Debug)]
pub struct SddmmOperands {
    inputs: Inputs,
    values: Tensor,
    placed_values: Placed,
    prepared: Option<PreparedBsrSddmm>,
}

#[derive(Debug)]
struct Inputs {
    call: SddmmCall,
    data: SddmmData,
    pattern: BsrPattern,
    a: Dense,
    b: Dense,
}

impl Inputs {
    fn product(&self) -> Result<BsrSddmm<'_>> {
        let (a, b) = (self.a.view(&self.data.a)?, self.b.view(&self.data.b)?);
        let SddmmCall { alpha, beta, .. } = self.call;
        Ok(BsrSddmm { alpha, beta, ..BsrSddmm::new(&self.pattern, a, b) })
    }
}

impl SddmmOperands {
    /// Places the data on the stream's device, with the previous values if beta is not 0.
    ///
    /// # Errors
    /// If the library refuses the pattern or the product, or there is not enough memory.
    pub fn new(call: SddmmCall, data: SddmmData, stream: &Stream) -> Result<Self> {
        let ([m, n, _], block) = (data.sizes(), data.block);
        let pattern = BsrPattern::from_parts(m, n, block, &data.row_ptr, &data.col_idx)?;
        let placed_values = call.values.place(&[data.col_idx.len(), block, block]);
        let values = match &data.old {
            Some(old) if call.beta != 0.0 => placed_values.upload(old, stream)?,
            _ => Tensor::empty(stream, call.values_dtype, &placed_values.physical)?,
        };
        let inputs = Inputs {
            pattern: if stream.device().is_cpu() { pattern } else { pattern.to(stream)? },
            a: Dense::new(&data.a, &call.placements[0], stream)?,
            b: Dense::new(&data.b, &call.placements[1], stream)?,
            call,
            data,
        };
        let mut operands = Self { inputs, values, placed_values, prepared: None };
        operands.problem(None)?;
        Ok(operands)
    }

    /// The library's call.
    ///
    /// # Errors
    /// None for operands that [`new`](Self::new) has made.
    pub fn product(&self) -> Result<BsrSddmm<'_>> {
        self.inputs.product()
    }

    /// Replaces A and B, whose memory on a GPU stays where it is, as a replayed graph needs it.
    ///
    /// # Errors
    /// If one of them has another type or shape, or the device fails.
    pub fn set_inputs(&mut self, [a, b]: [Array; 2], stream: &Stream) -> Result<()> {
        self.inputs.a.refill(&a, stream)?;
        self.inputs.b.refill(&b, stream)?;
        (self.inputs.data.a, self.inputs.data.b) = (a, b);
        Ok(())
    }

    /// The values in memory, gaps included.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    fn call(&mut self, _: Option<&Kernel>) -> Result<(BsrSddmm<'_>, ViewMut<'_>)> {
        let values = self.placed_values.view_mut(&mut self.values)?;
        Ok((self.inputs.product()?, values))
    }

    /// The call as plain numbers, whichever kernel computes it.
    ///
    /// # Errors
    /// None for operands that [`new`](Self::new) has made.
    pub fn problem(&mut self, _: Option<&Kernel>) -> Result<BsrSddmmProblem> {
        let (call, values) = self.call(None)?;
        Ok(call.problem(&values)?)
    }
}

impl Operands for SddmmOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        let (SddmmData { a, b, .. }, values) = (&self.inputs.data, &self.placed_values);
        vec![
            ("a", a.shape().to_vec(), a.dtype()),
            ("b", b.shape().to_vec(), b.dtype()),
            ("values", values.shape().to_vec(), self.values.dtype()),
        ]
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let BsrSddmmProblem { m, n, block_size, nnz_blocks, a, b, alpha, beta, .. } =
            self.problem(None)?;
        let (stored, density) = (count(nnz_blocks as u64), self.inputs.pattern.density());
        let blocks =
            format!("{stored} of {block_size} x {block_size} in {m} x {n}, density {density:.4}");
        let layout = format!("a {}-major, b {}-major", a.major.name(), b.major.name());
        let mut formula = format!("{}A·B", factor(alpha));
        if beta != 0.0 {
            formula += &format!(" + {}values", factor(beta));
        }
        Ok(vec![("blocks", blocks), ("layout", layout), ("formula", formula)])
    }

    fn flops(&mut self) -> Result<f64> {
        Ok(bsr_sddmm_flops(&self.problem(None)?) as f64)
    }

    launched!(bsr_sddmm::accepts);

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        vec![("values", &mut self.values)]
    }

    /// With beta, the values are the previous ones.
    fn reset(&mut self, _kernel: Option<&Kernel>, stream: &Stream) -> Result<()> {
        let Inputs { call, data, .. } = &self.inputs;
        let previous = data.old.as_ref().filter(|_| call.beta != 0.0);
        reset(&mut self.values, previous, &self.placed_values, stream)
    }

    /// Without gaps, whatever the layout of the values is.
    fn results(
        &mut self,
        _kernel: Option<&Kernel>,
        stream: &Stream,
    ) -> Result<Vec<(&'static str, Array)>> {
        Ok(vec![("values", Array::download(&self.values, stream)?.taken(&self.placed_values))])
    }

    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let Inputs { call, data, .. } = &self.inputs;
        let case = SddmmCase {
            row_ptr: &data.row_ptr,
            col_idx: &data.col_idx,
            sizes: data.sizes(),
            a: &data.a,
            b: &data.b,
            majors: [Major::Row; 2],
            old: data.old.as_ref().map(|old| old as _),
            alpha: call.alpha,
            beta: call.beta,
        };
        let compare = |values: &Array| Ok(oracle::bsr_sddmm(&case, values, seed, progress)?);
        results.iter().map(compare).collect()
    }
}
