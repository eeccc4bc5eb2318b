//! Runs one call of a plan.

use crate::Result;
use crate::band::Part;
use crate::plan::Call;
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradientsMut, BlockMask, DType, Scores, Stream, Tensor,
    View, ViewMut,
};

impl Call {
    /// The call on the queries of the group and the keys of the step.
    pub(crate) fn of<'a>(
        &self,
        attention: &Attention<'a>,
        [q, k, v]: [View<'a>; 3],
    ) -> Result<Attention<'a>> {
        let keys = &self.part.keys;
        self.of_rows(attention, q, [k.slice(1, keys.clone())?, v.slice(1, keys.clone())?])
    }

    /// The same with the rows of keys that it attends.
    pub(crate) fn of_rows<'a>(
        &self,
        attention: &Attention<'a>,
        q: View<'a>,
        [k, v]: [View<'a>; 2],
    ) -> Result<Attention<'a>> {
        let Part { queries, mask, own, .. } = &self.part;
        Ok(Attention {
            q: q.slice(1, queries.clone())?,
            k,
            v,
            // Each query counts the sink once.
            scores: Scores {
                mask: *mask,
                sink: attention.scores.sink.filter(|_| *own),
                ..attention.scores
            },
            ..*attention
        })
    }

    /// The mask of one of this many parts of the heads.
    pub(crate) fn mask_of(&self, part: usize, parts: usize) -> Option<&BlockMask> {
        match self.part_masks.len() == parts {
            true => self.part_masks.get(part),
            // All heads, or such as have the same lists.
            false => self.block_mask.as_ref(),
        }
    }

    /// Output and log-sum-exp of rows, given in the shapes of a batch.
    pub(crate) fn forward(
        &self,
        attention: &Attention<'_>,
        block_mask: Option<&BlockMask>,
        (o, lse): (ViewMut<'_>, ViewMut<'_>),
        stream: &Stream,
    ) -> Result<()> {
        let [o, lse] = [self.rows_mut(o)?, self.rows_mut(lse)?];
        let attention = self.with_options(attention, block_mask)?;
        Ok(attention.forward_into(o, Some(lse), stream)?)
    }

    /// Gradients of q, k and v of rows, given in the shapes of a batch, and that of the sink.
    pub(crate) fn backward(
        &self,
        AttentionBackward { attention, o, lse, d_o }: AttentionBackward<'_>,
        [dq, dk, dv]: [ViewMut<'_>; 3],
        stream: &Stream,
    ) -> Result<Option<Tensor>> {
        let (o, lse, d_o) = (self.rows(o)?, self.rows(lse)?, self.rows(d_o)?);
        let attention = self.with_options(&attention, self.block_mask.as_ref())?;
        let call = AttentionBackward { attention, o, lse, d_o };
        let mut workspace = match call.workspace_bytes(stream.device())? {
            0 => None,
            bytes => Some(Tensor::empty(stream, DType::U8, &[bytes])?),
        };
        let d_sink =
            attention.scores.sink.map(|sink| Tensor::empty(stream, DType::F32, sink.shape()));
        let mut d_sink = d_sink.transpose()?;
        let (dq, dk, dv) = (self.rows_mut(dq)?, self.rows_mut(dk)?, self.rows_mut(dv)?);
        let d_sink_view = d_sink.as_mut().map(Tensor::view_mut);
        let gradients =
            AttentionGradientsMut { d_sink: d_sink_view, ..AttentionGradientsMut::new(dq, dk, dv) };
        call.backward_into(gradients, workspace.as_mut().map(Tensor::view_mut), stream)?;
        Ok(d_sink)
    }

    fn with_options<'a>(
        &'a self,
        attention: &Attention<'a>,
        block_mask: Option<&'a BlockMask>,
    ) -> Result<Attention<'a>> {
        Ok(Attention {
            q: self.rows(attention.q)?,
            k: self.rows(attention.k)?,
            v: self.rows(attention.v)?,
            block_mask,
            cu_seqlens: self.packed.as_ref().map(|packed| packed.cu_seqlens()),
            ..*attention
        })
    }

    /// Packed sequences are rows without a batch, which has one entry then.
    fn rows<'a>(&self, x: View<'a>) -> Result<View<'a>> {
        if self.packed.is_some() { Ok(x.flatten(0..2)?) } else { Ok(x) }
    }

    fn rows_mut<'a>(&self, x: ViewMut<'a>) -> Result<ViewMut<'a>> {
        if self.packed.is_some() { Ok(x.flatten(0..2)?) } else { Ok(x) }
    }
}
