use super::backward;
use super::candle_core::backend::BackendStorage;
use super::candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail,
};
use super::error::refused;
use super::memory::{Operand, Place, Source, tensor};
use super::options::{Options, SCALES};
use blockflash_ops::{BlockMask, DType, Mask, Scores};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use super::candle_core::CudaStorage;

/// A call of attention, `softmax(mask(q·kᵀ · scale))·v`. Fields left at their default do nothing:
///
/// ```
/// # use blockflash_candle::{Attention, Mask};
/// # use candle_core::{Device, Tensor};
/// # let q = Tensor::randn(0f32, 1., (1, 50, 8, 64), &Device::Cpu)?;
/// # let k = Tensor::randn(0f32, 1., (1, 50, 2, 64), &Device::Cpu)?;
/// # let v = k.clone();
/// let attention = Attention { scores: Mask::causal().into(), ..Attention::new(&q, &k, &v) };
/// let (o, lse) = attention.forward_with_lse()?;
/// assert_eq!((o.dims(), lse.dims()), (&[1, 50, 8, 64][..], &[1, 8, 50][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Tensors are `[batch, seqlen, num_heads, head_dim]` with any strides but a contiguous `head_dim`;
/// with [`cu_seqlens`](Self::cu_seqlens) they are packed, `[total rows, num_heads, head_dim]`. The
/// number of heads of q is a multiple of that of k and v. A GPU takes f16 and bf16 and a `head_dim`
/// of a multiple of 8 up to 512, at addresses and strides of multiples of 16 bytes; the CPU takes
/// f32, too, and any of these. q, k and v may be `F8E4M3`, on GPUs of Hopper with a `head_dim` of a
/// multiple of 16: see [`Scales`]. [`blockflash_ops::Attention`] says what is
/// promised about precision, NaN and queries that attend nothing.
///
/// Gradients of q, k, v and the bias are computed by candle's `backward`; on a GPU a block mask
/// needs its [transpose](BlockMask::with_transpose) for that.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Queries.
    pub q: &'a Tensor,
    /// Keys.
    pub k: &'a Tensor,
    /// Values, in the shape of the keys but for their own `head_dim`, which is that of the output.
    pub v: &'a Tensor,
    /// What happens to a score. The gradient of a bias has its shape: it is summed over the axes
    /// along which it is broadcast. Sinks and slopes of ALiBi have none: one that needs it is an
    /// error.
    pub scores: Scores<&'a Tensor>,
    /// Makes the batch variable-length.
    pub cu_seqlens: Option<Packed<'a>>,
    /// Which blocks of queries × keys are visited, on the device of q: see [`super::to_device`].
    /// Under `cu_seqlens` it is packed.
    pub block_mask: Option<&'a Arc<BlockMask>>,
    /// Only for q, k and v of `F8E4M3`, whose output is bf16 and which have no gradient: what their
    /// codes are multiplied with.
    pub scales: Scales<'a>,
}

/// Scales of queries, keys and values: f32 `[1]` or `[batch, num_heads]`, where an extent may be 1,
/// and 1 where there is none; see [`blockflash_ops::OperandScales`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Scales<'a> {
    /// Of the queries, for their heads or those of the keys.
    pub q: Option<&'a Tensor>,
    /// Of the keys.
    pub k: Option<&'a Tensor>,
    /// Of the values.
    pub v: Option<&'a Tensor>,
}

/// Where the sequences of a variable-length batch are in packed tensors: see
/// [`blockflash_ops::CuSeqlens`].
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// u32 or i32 `[batch + 1]`: offsets of the queries.
    pub q: &'a Tensor,
    /// u32 or i32 `[batch + 1]`: offsets of the keys and values.
    pub kv: &'a Tensor,
    /// Upper bound on the queries of a sequence.
    pub max_seqlen_q: usize,
    /// Upper bound on the keys of a sequence.
    pub max_seqlen_kv: usize,
}

