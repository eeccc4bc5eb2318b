//! Scores of blocks from the means of queries and keys.

use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, fits, pointer, pointer_mut, require, unknown};
use crate::view::Used;
use crate::{DType, Kernel, View, ViewMut};
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_SCORES_MEANS, BLOCKFLASH_BLOCK_SCORES_PRODUCTS, blockflash_block_scores_params,
};

/// The widest head.
const MAX_HEAD_DIM: i64 = 256;

/// Tensors of scores of blocks.
#[derive(Debug)]
pub struct BlockScoresOperands<'a> {
    /// `[batch, seqlen_q, num_heads_q, head_dim]`.
    pub q: View<'a>,
    /// `[batch, seqlen_kv, num_heads_kv, head_dim]`.
    pub k: View<'a>,
    /// f32 `[batch, num_heads_q, rows, head_dim]`, contiguous; the first step writes it, the second
    /// one reads it.
    pub q_means: ViewMut<'a>,
    /// f32 `[batch, num_heads_kv, cols, head_dim]`, likewise.
    pub k_means: ViewMut<'a>,
    /// f32 `[batch, num_heads_q, rows, cols]`, contiguous.
    pub scores: ViewMut<'a>,
}

impl Operands for BlockScoresOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let Self { q, k, q_means, k_means, scores } = self;
        [q.used(), k.used(), q_means.used(), k_means.used(), scores.used()].map(Some)
    }
}

/// A kernel that scores blocks.
#[derive(Clone, Copy, Debug)]
pub struct BlockScores {
    dtype: DType,
    /// Rows and columns of scores per CTA.
    tile: u32,
}

// SAFETY:
// 1. This is the parameter struct of the kernels that score blocks.
// 2. As for attention forward; no address follows from the contents of a tensor.
// 3. The means and the scores are `ViewMut`.
unsafe impl Launch for BlockScores {
    type Operands<'a> = BlockScoresOperands<'a>;
    type Plan = blockflash_block_scores_params;
    type Params = blockflash_block_scores_params;
    const FAMILY: &'static str = "scoring blocks";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Scores { dtype, tile }) => {
                Some(Self { dtype, tile })
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
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [seqlen_q, seqlen_kv, head_dim] = [p.seqlen_q, p.seqlen_kv, p.head_dim].map(i64::from);
        let sizes = [batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim];
        require(
            sizes.iter().all(|&size| size > 0) && p.block_q > 0 && p.block_kv > 0,
            format_args!(
                "batch, heads, lengths and head_dim {sizes:?}, blocks of {} × {}: a size is not \
                 positive",
                p.block_q, p.block_kv
            ),
        )?;
        require(
            heads_q % heads_kv == 0,
            format_args!("q has {heads_q} heads, not a multiple of the {heads_kv} of k"),
        )?;
        require(
            head_dim % 8 == 0 && head_dim <= MAX_HEAD_DIM,
            format_args!("head_dim is {head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}"),
        )?;
        let [rows, cols] = [p.rows, p.cols].map(i64::from);
        let blocks = |length: i64, size: i32| ceil_div(length, size.unsigned_abs());
        require(
            i128::from(rows) == blocks(seqlen_q, p.block_q),
            format_args!("{rows} block rows, expected {}", blocks(seqlen_q, p.block_q)),
        )?;
        require(
            i128::from(cols) == blocks(seqlen_kv, p.block_kv),
            format_args!("{cols} block columns, expected {}", blocks(seqlen_kv, p.block_kv)),
        )?;

        let tensor = |seqlen, heads, strides: [i64; 3]| {
            [(batch, strides[0]), (seqlen, strides[1]), (heads, strides[2]), (head_dim, 1)]
        };
        let q = tensor(seqlen_q, heads_q, [p.q_stride_batch, p.q_stride_seq, p.q_stride_head]);
        let k = tensor(seqlen_kv, heads_kv, [p.k_stride_batch, p.k_stride_seq, p.k_stride_head]);
        let contiguous = |heads: i64, blocks: i64, last: i64| {
            [(batch, heads * blocks * last), (heads, blocks * last), (blocks, last), (last, 1)]
        };
        fits("q", &operands.q, self.dtype, q)?;
        fits("k", &operands.k, self.dtype, k)?;
        fits(
            "q_means",
            &operands.q_means.as_view(),
            DType::F32,
            contiguous(heads_q, rows, head_dim),
        )?;
        fits(
            "k_means",
            &operands.k_means.as_view(),
            DType::F32,
            contiguous(heads_kv, cols, head_dim),
        )?;
        fits("scores", &operands.scores.as_view(), DType::F32, contiguous(heads_q, rows, cols))?;

        let means = heads_q * rows + heads_kv * cols;
        let tiles = i128::from(heads_q) * ceil_div(rows, self.tile) * ceil_div(cols, self.tile);
        let blocks = i128::from(batch)
            * match p.step {
                BLOCKFLASH_BLOCK_SCORES_MEANS => i128::from(means),
                BLOCKFLASH_BLOCK_SCORES_PRODUCTS => tiles,
                step => {
                    const STEPS: [i32; 2] =
                        [BLOCKFLASH_BLOCK_SCORES_MEANS, BLOCKFLASH_BLOCK_SCORES_PRODUCTS];
                    return unknown("step", step, &STEPS);
                }
            };
        // The kernel counts in 32 bits.
        require(
            blocks <= i128::from(i32::MAX),
            format_args!("{blocks} blocks, the limit is {}", i32::MAX),
        )?;
        *params = blockflash_block_scores_params {
            q: pointer(&operands.q),
            k: pointer(&operands.k),
            q_means: pointer_mut(&operands.q_means).cast(),
            k_means: pointer_mut(&operands.k_means).cast(),
            scores: pointer_mut(&operands.scores).cast(),
            ..*p
        };
        Ok(blocks)
    }
}

#[cfg(test)]
#[path = "block_scores_tests.rs"]
mod tests;
