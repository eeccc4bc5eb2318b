//! What all attention kernels have in common: sizes and strides, written from the tensors.

use super::fit::{Fit, fits, narrow, optional, pointer, require, strides};
use crate::{DType, View};
use blockflash_sys::params::{blockflash_attention_fwd_params, blockflash_scores};
use blockflash_sys::{ElementTypes, HeadDims};

/// What a launch of attention knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionScalars {
    /// What happens to a score. Its pointer is ignored.
    pub scores: blockflash_scores,
    /// The longest sequences of queries and of keys in a packed batch; ignored otherwise.
    pub longest: [i32; 2],
    /// Queries and keys of a block; ignored without a block mask.
    pub blocks: [i32; 2],
}

/// The tensors that forward and backward share.
#[derive(Clone, Copy)]
pub(super) struct Forward<'v> {
    pub q: &'v View<'v>,
    pub k: &'v View<'v>,
    pub v: &'v View<'v>,
    pub o: &'v View<'v>,
    pub lse: Option<&'v View<'v>>,
    pub sink: Option<&'v View<'v>>,
    pub cu_seqlens: Option<&'v [View<'v>; 2]>,
}

/// Sizes of the tensors of a launch. Those of heads of keys and of head dimensions are positive.
pub(super) struct Sizes {
    pub types: ElementTypes,
    pub packed: bool,
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    /// Queries and keys of a sequence, of the longest one when packed.
    pub lengths: [i64; 2],
    /// Rows of a tensor of queries or of keys: of all sequences together when packed.
    pub rows_q: i64,
    pub rows_kv: i64,
    /// Columns of q and k, and of v and o.
    pub head_dim_qk: i64,
    pub head_dim_v: i64,
}

/// What happens to scores, with the pointer of the sink.
pub(super) fn with_sink(scores: &blockflash_scores, sink: Option<&View<'_>>) -> blockflash_scores {
    blockflash_scores { sink: optional(sink).cast(), ..*scores }
}

/// Checks head dimensions against the largest ones of a kernel, which reads and writes 16 bytes of
/// rows at a time: 8 elements, or 16 of one byte.
pub(super) fn fit_head_dims(head_dims: [i64; 2], widest: HeadDims, types: ElementTypes) -> Fit {
    let multiple = if types.kv.is_code() { 16 } else { 8 };
    let named = [("head_dim_qk", widest.qk), ("head_dim_v", widest.v)];
    for (found, (name, widest)) in head_dims.into_iter().zip(named) {
        require(
            found > 0 && found % multiple == 0 && found <= widest as i64,
            format_args!("{name} is {found}, expected a multiple of {multiple} up to {widest}"),
        )?;
    }
    Ok(())
}

/// Batch entries, rows, heads and columns of a tensor. A packed one counts as one entry.
#[inline]
pub(super) fn row_sizes(name: &str, view: &View<'_>, packed: bool) -> Fit<[i64; 4]> {
    match (packed, view.shape()) {
        (false, &[batch, rows, heads, columns]) => Ok([batch, rows, heads, columns]),
        (true, &[rows, heads, columns]) => Ok([1, rows, heads, columns]),
        (_, shape) => {
            Err(format!("{name} has {} dimensions, expected {}", shape.len(), 4 - packed as usize))
        }
    }
    .map(|sizes| sizes.map(|size| size as i64))
}

/// Strides of a tensor along batch entries, rows and heads; that of the only entry of a packed one
/// is 0.
#[inline]
pub(super) fn row_strides(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    packed: bool,
    sizes: [i64; 4],
) -> Fit<[i64; 3]> {
    let [_, rows, heads, columns] = sizes;
    if packed {
        let [row, head, _] = strides(name, view, dtype, [rows, heads, columns])?;
        return Ok([0, row, head]);
    }
    let [batch, row, head, _] = strides(name, view, dtype, sizes)?;
    Ok([batch, row, head])
}

/// Strides of a log-sum-exp along batch entries and heads; that of the only entry of a packed one
/// is 0.
#[inline]
pub(super) fn lse_strides(view: &View<'_>, packed: bool, sizes: [i64; 3]) -> Fit<[i64; 2]> {
    let [_, heads, rows] = sizes;
    if packed {
        let [head, _] = strides("lse", view, DType::F32, [heads, rows])?;
        return Ok([0, head]);
    }
    let [batch, head, _] = strides("lse", view, DType::F32, sizes)?;
    Ok([batch, head])
}

