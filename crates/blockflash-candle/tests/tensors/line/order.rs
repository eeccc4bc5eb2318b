//! Calls are ordered like candle's own operations, whatever stream they run on.

use super::blockflash_candle::{Attention, Mask};
#[cfg(feature = "cuda")]
use super::blockflash_candle::{KvCache, flash_attn_varlen_paged_windowed};
use super::candle_core::{DType, Device, Result, Tensor};
use super::harness::{devices, normal_on};

fn attend(q: &Tensor, k: &Tensor) -> Result<Tensor> {
    Attention { scores: Mask::causal().into(), ..Attention::new(q, k, k) }.forward()
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

/// A graph of candle's stream has the calls, also the first one of a thread, and computes from what
/// its tensors hold when it is launched. In a process of its own: work that other tests queue on
/// CUDA's default stream meanwhile would be an error to CUDA.
#[cfg(feature = "cuda")]
#[test]
fn captured_calls_run_with_the_graph() -> Result<()> {
    const ALONE: &str = "BLOCKFLASH_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return capture_and_compare();
    }
    let module = module_path!();
    let module = module.split_once("::").map_or(module, |(_, path)| path);
    let child = std::process::Command::new(std::env::current_exe()?)
        .args(["--exact", &format!("{module}::captured_calls_run_with_the_graph"), "--nocapture"])
        .env(ALONE, "1")
        .output()?;
    let said = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(said[0].contains("running 1 test"), "{said:?}");
    assert!(child.status.success(), "{}: {said:?}", child.status);
    Ok(())
}

#[cfg(feature = "cuda")]
fn capture_and_compare() -> Result<()> {
    use super::candle_core::cuda_backend::cudarc::driver::sys;
    for device in devices()?.into_iter().skip(1) {
        let stream = device.as_cuda_device()?.cuda_stream();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        if stream.begin_capture(mode).is_err() {
            // CUDA's default stream, which nobody can capture.
            continue;
        }
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags).unwrap();
        // candle's events are of the time before the capture.
        // SAFETY: this test uses one stream of this device.
        unsafe { stream.context().disable_event_tracking() };
        let new = |heads: usize| normal_on(&device, &[64, heads, 64], DType::F16);
        let (q, k, table) = (new(4)?, new(2)?, Tensor::new(&[[0u32, 1, 2, 3]], &device)?);
        let pages = k.reshape((4, 16, 2, 64))?;
        let seqlens = Tensor::new(&[0u32, 64], &device)?;
        let both = || -> Result<[Tensor; 2]> {
            let (q4, k4) = (q.unsqueeze(0)?, k.unsqueeze(0)?);
            let paged = flash_attn_varlen_paged_windowed(
                &q,
                &pages,
                &pages,
                &seqlens,
                &seqlens,
                &table,
                None,
                64,
                64,
                0.125,
                None,
                Some(0),
                16,
                None,
            )?;
            Ok([attend(&q4, &k4)?, paged])
        };
        // candle loads its own kernels outside of captures alone.
        drop((seqlens.narrow(0, 1, 1)? - seqlens.narrow(0, 0, 1)?)?);
        let capture_and_launch = || -> Result<()> {
            stream.begin_capture(mode).unwrap();
            let outputs = both();
            let graph = stream.end_capture(flags).unwrap().expect("a graph");
            let outputs = outputs?;
            for _ in 0..3 {
                graph.launch().unwrap();
                for (found, expected) in outputs.iter().zip(both()?) {
                    assert_eq!(values(found)?, values(&expected)?);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| scope.spawn(capture_and_launch).join().unwrap())?;
        let mut cache = KvCache::new(&device, DType::F16, [1, 10], 2, 64)?;
        let step = k.narrow(0, 0, 1)?.unsqueeze(0)?;
        stream.begin_capture(mode).unwrap();
        let refused = cache.append(&step, &step);
        stream.end_capture(flags).unwrap();
        assert!(refused.unwrap_err().to_string().contains("captured"));
    }
    Ok(())
}
