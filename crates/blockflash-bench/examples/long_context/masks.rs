//! Which blocks are visited: sink, window and the best scores, chosen on the device of q and k; and
//! as many near ones.

use super::study::{Options, time};
use blockflash_bench::Result;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
use blockflash_ops::{Align, BlockGeometry, BlockMask, Mask, Stream, Tensor};

/// Scores of the blocks of each query head, and what every query visits. The same calls run on a
/// GPU and on the CPU.
pub struct Choices {
    geometry: BlockGeometry,
    always: BlockMask,
    scores: BlockScores,
    /// Microseconds of computing the scores.
    pub scores_us: f64,
}

impl Choices {
    /// Computes the scores of q and k.
    ///
    /// # Errors
    /// Sizes that the library does not take, a device that has no such kernel or fails.
    pub fn new(options: &Options, q: &Tensor, k: &Tensor, stream: &Stream) -> Result<Self> {
        let geometry = options.geometry()?;
        let local = BlockMask::window(geometry, Some(options.window), Some(0), Align::BottomRight)?;
        let always = local.union(&BlockMask::sink(geometry, options.sink)?)?;
        let mut scores = BlockScores::new(geometry, q.view(), k.view(), stream)?;
        let scores_us =
            time(stream, options.window_ms, |stream| scores.compute(q.view(), k.view(), stream))?;
        Ok(Self { geometry, always: always.to(stream)?, scores, scores_us })
    }

    /// The best blocks of each row of each query head, with those that are always visited, and the
    /// microseconds of building that.
    ///
    /// # Errors
    /// A device that fails.
    pub fn best(
        &self,
        blocks: usize,
        window_ms: f64,
        stream: &Stream,
    ) -> Result<(BlockMaskBuffer, f64)> {
        let Self { geometry, always, scores, .. } = self;
        let scores = scores.scores();
        let heads = scores.shape()[1];
        let room = heads
            * (geometry.rows() * blocks + always.nnz()).min(geometry.rows() * geometry.cols());
        let mut buffer = BlockMaskBuffer::new(*geometry, 1, heads, room, stream)?;
        let source = BlockSource::Scores { scores: scores.view(), k: blocks };
        let choice = BlockChoice { source, always: Some(always), mask: Mask::causal() };
        let us = time(stream, window_ms, |stream| buffer.build(&choice, stream))?;
        buffer.check(stream)?;
        Ok((buffer, us))
    }
}

/// As many blocks in each row as a causal mask of equal lengths visits, but the first `sink` ones
/// and the nearest. It visits at least as many of the first ones as there are.
///
/// # Errors
/// A mask that is not on the CPU.
pub fn nearest(mask: &BlockMask, sink: usize) -> Result<BlockMask> {
    let (mut row_ptr, mut col_idx) = (Vec::new(), Vec::new());
    for head in 0..mask.heads() {
        row_ptr.push(col_idx.len() as i32);
        for row in 0..mask.rows() {
            let near = mask.row(0, head, row)?.len().saturating_sub(sink);
            let columns = (0..=row).filter(|&col| col < sink || col + near > row);
            col_idx.extend(columns.map(|col| col as i32));
            row_ptr.push(col_idx.len() as i32);
        }
    }
    Ok(BlockMask::from_parts(mask.geometry(), 1, mask.heads(), &row_ptr, &col_idx)?)
}
