//! Operands of making a block mask: q and k for scores, scores for the mask.

use crate::case::{BlockMaskShape, MASK_SINK, MASK_WINDOW, MaskStep};
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
use blockflash_ops::{Align, BlockGeometry, BlockMask, DType, Device, Mask, Row, Stream, Tensor};
use blockflash_oracle as oracle;

/// Inputs on the device and in host memory, and what is made of them.
#[derive(Debug)]
pub(super) enum MaskOperands {
    Scores(Box<Scores>),
    Choose(Box<Choose>),
}

#[derive(Debug)]
pub(super) struct Scores {
    host: [Array; 2],
    block: usize,
    q: Tensor,
    k: Tensor,
    scores: BlockScores,
}

#[derive(Debug)]
pub(super) struct Choose {
    host: Array,
    scores: Tensor,
    top_k: usize,
    /// On the device.
    always: BlockMask,
    buffer: BlockMaskBuffer,
}

impl MaskOperands {
    /// `normal` draws an input of a shape; its last argument tells inputs apart.
    pub(super) fn new(
        shape: &BlockMaskShape,
        stream: &Stream,
        normal: impl Fn(&[usize], DType, u64) -> Result<Array>,
    ) -> Result<Self> {
        let BlockMaskShape { seqlen, num_heads, block, step } = *shape;
        let geometry = BlockGeometry::new(seqlen, seqlen, block, block)?;
        let rows = geometry.rows();
        Ok(match step {
            MaskStep::Scores { head_dim, dtype } => {
                let sizes = [1, seqlen, num_heads, head_dim];
                let host = [normal(&sizes, dtype, 0)?, normal(&sizes, dtype, 1)?];
                let (q, k) = (host[0].upload(stream)?, host[1].upload(stream)?);
                let scores = BlockScores::new(geometry, q.view(), k.view(), stream)?;
                Self::Scores(Box::new(Scores { host, block, q, k, scores }))
            }
            MaskStep::Choose { top_k } => {
                let host = normal(&[1, num_heads, rows, rows], DType::F32, 0)?;
                let always = always(geometry)?.to(stream)?;
                let of_a_row = top_k.saturating_add(MASK_SINK + MASK_WINDOW + 1).min(rows);
                let buffer = BlockMaskBuffer::new(
                    geometry,
                    1,
                    num_heads,
                    num_heads * rows * of_a_row,
                    stream,
                )?;
                let scores = host.upload(stream)?;
                Self::Choose(Box::new(Choose { host, scores, top_k, always, buffer }))
            }
        })
    }

    /// The kernel that the library selects; `None` on the CPU.
    pub(super) fn kernel(&self) -> Option<&'static Row> {
        match self {
            Self::Scores(operands) => operands.scores.kernel(),
            Self::Choose(operands) => operands.buffer.kernel(),
        }
    }

    pub(super) fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        match self {
            Self::Scores(operands) => operands.launch(row, stream),
            Self::Choose(operands) => operands.launch(row, stream),
        }
    }

    /// Launches once and compares every element. Memory starts as scores of 0 and a mask of
    /// nothing, so what is not written is seen.
    pub(super) fn verify(
        &mut self,
        row: Option<&'static Row>,
        stream: &Stream,
    ) -> Result<(bool, f64)> {
        self.launch(row, stream)?;
        match self {
            Self::Scores(operands) => operands.verify(stream),
            Self::Choose(operands) => operands.verify(stream),
        }
    }
}

impl Scores {
    fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        let (q, k) = (self.q.view(), self.k.view());
        match row {
            None => self.scores.compute(q, k, stream)?,
            Some(row) => self.scores.compute_with(row, q, k, stream)?,
        }
        Ok(())
    }

    /// With f64.
    fn verify(&self, stream: &Stream) -> Result<(bool, f64)> {
        let found = Array::download(self.scores.scores(), stream)?;
        let [q, k] = &self.host;
        let comparison = oracle::block_scores(q, k, self.block, &found);
        let comparison = comparison.map_err(|mismatch| Error::Option(mismatch.to_string()))?;
        Ok((comparison.passed(), comparison.relative))
    }
}

impl Choose {
    fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        let source = BlockSource::Scores { scores: self.scores.view(), k: self.top_k };
        let choice = BlockChoice { source, always: Some(&self.always), mask: Mask::causal() };
        match row {
            None => self.buffer.build(&choice, stream)?,
            Some(row) => self.buffer.build_with(row, &choice, stream)?,
        }
        Ok(())
    }

    /// With what the constructors on the CPU make of the same scores, entry by entry.
    fn verify(&mut self, stream: &Stream) -> Result<(bool, f64)> {
        self.buffer.check(stream)?;
        let expected = arrays(&self.expected()?, &Device::cpu().stream()?)?;
        let passed = arrays(self.buffer.mask(), stream)? == expected;
        Ok((passed, if passed { 0.0 } else { f64::INFINITY }))
    }

    fn expected(&self) -> Result<BlockMask> {
        let geometry = self.always.geometry();
        let scores = self.host.view()?;
        let (heads, scores) = (scores.shape()[1], scores.as_slice::<f32>()?);
        let best =
            BlockMask::top_k_from_scores(geometry, 1, heads, scores, self.top_k, Mask::causal())?;
        Ok(best.union(&always(geometry)?)?.intersect_mask(Mask::causal())?)
    }
}

fn always(geometry: BlockGeometry) -> Result<BlockMask> {
    let local = BlockMask::window(geometry, Some(MASK_WINDOW), Some(0), Align::BottomRight)?;
    Ok(local.union(&BlockMask::sink(geometry, MASK_SINK)?)?)
}

/// What attention reads: where rows end, their columns as far as that, and the order of rows.
fn arrays(mask: &BlockMask, stream: &Stream) -> Result<[Vec<i32>; 3]> {
    let [row_ptr, mut col_idx, row_order] = [mask.row_ptr(), mask.col_idx(), mask.row_order()]
        .map(|tensor| tensor.to_vec::<i32>(stream));
    let row_ptr = row_ptr?;
    let end = row_ptr.last().map_or(0, |&end| usize::try_from(end).unwrap_or(0));
    if let Ok(columns) = &mut col_idx {
        columns.truncate(end);
    }
    Ok([row_ptr, col_idx?, row_order?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;

    #[test]
    fn another_choice_is_not_verified() {
        let stream = Device::cpu().stream().unwrap();
        let shape = BlockMaskShape {
            seqlen: 1000,
            num_heads: 2,
            block: 64,
            step: MaskStep::Choose { top_k: 3 },
        };
        let normal = |sizes: &[usize], dtype, lane| {
            Ok(random::normal(dtype, sizes, 5, lane, |_| ()).unwrap())
        };
        let mut operands = MaskOperands::new(&shape, &stream, normal).unwrap();
        assert_eq!(operands.kernel(), None);
        assert_eq!(operands.verify(None, &stream).unwrap(), (true, 0.0));
        let MaskOperands::Choose(choose) = &mut operands else { unreachable!() };
        choose.host = random::normal(DType::F32, choose.host.shape(), 6, 0, |_| ()).unwrap();
        assert_eq!(operands.verify(None, &stream).unwrap(), (false, f64::INFINITY));
    }
}
