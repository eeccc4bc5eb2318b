//! Attention: `o = softmax(mask(q·kᵀ · scale))·v` with the log-sum-exp of each row.

mod block_mask;
mod cost;
pub(crate) mod cpu;
mod flops;
mod head_dims;
mod mask;
mod operand_scales;
mod plan;
mod problem;
mod score_params;
mod scores;
mod select;
mod seqlens;

pub use block_mask::BlockMaskSizes;
pub use flops::{attention_flops, attention_varlen_flops};
pub use mask::{Align, MAX_SEQLEN, Mask};
pub use operand_scales::{OperandScales, OperandScalesProblem};
pub use plan::{AttentionPlan, plan};
pub use problem::{AttentionProblem, LseStrides, PackedRows, Strides};
pub use scores::{BiasProblem, Scores, ScoresProblem};
pub use select::{accepts, select};
pub use seqlens::CuSeqlens;

pub(crate) use head_dims::Rows;
pub(crate) use plan::{check_strides, check_strides_by, heads_per_section, scalars};
pub(crate) use problem::{row_strides, width_like};
pub(crate) use score_params::{score_params, window_params};
pub(crate) use select::{first_without_tensor_map, refusal_of_terms, support};
pub(crate) use seqlens::{check_maximum, check_offsets};

use operand_scales::HostScales;

use crate::check::{Operand, aligned};
use crate::operation::{Operation, Prepared, Steps};
use crate::{BlockMask, Result};
use blockflash_safe::{
    AttentionFwdOperands, CudaProperties, Device, Stream, Tensor, View, ViewMut,
};
use blockflash_sys::manifest::{
    AttentionFwd, AttentionFwdE4m3, AttentionFwdHopper, AttentionFwdSmall, AttentionFwdWide,
    Variant,
};
use blockflash_sys::{DType, Kernel};

/// A call of the attention forward pass. Fields left at their default do nothing:
///
/// ```
/// # use blockflash_ops::{Attention, Mask, Scores, View};
/// # use half::f16;
/// # let data = vec![f16::ONE; 128 * 64];
/// # let view = View::from_slice(&data, &[1, 128, 1, 64])?;
/// # let (q, k, v) = (view, view, view);
/// let causal = Attention { scores: Mask::causal().into(), ..Attention::new(q, k, v) };
/// let scores = Scores { softmax_scale: Some(0.25), ..causal.scores };
/// let scaled = Attention { scores, ..causal };
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// Tensors are `[batch, seqlen, num_heads, head_dim]` with any strides but a contiguous `head_dim`,
/// so a `[batch, num_heads, seqlen, head_dim]` tensor is passed as a permuted view. With
/// [`cu_seqlens`](Self::cu_seqlens) they are packed, `[total rows, num_heads, head_dim]`.
/// `num_heads_q` is a multiple of `num_heads_kv` (GQA, MQA).
///
/// Statistics and accumulation are f32. On a GPU unnormalised outputs are summed in f32, too:
/// values of `v` in bf16 beyond about 2^90 may overflow to infinity there, values in f16 never do.
/// A masked pair contributes exactly nothing: NaN in a key or value that a query does not attend
/// never reaches its output. A GPU takes f16 and bf16 with a `head_dim` of any multiple of 8 up to
/// 512, and pointers and strides must be multiples of 16 bytes. The CPU also takes f32, any
/// `head_dim` and any alignment. For another `head_dim` below 512, pad q, k and v with zeros to the
/// next multiple of 8 to run on a GPU, and set `softmax_scale` to the scale of the unpadded
/// `head_dim`.
///
/// q, k and v may have 8 bits that [`scales`](Self::scales) turn into numbers. The CPU takes
/// `e4m3`, `e5m2` and `i8`: products are summed in f32 and multiplied with the scales then, and
/// probabilities are not rounded. Hopper takes `e4m3` with a `head_dim` of any multiple of 16 up to
/// 256, without bias, ALiBi and partial blocks, and writes f16 or bf16: probabilities are rounded
/// to `e4m3` relative to the largest one of 64 or 128 keys, and products with their values are
/// summed in f32 after each of these tiles, by tensor cores with 13 fraction bits within them. The
/// log-sum-exp is that of unrounded probabilities.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Queries, `[batch, seqlen_q, num_heads_q, head_dim]` or packed
    /// `[total_q, num_heads_q, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[batch, seqlen_kv, num_heads_kv, head_dim]` or packed
    /// `[total_kv, num_heads_kv, head_dim]`.
    pub k: View<'a>,
    /// Values, in the shape of the keys but for their own `head_dim`, which is that of the output.
    pub v: View<'a>,
    /// What happens to a score.
    pub scores: Scores<View<'a>>,
    /// Makes the batch variable-length.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// Makes attention block-sparse: a query attends a key if the block of the pair is visited and
    /// the mask of its [scores](Scores::mask) shows it, and so does the block where it is partial,
    /// which only the CPU takes so far. Blocks that are not visited cost nothing. The mask has the
    /// sequence lengths of the tensors. It has 1 batch entry or as many as q, and 1 head,
    /// `num_heads_kv` heads (each for the query heads of its group) or `num_heads_q` heads. With
    /// `cu_seqlens` it is [packed](BlockMask::packed) from masks of the same sequences.
    pub block_mask: Option<&'a BlockMask>,
    /// Only for q, k and v of 8 bits: what their codes stand for.
    pub scales: OperandScales<'a>,
    /// Element type of the output: f16, bf16 or f32. `None` is that of q, and bf16 for codes. A GPU
    /// takes another one than that of q for codes only.
    pub o_dtype: Option<DType>,
}

