//! Building a block mask on the GPU.

use super::checked::{Launch, Operands};
use super::fit::{Fit, absent, ceil_div, fits, pointer, pointer_mut, require, starts_at, unknown};
use crate::view::Used;
use crate::{BlockListScratch, BlockLists, DType, Kernel, Tensor, View, ViewMut};
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_MASK_CHOOSE, BLOCKFLASH_BLOCK_MASK_LIST, BLOCKFLASH_BLOCK_SOURCE_BOOL,
    BLOCKFLASH_BLOCK_SOURCE_LISTS, BLOCKFLASH_BLOCK_SOURCE_SCORES,
    blockflash_block_mask_build_params,
};

/// A kernel reads lists 32 positions at a time and counts them in 32 bits.
const MAX_K: i32 = 1 << 30;

/// Sources, intermediate memory and result of building a block mask.
#[derive(Debug)]
pub struct BlockMaskBuildOperands<'a> {
    /// The source, contiguous: booleans (u8) or scores (f32) `[batch, heads, rows, cols]`, or lists
    /// of columns (i32) `[batch, heads, rows, k]`.
    pub source: View<'a>,
    /// Blocks that are visited in addition to those that the source selects; `batch` is 1 or the
    /// mask's batch, and `heads` divides the mask's heads.
    pub always: Option<&'a BlockLists>,
    /// Results of the first step for the second one.
    pub scratch: &'a mut BlockListScratch,
    /// The lists that the kernel fills: `[batch, heads, rows]` with room for `capacity` columns.
    pub lists: &'a mut BlockLists,
    /// i32 `[4]`, holding two words of 64 bits, at an address that is a multiple of 8.
    pub problems: ViewMut<'a>,
}

impl Operands for BlockMaskBuildOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let [a, b, c, _] = self.always.map_or([None; 4], BlockLists::used);
        let [d, e, f, _] = self.lists.used();
        let [g, h, i] = self.scratch.views().map(|view| Some(view.used()));
        [Some(self.source.used()), a, b, c, d, e, f, g, h, i, Some(self.problems.used())]
    }
}

/// A kernel that builds block masks.
#[derive(Clone, Copy, Debug)]
pub struct BlockMaskBuild {
    /// Rows of the mask per CTA, one per warp.
    slab_rows: u32,
}

// SAFETY:
// 2. As for attention forward. The kernel bounds the columns that it reads, and the columns in
//    `always` are below `cols`. The second step adds up lengths that only the first step writes and
//    that are never negative, and it ends with the capacity. So its writes stay within the lists,
//    and its values within the ranges of `BlockLists`, whatever other build runs at the same time.
// 3. All tensors except `source` and `always` are borrowed exclusively.
unsafe impl Launch for BlockMaskBuild {
    type Operands<'a> = BlockMaskBuildOperands<'a>;
    type Plan = blockflash_block_mask_build_params;
    type Params = blockflash_block_mask_build_params;
    const FAMILY: &'static str = "building block masks";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Build { slab_rows }) => Some(Self { slab_rows }),
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
        let positive =
            [batch, heads, rows].iter().all(|&size| size > 0) && p.block_q > 0 && p.block_kv > 0;
        let sizes =
            [p.cols, p.k, p.capacity, p.seqlen_q, p.seqlen_kv, p.window.left, p.window.right];
        require(
            positive && sizes.iter().all(|&size| size >= 0),
            format_args!(
                "batch {batch}, {heads} heads, {rows} rows, blocks of {} × {}, and columns, k, \
                 capacity, lengths and window {sizes:?}: a size is not positive",
                p.block_q, p.block_kv
            ),
        )?;
        let blocks = |length: i32, size: i32| ceil_div(length.into(), size.unsigned_abs());
        require(
            i128::from(rows) == blocks(p.seqlen_q, p.block_q),
            format_args!("{rows} block rows, expected {}", blocks(p.seqlen_q, p.block_q)),
        )?;
        require(
            i128::from(cols) == blocks(p.seqlen_kv, p.block_kv),
            format_args!("{cols} block columns, expected {}", blocks(p.seqlen_kv, p.block_kv)),
        )?;
        // The kernel counts rows of all heads, queries and keys in 32 bits, including rows of the
        // last block that do not exist.
        let limit = i128::from(i32::MAX);
        let per_head = i128::from(batch) * i128::from(heads);
        require(
            per_head * i128::from(rows + 1) <= limit,
            format_args!("{rows} block rows of {per_head} heads, the limit is {limit}"),
        )?;
        let queries = i128::from(p.seqlen_q) + i128::from(p.block_q);
        // The kernel chooses columns in words of 32 bits.
        let keys = i128::from((cols + 31) / 32 * 32) * i128::from(p.block_kv);
        require(
            queries <= limit && keys <= limit,
            format_args!("{queries} queries and {keys} keys in whole blocks, the limit is {limit}"),
        )?;
        require(p.k <= MAX_K, format_args!("k is {}, the limit is {MAX_K}", p.k))?;

