//! The gradients of attention in which lists name the keys of each query.

use super::attention_bwd::{AttentionBwdOperands, AttentionBwdPlan};
use super::attention_bwd_workspace::attention_bwd_workspace;
use super::attention_index_bwd_sizes::{AttentionIndexBwdSizes, STEPS, Step};
use super::checked::{Launch, Operands, zeros};
use super::config::LaunchConfig;
use super::fit::{Fit, absent, narrow, optional, pointer, require, strides};
use crate::view::Used;
use crate::{DType, Error, Kernel, Result, Stream, View, ViewMut};
use blockflash_sys::manifest::{
    AttentionBwdStep, AttentionBwdTile, AttentionIndexBwd, AttentionIndexBwdTile, Variant,
};
use blockflash_sys::params::{
    blockflash_attention_bwd_params, blockflash_attention_index_bwd_params, blockflash_index_lists,
};

/// Granularities that the kernels take, as powers of two.
const GRANULARITIES_LOG2: [i32; 3] = [4, 6, 7];

/// Tensors of the gradients of attention by lists.
#[derive(Debug)]
pub struct AttentionIndexBwdOperands<'a> {
    /// Those of other gradients, without a block mask and score terms. The workspace has at least
    /// the bytes of [`attention_index_bwd_workspace`](super::attention_index_bwd_workspace); it
    /// begins with the row statistics.
    pub attention: AttentionBwdOperands<'a>,
    /// i32 `[groups, queries, capacity]` with contiguous lists and any values: kernels skip what
    /// names no key. `groups` is 1, the heads of k or those of q.
    pub entries: View<'a>,
}

impl<'a> AttentionIndexBwdOperands<'a> {
    /// The same operands for one of several launches.
    pub fn reborrow(&mut self) -> AttentionIndexBwdOperands<'_> {
        AttentionIndexBwdOperands { attention: self.attention.reborrow(), entries: self.entries }
    }
}

impl Operands for AttentionIndexBwdOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let attention = self.attention.used();
        let mut used = attention.as_ref().to_vec();
        used.push(Some(self.entries.used()));
        used
    }
}

/// What the launches know beside their tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionIndexBwdPlan {
    /// What the kernels for row statistics know as well, without sums and parts.
    pub bwd: AttentionBwdPlan,
    /// Log2 of the tokens of a block.
    pub granularity_log2: i32,
    /// The tile of the kernel for keys.
    pub tile: AttentionIndexBwdTile,
    /// Most queries of a pass. More than one pass adds dk and dv up in the workspace.
    pub pass_queries: i32,
    /// Most visits that one CTA computes.
    pub item_visits: i32,
}

/// The kernels of all steps.
#[derive(Clone, Copy, Debug)]
pub struct AttentionIndexBwdKernels<'k> {
    /// `index_transpose_sm80`.
    pub transpose: &'k Kernel,
    /// `attention_index_bwd_kv_sm80`.
    pub keys: &'k Kernel,
    /// `attention_index_bwd_sums_sm80`.
    pub sums: &'k Kernel,
}

impl<'k> AttentionIndexBwdKernels<'k> {
    fn of(&self, step: Step) -> &'k Kernel {
        match step {
            Step::Count | Step::Sum | Step::Divide | Step::List => self.transpose,
            Step::Keys => self.keys,
            Step::SumKeys | Step::SumQueries => self.sums,
        }
    }
}

