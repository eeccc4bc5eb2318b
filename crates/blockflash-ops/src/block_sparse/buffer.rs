use super::build_plan::{STEPS, plan};
use super::choice::{BlockChoice, BlockSource};
use super::device_transpose::{TransposeSizes, Transposing};
use super::problems::{NOTHING, describe};
use super::token_buffer::{TokenBits, give_room};
use super::validate::{Sizes, invalid};
use super::{BlockGeometry, BlockMask};
use crate::check::{filled, to_i32};
use crate::operation::no_kernel_on_cpu;
use crate::selection::{Problem, select, tile_of, unsupported};
use crate::verify::{checks, outside_of_captures};
use crate::{Error, Result};
use blockflash_safe::{
    BlockListScratch, BlockLists, BlockMaskBuild, BlockMaskBuildOperands, CudaProperties, Stream,
    Tensor,
};
use blockflash_sys::params::blockflash_block_mask_build_params;
use blockflash_sys::{DType, Kernel};

/// A block mask that is rebuilt on the device where attention reads it, for example at each step of
/// a model.
///
/// All memory is allocated at the start, with room for `capacity` visited blocks. On a GPU,
/// [`build`](Self::build) is two launches, or four with a
/// [transpose](Self::with_transpose), that use neither host memory nor synchronisation. A graph
/// can therefore capture it together with the computation of the scores and the attention that
/// follows. Errors in the data are detected on the device only, and [`check`](Self::check) reports
/// them. Attention can run with the mask even then: columns that do not exist are left out, a
/// column that comes twice counts once, NaN is never chosen, and lists are cut off where the
/// capacity ends.
///
/// On the CPU the same calls use the constructors of [`BlockMask`].
///
/// ```
/// use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockSource};
/// use blockflash_ops::{Align, BlockGeometry, BlockMask, Device, Mask, Tensor};
///
/// let stream = Device::cpu().stream()?; // or of a GPU
/// let geometry = BlockGeometry::new(1000, 1000, 128, 64)?;
/// let mut buffer = BlockMaskBuffer::new(geometry, 1, 2, 2 * 8 * 7, &stream)?;
///
/// // Per head of queries the 4 best blocks, and always three blocks around the diagonal.
/// let scores: Vec<f32> = (0..2 * 8 * 16).map(|i| (i as f32).sin()).collect();
/// let scores = Tensor::from_slice(&stream, &scores, &[1, 2, 8, 16])?;
/// let local = BlockMask::window(geometry, Some(1), Some(0), Align::BottomRight)?.to(&stream)?;
/// let source = BlockSource::Scores { scores: scores.view(), k: 4 };
/// let (always, mask) = (Some(&local), Mask::causal());
/// let choice = BlockChoice { always, mask, ..BlockChoice::new(source) };
///
/// buffer.build(&choice, &stream)?; // again and again
/// assert_eq!(buffer.mask().rows(), 8); // for `Attention::block_mask`
/// buffer.check(&stream)?;
/// assert!(buffer.to_host(&stream)?.row(0, 1, 7)?.len() >= 4);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockMaskBuffer {
    pub(super) mask: BlockMask,
    capacity: usize,
    /// `None` on the CPU.
    pub(super) workspace: Option<Workspace>,
    /// See [`BlockMaskBuffer::with_bits`].
    pub(super) bits: Option<TokenBits>,
}

/// What a build on a GPU needs besides the mask.
#[derive(Debug)]
pub(super) struct Workspace {
    kernel: &'static Kernel,
    scratch: BlockListScratch,
    problems: Tensor,
    /// For a mask with a transpose.
    transposing: Option<Transposing>,
}

