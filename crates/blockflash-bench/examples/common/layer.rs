//! A linear layer with block-sparse weights: the three products of training, and a step of an
//! optimizer.
//!
//! The products take weights in the compute type. The sum of small steps needs more digits than
//! bf16 has, so a master copy of the weights is kept in f32. Here this copy lies in host memory and
//! is rounded into the matrix after each step. That is simple but slow on a GPU, where an optimizer
//! would run on the device and write through `BsrMatrix::values_mut`.
#![allow(dead_code)] // Not every example calls everything.

use super::sparsity::Sparsity;
use blockflash_bench::io::{Array, Scalar};
use blockflash_bench::{Error, Result};
use blockflash_ops::{Activation, BsrMatmul, BsrMatrix, BsrSddmm, BsrTranspose, BsrWorkspace};
use blockflash_ops::{DType, Device, Stream, Tensor, View, ViewMut};
use half::{bf16, f16};
use rayon::prelude::*;

/// Weights and their gradient.
pub struct Layer {
    weights: BsrMatrix,
    index: BsrTranspose,
    /// Shape f32 `[blocks, block_size, block_size]`, also for the next field.
    gradient: Tensor,
    exact: Vec<f32>,
    workspace: BsrWorkspace,
}

impl Layer {
    /// Draws weights ~ N(0, gain / inputs of an output) on the device of the stream.
    ///
    /// # Errors
    /// Too little memory, or a device that fails.
    pub fn new(
        sparsity: &Sparsity,
        gain: f32,
        seed: u64,
        dtype: DType,
        stream: &Stream,
    ) -> Result<Self> {
        let Sparsity { outputs, inputs, block_size, ref blocks, .. } = *sparsity;
        let exact = sparsity.values(gain, seed);
        let weights = BsrMatrix::from_blocks(outputs, inputs, block_size, dtype, blocks, &exact)?;
        let weights = weights.to(stream)?;
        Ok(Self {
            index: BsrTranspose::new(&weights, stream)?,
            gradient: Tensor::zeros(stream, DType::F32, weights.values().shape())?,
            exact,
            weights,
            workspace: BsrWorkspace::new(stream)?,
        })
    }

    /// `y = activation(x·Wᵀ)`: x `[samples, inputs]`, y `[samples, outputs]`.
    ///
    /// # Errors
    /// An x that is not a matrix; the next two functions fail likewise.
    pub fn forward<'a>(&'a self, x: View<'a>, activation: Activation) -> Result<BsrMatmul<'a>> {
        let workspace = Some(&self.workspace);
        Ok(BsrMatmul { activation, workspace, ..BsrMatmul::linear(x, &self.weights)? })
    }

    /// `dx = dy·W`: propagates the gradient of y back to x.
    pub fn backward<'a>(&'a self, dy: View<'a>) -> Result<BsrMatmul<'a>> {
        let workspace = Some(&self.workspace);
        Ok(BsrMatmul { workspace, ..BsrMatmul::dense_sparse(dy, &self.weights, &self.index)? })
    }

    /// `dW = dyᵀ·x / samples` at the stored blocks.
    pub fn weight_gradient<'a>(&'a self, dy: View<'a>, x: View<'a>) -> Result<BsrSddmm<'a>> {
        gradient_of(&self.weights, dy, x)
    }

    /// Computes the weight gradient.
    ///
    /// # Errors
    /// A device that has no such kernel or fails.
    pub fn find_gradient(&mut self, dy: View<'_>, x: View<'_>, stream: &Stream) -> Result<()> {
        Ok(gradient_of(&self.weights, dy, x)?.sddmm_into(self.gradient.view_mut(), stream)?)
    }

    /// The most recent gradient.
    ///
    /// # Errors
    /// A device that fails.
    pub fn gradient(&self, stream: &Stream) -> Result<Vec<f32>> {
        Ok(self.gradient.to_vec(stream)?)
    }

    /// One step of an optimizer: `rule` changes the weights (the f32 master copy) by the most
    /// recent gradient. Both have the order of [`Sparsity::values`].
    ///
    /// # Errors
    /// A device that fails.
    pub fn update(&mut self, stream: &Stream, rule: impl FnOnce(&mut [f32], &[f32])) -> Result<()> {
        let gradient = self.gradient(stream)?;
        rule(&mut self.exact, &gradient);
        self.round(stream)
    }

    /// The f32 master copy of the weights.
    pub fn weights(&self) -> &[f32] {
        &self.exact
    }

    /// Rounds the weights into the matrix; pattern and index stay.
    fn round(&mut self, stream: &Stream) -> Result<()> {
        let values = rounded(&self.exact, self.weights.values().shape(), self.weights.dtype())?;
        Ok(self.weights.set_values(&values.upload(&Device::cpu().stream()?)?, stream)?)
    }
}

fn gradient_of<'a>(weights: &'a BsrMatrix, dy: View<'a>, x: View<'a>) -> Result<BsrSddmm<'a>> {
    let alpha = 1.0 / x.shape()[0] as f32;
    Ok(BsrSddmm { alpha, ..BsrSddmm::new(weights, dy.permute(&[1, 0])?, x) })
}

/// Views a result `[samples, features]` as `[features, samples]`, the shape of C in the operation.
///
/// # Errors
/// If the tensor is not a matrix.
pub fn transposed(y: &mut Tensor) -> Result<ViewMut<'_>> {
    Ok(y.view_mut().permute(&[1, 0])?)
}

/// An array of this type.
///
/// # Errors
/// A type that is none of floating point, another number of values than the shape has.
pub fn rounded(values: &[f32], shape: &[usize], dtype: DType) -> Result<Array> {
    fn round<T: Scalar>(values: &[f32], shape: &[usize]) -> Option<Array> {
        let values = values.par_iter().with_min_len(1 << 14);
        Array::new(shape, values.map(|&value| T::from_f32(value)).collect())
    }
    let rounded = match dtype {
        DType::F16 => round::<f16>(values, shape),
        DType::BF16 => round::<bf16>(values, shape),
        DType::F32 => round::<f32>(values, shape),
        _ => {
            return Err(Error::Option(format!("a network does not compute in {dtype}")));
        }
    };
    rounded.ok_or_else(|| Error::Option(format!("{} values for {shape:?}", values.len())))
}
