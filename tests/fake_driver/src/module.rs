//! Images, kernels, launches and tensor maps.

use crate::calls::{Launch, called, driver, recording};
use crate::driver::{INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::graph::Stream;
use crate::image::param_bytes;
use crate::memory::without_captures;
use std::ffi::{CStr, c_char};

/// A kernel of a loaded image; none is unloaded.
struct Kernel {
    symbol: String,
    param_bytes: usize,
}

/// An image that is being loaded: what is asked about its kernels is asked at once, while the
/// caller still holds it.
struct Module(*const u8);

/// `CUlaunchAttribute`.
#[repr(C)]
struct Attribute {
    id: u32,
    _pad: u32,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    smem_bytes: u32,
    stream: *const Stream,
    attributes: *const Attribute,
    count: u32,
}

/// The ids of `CUlaunchAttribute`.
const CLUSTER: u32 = 4;
const PROGRAMMATIC: u32 = 6;

impl Config {
    fn launch(&self, kernel: &Kernel, arguments: &[*const u8; 1]) -> Launch {
        let mut launch = Launch {
            symbol: kernel.symbol.clone(),
            grid: self.grid,
            block: self.block,
            smem_bytes: self.smem_bytes,
            cluster: None,
            early: false,
            // SAFETY: the only argument is the parameter struct of this size.
            params: unsafe { std::slice::from_raw_parts(arguments[0], kernel.param_bytes) }
                .to_vec(),
        };
        for at in 0..self.count as usize {
            // SAFETY: the caller passes this many attributes.
            let attribute = unsafe { &*self.attributes.add(at) };
            let [x, y, z, ..] = attribute.value;
            match attribute.id {
                CLUSTER => launch.cluster = Some([x, y, z]),
                PROGRAMMATIC => launch.early = x == 1,
                other => panic!("launch attribute {other}"),
            }
        }
        launch
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernelEx(
    config: &Config,
    kernel: &Kernel,
    arguments: &[*const u8; 1],
    _extra: usize,
) -> u32 {
    let launch = recording().then(|| config.launch(kernel, arguments));
    called("cuLaunchKernelEx", launch).map_or_else(|code| code, |()| SUCCESS)
}

driver! {
    fn cuModuleLoadData = "cuModuleLoadData"(module: &mut &'static Module, image: *const u8) {
        *module = Box::leak(Box::new(Module(image)));
        without_captures()
    }
    fn cuModuleGetFunction = "cuModuleGetFunction"(
        kernel: &mut &'static Kernel,
        module: &Module,
        name: *const c_char,
    ) {
        // SAFETY: the caller's name ends with a NUL.
        let Ok(symbol) = unsafe { CStr::from_ptr(name) }.to_str() else { return INVALID_VALUE };
        // SAFETY: blockflash still holds the image that it has just loaded.
        let found = unsafe { param_bytes(module.0, symbol) };
        let Some(param_bytes) = found else { return NOT_FOUND };
        *kernel = Box::leak(Box::new(Kernel { symbol: symbol.to_owned(), param_bytes }));
        SUCCESS
    }
    fn cuFuncLoad = "cuFuncLoad"(_kernel: &Kernel) { SUCCESS }
    fn cuFuncGetAttribute = "cuFuncGetAttribute"(
        value: &mut i32,
        attribute: u32,
        _kernel: &Kernel,
    ) {
        // Threads of a CTA, and no static shared or local memory.
        *value = match attribute { 0 => 1024, 4 => 128, _ => 0 };
        SUCCESS
    }
    fn cuFuncSetAttribute = "cuFuncSetAttribute"(_kernel: &Kernel, _attribute: u32, _value: i32) {
        SUCCESS
    }
    fn cuFuncGetParamInfo = "cuFuncGetParamInfo"(
        kernel: &Kernel,
        index: usize,
        offset: &mut usize,
        size: &mut usize,
    ) {
        if index > 0 {
            return INVALID_VALUE;
        }
        [*offset, *size] = [0, kernel.param_bytes];
        SUCCESS
    }
    // The map holds what it was made of, in 32-bit words: nothing of it is lost.
    fn cuTensorMapEncodeTiled = "cuTensorMapEncodeTiled"(
        map: &mut [u32; 32],
        data_type: u32,
        rank: u32,
        address: u64,
        shape: &[u64; 5],
        strides: &[u64; 4],
        box_shape: &[u32; 5],
        element_strides: &[u32; 5],
        interleave: u32,
        swizzle: u32,
        promotion: u32,
        fill: u32,
    ) {
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let rank_used = rank as usize;
        let options = data_type | rank << 8 | interleave << 12 | swizzle << 16 | promotion << 20;
        let words = [address].into_iter().chain(shape[..rank_used].iter().copied());
        let words = words.chain(strides[..rank_used - 1].iter().copied()).flat_map(halves);
        let words = words.chain(box_shape[..rank_used].iter().copied()).chain([options, fill]);
        *map = [0; 32];
        map.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        if element_strides.iter().all(|&stride| stride == 1) { SUCCESS } else { INVALID_VALUE }
    }
}