impl BlockMaskBuffer {
    /// Allocates a mask of this many batch entries and heads, each 1 or the actual number as for
    /// [`BlockMask`], with room for `capacity` visited blocks over all of them. No block is visited
    /// until the first [`build`](Self::build).
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] if `batch` or `heads` is 0; [`Error::TooLarge`] if rows or the
    /// capacity do not fit i32; [`Error::Unsupported`] for a GPU without a kernel; out of memory,
    /// or a failing device.
    pub fn new(
        geometry: BlockGeometry,
        batch: usize,
        heads: usize,
        capacity: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let groups = Sizes::new(geometry, batch, heads)?.groups();
        to_i32("capacity", capacity)?;
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let Some(gpu) = stream.device().cuda_properties() else {
            let nothing = filled(0, &[groups, rows + 1])?;
            let mask = BlockMask::from_parts(geometry, batch, heads, &nothing, &[])?;
            return Ok(Self { mask, capacity, workspace: None, bits: None });
        };
        let lists = BlockLists::with_capacity([batch, heads], rows, cols, capacity, stream)?;
        let (packed, transpose) = (None, None);
        let mask = BlockMask { geometry, batch, heads, lists, packed, transpose };
        let workspace = Workspace::new(&mask, gpu, stream)?;
        Ok(Self { mask, capacity, workspace: Some(workspace), bits: None })
    }

    /// The mask that was built last. On a GPU [`nnz`](BlockMask::nnz) and
    /// [`density`](BlockMask::density) describe the whole capacity, since only the device knows how
    /// much of it is used; see [`to_host`](Self::to_host).
    pub fn mask(&self) -> &BlockMask {
        &self.mask
    }

    /// The number of visited blocks that there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The kernel that builds the mask; `None` on the CPU.
    pub fn kernel(&self) -> Option<&'static Kernel> {
        self.workspace.as_ref().map(|workspace| workspace.kernel)
    }

    /// Builds the mask of a choice. On a GPU this only queues work on the stream: it neither
    /// allocates nor waits, and [`check`](Self::check) reports errors in the data;
    /// [`set_checks`](crate::set_checks) lets every build wait and report them.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::DType`], [`Error::Stride`] and [`Error::DeviceMismatch`] name the
    /// operand; [`Error::InvalidBlockMask`] if `always` has another geometry, or a number of batch
    /// entries or heads that is neither 1 nor the number of the mask; [`Error::TooLarge`] for lists
    /// of more than 2^30 columns. On the CPU also the errors of `check`; the mask then stays as it
    /// was.
    pub fn build(&mut self, choice: &BlockChoice<'_>, stream: &Stream) -> Result<()> {
        let sizes = self.checked(choice, stream)?;
        match self.kernel() {
            Some(kernel) if checks(stream.device()) => {
                outside_of_captures(stream)?;
                self.launch(kernel, &sizes, choice, stream)?;
                self.check(stream)
            }
            Some(kernel) => self.launch(kernel, &sizes, choice, stream),
            None => self.build_on_host(&sizes, choice),
        }
    }

    /// Like [`build`](Self::build) with this kernel, which builds or transposes block masks: for
    /// tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] on the CPU, if the kernel does neither or does not run on this
    /// GPU, or if it transposes and the mask has no transpose.
    pub fn build_with(
        &mut self,
        kernel: &Kernel,
        choice: &BlockChoice<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let sizes = self.checked(choice, stream)?;
        self.launch(kernel, &sizes, choice, stream)
    }

    /// Reports whether the data of all builds since the last check was valid. Waits for the work on
    /// the stream, which must be the stream of the builds or be ordered after it.
    ///
    /// # Errors
    /// [`Error::InvalidBlockMask`] names the first invalid row and the first invalid position in
    /// it: a column that does not exist or comes twice, a NaN, or the end of the capacity. Also a
    /// stream that is being captured, or a failing device.
    pub fn check(&mut self, stream: &Stream) -> Result<()> {
        let sizes = self.sizes()?;
        self.check_tiles(stream)?;
        let Some(workspace) = &mut self.workspace else { return Ok(()) };
        let words = workspace.problems.to_vec::<i32>(stream)?;
        let Some(problem) = describe(&words, &sizes, self.capacity) else { return Ok(()) };
        workspace.problems.fill_bytes(stream, NOTHING)?;
        invalid(problem)
    }

    /// A copy of the mask on the CPU. Waits for the work on the stream, as [`check`](Self::check)
    /// does.
    ///
    /// # Errors
    /// A stream that is being captured, or a failing device.
    pub fn to_host(&self, stream: &Stream) -> Result<BlockMask> {
        let row_ptr = self.mask.row_ptr().to_vec::<i32>(stream)?;
        let end = row_ptr.last().map_or(0, |&end| end as usize);
        let col_idx = self.mask.col_idx().view().slice(0, 0..end)?.to_vec::<i32>(stream)?;
        let BlockMask { geometry, batch, heads, .. } = self.mask;
        let mask = BlockMask::from_parts(geometry, batch, heads, &row_ptr, &col_idx)?;
        let mask = match self.mask.bits() {
            Some([first, words]) => {
                let first = first.view().slice(0, 0..end)?.to_vec::<i32>(stream)?;
                let words = words.to_vec::<i32>(stream)?;
                let words: Vec<u32> = words.into_iter().map(|word| word as u32).collect();
                mask.with_bits(&first, &words)?
            }
            None => mask,
        };
        mask.transposed_like(&self.mask)
    }

    pub(super) fn sizes(&self) -> Result<Sizes> {
        Sizes::new(self.mask.geometry, self.mask.batch, self.mask.heads)
    }

    fn checked(&self, choice: &BlockChoice<'_>, stream: &Stream) -> Result<Sizes> {
        self.expect(stream)?;
        if self.bits.is_some() {
            return invalid("the buffer has room for bits: `build_tokens` builds it".into());
        }
        let sizes = self.sizes()?;
        choice.check(&sizes, stream.device())?;
        Ok(sizes)
    }

    /// The same buffer, whose mask has a transpose from now on, as by
    /// [`BlockMask::with_transpose`]: each build makes it anew. On a GPU these are two more
    /// launches, and the memory for them is allocated here: for each head a bit per block, and room
    /// for `capacity` blocks.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for a stream of another device than
    /// the buffer's; [`Error::TooLarge`](crate::Error::TooLarge) if columns do not fit i32;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a GPU without a kernel; out of memory,
    /// or a failing device.
    pub fn with_transpose(mut self, stream: &Stream) -> Result<Self> {
        self.expect(stream)?;
        let Some(workspace) = &mut self.workspace else {
            self.mask = self.mask.with_transpose()?;
            return Ok(self);
        };
        let gpu = stream.device().cuda_properties().filter(|_| self.mask.transpose.is_none());
        if let Some(gpu) = gpu {
            let mut transposing = Transposing::new(&mut self.mask, gpu, stream)?;
            transposing.launch(None, &mut self.mask, stream)?;
            workspace.transposing = Some(transposing);
            if let Some(bits) = &self.bits {
                give_room(&mut self.mask, bits.tiles, stream)?;
            }
        }
        Ok(self)
    }

    /// Checks that the buffer is on the stream's device.
    pub(super) fn expect(&self, stream: &Stream) -> Result<()> {
        let (expected, found) = (*stream.device(), self.mask.device());
        if expected != found {
            return Err(Error::DeviceMismatch { what: "buffer", expected, found });
        }
        Ok(())
    }

    fn build_on_host(&mut self, sizes: &Sizes, choice: &BlockChoice<'_>) -> Result<()> {
        self.keep(choice.build(sizes)?, sizes)
    }

    /// Queues a build with the selected kernels.
    pub(super) fn launch_built(
        &mut self,
        sizes: &Sizes,
        choice: &BlockChoice<'_>,
        stream: &Stream,
    ) -> Result<()> {
        match self.kernel() {
            Some(kernel) => self.launch(kernel, sizes, choice, stream),
            None => Ok(()),
        }
    }

    fn launch(
        &mut self,
        kernel: &Kernel,
        sizes: &Sizes,
        choice: &BlockChoice<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let Some(workspace) = &mut self.workspace else {
            return Err(no_kernel_on_cpu::<Sizes>(kernel));
        };
        let transposes = TransposeSizes::tile(kernel).map(|_| kernel);
        if transposes.is_some() && workspace.transposing.is_none() {
            let what = format!("{}: the buffer has no transpose", kernel.symbol());
            return Err(unsupported::<TransposeSizes>(&kernel.target, what));
        }
        // The selected kernel where the given one belongs to the other part.
        let kernel = if transposes.is_some() { workspace.kernel } else { kernel };
        let (params, config) = plan(kernel, sizes, choice, self.capacity)?;
        if sizes.geometry.rows() == 0 {
            return Ok(());
        }
        for step in STEPS {
            let params = blockflash_block_mask_build_params { step, ..params };
            let operands = workspace.operands(&mut self.mask, choice);
            stream.launch::<BlockMaskBuild>(kernel, &config, &params, operands)?;
        }
        match &mut workspace.transposing {
            Some(transposing) => transposing.launch(transposes, &mut self.mask, stream),
            None => Ok(()),
        }
    }
}

