//! Attention backward with portable instructions, and the checks that all of its kernels share.

use super::attention_bwd_workspace::{AttentionBwdParts, PART_ROWS, STATISTICS_ROWS, Sums};
use super::attention_sizes::{AttentionScalars, Forward, Sizes};
use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, fits, given, pointer, pointer_mut, require};
use super::score_terms::ScoreTerms;
use crate::view::Used;
use crate::{BlockLists, DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{AttentionBwd, AttentionBwdStep as Step, AttentionBwdTile, Variant};
use blockflash_sys::params::{
    blockflash_attention_bwd_bias_params, blockflash_attention_bwd_params,
    blockflash_attention_bwd_terms_params,
};

/// Longest sequence: the kernels add tiles to positions in 32 bits.
const MAX_SEQLEN: i64 = 1 << 30;

/// The plan of all steps of a backward pass.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBwdPlan {
    /// What the forward pass knows as well.
    pub scalars: AttentionScalars,
    /// Columns of the sums of dq in the workspace, by the kernel that makes them; `None` where dq
    /// has a kernel of its own.
    pub sums_head_dim: Option<usize>,
    /// Key heads whose blocks of keys start together, where dq is summed; each of their parts
    /// counts as one. Under a mask with a right limit these are the last ones, if there is more
    /// than one.
    pub heads_per_section: i32,
    /// Whether several CTAs share the query heads of each block of keys; `None` if one has all of a
    /// group.
    pub parts: Option<AttentionBwdParts>,
}

