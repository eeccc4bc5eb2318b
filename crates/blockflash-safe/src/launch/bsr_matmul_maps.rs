//! The tensor maps of BSR matmul on Hopper.

use crate::{Result, Swizzle, TensorMapSpec, View};
use blockflash_sys::manifest::BsrMatmulHopper;
use blockflash_sys::params::{blockflash_bsr_matmul_params, blockflash_tensor_map};

/// Columns of a panel: as many elements of two bytes as the swizzle permutes.
const PANEL: u32 = 64;

/// A tensor map before it is encoded: sizes and boxes in elements, strides of the outer dimensions
/// in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Map {
    pub(super) shape: [u64; 3],
    strides_bytes: [u64; 2],
    box_shape: [u32; 3],
    swizzle: Swizzle,
}

/// The maps of A, of the whole panels of B, and of B at its edges. The sizes have been checked.
/// Small blocks of A are copied without a map, as many as follow one another in memory, so their
/// map has no elements. Where small blocks are filled up with zeros, they are copied by whole
/// blocks, with rows as wide as the swizzle. A column-major B is copied as one box; at the right
/// edge, the box has only the columns that exist.
pub(super) fn maps(
    tile: &BsrMatmulHopper,
    p: &blockflash_bsr_matmul_params,
    blocks: u64,
) -> [Map; 3] {
    let blocks = if tile.gathers() && !tile.filled { 0 } else { blocks };
    let filled = tile.filled;
    let tile = tile.tile();
    let bytes = tile.dtype.size() as u64;
    let block = u64::from(tile.block_size);
    let [n, k, ldb] = [p.n, p.k, p.ldb].map(|size| size as u64);
    let swizzle = Swizzle::B128;
    // Transposed, the depth of a stage is rows of the block. Each block of a cluster copies its
    // share.
    let a_rows = if tile.a_transposed { tile.block_k } else { tile.block_size } / tile.cluster;
    let (a_box, a_swizzle) = match filled {
        true => ([tile.block_size, tile.block_size, 1], Swizzle::B64),
        false => ([PANEL, a_rows, 1], swizzle),
    };
    let a = Map {
        shape: [block, block, blocks],
        strides_bytes: [block * bytes, block * block * bytes],
        box_shape: a_box,
        swizzle: a_swizzle,
    };
    let b = if tile.b_column_major {
        // The last dimension is never stepped over, but needs a valid stride.
        let box_shape = [tile.block_k, tile.block_n, 1];
        Map { shape: [k, n, 1], strides_bytes: [ldb * bytes; 2], box_shape, swizzle }
    } else {
        Map {
            shape: [PANEL.into(), k, n / u64::from(PANEL)],
            strides_bytes: [ldb * bytes, u64::from(PANEL) * bytes],
            box_shape: [PANEL, tile.block_k, tile.block_n / PANEL],
            swizzle,
        }
    };
    let edge = n % u64::from(tile.block_n);
    let b_edge = if tile.b_column_major {
        Map { shape: [k, n, edge.min(1)], box_shape: [tile.block_k, edge as u32, 1], ..b }
    } else {
        let box_shape = [PANEL, tile.block_k, 1];
        Map { shape: [n, k, 1], strides_bytes: [ldb * bytes; 2], box_shape, swizzle }
    };
    [a, b, b_edge]
}

impl Map {
    pub(super) fn encode(&self, view: &View<'_>) -> Result<blockflash_tensor_map> {
        self.spec(view).encode(view)
    }

    fn spec(&self, view: &View<'_>) -> TensorMapSpec<'_> {
        TensorMapSpec {
            dtype: view.dtype(),
            shape: &self.shape,
            strides_bytes: &self.strides_bytes,
            box_shape: &self.box_shape,
            swizzle: self.swizzle,
        }
    }
}

/// The map of C, 16 rows of a panel at a time.
pub(super) fn encode_c(
    c: &View<'_>,
    p: &blockflash_bsr_matmul_params,
) -> Result<blockflash_tensor_map> {
    let spec = TensorMapSpec {
        dtype: c.dtype(),
        shape: &[p.n as u64, p.m as u64],
        strides_bytes: &[p.ldc as u64 * c.dtype().size() as u64],
        box_shape: &[PANEL, 16],
        swizzle: Swizzle::B128,
    };
    spec.encode(c)
}

#[cfg(test)]
#[path = "bsr_matmul_maps_tests.rs"]
mod tests;
