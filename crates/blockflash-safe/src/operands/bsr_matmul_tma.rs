//! BSR matmul with Hopper's own instructions: tiles are copied by the tensor memory accelerator.

use super::{BsrMatmulOperands, Fit, fits_row, require};
use crate::{
    Error, LaunchConfig, Result, Row, Stream, Swizzle, TensorMap, TensorMapSpec, View, tile_counter,
};
use blockflash_sys::manifest::{BsrMatmulHopper, Variant};
use blockflash_sys::params::{
    blockflash_bsr_matmul_params, blockflash_bsr_matmul_tma_params, blockflash_tensor_map,
};
use std::ptr::null_mut;

/// Columns of a panel: as many elements of two bytes as the swizzle permutes.
const PANEL: u32 = 64;
/// Sizes are below this: the kernel adds a tile to them in 32 bits.
const SIZE_LIMIT: i64 = (1 << 31) - 1024;

impl Stream {
    /// Launches a kernel of [`Variant::BsrMatmulHopper`]. The pointers in `params` are ignored: those of the operands are used, and
    /// tensor maps are made from them. B may be read through rows of 16-byte aligned memory only.
    ///
    /// Counters are shared as those of [`launch_attention_fwd_tma`](Stream::launch_attention_fwd_tma).
    ///
    /// # Errors
    /// As [`launch_attention_fwd_tma`](Stream::launch_attention_fwd_tma).
    pub fn launch_bsr_matmul_tma(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_matmul_params,
        operands: BsrMatmulOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrMatmulHopper(tile) = &row.variant else {
            return Err(failed("not a Hopper kernel of BSR matmul".to_owned()));
        };
        let views = operands.views();
        self.expect_all(&views)?;
        fit(row, tile, config, params, &operands).map_err(failed)?;
        let blocks = operands.col_idx.shape().first().map_or(0, |&blocks| blocks as u64);
        let [a, b, b_edge] = maps(tile, params, blocks);
        let params = blockflash_bsr_matmul_tma_params {
            a: a.encode(&operands.values)?,
            b: b.encode(&operands.b)?,
            b_edge: b_edge.encode(&operands.b)?,
            base: operands.pointers(params),
            tile_counter: null_mut(),
        };
        // SAFETY:
        // 1. The row is a Hopper variant of BSR matmul, whose parameter struct this is.
        // 2. As in `launch_bsr_matmul`. What is read through a tensor map lies inside the view that it was encoded from; whole
        //    blocks that are copied without one lie where `row_ptr` says, in a view that starts at a multiple of 16 bytes (`fit`).
        //    The tile counter is null or a slot that no other launch uses at the same time (`tile_counter`), and it lives as long
        //    as the context.
        // 3. `c` is borrowed exclusively.
        unsafe {
            self.launch_with(
                row,
                config,
                |session| blockflash_bsr_matmul_tma_params {
                    tile_counter: tile_counter::of(session),
                    ..params
                },
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

fn fit(
    row: &Row,
    tile: &BsrMatmulHopper,
    config: &LaunchConfig,
    p: &blockflash_bsr_matmul_params,
    operands: &BsrMatmulOperands<'_>,
) -> Fit {
    let tiles = operands.fit(&tile.tile(), p)?;
    require([p.m, p.n, p.k].into_iter().all(|size| size < SIZE_LIMIT), "a size is too large")?;
    require(operands.values.is_aligned(16), "values do not start at a multiple of 16 bytes")?;
    fits_row(config, row, 1..=tiles)?;
    // Each block looks for a tile past the last one, and counts in 32 bits.
    let past = tiles + 2 * i128::from(config.grid[0]);
    require(past <= i128::from(i32::MAX), "there are too many tiles")
}

/// A tensor map before it is encoded: sizes and boxes in elements, strides of the outer dimensions in bytes.
#[derive(Debug, PartialEq)]
struct Map {
    shape: [u64; 3],
    strides_bytes: [u64; 2],
    box_shape: [u32; 3],
}

/// The maps of A, of the whole panels of B, and of B at its edges. The sizes have been found to fit. Small blocks of A are copied as they
/// lie, as many as follow one another, so their map is one without elements.
fn maps(tile: &BsrMatmulHopper, p: &blockflash_bsr_matmul_params, blocks: u64) -> [Map; 3] {
    let blocks = if tile.gathers() { 0 } else { blocks };
    let tile = tile.tile();
    let bytes = tile.dtype.size() as u64;
    let block = u64::from(tile.block_size);
    let [n, k, ldb] = [p.n, p.k, p.ldb].map(|size| size as u64);
    let a = Map {
        shape: [block, block, blocks],
        strides_bytes: [block * bytes, block * block * bytes],
        box_shape: [PANEL, tile.block_size, 1],
    };
    let b = Map {
        shape: [PANEL.into(), k, n / u64::from(PANEL)],
        strides_bytes: [ldb * bytes, u64::from(PANEL) * bytes],
        box_shape: [PANEL, tile.block_k, tile.block_n / PANEL],
    };
    // The last dimension is never stepped over, but needs a valid stride.
    let b_edge = Map {
        shape: [n, k, 1],
        strides_bytes: [ldb * bytes, ldb * bytes],
        box_shape: [PANEL, tile.block_k, 1],
    };
    [a, b, b_edge]
}

impl Map {
    /// The map of this view; zeros where it has no element: the kernel does not use it then.
    fn encode(&self, view: &View<'_>) -> Result<blockflash_tensor_map> {
        if self.shape.contains(&0) {
            return Ok(blockflash_tensor_map { opaque: [0; 16] });
        }
        Ok(blockflash_tensor_map { opaque: *TensorMap::encode_tiled(view, &self.spec(view))?.words() })
    }

    fn spec(&self, view: &View<'_>) -> TensorMapSpec<'_> {
        TensorMapSpec {
            dtype: view.dtype(),
            shape: &self.shape,
            strides_bytes: &self.strides_bytes,
            box_shape: &self.box_shape,
            swizzle: Swizzle::B128,
        }
    }
}

#[cfg(test)]
#[path = "bsr_matmul_tma_tests.rs"]
mod tests;
