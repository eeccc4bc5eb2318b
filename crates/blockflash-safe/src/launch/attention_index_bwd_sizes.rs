//! Sizes of the gradients of attention by lists: grids, limits and the workspace.

use super::fit::{Fit, require};
use blockflash_sys::params::{
    BLOCKFLASH_INDEX_COUNT, BLOCKFLASH_INDEX_COUNT_BINS, BLOCKFLASH_INDEX_DIVIDE,
    BLOCKFLASH_INDEX_LIST, BLOCKFLASH_INDEX_LIST_BINS, BLOCKFLASH_INDEX_SLAB, BLOCKFLASH_INDEX_SUM,
    BLOCKFLASH_INDEX_SUM_KEYS, BLOCKFLASH_INDEX_SUM_QUERIES,
};

/// Keys of a bin of blocks that are smaller.
const NARROWEST_BIN: usize = 64;
/// Threads of a CTA that sums dq, with 8 columns each.
const SUM_THREADS: i128 = 256;
/// Arrays of the workspace.
const ARRAYS: usize = 11;

/// A launch of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Entries of each slab of queries by bin.
    Count,
    /// Visits of each bin.
    Sum,
    /// Where bins begin, and their items.
    Divide,
    /// Visits by bin.
    List,
    /// dk and dv, and parts of dq.
    Keys,
    /// dk and dv from their parts.
    SumKeys,
    /// dq from its parts.
    SumQueries,
}

/// In their order.
pub(super) const STEPS: [Step; 7] =
    [Step::Count, Step::Sum, Step::Divide, Step::List, Step::Keys, Step::SumKeys, Step::SumQueries];

impl Step {
    /// As the kernels call it; that for keys has one step.
    pub(super) const fn code(self) -> i32 {
        match self {
            Self::Count | Self::Keys => BLOCKFLASH_INDEX_COUNT,
            Self::Sum => BLOCKFLASH_INDEX_SUM,
            Self::Divide => BLOCKFLASH_INDEX_DIVIDE,
            Self::List => BLOCKFLASH_INDEX_LIST,
            Self::SumKeys => BLOCKFLASH_INDEX_SUM_KEYS,
            Self::SumQueries => BLOCKFLASH_INDEX_SUM_QUERIES,
        }
    }
}

/// What the workspace and the grids of the gradients of attention by lists follow from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionIndexBwdSizes {
    /// Heads of q and of keys.
    pub heads: [usize; 2],
    /// Columns of q and k.
    pub head_dim_qk: usize,
    /// Lists of each query: 1, or one for each head of keys, or of queries.
    pub groups: usize,
    /// Room of a list.
    pub capacity: usize,
    /// Tokens of a block.
    pub granularity: usize,
    /// Queries of all sequences.
    pub total_q: usize,
    /// Sequences.
    pub batch: usize,
    /// Keys of a sequence, or, where they are packed, of all of them.
    pub keys: usize,
    /// Whether sequences are packed.
    pub packed: bool,
    /// Keys of a tile of the kernel for keys.
    pub tile_keys: usize,
    /// The head dimension of that tile.
    pub tile_head_dim: usize,
    /// Parts of that tile's columns of dq.
    pub dq_columns: usize,
    /// Most queries of a pass, at least 1.
    pub pass_queries: usize,
    /// Most visits of an item, at least 1.
    pub item_visits: usize,
}

impl AttentionIndexBwdSizes {
    /// Keys of a bin.
    pub(super) fn width(&self) -> i128 {
        self.granularity.max(NARROWEST_BIN) as i128
    }

    /// Tiles of keys of a bin.
    fn tiles(&self) -> i128 {
        self.width() / self.tile_keys.max(1) as i128
    }

    /// Sets of lists, and lists of each.
    pub(super) fn sets(&self) -> [i128; 2] {
        let sets = self.groups.min(self.heads[1]).max(1);
        [sets, self.groups / sets].map(|count| count as i128)
    }

    /// Heads that share a list and a head of keys.
    pub(super) fn group(&self) -> i128 {
        (self.heads[0] / self.groups.max(self.heads[1]).max(1)) as i128
    }

    /// Bins of all sequences.
    pub(super) fn bins(&self) -> i128 {
        let [batch, keys] = [self.batch, self.keys].map(|count| count as i128);
        match self.packed {
            true => keys / self.width() + batch,
            false => batch * ceil_div(keys, self.width()),
        }
    }

    /// Passes over all queries, at least one.
    pub fn passes(&self) -> usize {
        self.total_q.div_ceil(self.pass_queries.max(1)).max(1)
    }

    /// The first query of a pass, and how many it has.
    pub(super) fn queries_of(&self, pass: usize) -> [i128; 2] {
        let first = pass.saturating_mul(self.pass_queries).min(self.total_q);
        [first, self.pass_queries.min(self.total_q - first)].map(|count| count as i128)
    }

    /// Entries of a set of lists, of this many queries.
    fn entries(&self, queries: i128) -> i128 {
        self.sets()[1] * queries * self.room()
    }

    /// Room of a list. Without keys no entry is read.
    pub(super) fn room(&self) -> i128 {
        if self.bins() > 0 { self.capacity as i128 } else { 0 }
    }

