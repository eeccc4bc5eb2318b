use crate::device::Device;
use crate::driver::{Relaxed, check};
use crate::gpu::{Context, Handle, KernelInfo, LoadedKernel};
use crate::tile_counter::TileCounters;
use crate::{Error, Kernel, Result};
use blockflash_sys::image;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use std::ffi::CString;
use std::ptr;
use std::sync::PoisonError;

/// Bytes of shared memory that a kernel may use without asking for more.
const DEFAULT_SMEM_BYTES: u32 = 48 * 1024;
/// CTAs that a cluster may have without asking for more.
const PORTABLE_CLUSTER: u32 = 8;

impl Device {
    /// Loads a kernel now instead of at its first launch, and returns its resources.
    ///
    /// # Errors
    /// [`Error::NotOnGpu`] for the CPU, [`Error::Image`] for a missing image, [`Error::Cuda`] for
    /// one that this GPU cannot run.
    pub fn preload(&self, kernel: &Kernel) -> Result<KernelInfo> {
        let context = self.context().ok_or(Error::NotOnGpu { what: "loading a kernel" })?;
        Ok(LoadedKernel::of(context, kernel)?.info)
    }
}

impl LoadedKernel {
    /// The kernel of the table, loaded at the first call.
    pub(crate) fn of(context: &'static Context, kernel: &Kernel) -> Result<&'static LoadedKernel> {
        if let Some(loaded) =
            context.kernels.read().unwrap_or_else(PoisonError::into_inner).get(kernel)
        {
            return Ok(loaded);
        }
        let mut kernels = context.kernels.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have loaded it while this one waited.
        if let Some(loaded) = kernels.get(kernel) {
            return Ok(loaded);
        }
        let loaded: &'static LoadedKernel =
            Box::leak(Box::new(LoadedKernel::load(context, kernel)?));
        kernels.insert(*kernel, loaded);
        Ok(loaded)
    }

    fn load(context: &'static Context, kernel: &Kernel) -> Result<LoadedKernel> {
        if !kernel.target.runs_on(context.properties.compute_capability) {
            let device = Device::with_context(context);
            return Err(Error::Unsupported { device, what: "the machine code of this kernel" });
        }
        let symbol = kernel.symbol();
        let name = CString::new(symbol.as_str()).map_err(|_| Error::Launch {
            symbol: symbol.clone(),
            what: "its name contains a NUL".to_owned(),
        })?;
        let bytes = image::load(kernel)?;
        // The driver reads ELF structures in place: they want 8-byte alignment, which a `Vec<u8>`
        // does not promise.
        let mut aligned = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..bytes.len()].copy_from_slice(&bytes);

        let _bound = context.bind()?;
        // The first use may be inside a capture, of this crate or of somebody else.
        let _relaxed = Relaxed::enter()?;
        // Tile counters of persistent kernels: allocated now rather than at the first launch.
        TileCounters::of(context)?;
        let mut module = ptr::null_mut();
        // SAFETY:
        // 1. The context is current, the pointer valid for writes.
        // 2. The image is a complete cubin, or PTX that ends with a NUL: `blockflash_sys::image`
        //    embeds no others, and a program that enables the feature `images-from-folder` vouches
        //    for the images of a folder. The driver copies the image.
        let code = unsafe { sys::cuModuleLoadData(&mut module, aligned.as_ptr().cast()) };
        check("cuModuleLoadData", code)?;
        let mut raw = ptr::null_mut();
        // SAFETY: 1. The module was just loaded and is never unloaded. 2. The name ends with a NUL.
        // 3. `raw` is writable.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, module, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        // SAFETY: `raw` is a function of a module of the current context. Loading it now, rather
        // than at its first launch as the driver would, takes the cost out of the first launch.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(raw) })?;
        let info = KernelInfo {
            registers: attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            static_smem_bytes: attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            dynamic_smem_bytes: kernel.smem_bytes(),
            max_threads: attribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            param_bytes: param_bytes(raw)?,
        };
        if kernel.smem_bytes() + info.static_smem_bytes > DEFAULT_SMEM_BYTES {
            let limit = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: `raw` is a function of a module of the current context.
            let code = unsafe { sys::cuFuncSetAttribute(raw, limit, kernel.smem_bytes() as i32) };
            check("cuFuncSetAttribute", code)?;
        }
        if kernel.most_in_cluster().is_some_and(|most| most > PORTABLE_CLUSTER) {
            let allowed = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            // SAFETY: as above.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(raw, allowed, 1) })?;
        }
        Ok(LoadedKernel { raw: Handle(raw), symbol, info })
    }
}

fn attribute(function: sys::CUfunction, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: 1. A loaded function of the current context. 2. The pointer is valid for writes
    // during the call.
    check("cuFuncGetAttribute", unsafe {
        sys::cuFuncGetAttribute(&mut value, attribute, function)
    })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// Bytes of the kernel's first parameter. The driver is not asked for a second one, because memory
/// checkers report the refusal.
fn param_bytes(function: sys::CUfunction) -> Result<usize> {
    let (mut offset, mut size) = (0, 0);
    // SAFETY: 1. A loaded function of the current context. 2. The pointers are valid for writes
    // during the call.
    check("cuFuncGetParamInfo", unsafe {
        sys::cuFuncGetParamInfo(function, 0, &mut offset, &mut size)
    })?;
    Ok(size)
}
