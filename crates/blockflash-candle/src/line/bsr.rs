use super::candle_core::{
    CpuStorage, CustomOp2, Layout, Module, Result, Shape, Storage, Tensor, bail,
};
use super::memory::{Operand, Place, Source, dtype_of, tensor};
use blockflash_ops::{
    Activation, Bias, BsrMatmul, BsrPattern, BsrSddmm, BsrTranspose, BsrView, Stream,
};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use super::candle_core::CudaStorage;

/// A linear layer with block-sparse weights, `y = activation(x·Wᵀ + bias)`.
///
/// ```
/// # use blockflash_candle::{BsrLinear, BsrPattern};
/// # use candle_core::{Device, Module, Tensor};
/// # let device = Device::Cpu;
/// // 64 outputs and 32 inputs, of whose 4 × 2 blocks of 16 two are stored.
/// let pattern = BsrPattern::from_blocks(64, 32, 16, &[(0, 1), (3, 0)])?;
/// let values = Tensor::randn(0f32, 1., (2, 16, 16), &device)?;
/// let layer = BsrLinear::new(pattern, values)?;
/// let y = layer.forward(&Tensor::randn(0f32, 1., (5, 7, 32), &device)?)?;
/// assert_eq!(y.dims(), [5, 7, 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The weights are candle's tensor, so an optimizer of candle's trains them when they are a `Var`.
/// Sums are f32. A GPU takes f16 and bf16.
#[derive(Clone, Debug)]
pub struct BsrLinear {
    weights: Arc<Weights>,
    values: Tensor,
    bias: Option<Tensor>,
    activation: Activation,
}

/// A pattern with what is made of it once.
#[derive(Debug)]
struct Weights {
    pattern: BsrPattern,
    transpose: OnceLock<BsrTranspose>,
}

impl BsrLinear {
    /// Weights `[outputs, inputs]` of this pattern, whose stored blocks are `values`
    /// `[blocks, block_size, block_size]` in the order of the pattern, without bias and activation.
    /// The pattern is copied to the device of the values.
    ///
    /// # Errors
    /// Outputs or inputs that are no multiple of the block size, since values of candle may change
    /// where they have to be zero; out of memory.
    pub fn new(pattern: BsrPattern, values: Tensor) -> Result<Self> {
        if pattern.has_edge_blocks() {
            bail!(
                "a block of the pattern reaches beyond the weights: they are {} x {}, expected \
                 multiples of the block size {}",
                pattern.rows(),
                pattern.cols(),
                pattern.block_size()
            );
        }
        let pattern = Place::of(values.device())?.run(|stream| pattern.to(stream))?;
        let weights = Arc::new(Weights { pattern, transpose: OnceLock::new() });
        Ok(Self { weights, values, bias: None, activation: Activation::None })
    }

    /// The layer with a bias, `[outputs]` in the type of the weights.
    pub fn with_bias(self, bias: Tensor) -> Self {
        Self { bias: Some(bias), ..self }
    }

    /// The layer with an activation, which is applied last. [`Activation::Gelu`] is the exact one.
    pub fn with_activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// The stored blocks.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Where they stand.
    pub fn pattern(&self) -> &BsrPattern {
        &self.weights.pattern
    }
}

impl Module for BsrLinear {
    /// From `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some((&inputs, outer)) = x.dims().split_last() else {
            bail!("x has shape [], expected [.., inputs]");
        };
        let (tokens, mut shape) = (outer.iter().product::<usize>(), outer.to_vec());
        shape.push(self.weights.pattern.rows());
        let x = x.reshape((tokens, inputs))?;
        let bias = self.bias.as_ref();
        let tracked = [&x, &self.values].into_iter().chain(bias).any(|tensor| tensor.track_op());
        let mut call = Call {
            weights: Arc::clone(&self.weights),
            bias: bias.cloned(),
            activation: self.activation,
        };
        if !tracked {
            return x.apply_op2_no_bwd(&self.values, &call)?.reshape(shape);
        }
        // candle differentiates bias and activation.
        (call.bias, call.activation) = (None, Activation::None);
        let mut y = x.apply_op2(&self.values, call)?;
        if let Some(bias) = bias {
            y = y.broadcast_add(bias)?;
        }
        let y = match self.activation {
            Activation::None => y,
            Activation::Relu => y.relu()?,
            Activation::Gelu => y.gelu_erf()?,
            Activation::Silu => y.silu()?,
            activation => bail!("activation is {activation:?}, which has no gradient"),
        };
        y.reshape(shape)
    }
}

