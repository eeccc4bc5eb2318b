//! The transpose of a block mask on a GPU.

use super::BlockMask;
use super::validate::Sizes;
use crate::Result;
use crate::check::{grid_x, to_i32};
use crate::selection::{select, tile_of};
use blockflash_safe::{
    BlockLists, BlockMaskTranspose, BlockMaskTransposeOperands, BlockTransposeScratch,
    CudaProperties, Device, LaunchConfig, Stream,
};
use blockflash_sys::Kernel;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_GATHER, BLOCKFLASH_BLOCK_MASK_LIST_T,
    blockflash_block_mask_transpose_params,
};
use std::ptr::{null, null_mut};

/// Columns per CTA of the second step.
const STRIP: usize = 32;

/// Sizes of a block mask that is to be transposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TransposeSizes(Sizes);

impl TransposeSizes {
    fn of(mask: &BlockMask) -> Result<Self> {
        // Entries of both row_ptr are counted in 32 bits.
        Sizes::new(mask.geometry.transposed(), mask.batch, mask.heads)?;
        Ok(Self(Sizes::new(mask.geometry, mask.batch, mask.heads)?))
    }
}

/// What transposing a mask needs besides the mask and its transpose.
#[derive(Debug)]
pub(super) struct Transposing {
    kernel: &'static Kernel,
    scratch: BlockTransposeScratch,
}

impl Transposing {
    /// Allocates for a mask, to which it adds a transpose that is still empty.
    pub(super) fn new(mask: &mut BlockMask, gpu: &CudaProperties, stream: &Stream) -> Result<Self> {
        let sizes = TransposeSizes::of(mask)?;
        let kernel = select(&sizes, gpu)?;
        // Loads the kernel now, since the first launch may be captured in a graph.
        stream.device().preload(kernel)?;
        let [slab_rows, _] = tile_of::<TransposeSizes>(kernel, &kernel.target)?;
        let (groups, rows, cols) = ([mask.batch, mask.heads], mask.rows(), mask.cols());
        let scratch = BlockTransposeScratch::new(groups, rows, cols, slab_rows, stream)?;
        // The transpose has as many blocks as the mask.
        let lists = BlockLists::with_capacity(groups, cols, rows, mask.nnz(), stream)?;
        mask.transpose = Some(lists);
        Ok(Self { kernel, scratch })
    }

    /// Queues the transposition of the mask, with a given kernel or the selected one.
    pub(super) fn launch(
        &mut self,
        kernel: Option<&Kernel>,
        mask: &mut BlockMask,
        stream: &Stream,
    ) -> Result<()> {
        let kernel = kernel.unwrap_or(self.kernel);
        let launches = plan(kernel, &TransposeSizes::of(mask)?, mask.nnz())?;
        let BlockMask { lists, transpose: Some(transpose), .. } = mask else { return Ok(()) };
        for (params, config) in launches.into_iter().flatten() {
            let scratch = &mut self.scratch;
            let operands = BlockMaskTransposeOperands { lists, scratch, transpose };
            stream.launch::<BlockMaskTranspose>(kernel, &config, &params, operands)?;
        }
        Ok(())
    }
}

/// Both launches of a transposition: the kernel argument, with null pointers, and the geometry.
/// None for a mask without blocks.
fn plan(
    kernel: &Kernel,
    TransposeSizes(sizes): &TransposeSizes,
    capacity: usize,
) -> Result<Option<[(blockflash_block_mask_transpose_params, LaunchConfig); 2]>> {
    let [slab_rows, chunk_cols] = tile_of::<TransposeSizes>(kernel, &kernel.target)?;
    let (rows, cols, groups) = (sizes.geometry.rows(), sizes.geometry.cols(), sizes.groups());
    if rows == 0 || cols == 0 {
        return Ok(None);
    }
    let gather = blockflash_block_mask_transpose_params {
        row_ptr: null(),
        col_idx: null(),
        bits: null_mut(),
        counts: null_mut(),
        row_ptr_t: null_mut(),
        col_idx_t: null_mut(),
        step: BLOCKFLASH_BLOCK_MASK_GATHER,
        batch: to_i32("batch", sizes.batch)?,
        heads: to_i32("heads", sizes.heads)?,
        rows: to_i32("rows", rows)?,
        cols: to_i32("cols", cols)?,
        capacity: to_i32("capacity", capacity)?,
    };
    let list =
        blockflash_block_mask_transpose_params { step: BLOCKFLASH_BLOCK_MASK_LIST_T, ..gather };
    let [first, second] = [
        grid_x(&[rows.div_ceil(slab_rows), cols.div_ceil(chunk_cols), groups])?,
        grid_x(&[cols.div_ceil(STRIP), groups])?,
    ]
    .map(|blocks| LaunchConfig::of(kernel, blocks, false));
    Ok(Some([(gather, first), (list, second)]))
}

impl BlockMask {
    /// [`with_transpose`](Self::with_transpose) for a mask on a GPU.
    pub(super) fn with_transpose_on(mut self, gpu: &CudaProperties) -> Result<Self> {
        let stream = self.device().stream()?;
        if self.packed.is_some() || self.bits().is_some() {
            // The kernel knows of no sequences and of no bits.
            return self.to(&Device::cpu().stream()?)?.with_transpose()?.to(&stream);
        }
        Transposing::new(&mut self, gpu, &stream)?.launch(None, &mut self, &stream)?;
        Ok(self)
    }
}

#[cfg(test)]
#[path = "device_transpose_tests.rs"]
mod tests;
