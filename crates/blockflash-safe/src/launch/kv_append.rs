//! Appending to a cache, and rotary embeddings.

use super::attention_merge::dtype_code;
use super::attention_sizes::{row_sizes, row_strides};
use super::checked::{Launch, Operands};
use super::fit::{
    Fit, ceil_div, fits, narrow, optional, pointer, require, rows_aligned, steps, strides,
};
use super::kv_cache::KvCacheViews;
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::manifest::{Family, KvAppend, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_DTYPE_F32, BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED,
    blockflash_kv_append_params, blockflash_rotary,
};
use std::ptr::null;

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
    /// What keys and values are divided by, for a cache of codes; `None` is 1.
    pub scales: [Option<NewScales<'a>>; 2],
}

/// The scales of keys, or of values, that are appended to a cache of codes.
#[derive(Debug)]
pub enum NewScales<'a> {
    /// As in [`KvCacheViews`], with any values.
    Given(View<'a>),
    /// f32 `[pages, page_size, num_heads_kv]`: the kernel chooses and writes those of the new rows.
    Chosen(ViewMut<'a>),
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
    pub(super) fn cache<'c>(&'c self, seqused: Option<View<'c>>) -> KvCacheViews<'c> {
        let (k, v) = (self.cache_k.as_view(), self.cache_v.as_view());
        let scales = self.scales.each_ref().map(|scales| scales.as_ref().map(NewScales::as_view));
        KvCacheViews { k, v, block_table: self.block_table, seqused, scales }
    }
}

impl NewScales<'_> {
    fn as_view(&self) -> View<'_> {
        match self {
            Self::Given(view) => *view,
            Self::Chosen(view) => view.as_view(),
        }
    }

    fn used(&self) -> Used<'_> {
        match self {
            Self::Given(view) => view.used(),
            Self::Chosen(view) => view.used(),
        }
    }
}

impl Operands for KvAppendOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [k, v, table, new_k, new_v, cu_new, cos, sin, k_scale, v_scale] =
            self.new.as_ref().map_or([None; 10], |new| {
                let [k, v] = [&new.cache_k, &new.cache_v].map(|view| Some(view.used()));
                let [table, cu_new] =
                    [&new.block_table, &new.cu_seqlens].map(|view| view.as_ref().map(View::used));
                let [cos, sin] = new
                    .rotary
                    .as_ref()
                    .map_or([None; 2], |[c, s]| [Some(c.used()), Some(s.used())]);
                let [k_scale, v_scale] =
                    new.scales.each_ref().map(|scales| scales.as_ref().map(NewScales::used));
                let [new_k, new_v] = [&new.k, &new.v].map(|view| Some(view.used()));
                [k, v, table, new_k, new_v, cu_new, cos, sin, k_scale, v_scale]
            });
        let [q, turned, cu_q, q_cos, q_sin] = self.queries.as_ref().map_or([None; 5], |queries| {
            let [cos, sin] = &queries.rotary;
            let [q, cos, sin] = [&queries.q, cos, sin].map(|view| Some(view.used()));
            let cu_seqlens = queries.cu_seqlens.as_ref().map(View::used);
            [q, Some(queries.turned.used()), cu_seqlens, cos, sin]
        });
        let seqused = self.seqused.as_ref().map(View::used);
        [
            seqused, k, v, table, new_k, new_v, cu_new, cos, sin, k_scale, v_scale, q, turned,
            cu_q, q_cos, q_sin,
        ]
    }
}

/// Elements that a thread writes.
const PIECE: i64 = 8;

/// What an append knows beside its tensors: of the new tokens, and of the queries.
#[derive(Clone, Copy, Debug)]
pub struct KvAppendPlan {
    /// Tokens of the longest sequence in a packed batch; ignored otherwise.
    pub longest: [i32; 2],
    /// Which elements of a row have a common angle: `BLOCKFLASH_ROTARY_…`; ignored without angles.
    pub pairs: [i32; 2],
    /// Keys of each sequence where neither lengths nor a cache are given; ignored otherwise.
    pub capacity: i32,
}

/// Two tensors with a row for each token and head, which have been found to fit.
struct Tokens {
    batch: i64,
    seqlen: i64,
    /// Rows of packed tensors; 0 otherwise.
    total: i64,
    heads: i64,
    /// One for each head of each token.
    rows: i64,
    /// Strides of both along batch entries, tokens and heads.
    strides: [[i64; 3]; 2],
}

impl Tokens {
    const NONE: Self =
        Self { batch: 0, seqlen: 0, total: 0, heads: 0, rows: 0, strides: [[0; 3]; 2] };