    pub(super) fn slabs(&self, queries: i128) -> i128 {
        ceil_div(self.sets()[1] * queries, BLOCKFLASH_INDEX_SLAB.into())
    }

    /// The most items of a set, and their parts.
    pub(super) fn most_items(&self, queries: i128) -> [i128; 2] {
        let long = self.entries(queries) / self.item_visits.max(1) as i128;
        [self.bins() + long, 2 * long]
    }

    /// CTAs of a launch.
    pub(super) fn blocks(&self, step: Step, queries: i128) -> i128 {
        let ([sets, _], bins) = (self.sets(), self.bins());
        let heads = self.heads.map(|heads| heads as i128);
        let slabs = sets * self.slabs(queries);
        match step {
            Step::Count => slabs * ceil_div(bins, BLOCKFLASH_INDEX_COUNT_BINS.into()),
            Step::Sum => sets * ceil_div(bins, BLOCKFLASH_INDEX_SLAB.into()),
            Step::Divide if bins == 0 => 0,
            Step::Divide => sets,
            Step::List => slabs * ceil_div(bins, BLOCKFLASH_INDEX_LIST_BINS.into()),
            Step::Keys => heads[1] * self.most_items(queries)[0] * self.tiles(),
            Step::SumKeys => heads[1] * bins * (self.width() / NARROWEST_BIN as i128),
            Step::SumQueries => {
                ceil_div(queries * heads[0] * (self.head_dim_qk / 8) as i128, SUM_THREADS)
            }
        }
    }

    /// Bytes of the arrays of the workspace, in the order of the parameters.
    fn array_bytes(&self) -> [i128; ARRAYS] {
        let [_, queries] = self.queries_of(0);
        let ([sets, _], bins, entries) = (self.sets(), self.bins(), self.entries(queries));
        let [items, parts] = self.most_items(queries);
        let tile_head_dim = self.tile_head_dim as i128;
        let heads_kv = self.heads[1] as i128;
        let rows = heads_kv * self.tiles() * entries * self.group();
        let of_bin = heads_kv * self.width() * 2 * tile_head_dim * 4;
        let sums = if self.passes() > 1 { of_bin * bins } else { 0 };
        [
            sets * items * 16,
            sets * self.slabs(queries) * bins * 4,
            sets * bins * 4,
            sets * bins * 4,
            sets * bins * 4,
            sets * entries * 4,
            sets * entries * 4,
            rows * self.head_dim_qk as i128 * 2,
            rows * self.dq_columns as i128 * 4,
            of_bin * parts,
            sums,
        ]
    }

    /// Where the arrays of the workspace are, from this many bytes on, and where they end.
    pub(super) fn offsets(&self, first: usize) -> Option<([usize; ARRAYS], usize)> {
        let mut end = first.checked_next_multiple_of(16)?;
        let mut offsets = [0; ARRAYS];
        for (offset, bytes) in offsets.iter_mut().zip(self.array_bytes()) {
            *offset = end;
            end = usize::try_from(end as i128 + bytes).ok()?.checked_next_multiple_of(16)?;
        }
        Some((offsets, end)).filter(|&(_, end)| isize::try_from(end).is_ok())
    }

    /// Whether a pass has no more entries and items than kernels count.
    pub fn is_counted(&self) -> bool {
        self.fit().is_ok()
    }

    /// Checks what kernels count in 32 bits.
    pub(super) fn fit(&self) -> Fit {
        let limit = i128::from(i32::MAX) - (1 << 20);
        let [_, queries] = self.queries_of(0);
        let ([_, set_lists], entries) = (self.sets(), self.entries(queries));
        let runs = (NARROWEST_BIN / self.granularity.max(1)).max(1) as i128;
        let [items, parts] = self.most_items(queries);
        let visits = self.item_visits as i128;
        require(
            (1..1 << 20).contains(&visits) && visits * self.group() <= 1 << 30,
            format_args!(
                "items have {visits} visits of {} heads, expected 1 to 2^20 - 1 visits and 2^30 \
                 rows",
                self.group()
            ),
        )?;
        require(
            self.pass_queries > 0,
            format_args!("a pass has {} queries, expected at least 1", self.pass_queries),
        )?;
        let heads = self.heads[0] / self.heads[1].max(1);
        for (what, count, limit) in [
            ("query heads of a key head", heads as i128, (1 << 16) - 1),
            ("keys of all bins", self.bins() * self.width(), limit),
            ("entries of a pass", entries, limit),
            ("runs of the queries of a pass", set_lists * queries * runs, limit),
            ("items", items, limit),
            ("parts of items", parts, limit),
        ] {
            require(count <= limit, format_args!("{count} {what}, the limit is {limit}"))?;
        }
        Ok(())
    }
}

/// Bytes of workspace for these sizes, behind this many bytes of `attention_bwd_workspace` for row
/// statistics. `None` beyond the address space.
pub fn attention_index_bwd_workspace(
    statistics: usize,
    sizes: &AttentionIndexBwdSizes,
) -> Option<usize> {
    sizes.offsets(statistics).map(|(_, end)| end)
}

fn ceil_div(count: i128, by: i128) -> i128 {
    (count + by - 1) / by
}
