//! A long document, the blocks that its queries choose, and what that costs in exactness.

use crate::Failure;
use crate::case::{BLOCK, Case, HEAD_DIM};
use blockflash_cases::document::Recipe;
use blockflash_cases::io::Array;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
use blockflash_ops::{Attention, BlockGeometry, BlockMask, Mask, Scores, Stream, Tensor, View};

/// q, k and v of a document.
pub fn draw(case: Case, stream: &Stream) -> Result<[Tensor; 3], Failure> {
    let Case { seqlen, heads_q, heads_kv, .. } = case;
    let recipe = Recipe { seqlen, heads_q, heads_kv, head_dim: HEAD_DIM, segment: 1024, seed: 0 };
    let [q, k, v] = recipe.draw()?;
    Ok([q.upload(stream)?, k.upload(stream)?, v.upload(stream)?])
}

/// The blocks with the best scores, the own one and the first one, chosen on the GPU.
pub fn choose(
    blocks: usize,
    q: View<'_>,
    k: View<'_>,
    stream: &Stream,
) -> Result<BlockMask, Failure> {
    let (seqlen, heads) = (q.shape()[1], q.shape()[2]);
    let geometry = BlockGeometry::new(seqlen, seqlen, BLOCK, BLOCK)?;
    let own = BlockMask::window(geometry, Some(0), Some(0), blockflash_ops::Align::BottomRight)?;
    let always = own.union(&BlockMask::sink(geometry, 1)?)?;
    let mut scores = BlockScores::new(geometry, q, k, stream)?;
    scores.compute(q, k, stream)?;
    let room = heads * (geometry.rows() * blocks + always.nnz());
    let room = room.min(heads * geometry.rows() * geometry.cols());
    let mut buffer = BlockMaskBuffer::new(geometry, 1, heads, room, stream)?;
    let always = always.to(stream)?;
    let source = BlockSource::Scores { scores: scores.scores().view(), k: blocks };
    let choice = BlockChoice { source, always: Some(&always), mask: Mask::causal() };
    buffer.build(&choice, stream)?;
    buffer.check(stream)?;
    Ok(buffer.to_host(stream)?)
}

/// ‖o − dense‖ / ‖dense‖ over eight blocks of queries, where `dense` attends every key before.
pub fn error_of_choice(
    [q, k, v]: [View<'_>; 3],
    o: View<'_>,
    stream: &Stream,
) -> Result<f64, Failure> {
    let blocks = q.shape()[1] / BLOCK;
    let mut sums = [0.0; 2];
    for at in 1..=8 {
        let end = (blocks * at / 8).max(1) * BLOCK;
        let rows = end - BLOCK..end;
        let [k, v] = [k.slice(1, 0..end)?, v.slice(1, 0..end)?];
        let attention = Attention::new(q.slice(1, rows.clone())?, k, v);
        let dense =
            Attention { scores: Scores { mask: Mask::causal(), ..attention.scores }, ..attention }
                .forward(stream)?
                .o;
        let found = o.slice(1, rows)?.to_tensor(stream)?;
        let part = squares(&found, &dense, stream)?;
        sums = [sums[0] + part[0], sums[1] + part[1]];
    }
    Ok((sums[0] / sums[1]).sqrt())
}

/// ‖found − expected‖² and ‖expected‖².
pub fn squares(found: &Tensor, expected: &Tensor, stream: &Stream) -> Result<[f64; 2], Failure> {
    let [found, expected] = [Array::download(found, stream)?, Array::download(expected, stream)?];
    let [found, expected] = [&found, &expected].map(|x| x.to_f32(0..x.len()));
    Ok(found.iter().zip(&expected).fold([0.0; 2], |[error, size], (&found, &expected)| {
        let [found, expected] = [found, expected].map(f64::from);
        [error + (found - expected).powi(2), size + expected.powi(2)]
    }))
}
