//! Appending to a cache, and rotary embeddings.

use super::attention_merge::dtype_of;
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, ceil_div, fits, optional, pointer, pointer_mut, require, rows_aligned, steps,
};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, Result, View, ViewMut};
use blockflash_sys::manifest::{Family, KvAppend, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED, blockflash_kv_append_params,
    blockflash_kv_cache, blockflash_rotary,
};
use std::ptr::{null, null_mut};

/// Keys and values that are appended, and the cache that they are appended to.
#[derive(Debug)]
pub struct NewKeys<'a> {
    /// `[pages, page_size, num_heads_kv, head_dim_qk]`.
    pub cache_k: ViewMut<'a>,
    /// As `cache_k`, with `head_dim_v`.
    pub cache_v: ViewMut<'a>,
    /// As in [`KvCacheViews`].
    pub block_table: Option<View<'a>>,
    /// `[batch, seqlen_new, num_heads_kv, head_dim_qk]`, packed
    /// `[total_new, num_heads_kv, head_dim_qk]`.
    pub k: View<'a>,
    /// As `k`, with `head_dim_v`.
    pub v: View<'a>,
    /// i32 `[batch + 1]`, with any values: the kernel clamps them.
    pub cu_seqlens: Option<View<'a>>,
    /// Cosines and sines for the keys, `[positions, dim / 2]`.
    pub rotary: Option<[View<'a>; 2]>,
}

