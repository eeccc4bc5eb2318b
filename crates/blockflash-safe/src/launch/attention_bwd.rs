//! Attention backward with portable instructions, and the checks that all of its kernels share.

use super::attention_sizes::{Inputs, Sizes, with_sink};
use super::block_mask;
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, absent, ceil_div, fits, given, optional, pointer, pointer_mut, require, starts_at,
};
use crate::view::Used;
use crate::{BlockLists, DType, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{AttentionBwd, AttentionBwdStep as Step, AttentionBwdTile, Variant};
use blockflash_sys::params::{blockflash_attention_bwd_params, blockflash_attention_fwd_params};
use std::ptr::null_mut;

/// Rows for which the statistics of a sequence have room at a time. Kernels read them by whole
/// tiles.
pub const STATISTICS_ROWS: usize = 64;
/// Keys for which parts of dk and dv have room at a time: as many as the largest tile has.
const PART_ROWS: usize = 128;
/// Longest sequence: the kernels add tiles to positions in 32 bits.
const MAX_SEQLEN: i32 = 1 << 30;

/// The plan of all steps of a backward pass.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBwdPlan {
    /// Sizes, strides and factors. Its pointers are ignored.
    pub params: blockflash_attention_bwd_params,
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

/// Parts of the query heads that share a head of keys. A CTA for each of them leaves dk and dv of
/// its heads in the workspace, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBwdParts {
    /// How many, 2 to the heads of a group.
    pub count: i32,
    /// Columns of dk and of dv, by the kernel that leaves them.
    pub head_dim: usize,
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
    /// u8, at least [`attention_bwd_workspace`]; needed where there are statistics.
    pub workspace: Option<ViewMut<'a>>,
    /// As for the forward pass.
    pub cu_seqlens: Option<[View<'a>; 2]>,
    /// The blocks to visit, and their transpose: of each block of keys, the blocks of queries.
    pub block_mask: Option<[&'a BlockLists; 2]>,
}

/// Numbers in the workspace for parts of dk and dv: of this many heads of keys over all batch
/// entries, each with so many keys. `None` beyond the address space.
pub fn attention_bwd_part_values(
    parts: AttentionBwdParts,
    heads: usize,
    seqlen_kv: usize,
) -> Option<usize> {
    let rows = seqlen_kv.checked_next_multiple_of(PART_ROWS)?;
    let tensors = heads.checked_mul(usize::try_from(parts.count).ok()?)?.checked_mul(2)?;
    tensors.checked_mul(rows)?.checked_mul(parts.head_dim)
}

/// Bytes of workspace for this many rows of statistics over all heads and batch entries, a multiple
/// of [`STATISTICS_ROWS`], for sums of dq by a kernel with this head dimension, and for
/// [`attention_bwd_part_values`]. `None` beyond the address space.
pub fn attention_bwd_workspace(
    rows: usize,
    sums_head_dim: Option<usize>,
    part_values: usize,
) -> Option<usize> {
    let statistics = rows.checked_mul(2 * size_of::<f32>())?;
    let sums = match sums_head_dim {
        None => 0,
        Some(head_dim) => {
            let sums = rows.checked_mul(head_dim)?.checked_mul(size_of::<f32>())?;
            semaphore_bytes(rows).checked_add(sums)?
        }
    };
    let parts = part_values.checked_mul(size_of::<f32>())?;
    let bytes = statistics.checked_add(sums)?.checked_add(parts)?;
    Some(bytes).filter(|&bytes| isize::try_from(bytes).is_ok())
}

/// Bytes of the words that count the blocks of keys that have been added to a tile of queries. The
/// sums behind them begin at a multiple of 16.
fn semaphore_bytes(rows: usize) -> usize {
    (rows / STATISTICS_ROWS * size_of::<u32>()).next_multiple_of(16)
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
            ..*self
        }
    }

    /// Checks sizes and strides against the tensors, and returns the number of CTAs.
    pub(super) fn fit(&self, tile: &AttentionBwdTile, plan: &AttentionBwdPlan) -> Fit<i128> {
        let (b, p) = (&plan.params, &plan.params.base);
        let Self { q, k, v, .. } = self;
        let (sink, cu_seqlens) = (self.sink.as_ref(), self.cu_seqlens.as_ref());
        let inputs = Inputs { q, k, v, sink, cu_seqlens };
        let sizes = Sizes::of(p, inputs, tile.types, tile.head_dims)?;
        let short = [p.seqlen_q, p.seqlen_kv].iter().all(|&length| length <= MAX_SEQLEN);
        require(
            short,
            format_args!(
                "sequences have {} queries and {} keys, the limit is {MAX_SEQLEN}",
                p.seqlen_q, p.seqlen_kv
            ),
        )?;
        sizes.outputs("o", &self.o, [p.o_stride_batch, p.o_stride_seq, p.o_stride_head])?;
        let strides = [b.d_o_stride_batch, b.d_o_stride_seq, b.d_o_stride_head];
        sizes.outputs("d_o", &self.d_o, strides)?;
        let strides = [b.dq_stride_batch, b.dq_stride_seq, b.dq_stride_head];
        sizes.queries("dq", &self.dq.as_view(), strides)?;
        let strides = [b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head];
        sizes.keys("dk", &self.dk.as_view(), strides)?;
        let strides = [b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head];
        sizes.values("dv", &self.dv.as_view(), strides)?;
        // The kernels add the batch stride also when the batch is packed.
        let of_batch = [p.lse_stride_batch, b.statistics_stride_batch];
        require(
            !sizes.packed || of_batch == [0; 2],
            format_args!("packed statistics have the batch strides {of_batch:?}, expected 0"),
        )?;
        sizes.lse(&self.lse, p)?;

        let [per_q, per_kv] = [sizes.heads_q, sizes.heads_kv]
            .map(|heads| i128::from(heads) * i128::from(sizes.batch));
        let row_tiles = ceil_div(p.seqlen_q.into(), STATISTICS_ROWS as u32) * per_q;
        if tile.step == Step::Zeros {
            let entries = i128::from(if sizes.packed { 1 } else { sizes.batch });
            let chunks =
                sizes.heads_q.max(sizes.heads_kv) * (sizes.head_dim_qk.max(sizes.head_dim_v) / 8);
            require(
                chunks < i64::from(MAX_SEQLEN),
                format_args!("a row has {chunks} pieces of 16 bytes, the limit is {MAX_SEQLEN}"),
            )?;
            let rows = entries * i128::from(sizes.rows_q + sizes.rows_kv);
            return Ok((rows + STATISTICS_ROWS as i128 - 1) / STATISTICS_ROWS as i128);
        }
        self.fit_workspace(&sizes, plan)?;
        match tile.step {
            Step::Zeros | Step::Statistics => Ok(row_tiles),
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
                let d_sink = self.d_sink.as_ref().map(ViewMut::as_view);
                d_sink.map_or(Ok(()), |d_sink| {
                    fits("d_sink", &d_sink, DType::F32, [(sizes.heads_q, 1)])
                })?;
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
                let rows = ceil_div(p.seqlen_kv.into(), PART_ROWS as u32)
                    * (PART_ROWS / STATISTICS_ROWS) as i128;
                let of_keys = if plan.parts.is_some() { 2 * rows * per_kv } else { 0 };
                Ok(of_queries + of_keys)
            }
            Step::Keys => {
                let parts = self.fit_parts(tile, plan, &sizes)?;
                Ok(self.tiles(tile, plan, &sizes)?[1] * per_kv * parts)
            }
            Step::Queries => Ok(self.tiles(tile, plan, &sizes)?[0] * per_q),
            Step::KeysAndSums => {
                require(
                    plan.sums_head_dim == Some(tile.head_dims.qk),
                    format_args!(
                        "the plan sums dq for head_dim {:?}, the kernel for {}",
                        plan.sums_head_dim, tile.head_dims.qk
                    ),
                )?;
                let parts = self.fit_parts(tile, plan, &sizes)?;
                let masked = self.block_mask.is_some();
                absent("block_mask", masked, "dq is not summed under a block mask")?;
                let capped = plan.params.base.scores.softcap > 0.0;
                require(
                    !capped || tile.takes_softcap(),
                    format_args!(
                        "softcap is {}, and the kernel takes none",
                        plan.params.base.scores.softcap
                    ),
                )?;
                let (section, heads) = (i128::from(plan.heads_per_section), per_kv * parts);
                require(
                    (1..=heads).contains(&section),
                    format_args!("heads_per_section is {section}, expected 1 to {heads}"),
                )?;
                Ok(self.tiles(tile, plan, &sizes)?[1] * heads)
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

    /// Number of tiles of queries and of keys per head.
    fn tiles(
        &self,
        tile: &AttentionBwdTile,
        plan: &AttentionBwdPlan,
        sizes: &Sizes,
    ) -> Fit<[i128; 2]> {
        let (b, p) = (&plan.params, &plan.params.base);
        let (blocks, lengths) = ([tile.block_q, tile.block_kv], [p.seqlen_q, p.seqlen_kv]);
        let Some([mask, transposed]) = self.block_mask else {
            return Ok([0, 1].map(|i| ceil_div(lengths[i].into(), blocks[i])));
        };
        let packed = [mask, transposed].map(|lists| lists.cu_rows().is_some());
        require(
            packed == [sizes.packed; 2],
            format_args!(
                "the mask and its transpose are packed: {packed:?}, the batch: {}",
                sizes.packed
            ),
        )?;
        let reverse = |[a, b]: [i32; 2]| [b, a];
        let groups = [p.batch, p.num_heads_q];
        Ok([
            mask.fit(blocks, &p.block_mask, lengths, groups)?,
            transposed.fit([blocks[1], blocks[0]], &b.block_mask_t, reverse(lengths), groups)?,
        ])
    }

    /// Rows of statistics of all heads and batch entries. The kernels clamp the offsets of a packed
    /// batch, so each sequence has room: see `statistics_row` in `gradient.cuh`.
    fn statistics(&self, sizes: &Sizes, plan: &AttentionBwdPlan) -> Fit<i128> {
        let (b, tile) = (&plan.params, STATISTICS_ROWS as i64);
        let (entries, rows) = match sizes.packed {
            true => (1, (sizes.rows_q / tile + sizes.batch) * tile),
            false => (sizes.batch, (sizes.rows_q + tile - 1) / tile * tile),
        };
        let of_batch = if sizes.packed { 0 } else { i128::from(rows) * i128::from(sizes.heads_q) };
        let found = [b.statistics_stride_batch, b.statistics_stride_head].map(i128::from);
        require(
            found == [of_batch, rows.into()],
            format_args!(
                "the statistics have the strides {found:?}, expected {:?}",
                [of_batch, i128::from(rows)]
            ),
        )?;
        Ok(i128::from(rows) * i128::from(sizes.heads_q) * i128::from(entries))
    }

    fn fit_workspace(&self, sizes: &Sizes, plan: &AttentionBwdPlan) -> Fit {
        let rows = self.statistics(sizes, plan)?;
        // The kernels count tiles of rows in 32 bits.
        let counted = rows / (STATISTICS_ROWS as i128) <= i128::from(i32::MAX);
        require(
            counted,
            format_args!(
                "{rows} rows of statistics, the limit is {}",
                i64::from(i32::MAX) * STATISTICS_ROWS as i64
            ),
        )?;
        let heads = usize::try_from(i128::from(sizes.heads_kv) * i128::from(sizes.batch));
        let values = plan.parts.map_or(Some(0), |parts| {
            attention_bwd_part_values(parts, heads.ok()?, plan.params.base.seqlen_kv as usize)
        });
        let needed = values
            .and_then(|values| attention_bwd_workspace(rows as usize, plan.sums_head_dim, values));
        let needed = needed.ok_or_else(|| {
            format!("{rows} rows of statistics need a workspace of more than {} bytes", usize::MAX)
        })?;
        let Some(workspace) = self.workspace.as_ref().map(ViewMut::as_view) else {
            return require(
                needed == 0,
                format_args!("there is no workspace, and {needed} bytes are needed"),
            );
        };
        let bytes = workspace.shape().first().map_or(0, |&bytes| bytes as i64);
        fits("workspace", &workspace, DType::U8, [(bytes, 1)])?;
        require(
            needed as i64 <= bytes,
            format_args!("the workspace has {bytes} bytes of {needed}"),
        )?;
        starts_at(16, "workspace", &workspace)
    }

    /// The parameters with the pointers of the tensors.
    pub(super) fn pointers(&self, plan: &AttentionBwdPlan) -> blockflash_attention_bwd_params {
        let (b, p) = (&plan.params, &plan.params.base);
        let [cu_q, cu_kv] = self.cu_seqlens.map_or([None, None], |both| both.map(Some));
        let [mask, transposed] = self.block_mask.map_or([None; 2], |both| both.map(Some));
        let base = blockflash_attention_fwd_params {
            q: pointer(&self.q),
            k: pointer(&self.k),
            v: pointer(&self.v),
            o: pointer(&self.o).cast_mut(),
            lse: pointer(&self.lse).cast_mut().cast(),
            scores: with_sink(&p.scores, self.sink.as_ref()),
            cu_seqlens_q: optional(cu_q.as_ref()).cast(),
            cu_seqlens_kv: optional(cu_kv.as_ref()).cast(),
            block_mask: block_mask::pointers(mask, &p.block_mask),
            ..*p
        };
        let [negative_logs, deltas, semaphores, ..] = self.places(plan);
        blockflash_attention_bwd_params {
            base,
            d_o: pointer(&self.d_o),
            dq: pointer_mut(&self.dq),
            dk: pointer_mut(&self.dk),
            dv: pointer_mut(&self.dv),
            d_sink: self.d_sink.as_ref().map_or(null_mut(), pointer_mut).cast(),
            negative_logs: negative_logs.cast(),
            deltas: deltas.cast(),
            semaphores: if plan.sums_head_dim.is_some() { semaphores.cast() } else { null_mut() },
            block_mask_t: block_mask::pointers(transposed, &b.block_mask_t),
            ..*b
        }
    }

    /// Where the parts of the workspace are: both statistics, the semaphores and the sums of dq,
    /// and parts of dk and dv.
    pub(super) fn places(&self, plan: &AttentionBwdPlan) -> [*mut u8; 5] {
        let Some(workspace) = &self.workspace else { return [null_mut(); 5] };
        let (b, p) = (&plan.params, &plan.params.base);
        let entries = if self.cu_seqlens.is_some() { 1 } else { p.batch as usize };
        let rows = b.statistics_stride_head as usize * p.num_heads_q as usize * entries;
        let (first, statistics) = (pointer_mut(workspace).cast::<u8>(), rows * size_of::<f32>());
        let semaphores = 2 * statistics;
        // `fit` found it within the workspace.
        let parts = attention_bwd_workspace(rows, plan.sums_head_dim, 0).unwrap_or_default();
        [0, statistics, semaphores, semaphores + semaphore_bytes(rows), parts]
            .map(|at| first.wrapping_add(at))
    }
}

impl Operands for AttentionBwdOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [mask, transposed] =
            self.block_mask.map_or([[None; 4]; 2], |both| both.map(BlockLists::used));
        let ([a, b, c, d], [e, f, g, h]) = (mask, transposed);
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
            f, g, h,
        ]
    }
}

// SAFETY:
// 1. This is the parameter struct of the portable kernels of the attention backward.
// 2. All pointers come from views, those of the parts of the workspace from one that has room for
//    them. The kernels' addresses follow from the sizes and strides in the struct and from the
//    grid; `fit` found them to be the same as in the views, which reach no further than their
//    memory. The kernels clamp values of `cu_seqlens` to the packed rows, which `fit` compared, and
//    query tiles to those of the sequence. Where addresses follow from a block mask, `BlockLists`
//    has checked the entries.
// 3. Gradients and workspace are `ViewMut`.
unsafe impl Launch for AttentionBwd {
    type Operands<'a> = AttentionBwdOperands<'a>;
    type Plan = AttentionBwdPlan;
    type Params = blockflash_attention_bwd_params;
    const FAMILY: &'static str = "portable attention backward";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionBwd(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        operands.fit(&self.tile(), plan)
    }

    fn params(&self, plan: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        Ok(operands.pointers(plan))
    }
}

#[cfg(test)]
#[path = "attention_bwd_tests.rs"]
mod tests;