impl AttentionIndexBwdOperands<'_> {
    /// Checks the tensors against each other, and that the workspace has room. Writes all of the
    /// argument that is the same in all launches.
    fn fit(
        &self,
        plan: &AttentionIndexBwdPlan,
        params: &mut blockflash_attention_index_bwd_params,
    ) -> Fit<AttentionIndexBwdSizes> {
        let (operands, tile) = (&self.attention, &plan.tile);
        operands.terms.refuse(None)?;
        let reason = "lists name keys";
        absent("block_mask", operands.block_mask.is_some(), reason)?;
        absent("dbias", operands.dbias.is_some(), reason)?;
        let AttentionBwdPlan { sums_head_dim, parts, .. } = plan.bwd;
        let reason = "lists have a workspace of their own";
        absent("sums_head_dim", sums_head_dim.is_some(), reason)?;
        absent("parts", parts.is_some(), reason)?;
        let as_statistics = AttentionBwdTile {
            step: AttentionBwdStep::Statistics,
            types: tile.types,
            head_dims: tile.head_dims,
            block_q: tile.rows,
            block_kv: tile.keys,
            tensor_maps: false,
            splits_heads: false,
            terms: false,
        };
        operands.fit(&as_statistics, &plan.bwd, &mut params.bwd)?;
        let sizes = self.sizes(plan, params)?;
        sizes.fit()?;
        self.fit_arrays(&sizes, params)?;

        let [sets, set_lists] = sizes.sets();
        params.sets = narrow("sets", sets as i64)?;
        params.set_lists = narrow("set_lists", set_lists as i64)?;
        params.group = narrow("group", sizes.group() as i64)?;
        params.bins = narrow("bins", sizes.bins() as i64)?;
        params.item_visits = plan.item_visits;
        (params.block_kv, params.dq_columns) = (tile.keys as i32, tile.dq_columns() as i32);
        params.tile_head_dim = tile.head_dims.max() as i32;
        Ok(sizes)
    }

    /// Checks lists and tile, and writes the argument of the lists.
    fn sizes(
        &self,
        plan: &AttentionIndexBwdPlan,
        params: &mut blockflash_attention_index_bwd_params,
    ) -> Fit<AttentionIndexBwdSizes> {
        let base = &params.bwd.base;
        let packed = self.attention.cu_seqlens.is_some();
        let [batch, heads_q, heads_kv, total_q] = match packed {
            true => [base.batch, base.num_heads_q, base.num_heads_kv, base.total_q].map(i64::from),
            false => {
                let [batch, heads_q, heads_kv, seqlen_q] =
                    [base.batch, base.num_heads_q, base.num_heads_kv, base.seqlen_q].map(i64::from);
                [batch, heads_q, heads_kv, batch * seqlen_q]
            }
        };
        let keys = if packed { base.total_kv } else { base.seqlen_kv };
        let &[groups, _, capacity] = self.entries.shape() else {
            return Err(format!("lists are {:?}, expected 3 dimensions", self.entries.shape()));
        };
        let (groups, capacity) = (groups as i64, capacity as i64);
        require(
            groups > 0 && [1, heads_kv, heads_q].contains(&groups),
            format_args!("{groups} groups of lists, expected 1, {heads_kv} or {heads_q}"),
        )?;
        let [stride_group, stride_query, _] =
            strides("lists", &self.entries, DType::I32, [groups, total_q, capacity])?;
        let log2 = plan.granularity_log2;
        require(
            GRANULARITIES_LOG2.contains(&log2),
            format_args!("blocks of 2^{log2} keys, expected one of 2^{GRANULARITIES_LOG2:?}"),
        )?;
        require(
            capacity < 1 << (30 - log2),
            format_args!("lists of {capacity} blocks of 2^{log2} keys, the limit is 2^30 keys"),
        )?;
        let tile = &plan.tile;
        let (tile_keys, columns) = (tile.keys as usize, tile.dq_columns() as usize);
        let tile_head_dim = tile.head_dims.max();
        require(
            tile_keys > 0
                && 64 % tile_keys == 0
                && columns > 0
                && tile_head_dim.is_multiple_of(8 * columns),
            format_args!(
                "a tile has {tile_keys} keys and {tile_head_dim} columns in {columns} parts, \
                 expected a divisor of 64 and parts of multiples of 8"
            ),
        )?;
        let sizes = AttentionIndexBwdSizes {
            heads: [heads_q as usize, heads_kv as usize],
            head_dim_qk: base.head_dim_qk as usize,
            groups: groups as usize,
            capacity: capacity as usize,
            granularity: 1 << log2,
            total_q: total_q as usize,
            batch: batch as usize,
            keys: keys as usize,
            packed,
            tile_keys,
            tile_head_dim,
            dq_columns: columns,
            pass_queries: plan.pass_queries.max(0) as usize,
            item_visits: plan.item_visits.max(0) as usize,
        };
        params.lists = blockflash_index_lists {
            entries: optional(Some(&self.entries)).cast(),
            stride_group,
            stride_query,
            groups: narrow("groups", groups)?,
            queries: narrow("queries", total_q)?,
            capacity: narrow("capacity", sizes.room() as i64)?,
            granularity_log2: log2,
        };
        Ok(sizes)
    }

    /// Writes where the arrays of the workspace are, behind the row statistics.
    fn fit_arrays(
        &self,
        sizes: &AttentionIndexBwdSizes,
        params: &mut blockflash_attention_index_bwd_params,
    ) -> Fit {
        let Some(workspace) = self.attention.workspace.as_ref().map(ViewMut::as_view) else {
            return Err("workspace is not given, and lists need one".into());
        };
        let bytes = workspace.shape().first().copied().unwrap_or(0);
        let places = statistics_bytes(&params.bwd, sizes).and_then(|first| sizes.offsets(first));
        let Some((offsets, end)) = places else {
            return Err(format!("the workspace needs more than {} bytes", isize::MAX));
        };
        require(end <= bytes, format_args!("the workspace has {bytes} bytes of {end}"))?;
        let at =
            offsets.map(|offset| pointer(&workspace).cast_mut().cast::<u8>().wrapping_add(offset));
        let [items, counts, lengths, begins, first_part, visits, places, parts, factors, ..] = at;
        (params.items, params.counts) = (items.cast(), counts.cast());
        (params.lengths, params.begins) = (lengths.cast(), begins.cast());
        (params.first_part, params.visits) = (first_part.cast(), visits.cast());
        (params.places, params.dq_parts) = (places.cast(), parts.cast());
        params.dq_factors = factors.cast();
        params.key_parts = at[9].cast();
        if sizes.passes() > 1 {
            params.key_sums = at[10].cast();
        }
        Ok(())
    }
}

