//! Safe launches: one per kernel, from the planner's parameters and the tensors. The pointers of
//! the parameter struct come from the tensors, and whatever decides which addresses the kernel
//! touches is checked against them.

mod attention_fwd;
mod attention_fwd_tma;
mod block_mask;
mod block_mask_build;
mod block_scores;
mod bsr_matmul;
mod bsr_matmul_any;
#[cfg(test)]
mod bsr_matmul_fixtures;
mod bsr_matmul_maps;
mod bsr_matmul_tma;
mod bsr_parts;
mod bsr_sddmm;
mod bsr_sddmm_portable;

pub use attention_fwd::AttentionFwdOperands;
pub use block_mask_build::BlockMaskBuildOperands;
pub use block_scores::BlockScoresOperands;
pub use bsr_matmul::BsrMatmulOperands;
pub use bsr_parts::{BsrParts, BsrPartsMemory};
pub use bsr_sddmm::BsrSddmmOperands;

use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::ptr;

/// What does not fit; becomes [`Error::Launch`]. Formatting is left to the failure path.
pub(crate) type Fit = std::result::Result<(), String>;

/// Checks element type, shape and strides. Strides of dimensions of size 1 do not matter, nor any
/// of a tensor without elements.
pub(crate) fn fits<const N: usize>(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    dims: [(i64, i64); N],
) -> Fit {
    let same = view.dtype() == dtype
        && view.shape().len() == N
        && dims.iter().zip(view.shape().iter().zip(view.strides())).all(
            |(&(size, stride), (&own, &step))| {
                own as i64 == size
                    && (own <= 1 || step as i64 == stride || view.layout().is_empty())
            },
        );
    if same {
        return Ok(());
    }
    let (found, shape, strides) = (view.dtype(), view.shape(), view.strides());
    Err(format!(
        "{name} is {found} {shape:?} with strides {strides:?}, expected {dtype} (size, stride) {dims:?}"
    ))
}

pub(crate) fn require(condition: bool, what: &str) -> Fit {
    if condition { Ok(()) } else { Err(what.to_owned()) }
}

/// Checks the launch geometry: so many `blocks` in x, and what the row says about the rest.
fn fits_row(config: &LaunchConfig, row: &Row, blocks: RangeInclusive<i128>) -> Fit {
    let [x, y, z] = config.grid;
    if !blocks.contains(&i128::from(x)) || y != 1 || z != 1 {
        return Err(format!("a grid of {x}x{y}x{z} blocks, expected {blocks:?} in x"));
    }
    require(config.block == row.threads(), "the number of threads is not that of the row")?;
    require(config.smem_bytes == row.smem_bytes(), "the shared memory is not that of the row")?;
    let (blocks, expected) = match row.cluster() {
        None => (1, "the kernel has no clusters"),
        Some([blocks, ..]) => (blocks, "the clusters are not those of the row"),
    };
    require(config.cluster == row.cluster(), expected)?;
    require(x % blocks == 0, "the last cluster is not whole")
}

/// Checks that the kernel is not started before its predecessor has finished.
fn starts_last(config: &LaunchConfig) -> Fit {
    require(
        !config.programmatic_dependent_launch,
        "the kernel does not wait for its predecessor itself",
    )
}

fn ceil_div(size: i64, tile: u32) -> i128 {
    (i128::from(size) + i128::from(tile) - 1) / i128::from(tile)
}

pub(crate) fn pointer(view: &View<'_>) -> *const c_void {
    // Device addresses are 64-bit on every platform that CUDA 13 supports.
    ptr::without_provenance(view.device_ptr().unwrap_or(0) as usize)
}

pub(crate) fn pointer_mut(view: &ViewMut<'_>) -> *mut c_void {
    pointer(&view.as_view()).cast_mut()
}

fn optional(view: Option<&View<'_>>) -> *const c_void {
    view.map_or(ptr::null(), pointer)
}

impl Stream {
    pub(crate) fn expect_all(&self, views: &[Option<View<'_>>]) -> Result<()> {
        if self.device().is_cpu() {
            return Err(Error::NotOnGpu { what: "launching a kernel" });
        }
        views.iter().flatten().try_for_each(|view| self.device().expect(view.device()))
    }
}