/// Tensors of the attention backward kernels, of all steps. With `cu_seqlens` the batch is packed
/// into the first dimension.
#[derive(Debug)]
pub struct AttentionBwdOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    pub q: View<'a>,
    /// `[batch, seqlen_kv, num_heads_kv, head_dim_qk]`, packed
    /// `[total_kv, num_heads_kv, head_dim_qk]`.
    pub k: View<'a>,
    /// As `k`, with `head_dim_v`.
    pub v: View<'a>,
    /// As `q`, with `head_dim_v`.
    pub o: View<'a>,
    /// f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, total_q]`.
    pub lse: View<'a>,
    /// As `o`.
    pub d_o: View<'a>,
    /// As `q`.
    pub dq: ViewMut<'a>,
    /// As `k`.
    pub dk: ViewMut<'a>,
    /// As `v`.
    pub dv: ViewMut<'a>,
    /// f32 `[num_heads_q]`.
    pub sink: Option<View<'a>>,
    /// As `sink`.
    pub d_sink: Option<ViewMut<'a>>,
    /// u8, at least the bytes of `attention_bwd_workspace`; needed where there are statistics.
    pub workspace: Option<ViewMut<'a>>,
    /// As for the forward pass.
    pub cu_seqlens: Option<[View<'a>; 2]>,
    /// The blocks to visit, and their transpose: of each block of keys, the blocks of queries.
    pub block_mask: Option<[&'a BlockLists; 2]>,
    /// As for the forward pass.
    pub terms: ScoreTerms<'a>,
    /// f16, bf16 or f32, in the shape of a bias. Only the step that computes it takes it.
    pub dbias: Option<ViewMut<'a>>,
}

impl<'a> AttentionBwdOperands<'a> {
    /// The same operands for one of several launches.
    pub fn reborrow(&mut self) -> AttentionBwdOperands<'_> {
        AttentionBwdOperands {
            dq: self.dq.reborrow(),
            dk: self.dk.reborrow(),
            dv: self.dv.reborrow(),
            d_sink: self.d_sink.as_mut().map(ViewMut::reborrow),
            workspace: self.workspace.as_mut().map(ViewMut::reborrow),
            dbias: self.dbias.as_mut().map(ViewMut::reborrow),
            ..*self
        }
    }

    /// Checks the tensors against each other and the workspace, writes the argument, and returns
    /// the number of CTAs and where in the workspace they add up.
    pub(super) fn fit(
        &self,
        tile: &AttentionBwdTile,
        plan: &AttentionBwdPlan,
        p: &mut blockflash_attention_bwd_params,
    ) -> Fit<(i128, Sums)> {
        if !tile.terms && tile.step.visits() {
            self.terms.refuse(self.block_mask.map(|[mask, _]| mask))?;
        }
        let tensors = Forward {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            o: &self.o,
            lse: Some(&self.lse),
            sink: self.sink.as_ref(),
            cu_seqlens: self.cu_seqlens.as_ref(),
        };
        let sizes = tensors.fit(&plan.scalars, tile.types, tile.head_dims, &mut p.base)?;
        let [seqlen_q, seqlen_kv] = sizes.lengths;
        require(
            seqlen_q.max(seqlen_kv) <= MAX_SEQLEN,
            format_args!(
                "sequences have {seqlen_q} queries and {seqlen_kv} keys, the limit is {MAX_SEQLEN}"
            ),
        )?;
        (p.d_o, p.dq) = (pointer(&self.d_o), pointer_mut(&self.dq));
        (p.dk, p.dv) = (pointer_mut(&self.dk), pointer_mut(&self.dv));
        [p.d_o_stride_batch, p.d_o_stride_seq, p.d_o_stride_head] =
            sizes.outputs("d_o", &self.d_o)?;
        [p.dq_stride_batch, p.dq_stride_seq, p.dq_stride_head] =
            sizes.queries("dq", &self.dq.as_view())?;
        [p.dk_stride_batch, p.dk_stride_seq, p.dk_stride_head] =
            sizes.keys("dk", &self.dk.as_view())?;
        [p.dv_stride_batch, p.dv_stride_seq, p.dv_stride_head] =
            sizes.values("dv", &self.dv.as_view())?;
        if let Some(d_sink) = &self.d_sink {
            fits("d_sink", &d_sink.as_view(), DType::F32, [(sizes.heads_q, 1)])?;
            p.d_sink = pointer_mut(d_sink).cast();
        }
        let sums = match tile.step {
            Step::Zeros => Sums::NONE,
            _ => self.fit_workspace(&sizes, plan, p)?,
        };
        let tiles = self.tiles(tile, plan, &sizes, p)?;
        Ok((self.blocks(tile, plan, &sizes, tiles)?, sums))
    }

    /// Number of CTAs, for these numbers of tiles of queries and of keys per head.
    fn blocks(
        &self,
        tile: &AttentionBwdTile,
        plan: &AttentionBwdPlan,
        sizes: &Sizes,
        [tiles_q, tiles_kv]: [i128; 2],
    ) -> Fit<i128> {
        let [per_q, per_kv] = [sizes.heads_q, sizes.heads_kv]
            .map(|heads| i128::from(heads) * i128::from(sizes.batch));
        let row_tiles = ceil_div(sizes.lengths[0], STATISTICS_ROWS as u32) * per_q;
        let fit_parts = || self.fit_parts(tile, plan, sizes);
        match tile.step {
            Step::Zeros => {
                let entries = i128::from(if sizes.packed { 1 } else { sizes.batch });
                let chunks = sizes.heads_q.max(sizes.heads_kv)
                    * (sizes.head_dim_qk.max(sizes.head_dim_v) / 8);
                require(
                    chunks < MAX_SEQLEN,
                    format_args!(
                        "a row has {chunks} pieces of 16 bytes, the limit is {MAX_SEQLEN}"
                    ),
                )?;
                let rows = entries * i128::from(sizes.rows_q + sizes.rows_kv);
                Ok((rows + STATISTICS_ROWS as i128 - 1) / STATISTICS_ROWS as i128)
            }
            Step::Statistics => Ok(row_tiles),
            Step::Sinks => {
                let both = self.sink.is_some() && self.d_sink.is_some();
                require(
                    both,
                    format_args!(
                        "sink and d_sink: {} and {}, expected both",
                        given(self.sink.is_some()),
                        given(self.d_sink.is_some())
                    ),
                )?;
                Ok(sizes.heads_q.into())
            }
            Step::Sums => {
                let widths = [plan.sums_head_dim, plan.parts.map(|parts| parts.head_dim)];
                let fits = widths.iter().flatten().all(|&width| width == tile.head_dims.qk);
                require(
                    fits && widths != [None; 2],
                    format_args!(
                        "the plan sums dq, and dk and dv, for head_dim {widths:?}, the kernel for \
                         {}",
                        tile.head_dims.qk
                    ),
                )?;
                let of_queries = if plan.sums_head_dim.is_some() { row_tiles } else { 0 };
                let rows = ceil_div(sizes.lengths[1], PART_ROWS as u32)
                    * (PART_ROWS / STATISTICS_ROWS) as i128;
                let of_keys = if plan.parts.is_some() { 2 * rows * per_kv } else { 0 };
                Ok(of_queries + of_keys)
            }
            Step::Keys => Ok(tiles_kv * per_kv * fit_parts()?),
            Step::Queries => Ok(tiles_q * per_q),
            Step::Bias => {
                absent("cu_seqlens", sizes.packed, "there is no bias for packed sequences")?;
                let [seqlen_q, seqlen_kv] = sizes.lengths;
                let full = [sizes.batch, sizes.heads_q, seqlen_q, seqlen_kv];
                let (extents, _) = self.fit_dbias(full)?;
                let blocks = [1, 1, tile.block_q, tile.block_kv];
                Ok((0..4).map(|dim| ceil_div(extents[dim], blocks[dim])).product())
            }
            Step::KeysAndSums => {
                require(
                    plan.sums_head_dim == Some(tile.head_dims.qk),
                    format_args!(
                        "the plan sums dq for head_dim {:?}, the kernel for {}",
                        plan.sums_head_dim, tile.head_dims.qk
                    ),
                )?;
                let parts = fit_parts()?;
                let masked = self.block_mask.is_some();
                absent("block_mask", masked, "dq is not summed under a block mask")?;
                let softcap = plan.scalars.scores.softcap;
                require(
                    softcap <= 0.0 || tile.takes_softcap(),
                    format_args!("softcap is {softcap}, and the kernel takes none"),
                )?;
                let (section, heads) = (i128::from(plan.heads_per_section), per_kv * parts);
                require(
                    (1..=heads).contains(&section),
                    format_args!("heads_per_section is {section}, expected 1 to {heads}"),
                )?;
                Ok(tiles_kv * heads)
            }
        }
    }

    /// The number of CTAs that share a block of keys, each with a part of the query heads.
    fn fit_parts(
        &self,
        tile: &AttentionBwdTile,
        plan: &AttentionBwdPlan,
        sizes: &Sizes,
    ) -> Fit<i128> {
        let Some(AttentionBwdParts { count, head_dim }) = plan.parts else { return Ok(1) };
        let dense = !sizes.packed && self.block_mask.is_none();
        require(
            tile.splits_heads && dense,
            format_args!("the plan splits groups of heads, but not every kernel and batch can be"),
        )?;
        require(
            head_dim == tile.head_dims.max(),
            format_args!(
                "the plan has parts of head_dim {head_dim}, the kernel of {}",
                tile.head_dims
            ),
        )?;
        let group = sizes.heads_q / sizes.heads_kv.max(1);
        require(
            (2..=group).contains(&count.into()),
            format_args!("groups have {count} parts, expected 2 to {group}"),
        )?;
        Ok(count.into())
    }

    /// Number of tiles of queries and of keys per head. Writes the mask where a kernel reads it.
    fn tiles(
        &self,
        tile: &AttentionBwdTile,
        plan: &AttentionBwdPlan,
        sizes: &Sizes,
        params: &mut blockflash_attention_bwd_params,
    ) -> Fit<[i128; 2]> {
        let (blocks, lengths) = ([tile.block_q, tile.block_kv], sizes.lengths);
        let dense = [0, 1].map(|i| ceil_div(lengths[i], blocks[i].max(1)));
        let Some([mask, transposed]) = self.block_mask.filter(|_| tile.step.visits()) else {
            return Ok(dense);
        };
        let packed = [mask, transposed].map(|lists| lists.cu_rows().is_some());
        require(
            packed == [sizes.packed; 2],
            format_args!(
                "the mask and its transpose are packed: {packed:?}, the batch: {}",
                sizes.packed
            ),
        )?;
        fn reversed<T: Copy>([a, b]: [T; 2]) -> [T; 2] {
            [b, a]
        }
        let groups = [sizes.batch, sizes.heads_q];
        let of_mask =
            mask.fit(blocks, plan.scalars.blocks, lengths, groups, &mut params.base.block_mask)?;
        let of_transpose = transposed.fit(
            reversed(blocks),
            reversed(plan.scalars.blocks),
            reversed(lengths),
            groups,
            &mut params.block_mask_t,
        )?;
        Ok([of_mask, of_transpose])
    }
}

