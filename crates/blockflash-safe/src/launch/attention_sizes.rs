//! The sizes that all attention kernels have in common, checked against the tensors.

use super::fit::{Fit, fits, require};
use crate::{DType, View};
use blockflash_sys::params::blockflash_attention_fwd_params;

/// The inputs that forward and backward share.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'v, 'a> {
    pub q: &'v View<'a>,
    pub k: &'v View<'a>,
    pub v: &'v View<'a>,
    pub sink: Option<&'v View<'a>>,
    pub cu_seqlens: Option<&'v [View<'a>; 2]>,
}

/// Sizes that are those of the inputs. Heads of keys and the head dimension are positive.
pub(super) struct Sizes {
    pub dtype: DType,
    pub packed: bool,
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    /// Rows of a tensor of queries or of keys: of all sequences together when packed.
    pub rows_q: i64,
    pub rows_kv: i64,
    pub head_dim: i64,
}

impl Sizes {
    pub(super) fn of(
        p: &blockflash_attention_fwd_params,
        inputs: Inputs<'_, '_>,
        dtype: DType,
        widest: u32,
    ) -> Fit<Self> {
        let Inputs { q, k, v, sink, cu_seqlens } = inputs;
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [seqlen_q, seqlen_kv, head_dim] = [p.seqlen_q, p.seqlen_kv, p.head_dim].map(i64::from);
        let positive = heads_kv > 0
            && head_dim > 0
            && [batch, heads_q, seqlen_q, seqlen_kv].iter().all(|&size| size >= 0);
        require(
            positive,
            format_args!(
                "batch {batch}, heads {heads_q} and {heads_kv}, lengths {seqlen_q} and \
                 {seqlen_kv}, head_dim {head_dim}: a size is not positive"
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        require(
            head_dim % 8 == 0 && head_dim <= i64::from(widest),
            format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {widest}"),
        )?;
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
        let sizes = Self { dtype, packed, batch, heads_q, heads_kv, rows_q, rows_kv, head_dim };
        sizes.queries("q", q, [p.q_stride_batch, p.q_stride_seq, p.q_stride_head])?;
        sizes.keys("k", k, [p.k_stride_batch, p.k_stride_seq, p.k_stride_head])?;
        sizes.keys("v", v, [p.v_stride_batch, p.v_stride_seq, p.v_stride_head])?;
        sink.map_or(Ok(()), |sink| fits("sink", sink, DType::F32, [(heads_q, 1)]))?;
        Ok(sizes)
    }

    /// Checks a tensor in the shape of q: its strides along batch entries, rows and heads.
    pub(super) fn queries(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        self.rows(name, view, [self.rows_q, self.heads_q], strides)
    }

    /// Checks a tensor in the shape of k.
    pub(super) fn keys(&self, name: &str, view: &View<'_>, strides: [i64; 3]) -> Fit {
        self.rows(name, view, [self.rows_kv, self.heads_kv], strides)
    }

    fn rows(
        &self,
        name: &str,
        view: &View<'_>,
        [rows, heads]: [i64; 2],
        [of_batch, seq, head]: [i64; 3],
    ) -> Fit {
        let [seq, head, inner] = [(rows, seq), (heads, head), (self.head_dim, 1)];
        match self.packed {
            true => fits(name, view, self.dtype, [seq, head, inner]),
            false => fits(name, view, self.dtype, [(self.batch, of_batch), seq, head, inner]),
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
