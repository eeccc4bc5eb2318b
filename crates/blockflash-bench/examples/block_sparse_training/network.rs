//! Two layers, `y = W2·relu(W1·x)`, and their gradients.
//!
//! All products run on the device, with the activation fused into the first. The activation is ReLU
//! because its derivative follows from its output; other activations need the pre-activations,
//! which a fused activation does not store. The library has no kernels for the element-wise steps
//! (the error, the derivative of ReLU), so they run on the host.

use super::data::Batch;
use super::layer::{Layer, rounded, transposed};
use super::momentum::Momentum;
use super::sparsity::Sparsity;
use blockflash_bench::Result;
use blockflash_bench::io::Array;
use blockflash_bench::timing::{Cache, Repeat};
use blockflash_ops::{Activation, BsrMatmul, BsrSddmm, DType, Kernel, Operation, Stream, Tensor};
use blockflash_ops::{bsr_flops, bsr_sddmm_flops};
use serde::Serialize;

/// Both layers and their outputs for one batch.
pub struct Network {
    layers: [Layer; 2],
    momenta: [Momentum; 2],
    dtype: DType,
    stream: Stream,
    /// `[samples, hidden]`
    hidden: Tensor,
    /// f32 `[samples, outputs]`
    y: Tensor,
    /// The gradient of `hidden`.
    dhidden: Tensor,
}

/// One of the products of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Product {
    pub what: &'static str,
    pub flops: u64,
    /// Microseconds.
    pub us: f64,
    /// Name of the kernel; `None` on the CPU.
    pub kernel: Option<String>,
}

impl Network {
    /// A network for batches of `samples` samples, on the device of the stream. Weights are scaled
    /// so that outputs have a variance of about 1 if the inputs do.
    ///
    /// # Errors
    /// Too little memory, or a device that fails.
    pub fn new(
        sparsities: &[Sparsity; 2],
        samples: usize,
        seed: u64,
        dtype: DType,
        stream: &Stream,
    ) -> Result<Self> {
        let [first, second] = sparsities;
        let empty = |dtype, features| Tensor::empty(stream, dtype, &[samples, features]);
        Ok(Self {
            layers: [
                // ReLU halves the mean square.
                Layer::new(first, 2.0, seed ^ 1 << 40, dtype, stream)?,
                Layer::new(second, 1.0, seed ^ 2 << 40, dtype, stream)?,
            ],
            momenta: [Momentum::new(first), Momentum::new(second)],
            dtype,
            stream: stream.clone(),
            hidden: empty(dtype, first.outputs)?,
            y: empty(DType::F32, second.outputs)?,
            dhidden: empty(dtype, first.outputs)?,
        })
    }

    /// Both layers, for inspection and modification.
    pub fn layers(&mut self) -> &mut [Layer; 2] {
        &mut self.layers
    }

    /// y, `[samples, outputs]`.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn forward(&mut self, x: &Tensor) -> Result<Vec<f32>> {
        let Self { layers: [first, second], stream, hidden, y, .. } = self;
        first.forward(x.view(), Activation::Relu)?.matmul_into(transposed(hidden)?, stream)?;
        second.forward(hidden.view(), Activation::None)?.matmul_into(transposed(y)?, stream)?;
        Ok(y.to_vec(stream)?)
    }

    /// Half the squared error of a sample, on average.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn loss(&mut self, batch: &Batch) -> Result<f64> {
        let y = self.forward(&batch.x)?;
        Ok(batch.loss(&batch.errors(&y)))
    }

    /// Whether each pre-activation of the last batch was positive.
    ///
    /// # Errors
    /// A device that fails.
    pub fn active(&self) -> Result<Vec<bool>> {
        let hidden = Array::download(&self.hidden, &self.stream)?;
        Ok(hidden.to_f32(0..hidden.len()).into_iter().map(|value| value > 0.0).collect())
    }

    /// Returns the loss and leaves its gradient in the layers.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn find_gradients(&mut self, batch: &Batch) -> Result<f64> {
        let y = self.forward(&batch.x)?;
        let errors = batch.errors(&y);
        let Self { layers: [first, second], dtype, stream, hidden, y, dhidden, .. } = self;
        let dy = rounded(&errors, y.shape(), *dtype)?.upload(stream)?;
        second.find_gradient(dy.view(), hidden.view(), stream)?;
        second.backward(dy.view())?.matmul_into(transposed(dhidden)?, stream)?;
        let [hidden, mut gradient] =
            [Array::download(hidden, stream)?, Array::download(dhidden, stream)?]
                .map(|array| array.to_f32(0..array.len()));
        gradient
            .iter_mut()
            .zip(hidden)
            .filter(|&(_, hidden)| hidden <= 0.0)
            .for_each(|(value, _)| *value = 0.0);
        let dsums = rounded(&gradient, dhidden.shape(), *dtype)?.upload(stream)?;
        first.find_gradient(dsums.view(), batch.x.view(), stream)?;
        Ok(batch.loss(&errors))
    }

    /// One step of gradient descent.
    ///
    /// # Errors
    /// A device that fails.
    pub fn descend(&mut self, rate: f32, momentum: f32) -> Result<()> {
        let Self { layers, momenta, stream, .. } = self;
        let mut pairs = layers.iter_mut().zip(momenta);
        pairs.try_for_each(|(layer, state)| state.descend(layer, rate, momentum, stream))
    }

    /// Times the products of a step and names their kernels. It runs before training, so that a
    /// missing kernel is reported at once.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn products(&mut self, x: &Tensor) -> Result<Vec<Product>> {
        let Self { layers: [first, second], dtype, stream, hidden, y, dhidden, .. } = self;
        let dy = Tensor::zeros(stream, *dtype, y.shape())?;
        let matmul = |what, op: BsrMatmul<'_>, c: &mut Tensor| -> Result<Product> {
            let kernel = op.prepare(&transposed(c)?, stream)?.kernel().map(Kernel::symbol);
            let flops = bsr_flops(&op.problem(&transposed(c)?)?);
            let launch = |stream: &Stream| Ok(op.matmul_into(transposed(c)?, stream)?);
            let us = Repeat::new(stream, Cache::Warm, launch)?.launch_us();
            Ok(Product { what, flops, us, kernel })
        };
        let sddmm = |what, op: BsrSddmm<'_>| -> Result<Product> {
            let mut gradient = Tensor::zeros(stream, DType::F32, &op.pattern.values_shape())?;
            let kernel = op.prepare(&gradient.view_mut(), stream)?.kernel().map(Kernel::symbol);
            let flops = bsr_sddmm_flops(&op.problem(&gradient.view_mut())?);
            let launch = |stream: &Stream| Ok(op.sddmm_into(gradient.view_mut(), stream)?);
            let us = Repeat::new(stream, Cache::Warm, launch)?.launch_us();
            Ok(Product { what, flops, us, kernel })
        };
        Ok(vec![
            matmul("h = relu(x·W1ᵀ)", first.forward(x.view(), Activation::Relu)?, dhidden)?,
            matmul("y = h·W2ᵀ", second.forward(hidden.view(), Activation::None)?, y)?,
            sddmm("dW2 = dyᵀ·h", second.weight_gradient(dy.view(), hidden.view())?)?,
            matmul("dh = dy·W2", second.backward(dy.view())?, dhidden)?,
            sddmm("dW1 = dhᵀ·x", first.weight_gradient(hidden.view(), x.view())?)?,
        ])
    }
}