impl Operands for AttentionBwdOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [mask, transposed] =
            self.block_mask.map_or([[None; 4]; 2], |both| both.map(BlockLists::used));
        let ([a, b, c, d], [e, f, g, h]) = (mask, transposed);
        let [[i, j], [l, m]] =
            self.block_mask.map_or([[None; 2]; 2], |both| both.map(BlockLists::used_bits));
        let [bias, alibi] = self.terms.used();
        let dbias = self.dbias.as_ref().map(ViewMut::used);
        let read = [&self.q, &self.k, &self.v, &self.o, &self.lse, &self.d_o];
        let [q, k, v, o, lse, d_o] = read.map(|view| Some(view.used()));
        let [dq, dk, dv] = [&self.dq, &self.dk, &self.dv].map(|view| Some(view.used()));
        let sink = self.sink.as_ref().map(View::used);
        let [d_sink, workspace] =
            [&self.d_sink, &self.workspace].map(|view| view.as_ref().map(ViewMut::used));
        let [cu_q, cu_kv] =
            self.cu_seqlens.as_ref().map_or([None; 2], |[q, kv]| [Some(q.used()), Some(kv.used())]);
        [
            q, k, v, o, lse, d_o, dq, dk, dv, sink, d_sink, workspace, cu_q, cu_kv, a, b, c, d, e,
            f, g, h, i, j, l, m, bias, alibi, dbias,
        ]
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernel for the gradient of the bias. Its first member is
//    that of the kernels with score terms, and the first member of that one of all others.
// 2. All pointers come from views, those of the parts of the workspace from one that has room for
//    them. The kernels' addresses follow from the sizes and strides in the struct and from the
//    grid; `fit` wrote them from the views, which reach no further than their memory. The kernels
//    clamp values of `cu_seqlens` to the packed rows, query tiles to those of the sequence, and
//    tiles of bits to those that there are.
//    Where addresses follow from a block mask, `BlockLists` has checked the entries.
// 3. Gradients and workspace are `ViewMut`.
unsafe impl Launch for AttentionBwd {
    type Operands<'a> = AttentionBwdOperands<'a>;
    type Plan = AttentionBwdPlan;
    type Params = blockflash_attention_bwd_bias_params;
    const FAMILY: &'static str = "portable attention backward";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionBwd(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (blocks, _) = operands.fit(&self.tile(), plan, &mut params.base.bwd)?;
        if self.terms {
            let base = &mut params.base;
            let bits = operands.fit_terms(&base.bwd, &mut base.terms)?;
            (base.block_bits_t, base.bits_t) = (bits.block_bits, bits.bits);
            base.bit_tiles_t = bits.tiles;
        }
        if self.step == Step::Bias {
            operands.write_dbias(params)?;
        }
        Ok(blocks)
    }

    fn param_bytes(&self) -> usize {
        match (self.step, self.terms) {
            (Step::Bias, _) => size_of::<blockflash_attention_bwd_bias_params>(),
            (_, true) => size_of::<blockflash_attention_bwd_terms_params>(),
            (_, false) => size_of::<blockflash_attention_bwd_params>(),
        }
    }
}

#[cfg(test)]
#[path = "attention_bwd_tests.rs"]
pub(super) mod tests;
