//! Calls are ordered like candle's own operations, whatever stream they run on.

use super::blockflash_candle::{Attention, Mask};
use super::candle_core::{DType, Device, Result, Tensor};
use super::harness::{devices, normal_on};

fn attend(q: &Tensor, k: &Tensor) -> Result<Tensor> {
    Attention { mask: Mask::causal(), ..Attention::new(q, k, k) }.forward()
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Operands that are still being computed, memory that is used again at once, results that are
/// read at once.
#[test]
fn nothing_overtakes() -> Result<()> {
    for device in devices()? {
        let width = if device.is_cpu() { 64 } else { 4096 };
        let k = normal_on(&device, &[1, 200, 2, 64], DType::BF16)?;
        let slow = normal_on(&device, &[width, width], DType::F16)?;
        let mut results = Vec::new();
        for _ in 0..10 {
            let start = normal_on(&device, &[1, 200, 4, 64], DType::BF16)?;
            let zero = (slow.matmul(&slow)?.narrow(0, 0, 1)?.narrow(1, 0, 1)? * 0.0)?;
            let zero = zero.to_dtype(DType::BF16)?;
            let q = start.broadcast_add(&zero.reshape((1, 1, 1, 1))?)?;
            let o = attend(&q, &k)?;
            drop(q);
            // On a GPU candle takes the memory of q for these.
            let others = [normal_on(&device, start.dims(), DType::BF16)?, (&start * 7.0)?];
            results.push(((&o + 0.0)?, start, o));
            drop(others);
        }
        device.synchronize()?;
        for (sum, start, o) in &results {
            let expected = values(&attend(start, &k)?)?;
            assert_eq!(values(o)?, expected);
            assert_eq!(values(sum)?, expected);
        }
    }
    Ok(())
}

#[test]
fn threads_share_a_device() -> Result<()> {
    for device in devices()? {
        let q = normal_on(&device, &[1, 300, 4, 64], DType::BF16)?;
        let k = normal_on(&device, &[1, 300, 2, 64], DType::BF16)?;
        let expected = values(&attend(&q, &k)?)?;
        std::thread::scope(|scope| {
            let work = || -> Result<()> {
                for _ in 0..10 {
                    assert_eq!(values(&attend(&(&q + 0.0)?, &k)?)?, expected);
                }
                Ok(())
            };
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })?;
    }
    Ok(())
}

#[cfg(feature = "cuda")]
#[test]
fn captures_are_refused() -> Result<()> {
    use super::candle_core::cuda_backend::cudarc::driver::sys;
    for device in devices()?.into_iter().skip(1) {
        let q = normal_on(&device, &[1, 30, 2, 64], DType::F16)?;
        let expected = values(&attend(&q, &q)?)?;
        let stream = device.as_cuda_device()?.cuda_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).unwrap();
        let refused = attend(&q, &q).map(|_| ());
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).unwrap();
        assert!(refused.unwrap_err().to_string().contains("captured"));
        assert_eq!(values(&attend(&q, &q)?)?, expected);
    }
    Ok(())
}