impl<'a> Attention<'a> {
    /// Full attention with the default scale.
    pub const fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        let (scores, scales) = (Scores::of(Mask::Full), Scales { q: None, k: None, v: None });
        Self { q, k, v, scores, cu_seqlens: None, block_mask: None, scales }
    }

    /// The output, in the shape of q with the `head_dim` of v, in the element type of q, or in bf16
    /// for `F8E4M3`. Packed rows that belong to no sequence are 0.
    ///
    /// # Errors
    /// Those of [`blockflash_ops::Attention::forward`], as text; options whose tensors need a
    /// gradient.
    pub fn forward(&self) -> Result<Tensor> {
        Ok(self.run(false)?.0)
    }

    /// The output, and the natural logarithm of the sum of exponentials of each row's scores: f32
    /// `[batch, num_heads_q, seqlen_q]`, or packed `[num_heads_q, total_q]`; −∞ for a row that
    /// attends nothing. The latter has no gradient: `backward` of what depends on it is an error.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with_lse(&self) -> Result<(Tensor, Tensor)> {
        match self.run(true)? {
            (o, Some(lse)) if o.track_op() => {
                let lse = o.apply_op1(LseOf(lse))?;
                Ok((o, lse))
            }
            (o, Some(lse)) => Ok((o, lse)),
            (_, None) => bail!("attention left no log-sum-exp"),
        }
    }

    fn run(&self, with_lse: bool) -> Result<(Tensor, Option<Tensor>)> {
        let mut tracked = self.scores.tensors().filter(|(_, tensor)| tensor.track_op());
        if let Some((name, _)) = tracked.find(|&(name, _)| name != "bias") {
            bail!("the {name} of attention has no gradient: detach it");
        }
        let of_codes = SCALES
            .into_iter()
            .zip(self.scales())
            .find(|(_, scale)| scale.is_some_and(Tensor::track_op));
        if let Some((name, _)) = of_codes {
            bail!("the {name} of attention have no gradient: detach them");
        }
        let qkv = [self.q, self.k, self.v];
        let bias = self.scores.bias.filter(|bias| bias.track_op());
        let tracked = bias.is_some() || qkv.iter().any(|tensor| tensor.track_op());
        let lse = (with_lse || tracked).then(|| Arc::new(OnceLock::new()));
        let (options, ahead) = (self.options(), Arc::new(Ahead::default()));
        let call = Call { options: options.clone(), lse: lse.clone(), ahead: ahead.clone() };
        let mut o = self.q.apply_op3(self.k, self.v, call)?;
        if let (Some(bias), Some(lse)) = (bias, &lse) {
            let qkv = qkv.map(Tensor::clone);
            o = o.apply_op2(bias, OfBias { options, qkv, lse: lse.clone(), ahead })?;
        }
        Ok((o, lse.and_then(|lse| lse.get().cloned())))
    }

    fn options(&self) -> Options {
        let packed = |packed: Packed<'_>| {
            let Packed { q, kv, max_seqlen_q, max_seqlen_kv } = packed;
            ([q.clone(), kv.clone()], [max_seqlen_q, max_seqlen_kv])
        };
        Options {
            scores: self.scores.map(Tensor::clone),
            cu_seqlens: self.cu_seqlens.map(packed),
            block_mask: self.block_mask.cloned(),
            scales: self.scales().map(Option::<&Tensor>::cloned),
        }
    }

    const fn scales(&self) -> [Option<&'a Tensor>; 3] {
        [self.scales.q, self.scales.k, self.scales.v]
    }
}

/// A node of candle's graph.
struct Call {
    options: Options,
    /// Where the log-sum-exp goes; `None` does not compute it.
    lse: Option<Arc<OnceLock<Tensor>>>,
    ahead: Arc<Ahead>,
}

/// Gradients of q, k and v that the node of the bias has computed together with its own, and the
/// thread that did: `backward` visits that node first. Another thread that differentiates the same
/// graph has another gradient of the output, so it must not take them.
#[derive(Default)]
struct Ahead(Mutex<Option<(ThreadId, [Tensor; 3])>>);

impl Ahead {
    fn put(&self, gradients: [Tensor; 3]) {
        if let Ok(mut place) = self.0.lock() {
            *place = Some((thread::current().id(), gradients));
        }
    }

    fn take(&self) -> Option<[Tensor; 3]> {
        let own = |(thread, _): &mut (ThreadId, _)| *thread == thread::current().id();
        Some(self.0.lock().ok()?.take_if(own)?.1)
    }
}

