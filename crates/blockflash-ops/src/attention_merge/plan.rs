use super::AttentionMergeProblem;
use crate::check::{grid_x, to_i32, to_i64};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::params::{
    BLOCKFLASH_DTYPE_BF16, BLOCKFLASH_DTYPE_F16, BLOCKFLASH_DTYPE_F32,
    blockflash_attention_merge_params,
};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};

/// A launch as plain data, without pointers.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMergePlan {
    /// The kernel argument.
    pub params: blockflash_attention_merge_params,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Fills the kernel argument and the launch configuration of `kernel` for a problem that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride of the output that is not a multiple of 4 elements,
/// [`Error::TooLarge`] for a size beyond 32 bits, [`Error::Unsupported`] if the kernel does not
/// compute this problem.
pub fn plan(
    kernel: &Kernel,
    problem: &AttentionMergeProblem,
    gpu: &CudaProperties,
) -> Result<AttentionMergePlan> {
    fits(kernel, problem, gpu)?;
    let columns = tile_of::<AttentionMergeProblem>(kernel, &gpu.compute_capability)?.max(1);
    if let Some(stride) = problem.o.iter().find(|&stride| stride % 4 != 0) {
        let problem = format!("a stride is {stride} elements, not a multiple of 4");
        return Err(Error::Misaligned { what: "o", problem });
    }
    let threads = problem.head_dim.div_ceil(columns as usize);
    let threads = problem.rows.saturating_mul(problem.num_heads).saturating_mul(threads);
    let blocks = grid_x(&[threads.div_ceil(kernel.threads() as usize)])?;
    let config = LaunchConfig::of(kernel, blocks, false);
    Ok(AttentionMergePlan { params: params(problem)?, config })
}

/// The sizes and strides of a problem, with null pointers.
fn params(problem: &AttentionMergeProblem) -> Result<blockflash_attention_merge_params> {
    let stride = |value| to_i64("stride", value);
    let [parts_part, parts_row, parts_head] = problem.parts_o;
    let [logs_part, logs_head, logs_row] = problem.parts_lse.unwrap_or([0; 3]);
    let [lse_head, lse_row] = problem.lse.unwrap_or([0; 2]);
    let dtype = |dtype| match dtype {
        DType::F16 => BLOCKFLASH_DTYPE_F16,
        DType::BF16 => BLOCKFLASH_DTYPE_BF16,
        _ => BLOCKFLASH_DTYPE_F32,
    };
    Ok(blockflash_attention_merge_params {
        parts: null(),
        parts_lse: null(),
        o: null_mut(),
        lse: null_mut(),
        parts_stride_part: stride(parts_part)?,
        parts_stride_row: stride(parts_row)?,
        parts_stride_head: stride(parts_head)?,
        parts_lse_stride_part: stride(logs_part)?,
        parts_lse_stride_row: stride(logs_row)?,
        parts_lse_stride_head: stride(logs_head)?,
        o_stride_row: stride(problem.o[0])?,
        o_stride_head: stride(problem.o[1])?,
        lse_stride_row: stride(lse_row)?,
        lse_stride_head: stride(lse_head)?,
        count: to_i32("parts", problem.parts)?,
        rows: to_i32("rows", problem.rows)?,
        num_heads_q: to_i32("num_heads", problem.num_heads)?,
        head_dim_v: to_i32("head_dim", problem.head_dim)?,
        parts_dtype: dtype(problem.parts_dtype),
        o_dtype: dtype(problem.o_dtype),
    })
}
