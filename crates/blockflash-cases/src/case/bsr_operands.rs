//! One product of a block-sparse and a dense matrix with its data: what is computed, from what, on
//! which device, and whether the result is right. Suites, the command and tests share it.

use super::bsr_data::BsrData;
use super::operands::{Operands, Progress, TensorInfo, launched, reset};
use crate::error::{Error, Result};
use crate::io::Array;
use crate::memory::count;
use crate::placement::{Dense, Placed, Placement};
use blockflash_ops::bsr_matmul::{self, BiasKind, BsrProblem};
use blockflash_ops::{
    Activation, Bias, BsrMatmul, BsrMatrix, BsrTranspose, BsrWorkspace, CudaProperties, DType,
    Device, Kernel, Operation, PreparedBsrMatmul, Stream, Tensor, ViewMut, bsr_flops,
};
use blockflash_oracle::{self as oracle, BsrCase, Comparison};
use std::borrow::Cow;

/// What is computed: `c = activation(alpha·a·b + beta·c + bias)`, or with aᵀ in place of a.
#[derive(Clone, Debug)]
pub struct BsrCall {
    /// Whether the stored matrix is multiplied transposed, by an index of its block columns.
    pub transposed: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the previous C; with 0, C is only written.
    pub beta: f32,
    /// How the bias is spread.
    pub bias: BiasKind,
    /// Applied last.
    pub activation: Activation,
    /// Element type of C.
    pub c_dtype: DType,
    /// Memory layout of B and of C.
    pub placements: [Placement; 2],
}

impl BsrCall {
    /// `c = a·b`, row-major without gaps.
    pub fn new(c_dtype: DType) -> Self {
        Self {
            transposed: false,
            alpha: 1.0,
            beta: 0.0,
            bias: BiasKind::None,
            activation: Activation::None,
            c_dtype,
            placements: Default::default(),
        }
    }
}

/// A factor in a formula: nothing for 1.
pub(super) fn factor(value: f32) -> String {
    if value == 1.0 { String::new() } else { format!("{value}·") }
}

/// The activation as the oracle names it; `None` for one that it does not know.
pub fn oracle_activation(activation: Activation) -> Option<oracle::Activation> {
    match activation {
        Activation::None => Some(oracle::Activation::None),
        Activation::Relu => Some(oracle::Activation::Relu),
        Activation::Gelu => Some(oracle::Activation::Gelu),
        Activation::Silu => Some(oracle::Activation::Silu),
        _ => None,
    }
}

/// Inputs and output on a device, and all that a caller can lend.
#[derive(Debug)]
pub struct BsrOperands {
    call: BsrCall,
    data: BsrData,
    inputs: Inputs,
    c: Tensor,
    placed_c: Placed,
    prepared: Option<PreparedBsrMatmul>,
}

#[derive(Debug)]
struct Inputs {
    a: BsrMatrix,
    index: Option<BsrTranspose>,
    b: Dense,
    bias: Option<Dense>,
    workspace: Option<BsrWorkspace>,
}

impl Inputs {
    fn product<'a>(&'a self, call: &BsrCall, data: &'a BsrData) -> Result<BsrMatmul<'a>> {
        let bias = self.bias.as_ref().zip(data.bias.as_ref());
        let bias = bias.map(|(bias, host)| bias.view(host)).transpose()?;
        Ok(BsrMatmul {
            alpha: call.alpha,
            beta: call.beta,
            bias: match (call.bias, bias) {
                (BiasKind::PerRow, Some(bias)) => Bias::PerRow(bias),
                (BiasKind::PerColumn, Some(bias)) => Bias::PerColumn(bias),
                _ => Bias::None,
            },
            activation: call.activation,
            transpose: self.index.as_ref(),
            workspace: self.workspace.as_ref(),
            ..BsrMatmul::new(self.a.view(), self.b.view(&data.b)?)
        })
    }
}

impl BsrOperands {
    /// Places the data on the stream's device, with the previous C if beta is not 0.
    ///
    /// # Errors
    /// If the library refuses the matrix or the product, or there is not enough memory.
    pub fn new(call: BsrCall, data: BsrData, stream: &Stream) -> Result<Self> {
        let place = |host, placement: &Placement| Dense::new(host, placement, stream);
        let (a, plain) = (data.matrix(stream)?, Placement::default());
        let inputs = Inputs {
            index: call.transposed.then(|| BsrTranspose::new(&a, stream)).transpose()?,
            a,
            b: place(&data.b, &call.placements[0])?,
            bias: data.bias.as_ref().map(|bias| place(bias, &plain)).transpose()?,
            workspace: Some(BsrWorkspace::new(stream)?),
        };
        let m = data.shape[usize::from(call.transposed)];
        let n = data.b.shape().get(1).copied().unwrap_or(0);
        let placed_c = call.placements[1].place(&[m, n]);
        let c = match &data.c {
            Some(c) if call.beta != 0.0 => placed_c.upload(c, stream)?,
            _ => Tensor::empty(stream, call.c_dtype, &placed_c.physical)?,
        };
        let mut operands = Self { call, data, inputs, c, placed_c, prepared: None };
        operands.problem(None)?;
        Ok(operands)
    }

    /// The same with another workspace, or none.
    #[must_use]
    pub fn with_workspace(mut self, workspace: Option<BsrWorkspace>) -> Self {
        self.inputs.workspace = workspace;
        self
    }