    fn of(
        dtype: DType,
        tensors: [(&str, &View<'_>, i64); 2],
        cu_seqlens: Option<&View<'_>>,
        longest: i32,
    ) -> Fit<Self> {
        let (name, view, _) = tensors[0];
        let packed = cu_seqlens.is_some();
        let [entries, tokens, heads, _] = row_sizes(name, view, packed)?;
        let (mut batch, mut seqlen, mut total) = (entries, tokens, 0);
        if let Some(offsets) = cu_seqlens {
            batch = offsets.shape().first().map_or(0, |&count| count as i64) - 1;
            fits("cu_seqlens", offsets, DType::I32, [(batch + 1, 1)])?;
            (seqlen, total) = (longest.into(), tokens);
        }
        let sizes = [batch, seqlen, tokens, heads];
        require(
            sizes.iter().all(|&size| size > 0),
            format_args!("batch, seqlen, tokens and heads are {sizes:?}: a size is not positive"),
        )?;
        let outer = [entries, tokens, heads];
        let mut strides = [[0; 3]; 2];
        for (strides, (name, view, columns)) in strides.iter_mut().zip(tensors) {
            *strides = row_strides(name, view, dtype, packed, [entries, tokens, heads, columns])?;
            let dims = [0, 1, 2].map(|dim| (outer[dim], strides[dim]));
            rows_aligned(name, view, PIECE, steps(&dims))?;
        }
        let rows = entries.saturating_mul(tokens).saturating_mul(heads);
        Ok(Self { batch, seqlen, total, heads, rows, strides })
    }
}

/// Checks the tables of a rotary embedding against a head dimension, and writes its argument, which
/// is zeros before. Without tables kernels read only that there are none.
#[inline]
fn fit_rotary(
    tables: Option<&[View<'_>; 2]>,
    pairs: i32,
    head_dim: i64,
    rotary: &mut blockflash_rotary,
) -> Fit {
    (rotary.pairs, rotary.dtype) = (BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_DTYPE_F32);
    let Some([cos, sin]) = tables else { return Ok(()) };
    let &[positions, half] = cos.shape() else {
        return Err(format!("cos has the shape {:?}, expected [positions, dim / 2]", cos.shape()));
    };
    let [positions, half] = [positions, half].map(|size| size as i64);
    require(
        positions > 0,
        format_args!("the rotary tables have {positions} positions, expected at least 1"),
    )?;
    let dim = half.saturating_mul(2);
    require(
        dim > 0 && dim <= head_dim,
        format_args!("the rotary dimension is {dim}, expected an even number up to {head_dim}"),
    )?;
    let known = [BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED];
    require(known.contains(&pairs), format_args!("pairs is {pairs}, expected one of {known:?}"))?;
    [rotary.cos_stride, _] = strides("cos", cos, cos.dtype(), [positions, half])?;
    [rotary.sin_stride, _] = strides("sin", sin, cos.dtype(), [positions, half])?;
    (rotary.cos, rotary.sin) = (pointer(cos), pointer(sin));
    rotary.positions = narrow("positions", positions)?;
    (rotary.dim, rotary.pairs) = (narrow("rotary dimension", dim)?, pairs);
    rotary.dtype = dtype_code("cos", cos.dtype())?;
    Ok(())
}

/// The element types of an append.
pub(super) struct AppendTypes {
    pub(super) cache: DType,
    pub(super) new: DType,
    pub(super) q: DType,
}

impl KvAppendOperands<'_> {
    /// Checks the tensors but for scales, writes the argument, and returns the rows and the pieces
    /// of the widest one.
    pub(super) fn fit(
        &self,
        dtypes: &AppendTypes,
        plan: &KvAppendPlan,
        params: &mut blockflash_kv_append_params,
    ) -> Fit<[i64; 2]> {
        let (new, queries) = (self.new.as_ref(), self.queries.as_ref());
        let seqused = self.seqused;
        let turned = queries.map(|queries| queries.turned.as_view());
        let cu_new = new.and_then(|new| new.cu_seqlens.as_ref());
        let cu_q = queries.and_then(|queries| queries.cu_seqlens.as_ref());
        let [longest_new, longest_q] = plan.longest;

        let (mut of_new, mut of_q) = (Tokens::NONE, Tokens::NONE);
        let mut head_dims = queries.map_or([0; 2], |queries| {
            [queries.q.shape().last().map_or(0, |&columns| columns as i64); 2]
        });
        if let Some(new) = new {
            let batch = match (cu_new, new.k.shape().first()) {
                (Some(offsets), _) => offsets.shape().first().map_or(0, |&n| n as i64) - 1,
                (None, entries) => entries.map_or(0, |&entries| entries as i64),
            };
            let sizes = new.cache(seqused).fit(dtypes.cache, batch, &mut params.cache)?;
            head_dims = [sizes[1], sizes[2]];
            let tensors = [("k_new", &new.k, sizes[1]), ("v_new", &new.v, sizes[2])];
            of_new = Tokens::of(dtypes.new, tensors, cu_new, longest_new)?;
            require(
                of_new.heads == sizes[0],
                format_args!("k_new has {} heads, the cache has {}", of_new.heads, sizes[0]),
            )?;
        }
        let [head_dim_qk, head_dim_v] = head_dims;
        for (name, head_dim) in [("head_dim_qk", head_dim_qk), ("head_dim_v", head_dim_v)] {
            require(
                head_dim > 0 && head_dim % PIECE == 0,
                format_args!("{name} is {head_dim}, expected a positive multiple of {PIECE}"),
            )?;
        }
        if let (Some(queries), Some(turned)) = (queries, &turned) {
            let tensors = [("q", &queries.q, head_dim_qk), ("q_turned", turned, head_dim_qk)];
            of_q = Tokens::of(dtypes.q, tensors, cu_q, longest_q)?;
        }
        let batch = of_new.batch.max(of_q.batch);
        require(
            new.is_none() || queries.is_none() || of_new.batch == of_q.batch,
            format_args!(
                "there are {} sequences of tokens and {} of queries",
                of_new.batch, of_q.batch
            ),
        )?;
        if new.is_none() {
            let seqused = seqused.as_ref();
            seqused.map_or(Ok(()), |x| fits("seqused", x, DType::I32, [(batch, 1)]))?;
            params.cache.seqused = optional(seqused).cast();
            params.cache.capacity = plan.capacity;
        }
        let rows = of_new.rows.saturating_add(of_q.rows);
        require(
            rows > 0,
            format_args!("there are {rows} rows of keys and queries, expected at least 1"),
        )?;
        // The kernel counts rows in 32 bits.
        require(rows <= i32::MAX.into(), format_args!("{rows} rows, the limit is {}", i32::MAX))?;
        let tables =
            [new.and_then(|new| new.rotary.as_ref()), queries.map(|queries| &queries.rotary)];
        let ([k, v], [q, o]) = (of_new.strides, of_q.strides);
        params.k_new = new.map_or(null(), |new| pointer(&new.k));
        params.v_new = new.map_or(null(), |new| pointer(&new.v));
        params.cu_seqlens_new = optional(cu_new).cast();
        params.q = queries.map_or(null(), |queries| pointer(&queries.q));
        params.q_turned = optional(turned.as_ref()).cast_mut();
        params.cu_seqlens_q = optional(cu_q).cast();
        fit_rotary(tables[0], plan.pairs[0], head_dim_qk, &mut params.rotary_new)?;
        fit_rotary(tables[1], plan.pairs[1], head_dim_qk, &mut params.rotary_q)?;
        params.k_new_stride_batch = k[0];
        params.k_new_stride_seq = k[1];
        params.k_new_stride_head = k[2];
        params.v_new_stride_batch = v[0];
        params.v_new_stride_seq = v[1];
        params.v_new_stride_head = v[2];
        params.q_stride_batch = q[0];
        params.q_stride_seq = q[1];
        params.q_stride_head = q[2];
        params.q_turned_stride_batch = o[0];
        params.q_turned_stride_seq = o[1];
        params.q_turned_stride_head = o[2];
        params.batch = narrow("batch", batch)?;
        params.num_heads_q = narrow("num_heads_q", of_q.heads)?;
        params.num_heads_kv = narrow("num_heads_kv", of_new.heads)?;
        params.head_dim_qk = narrow("head_dim_qk", head_dim_qk)?;
        params.head_dim_v = narrow("head_dim_v", head_dim_v)?;
        params.seqlen_new = narrow("seqlen_new", of_new.seqlen)?;
        params.total_new = narrow("total_new", of_new.total)?;
        params.seqlen_q = narrow("seqlen_q", of_q.seqlen)?;
        params.total_q = narrow("total_q", of_q.total)?;
        Ok([rows, head_dim_qk.max(head_dim_v) / PIECE])
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernels that append to a cache.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` wrote from the views, and from offsets, page numbers and positions, each of
//    which the kernel clamps to these sizes or compares with them. Where rows start and end it
//    reads once. Its only loop, a binary search, halves an interval each time.
// 3. The cache and the turned queries are `ViewMut`.
unsafe impl Launch for KvAppend {
    type Operands<'a> = KvAppendOperands<'a>;
    type Plan = KvAppendPlan;
    type Params = blockflash_kv_append_params;
    const FAMILY: &'static str = "appending to a cache";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::KvAppend(kernel) = kernel.variant { Some(kernel) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Self { dtype } = *self;
        let types = AppendTypes { cache: dtype, new: dtype, q: dtype };
        let [rows, pieces] = operands.fit(&types, plan, params)?;
        operands.new.as_ref().map_or(Ok(()), |new| new.cache(None).refuse_scales())?;
        Ok(ceil_div(rows * pieces, 32 * self.warps()))
    }
}

#[cfg(test)]
#[path = "kv_append_tests.rs"]
mod tests;