impl Call {
    fn forward(&self, [q, k, v]: [Operand<'_>; 3]) -> Result<(Storage, Shape)> {
        let place = Place::of_source(q.source)?;
        let [mut of_q, mut of_k, mut of_v] = [const { Vec::new() }; 3];
        let q = place.read_cached(&q, &mut of_q)?;
        let (k, v) = (place.read_cached(&k, &mut of_k)?, place.read_cached(&v, &mut of_v)?);
        self.options.with_views(&place, [&q, &k, &v], |attention| {
            let problem = attention.problem().map_err(refused)?;
            let zeroed = self.options.is_packed();
            let (o_shape, lse_shape) = (problem.o_shape(), problem.lse_shape());
            let mut o = place.allocate(problem.types.o, &o_shape, zeroed)?;
            let new_lse = |_| place.allocate(DType::F32, &lse_shape, zeroed);
            let mut lse = self.lse.as_ref().map(new_lse).transpose()?;
            {
                let mut o = place.write(&mut o, &o_shape)?;
                let lse = lse.as_mut().map(|lse| place.write(lse, &lse_shape));
                let mut lse = lse.transpose()?;
                let lse = lse.as_mut().map(|lse| lse.view.reborrow());
                place.run(|stream| attention.forward_into(o.view.reborrow(), lse, stream))?;
            }
            if let (Some(cell), Some(lse)) = (&self.lse, lse) {
                // Nobody else sets it: a node is computed once.
                let _ = cell.set(tensor(lse, &lse_shape));
            }
            Ok((o, Shape::from(o_shape)))
        })
    }
}

impl CustomOp3 for Call {
    fn name(&self) -> &'static str {
        "blockflash-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let operands = [("q", q, q_layout), ("k", k, k_layout), ("v", v, v_layout)];
        let operands = operands.map(|(what, storage, layout)| Operand {
            what,
            source: Source::Cpu(storage),
            layout,
        });
        match self.forward(operands)? {
            (Storage::Cpu(o), shape) => Ok((o, shape)),
            _ => bail!("a result that is not on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let operands = [("q", q, q_layout), ("k", k, k_layout), ("v", v, v_layout)];
        let operands = operands.map(|(what, storage, layout)| Operand {
            what,
            source: Source::Cuda(storage),
            layout,
        });
        match self.forward(operands)? {
            (Storage::Cuda(o), shape) => Ok((o, shape)),
            _ => bail!("a result that is not on a GPU"),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(lse) = self.lse.as_ref().and_then(|lse| lse.get()) else {
            bail!("attention was computed without its log-sum-exp");
        };
        let [dq, dk, dv] = match self.ahead.take() {
            Some(gradients) => gradients,
            None => backward::gradients(&self.options, [q, k, v], [o, lse, d_o], None)?.0,
        };
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// The output again, as a node that has the bias: nodes of candle have up to three tensors.
struct OfBias {
    options: Options,
    qkv: [Tensor; 3],
    lse: Arc<OnceLock<Tensor>>,
    ahead: Arc<Ahead>,
}

impl CustomOp2 for OfBias {
    fn name(&self) -> &'static str {
        "blockflash-attention-bias"
    }

    fn cpu_fwd(
        &self,
        o: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((o.try_clone(layout)?, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        o: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Ok((o.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(
        &self,
        o: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(lse) = self.lse.get() else {
            bail!("attention was computed without its log-sum-exp");
        };
        let qkv = self.qkv.each_ref();
        let (gradients, dbias) =
            backward::gradients(&self.options, qkv, [o, lse, d_o], Some(bias))?;
        if qkv.iter().any(|tensor| tensor.track_op()) {
            self.ahead.put(gradients);
        }
        Ok((Some(d_o.clone()), dbias))
    }
}

/// The log-sum-exp as a node of candle's graph, so that no gradient is lost: it has none.
struct LseOf(Tensor);

impl CustomOp1 for LseOf {
    fn name(&self) -> &'static str {
        "blockflash-attention-lse"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let (storage, layout) = self.0.storage_and_layout();
        match &*storage {
            Storage::Cpu(lse) => Ok((lse.try_clone(layout)?, self.0.shape().clone())),
            _ => bail!("a log-sum-exp that is not on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let (storage, layout) = self.0.storage_and_layout();
        match &*storage {
            Storage::Cuda(lse) => Ok((lse.try_clone(layout)?, self.0.shape().clone())),
            _ => bail!("a log-sum-exp that is not on a GPU"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        bail!("the log-sum-exp of attention has no gradient: detach it")
    }
}
