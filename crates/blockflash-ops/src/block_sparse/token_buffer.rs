//! Masks of full and partial blocks that are rebuilt on the device from pairs of tokens.

use super::choice::{BlockChoice, BlockSource};
use super::problems::no_room;
use super::validate::{Sizes, invalid};
use super::{BitTile, BlockMask, BlockMaskBuffer};
use crate::check::{Operand, contiguous, grid_x, to_i32};
use crate::selection::{select, tile_of};
use crate::{Mask, Result};
use blockflash_safe::{
    BlockBitsBuild, BlockBitsOperands, BlockBitsScratch, BlockLists, CudaProperties, Device,
    LaunchConfig, Stream, View,
};
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_BITS_CLASSIFY, BLOCKFLASH_BLOCK_BITS_GATHER, BLOCKFLASH_BLOCK_BITS_GATHER_T,
    BLOCKFLASH_PAIRS_BOOL, BLOCKFLASH_PAIRS_RANGES, blockflash_block_bits_params,
};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};

/// Rows of lists per CTA of the steps that gather.
const GATHERED_ROWS: usize = 4;

/// The pairs of tokens that a mask shows: contiguous tensors.
#[derive(Clone, Copy, Debug)]
pub enum TokenSource<'a> {
    /// u8 `[batch, heads, seqlen_q, seqlen_kv]`: the pairs that are not 0.
    Bool(View<'a>),
    /// i32 `[batch, heads, seqlen_q, 2 * ranges]`: for each query any number of ranges
    /// `[begin, end)` of keys, one after another. They may overlap and be empty; what is not from
    /// key 0 to the last one is left out.
    Ranges(View<'a>),
}

/// Sizes of a mask whose partial blocks are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BitSizes(pub(super) Sizes);

impl BitSizes {
    /// Tiles of a block.
    pub(super) fn block_tiles(&self) -> usize {
        let geometry = self.0.geometry;
        geometry.block_q() / BitTile::SIDE * (geometry.block_kv() / BitTile::SIDE)
    }
}

/// What a buffer with partial blocks has besides its lists.
#[derive(Debug)]
pub(super) struct TokenBits {
    /// `None` on the CPU.
    device: Option<(&'static Kernel, BlockBitsScratch)>,
    /// Tiles of bits.
    pub(super) tiles: usize,
}

impl BlockMaskBuffer {
    /// The same buffer with room for the bits of `blocks` partial blocks, at least one, for
    /// [`build_tokens`](Self::build_tokens). Bits take 512 bytes per 64 × 64 pairs, and twice that
    /// with a [transpose](Self::with_transpose); other memory is 5 bytes for each block of the
    /// mask, visited or not.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for a stream of another device than
    /// the buffer's; [`Error::TooLarge`](crate::Error::TooLarge) if the tiles of 64 × 64 pairs of
    /// all blocks do not fit i32; [`Error::Unsupported`](crate::Error::Unsupported) for a GPU
    /// without a kernel for blocks of this size; out of memory, or a failing device.
    pub fn with_bits(mut self, blocks: usize, stream: &Stream) -> Result<Self> {
        self.expect(stream)?;
        let sizes = BitSizes(self.sizes()?);
        let block_tiles = sizes.block_tiles();
        let Sizes { geometry, batch, heads } = sizes.0;
        let all = [batch, heads, geometry.rows(), geometry.cols(), block_tiles];
        let all = all.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
        to_i32("tiles of all blocks", all.unwrap_or(usize::MAX))?;
        let tiles = blocks.max(1).saturating_mul(block_tiles);
        to_i32("tiles of bits", tiles)?;
        let device = match stream.device().cuda_properties() {
            None => None,
            Some(gpu) => Some(on_device(&mut self.mask, sizes, tiles, gpu, stream)?),
        };
        self.bits = Some(TokenBits { device, tiles });
        Ok(self)
    }

    /// Builds the mask of the pairs that are visible, without the blocks that the token mask hides
    /// entirely; inside of the others it changes nothing. On a GPU this only queues work on the
    /// stream: it neither allocates nor waits, and [`check`](Self::check) reports too little room.
    /// Partial blocks without room are not visited.
    ///
    /// ```
    /// use blockflash_ops::{BlockGeometry, BlockMaskBuffer, Device, Mask, Tensor, TokenSource};
    ///
    /// // Documents of 300 and 700 tokens: the keys that each query sees.
    /// let document = |query| if query < 300 { [0, 300] } else { [300, 1000] };
    /// let ranges: Vec<i32> = (0..1000).flat_map(document).collect();
    /// let stream = Device::best().stream()?;
    /// let ranges = Tensor::from_slice(&stream, &ranges, &[1, 1, 1000, 2])?;
    /// // Room for all blocks, and for the bits of 32 partial ones.
    /// let geometry = BlockGeometry::new(1000, 1000, 64, 64)?;
    /// let buffer = BlockMaskBuffer::new(geometry, 1, 1, 256, &stream)?;
    /// let mut buffer = buffer.with_bits(32, &stream)?;
    ///
    /// buffer.build_tokens(&TokenSource::Ranges(ranges.view()), Mask::Full, &stream)?;
    /// buffer.check(&stream)?; // waits for the stream
    /// let mask = buffer.to_host(&stream)?;
    /// assert!(mask.is_visible(0, 0, 299, 0)? && !mask.is_visible(0, 0, 300, 0)?);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if the buffer has no room for
    /// [bits](Self::with_bits); [`Error::Shape`](crate::Error::Shape),
    /// [`Error::DType`](crate::Error::DType), [`Error::Stride`](crate::Error::Stride) and
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for the source. On the CPU also the
    /// errors of `check`; the mask then stays as it was.
    pub fn build_tokens(
        &mut self,
        source: &TokenSource<'_>,
        mask: Mask,
        stream: &Stream,
    ) -> Result<()> {
        self.expect(stream)?;
        let sizes = self.sizes()?;
        source.check(&sizes, stream.device())?;
        let Some(mut bits) = self.bits.take() else {
            return invalid("the buffer has no room for bits: `with_bits` makes it".into());
        };
        let built = match &mut bits.device {
            None => self.build_tokens_on_host(&sizes, source, mask, bits.tiles),
            Some((kernel, scratch)) => {
                let launches = Launches { kernel, sizes, source, tiles: bits.tiles };
                self.launch_tokens(&launches, scratch, mask, stream)
            }
        };
        self.bits = Some(bits);
        built
    }

    fn launch_tokens(
        &mut self,
        launches: &Launches<'_>,
        scratch: &mut BlockBitsScratch,
        mask: Mask,
        stream: &Stream,
    ) -> Result<()> {
        let geometry = launches.sizes.geometry;
        let any = geometry.rows() > 0 && geometry.cols() > 0;
        if any {
            scratch.counter_mut().slice(0, 0..1)?.fill_bytes(stream, 0)?;
            launches.launch(BLOCKFLASH_BLOCK_BITS_CLASSIFY, scratch, &mut self.mask, stream)?;
        }
        let visited = BlockSource::Bool(scratch.visited().view());
        let choice = BlockChoice { mask, ..BlockChoice::new(visited) };
        self.launch_built(&launches.sizes, &choice, stream)?;
        if any {
            launches.launch(BLOCKFLASH_BLOCK_BITS_GATHER, scratch, &mut self.mask, stream)?;
            if self.mask.transpose.is_some() {
                launches.launch(BLOCKFLASH_BLOCK_BITS_GATHER_T, scratch, &mut self.mask, stream)?;
            }
        }
        Ok(())
    }

    fn build_tokens_on_host(
        &mut self,
        sizes: &Sizes,
        source: &TokenSource<'_>,
        mask: Mask,
        tiles: usize,
    ) -> Result<()> {
        let built = source.build(sizes)?;
        let needed = built.partial_blocks()? * BitSizes(*sizes).block_tiles();
        if let Some(problem) = too_many_tiles(needed, tiles) {
            return invalid(problem);
        }
        self.keep(built.intersect_mask(mask)?, sizes)
    }

    /// Keeps a mask that was built on the host, if it has room.
    pub(super) fn keep(&mut self, mask: BlockMask, sizes: &Sizes) -> Result<()> {
        let (nnz, capacity, rows) = (mask.nnz(), self.capacity(), mask.rows());
        if nnz > capacity {
            // The first row that ends beyond the capacity; each group has one entry more than rows.
            let row_ptr = mask.row_ptr().view().as_slice::<i32>()?;
            let end = row_ptr.partition_point(|&end| end as usize <= capacity);
            let place = sizes.place(end / (rows + 1), end % (rows + 1) - 1);
            let position = capacity - row_ptr[end - 1] as usize;
            return invalid(no_room(nnz as u64, capacity, &place, position as u64));
        }
        self.mask = mask.transposed_like(&self.mask)?;
        Ok(())
    }

    /// Whether the builds since the last check had room for their bits; waits for the stream.
    pub(super) fn check_tiles(&mut self, stream: &Stream) -> Result<()> {
        let Some(TokenBits { device: Some((_, scratch)), tiles }) = &mut self.bits else {
            return Ok(());
        };
        let most = scratch.counter().to_vec::<i32>(stream)?[1];
        let Some(problem) = too_many_tiles(most.max(0) as usize, *tiles) else { return Ok(()) };
        scratch.counter_mut().fill_bytes(stream, 0)?;
        invalid(problem)
    }
}

/// Gives the lists of a mask, and of its transpose if it has one, room for bits.
pub(super) fn give_room(mask: &mut BlockMask, tiles: usize, stream: &Stream) -> Result<()> {
    let [down, across] = mask.block_tiles();
    for lists in [Some(&mut mask.lists), mask.transpose.as_mut()].into_iter().flatten() {
        if lists.bits().is_none() {
            let empty = BlockLists::with_capacity([1, 1], 0, 0, 0, stream)?;
            let with_room = std::mem::replace(lists, empty);
            *lists = with_room.with_bit_capacity(down * across, tiles, stream)?;
        }
    }
    Ok(())
}

fn on_device(
    mask: &mut BlockMask,
    sizes: BitSizes,
    tiles: usize,
    gpu: &CudaProperties,
    stream: &Stream,
) -> Result<(&'static Kernel, BlockBitsScratch)> {
    let kernel = select(&sizes, gpu)?;
    // Loads the kernel now, since the first build may be captured in a graph.
    stream.device().preload(kernel)?;
    let Sizes { geometry, batch, heads } = sizes.0;
    let (groups, room) = ([batch, heads], [tiles, sizes.block_tiles()]);
    let scratch = BlockBitsScratch::new(groups, geometry.rows(), geometry.cols(), room, stream)?;
    give_room(mask, tiles, stream)?;
    Ok((kernel, scratch))
}

fn too_many_tiles(needed: usize, tiles: usize) -> Option<String> {
    (needed > tiles).then(|| {
        format!("{needed} tiles of 64 × 64 bits are needed, but there is room for {tiles}")
    })
}

impl TokenSource<'_> {
    fn check(&self, sizes: &Sizes, device: &Device) -> Result<()> {
        let Sizes { geometry, batch, heads } = *sizes;
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let (what, view) = match self {
            Self::Bool(pairs) => {
                contiguous("pairs", pairs, DType::U8, &[batch, heads, seqlen_q, seqlen_kv])?;
                ("pairs", pairs)
            }
            Self::Ranges(ranges) => {
                let count = range_count(ranges);
                to_i32("ranges", count)?;
                contiguous("ranges", ranges, DType::I32, &[batch, heads, seqlen_q, 2 * count])?;
                ("ranges", ranges)
            }
        };
        Operand::new(what, view).on(device)
    }

    /// With the constructors for the CPU. The source has been checked and is on the CPU.
    fn build(&self, sizes: &Sizes) -> Result<BlockMask> {
        let Sizes { geometry, batch, heads } = *sizes;
        match self {
            Self::Bool(pairs) => {
                let pairs: Vec<bool> = pairs.as_slice::<u8>()?.iter().map(|&p| p != 0).collect();
                BlockMask::from_token_mask(geometry, batch, heads, &pairs)
            }
            Self::Ranges(ranges) => {
                let count = range_count(ranges);
                let ranges = ranges.as_slice::<i32>()?;
                BlockMask::from_ranges(geometry, batch, heads, |batch, head, query| {
                    let row = (batch * heads + head) * geometry.seqlen_q() + query;
                    let ends = ranges[row * count * 2..][..count * 2].chunks_exact(2);
                    ends.map(|ends| ends[0].max(0) as usize..ends[1].max(0) as usize)
                })
            }
        }
    }
}

/// Ranges of a query.
fn range_count(ranges: &View<'_>) -> usize {
    ranges.shape().get(3).copied().unwrap_or(0) / 2
}

/// What the launches of a build have in common.
struct Launches<'a> {
    kernel: &'static Kernel,
    sizes: Sizes,
    source: &'a TokenSource<'a>,
    tiles: usize,
}

