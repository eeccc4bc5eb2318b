//! Sampled dense-dense product.

use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, fits, pointer, pointer_mut, require, starts_at};
use crate::view::Used;
use crate::{
    BsrIndices, DType, Kernel, Major, Result, Swizzle, Tensor, TensorMapSpec, View, ViewMut,
};
use blockflash_sys::manifest::{BsrSddmmHopper, BsrSddmmTile, Variant};
use blockflash_sys::params::{blockflash_bsr_sddmm_params, blockflash_tensor_map};

/// Lines of a box along a row of the swizzle, and in a panel of a matrix that is not contiguous
/// along K: as many elements of two bytes as the swizzle permutes.
const PANEL: u32 = BsrSddmmHopper::BLOCK_K;
/// Sizes are below this: the kernel adds a tile to them in 32 bits.
const SIZE_LIMIT: i32 = i32::MAX - 1023;

/// Tensors of the kernels of the sampled product.
#[derive(Debug)]
pub struct BsrSddmmOperands<'a> {
    /// The pattern of `values`.
    pub pattern: &'a BsrIndices,
    /// `[m, k]`, contiguous along the dimension that the kernel requires.
    pub a: View<'a>,
    /// `[k, n]`, contiguous along the dimension that the kernel requires.
    pub b: View<'a>,
    /// `[nnz_blocks, block_size, block_size]`.
    pub values: ViewMut<'a>,
}

impl Operands for BsrSddmmOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [row_ptr, col_idx] = [self.pattern.row_ptr(), self.pattern.col_idx()].map(Tensor::used);
        [row_ptr, col_idx, self.a.used(), self.b.used(), self.values.used()].map(Some)
    }
}

// SAFETY:
// 1. This is the parameter struct of the Hopper kernels of the sampled product.
// 2. A and B are read through tensor maps alone, which are inside the views that they were encoded
//    from. The blocks of `values` that are read and written are as many as `row_ptr` counts, for
//    which `values` has room; it ascends, as the search in it needs.
// 3. `values` is a `ViewMut`.
unsafe impl Launch for BsrSddmmHopper {
    type Operands<'a> = BsrSddmmOperands<'a>;
    type Plan = blockflash_bsr_sddmm_params;
    type Params = blockflash_bsr_sddmm_params;
    const FAMILY: &'static str = "the sampled product for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrSddmmHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let tiles = fits_tiles(&self.tile(), p, operands)?;
        let [m, n, k] = [p.m, p.n, p.k].map(i64::from);
        starts_at(16, "values", &operands.values.as_view())?;
        fits_dense("a", &operands.a, self.dtype, [m, k], self.a)?;
        fits_dense("b", &operands.b, self.dtype, [k, n], self.b)?;
        *params = blockflash_bsr_sddmm_params {
            row_ptr: pointer(&operands.pattern.row_ptr().view()).cast(),
            col_idx: pointer(&operands.pattern.col_idx().view()).cast(),
            values: pointer_mut(&operands.values),
            ..*p
        };
        Ok(tiles)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        let [a, b] = maps(self, operands);
        params.a = a.encode(&operands.a)?;
        params.b = b.encode(&operands.b)?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}

/// Checks the operands that every kernel of the sampled product has, and the sizes of A and B but
/// not their layouts. Returns the number of tiles.
pub(super) fn fits_tiles(
    tile: &BsrSddmmTile,
    p: &blockflash_bsr_sddmm_params,
    operands: &BsrSddmmOperands<'_>,
) -> Fit<i128> {
    require(
        p.m > 0 && p.n > 0 && p.k >= 0 && p.nnz_blocks > 0,
        format_args!(
            "m, n and k are {}, {} and {} with {} blocks: a size is not positive",
            p.m, p.n, p.k, p.nnz_blocks
        ),
    )?;
    require(
        [p.m, p.n, p.k].into_iter().all(|size| size < SIZE_LIMIT),
        format_args!("m, n and k are {}, {} and {}, the limit is {SIZE_LIMIT}", p.m, p.n, p.k),
    )?;
    let (m, blocks, block) = (i64::from(p.m), i64::from(p.nnz_blocks), i64::from(tile.block_size));
    let block_rows = ceil_div(m, tile.block_size);
    fits("row_ptr", &operands.pattern.row_ptr().view(), DType::I32, [(block_rows as i64 + 1, 1)])?;
    fits("col_idx", &operands.pattern.col_idx().view(), DType::I32, [(blocks, 1)])?;
    let block_cols = ceil_div(p.n.into(), tile.block_size);
    require(
        operands.pattern.has_columns_below(block_cols),
        format_args!(
            "the pattern is of {} block columns, beyond the {block_cols} of n",
            operands.pattern.column_limit()
        ),
    )?;
    let values = operands.values.as_view();
    let float = matches!(values.dtype(), DType::F16 | DType::BF16 | DType::F32);
    require(
        float && p.values_dtype == values.dtype() as i32,
        format_args!("values_dtype is {}, and values has {}", p.values_dtype, values.dtype()),
    )?;
    fits("values", &values, values.dtype(), [(blocks, block * block), (block, block), (block, 1)])?;
    Ok(i128::from(blocks / i64::from(tile.blocks)) + block_rows)
}

/// Checks a matrix with lines any number of elements apart.
pub(super) fn fits_dense(
    name: &str,
    view: &View<'_>,
    dtype: DType,
    [rows, cols]: [i64; 2],
    major: Major,
) -> Fit {
    let step = |dim: usize| view.strides().get(dim).map_or(0, |&stride| stride as i64);
    let strides = match major {
        Major::Row => [step(0), 1],
        Major::Column => [1, step(1)],
    };
    fits(name, view, dtype, [(rows, strides[0]), (cols, strides[1])])
}

/// A tensor map before it is encoded: sizes and box in elements, the inner one first.
#[derive(Debug, PartialEq)]
struct Map {
    shape: [u64; 2],
    stride_bytes: u64,
    box_shape: [u32; 2],
}

/// The maps of A and B, which have been found to fit.
fn maps(tile: &BsrSddmmHopper, operands: &BsrSddmmOperands<'_>) -> [Map; 2] {
    let map = |view: &View<'_>, major: Major, k_major: Major| {
        let inner = usize::from(major == Major::Row);
        let outer = 1 - inner;
        let length = view.shape()[inner];
        // The distance of a single line to the next does not matter, but must be valid.
        let distance = if view.shape()[outer] > 1 {
            view.strides()[outer]
        } else {
            length.next_multiple_of(8)
        };
        Map {
            shape: [length as u64, view.shape()[outer] as u64],
            stride_bytes: (distance * view.dtype().size()) as u64,
            box_shape: [PANEL, if major == k_major { tile.block_size } else { PANEL }],
        }
    };
    [map(&operands.a, tile.a, Major::Row), map(&operands.b, tile.b, Major::Column)]
}

impl Map {
    fn encode(&self, view: &View<'_>) -> Result<blockflash_tensor_map> {
        let spec = TensorMapSpec {
            dtype: view.dtype(),
            shape: &self.shape,
            strides_bytes: &[self.stride_bytes],
            box_shape: &self.box_shape,
            swizzle: Swizzle::B128,
        };
        spec.encode(view)
    }
}

#[cfg(test)]
#[path = "bsr_sddmm_tests.rs"]
mod tests;
