//! The sizes that all attention kernels have in common, checked against the tensors.

use super::fit::{Fit, fits, optional, require};
use crate::{DType, View};
use blockflash_sys::params::{blockflash_attention_fwd_params, blockflash_scores};
use blockflash_sys::{ElementTypes, HeadDims};

/// The inputs that forward and backward share.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'v, 'a> {
    pub q: &'v View<'a>,
    pub k: &'v View<'a>,
    pub v: &'v View<'a>,
    pub sink: Option<&'v View<'a>>,
    pub cu_seqlens: Option<&'v [View<'a>; 2]>,
}

/// Sizes that are those of the inputs. Heads of keys and head dimensions are positive.
pub(super) struct Sizes {
    pub types: ElementTypes,
    pub packed: bool,
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
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

/// Checks head dimensions against the largest ones of a kernel.
pub(super) fn fit_head_dims(head_dims: [i64; 2], widest: HeadDims) -> Fit {
    let named = [("head_dim_qk", widest.qk), ("head_dim_v", widest.v)];
    for (found, (name, widest)) in head_dims.into_iter().zip(named) {
        require(
            found > 0 && found % 8 == 0 && found <= widest as i64,
            format_args!("{name} is {found}, expected a multiple of 8 up to {widest}"),
        )?;
    }
    Ok(())
}

impl Sizes {
    pub(super) fn of(
        p: &blockflash_attention_fwd_params,
        inputs: Inputs<'_, '_>,
        types: ElementTypes,
        widest: HeadDims,
    ) -> Fit<Self> {
        let Inputs { q, k, v, sink, cu_seqlens } = inputs;
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [seqlen_q, seqlen_kv] = [p.seqlen_q, p.seqlen_kv].map(i64::from);
        let [head_dim_qk, head_dim_v] = [p.head_dim_qk, p.head_dim_v].map(i64::from);
        let positive =
            heads_kv > 0 && [batch, heads_q, seqlen_q, seqlen_kv].iter().all(|&size| size >= 0);
        require(
            positive,
            format_args!(
                "batch {batch}, heads {heads_q} and {heads_kv}, lengths {seqlen_q} and \
                 {seqlen_kv}: a size is not positive"
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        fit_head_dims([head_dim_qk, head_dim_v], widest)?;
        let packed = cu_seqlens.is_some();
        let rows_of = |view: &View<'_>| view.shape().first().map_or(0, |&rows| rows as i64);
        let [rows_q, rows_kv] = if packed { [q, k].map(rows_of) } else { [seqlen_q, seqlen_kv] };
        if let Some([cu_q, cu_kv]) = cu_seqlens {
            fits("cu_seqlens_q", cu_q, DType::I32, [(batch + 1, 1)])?;
            fits("cu_seqlens_kv", cu_kv, DType::I32, [(batch + 1, 1)])?;
            // The kernels clamp the offsets to these sizes.
            let totals = [p.total_q, p.total_kv].map(i64::from) == [rows_q, rows_kv];
            require(
                totals,
                format_args!(
                    "total_q and total_kv are {} and {}, the tensors have {rows_q} and {rows_kv} \
                     rows",
                    p.total_q, p.total_kv
                ),
            )?;
        }
        let sizes = Self {
            types,
            packed,
            batch,
            heads_q,
            heads_kv,
            rows_q,
            rows_kv,
            head_dim_qk,
            head_dim_v,
        };
        sizes.queries("q", q, [p.q_stride_batch, p.q_stride_seq, p.q_stride_head])?;
        sizes.keys("k", k, [p.k_stride_batch, p.k_stride_seq, p.k_stride_head])?;
        sizes.values("v", v, [p.v_stride_batch, p.v_stride_seq, p.v_stride_head])?;
        sink.map_or(Ok(()), |sink| fits("sink", sink, DType::F32, [(heads_q, 1)]))?;
        Ok(sizes)
    }

    /// Checks a tensor in the shape of q: its strides along batch entries, rows and heads.
    pub(super) fn queries(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        let sizes = [self.rows_q, self.heads_q, self.head_dim_qk];
        self.rows(name, view, self.types.q, sizes, strides)
    }

    /// Checks a tensor in the shape of o.
    pub(super) fn outputs(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        let sizes = [self.rows_q, self.heads_q, self.head_dim_v];
        self.rows(name, view, self.types.o, sizes, strides)
    }

    /// Checks a tensor in the shape of k.
    pub(super) fn keys(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        let sizes = [self.rows_kv, self.heads_kv, self.head_dim_qk];
        self.rows(name, view, self.types.kv, sizes, strides)
    }

    /// Checks a tensor in the shape of v.
    pub(super) fn values(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        let sizes = [self.rows_kv, self.heads_kv, self.head_dim_v];
        self.rows(name, view, self.types.kv, sizes, strides)
    }

    fn rows(
        &self,
        name: &str,
        view: &View<'_>,
        dtype: DType,
        [rows, heads, columns]: [i64; 3],
        [of_batch, seq, head]: [i64; 3],
    ) -> Fit {
        let [seq, head, inner] = [(rows, seq), (heads, head), (columns, 1)];
        match self.packed {
            true => fits(name, view, dtype, [seq, head, inner]),
            false => fits(name, view, dtype, [(self.batch, of_batch), seq, head, inner]),
        }
    }

    /// Checks the log-sum-exp.
    pub(super) fn lse(&self, lse: &View<'_>, p: &blockflash_attention_fwd_params) -> Fit {
        let [head, row] = [(self.heads_q, p.lse_stride_head), (self.rows_q, 1)];
        match self.packed {
            true => fits("lse", lse, DType::F32, [head, row]),
            false => fits("lse", lse, DType::F32, [(self.batch, p.lse_stride_batch), head, row]),
        }
    }
}
