use super::{AttentionProblem, select};
use crate::check::{grid_x, to_i32, to_i64};
use crate::{Error, Result};
use blockflash_safe::LaunchConfig;
use blockflash_sys::Row;
use blockflash_sys::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_attention_fwd_params};
use std::ptr::{null, null_mut};

/// A launch as plain data, before it has any pointer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlan {
    /// The kernel argument; all pointers are null.
    pub params: blockflash_attention_fwd_params,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
    /// Bytes of device memory that the caller must lend; this kernel needs none.
    pub workspace_bytes: usize,
}

/// Fills the kernel argument and the launch configuration of `row` for a problem that it accepts.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for a grid or size beyond 32
/// bits, [`Error::Unsupported`] if the row is no attention kernel or its tile is too small.
pub fn plan(row: &Row, problem: &AttentionProblem) -> Result<AttentionPlan> {
    let unsupported = |what| Error::Unsupported { op: select::OP, arch: row.target.to_string(), what };
    let Some(tile) = select::tile(row) else {
        return Err(unsupported(format!("{} computes something else", row.symbol())));
    };
    if problem.head_dim > tile.head_dim as usize {
        return Err(unsupported(format!("head_dim {} is wider than {}", problem.head_dim, row.symbol())));
    }
    check_strides(problem)?;

    let tiles_q = problem.seqlen_q.div_ceil(tile.block_q as usize);
    let limits = problem.mask.limits(problem.seqlen_q, problem.seqlen_kv);
    let window = |side: Option<usize>| {
        side.and_then(|side| i32::try_from(side).ok()).unwrap_or(BLOCKFLASH_WINDOW_UNBOUNDED)
    };
    let stride = |value| to_i64("stride", value);
    let params = blockflash_attention_fwd_params {
        q: null(),
        k: null(),
        v: null(),
        o: null_mut(),
        lse: null_mut(),
        sink: null(),
        cu_seqlens_q: null(),
        cu_seqlens_kv: null(),
        q_stride_batch: stride(problem.q.batch)?,
        q_stride_seq: stride(problem.q.seq)?,
        q_stride_head: stride(problem.q.head)?,
        k_stride_batch: stride(problem.k.batch)?,
        k_stride_seq: stride(problem.k.seq)?,
        k_stride_head: stride(problem.k.head)?,
        v_stride_batch: stride(problem.v.batch)?,
        v_stride_seq: stride(problem.v.seq)?,
        v_stride_head: stride(problem.v.head)?,
        o_stride_batch: stride(problem.o.batch)?,
        o_stride_seq: stride(problem.o.seq)?,
        o_stride_head: stride(problem.o.head)?,
        lse_stride_batch: stride(problem.lse.batch)?,
        lse_stride_head: stride(problem.lse.head)?,
        batch: to_i32("batch", problem.batch)?,
        num_heads_q: to_i32("num_heads_q", problem.num_heads_q)?,
        num_heads_kv: to_i32("num_heads_kv", problem.num_heads_kv)?,
        seqlen_q: to_i32("seqlen_q", problem.seqlen_q)?,
        seqlen_kv: to_i32("seqlen_kv", problem.seqlen_kv)?,
        head_dim: to_i32("head_dim", problem.head_dim)?,
        window_left: window(limits.left),
        window_right: window(limits.right),
        align_bottom_right: i32::from(limits.align == super::Align::BottomRight),
        softmax_scale: problem.softmax_scale,
        softcap: problem.softcap.unwrap_or(0.0),
    };
    let config = LaunchConfig {
        grid: [grid_x(&[tiles_q, problem.num_heads_q, problem.batch])?, 1, 1],
        block: row.threads(),
        smem_bytes: row.smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: false,
    };
    Ok(AttentionPlan { params, config, workspace_bytes: 0 })
}

/// The kernel reads and writes 16 bytes at a time, so rows must start at multiples of 8 elements. The stride of a dimension
/// with one entry is never used.
fn check_strides(problem: &AttentionProblem) -> Result<()> {
    let operands = [
        ("q", problem.q, problem.seqlen_q, problem.num_heads_q),
        ("k", problem.k, problem.seqlen_kv, problem.num_heads_kv),
        ("v", problem.v, problem.seqlen_kv, problem.num_heads_kv),
        ("o", problem.o, problem.seqlen_q, problem.num_heads_q),
    ];
    for (what, strides, seqlen, heads) in operands {
        let dims = [
            ("batch", strides.batch, problem.batch),
            ("sequence", strides.seq, seqlen),
            ("head", strides.head, heads),
        ];
        for (dim, stride, extent) in dims {
            if extent > 1 && stride % 8 != 0 {
                let problem = format!("the {dim} stride is {stride} elements, not a multiple of 8");
                return Err(Error::Misaligned { what, problem });
            }
        }
    }
    Ok(())
}
