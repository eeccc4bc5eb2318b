use crate::driver::check;
use crate::gpu::Kernel;
use crate::kernel::KernelParams;
use crate::memory::DeviceMemory;
use crate::stream::{Kept, Session};
use crate::turns::Turns;
use crate::{Error, Result, Row, Stream, View};
use cudarc::driver::sys::{self, CUlaunchAttributeID as AttributeId};
use std::ptr;
use std::sync::Arc;

/// Geometry of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: u32,
    /// Dynamic shared memory per block in bytes.
    pub smem_bytes: u32,
    /// Blocks per cluster in x, y and z (compute capability 9.0 and newer); `None` for kernels
    /// without clusters.
    pub cluster: Option<[u32; 3]>,
    /// Lets the kernel start while its predecessor on the stream is still finishing; it then waits
    /// itself, with `griddepcontrol.wait`, before it touches what the predecessor wrote.
    pub programmatic_dependent_launch: bool,
}

impl Stream {
    /// Launches the kernel of a row. The kernel is loaded at its first launch (or by
    /// [`Device::preload`](crate::Device::preload)).
    ///
    /// The typed launches ([`launch_attention_fwd`](Stream::launch_attention_fwd),
    /// [`launch_bsr_matmul`](Stream::launch_bsr_matmul)) are safe; this one is for kernels under
    /// development.
    ///
    /// # Safety
    /// 1. `P` is the parameter struct of the row's kernel (its size is checked, its meaning is
    ///    not).
    /// 2. For the blocks and threads of `config`, the kernel touches only memory that the pointers
    ///    in `params` may be used for: every pointer that it uses is inside the memory of one of
    ///    `uses`, or of foreign memory that stays valid until the work is done and the graphs that
    ///    captured it are gone.
    /// 3. Memory that it writes is borrowed exclusively by the caller, and the cross-stream rules
    ///    of the crate are kept.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`], [`Error::DeviceMismatch`], [`Error::ParamSize`], [`Error::Image`],
    /// [`Error::Cuda`].
    pub unsafe fn launch<P: KernelParams>(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &P,
        uses: &[View<'_>],
    ) -> Result<()> {
        for view in uses {
            self.device().expect(view.device())?;
        }
        // SAFETY: the caller's promise, with the owners of `uses`.
        unsafe { self.launch_with(row, config, |_| *params, uses.iter().filter_map(View::owner)) }
    }

    /// As [`launch`](Stream::launch), with the memory of the views. `params` is asked when nothing
    /// else can be queued before the kernel any more.
    ///
    /// # Safety
    /// As [`launch`](Stream::launch).
    pub(crate) unsafe fn launch_with<'m, P: KernelParams>(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: impl FnOnce(&Session<'_>) -> P,
        uses: impl Iterator<Item = &'m Arc<DeviceMemory>> + Clone,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue_kernel(row, config, |session| Ok(params(session)), uses) }
    }

    /// As [`launch_with`](Stream::launch_with), for kernels that count tiles: `params` gets two
    /// words that are zero and that no other launch uses at the same time. They live as long as the
    /// context, and the kernel leaves them zero.
    ///
    /// # Safety
    /// As [`launch`](Stream::launch).
    pub(crate) unsafe fn launch_counting<'m, P: KernelParams>(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: impl FnOnce(*mut u32) -> P,
        uses: impl Iterator<Item = &'m Arc<DeviceMemory>> + Clone,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            self.queue_kernel(row, config, |session| session.tile_counter().map(params), uses)
        }
    }

    /// # Safety
    /// As [`launch`](Stream::launch).
    unsafe fn queue_kernel<'m, P: KernelParams>(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: impl FnOnce(&Session<'_>) -> Result<P>,
        uses: impl Iterator<Item = &'m Arc<DeviceMemory>> + Clone,
    ) -> Result<()> {
        let context =
            self.device().context().ok_or(Error::NotOnGpu { what: "launching a kernel" })?;
        let kernel = Kernel::of(context, row)?;
        if size_of::<P>() != kernel.info.param_bytes {
            let (symbol, host, image) =
                (kernel.symbol.clone(), size_of::<P>(), kernel.info.param_bytes);
            return Err(Error::ParamSize { symbol, host, image });
        }
        for memory in uses.clone() {
            memory.prepare(self)?;
        }
        let mut turns = Turns::take(uses.clone().filter_map(|memory| memory.turn()), self)?;
        let Some(mut session) = self.session()? else { return Ok(()) };
        for memory in uses {
            session.keep(memory);
        }
        let params = params(&session)?;
        turns.begin(&session, self)?;
        let (mut attributes, count) = attributes(config);
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
        // 3. The kernel has exactly one parameter, of the size of `P`: checked above and in
        //    `Kernel`.
        // 4. What the kernel does with its pointers is the caller's promise. The memory behind them
        //    is prepared for this stream, so it is freed after the kernel; a graph that captures
        //    the launch keeps it alive. Where it is used in turns, this launch has them, or each
        //    launch of the graph takes them.
        check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(&launch, kernel.raw.0, arguments.as_mut_ptr(), ptr::null_mut())
        })
    }
}

/// The launch attributes that the configuration asks for, and how many they are.
fn attributes(config: &LaunchConfig) -> ([sys::CUlaunchAttribute; 2], u32) {
    let none = sys::CUlaunchAttribute {
        id: AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { pad: [0; 64] },
    };
    let mut attributes = [none; 2];
    let mut count = 0;
    if let Some([x, y, z]) = config.cluster {
        attributes[count].id = AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
        count += 1;
    }
    if config.programmatic_dependent_launch {
        attributes[count].id = AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count += 1;
    }
    (attributes, count as u32)
}
