//! The launches that build a block mask on a GPU, as plain data.

use super::choice::{BlockChoice, BlockSource, list_length};
use super::validate::Sizes;
use crate::attention::window_params;
use crate::check::{grid_x, to_i32};
use crate::selection::tile_of;
use crate::{Error, Result};
use blockflash_safe::{LaunchConfig, NO_MASK};
use blockflash_sys::Kernel;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_CHOOSE, BLOCKFLASH_BLOCK_MASK_LIST, BLOCKFLASH_BLOCK_SOURCE_BOOL,
    BLOCKFLASH_BLOCK_SOURCE_LISTS, BLOCKFLASH_BLOCK_SOURCE_SCORES,
    blockflash_block_mask_build_params,
};
use std::ptr::{null, null_mut};

/// The longest list that the kernel can count.
const MAX_LIST: usize = 1 << 30;

/// The steps in the order of their launches, which differ in this parameter only.
pub(super) const STEPS: [i32; 2] = [BLOCKFLASH_BLOCK_MASK_CHOOSE, BLOCKFLASH_BLOCK_MASK_LIST];

/// The kernel argument of the first step, with null pointers, and the launch geometry of both
/// steps. The choice fits the sizes.
pub(super) fn plan(
    kernel: &Kernel,
    sizes: &Sizes,
    choice: &BlockChoice<'_>,
    capacity: usize,
) -> Result<(blockflash_block_mask_build_params, LaunchConfig)> {
    let slab_rows = tile_of::<Sizes>(kernel, &kernel.target)?;
    let Sizes { geometry, batch, heads } = *sizes;
    let (rows, cols) = (geometry.rows(), geometry.cols());
    let (source_kind, k) = match &choice.source {
        BlockSource::Bool(_) => (BLOCKFLASH_BLOCK_SOURCE_BOOL, 0),
        BlockSource::TopK(columns) => (BLOCKFLASH_BLOCK_SOURCE_LISTS, list_length(columns)),
        // No row has more columns.
        BlockSource::Scores { k, .. } => (BLOCKFLASH_BLOCK_SOURCE_SCORES, (*k).min(cols)),
    };
    if k > MAX_LIST {
        return Err(Error::TooLarge { what: "k", value: k, limit: MAX_LIST });
    }
    let limits = choice.mask.limits(geometry.seqlen_q(), geometry.seqlen_kv());
    let params = blockflash_block_mask_build_params {
        source: null(),
        always: NO_MASK,
        bits: null_mut(),
        lengths: null_mut(),
        slab_lengths: null_mut(),
        row_ptr: null_mut(),
        col_idx: null_mut(),
        row_order: null_mut(),
        problems: null_mut(),
        step: STEPS[0],
        source_kind,
        k: to_i32("k", k)?,
        batch: to_i32("batch", batch)?,
        heads: to_i32("heads", heads)?,
        rows: to_i32("rows", rows)?,
        cols: to_i32("cols", cols)?,
        capacity: to_i32("capacity", capacity)?,
        seqlen_q: to_i32("seqlen_q", geometry.seqlen_q())?,
        seqlen_kv: to_i32("seqlen_kv", geometry.seqlen_kv())?,
        block_q: to_i32("block_q", geometry.block_q())?,
        block_kv: to_i32("block_kv", geometry.block_kv())?,
        window: window_params(&limits),
    };
    let blocks = grid_x(&[rows.div_ceil(slab_rows), heads, batch])?;
    Ok((params, LaunchConfig::of(kernel, blocks, false)))
}

#[cfg(test)]
#[path = "build_plan_tests.rs"]
mod tests;
