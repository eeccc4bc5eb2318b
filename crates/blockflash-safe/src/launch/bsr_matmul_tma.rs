//! BSR matmul for Hopper: tiles are loaded with TMA.

use super::bsr_matmul::writes;
use super::bsr_matmul_maps::{encode_c, maps};
use super::checked::Launch;
use super::fit::{Fit, array, ceil_div, require, starts_at};
use super::{BsrMatmulOperands, BsrParts};
use crate::{Kernel, Result};
use blockflash_sys::manifest::{BsrMatmulHopper, Variant};
use blockflash_sys::params::{blockflash_bsr_matmul_params, blockflash_bsr_matmul_tma_params};

/// Where TMA stores C, its row stride in elements is below this.
const STRIDE_LIMIT: i64 = 1 << 39;
/// Sizes are below this: the kernel adds a tile to them in 32 bits.
const SIZE_LIMIT: i64 = (1 << 31) - 1024;

// SAFETY:
// 1. This is the parameter struct of the Hopper kernels of BSR matmul.
// 2. As for the portable kernels. Whatever is read through a tensor map is inside the view that
//    the map was encoded from; whole blocks that are copied without a map are where `row_ptr` says,
//    in a view that starts at a multiple of 16 bytes (`fit`). There is room for as many parts as
//    `begin` says (`split`), and no other launch uses their memory at the same time, since it is
//    used in turns.
// 3. `c` is a `ViewMut`; only these kernels write the memory of parts.
unsafe impl Launch for BsrMatmulHopper {
    type Operands<'a> = BsrMatmulOperands<'a>;
    type Plan = blockflash_bsr_matmul_params;
    type Params = blockflash_bsr_matmul_tma_params;
    const FAMILY: &'static str = "BSR matmul for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrMatmulHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let tiles = operands.fit(&self.tile(), p, &mut params.base)?;
        writes(self.gathers(), p)?;
        require(
            [p.m, p.n, p.k].into_iter().all(|size| size < SIZE_LIMIT),
            format_args!("m, n and k are {}, {} and {}, the limit is {SIZE_LIMIT}", p.m, p.n, p.k),
        )?;
        let planned = !self.gathers() || operands.indices.has_stages_of(self.block_size);
        require(
            planned,
            format_args!(
                "the kernel needs the stages of the pattern for blocks of {}",
                self.block_size
            ),
        )?;
        let more = split(self, p, operands)?;
        let [_, _, _, block_idx, stages, group_stages, rows] = operands.indices.arrays();
        params.rows = array(rows).cast();
        params.block_idx = array(block_idx).cast();
        params.stages = array(stages).cast();
        params.group_stages = array(group_stages).cast();
        params.c_by_copies = copies_c(self, p, operands.c.is_aligned(16)).into();
        params.split_k_steps = i32::MAX;
        params.values_settled = operands.values.is_settled().into();
        if let Some(BsrParts { steps, begin, memory }) = &operands.parts {
            (params.split_k_steps, params.split_k_begin) = (*steps, *begin);
            params.split_k_sums = memory.sums_pointer();
            params.split_k_arrived = memory.words_pointer();
        }
        Ok(tiles + more)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        let p = &params.base;
        let [a, b, b_edge] = maps(self, p, operands.indices.blocks() as u64);
        if params.c_by_copies != 0 {
            params.c = encode_c(&operands.c.as_view(), p)?;
        }
        params.a = a.encode(&operands.values)?;
        params.b = b.encode(&operands.b)?;
        params.b_edge = b_edge.encode(&operands.b)?;
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.tile_counter = counter;
    }
}

/// Checks the parts of long tiles, and returns the number of parts beyond the first of each tile.
fn split(
    tile: &BsrMatmulHopper,
    p: &blockflash_bsr_matmul_params,
    operands: &BsrMatmulOperands<'_>,
) -> Fit<i128> {
    let Some(BsrParts { steps, begin, memory }) = &operands.parts else { return Ok(0) };
    require(
        tile.splits(),
        format_args!("{} parts, and the kernel computes whole tiles", begin.len()),
    )?;
    require(*steps > 0, format_args!("steps of a part are {steps}, expected at least 1"))?;
    starts_at(16, "memory of the sums", &memory.view())?;
    require(
        begin.is_sorted_by(|a, b| a >= b) && begin[begin.len() - 1] == 0,
        format_args!("parts begin at {begin:?}, expected numbers that descend to 0"),
    )?;
    let positions = ceil_div(p.m, tile.block_size * tile.block_rows);
    let widest = begin.windows(2).map(|pair| i128::from(pair[0] - pair[1])).max().unwrap_or(0);
    require(
        widest <= positions,
        format_args!("{widest} tiles have a part, there are {positions}"),
    )?;
    // A longer tile would wait for parts that no CTA computes, in memory behind the sums.
    for (part, pair) in (1..).zip(begin.windows(2)) {
        let longest = operands.indices.longest_from((pair[0] - pair[1]) as usize, tile.gathers());
        require(
            i64::from(longest) <= part * i64::from(*steps),
            format_args!("a tile of {longest} blocks has more than {part} parts of {steps}"),
        )?;
    }
    let items = i128::from(begin[0]) * i128::from(tile.tile().tiles_n(p.n as u64));
    let per_item = tile.block_rows * tile.block_size * tile.block_n;
    require(
        items * i128::from(per_item) <= memory.sums() as i128,
        format_args!("room for {} sums, {items} parts of {per_item} are needed", memory.sums()),
    )?;
    let words = items * i128::from(tile.consumer_warps());
    require(
        words <= memory.words() as i128,
        format_args!("room for {} words, {words} are needed", memory.words()),
    )?;
    Ok(items)
}

/// Whether TMA can store C: its rows have the type of A and are 16-byte aligned, and the old C is
/// not read. Rows must also be whole multiples of 16 bytes: on an H200, a copy that ended inside of
/// 16 bytes was seen to write zeros up to their end.
fn copies_c(tile: &BsrMatmulHopper, p: &blockflash_bsr_matmul_params, aligned: bool) -> bool {
    let in_rows = p.c_column_major == 0
        && aligned
        && p.n % 8 == 0
        && p.ldc % 8 == 0
        && (8..STRIDE_LIMIT).contains(&p.ldc);
    (tile.filled || !tile.gathers()) && p.beta == 0.0 && in_rows && p.c_dtype == tile.dtype as i32
}

#[cfg(test)]
#[path = "bsr_matmul_tma_tests.rs"]
mod tests;