/// Bytes of the row statistics of an argument that was found to fit.
fn statistics_bytes(
    bwd: &blockflash_attention_bwd_params,
    sizes: &AttentionIndexBwdSizes,
) -> Option<usize> {
    let entries = if sizes.packed { 1 } else { sizes.batch };
    let rows = usize::try_from(bwd.statistics_stride_head).ok()?;
    let rows = rows.checked_mul(sizes.heads[0])?.checked_mul(entries)?;
    attention_bwd_workspace(rows, None, 0)
}

/// A kernel of the gradients of attention by lists. Only [`Stream::launch_index_backward`] launches
/// it, since a step relies on what those before it left in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct IndexBackward(AttentionIndexBwd);

/// A launch of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassPlan {
    plan: AttentionIndexBwdPlan,
    pass: usize,
    step: Step,
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. All pointers come from views, those of arrays of the workspace from one that has room for
//    them. Addresses follow from the sizes and strides in the struct, which `fit` wrote from the
//    views, from offsets and entries of lists, which the kernels clamp or pass over, and from
//    words of the workspace. The latter are numbers that the launches before have written in
//    `launch_index_backward`, the only caller, and that are within these sizes whatever lists and
//    offsets held then. Where lists and offsets that change between two launches make words stale,
//    kernels compare them with the sizes. The tile of the workspace is that of the kernel for keys.
// 3. Gradients and workspace are `ViewMut`.
unsafe impl Launch for IndexBackward {
    type Operands<'a> = AttentionIndexBwdOperands<'a>;
    type Plan = PassPlan;
    type Params = blockflash_attention_index_bwd_params;
    const FAMILY: &'static str = "gradients of attention by lists";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionIndexBwd(tile) = kernel.variant { Some(Self(tile)) } else { None }
    }

    fn fit(
        &self,
        &PassPlan { plan, pass, step }: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let matches = match (self.0, step) {
            (AttentionIndexBwd::Keys(tile), Step::Keys) => tile == plan.tile,
            (AttentionIndexBwd::Sums { dtype }, Step::SumKeys | Step::SumQueries) => {
                dtype == plan.tile.types.q
            }
            (
                AttentionIndexBwd::Transpose { .. },
                Step::Count | Step::Sum | Step::Divide | Step::List,
            ) => true,
            _ => false,
        };
        require(matches, format_args!("the kernel has no step {step:?} of {:?}", plan.tile))?;
        let sizes = operands.fit(&plan, params)?;
        let [first, queries] = sizes.queries_of(pass);
        let [items, parts] = sizes.most_items(queries);
        params.first_query = narrow("first_query", first as i64)?;
        params.queries = narrow("queries", queries as i64)?;
        params.slabs = narrow("slabs", sizes.slabs(queries) as i64)?;
        params.max_items = narrow("max_items", items as i64)?;
        params.max_parts = narrow("max_parts", parts as i64)?;
        params.first_pass = (pass == 0).into();
        params.last_pass = (pass + 1 == sizes.passes()).into();
        params.step = step.code();
        Ok(sizes.blocks(step, queries))
    }
}

impl Stream {
    /// Launches all steps of all passes of the gradients of attention by lists, except those of
    /// `attention_bwd_delta_sm80`, which come before and have the same operands.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    #[doc(hidden)]
    pub fn launch_index_backward(
        &self,
        kernels: &AttentionIndexBwdKernels<'_>,
        plan: &AttentionIndexBwdPlan,
        mut operands: AttentionIndexBwdOperands<'_>,
    ) -> Result<()> {
        let refused = |what| Error::Launch { symbol: kernels.keys.symbol(), what };
        let sizes = operands.fit(plan, &mut zeros::<IndexBackward>()).map_err(refused)?;
        for pass in 0..sizes.passes() {
            let [_, queries] = sizes.queries_of(pass);
            for step in STEPS {
                let kernel = kernels.of(step);
                let blocks = sizes.blocks(step, queries);
                let blocks = u32::try_from(blocks).ok().filter(|&blocks| blocks <= i32::MAX as u32);
                let limit = format!("{step:?} has too many CTAs, the limit is {}", i32::MAX);
                let blocks = blocks.ok_or_else(|| refused(limit))?;
                if blocks > 0 {
                    let config = LaunchConfig::of(kernel, blocks, false);
                    let plan = PassPlan { plan: *plan, pass, step };
                    self.launch::<IndexBackward>(kernel, &config, &plan, operands.reborrow())?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "attention_index_bwd_tests.rs"]
mod tests;