/// The outputs of [`Attention::forward`].
#[derive(Debug)]
pub struct AttentionOutput {
    /// Output in the shape of q with the head_dim of v, in the element type that
    /// [`Attention::o_dtype`] says, contiguous.
    pub o: Tensor,
    /// Natural logarithm of the sum of exponentials of each row's scores, f32
    /// `[batch, num_heads_q, seqlen_q]`, or `[num_heads_q, total_q]` when variable-length. −∞ for a
    /// row that attends nothing.
    pub lse: Tensor,
}

/// See [`Operation::prepare`].
pub type PreparedAttention = Prepared<AttentionProblem>;

impl<'a> Attention<'a> {
    /// Full attention with the default scale.
    pub const fn new(q: View<'a>, k: View<'a>, v: View<'a>) -> Self {
        let scores = Scores::of(Mask::Full);
        let (cu_seqlens, block_mask, o_dtype) = (None, None, None);
        Self { q, k, v, scores, cu_seqlens, block_mask, scales: OperandScales::NONE, o_dtype }
    }

    /// Computes into the caller's tensors. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call. On the CPU it returns when the result is
    /// there.
    ///
    /// `o` has the shape of q with the `head_dim` of v and the element type that
    /// [`o_dtype`](Self::o_dtype) says, `lse` is f32 `[batch, num_heads_q, seqlen_q]` or
    /// `[num_heads_q, total_q]`. Both may be strided except in the last dimension. An output
    /// without elements is valid and launches nothing.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; `Error::DeviceMismatch` if an
    /// operand is not on the stream's device; `Error::Misaligned` for a pointer or stride that is
    /// no multiple of 16 bytes on a GPU.
    pub fn forward_into(
        &self,
        o: ViewMut<'_>,
        lse: Option<ViewMut<'_>>,
        stream: &Stream,
    ) -> Result<()> {
        self.run((o, lse), stream)
    }

    /// Allocates the outputs and computes them. In a variable-length batch, rows that belong to no
    /// sequence are 0.
    ///
    /// # Errors
    /// As [`forward_into`](Self::forward_into), and out of memory.
    pub fn forward(&self, stream: &Stream) -> Result<AttentionOutput> {
        let problem = self.problem()?;
        let mut o = allocate(&problem, problem.types.o, &problem.o_shape(), stream)?;
        let mut lse = allocate(&problem, DType::F32, &problem.lse_shape(), stream)?;
        self.forward_into(o.view_mut(), Some(lse.view_mut()), stream)?;
        Ok(AttentionOutput { o, lse })
    }

    /// Like [`forward`](Self::forward) without the log-sum-exp, which inference seldom needs. On
    /// Hopper this was measured to be 0.3 to 7 % faster.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_without_lse(&self, stream: &Stream) -> Result<Tensor> {
        let problem = self.problem()?;
        let mut o = allocate(&problem, problem.types.o, &problem.o_shape(), stream)?;
        self.forward_into(o.view_mut(), None, stream)?;
        Ok(o)
    }

    /// Downloads [`cu_seqlens`](Self::cu_seqlens), which synchronises the stream, and verifies them
    /// against the packed tensors and the sequences of [`block_mask`](Self::block_mask). `Ok` when
    /// the batch is not variable-length.
    ///
    /// # Errors
    /// `Error::InvalidCuSeqlens` names the first bad entry; all checks of
    /// [`problem`](Self::problem).
    pub fn check_cu_seqlens(&self, stream: &Stream) -> Result<()> {
        if let (Some(cu_seqlens), Some(packed)) = (&self.cu_seqlens, self.problem()?.packed) {
            cu_seqlens.read(stream, packed.total_q, packed.total_kv, self.block_mask)?;
        }
        Ok(())
    }

    /// Checks that every input is on this device.
    #[inline]
    pub(crate) fn inputs_on(&self, device: &Device) -> Result<()> {
        let inputs = [
            ("q", Some(&self.q)),
            ("k", Some(&self.k)),
            ("v", Some(&self.v)),
            ("cu_seqlens.q", self.cu_seqlens.as_ref().map(|cu_seqlens| &cu_seqlens.q)),
            ("cu_seqlens.kv", self.cu_seqlens.as_ref().map(|cu_seqlens| &cu_seqlens.kv)),
        ];
        for (what, view) in inputs {
            view.map_or(Ok(()), |view| Operand::new(what, view).on(device))?;
        }
        self.scores.on(device)?;
        self.scales.on(device)?;
        if let Some(block_mask) = self.block_mask {
            Operand::new("block_mask", &block_mask.row_ptr().view()).on(device)?;
        }
        Ok(())
    }
}