    /// The library's call.
    ///
    /// # Errors
    /// None for operands that [`new`](Self::new) has made.
    pub fn product(&self) -> Result<BsrMatmul<'_>> {
        self.inputs.product(&self.call, &self.data)
    }

    /// Writes the values of A once more: kernels may read values ahead only as long as they are
    /// those that came with the matrix.
    ///
    /// # Errors
    /// If there is not enough memory, or the device fails.
    pub fn rewrite_values(&mut self, stream: &Stream) -> Result<()> {
        let values = self.data.values.upload(&Device::cpu().stream()?)?;
        Ok(self.inputs.a.set_values(&values, stream)?)
    }

    /// Replaces B, whose memory on a GPU stays where it is, as a replayed graph needs it.
    ///
    /// # Errors
    /// If B has another type or shape, or the device fails.
    pub fn set_b(&mut self, b: Array, stream: &Stream) -> Result<()> {
        self.inputs.b.refill(&b, stream)?;
        self.data.b = b;
        Ok(())
    }

    /// C in memory, gaps included.
    pub fn c(&self) -> &Tensor {
        &self.c
    }

    fn call(&mut self, _: Option<&Kernel>) -> Result<(BsrMatmul<'_>, ViewMut<'_>)> {
        let c = self.placed_c.view_mut(&mut self.c)?;
        Ok((self.inputs.product(&self.call, &self.data)?, c))
    }

    /// The call as plain numbers, whichever kernel computes it.
    ///
    /// # Errors
    /// None for operands that [`new`](Self::new) has made.
    pub fn problem(&mut self, _: Option<&Kernel>) -> Result<BsrProblem> {
        let (call, c) = self.call(None)?;
        Ok(call.problem(&c)?)
    }
}

impl Operands for BsrOperands {
    fn inputs(&self) -> Vec<TensorInfo> {
        let (BsrData { shape, values, b, .. }, c) = (&self.data, &self.placed_c);
        vec![
            ("a", shape.to_vec(), values.dtype()),
            ("b", b.shape().to_vec(), b.dtype()),
            ("c", c.shape().to_vec(), self.call.c_dtype),
        ]
    }

    fn details(&mut self) -> Result<Vec<(&'static str, String)>> {
        let (problem, density) = (self.problem(None)?, self.inputs.a.density());
        let (stored, size) = (count(problem.nnz_blocks as u64), problem.block_size);
        let blocks = format!("{stored} of {size} x {size}, density {density:.4}");
        let a = if problem.a_transposed { "Aᵀ" } else { "A" };
        let mut formula = format!("{}{a}·B", factor(problem.alpha));
        if problem.beta != 0.0 {
            formula += &format!(" + {}C", factor(problem.beta));
        }
        formula += match problem.bias {
            BiasKind::None => "",
            BiasKind::PerRow => " + bias per row",
            BiasKind::PerColumn => " + bias per column",
        };
        if let Some(name) = match problem.activation {
            Activation::Relu => Some("relu"),
            Activation::Gelu => Some("gelu"),
            Activation::Silu => Some("silu"),
            _ => None,
        } {
            formula = format!("{name}({formula})");
        }
        Ok(vec![("blocks", blocks), ("formula", formula)])
    }

    fn flops(&mut self) -> Result<f64> {
        Ok(bsr_flops(&self.problem(None)?) as f64)
    }

    launched!(bsr_matmul::accepts);

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        vec![("c", &mut self.c)]
    }

    /// With beta, C is the previous one.
    fn reset(&mut self, _kernel: Option<&Kernel>, stream: &Stream) -> Result<()> {
        let previous = self.data.c.as_ref().filter(|_| self.call.beta != 0.0);
        reset(&mut self.c, previous, &self.placed_c, stream)
    }

    /// Row-major without gaps, whatever the layout of C is.
    fn results(
        &mut self,
        _kernel: Option<&Kernel>,
        stream: &Stream,
    ) -> Result<Vec<(&'static str, Array)>> {
        Ok(vec![("c", Array::download(&self.c, stream)?.taken(&self.placed_c))])
    }

    fn compare(
        &self,
        results: &[Array],
        seed: u64,
        progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let (BsrData { b, c, bias, .. }, call) = (&self.data, &self.call);
        let (row_ptr, col_idx, values) = match call.transposed {
            true => {
                let (row_ptr, col_idx, values) = self.data.transposed()?;
                (Cow::Owned(row_ptr), Cow::Owned(col_idx), Cow::Owned(values))
            }
            false => {
                let BsrData { row_ptr, col_idx, values, .. } = &self.data;
                (Cow::Borrowed(row_ptr), Cow::Borrowed(col_idx), Cow::Borrowed(values))
            }
        };
        let bias = |kind| bias.as_ref().filter(|_| call.bias == kind).map(|bias| bias as _);
        let activation = oracle_activation(call.activation).ok_or_else(|| {
            Error::Option(format!("there is no reference for {:?}", call.activation))
        })?;
        let case = BsrCase {
            row_ptr: &row_ptr,
            col_idx: &col_idx,
            values: &*values,
            b,
            c: c.as_ref().map(|c| c as _),
            alpha: call.alpha,
            beta: call.beta,
            bias_per_row: bias(BiasKind::PerRow),
            bias_per_column: bias(BiasKind::PerColumn),
            activation,
        };
        results.iter().map(|c| Ok(oracle::bsr_matmul(&case, c, seed, progress)?)).collect()
    }
}