/// A node of candle's graph.
struct Call {
    weights: Arc<Weights>,
    bias: Option<Tensor>,
    activation: Activation,
}

impl Call {
    fn forward(&self, [x, values]: [Operand<'_>; 2]) -> Result<(Storage, Shape)> {
        let place = Place::of_source(x.source)?;
        place.keep(&self.weights);
        let shape = [x.layout.shape().dims2()?.0, self.weights.pattern.rows()];
        let mut y = place.allocate(dtype_of("x", x.dtype())?, &shape, false)?;
        let (x, values) = (place.read(&x)?, place.read(&values)?);
        let bias = self.bias.as_ref().map(|bias| bias.storage_and_layout());
        let bias = bias.as_ref().map(|bias| place.read(&Operand::of("bias", bias)?)).transpose()?;
        {
            let mut y = place.write(&mut y, &shape)?;
            place.run(|stream| {
                let weights = BsrView::new(&self.weights.pattern, values.view)?;
                let bias = bias.as_ref().map_or(Bias::None, |bias| Bias::PerRow(bias.view));
                let linear = BsrMatmul::linear(x.view, weights)?;
                BsrMatmul { bias, activation: self.activation, ..linear }
                    .matmul_into(y.view.reborrow().permute(&[1, 0])?, stream)
            })?;
        }
        Ok((y, shape.as_slice().into()))
    }

    /// The gradients of x and of the values.
    fn gradients(&self, x: &Tensor, values: &Tensor, d_y: &Tensor) -> Result<[Tensor; 2]> {
        let d_y = d_y.contiguous()?;
        let place = Place::of(x.device())?;
        place.keep(&self.weights);
        let dtype = dtype_of("x", x.dtype())?;
        let mut d_x = place.allocate(dtype, x.dims(), false)?;
        let mut d_values = place.allocate(dtype, values.dims(), false)?;
        let locked = [x, values, &d_y].map(|tensor| tensor.storage_and_layout());
        let read = |what, at: usize| place.read(&Operand::of(what, &locked[at])?);
        let (x_read, values_read) = (read("x", 0)?, read("values", 1)?);
        let d_y = read("the gradient of y", 2)?;
        {
            let mut d_x = place.write(&mut d_x, x.dims())?;
            let mut d_values = place.write(&mut d_values, values.dims())?;
            place.run(|stream| {
                let pattern = &self.weights.pattern;
                let weights = BsrView::new(pattern, values_read.view)?;
                let index = self.weights.transpose(stream)?;
                BsrMatmul::dense_sparse(d_y.view, weights, index)?
                    .matmul_into(d_x.view.reborrow().permute(&[1, 0])?, stream)?;
                BsrSddmm::new(pattern, d_y.view.permute(&[1, 0])?, x_read.view)
                    .sddmm_into(d_values.view.reborrow(), stream)
            })?;
        }
        Ok([tensor(d_x, x.dims()), tensor(d_values, values.dims())])
    }
}

impl Weights {
    fn transpose(&self, stream: &Stream) -> blockflash_ops::Result<&BsrTranspose> {
        if let Some(transpose) = self.transpose.get() {
            return Ok(transpose);
        }
        let transpose = BsrTranspose::new(&self.pattern, stream)?;
        Ok(self.transpose.get_or_init(|| transpose))
    }
}

impl CustomOp2 for Call {
    fn name(&self) -> &'static str {
        "blockflash-bsr-linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [("x", x, x_layout), ("values", values, values_layout)];
        let operands = operands.map(|(what, storage, layout)| Operand {
            what,
            source: Source::Cpu(storage),
            layout,
        });
        match self.forward(operands)? {
            (Storage::Cpu(y), shape) => Ok((y, shape)),
            _ => bail!("a result that is not on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        values: &CudaStorage,
        values_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [("x", x, x_layout), ("values", values, values_layout)];
        let operands = operands.map(|(what, storage, layout)| Operand {
            what,
            source: Source::Cuda(storage),
            layout,
        });
        match self.forward(operands)? {
            (Storage::Cuda(y), shape) => Ok((y, shape)),
            _ => bail!("a result that is not on a GPU"),
        }
    }

    fn bwd(
        &self,
        x: &Tensor,
        values: &Tensor,
        _y: &Tensor,
        d_y: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [d_x, d_values] = self.gradients(x, values, d_y)?;
        Ok((Some(d_x), Some(d_values)))
    }
}
