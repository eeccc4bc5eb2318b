//! Attention in which neighbouring queries visit the union of their lists, for Hopper: the kernel
//! that unites lists, and the one that computes attention.

use super::LaunchConfig;
use super::attention_fwd_tma::{BOX_COLUMNS, encode, encode_boxes};
use super::attention_index::{AttentionIndexOperands, AttentionIndexPlan, IndexTile};
use super::checked::Launch;
use super::fit::{Fit, require};
use crate::{Kernel, Result, Stream};
use blockflash_sys::manifest::{AttentionIndexHopper, IndexUnion, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_INDEX_TILE_WORDS, blockflash_attention_index_params,
    blockflash_attention_index_tma_params, blockflash_index_union_params, blockflash_index_unions,
};
use blockflash_sys::{ElementTypes, HeadDims};

/// What launches for united lists know beside their tensors.
#[derive(Clone, Copy, Debug)]
pub struct IndexUnionPlan {
    /// As for lists of single queries. Splits are ignored.
    pub index: AttentionIndexPlan,
    /// The first tile, of all that the call has.
    pub first: i32,
    /// Tiles of this launch.
    pub count: i32,
    /// Slots that one copy takes.
    pub box_rows: i32,
}

/// Rows of a row group.
const ROWS: i64 = AttentionIndexHopper::ROWS as i64;
/// Row groups of a tile.
const ROW_GROUPS: i64 = AttentionIndexHopper::ROW_GROUPS as i64;

/// How the heads of a unit and queries share the rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexPacks {
    /// Packs of the heads of a unit.
    pub packs: usize,
    /// Heads of a pack; the last one may have fewer.
    pub pack: usize,
    /// Queries of a row group.
    pub pack_queries: usize,
}

impl IndexPacks {
    /// The packs of units of this many heads.
    pub const fn of(group: usize) -> Self {
        let packs = group.div_ceil(ROWS as usize);
        let pack = group.div_ceil(if packs > 0 { packs } else { 1 });
        let pack_queries = if packs > 1 || pack == 0 { 1 } else { ROWS as usize / pack };
        Self { packs, pack, pack_queries }
    }

    /// Queries of a tile.
    pub const fn queries(&self) -> usize {
        ROW_GROUPS as usize * self.pack_queries
    }

    /// Tiles of a call: `units` of each of `batch` sequences of `seqlen_q` queries, or of `total_q`
    /// packed ones.
    pub const fn tiles(
        &self,
        units: usize,
        [batch, seqlen_q]: [usize; 2],
        total_q: Option<usize>,
    ) -> usize {
        let Self { packs, pack_queries, .. } = *self;
        match total_q {
            None => {
                let of_unit = (seqlen_q.div_ceil(pack_queries) * packs).div_ceil(2);
                batch.saturating_mul(units).saturating_mul(of_unit)
            }
            Some(total) => {
                let rows = (total * packs).div_ceil(2 * pack_queries);
                units.saturating_mul(rows + batch * (packs / 2 + 1))
            }
        }
    }

    /// Words of 32 bits of a tile in the workspace, for lists of this capacity: of the tile, of its
    /// entries, and of their members.
    pub const fn words(&self, capacity: usize) -> [usize; 3] {
        let entries = self.queries().saturating_mul(capacity);
        let members = entries.saturating_mul(self.queries().div_ceil(32));
        [BLOCKFLASH_INDEX_TILE_WORDS as usize, entries, members]
    }
}