/// Queries that are turned.
#[derive(Debug)]
pub struct TurnedQueries<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim_qk]`, packed `[total_q, num_heads_q, head_dim_qk]`.
    pub q: View<'a>,
    /// As `q`.
    pub turned: ViewMut<'a>,
    /// i32 `[batch + 1]`, with any values: the kernel clamps them.
    pub cu_seqlens: Option<View<'a>>,
    /// Cosines and sines, `[positions, dim / 2]`.
    pub rotary: [View<'a>; 2],
}

/// Tensors of appending to a cache and of rotary embeddings.
#[derive(Debug)]
pub struct KvAppendOperands<'a> {
    /// i32 `[batch]`, with any values: keys of each sequence with the new ones.
    pub seqused: Option<View<'a>>,
    /// What is appended.
    pub new: Option<NewKeys<'a>>,
    /// The queries, if they are turned.
    pub queries: Option<TurnedQueries<'a>>,
}

impl NewKeys<'_> {
    fn cache<'c>(&'c self, seqused: Option<View<'c>>) -> KvCacheViews<'c> {
        let (k, v) = (self.cache_k.as_view(), self.cache_v.as_view());
        KvCacheViews { k, v, block_table: self.block_table, seqused }
    }
}

impl Operands for KvAppendOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, new_k, new_v, cu_new, cos, sin] =
            self.new.as_ref().map_or([None; 8], |new| {
                let [k, v] = [&new.cache_k, &new.cache_v].map(|view| Some(view.used()));
                let [table, cu_new] =
                    [&new.block_table, &new.cu_seqlens].map(|view| view.as_ref().map(View::used));
                let [cos, sin] = new
                    .rotary
                    .as_ref()
                    .map_or([None; 2], |[c, s]| [Some(c.used()), Some(s.used())]);
                [k, v, table, Some(new.k.used()), Some(new.v.used()), cu_new, cos, sin]
            });
        let [q, turned, cu_q, q_cos, q_sin] = self.queries.as_ref().map_or([None; 5], |queries| {
            let [cos, sin] = &queries.rotary;
            let [q, cos, sin] = [&queries.q, cos, sin].map(|view| Some(view.used()));
            let cu_seqlens = queries.cu_seqlens.as_ref().map(View::used);
            [q, Some(queries.turned.used()), cu_seqlens, cos, sin]
        });
        let seqused = self.seqused.as_ref().map(View::used);
        [seqused, k, v, table, new_k, new_v, cu_new, cos, sin, q, turned, cu_q, q_cos, q_sin]
    }
}

/// Elements that a thread writes.
const PIECE: i64 = 8;

/// Sizes of a tensor with a row for each token and head.
struct Tokens {
    batch: i64,
    seqlen: i64,
    total: i64,
    heads: i64,
}

impl Tokens {
    /// Checks tensors of tokens and their offsets, and returns the number of rows.
    fn rows(
        &self,
        dtype: DType,
        tensors: [(&str, View<'_>, i64, [i64; 3]); 2],
        cu_seqlens: Option<&View<'_>>,
    ) -> Fit<i64> {
        let Self { batch, seqlen, total, heads } = *self;
        let tokens = if cu_seqlens.is_some() { total } else { batch.saturating_mul(seqlen) };
        let sizes = [seqlen, tokens, heads];
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!("seqlen, tokens and heads are {sizes:?}: a size is not positive"),
        )?;
        for (name, view, columns, [of_batch, seq, head]) in tensors {
            let [heads, inner] = [(heads, head), (columns, 1)];
            // Packed tensors have one batch entry, whose stride does not matter.
            let outer = match cu_seqlens {
                Some(_) => [(1, of_batch), (total, seq)],
                None => [(batch, of_batch), (seqlen, seq)],
            };
            match cu_seqlens {
                Some(_) => fits(name, &view, dtype, [outer[1], heads, inner])?,
                None => fits(name, &view, dtype, [outer[0], outer[1], heads, inner])?,
            }
            rows_aligned(name, &view, PIECE, steps(&[outer[0], outer[1], heads]))?;
        }
        if let Some(cu_seqlens) = cu_seqlens {
            fits("cu_seqlens", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
        }
        Ok(tokens.saturating_mul(heads))
    }
}

/// Checks sizes and strides of a rotary embedding against its tables.
fn fit_rotary(r: &blockflash_rotary, [cos, sin]: &[View<'_>; 2], head_dim: i64) -> Fit {
    let [positions, dim] = [r.positions, r.dim].map(i64::from);
    require(
        positions > 0,
        format_args!("the rotary tables have {positions} positions, expected at least 1"),
    )?;
    require(
        dim > 0 && dim % 2 == 0 && dim <= head_dim,
        format_args!("the rotary dimension is {dim}, expected an even number up to {head_dim}"),
    )?;
    let pairs = [BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED];
    require(
        pairs.contains(&r.pairs),
        format_args!("pairs is {}, expected one of {pairs:?}", r.pairs),
    )?;
    let dtype = dtype_of("dtype of the rotary tables", r.dtype)?;
    fits("cos", cos, dtype, [(positions, r.cos_stride), (dim / 2, 1)])?;
    fits("sin", sin, dtype, [(positions, r.sin_stride), (dim / 2, 1)])
}

fn with_tables(r: &blockflash_rotary, tables: Option<&[View<'_>; 2]>) -> blockflash_rotary {
    let [cos, sin] = tables.map_or([null(); 2], |tables| tables.each_ref().map(pointer));
    blockflash_rotary { cos, sin, ..*r }
}

// SAFETY:
// 1. This is the parameter struct of the kernels that append to a cache.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` found to be those of the views, and from offsets, page numbers and positions, each of
//    which the kernel clamps to these sizes or compares with them. Where rows start and end it
//    reads once. Its only loop, a binary search, halves an interval each time.
// 3. The cache and the turned queries are `ViewMut`.
unsafe impl Launch for KvAppend {
    type Operands<'a> = KvAppendOperands<'a>;
    type Plan = blockflash_kv_append_params;
    type Params = blockflash_kv_append_params;
    const FAMILY: &'static str = "appending to a cache";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::KvAppend(kernel) = kernel.variant { Some(kernel) } else { None }
    }

    fn fit(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [head_dim_qk, head_dim_v] = [p.head_dim_qk, p.head_dim_v].map(i64::from);
        require(batch > 0, format_args!("batch is {batch}: a size is not positive"))?;
        for (name, head_dim) in [("head_dim_qk", head_dim_qk), ("head_dim_v", head_dim_v)] {
            require(
                head_dim > 0 && head_dim % PIECE == 0,
                format_args!("{name} is {head_dim}, expected a positive multiple of {PIECE}"),
            )?;
        }
        let seqused = operands.seqused;
        seqused.as_ref().map_or(Ok(()), |x| fits("seqused", x, DType::I32, [(batch, 1)]))?;
        let mut rows = 0i64;
        if let Some(new) = &operands.new {
            let head_dims = [head_dim_qk, head_dim_v];
            new.cache(seqused).fit(&p.cache, self.dtype, [batch, heads_kv], head_dims)?;
            let (seqlen, total) = (p.seqlen_new.into(), p.total_new.into());
            let tokens = Tokens { batch, seqlen, total, heads: heads_kv };
            let k = [p.k_new_stride_batch, p.k_new_stride_seq, p.k_new_stride_head];
            let v = [p.v_new_stride_batch, p.v_new_stride_seq, p.v_new_stride_head];
            let tensors = [("k_new", new.k, head_dim_qk, k), ("v_new", new.v, head_dim_v, v)];
            rows += tokens.rows(self.dtype, tensors, new.cu_seqlens.as_ref())?;
            new.rotary.as_ref().map_or(Ok(()), |x| fit_rotary(&p.rotary_new, x, head_dim_qk))?;
        }
        if let Some(queries) = &operands.queries {
            let (seqlen, total) = (p.seqlen_q.into(), p.total_q.into());
            let tokens = Tokens { batch, seqlen, total, heads: heads_q };
            let q = [p.q_stride_batch, p.q_stride_seq, p.q_stride_head];
            let turned = [p.q_turned_stride_batch, p.q_turned_stride_seq, p.q_turned_stride_head];
            let tensors = [
                ("q", queries.q, head_dim_qk, q),
                ("q_turned", queries.turned.as_view(), head_dim_qk, turned),
            ];
            rows = rows.saturating_add(tokens.rows(
                self.dtype,
                tensors,
                queries.cu_seqlens.as_ref(),
            )?);
            fit_rotary(&p.rotary_q, &queries.rotary, head_dim_qk)?;
        }
        require(
            rows > 0,
            format_args!("there are {rows} rows of keys and queries, expected at least 1"),
        )?;
        // The kernel counts rows in 32 bits.
        require(rows <= i32::MAX.into(), format_args!("{rows} rows, the limit is {}", i32::MAX))?;
        Ok(ceil_div(rows * (head_dim_qk.max(head_dim_v) / PIECE), 32 * self.warps()))
    }

    fn params(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let (new, queries) = (operands.new.as_ref(), operands.queries.as_ref());
        let cache = blockflash_kv_cache {
            k: null(),
            v: null(),
            block_table: null(),
            seqused: optional(operands.seqused.as_ref()).cast(),
            ..p.cache
        };
        let cu_seqlens = |x: Option<View<'_>>| optional(x.as_ref()).cast();
        Ok(blockflash_kv_append_params {
            cache: new.map_or(cache, |new| new.cache(operands.seqused).pointers(&p.cache)),
            k_new: new.map_or(null(), |new| pointer(&new.k)),
            v_new: new.map_or(null(), |new| pointer(&new.v)),
            cu_seqlens_new: cu_seqlens(new.and_then(|new| new.cu_seqlens)),
            q: queries.map_or(null(), |queries| pointer(&queries.q)),
            q_turned: queries.map_or(null_mut(), |queries| pointer_mut(&queries.turned)),
            cu_seqlens_q: cu_seqlens(queries.and_then(|queries| queries.cu_seqlens)),
            rotary_new: with_tables(&p.rotary_new, new.and_then(|new| new.rotary.as_ref())),
            rotary_q: with_tables(&p.rotary_q, queries.map(|queries| &queries.rotary)),
            ..*p
        })
    }
}

#[cfg(test)]
#[path = "kv_append_tests.rs"]
mod tests;