impl Launches<'_> {
    fn launch(
        &self,
        step: i32,
        scratch: &mut BlockBitsScratch,
        mask: &mut BlockMask,
        stream: &Stream,
    ) -> Result<()> {
        let (params, config) = self.plan(step)?;
        let source = match *self.source {
            TokenSource::Bool(view) | TokenSource::Ranges(view) => view,
        };
        let BlockMask { lists, transpose, .. } = mask;
        let transpose = transpose.as_mut();
        let operands = BlockBitsOperands { source, scratch, lists, transpose };
        Ok(stream.launch::<BlockBitsBuild>(self.kernel, &config, &params, operands)?)
    }

    /// The kernel argument of a step, with null pointers, and its geometry.
    fn plan(&self, step: i32) -> Result<(blockflash_block_bits_params, LaunchConfig)> {
        let [_, range_cols] = tile_of::<BitSizes>(self.kernel, &self.kernel.target)?;
        let Sizes { geometry, batch, heads } = self.sizes;
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let (source_kind, ranges) = match self.source {
            TokenSource::Bool(_) => (BLOCKFLASH_PAIRS_BOOL, 0),
            TokenSource::Ranges(view) => (BLOCKFLASH_PAIRS_RANGES, range_count(view)),
        };
        let params = blockflash_block_bits_params {
            source: null(),
            visited: null_mut(),
            first: null_mut(),
            counter: null_mut(),
            bits: null_mut(),
            bits_t: null_mut(),
            row_ptr: null(),
            col_idx: null(),
            block_bits: null_mut(),
            step,
            source_kind,
            ranges: to_i32("ranges", ranges)?,
            batch: to_i32("batch", batch)?,
            heads: to_i32("heads", heads)?,
            seqlen_q: to_i32("seqlen_q", geometry.seqlen_q())?,
            seqlen_kv: to_i32("seqlen_kv", geometry.seqlen_kv())?,
            block_q: to_i32("block_q", geometry.block_q())?,
            block_kv: to_i32("block_kv", geometry.block_kv())?,
            rows: to_i32("rows", rows)?,
            cols: to_i32("cols", cols)?,
            capacity: to_i32("tiles of bits", self.tiles)?,
        };
        let gathered = |rows: usize| (self.sizes.groups() * rows).div_ceil(GATHERED_ROWS);
        let blocks = match step {
            BLOCKFLASH_BLOCK_BITS_CLASSIFY => {
                let ranges = source_kind == BLOCKFLASH_PAIRS_RANGES;
                let of_cta = if ranges { range_cols } else { 1 };
                grid_x(&[self.sizes.groups(), rows, cols.div_ceil(of_cta)])?
            }
            BLOCKFLASH_BLOCK_BITS_GATHER => grid_x(&[gathered(rows)])?,
            _ => grid_x(&[gathered(cols)])?,
        };
        Ok((params, LaunchConfig::of(self.kernel, blocks, false)))
    }
}

#[cfg(test)]
#[path = "token_buffer_tests.rs"]
mod tests;
