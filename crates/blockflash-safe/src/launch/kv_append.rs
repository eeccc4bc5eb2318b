//! Appending to a cache, and rotary embedding.

use super::attention_decode::KvCacheViews;
use super::attention_merge::dtype_of;
use super::checked::{Launch, Operands};
use super::fit::{Fit, fits, optional, pointer, require};
use crate::{DType, Kernel, Result, View, ViewMut};
use blockflash_sys::KvCacheKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED, blockflash_kv_append_params,
};

/// Keys and values that are appended.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys<'a> {
    /// `[batch, seqlen_new, num_heads_kv, head_dim]`, packed `[total_new, num_heads_kv, head_dim]`.
    pub k: View<'a>,
    /// As `k`.
    pub v: View<'a>,
    /// i32 `[batch + 1]`, with any values: the kernel clamps them.
    pub cu_seqlens: Option<View<'a>>,
}

/// Queries that are rotated.
#[derive(Debug)]
pub struct RotatedQueries<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`, packed `[total_q, num_heads_q, head_dim]`.
    pub q: View<'a>,
    /// As `q`.
    pub rotated: ViewMut<'a>,
    /// i32 `[batch + 1]`, with any values: the kernel clamps them.
    pub cu_seqlens: Option<View<'a>>,
}

/// Tensors of appending to a cache.
#[derive(Debug)]
pub struct KvAppendOperands<'a> {
    /// `[pages, page_size, num_heads_kv, head_dim]`.
    pub k: ViewMut<'a>,
    /// As `k`.
    pub v: ViewMut<'a>,
    /// i32 `[batch, columns]`, as for attention.
    pub block_table: Option<View<'a>>,
    /// i32 `[batch]`: keys of each sequence with the new ones.
    pub seqused: Option<View<'a>>,
    /// What is appended.
    pub new: Option<NewKeys<'a>>,
    /// The queries, if they are rotated.
    pub queries: Option<RotatedQueries<'a>>,
    /// `[positions, rotary_dim / 2]`: cosines and sines.
    pub rotary: Option<[View<'a>; 2]>,
}

impl KvAppendOperands<'_> {
    fn cache(&self) -> KvCacheViews<'_> {
        let Self { k, v, block_table, seqused, .. } = self;
        KvCacheViews {
            k: k.as_view(),
            v: v.as_view(),
            block_table: *block_table,
            seqused: *seqused,
        }
    }

    fn tensors(&self) -> [Option<View<'_>>; 12] {
        let [k, v, table, seqused] = self.cache().views();
        let [k_new, v_new] = self.new.map_or([None, None], |new| [new.k, new.v].map(Some));
        let queries = self.queries.as_ref();
        let [cos, sin] = self.rotary.map_or([None, None], |both| both.map(Some));
        [
            k,
            v,
            table,
            seqused,
            k_new,
            v_new,
            self.new.and_then(|new| new.cu_seqlens),
            queries.map(|queries| queries.q),
            queries.map(|queries| queries.rotated.as_view()),
            queries.and_then(|queries| queries.cu_seqlens),
            cos,
            sin,
        ]
    }
}

impl Operands for KvAppendOperands<'_> {
    fn views(&self) -> impl AsRef<[Option<View<'_>>]> {
        self.tensors()
    }
}

/// The kernel that appends to a cache.
#[derive(Clone, Copy, Debug)]
pub struct KvAppend {
    dtype: DType,
}

/// Threads per CTA, and elements that a thread writes.
const THREADS: i128 = 256;
const PIECE: i64 = 8;

impl KvAppend {
    /// Checks tensors with a row per token and head, and returns the number of these rows.
    fn rows(
        self,
        tensors: &[(&str, View<'_>, [i64; 3])],
        cu_seqlens: Option<&View<'_>>,
        [batch, seqlen, total, heads, head_dim]: [i64; 5],
    ) -> Fit<i64> {
        require(seqlen > 0 && total >= 0, "a size is not positive")?;
        for (name, view, strides) in tensors {
            let &[of_batch, seq, head] = strides;
            let [seq, head, inner] = [seq, head, 1];
            match cu_seqlens {
                Some(_) => {
                    fits(name, view, self.dtype, [(total, seq), (heads, head), (head_dim, inner)])?;
                }
                None => {
                    let rows = [(batch, of_batch), (seqlen, seq), (heads, head), (head_dim, inner)];
                    fits(name, view, self.dtype, rows)?;
                }
            }
            let aligned = strides.iter().all(|stride| stride % PIECE == 0)
                && pointer(view).addr().is_multiple_of(16);
            require(aligned, "a tensor is not aligned to 16 bytes")?;
        }
        let Some(cu_seqlens) = cu_seqlens else { return Ok(batch * seqlen * heads) };
        fits("cu_seqlens", cu_seqlens, DType::I32, [(batch + 1, 1)])?;
        Ok(total * heads)
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernels that append to a cache.
// 2. All pointers come from views. Addresses follow from the sizes and strides in the struct, which
//    `fit` found to be those of the views, and from lengths, offsets, page numbers and positions,
//    each of which the kernel clamps to these sizes.
// 3. The cache and the rotated queries are `ViewMut`.
unsafe impl Launch for KvAppend {
    type Operands<'a> = KvAppendOperands<'a>;
    type Plan = blockflash_kv_append_params;
    type Params = blockflash_kv_append_params;
    const FAMILY: &'static str = "appending to a cache";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::KvCache(KvCacheKernel::Append { dtype }) => Some(Self { dtype }),
            _ => None,
        }
    }

    fn fit(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Fit<i128> {
        let sizes = [p.batch, p.num_heads_q, p.num_heads_kv, p.head_dim].map(i64::from);
        let [batch, heads_q, heads_kv, head_dim] = sizes;
        require(sizes.iter().all(|&size| size > 0), "a size is not positive")?;
        require(head_dim % PIECE == 0, "the head dimension is no multiple of 8")?;
        operands.cache().fit(&p.cache, self.dtype, [batch, heads_kv, head_dim])?;
        let mut rows = 0;
        if let Some(new) = &operands.new {
            let k = [p.k_new_stride_batch, p.k_new_stride_seq, p.k_new_stride_head];
            let v = [p.v_new_stride_batch, p.v_new_stride_seq, p.v_new_stride_head];
            let sizes = [batch, p.seqlen_new.into(), p.total_new.into(), heads_kv, head_dim];
            let tensors = [("k_new", new.k, k), ("v_new", new.v, v)];
            rows += self.rows(&tensors, new.cu_seqlens.as_ref(), sizes)?;
        }
        if let Some(queries) = &operands.queries {
            let q = [p.q_stride_batch, p.q_stride_seq, p.q_stride_head];
            let rotated =
                [p.q_rotated_stride_batch, p.q_rotated_stride_seq, p.q_rotated_stride_head];
            let sizes = [batch, p.seqlen_q.into(), p.total_q.into(), heads_q, head_dim];
            let tensors = [("q", queries.q, q), ("q_rotated", queries.rotated.as_view(), rotated)];
            rows += self.rows(&tensors, queries.cu_seqlens.as_ref(), sizes)?;
        }
        if let Some([cos, sin]) = &operands.rotary {
            let dtype = dtype_of(p.rotary_dtype)?;
            let [positions, dim] = [p.positions, p.rotary_dim].map(i64::from);
            require(positions > 0 && dim > 0, "a size is not positive")?;
            require(dim % 16 == 0 && dim <= head_dim, "no such rotary dimension")?;
            let orders = [BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED];
            require(orders.contains(&p.rotary_order), "an unknown order of pairs")?;
            fits("cos", cos, dtype, [(positions, p.cos_stride), (dim / 2, 1)])?;
            fits("sin", sin, dtype, [(positions, p.sin_stride), (dim / 2, 1)])?;
        }
        require(rows > 0, "there is nothing to do")?;
        // The kernel counts rows in 32 bits.
        require(rows <= i32::MAX.into(), "there are too many rows")?;
        Ok((i128::from(rows * (head_dim / PIECE)) + THREADS - 1) / THREADS)
    }

    fn params(&self, p: &Self::Plan, operands: &Self::Operands<'_>) -> Result<Self::Params> {
        let [_, _, _, _, k_new, v_new, cu_new, q, _, cu_q, cos, sin] = operands.tensors();
        let rotated = operands.queries.as_ref().map(|queries| queries.rotated.as_view());
        Ok(blockflash_kv_append_params {
            cache: operands.cache().pointers(&p.cache),
            k_new: optional(k_new.as_ref()),
            v_new: optional(v_new.as_ref()),
            cu_seqlens_new: optional(cu_new.as_ref()).cast(),
            q: optional(q.as_ref()),
            q_rotated: optional(rotated.as_ref()).cast_mut(),
            cu_seqlens_q: optional(cu_q.as_ref()).cast(),
            cos: optional(cos.as_ref()),
            sin: optional(sin.as_ref()),
            ..*p
        })
    }
}
