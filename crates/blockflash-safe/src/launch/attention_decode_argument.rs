//! What arguments of attention over a cache have in common: tensors, sizes and the workspace.

use super::attention_decode::{AttentionDecodeOperands, Queries};
use super::attention_sizes::Sizes;
use super::bsr_parts::BsrPartsMemory;
use super::fit::{Fit, narrow, optional, pointer, pointer_mut, require};
use blockflash_sys::params::blockflash_attention_decode_params;
use std::ptr::null_mut;

impl AttentionDecodeOperands<'_> {
    /// Writes queries, outputs and sizes, which have been found to fit.
    pub(super) fn write_queries(
        &self,
        Queries { sizes, q, o, lse }: &Queries,
        params: &mut blockflash_attention_decode_params,
    ) -> Fit {
        let Sizes { packed, batch, heads_q, heads_kv, rows_q, .. } = *sizes;
        params.q = pointer(&self.queries());
        params.o = pointer_mut(&self.o);
        params.lse = self.lse.as_ref().map_or(null_mut(), pointer_mut).cast();
        params.cu_seqlens_q = optional(self.cu_seqlens_q.as_ref()).cast();
        [params.q_stride_batch, params.q_stride_seq, params.q_stride_head] = *q;
        [params.o_stride_batch, params.o_stride_seq, params.o_stride_head] = *o;
        [params.lse_stride_batch, params.lse_stride_head] = *lse;
        params.batch = narrow("batch", batch)?;
        params.num_heads_q = narrow("num_heads_q", heads_q)?;
        params.num_heads_kv = narrow("num_heads_kv", heads_kv)?;
        params.seqlen_q = narrow("seqlen_q", sizes.lengths[0])?;
        params.total_q = narrow("total_q", if packed { rows_q } else { 0 })?;
        params.head_dim_qk = narrow("head_dim_qk", sizes.head_dim_qk)?;
        params.head_dim_v = narrow("head_dim_v", sizes.head_dim_v)?;
        Ok(())
    }

    /// Checks that the workspace has room for the results of this many splits, `slots` in all, with
    /// `rows` rows each, and writes it.
    pub(super) fn fit_workspace(
        &self,
        splits: i64,
        slots: i128,
        rows: i64,
        params: &mut blockflash_attention_decode_params,
    ) -> Fit {
        let head_dim_v = i64::from(params.head_dim_v);
        match &self.workspace {
            None => require(splits == 1, format_args!("{splits} splits have no workspace"))?,
            Some(memory) => {
                let sums = slots * i128::from(rows * (head_dim_v + 2));
                let room = sums <= memory.sums() as i128 && slots <= memory.counters() as i128;
                require(
                    splits == 1 || room,
                    format_args!(
                        "the workspace has {} sums and {} counters, {sums} and {slots} are needed",
                        memory.sums(),
                        memory.counters()
                    ),
                )?;
            }
        }
        // Of any size where no sequence is divided, so kernels must not see it then.
        let workspace = self.workspace.filter(|_| splits > 1);
        let sums = workspace.map_or(null_mut(), BsrPartsMemory::sums_pointer);
        let logs = slots.saturating_mul((rows * head_dim_v).into()) as usize;
        params.partial_sums = sums;
        params.partial_logs = sums.wrapping_add(logs);
        params.arrivals = workspace.map_or(null_mut(), BsrPartsMemory::counters_pointer);
        params.partial_rows = narrow("partial_rows", rows)?;
        Ok(())
    }
}
