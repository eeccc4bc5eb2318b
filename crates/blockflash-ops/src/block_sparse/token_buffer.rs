//! Masks of full and partial blocks that are rebuilt on the device from pairs of tokens.

use super::choice::{BlockChoice, BlockSource};
use super::problems::no_room;
use super::token_choice::TokenChoice;
use super::validate::{Sizes, invalid};
use super::{BitTile, BlockMask, BlockMaskBuffer};
use crate::Result;
use crate::check::{grid_x, to_i32};
use crate::selection::select;
use blockflash_safe::{
    BlockBitsBuild, BlockBitsOperands, BlockBitsScratch, BlockLists, CudaProperties, LaunchConfig,
    Stream,
};
use blockflash_sys::Kernel;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_BITS_CLASSIFY, BLOCKFLASH_BLOCK_BITS_GATHER, BLOCKFLASH_BLOCK_BITS_GATHER_T,
    BLOCKFLASH_BLOCK_BITS_JUMPS, blockflash_block_bits_params, blockflash_window,
};
use std::ptr::{null, null_mut};

/// Rows of lists per CTA of the steps that gather.
const GATHERED_ROWS: usize = 4;

/// Nodes of trees per CTA of the step that links them.
const LINKED_NODES: usize = 1024;

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
    /// mask, visited or not, and 16 bytes for each query of the batch entries.
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

    /// Builds the mask of the pairs that are visible. On a GPU this only queues work on the stream:
    /// it neither allocates nor waits, and [`check`](Self::check) reports too little room. Partial
    /// blocks without room are not visited.
    ///
    /// ```
    /// use blockflash_ops::{BlockGeometry, BlockMaskBuffer, Device, Mask, Tensor};
    /// use blockflash_ops::{TokenChoice, TokenSource};
    ///
    /// // Documents of 300 and 700 tokens.
    /// let ids: Vec<i32> = (0..1000).map(|token| i32::from(token >= 300)).collect();
    /// let stream = Device::best().stream()?;
    /// let ids = Tensor::from_slice(&stream, &ids, &[1, 1000])?;
    /// let source = TokenSource::Documents { ids_q: ids.view(), ids_kv: ids.view() };
    /// // Room for all blocks, and for the bits of 32 partial ones.
    /// let geometry = BlockGeometry::new(1000, 1000, 64, 64)?;
    /// let buffer = BlockMaskBuffer::new(geometry, 1, 1, 256, &stream)?;
    /// let mut buffer = buffer.with_bits(32, &stream)?;
    ///
    /// // Attention is called with the same mask, which leaves out the blocks above the diagonal.
    /// let choice = TokenChoice { mask: Mask::causal(), ..TokenChoice::new(source) };
    /// buffer.build_tokens(&choice, &stream)?;
    /// buffer.check(&stream)?; // waits for the stream
    /// let mask = buffer.to_host(&stream)?;
    /// assert!(mask.is_visible(0, 0, 299, 0)? && !mask.is_visible(0, 0, 300, 0)?);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`](crate::Error::InvalidBlockMask) if the buffer has no room for
    /// [bits](Self::with_bits), for fewer keys than queries of trees, and for numbers of a pattern
    /// that do not fit; [`Error::Shape`](crate::Error::Shape),
    /// [`Error::DType`](crate::Error::DType), [`Error::Stride`](crate::Error::Stride) and
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for the source. On the CPU also the
    /// errors of `check`; the mask then stays as it was.
    pub fn build_tokens(&mut self, choice: &TokenChoice<'_>, stream: &Stream) -> Result<()> {
        self.expect(stream)?;
        let sizes = self.sizes()?;
        choice.check(&sizes, stream.device())?;
        let Some(mut bits) = self.bits.take() else {
            return invalid("the buffer has no room for bits: `with_bits` makes it".into());
        };
        let built = match &mut bits.device {
            None => self.build_tokens_on_host(&sizes, choice, bits.tiles),
            Some((kernel, scratch)) => {
                let launches = Launches { kernel, sizes, choice, tiles: bits.tiles };
                self.launch_tokens(&launches, scratch, stream)
            }
        };
        self.bits = Some(bits);
        built
    }

    fn launch_tokens(
        &mut self,
        launches: &Launches<'_>,
        scratch: &mut BlockBitsScratch,
        stream: &Stream,
    ) -> Result<()> {
        let geometry = launches.sizes.geometry;
        let any = geometry.rows() > 0 && geometry.cols() > 0;
        if any {
            scratch.counter_mut().slice(0, 0..1)?.fill_bytes(stream, 0)?;
            if launches.choice.has_nodes() {
                launches.launch(BLOCKFLASH_BLOCK_BITS_JUMPS, scratch, &mut self.mask, stream)?;
            }
            launches.launch(BLOCKFLASH_BLOCK_BITS_CLASSIFY, scratch, &mut self.mask, stream)?;
        }
        let visited = BlockSource::Bool(scratch.visited().view());
        let choice = BlockChoice { mask: launches.choice.mask, ..BlockChoice::new(visited) };
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
        choice: &TokenChoice<'_>,
        tiles: usize,
    ) -> Result<()> {
        let built = choice.build(sizes)?;
        let needed = built.partial_blocks()? * BitSizes(*sizes).block_tiles();
        if let Some(problem) = too_many_tiles(needed, tiles) {
            return invalid(problem);
        }
        self.keep(built.intersect_mask(choice.mask)?, sizes)
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
    let (groups, blocks) = ([batch, heads], [geometry.rows(), geometry.cols()]);
    let room = [tiles, sizes.block_tiles()];
    let scratch = BlockBitsScratch::new(groups, blocks, geometry.seqlen_q(), room, stream)?;
    give_room(mask, tiles, stream)?;
    Ok((kernel, scratch))
}

