//! Transposing a block mask on the GPU.

use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, fits, pointer, require, starts_at, unknown};
use crate::view::Used;
use crate::{BlockLists, BlockTransposeScratch, DType, Kernel, Tensor};
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_GATHER, BLOCKFLASH_BLOCK_MASK_LIST_T,
    blockflash_block_mask_transpose_params,
};

/// A mask, intermediate memory, and the transpose of the mask.
#[derive(Debug)]
pub struct BlockMaskTransposeOperands<'a> {
    /// The lists of the mask, `[batch, heads, rows]`.
    pub lists: &'a BlockLists,
    /// Results of the first step for the second one.
    pub scratch: &'a mut BlockTransposeScratch,
    /// The lists that the kernel fills, `[batch, heads, cols]` with room for `capacity` rows. Their
    /// `row_order` stays as it is.
    pub transpose: &'a mut BlockLists,
}

impl Operands for BlockMaskTransposeOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [a, b, ..] = self.lists.used();
        let [c, d, ..] = self.transpose.used();
        let [e, f] = self.scratch.views().map(|view| Some(view.used()));
        [a, b, c, d, e, f]
    }
}

/// A kernel that transposes block masks.
#[derive(Clone, Copy, Debug)]
pub struct BlockMaskTranspose {
    /// Rows of the mask per CTA of the first step.
    slab_rows: u32,
    /// Columns of the mask per CTA of the first step.
    chunk_cols: u32,
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. All pointers come from views. The kernel follows entries of `row_ptr`, which stay within
//    `col_idx`, and compares columns with `cols` before it uses them. The second step adds up
//    numbers that only the first step writes and that are never negative, and it ends with the
//    capacity. The rows that it writes are numbers of bits, which the first step sets for existing
//    rows only. So its writes stay within the transpose, and its values within the ranges of
//    `BlockLists`, whatever other build or transposition runs at the same time.
// 3. All tensors except `lists` are borrowed exclusively.
unsafe impl Launch for BlockMaskTranspose {
    type Operands<'a> = BlockMaskTransposeOperands<'a>;
    type Plan = blockflash_block_mask_transpose_params;
    type Params = blockflash_block_mask_transpose_params;
    const FAMILY: &'static str = "transposing block masks";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Transpose { slab_rows, chunk_cols }) => {
                Some(Self { slab_rows, chunk_cols })
            }
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let [batch, heads, rows, cols] = [p.batch, p.heads, p.rows, p.cols].map(i64::from);
        let positive = [batch, heads, rows, cols].iter().all(|&size| size > 0);
        require(
            positive && p.capacity >= 0,
            format_args!(
                "batch {batch}, {heads} heads, {rows} × {cols} blocks and a capacity of {}: a \
                 size is not positive",
                p.capacity
            ),
        )?;
        let groups = i128::from(batch) * i128::from(heads);
        // The kernel rounds rows and columns up to whole slabs and chunks in 32 bits.
        let counted = groups * i128::from(rows.max(cols) + 1);
        let tile = i128::from(self.slab_rows.max(self.chunk_cols));
        require(
            counted + tile <= i128::from(i32::MAX),
            format_args!("{rows} × {cols} blocks of {groups} heads, the limit is {}", i32::MAX),
        )?;
        let [words, strips] = [rows, cols].map(|size| ceil_div(size, 32) as i64);
        let slabs = ceil_div(rows, self.slab_rows) as i64;

        let lists = operands.lists;
        let packed = lists.cu_rows().is_some();
        absent("cu_rows of the mask", packed, "the kernel takes no packed masks")?;
        require(
            lists.has_columns_below(cols.into()),
            format_args!(
                "the mask is of {} block columns, beyond the {cols} of the transpose",
                lists.column_limit()
            ),
        )?;
        let transpose = &operands.transpose;
        require(
            transpose.may_be_filled(rows.into()),
            format_args!("the transpose is {}", transpose.fill_refusal(rows.into())),
        )?;
        let per_head = |count: i64| [(batch, heads * count), (heads, count), (count, 1)];
        let matrix = |count: i64, size: i64| {
            let [batch, heads, _] = per_head(count * size);
            [batch, heads, (count, size), (size, 1)]
        };
        fits("row_ptr", &lists.row_ptr().view(), DType::I32, per_head(rows + 1))?;
        let [row_ptr, col_idx] =
            [operands.transpose.row_ptr(), operands.transpose.col_idx()].map(Tensor::view);
        fits("row_ptr of the transpose", &row_ptr, DType::I32, per_head(cols + 1))?;
        fits("col_idx of the transpose", &col_idx, DType::I32, [(p.capacity.into(), 1)])?;
        let [bits, counts] = operands.scratch.views();
        fits("bits", &bits, DType::I32, matrix(words, 32 * strips))?;
        starts_at(16, "bits", &bits)?;
        fits("counts", &counts, DType::I32, matrix(strips, slabs))?;
        let blocks = match p.step {
            BLOCKFLASH_BLOCK_MASK_GATHER => {
                groups * i128::from(slabs) * ceil_div(cols, self.chunk_cols)
            }
            BLOCKFLASH_BLOCK_MASK_LIST_T => groups * i128::from(strips),
            step => {
                let known = [BLOCKFLASH_BLOCK_MASK_GATHER, BLOCKFLASH_BLOCK_MASK_LIST_T];
                return unknown("step", step, &known);
            }
        };
        *params = blockflash_block_mask_transpose_params {
            row_ptr: pointer(&lists.row_ptr().view()).cast(),
            col_idx: pointer(&lists.col_idx().view()).cast(),
            bits: pointer(&bits).cast_mut().cast(),
            counts: pointer(&counts).cast_mut().cast(),
            row_ptr_t: pointer(&row_ptr).cast_mut().cast(),
            col_idx_t: pointer(&col_idx).cast_mut().cast(),
            ..*p
        };
        Ok(blocks)
    }
}

#[cfg(test)]
#[path = "block_mask_transpose_tests.rs"]
mod tests;
