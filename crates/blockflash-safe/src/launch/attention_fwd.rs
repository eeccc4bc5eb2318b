//! Attention forward with portable instructions, and the checks that all attention kernels share.

use super::attention_sizes::{Inputs, Sizes, with_sink};
use super::block_mask;
use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, given, optional, pointer, pointer_mut, require};
use crate::view::Used;
use crate::{BlockLists, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{AttentionFwd, AttentionFwdSmall, AttentionTile, Variant};
use blockflash_sys::params::blockflash_attention_fwd_params;

/// Tensors of the attention forward kernels. With `cu_seqlens` the batch is packed into the first
/// dimension.
#[derive(Debug)]
pub struct AttentionFwdOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    pub q: View<'a>,
    /// `[batch, seqlen_kv, num_heads_kv, head_dim_qk]`, packed
    /// `[total_kv, num_heads_kv, head_dim_qk]`.
    pub k: View<'a>,
    /// As `k`, with `head_dim_v`.
    pub v: View<'a>,
    /// As `q`, with `head_dim_v`.
    pub o: ViewMut<'a>,
    /// f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`.
    pub lse: Option<ViewMut<'a>>,
    /// f32 `[num_heads_q]`.
    pub sink: Option<View<'a>>,
    /// Packed only: i32 `[batch + 1]` offsets of the sequences in `q` and in `k`. They may hold any
    /// values: kernels clamp them to the packed rows and to the longest sequence in the parameters.
    pub cu_seqlens: Option<[View<'a>; 2]>,
    /// The blocks to visit; the lists are packed if and only if the batch is. Without lists, the
    /// sizes of a mask in the parameters are ignored.
    pub block_mask: Option<&'a BlockLists>,
}

impl AttentionFwdOperands<'_> {
    /// Checks sizes and strides against the tensors, and returns the number of query tiles. Pairs
    /// of block rows count as two.
    pub(super) fn fit(
        &self,
        tile: &AttentionTile,
        p: &blockflash_attention_fwd_params,
    ) -> Fit<i128> {
        let Self { q, k, v, .. } = self;
        let (sink, cu_seqlens) = (self.sink.as_ref(), self.cu_seqlens.as_ref());
        let inputs = Inputs { q, k, v, sink, cu_seqlens };
        let sizes = Sizes::of(p, inputs, tile.types, tile.head_dims)?;
        let Sizes { packed, batch, heads_q, heads_kv, .. } = sizes;
        require(
            batch > 0 && heads_q > 0 && p.seqlen_q > 0,
            format_args!(
                "batch {batch}, {heads_q} heads of q and seqlen_q {}: a size is not positive",
                p.seqlen_q
            ),
        )?;
        require(
            tile.lse.suits(self.lse.is_some()),
            format_args!(
                "lse is {}, and the kernel computes it in {} launch",
                given(self.lse.is_some()),
                if self.lse.is_some() { "no" } else { "each" }
            ),
        )?;
        let strides = [p.o_stride_batch, p.o_stride_seq, p.o_stride_head];
        sizes.outputs("o", &self.o.as_view(), strides)?;
        // The kernels add the batch stride also when the batch is packed.
        require(
            !packed || p.lse_stride_batch == 0,
            format_args!("a packed lse has the batch stride {}, expected 0", p.lse_stride_batch),
        )?;
        let lse = self.lse.as_ref().map(ViewMut::as_view);
        lse.map_or(Ok(()), |lse| sizes.lse(&lse, p))?;
        let tiles_q = match &self.block_mask {
            None => ceil_div(p.seqlen_q.into(), tile.block_q),
            Some(mask) => {
                require(
                    mask.cu_rows().is_some() == packed,
                    format_args!(
                        "the block mask is {}packed, and the batch is {}",
                        if packed { "not " } else { "" },
                        if packed { "packed" } else { "not" }
                    ),
                )?;
                let lengths = [p.seqlen_q, p.seqlen_kv];
                let groups = [p.batch, p.num_heads_q];
                mask.fit([tile.block_q, tile.block_kv], &p.block_mask, lengths, groups)?
            }
        };
        require(
            i64::from(p.seqlen_kv) <= i64::from(tile.most_keys()),
            format_args!(
                "seqlen_kv is {}, the limit of the kernel is {}",
                p.seqlen_kv,
                tile.most_keys()
            ),
        )?;
        let (heads_per_tile, group) = (i64::from(tile.heads), heads_q / heads_kv);
        let mask_group =
            if self.block_mask.is_some() { i64::from(p.block_mask.heads_per_group) } else { group };
        require(
            group % heads_per_tile == 0 && mask_group % heads_per_tile == 0,
            format_args!(
                "{heads_per_tile} heads of a tile do not divide the {group} that share keys and \
                 the {mask_group} that share a mask"
            ),
        )?;
        Ok(tiles_q * i128::from(heads_q / heads_per_tile) * i128::from(batch))
    }

    /// The parameters with the pointers of the tensors.
    pub(super) fn pointers(
        &self,
        p: &blockflash_attention_fwd_params,
    ) -> blockflash_attention_fwd_params {
        let [cu_q, cu_kv] = self.cu_seqlens.map_or([None, None], |both| both.map(Some));
        let lse = self.lse.as_ref().map(ViewMut::as_view);
        blockflash_attention_fwd_params {
            q: pointer(&self.q),
            k: pointer(&self.k),
            v: pointer(&self.v),
            o: pointer_mut(&self.o),
            lse: optional(lse.as_ref()).cast_mut().cast(),
            scores: with_sink(&p.scores, self.sink.as_ref()),
            cu_seqlens_q: optional(cu_q.as_ref()).cast(),
            cu_seqlens_kv: optional(cu_kv.as_ref()).cast(),
            block_mask: block_mask::pointers(self.block_mask, &p.block_mask),
            ..*p
        }
    }
}

