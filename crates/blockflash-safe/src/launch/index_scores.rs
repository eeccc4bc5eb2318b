//! Scores of blocks of keys for each query.

use super::attention_sizes::{row_sizes, row_strides};
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, all_strides, narrow, optional, pointer, require, rows_aligned, steps, strides,
};
use super::index_rows::{IndexOffsets, IndexRowsPlan};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{IndexKernel, Variant};
use blockflash_sys::params::blockflash_index_scores_params;

/// Quotients that kernels compute are below this.
const MOST_TILES: i64 = 1 << 20;

/// Tensors of a launch.
#[derive(Debug)]
pub struct IndexScoresOperands<'a> {
    /// `[batch, seqlen_q, heads, head_dim]`, packed `[rows, heads, head_dim]`.
    pub q: View<'a>,
    /// Set for what is packed.
    pub offsets: IndexOffsets<'a>,
    /// The keys; values are not read.
    pub cache: KvCacheViews<'a>,
    /// f32 `[rows, heads]`; `None` is 1.
    pub weights: Option<View<'a>>,
    /// f32 `[groups, rows, blocks]`.
    pub scores: ViewMut<'a>,
}

impl Operands for IndexScoresOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, seqused, ..] = self.cache.used();
        let [of_q, of_kv, weights] =
            [&self.offsets.q, &self.offsets.kv, &self.weights].map(|x| x.as_ref().map(View::used));
        [Some(self.q.used()), of_q, of_kv, k, v, table, seqused, weights, Some(self.scores.used())]
    }
}

/// What a launch knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct IndexScoresPlan {
    /// Queries and what they see.
    pub rows: IndexRowsPlan,
    /// `BLOCKFLASH_INDEX_MAX` or `BLOCKFLASH_INDEX_MEAN`.
    pub reduction: i32,
    /// `BLOCKFLASH_INDEX_IDENTITY` or `BLOCKFLASH_INDEX_RELU`.
    pub activation: i32,
    /// Factor of products.
    pub scale: f32,
    /// Queries that a CTA multiplies with one tile of keys.
    pub item_queries: i32,
    /// Whether blocks that a query does not see are left as they are.
    pub leaves_hidden: bool,
}

/// A kernel that scores blocks.
#[derive(Clone, Copy, Debug)]
pub struct IndexScores {
    dtype: DType,
    head_dim: i64,
    /// Keys of a tile.
    keys: i64,
}

// SAFETY:
// 1. This is the parameter struct of the kernels that score blocks of keys.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from offsets, lengths and page numbers, which one warp of a
//    CTA reads and clamps to these sizes. Items are counted in 32 bits, which hold the most that
//    any of this data can lead to, and quotients are below the limit of their division.
// 3. The scores are a `ViewMut`.
unsafe impl Launch for IndexScores {
    type Operands<'a> = IndexScoresOperands<'a>;
    type Plan = IndexScoresPlan;
    type Params = blockflash_index_scores_params;
    const FAMILY: &'static str = "scores of blocks of keys for each query";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::Index(variant @ IndexKernel::Scores { dtype, head_dim, .. }) => {
                Some(Self { dtype, head_dim: head_dim.into(), keys: variant.keys().into() })
            }
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let IndexScoresOperands { q, offsets, cache, weights, scores } = operands;
        let scores = scores.as_view();
        let (packed, batch) = (offsets.q.is_some(), i64::from(p.rows.batch));
        let [_, of_sequence, heads, head_dim] = row_sizes("q", q, packed)?;
        let rows = if packed { of_sequence } else { batch * of_sequence };
        p.rows.fit(rows, offsets, &mut params.rows)?;
        let [heads_k, columns] =
            p.rows.fit_keys(self.dtype, cache, offsets.kv.is_some(), &mut params.rows)?;
        require(
            columns % 8 == 0 && columns <= self.head_dim,
            format_args!("head_dim is {columns}, expected a multiple of 8 up to {}", self.head_dim),
        )?;
        require(columns == head_dim, format_args!("q has {head_dim} columns, and k {columns}"))?;
        let of_q = row_strides("q", q, self.dtype, packed, [batch, of_sequence, heads, head_dim])?;
        let dims = [(batch, of_q[0]), (of_sequence, of_q[1]), (heads, of_q[2])];
        rows_aligned("q", q, 8, steps(&dims))?;

        let groups = scores.shape().first().map_or(0, |&groups| groups as i64);
        let blocks = p.rows.blocks(params.rows.cache.capacity);
        let [of_group, of_row, _] = strides("scores", &scores, DType::F32, [groups, rows, blocks])?;
        require(
            heads_k > 0 && groups > 0 && groups % heads_k == 0 && heads > 0 && heads % groups == 0,
            format_args!("{heads} heads in {groups} groups of {heads_k} heads of k: not multiples"),
        )?;
        let mut of_weights = [0; 2];
        if let Some(weights) = weights {
            of_weights = all_strides("weights", weights, DType::F32, [rows, heads])?;
        }
        let (item, capacity) = (i64::from(p.item_queries), params.rows.cache.capacity.into());
        require(item > 0, format_args!("items of {item} queries, expected at least 1"))?;
        let tiles = |size: i64, tile: i64| (size + tile - 1) / tile;
        let [of_queries, of_keys] =
            [tiles(p.rows.seqlen_q.into(), item), tiles(capacity, self.keys)];
        let products = item.saturating_mul(heads);
        require(
            of_queries < MOST_TILES && of_keys < MOST_TILES && products < MOST_TILES,
            format_args!(
                "{of_queries} tiles of queries, {of_keys} of keys and {products} columns of an \
                 item, the limit is {MOST_TILES}"
            ),
        )?;
        require(
            p.scale.is_finite() && p.scale > 0.0,
            format_args!("the scale is {}, expected a positive number", p.scale),
        )?;
        *params = blockflash_index_scores_params {
            rows: params.rows,
            q: pointer(q),
            weights: optional(weights.as_ref()).cast(),
            scores: pointer(&scores).cast_mut().cast(),
            q_stride_batch: of_q[0],
            q_stride_seq: of_q[1],
            q_stride_head: of_q[2],
            weights_stride_row: of_weights[0],
            weights_stride_head: of_weights[1],
            scores_stride_group: of_group,
            scores_stride_row: of_row,
            num_heads: narrow("num_heads", heads)?,
            num_heads_k: narrow("num_heads_k", heads_k)?,
            groups: narrow("groups", groups)?,
            head_dim: narrow("head_dim", head_dim)?,
            granularity: p.rows.granularity,
            blocks: narrow("blocks", blocks)?,
            reduction: p.reduction,
            activation: p.activation,
            scale: p.scale,
            item_queries: p.item_queries,
            leaves_hidden: p.leaves_hidden.into(),
            ..*params
        };
        let items = i128::from(batch) * i128::from(of_queries.max(1)) * i128::from(of_keys);
        Ok(items * i128::from(heads_k))
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}