fn too_many_tiles(needed: usize, tiles: usize) -> Option<String> {
    (needed > tiles).then(|| {
        format!("{needed} tiles of 64 × 64 bits are needed, but there is room for {tiles}")
    })
}

/// What the launches of a build have in common.
struct Launches<'a> {
    kernel: &'static Kernel,
    sizes: Sizes,
    choice: &'a TokenChoice<'a>,
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
        let [source, ids_kv] = self.choice.tensors();
        let BlockMask { lists, transpose, .. } = mask;
        let transpose = transpose.as_mut();
        let operands = BlockBitsOperands { source, ids_kv, scratch, lists, transpose };
        Ok(stream.launch::<BlockBitsBuild>(self.kernel, &config, &params, operands)?)
    }

    /// The kernel argument of a step, with null pointers, and its geometry.
    fn plan(&self, step: i32) -> Result<(blockflash_block_bits_params, LaunchConfig)> {
        let Sizes { geometry, batch, heads } = self.sizes;
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let cols_of_cta = self.choice.cols_of_cta(&self.sizes, self.kernel.threads() as usize);
        let mut params = blockflash_block_bits_params {
            source: null(),
            ids_kv: null(),
            jumps: null_mut(),
            visited: null_mut(),
            first: null_mut(),
            counter: null_mut(),
            bits: null_mut(),
            bits_t: null_mut(),
            row_ptr: null(),
            col_idx: null(),
            block_bits: null_mut(),
            step,
            source_kind: 0,
            within: blockflash_window { left: 0, right: 0, align_bottom_right: 0 },
            ranges: 0,
            stride: 1,
            diagonal: 0,
            axes: 0,
            grid: [1; 4],
            window: [1; 4],
            dilation: [1; 4],
            batch: to_i32("batch", batch)?,
            heads: to_i32("heads", heads)?,
            seqlen_q: to_i32("seqlen_q", geometry.seqlen_q())?,
            seqlen_kv: to_i32("seqlen_kv", geometry.seqlen_kv())?,
            block_q: to_i32("block_q", geometry.block_q())?,
            block_kv: to_i32("block_kv", geometry.block_kv())?,
            rows: to_i32("rows", rows)?,
            cols: to_i32("cols", cols)?,
            cols_of_cta: to_i32("cols_of_cta", cols_of_cta)?,
            capacity: to_i32("tiles of bits", self.tiles)?,
        };
        self.choice.fill(&self.sizes, &mut params)?;
        let gathered = |rows: usize| (self.sizes.groups() * rows).div_ceil(GATHERED_ROWS);
        let blocks = match step {
            BLOCKFLASH_BLOCK_BITS_JUMPS => {
                grid_x(&[batch, geometry.seqlen_q().div_ceil(LINKED_NODES)])?
            }
            BLOCKFLASH_BLOCK_BITS_CLASSIFY => {
                grid_x(&[self.sizes.groups(), rows, cols.div_ceil(cols_of_cta)])?
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
