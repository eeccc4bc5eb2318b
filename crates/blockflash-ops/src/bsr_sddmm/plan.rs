use super::BsrSddmmProblem;
use crate::check::{grid_of, to_i32};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::params::{blockflash_bsr_sddmm_params, blockflash_tensor_map};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};

/// A launch as plain data, before it has any pointer.
#[derive(Clone, Copy, Debug)]
pub struct BsrSddmmPlan {
    /// The kernel argument, or what it is made from; pointers are null and tensor maps zeros.
    pub params: blockflash_bsr_sddmm_params,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Fills the kernel argument and the launch configuration of `kernel` for a problem that it accepts
/// on this GPU and that has blocks.
///
/// # Errors
/// [`Error::TooLarge`] for sizes or tiles that the kernel cannot count, [`Error::Unsupported`] if
/// the kernel does not compute this problem, [`Error::DType`] for values that are no floating-point
/// numbers.
pub fn plan(
    kernel: &Kernel,
    problem: &BsrSddmmProblem,
    gpu: &CudaProperties,
) -> Result<BsrSddmmPlan> {
    fits(kernel, problem, gpu)?;
    planned(kernel, problem, gpu)
}

/// Like `plan`, for a kernel that is known to accept the problem.
pub(super) fn planned(
    kernel: &Kernel,
    problem: &BsrSddmmProblem,
    gpu: &CudaProperties,
) -> Result<BsrSddmmPlan> {
    let tile = &tile_of::<BsrSddmmProblem>(kernel, &gpu.compute_capability)?;
    if !matches!(problem.values_dtype, DType::F16 | DType::BF16 | DType::F32) {
        let (expected, found) = ("f16, bf16 or f32".into(), problem.values_dtype);
        return Err(Error::DType { what: "values", expected, found });
    }
    let nothing = blockflash_tensor_map { opaque: [0; 16] };
    let params = blockflash_bsr_sddmm_params {
        a: nothing,
        b: nothing,
        row_ptr: null(),
        col_idx: null(),
        values: null_mut(),
        tile_counter: null_mut(),
        m: to_i32("m", problem.m)?,
        n: to_i32("n", problem.n)?,
        k: to_i32("k", problem.k)?,
        nnz_blocks: to_i32("nnz_blocks", problem.nnz_blocks)?,
        // The discriminants are the constants of the ABI.
        values_dtype: problem.values_dtype as i32,
        alpha: problem.alpha,
        beta: problem.beta,
    };
    // Full tiles, and one more per block row whose last tile may be partial. Some of these are
    // empty, which costs only the look-up.
    let tiles = problem.nnz_blocks / tile.blocks as usize + problem.m.div_ceil(problem.block_size);
    let (blocks, waits) = (grid_of(kernel, tiles, gpu)?, kernel.waits_for_predecessor());
    Ok(BsrSddmmPlan { params, config: LaunchConfig::of(kernel, blocks, waits) })
}