impl Workspace {
    /// The sizes are taken from `mask`.
    fn new(mask: &BlockMask, gpu: &CudaProperties, stream: &Stream) -> Result<Self> {
        let kernel = select(&Sizes::new(mask.geometry, mask.batch, mask.heads)?, gpu)?;
        // Loads the kernel now, since the first build may be captured in a graph.
        stream.device().preload(kernel)?;
        let mut problems = Tensor::empty(stream, DType::I32, &[4])?;
        problems.fill_bytes(stream, NOTHING)?;
        let (groups, slab_rows) =
            ([mask.batch, mask.heads], tile_of::<Sizes>(kernel, &kernel.target)?);
        let scratch = BlockListScratch::new(groups, mask.rows(), mask.cols(), slab_rows, stream)?;
        Ok(Self { kernel, scratch, problems, transposing: None })
    }

    fn operands<'a>(
        &'a mut self,
        mask: &'a mut BlockMask,
        choice: &BlockChoice<'a>,
    ) -> BlockMaskBuildOperands<'a> {
        BlockMaskBuildOperands {
            source: match choice.source {
                BlockSource::Bool(view) | BlockSource::TopK(view) => view,
                BlockSource::Scores { scores, .. } => scores,
            },
            always: choice.always.map(BlockMask::for_kernels),
            scratch: &mut self.scratch,
            lists: &mut mask.lists,
            problems: self.problems.view_mut(),
        }
    }
}

#[cfg(test)]
#[path = "buffer_tests.rs"]
mod tests;
