//! The first use of a kernel and of tensors while another library captures, as `torch.cuda.graph`
//! does. A program of its own with one test: other tests load kernels, and their calls would
//! disturb the capture, which forbids calls that it takes for unsafe to all threads.

#[path = "gpu/common.rs"]
mod common;
#[path = "gpu/single.rs"]
mod single;

use blockflash_safe::{Result, Stream};
use common::gpu;
use cudarc::driver::{CudaContext, sys};
use single::Single;

#[test]
fn first_use_in_a_capture_of_another_library() -> Result<()> {
    let Some(device) = gpu("first_use_in_a_capture_of_another_library") else { return Ok(()) };
    let context = CudaContext::new(device.cuda_properties().unwrap().ordinal).unwrap();
    let theirs = context.new_stream().unwrap();
    let Some(mut single) = Single::new(&device.stream()?)? else { return Ok(()) };
    // SAFETY: 1. A stream of the primary context. 2. `theirs` is dropped after it and the tensors.
    // 3. `single` outlives the graph, whose launches are on one stream.
    let stream = unsafe { Stream::from_raw(&device, theirs.cu_stream().cast())? };

    theirs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    assert!(stream.is_capturing()?);
    let launched = single.launch(&stream);
    let graph = theirs.end_capture(sys::CUgraphInstantiate_flags(0));
    launched?;
    let graph = graph.unwrap().unwrap();
    for _ in 0..3 {
        single.o.fill_bytes(&stream, 0)?;
        graph.launch().unwrap();
        single.check(&stream)?;
    }
    stream.synchronize()
}
