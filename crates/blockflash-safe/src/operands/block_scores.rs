//! Scores of blocks from the means of queries and keys.

use super::{Fit, ceil_div, fits, fits_row, pointer, pointer_mut, require, starts_last};
use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
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

impl BlockScoresOperands<'_> {
    fn fit(
        &self,
        row: &Row,
        dtype: DType,
        tile: u32,
        config: &LaunchConfig,
        p: &blockflash_block_scores_params,
    ) -> Fit {
        let [batch, heads_q, heads_kv] = [p.batch, p.num_heads_q, p.num_heads_kv].map(i64::from);
        let [seqlen_q, seqlen_kv, head_dim] = [p.seqlen_q, p.seqlen_kv, p.head_dim].map(i64::from);
        let sizes = [batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim];
        require(
            sizes.iter().all(|&size| size > 0) && p.block_q > 0 && p.block_kv > 0,
            "a size is not positive",
        )?;
        require(heads_q % heads_kv == 0, "num_heads_q is not a multiple of num_heads_kv")?;
        require(
            head_dim % 8 == 0 && head_dim <= MAX_HEAD_DIM,
            "the kernel has no such head dimension",
        )?;
        let [rows, cols] = [p.rows, p.cols].map(i64::from);
        let blocks = |length: i64, size: i32| ceil_div(length, size.unsigned_abs());
        require(i128::from(rows) == blocks(seqlen_q, p.block_q), "another number of rows")?;
        require(i128::from(cols) == blocks(seqlen_kv, p.block_kv), "another number of columns")?;

        let tensor = |seqlen, heads, strides: [i64; 3]| {
            [(batch, strides[0]), (seqlen, strides[1]), (heads, strides[2]), (head_dim, 1)]
        };
        let q = tensor(seqlen_q, heads_q, [p.q_stride_batch, p.q_stride_seq, p.q_stride_head]);
        let k = tensor(seqlen_kv, heads_kv, [p.k_stride_batch, p.k_stride_seq, p.k_stride_head]);
        let contiguous = |heads: i64, blocks: i64, last: i64| {
            [(batch, heads * blocks * last), (heads, blocks * last), (blocks, last), (last, 1)]
        };
        fits("q", &self.q, dtype, q)?;
        fits("k", &self.k, dtype, k)?;
        fits("q_means", &self.q_means.as_view(), DType::F32, contiguous(heads_q, rows, head_dim))?;
        fits("k_means", &self.k_means.as_view(), DType::F32, contiguous(heads_kv, cols, head_dim))?;
        fits("scores", &self.scores.as_view(), DType::F32, contiguous(heads_q, rows, cols))?;

        let means = heads_q * rows + heads_kv * cols;
        let tiles = i128::from(heads_q) * ceil_div(rows, tile) * ceil_div(cols, tile);
        let blocks = i128::from(batch)
            * match p.step {
                BLOCKFLASH_BLOCK_SCORES_MEANS => i128::from(means),
                BLOCKFLASH_BLOCK_SCORES_PRODUCTS => tiles,
                _ => return Err("an unknown step".to_owned()),
            };
        // The kernel counts in 32 bits.
        require(blocks <= i128::from(i32::MAX), "there are too many blocks")?;
        starts_last(config)?;
        fits_row(config, row, blocks..=blocks)
    }
}

impl Stream {
    /// Launches a step of [`BlockMaskKernel::Scores`]. The pointers in `params` are ignored: those
    /// of the operands are used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_block_scores(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_block_scores_params,
        operands: BlockScoresOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BlockMask(BlockMaskKernel::Scores { dtype, tile }) = row.variant else {
            return Err(failed("not a kernel that scores blocks".to_owned()));
        };
        let BlockScoresOperands { q, k, q_means, k_means, scores } = &operands;
        let views = [*q, *k, q_means.as_view(), k_means.as_view(), scores.as_view()].map(Some);
        self.expect_all(&views)?;
        operands.fit(row, dtype, tile, config, params).map_err(failed)?;
        let params = blockflash_block_scores_params {
            q: pointer(q),
            k: pointer(k),
            q_means: pointer_mut(q_means).cast(),
            k_means: pointer_mut(k_means).cast(),
            scores: pointer_mut(scores).cast(),
            ..*params
        };
        // SAFETY:
        // 1. The row scores blocks, whose parameter struct this is.
        // 2. As in `launch_attention_fwd`; no address follows from the contents of a tensor.
        // 3. The means and the scores are borrowed exclusively.
        unsafe {
            self.launch_with(
                row,
                config,
                |_| params,
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

#[cfg(test)]
#[path = "block_scores_tests.rs"]
mod tests;
