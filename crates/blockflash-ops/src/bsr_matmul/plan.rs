use super::{Activation, BiasKind, BsrProblem, cost, narrow};
use crate::check::{grid_x, persistent_grid, to_i64};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::manifest::{BsrMatmulTile, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_ACTIVATION_GELU, BLOCKFLASH_ACTIVATION_NONE, BLOCKFLASH_ACTIVATION_RELU,
    BLOCKFLASH_ACTIVATION_SILU, BLOCKFLASH_DTYPE_BF16, BLOCKFLASH_DTYPE_F16, BLOCKFLASH_DTYPE_F32,
    blockflash_bsr_matmul_any_params, blockflash_bsr_matmul_params,
};
use blockflash_sys::{DType, Kernel, Major};
use std::ptr::{null, null_mut};

/// A launch as plain data, before it has any pointer.
#[derive(Clone, Copy, Debug)]
pub struct BsrMatmulPlan {
    /// The kernel argument, or what it is made from; all pointers are null.
    pub params: blockflash_bsr_matmul_params,
    /// Grid, block and shared memory, for whole tiles.
    pub config: LaunchConfig,
    /// Parts in which the longest tile is to be computed, with a workspace; 1: tiles are whole.
    pub parts: usize,
    /// Blocks of a block row for a CTA of a kernel for few columns; several share longer ones.
    pub share: usize,
}

/// Fills the kernel argument and the launch configuration of `kernel` for a problem that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::TooLarge`] for a grid or size that the kernel cannot count, [`Error::Unsupported`] if
/// the kernel does not compute this problem, [`Error::DType`] for a C that is no floating-point
/// matrix.
pub fn plan(kernel: &Kernel, problem: &BsrProblem, gpu: &CudaProperties) -> Result<BsrMatmulPlan> {
    fits(kernel, problem, gpu)?;
    planned(kernel, problem, gpu)
}

/// Like `plan`, for a kernel that is known to accept the problem.
pub(super) fn planned(
    kernel: &Kernel,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> Result<BsrMatmulPlan> {
    let tile = &tile_of::<BsrProblem>(kernel, &gpu.compute_capability)?;
    let c_dtype = match problem.c_dtype {
        DType::F16 => BLOCKFLASH_DTYPE_F16,
        DType::BF16 => BLOCKFLASH_DTYPE_BF16,
        DType::F32 => BLOCKFLASH_DTYPE_F32,
        found => {
            return Err(Error::DType { what: "c", expected: "f16, bf16 or f32".into(), found });
        }
    };
    let params = blockflash_bsr_matmul_params {
        row_ptr: null(),
        col_idx: null(),
        values: null(),
        row_order: null(),
        b: null(),
        c: null_mut(),
        bias: null(),
        ldb: to_i64("ldb", problem.ldb)?,
        ldc: to_i64("ldc", problem.ldc)?,
        m: to_i64("m", problem.m)?,
        n: to_i64("n", problem.n)?,
        k: to_i64("k", problem.k)?,
        c_dtype,
        bias_per_row: i32::from(problem.bias == BiasKind::PerRow),
        activation: match problem.activation {
            Activation::None => BLOCKFLASH_ACTIVATION_NONE,
            Activation::Relu => BLOCKFLASH_ACTIVATION_RELU,
            Activation::Gelu => BLOCKFLASH_ACTIVATION_GELU,
            Activation::Silu => BLOCKFLASH_ACTIVATION_SILU,
        },
        b_vectorized: i32::from(problem.b_vectorized),
        c_vectorized: i32::from(problem.c_vectorized),
        alpha: problem.alpha,
        beta: problem.beta,
        c_column_major: i32::from(problem.c_major == Major::Column),
    };
    let blocks = blocks(kernel, tile, problem, gpu, 0)?;
    let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
    let share = match &kernel.variant {
        Variant::BsrMatmulNarrow(narrow) => narrow::share(narrow, problem, gpu),
        _ => usize::MAX,
    };
    Ok(BsrMatmulPlan { params, config, parts: cost::parts(kernel, problem, gpu), share })
}

impl BsrMatmulPlan {
    /// The argument of a kernel that takes any layout, for the layout of this problem.
    pub fn any_params(&self, problem: &BsrProblem) -> blockflash_bsr_matmul_any_params {
        blockflash_bsr_matmul_any_params {
            base: self.params,
            block_idx: null(),
            a_transposed: problem.a_transposed.into(),
            b_column_major: (problem.b_major == Major::Column).into(),
        }
    }

    /// The launch with this many parts per tile of columns, beyond the first parts of all tiles.
    pub(super) fn with_parts(
        &self,
        parts: usize,
        kernel: &Kernel,
        problem: &BsrProblem,
        gpu: &CudaProperties,
    ) -> Result<LaunchConfig> {
        let tile = tile_of::<BsrProblem>(kernel, &gpu.compute_capability)?;
        let [_, y, z] = self.config.grid;
        let grid = [blocks(kernel, &tile, problem, gpu, parts)?, y, z];
        Ok(LaunchConfig { grid, ..self.config })
    }
}

/// CTAs for the tiles of C and, per tile of columns, this many additional parts.
fn blocks(
    kernel: &Kernel,
    tile: &BsrMatmulTile,
    problem: &BsrProblem,
    gpu: &CudaProperties,
    parts: usize,
) -> Result<u32> {
    let mut tiles_m = problem.m.div_ceil(problem.block_size).div_ceil(tile.block_rows as usize);
    if let Variant::BsrMatmulNarrow(narrow) = &kernel.variant {
        tiles_m = tiles_m.saturating_mul(narrow.strips() as usize);
    }
    let tiles = grid_x(&[tile.tiles_n(problem.n as u64) as usize, tiles_m + parts])?;
    let family = kernel.family();
    if !family.is_persistent() {
        return Ok(tiles);
    }
    let each = (gpu.multiprocessors / tile.cluster * tile.cluster).max(tile.cluster);
    let room = each * family.blocks_per_multiprocessor();
    // Where two CTAs share an SM, each SM gets one of this launch at least, even without a tile: so
    // it keeps room for one of the next launch, and none gets two of those.
    let least = if family.may_idle() && tiles > 0 { each } else { 0 };
    Ok(persistent_grid(tiles as usize, room as usize)?.max(least))
}