impl Sizes {
    fn of(tensors: &Forward<'_>, longest: [i32; 2], types: ElementTypes) -> Fit<Self> {
        let packed = tensors.cu_seqlens.is_some();
        let [entries, rows_q, heads_q, head_dim_qk] = row_sizes("q", tensors.q, packed)?;
        let [_, rows_kv, heads_kv, head_dim_v] = row_sizes("v", tensors.v, packed)?;
        let batch = match tensors.cu_seqlens {
            Some([offsets, _]) => offsets.shape().first().map_or(0, |&count| count as i64) - 1,
            None => entries,
        };
        let lengths = if packed { longest.map(i64::from) } else { [rows_q, rows_kv] };
        let positive = heads_kv > 0 && batch >= 0 && lengths.iter().all(|&length| length >= 0);
        require(
            positive,
            format_args!(
                "batch {batch}, heads {heads_q} and {heads_kv}, lengths {lengths:?}: a size is \
                 not positive"
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        Ok(Self {
            types,
            packed,
            batch,
            heads_q,
            heads_kv,
            lengths,
            rows_q,
            rows_kv,
            head_dim_qk,
            head_dim_v,
        })
    }

    /// The strides of a tensor in the shape of q along batch entries, rows and heads.
    pub(super) fn queries(&self, name: &str, view: &View<'_>) -> Fit<[i64; 3]> {
        let sizes = [self.batch, self.rows_q, self.heads_q, self.head_dim_qk];
        row_strides(name, view, self.types.q, self.packed, sizes)
    }

    /// Those of a tensor in the shape of o.
    pub(super) fn outputs(&self, name: &str, view: &View<'_>) -> Fit<[i64; 3]> {
        let sizes = [self.batch, self.rows_q, self.heads_q, self.head_dim_v];
        row_strides(name, view, self.types.o, self.packed, sizes)
    }

    /// Those of a tensor in the shape of k.
    pub(super) fn keys(&self, name: &str, view: &View<'_>) -> Fit<[i64; 3]> {
        let sizes = [self.batch, self.rows_kv, self.heads_kv, self.head_dim_qk];
        row_strides(name, view, self.types.kv, self.packed, sizes)
    }

    /// Those of a tensor in the shape of v.
    pub(super) fn values(&self, name: &str, view: &View<'_>) -> Fit<[i64; 3]> {
        let sizes = [self.batch, self.rows_kv, self.heads_kv, self.head_dim_v];
        row_strides(name, view, self.types.kv, self.packed, sizes)
    }

    /// Writes the sizes.
    pub(super) fn write(&self, params: &mut blockflash_attention_fwd_params) -> Fit {
        params.batch = narrow("batch", self.batch)?;
        params.num_heads_q = narrow("num_heads_q", self.heads_q)?;
        params.num_heads_kv = narrow("num_heads_kv", self.heads_kv)?;
        params.seqlen_q = narrow("seqlen_q", self.lengths[0])?;
        params.seqlen_kv = narrow("seqlen_kv", self.lengths[1])?;
        if self.packed {
            // The kernels clamp the offsets to the rows that there are.
            params.total_q = narrow("total_q", self.rows_q)?;
            params.total_kv = narrow("total_kv", self.rows_kv)?;
        }
        params.head_dim_qk = narrow("head_dim_qk", self.head_dim_qk)?;
        params.head_dim_v = narrow("head_dim_v", self.head_dim_v)?;
        Ok(())
    }
}

impl Forward<'_> {
    /// Checks the tensors against each other and the largest head dimensions of a kernel. Writes
    /// all of the argument but a block mask.
    pub(super) fn fit(
        &self,
        scalars: &AttentionScalars,
        types: ElementTypes,
        widest: HeadDims,
        p: &mut blockflash_attention_fwd_params,
    ) -> Fit<Sizes> {
        let sizes = Sizes::of(self, scalars.longest, types)?;
        let Sizes { packed, batch, heads_q, rows_q, .. } = sizes;
        fit_head_dims([sizes.head_dim_qk, sizes.head_dim_v], widest, types)?;
        sizes.write(p)?;
        if let Some([cu_q, cu_kv]) = self.cu_seqlens {
            fits("cu_seqlens_q", cu_q, DType::I32, [(batch + 1, 1)])?;
            fits("cu_seqlens_kv", cu_kv, DType::I32, [(batch + 1, 1)])?;
            p.cu_seqlens_q = pointer(cu_q).cast();
            p.cu_seqlens_kv = pointer(cu_kv).cast();
        }
        (p.q, p.k, p.v) = (pointer(self.q), pointer(self.k), pointer(self.v));
        p.o = pointer(self.o).cast_mut();
        [p.q_stride_batch, p.q_stride_seq, p.q_stride_head] = sizes.queries("q", self.q)?;
        [p.k_stride_batch, p.k_stride_seq, p.k_stride_head] = sizes.keys("k", self.k)?;
        [p.v_stride_batch, p.v_stride_seq, p.v_stride_head] = sizes.values("v", self.v)?;
        [p.o_stride_batch, p.o_stride_seq, p.o_stride_head] = sizes.outputs("o", self.o)?;
        if let Some(lse) = self.lse {
            p.lse = pointer(lse).cast_mut().cast();
            [p.lse_stride_batch, p.lse_stride_head] =
                lse_strides(lse, packed, [batch, heads_q, rows_q])?;
        }
        self.sink.map_or(Ok(()), |sink| fits("sink", sink, DType::F32, [(heads_q, 1)]))?;
        p.scores = with_sink(&scalars.scores, self.sink);
        Ok(sizes)
    }
}
