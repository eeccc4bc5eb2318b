//! Attention forward with portable instructions, and the checks that all attention kernels share.

use super::attention_sizes::{AttentionScalars, Forward, Sizes};
use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, given, require};
use super::operand_scales::{self, OperandScales};
use super::score_terms::ScoreTerms;
use crate::view::Used;
use crate::{BlockLists, Kernel, View, ViewMut};
use blockflash_sys::manifest::{AttentionFwd, AttentionFwdSmall, AttentionTile, Variant};
use blockflash_sys::params::{
    blockflash_attention_fwd_params, blockflash_attention_fwd_terms_params, blockflash_score_terms,
};

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
    /// values: kernels clamp them to the packed rows and to the longest sequence in the plan.
    pub cu_seqlens: Option<[View<'a>; 2]>,
    /// The blocks to visit; the lists are packed if and only if the batch is.
    pub block_mask: Option<&'a BlockLists>,
    /// What is added to scores. Only kernels with score terms take that, and partial blocks.
    pub terms: ScoreTerms<'a>,
    /// What codes of q, k and v are multiplied with, f32 with any values; `None` is 1, and the only
    /// choice where they are no codes: `[1]` or `[batch or 1, heads or 1]`, where the heads are
    /// those of the tensor, or those of k for q, too.
    pub scales: OperandScales<'a>,
}

/// What a launch of attention forward knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionFwdPlan {
    /// What backward passes know as well.
    pub scalars: AttentionScalars,
    /// Heads that are computed together. Kernels without tensor maps ignore it.
    pub heads_per_section: i32,
}

impl AttentionFwdOperands<'_> {
    /// Checks the tensors against each other, writes the argument, and returns the number of query
    /// tiles. Pairs of block rows count as two.
    pub(super) fn fit(
        &self,
        tile: &AttentionTile,
        scalars: &AttentionScalars,
        params: &mut blockflash_attention_fwd_params,
    ) -> Fit<i128> {
        let (o, lse) = (self.o.as_view(), self.lse.as_ref().map(ViewMut::as_view));
        let tensors = Forward {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            o: &o,
            lse: lse.as_ref(),
            sink: self.sink.as_ref(),
            cu_seqlens: self.cu_seqlens.as_ref(),
        };
        if !tile.types.q.is_code() {
            let scaled = self.scales.iter().any(Option::is_some);
            absent("scales", scaled, "the kernel reads no codes")?;
        }
        if !tile.terms {
            self.terms.refuse(self.block_mask)?;
        } else if tile.bits_only {
            self.terms.refuse_sums("the kernel has bits of partial blocks only")?;
        }
        let sizes = tensors.fit(scalars, tile.types, tile.head_dims, params)?;
        let Sizes { packed, batch, heads_q, heads_kv, lengths, .. } = sizes;
        let [seqlen_q, seqlen_kv] = lengths;
        require(
            batch > 0 && heads_q > 0 && seqlen_q > 0,
            format_args!(
                "batch {batch}, {heads_q} heads of q and seqlen_q {seqlen_q}: a size is not \
                 positive"
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
        let group = heads_q / heads_kv;
        let (mut tiles_q, mut mask_group) = (ceil_div(seqlen_q, tile.block_q), group);
        if let Some(mask) = self.block_mask {
            absent("block_mask", !tile.takes_block_masks(), "the kernel takes no block masks")?;
            require(
                mask.cu_rows().is_some() == packed,
                format_args!(
                    "the block mask is {}packed, and the batch is {}",
                    if packed { "not " } else { "" },
                    if packed { "packed" } else { "not" }
                ),
            )?;
            let tiles = [tile.block_q, tile.block_kv];
            let groups = [batch, heads_q];
            tiles_q = mask.fit(tiles, scalars.blocks, lengths, groups, &mut params.block_mask)?;
            mask_group = params.block_mask.heads_per_group.into();
        }
        require(
            seqlen_kv <= i64::from(tile.most_keys()),
            format_args!(
                "seqlen_kv is {seqlen_kv}, the limit of the kernel is {}",
                tile.most_keys()
            ),
        )?;
        let heads_per_tile = i64::from(tile.heads);
        require(
            group % heads_per_tile == 0 && mask_group % heads_per_tile == 0,
            format_args!(
                "{heads_per_tile} heads of a tile do not divide the {group} that share keys and \
                 the {mask_group} that share a mask"
            ),
        )?;
        Ok(tiles_q * i128::from(heads_q / heads_per_tile) * i128::from(batch))
    }

    /// Writes the score terms, for sizes that `fit` has written.
    pub(super) fn fit_terms(
        &self,
        base: &blockflash_attention_fwd_params,
        terms: &mut blockflash_score_terms,
    ) -> Fit {
        self.terms.fit(base, self.block_mask, terms)
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
        let [block_bits, bits] = self.block_mask.map_or([None; 2], BlockLists::used_bits);
        let [bias, alibi] = self.terms.used();
        let [of_q, of_k, of_v] = operand_scales::used(&self.scales);
        [
            q, k, v, o, lse, sink, cu_q, cu_kv, row_ptr, col_idx, row_order, cu_rows, block_bits,
            bits, bias, alibi, of_q, of_k, of_v,
        ]
    }
}

// SAFETY:
// 1. This is the parameter struct of the portable kernels of attention forward with score terms;
//    those without take its first member.
// 2. All pointers come from views. The kernel's addresses follow from the sizes and strides in the
//    struct and from the grid; `fit` wrote them from the views, which reach no further than their
//    memory. The kernel clamps values of `cu_seqlens` to the packed rows and tiles of bits to those
//    that there are. Where addresses follow from a block mask, `BlockLists` has checked the
//    entries.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionFwd {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = AttentionFwdPlan;
    type Params = blockflash_attention_fwd_terms_params;
    const FAMILY: &'static str = "portable attention forward";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwd(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn param_bytes(&self) -> usize {
        match self.terms {
            true => size_of::<blockflash_attention_fwd_terms_params>(),
            false => size_of::<blockflash_attention_fwd_params>(),
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let tiles = operands.fit(&self.tile(), &plan.scalars, &mut params.base)?;
        if self.terms {
            operands.fit_terms(&params.base, &mut params.terms)?;
        }
        Ok(tiles)
    }
}

// SAFETY: as for the portable kernels, whose parameters these kernels share. They read neither
// offsets nor lists, so `fit` refuses both: rows of a packed batch would be elsewhere.
unsafe impl Launch for AttentionFwdSmall {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = AttentionFwdPlan;
    type Params = blockflash_attention_fwd_params;
    const FAMILY: &'static str = "attention forward of small grids";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwdSmall(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionFwdOperands { cu_seqlens, block_mask, .. } = operands;
        absent("cu_seqlens", cu_seqlens.is_some(), "the kernel takes no packed sequences")?;
        absent("block_mask", block_mask.is_some(), "the kernel takes no block masks")?;
        operands.fit(&self.tile(), &plan.scalars, params)
    }
}

#[cfg(test)]
#[path = "attention_fwd_tests.rs"]
mod tests;
