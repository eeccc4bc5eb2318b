use super::LaunchConfig;
use super::fit::{Fit, require};
use super::timed::timed;
use crate::driver::check;
use crate::gpu::LoadedKernel;
use crate::stream::Kept;
use crate::turns::Turns;
use crate::view::Used;
use crate::{Error, Kernel, Result, Stream};
use cudarc::driver::sys;
use std::ptr;

/// The tensors of a launch.
pub trait Operands {
    /// The memory of all tensors: those that the kernel reads, and those that it writes.
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]>;
}

/// The part of a launch that is particular to one kernel family. The tile of the family implements
/// it; [`Stream::launch`] does everything else.
///
/// # Safety
/// 1. `Params`, or its first [`param_bytes`](Self::param_bytes), is the parameter struct of the
///    kernels with this type of tile: numbers, pointers and arrays of them, so that zeros are a
///    value.
/// 2. Given the parameters that [`fit`](Self::fit) writes for a plan and operands, with the maps of
///    [`encode`](Self::encode), and a grid that `fit` allows, the kernel touches only the memory of
///    the operands' views, whatever that memory contains, and the two words of
///    [`set_counter`](Self::set_counter), which it leaves as zeros. None of its loops depends on
///    words that another launch may change.
/// 3. Memory that the kernel writes is borrowed exclusively by the operands, or is written only by
///    such kernels.
pub unsafe trait Launch: Copy {
    /// The tensors that the kernel reads and writes.
    type Operands<'a>: Operands;
    /// What the caller knows beside the operands, such as factors. Its pointers are ignored.
    type Plan: ?Sized;
    /// The kernel's argument.
    type Params;
    /// The name of the family for the error about a kernel of another one.
    const FAMILY: &'static str;

    /// The tile of a kernel of this family.
    fn of(kernel: &Kernel) -> Option<Self>;

    /// Bytes of the argument that the kernel takes.
    fn param_bytes(&self) -> usize {
        size_of::<Self::Params>()
    }

    /// Checks everything that decides which addresses the kernel touches, writes sizes, strides and
    /// pointers of the operands to the kernel's argument, which is all zeros before, and returns
    /// the number of tiles.
    ///
    /// # Errors
    /// A message that names the misfit.
    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Result<i128, String>;

    /// Encodes the tensor maps of an argument that [`fit`](Self::fit) wrote, if it has any.
    ///
    /// # Errors
    /// The errors of [`TensorMapSpec::encode`](crate::TensorMapSpec::encode).
    fn encode(&self, _operands: &Self::Operands<'_>, _params: &mut Self::Params) -> Result<()> {
        Ok(())
    }

    /// The fewest CTAs of a cluster, if the launch chooses clusters.
    fn fewest_in_cluster(&self, _plan: &Self::Plan, _params: &Self::Params) -> u32 {
        1
    }

    /// Gives a persistent kernel its tile counters: two words that are zero and that no other
    /// launch uses at the same time. They live as long as the context.
    fn set_counter(_params: &mut Self::Params, _counter: *mut u32) {}
}

/// The tile of a kernel, if the launch fits it. Writes the argument.
pub(super) fn fit<L: Launch>(
    kernel: &Kernel,
    config: &LaunchConfig,
    plan: &L::Plan,
    operands: &L::Operands<'_>,
    params: &mut L::Params,
) -> Fit<L> {
    let tile = L::of(kernel).ok_or_else(|| format!("expected a kernel of {}", L::FAMILY))?;
    let tiles = tile.fit(plan, operands, params)?;
    config.fits(kernel, tiles, kernel.family().is_persistent())?;
    let fewest = tile.fewest_in_cluster(plan, params);
    let enough = config.cluster.is_none_or(|[ctas, ..]| ctas >= fewest);
    require(
        enough,
        format_args!("clusters of {:?}, expected at least {fewest} CTAs", config.cluster),
    )?;
    Ok(tile)
}

/// The argument of a launch before [`Launch::fit`] writes it.
pub(super) fn zeros<L: Launch>() -> L::Params {
    // SAFETY: zeros are a value of the type (promise 1 of `Launch`).
    unsafe { std::mem::zeroed() }
}

/// The argument of a launch, if it fits.
#[cfg(test)]
pub(super) fn fitted<L: Launch>(
    kernel: &Kernel,
    config: &LaunchConfig,
    plan: &L::Plan,
    operands: &L::Operands<'_>,
) -> Fit<L::Params> {
    let mut params = zeros::<L>();
    fit::<L>(kernel, config, plan, operands, &mut params)?;
    Ok(params)
}