impl AttentionIndexOperands<'_> {
    /// Checks the tensors and the part of the tiles, and writes both arguments.
    fn fit_unions(
        &self,
        types: ElementTypes,
        head_dims: HeadDims,
        plan: &IndexUnionPlan,
        index: &mut blockflash_attention_index_params,
        unions: &mut blockflash_index_unions,
    ) -> Fit<i128> {
        // Lists have no splits.
        let whole = AttentionIndexPlan { chunk: 1 << 30, run_log2: 0, ..plan.index };
        let tile = IndexTile { types, head_dims, rows: ROWS as u32, has_workspace: false };
        self.fit_index(&tile, &whole, index)?;
        let (decode, lists) = (&index.scaled.decode, &index.lists);
        let size = |count: i32| count as usize;
        let packs = IndexPacks::of(size(decode.group));
        let total = self.attention.cu_seqlens_q.map(|_| size(lists.queries));
        let sizes = [size(decode.batch), size(decode.seqlen_q)];
        let all = packs.tiles(size(index.units), sizes, total);
        // Kernels count tiles in 32 bits.
        require(all <= i32::MAX as usize / 2, format_args!("{all} tiles, the limit is 2^30"))?;
        let (first, count) = (plan.first, plan.count);
        let is_part = first >= 0 && count > 0 && first as usize + count as usize <= all;
        require(is_part, format_args!("{count} tiles from {first} on, of {all}"))?;
        let [of_tile, entries, members] =
            packs.words(size(lists.capacity)).map(|words| words.saturating_mul(size(count)));
        let needed = of_tile.saturating_add(entries).saturating_add(members);
        let memory = self.attention.workspace.ok_or("united lists have no workspace")?;
        require(
            needed <= memory.sums(),
            format_args!("the workspace has {} sums, {needed} are needed", memory.sums()),
        )?;
        let start = memory.sums_pointer();
        require(
            start.addr().is_multiple_of(16),
            format_args!("the workspace starts at {start:?}, expected a multiple of 16 bytes"),
        )?;
        let narrow = |size: usize| size as i32;
        *unions = blockflash_index_unions {
            tiles: start.cast(),
            entries: start.wrapping_add(of_tile).cast(),
            members: start.wrapping_add(of_tile + entries).cast(),
            pack: narrow(packs.pack),
            pack_queries: narrow(packs.pack_queries),
            packs: narrow(packs.packs),
            member_words: narrow(packs.queries().div_ceil(32)),
            first,
            count,
        };
        Ok(count.into())
    }
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. All pointers come from views. Addresses follow from sizes and strides that `fit_index` took
//    from them, from offsets and lengths that the kernel clamps to these sizes, and from numbers of
//    tiles, for which `fit_unions` has found room in the workspace. What lists hold decides what is
//    written there, never where: there is room for all their entries.
// 3. `o` and `lse`, of which rows that belong to no sequence are written, are `ViewMut`. Only
//    kernels use the workspace.
unsafe impl Launch for IndexUnion {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = IndexUnionPlan;
    type Params = blockflash_index_union_params;
    const FAMILY: &'static str = "the union of lists";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::IndexUnion(kernel) = kernel.variant { Some(kernel) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let types = ElementTypes::all(operands.attention.queries().dtype());
        let two_bytes = types.q.size() == 2;
        require(two_bytes, format_args!("q is {}, expected f16 or bf16", types.q))?;
        let widest = HeadDims::all(256);
        let (index, unions) = (&mut params.index, &mut params.unions);
        let tiles = operands.fit_unions(types, widest, plan, index, unions)?;
        let entries = params.unions.pack_queries as usize * ROW_GROUPS as usize;
        let entries = entries.saturating_mul(params.index.lists.capacity as usize);
        let limit = self.most_entries() as usize;
        require(
            entries <= limit,
            format_args!("the lists of a tile have {entries} entries, the limit is {limit}"),
        )?;
        Ok(tiles)
    }
}

/// The kernel that visits united lists. Only [`Stream::launch_united`] launches it, since it relies
/// on what the kernel that unites lists left in the workspace.
#[derive(Clone, Copy, Debug)]
pub(super) struct United(pub(super) AttentionIndexHopper);

impl Stream {
    /// Launches the kernel that unites lists, and the one that visits them.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    #[doc(hidden)]
    pub fn launch_united(
        &self,
        kernels: [&Kernel; 2],
        configs: [&LaunchConfig; 2],
        plan: &IndexUnionPlan,
        operands: &AttentionIndexOperands<'_>,
    ) -> Result<()> {
        self.launch_both::<IndexUnion, United>(kernels, configs, plan, operands)
    }
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. Queries, keys and values are read through tensor maps, and so are inside the views that the
//    maps were encoded from, whatever entries, pages and lengths the device holds. All other
//    addresses follow from the sizes and strides in the struct, which `fit_unions` wrote from the
//    views, and from what the workspace says of tiles: `launch_united`, the only caller, launches
//    the kernel that wrote it from the same sizes before, in the same turn with the workspace.
// 3. `o` and `lse` are `ViewMut`, and only kernels use the workspace.
unsafe impl Launch for United {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = IndexUnionPlan;
    type Params = blockflash_attention_index_tma_params;
    const FAMILY: &'static str = "attention by an index for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionIndexHopper(tile) => Some(Self(tile)),
            _ => None,
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionIndexHopper { types, head_dims, step_keys, .. } = self.0;
        let (index, unions) = (&mut params.index, &mut params.unions);
        let tiles = operands.fit_unions(types, head_dims, plan, index, unions)?;
        operands.attention.cache.refuse_scales()?;
        let (cache, log2) = (&params.index.scaled.decode.cache, plan.index.granularity_log2);
        let (rows, granularity) = (plan.box_rows, 1 << log2);
        let least = AttentionIndexHopper::LEAST_GRANULARITY as i32;
        require(
            granularity >= least,
            format_args!("blocks of {granularity} keys, expected at least {least}"),
        )?;
        let one_page = !operands.attention.cache.has_pages();
        let fits = |size: i32| rows > 0 && size % rows == 0;
        let is_box = (16..=128).contains(&rows) && fits(granularity) && fits(step_keys as i32);
        require(
            is_box && (one_page || fits(cache.page_size)),
            format_args!(
                "boxes have {rows} slots, expected 16 to 128, a divisor of {granularity}, \
                 {step_keys} and of pages of {}",
                cache.page_size
            ),
        )?;
        params.box_rows = rows;
        Ok(tiles)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        // As if heads were a sequence of rows of queries.
        let queries = operands.attention.queries();
        let dims: &[usize] = if queries.shape().len() == 4 { &[0, 2, 1, 3] } else { &[1, 0, 2] };
        let unions = &params.unions;
        let boxes = [BOX_COLUMNS, unions.pack as u32, unions.pack_queries as u32];
        params.q = encode_boxes(&queries.permute(dims)?, boxes)?;
        params.k = encode(&operands.attention.cache.k, params.box_rows as u32)?;
        params.v = encode(&operands.attention.cache.v, params.box_rows as u32)?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.index.scaled.decode.tile_counter = counter;
    }
}
