//! The workspace of attention backward.

use super::attention_bwd::{AttentionBwdOperands, AttentionBwdPlan};
use super::attention_sizes::Sizes;
use super::fit::{Fit, fits, pointer, require, starts_at};
use crate::{DType, ViewMut};
use blockflash_sys::params::blockflash_attention_bwd_params;
use std::ptr::null_mut;

/// Rows for which the statistics of a sequence have room at a time. Kernels read them by whole
/// tiles.
pub const STATISTICS_ROWS: usize = 64;
/// Keys for which parts of dk and dv have room at a time: as many as the largest tile has.
pub(super) const PART_ROWS: usize = 128;

/// Parts of the query heads that share a head of keys. A CTA for each of them leaves dk and dv of
/// its heads in the workspace, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionBwdParts {
    /// How many, 2 to the heads of a group.
    pub count: i32,
    /// Columns of dk and of dv, by the kernel that leaves them.
    pub head_dim: usize,
}

/// What a workspace holds behind the statistics; null where a plan has none of it.
pub(super) struct Sums {
    /// Sums of dq.
    pub(super) dq: *mut f32,
    /// Parts of dk and dv.
    pub(super) key_parts: *mut f32,
}

impl Sums {
    /// There are only statistics.
    pub(super) const NONE: Self = Self { dq: null_mut(), key_parts: null_mut() };
}

/// Numbers in the workspace for parts of dk and dv: of this many heads of keys over all batch
/// entries, with `seqlen_kv` keys each. `None` beyond the address space.
pub fn attention_bwd_part_values(
    parts: AttentionBwdParts,
    heads: usize,
    seqlen_kv: usize,
) -> Option<usize> {
    let rows = seqlen_kv.checked_next_multiple_of(PART_ROWS)?;
    let tensors = heads.checked_mul(usize::try_from(parts.count).ok()?)?.checked_mul(2)?;
    tensors.checked_mul(rows)?.checked_mul(parts.head_dim)
}

/// Bytes of workspace for this many rows of statistics over all heads and batch entries, a multiple
/// of [`STATISTICS_ROWS`], for sums of dq by a kernel with this head dimension, and for
/// [`attention_bwd_part_values`]. `None` beyond the address space.
pub fn attention_bwd_workspace(
    rows: usize,
    sums_head_dim: Option<usize>,
    part_values: usize,
) -> Option<usize> {
    let statistics = rows.checked_mul(2 * size_of::<f32>())?;
    let sums = match sums_head_dim {
        None => 0,
        Some(head_dim) => {
            let sums = rows.checked_mul(head_dim)?.checked_mul(size_of::<f32>())?;
            semaphore_bytes(rows).checked_add(sums)?
        }
    };
    let parts = part_values.checked_mul(size_of::<f32>())?;
    let bytes = statistics.checked_add(sums)?.checked_add(parts)?;
    Some(bytes).filter(|&bytes| isize::try_from(bytes).is_ok())
}

/// Bytes of the words that count the blocks of keys that have been added to a tile of queries. The
/// sums behind them begin at a multiple of 16.
fn semaphore_bytes(rows: usize) -> usize {
    (rows / STATISTICS_ROWS * size_of::<u32>()).next_multiple_of(16)
}

impl AttentionBwdOperands<'_> {
    /// Writes how the statistics are stored and where the parts of the workspace are, which has
    /// room for them, and returns where the sums are. The kernels clamp the offsets of a packed
    /// batch, so each sequence has room: see `statistics_row` in `gradient.cuh`.
    pub(super) fn fit_workspace(
        &self,
        sizes: &Sizes,
        plan: &AttentionBwdPlan,
        params: &mut blockflash_attention_bwd_params,
    ) -> Fit<Sums> {
        let tile = STATISTICS_ROWS as i64;
        let (entries, rows) = match sizes.packed {
            true => (1, (sizes.rows_q / tile + sizes.batch) * tile),
            false => (sizes.batch, (sizes.rows_q + tile - 1) / tile * tile),
        };
        params.statistics_stride_head = rows;
        // The kernels add the batch stride also when the batch is packed.
        params.statistics_stride_batch = if sizes.packed { 0 } else { rows * sizes.heads_q };
        let rows = i128::from(rows) * i128::from(sizes.heads_q) * i128::from(entries);
        // The kernels count tiles of rows in 32 bits.
        require(
            rows / (STATISTICS_ROWS as i128) <= i128::from(i32::MAX),
            format_args!(
                "{rows} rows of statistics, the limit is {}",
                i64::from(i32::MAX) * STATISTICS_ROWS as i64
            ),
        )?;
        let rows = rows as usize;
        let heads = usize::try_from(i128::from(sizes.heads_kv) * i128::from(sizes.batch));
        let values = plan.parts.map_or(Some(0), |parts| {
            attention_bwd_part_values(parts, heads.ok()?, sizes.lengths[1] as usize)
        });
        // Both statistics, the semaphores and the sums of dq, and then parts of dk and dv.
        let first_part = attention_bwd_workspace(rows, plan.sums_head_dim, 0);
        let needed =
            values.and_then(|values| attention_bwd_workspace(rows, plan.sums_head_dim, values));
        let (needed, first_part) = needed.zip(first_part).ok_or_else(|| {
            format!("{rows} rows of statistics need a workspace of more than {} bytes", usize::MAX)
        })?;
        let Some(workspace) = self.workspace.as_ref().map(ViewMut::as_view) else {
            require(
                needed == 0,
                format_args!("there is no workspace, and {needed} bytes are needed"),
            )?;
            return Ok(Sums::NONE);
        };
        let bytes = workspace.shape().first().map_or(0, |&bytes| bytes as i64);
        fits("workspace", &workspace, DType::U8, [(bytes, 1)])?;
        require(
            needed as i64 <= bytes,
            format_args!("the workspace has {bytes} bytes of {needed}"),
        )?;
        starts_at(16, "workspace", &workspace)?;
        let at = |bytes| pointer(&workspace).cast_mut().cast::<u8>().wrapping_add(bytes);
        let statistics = rows * size_of::<f32>();
        (params.negative_logs, params.deltas) = (at(0).cast(), at(statistics).cast());
        let mut sums = Sums::NONE;
        if plan.sums_head_dim.is_some() {
            params.semaphores = at(2 * statistics).cast();
            sums.dq = at(2 * statistics + semaphore_bytes(rows)).cast();
        }
        if plan.parts.is_some() {
            sums.key_parts = at(first_part).cast();
        }
        Ok(sums)
    }
}