impl Operands for AttentionFwdOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|view| Some(view.used()));
        let (o, lse) = (Some(self.o.used()), self.lse.as_ref().map(ViewMut::used));
        let sink = self.sink.as_ref().map(View::used);
        let [cu_q, cu_kv] =
            self.cu_seqlens.as_ref().map_or([None; 2], |[q, kv]| [Some(q.used()), Some(kv.used())]);
        let [row_ptr, col_idx, row_order, cu_rows] =
            self.block_mask.map_or([None; 4], BlockLists::used);
        [q, k, v, o, lse, sink, cu_q, cu_kv, row_ptr, col_idx, row_order, cu_rows]
    }
}

// SAFETY:
// 1. This is the parameter struct of the portable kernels of attention forward.
// 2. All pointers come from views. The kernel's addresses follow from the sizes and strides in the
//    struct and from the grid; `fit` found them to be the same as in the views, which reach no
//    further than their memory. The kernel clamps values of `cu_seqlens` to the packed rows, which
//    `fit` compared. Where addresses follow from a block mask, `BlockLists` has checked the
//    entries.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionFwd {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = blockflash_attention_fwd_params;
    type Params = blockflash_attention_fwd_params;
    const FAMILY: &'static str = "portable attention forward";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwd(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        operands.fit(&self.tile(), plan)
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        Ok(operands.pointers(plan))
    }
}

// SAFETY: as for the portable kernels, whose parameters these kernels share. They read neither
// offsets nor lists, so `fit` refuses both: rows of a packed batch would be elsewhere.
unsafe impl Launch for AttentionFwdSmall {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = blockflash_attention_fwd_params;
    type Params = blockflash_attention_fwd_params;
    const FAMILY: &'static str = "attention forward of small grids";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwdSmall(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let AttentionFwdOperands { cu_seqlens, block_mask, .. } = operands;
        absent("cu_seqlens", cu_seqlens.is_some(), "the kernel takes no packed sequences")?;
        absent("block_mask", block_mask.is_some(), "the kernel takes no block masks")?;
        operands.fit(&self.tile(), plan)
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        Ok(operands.pointers(plan))
    }
}

#[cfg(test)]
#[path = "attention_fwd_tests.rs"]
mod tests;
