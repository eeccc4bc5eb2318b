//! Operands for the construction of a block mask: q and k for the scores, scores for the mask.

use super::operands::{Operands, Progress, normal};
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
use blockflash_ops::{
    Align, BlockGeometry, BlockMask, CudaProperties, DType, Device, Kernel, Mask, Stream, Tensor,
};
use blockflash_oracle::{Comparison, block_scores};

/// Leading blocks that every mask visits.
pub(super) const SINK: usize = 1;
/// Blocks before the diagonal that every mask visits.
pub(super) const WINDOW: usize = 4;

/// Computes scores: the mean query times the mean key of each pair of blocks.
#[derive(Debug)]
pub(super) struct Scores {
    host: [Array; 2],
    block: usize,
    q: Tensor,
    k: Tensor,
    scores: BlockScores,
}

/// Chooses the mask from scores.
#[derive(Debug)]
pub(super) struct Choose {
    host: Array,
    scores: Tensor,
    top_k: usize,
    /// Blocks that are always visited, as a mask on the device.
    always: BlockMask,
    buffer: BlockMaskBuffer,
}

impl Scores {
    pub(super) fn new(
        geometry: BlockGeometry,
        [num_heads, head_dim]: [usize; 2],
        dtype: DType,
        stream: &Stream,
        seed: u64,
    ) -> Result<Self> {
        let sizes = [1, geometry.seqlen_q(), num_heads, head_dim];
        let host = [normal(&sizes, dtype, seed, 0)?, normal(&sizes, dtype, seed, 1)?];
        let (q, k) = (host[0].upload(stream)?, host[1].upload(stream)?);
        let scores = BlockScores::new(geometry, q.view(), k.view(), stream)?;
        Ok(Self { host, block: geometry.block_q(), q, k, scores })
    }
}

/// The kernel for which the memory was allocated.
fn selected(kernel: Option<&'static Kernel>) -> Result<&'static Kernel> {
    kernel.ok_or_else(|| Error::Option("this mask needs no kernel".to_owned()))
}

fn is_selected(kernel: &Kernel, selected: Option<&Kernel>) -> bool {
    selected.is_some_and(|selected| selected.variant == kernel.variant)
}

/// The outputs start as scores of 0, so that missing writes are detected.
impl Operands for Scores {
    fn select(&mut self, _gpu: &CudaProperties) -> Result<&'static Kernel> {
        selected(self.scores.kernel())
    }

    fn accepts(&mut self, kernel: &Kernel, _gpu: &CudaProperties) -> Result<bool> {
        Ok(is_selected(kernel, self.scores.kernel()))
    }

    fn is_loaded(&self) -> bool {
        true
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let (q, k) = (self.q.view(), self.k.view());
        match kernel {
            None => self.scores.compute(q, k, stream)?,
            Some(kernel) => self.scores.compute_with(kernel, q, k, stream)?,
        }
        Ok(())
    }

    fn compare(
        &self,
        scores: &[Array],
        _seed: u64,
        _progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        let [q, k] = &self.host;
        scores.iter().map(|scores| Ok(block_scores(q, k, self.block, scores)?)).collect()
    }

    fn verify(
        &mut self,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
        seed: u64,
    ) -> Result<(bool, f64)> {
        self.launch(kernel, stream)?;
        let scores = [Array::download(self.scores.scores(), stream)?];
        let found = self.compare(&scores, seed, &|_| ())?[0];
        Ok((found.passed(), found.relative))
    }
}

impl Choose {
    pub(super) fn new(
        geometry: BlockGeometry,
        num_heads: usize,
        top_k: usize,
        stream: &Stream,
        seed: u64,
    ) -> Result<Self> {
        let rows = geometry.rows();
        let host = normal(&[1, num_heads, rows, rows], DType::F32, seed, 0)?;
        let always = always(geometry)?.to(stream)?;
        let of_a_row = top_k.saturating_add(SINK + WINDOW + 1).min(rows);
        let capacity = num_heads * rows * of_a_row;
        let buffer = BlockMaskBuffer::new(geometry, 1, num_heads, capacity, stream)?;
        Ok(Self { scores: host.upload(stream)?, host, top_k, always, buffer })
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

/// The outputs start as an empty mask, so that missing writes are detected.
impl Operands for Choose {
    fn select(&mut self, _gpu: &CudaProperties) -> Result<&'static Kernel> {
        selected(self.buffer.kernel())
    }

    fn accepts(&mut self, kernel: &Kernel, _gpu: &CudaProperties) -> Result<bool> {
        Ok(is_selected(kernel, self.buffer.kernel()))
    }

    fn is_loaded(&self) -> bool {
        true
    }

    fn launch(&mut self, kernel: Option<&'static Kernel>, stream: &Stream) -> Result<()> {
        let source = BlockSource::Scores { scores: self.scores.view(), k: self.top_k };
        let choice = BlockChoice { source, always: Some(&self.always), mask: Mask::causal() };
        match kernel {
            None => self.buffer.build(&choice, stream)?,
            Some(kernel) => self.buffer.build_with(kernel, &choice, stream)?,
        }
        Ok(())
    }

    fn compare(
        &self,
        _outputs: &[Array],
        _seed: u64,
        _progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        Ok(Vec::new()) // entries are right or wrong
    }

    /// Compares entry by entry with the mask that the CPU constructors make of the same scores.
    fn verify(
        &mut self,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
        _seed: u64,
    ) -> Result<(bool, f64)> {
        self.launch(kernel, stream)?;
        self.buffer.check(stream)?;
        let expected = arrays(&self.expected()?, &Device::cpu().stream()?)?;
        let passed = arrays(self.buffer.mask(), stream)? == expected;
        Ok((passed, if passed { 0.0 } else { f64::INFINITY }))
    }
}

fn always(geometry: BlockGeometry) -> Result<BlockMask> {
    let local = BlockMask::window(geometry, Some(WINDOW), Some(0), Align::BottomRight)?;
    Ok(local.union(&BlockMask::sink(geometry, SINK)?)?)
}

/// The arrays that attention reads: row ends, the columns up to these ends, and the order of rows.
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

    #[test]
    fn another_choice_is_not_verified() {
        let stream = Device::cpu().stream().unwrap();
        let geometry = BlockGeometry::new(1000, 1000, 64, 64).unwrap();
        let mut choose = Choose::new(geometry, 2, 3, &stream, 5).unwrap();
        assert!(choose.buffer.kernel().is_none());
        assert_eq!(choose.verify(None, &stream, 5).unwrap(), (true, 0.0));
        choose.host = normal(choose.host.shape(), DType::F32, 6, 0).unwrap();
        assert_eq!(choose.verify(None, &stream, 5).unwrap(), (false, f64::INFINITY));
    }
}