impl Steps for Attention<'_> {
    type Problem = AttentionProblem;
    type Plan = AttentionPlan;
    type Out<'o> = (ViewMut<'o>, Option<ViewMut<'o>>);

    fn is_empty(problem: &AttentionProblem) -> bool {
        problem.is_empty()
    }

    #[inline]
    fn checked(&self, (o, lse): &Self::Out<'_>, stream: &Stream) -> Result<AttentionProblem> {
        let problem = self.problem()?.with_outputs(o, lse.as_ref())?;
        let device = stream.device();
        self.inputs_on(device)?;
        Operand::of_mut("o", o).on(device)?;
        lse.as_ref().map_or(Ok(()), |lse| Operand::of_mut("lse", lse).on(device))?;
        Ok(problem)
    }

    fn has_data(problem: &AttentionProblem) -> bool {
        problem.packed.is_some() || problem.scales.is_some()
    }

    fn verify(&self, problem: &AttentionProblem, _: &Self::Out<'_>, stream: &Stream) -> Result<()> {
        self.check_cu_seqlens(stream)?;
        HostScales::new(self, problem, stream)?.verify(problem)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &AttentionProblem,
        gpu: &CudaProperties,
    ) -> Result<AttentionPlan> {
        plan::planned(kernel, problem, gpu)
    }

    fn launch(
        &self,
        kernel: &Kernel,
        plan: &AttentionPlan,
        _: &AttentionProblem,
        (o, lse): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        aligned("q", &self.q)?;
        aligned("k", &self.k)?;
        aligned("v", &self.v)?;
        aligned("o", &o.as_view())?;
        let operands = AttentionFwdOperands {
            q: self.q,
            k: self.k,
            v: self.v,
            o,
            lse,
            sink: self.scores.sink,
            cu_seqlens: self.cu_seqlens.map(|cu_seqlens| [cu_seqlens.q, cu_seqlens.kv]),
            block_mask: self.block_mask.map(BlockMask::for_kernels),
            terms: self.scores.terms(),
            scales: self.scales.tensors(),
        };
        let AttentionPlan { plan, config } = plan;
        match kernel.variant {
            Variant::AttentionFwdHopper(_) => {
                stream.launch::<AttentionFwdHopper>(kernel, config, plan, operands)?;
            }
            Variant::AttentionFwdSmall(_) => {
                stream.launch::<AttentionFwdSmall>(kernel, config, plan, operands)?;
            }
            Variant::AttentionFwdWide(_) => {
                stream.launch::<AttentionFwdWide>(kernel, config, plan, operands)?;
            }
            Variant::AttentionFwdE4m3(_) => {
                stream.launch::<AttentionFwdE4m3>(kernel, config, plan, operands)?;
            }
            _ => stream.launch::<AttentionFwd>(kernel, config, plan, operands)?,
        }
        Ok(())
    }

    fn compute(
        &self,
        problem: &AttentionProblem,
        (o, lse): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::forward(self, problem, o, lse, stream)
    }
}

/// An output of this shape, zeroed where some rows may belong to no sequence.
fn allocate(
    problem: &AttentionProblem,
    dtype: DType,
    shape: &[usize],
    stream: &Stream,
) -> Result<Tensor> {
    let tensor = if problem.packed.is_some() { Tensor::zeros } else { Tensor::empty };
    Ok(tensor(stream, dtype, shape)?)
}

/// For tests of single kernels: the problem in the form that a kernel with such tiles accepts.
#[cfg(test)]
fn as_asked(
    problem: AttentionProblem,
    tile: &blockflash_sys::manifest::AttentionTile,
) -> AttentionProblem {
    if tile.lse.suits(false) { problem } else { problem.with_lse() }
}