impl Stream {
    /// Launches a kernel of the table, which is loaded at its first launch (or by
    /// [`Device::preload`](crate::Device::preload)).
    ///
    /// The launches of one stream share a pair of tile counters, and so do the launches that one
    /// capture records from it, since they run one after another.
    ///
    /// # Errors
    /// [`Error::Launch`] when kernel, geometry, plan and operands do not fit each other;
    /// [`Error::NotOnGpu`], [`Error::DeviceMismatch`], [`Error::ParamSize`], [`Error::Image`],
    /// [`Error::Unsupported`], [`Error::InCapture`], [`Error::Cuda`]. Kernels with tensor maps also
    /// give [`Error::TensorMap`]; persistent kernels give [`Error::TileCounters`] when other
    /// streams and graphs have all counters.
    #[doc(hidden)]
    pub fn launch<L: Launch>(
        &self,
        kernel: &Kernel,
        config: &LaunchConfig,
        plan: &L::Plan,
        operands: L::Operands<'_>,
    ) -> Result<()> {
        self.launch_and::<L>(kernel, config, plan, &operands, true, || Ok(()))
    }

    /// Launches two kernels, of which the second one relies on what the first one left in memory
    /// that is used in turns: nobody else queues work with this memory in between.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub(super) fn launch_both<'o, A, B>(
        &self,
        kernels: [&Kernel; 2],
        configs: [&LaunchConfig; 2],
        plan: &A::Plan,
        operands: &A::Operands<'o>,
    ) -> Result<()>
    where
        A: Launch,
        B: Launch<Operands<'o> = A::Operands<'o>, Plan = A::Plan>,
    {
        // Both have the same operands, so the turns of the first one are those of the second one.
        self.launch_and::<A>(kernels[0], configs[0], plan, operands, true, || {
            self.launch_and::<B>(kernels[1], configs[1], plan, operands, false, || Ok(()))
        })
    }

    /// Launches a kernel, and does the next thing while it still has its turns. Without
    /// `takes_turns` the caller has them.
    fn launch_and<L: Launch>(
        &self,
        kernel: &Kernel,
        config: &LaunchConfig,
        plan: &L::Plan,
        operands: &L::Operands<'_>,
        takes_turns: bool,
        next: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let context =
            self.device().context().ok_or(Error::NotOnGpu { what: "launching a kernel" })?;
        let used = operands.used();
        let used = used.as_ref().iter().flatten();
        for tensor in used.clone() {
            self.device().expect(&tensor.device)?;
        }
        let mut params = zeros::<L>();
        let tile: L = fit(kernel, config, plan, operands, &mut params)
            .map_err(|what| Error::Launch { symbol: kernel.symbol(), what })?;
        tile.encode(operands, &mut params)?;

        let loaded = LoadedKernel::of(context, kernel)?;
        let (host, image) = (tile.param_bytes(), loaded.info.param_bytes);
        if host != image || image > size_of::<L::Params>() {
            return Err(Error::ParamSize { symbol: loaded.symbol.clone(), host, image });
        }
        let owners = used.filter_map(|tensor| tensor.owner);
        let mut in_turns = false;
        for memory in owners.clone() {
            memory.prepare(self)?;
            in_turns |= memory.turn().is_some();
        }
        let mut turns = Turns::default();
        if in_turns && takes_turns {
            turns = Turns::take(owners.clone().filter_map(|memory| memory.turn()), self)?;
        }
        let Some(mut session) = self.session()? else { return Ok(()) };
        if session.capture().is_some() {
            owners.for_each(|memory| session.keep(memory));
        }
        if kernel.family().counts_tiles() {
            L::set_counter(&mut params, session.tile_counter()?);
        }
        turns.begin(&session, self)?;
        let (mut attributes, count) = config.attributes();
        let launch = sys::CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: config.smem_bytes,
            hStream: session.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        let mut arguments = [ptr::from_ref(&params).cast_mut().cast()];
        // SAFETY:
        // 1. Stream and kernel belong to the current context and live.
        // 2. `launch`, its `count` attributes and `arguments` are valid during the call; the driver
        //    copies them and the parameters before it returns, and writes to none of them.
        // 3. The kernel has exactly one parameter, of the size of `Params` or of its first part:
        //    checked above and in `LoadedKernel`; the driver copies as many bytes. Promise 1 of
        //    `Launch` says that the two structs mean the same.
        // 4. The kernel touches only the views' memory and the counters (promise 2), for which
        //    `fit` has checked plan, operands and geometry. That memory is on this device and is
        //    prepared for this stream, so it is freed after the kernel; a graph that captures the
        //    launch keeps it alive; foreign memory lives by point 2 of `View::from_raw`. Where
        //    memory is used in turns, this launch holds the turns, or each launch of the graph
        //    takes them.
        // 5. The memory that it writes is borrowed exclusively (promise 3).
        let code = timed(|| unsafe {
            sys::cuLaunchKernelEx(&launch, loaded.raw.0, arguments.as_mut_ptr(), ptr::null_mut())
        });
        check("cuLaunchKernelEx", code)?;
        drop(session);
        next()
    }
}
