use super::{AttentionBackward, AttentionGradientsMut};
use crate::attention::{AttentionProblem, BlockMaskSizes, Strides, row_strides};
use crate::check::{Operand, contiguous};
use crate::{BlockMask, Error, Result};
use blockflash_safe::ViewMut;
use blockflash_sys::manifest::AttentionBwdStep;
use blockflash_sys::{DType, ElementTypes, HeadDims};

/// A call of the backward pass reduced to plain numbers: what `select` and
/// [`workspace_bytes`](super::workspace_bytes) work on.
///
/// [`AttentionBackward::problem`] makes one from tensors, with all checks;
/// [`AttentionBackwardProblem::of`] makes one without tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionBackwardProblem {
    /// The forward pass, with its `o` and `lse`.
    pub forward: AttentionProblem,
    /// Strides of the gradient of o.
    pub d_o: Strides,
    /// Strides of the gradient of q.
    pub dq: Strides,
    /// Strides of the gradient of k.
    pub dk: Strides,
    /// Strides of the gradient of v.
    pub dv: Strides,
    /// Whether the gradient of the sink is asked for.
    pub d_sink: bool,
    /// The element type of the gradient of the bias, if it is asked for.
    pub dbias: Option<DType>,
    /// The sizes of the transpose of the block mask, whose rows are blocks of keys, if it has one.
    pub transpose: Option<BlockMaskSizes>,
    /// Bytes of workspace that are lent.
    pub workspace: usize,
    /// The step for which a kernel is selected.
    pub(super) step: AttentionBwdStep,
}

impl AttentionBackwardProblem {
    /// The gradients of a forward pass in contiguous tensors, with the transpose of a block mask
    /// and any workspace: the start of a plan without tensors. Not checked.
    pub fn of(forward: AttentionProblem) -> Self {
        let forward = if forward.lse.is_some() { forward } else { forward.with_lse() };
        let strides = |seqlen, heads, head_dim| {
            let dense = Strides::contiguous(seqlen, heads, head_dim);
            if forward.packed.is_some() { Strides { batch: 0, ..dense } } else { dense }
        };
        let of_q = |head_dim| strides(forward.seqlen_q, forward.num_heads_q, head_dim);
        let of_kv = |head_dim| strides(forward.seqlen_kv, forward.num_heads_kv, head_dim);
        let HeadDims { qk, v } = forward.head_dims;
        let (d_o, dq, dk, dv) = (of_q(v), of_q(qk), of_kv(qk), of_kv(v));
        let transpose = forward.block_mask.map(|mask| BlockMaskSizes {
            block_q: mask.block_kv,
            block_kv: mask.block_q,
            ..mask
        });
        let (d_sink, dbias) = (forward.scores.sink, forward.scores.bias.map(|bias| bias.dtype));
        let (workspace, step) = (usize::MAX, AttentionBwdStep::Keys);
        Self { forward, d_o, dq, dk, dv, d_sink, dbias, transpose, workspace, step }
    }

    /// Whether no gradient has an element. Without queries the gradients of keys are still to be
    /// written.
    pub fn is_empty(&self) -> bool {
        let empty = |shape: Vec<usize>| shape.contains(&0);
        let no_sink = !self.d_sink || self.forward.num_heads_q == 0;
        let no_bias = self.dbias.is_none() || empty(self.dbias_shape());
        empty(self.forward.q_shape()) && empty(self.forward.k_shape()) && no_sink && no_bias
    }

    /// The shape of the gradient of the bias, which is that of the bias; empty without one.
    pub fn dbias_shape(&self) -> Vec<usize> {
        self.forward.scores.bias.map_or(vec![], |bias| bias.shape(&self.forward).to_vec())
    }

    /// The same problem with a workspace of this many bytes.
    pub fn with_workspace(self, bytes: usize) -> Self {
        Self { workspace: bytes, ..self }
    }

    /// The same problem with these gradients, which are checked.
    pub fn with_gradients(self, gradients: &AttentionGradientsMut<'_>) -> Result<Self> {
        let AttentionGradientsMut { dq, dk, dv, d_sink, dbias } = gradients;
        let forward = self.forward;
        let ElementTypes { q, kv, .. } = forward.types;
        if let Some(d_sink) = d_sink {
            let found = d_sink.shape().to_vec();
            if !forward.scores.sink {
                let expected = "no gradient of a sink, as there is no sink".into();
                return Err(Error::Shape { what: "d_sink", expected, found });
            }
            contiguous("d_sink", &d_sink.as_view(), DType::F32, &[forward.num_heads_q])?;
        }
        if let Some(dbias) = dbias {
            let dbias = Operand::of_mut("dbias", dbias);
            let Some(bias) = forward.scores.bias else {
                return Err(dbias.wrong_shape("no gradient of a bias, as there is no bias"));
            };
            match bias.dtype {
                DType::F32 => dbias.dtype_in(&[DType::F32])?,
                dtype => dbias.dtype_in(&[dtype, DType::F32])?,
            }
            dbias.shape_is(&bias.shape(&forward))?;
        }
        Ok(Self {
            dq: row_strides(&Operand::of_mut("dq", dq), q, &forward.q_shape())?,
            dk: row_strides(&Operand::of_mut("dk", dk), kv, &forward.k_shape())?,
            dv: row_strides(&Operand::of_mut("dv", dv), kv, &forward.v_shape())?,
            d_sink: d_sink.is_some(),
            dbias: dbias.as_ref().map(ViewMut::dtype),
            ..self
        })
    }
}

impl AttentionBackward<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers:
    /// for contiguous gradients, also of the sink and of the bias if there is one, until
    /// `AttentionBackwardProblem::with_gradients` says otherwise.
    ///
    /// # Errors
    /// All checks of [`Attention::problem`](crate::Attention::problem); [`Error::Shape`],
    /// [`Error::DType`] and [`Error::Stride`] for `o`, `lse` and `d_o`.
    pub fn problem(&self) -> Result<AttentionBackwardProblem> {
        let forward = self.attention.problem()?;
        let ElementTypes { q, o: found, .. } = forward.types;
        if q.is_code() {
            let expected = "f16 or bf16 or f32, since codes have no gradients".into();
            return Err(Error::DType { what: "q", expected, found: q });
        }
        if found != q {
            let expected = format!("{q}, as q, since gradients are asked for");
            return Err(Error::DType { what: "o_dtype", expected, found });
        }
        let (shape, of_o) = (forward.o_shape(), forward.types.o);
        let o = row_strides(&Operand::new("o", &self.o), of_o, &shape)?;
        let lse = Some(forward.lse_strides(&Operand::new("lse", &self.lse))?);
        let d_o = row_strides(&Operand::new("d_o", &self.d_o), of_o, &shape)?;
        let forward = AttentionProblem { o, lse, ..forward };
        let transpose = self.attention.block_mask.and_then(BlockMask::transposed_sizes);
        Ok(AttentionBackwardProblem { d_o, transpose, ..AttentionBackwardProblem::of(forward) })
    }
}

#[cfg(test)]
#[path = "problem_tests.rs"]
mod tests;