        let k = i64::from(p.k);
        let per_row =
            |count: i64| [(batch, heads * rows * count), (heads, rows * count), (rows, count)];
        let of_rows = |count: i64| {
            let [batch, heads, rows] = per_row(count);
            [batch, heads, rows, (count, 1)]
        };
        match p.source_kind {
            BLOCKFLASH_BLOCK_SOURCE_BOOL => {
                fits("source", &operands.source, DType::U8, of_rows(cols))
            }
            BLOCKFLASH_BLOCK_SOURCE_LISTS => {
                fits("source", &operands.source, DType::I32, of_rows(k))
            }
            BLOCKFLASH_BLOCK_SOURCE_SCORES => {
                fits("source", &operands.source, DType::F32, of_rows(cols))
            }
            kind => {
                const KINDS: [i32; 3] = [
                    BLOCKFLASH_BLOCK_SOURCE_BOOL,
                    BLOCKFLASH_BLOCK_SOURCE_LISTS,
                    BLOCKFLASH_BLOCK_SOURCE_SCORES,
                ];
                unknown("source_kind", kind, &KINDS)
            }
        }?;
        if let Some(always) = operands.always {
            let packed = always.cu_rows().is_some();
            absent("cu_rows of `always`", packed, "the kernel takes no packed masks")?;
            require(
                always.has_columns_below(cols.into()),
                format_args!(
                    "`always` is of {} block columns, beyond the {cols} of the mask",
                    always.column_limit()
                ),
            )?;
            let partial = always.bits().is_some();
            absent("bits of `always`", partial, "the kernel builds masks of full blocks")?;
            always.write([p.block_q, p.block_kv], [batch, heads], &mut params.always)?;
            require(
                params.always.rows == p.rows,
                format_args!("`always` has {} block rows, expected {rows}", params.always.rows),
            )?;
        }
        let slabs = ceil_div(rows, self.slab_rows) as i64;
        let per_head = |count: i64| [(batch, heads * count), (heads, count), (count, 1)];
        let [bits, lengths, slab_lengths] = operands.scratch.views();
        fits("bits", &bits, DType::I32, of_rows((cols + 31) / 32))?;
        fits("lengths", &lengths, DType::I32, per_head(rows))?;
        fits("slab_lengths", &slab_lengths, DType::I32, per_head(slabs))?;
        require(
            operands.lists.may_be_filled(cols.into()),
            format_args!("the lists are {}", operands.lists.fill_refusal(cols.into())),
        )?;
        fits("row_ptr", &operands.lists.row_ptr().view(), DType::I32, per_head(rows + 1))?;
        fits("col_idx", &operands.lists.col_idx().view(), DType::I32, [(p.capacity.into(), 1)])?;
        fits("row_order", &operands.lists.row_order().view(), DType::I32, per_head(rows))?;
        fits("problems", &operands.problems.as_view(), DType::I32, [(4, 1)])?;
        starts_at(8, "problems", &operands.problems.as_view())?;
        let steps = [BLOCKFLASH_BLOCK_MASK_CHOOSE, BLOCKFLASH_BLOCK_MASK_LIST];
        if !steps.contains(&p.step) {
            return unknown("step", p.step, &steps);
        }
        let blocks = i128::from(batch) * i128::from(heads) * i128::from(slabs);
        let [row_ptr, col_idx, row_order] =
            [operands.lists.row_ptr(), operands.lists.col_idx(), operands.lists.row_order()]
                .map(Tensor::view);
        *params = blockflash_block_mask_build_params {
            source: pointer(&operands.source),
            always: params.always,
            bits: pointer(&bits).cast_mut().cast(),
            lengths: pointer(&lengths).cast_mut().cast(),
            slab_lengths: pointer(&slab_lengths).cast_mut().cast(),
            row_ptr: pointer(&row_ptr).cast_mut().cast(),
            col_idx: pointer(&col_idx).cast_mut().cast(),
            row_order: pointer(&row_order).cast_mut().cast(),
            problems: pointer_mut(&operands.problems).cast(),
            ..*p
        };
        Ok(blocks)
    }
}

#[cfg(test)]
#[path = "block_mask_build_tests.rs"]
mod tests;
