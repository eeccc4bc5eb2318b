use crate::common::{gpu, ramp};
use blockflash_safe::{DType, Device, Error, Event, Result, Tensor};
use std::time::{Duration, Instant};

/// Elements of a tensor that takes a GPU some time to fill.
const LARGE: usize = 1 << 26;

#[test]
fn events_measure_and_order() -> Result<()> {
    let Some(device) = gpu("events_measure_and_order") else { return Ok(()) };
    let stream = device.stream()?;
    let mut tensor = Tensor::empty(&stream, DType::F32, &[LARGE])?;
    let (start, end) = (Event::new(&device, true)?, Event::new(&device, true)?);
    assert!(matches!(start.elapsed_us(&end), Err(Error::Event { .. })), "not recorded");
    assert!(start.is_done()?, "not recorded");
    start.record(&stream)?;
    for _ in 0..10 {
        tensor.fill_bytes(&stream, 1)?;
    }
    end.record(&stream)?;
    let begun = Instant::now();
    while !end.is_done()? {
        assert!(begun.elapsed() < Duration::from_secs(10), "the GPU hangs");
        std::thread::yield_now();
    }
    let elapsed = start.elapsed_us(&end)?;
    // 2.7 GB take at least 100 µs on any GPU.
    assert!((100.0..1e7).contains(&elapsed), "{elapsed} µs");
    let untimed = Event::new(&device, false)?;
    untimed.record(&stream)?;
    assert!(matches!(start.elapsed_us(&untimed), Err(Error::Event { .. })));
    assert!(matches!(
        Event::new(&Device::cpu(), true)?.record(&stream),
        Err(Error::DeviceMismatch { .. })
    ));
    Ok(())
}

#[test]
fn streams_wait_for_each_other() -> Result<()> {
    let Some(device) = gpu("streams_wait_for_each_other") else { return Ok(()) };
    let (first, second) = (device.stream()?, device.stream()?);
    let mut source = Tensor::zeros(&first, DType::I32, &[LARGE])?;
    let mut copy = Tensor::zeros(&second, DType::I32, &[LARGE])?;
    for value in 1..=4u8 {
        source.fill_bytes(&first, value)?;
        second.wait_for(&first)?;
        copy.copy_from(&second, &source)?;
        first.wait_for(&second)?;
        let expected = i32::from_ne_bytes([value; 4]);
        let last = copy.view().slice(0, LARGE - 3..LARGE)?.to_vec::<i32>(&second)?;
        assert_eq!(last, [expected; 3]);
    }
    // The CPU's work is always done, and the CPU waits for the GPU's.
    let host = Device::cpu().stream()?;
    host.wait_for(&first)?;
    first.wait_for(&host)
}

/// Memory that another stream still reads is not handed out again.
#[test]
fn dropped_tensors_outlive_their_uses() -> Result<()> {
    let Some(device) = gpu("dropped_tensors_outlive_their_uses") else { return Ok(()) };
    let (home, user) = (device.stream()?, device.stream()?);
    let mut copies = Vec::new();
    for value in 0..8u8 {
        let mut source = Tensor::empty(&home, DType::I32, &[LARGE / 8])?;
        source.fill_bytes(&home, value)?;
        let mut copy = Tensor::empty(&user, DType::I32, &[LARGE / 8])?;
        // The first use on another stream waits for the home stream.
        copy.copy_from(&user, &source)?;
        drop(source);
        // Likely the same memory: it must be written after the copy above has read it.
        let mut next = Tensor::empty(&home, DType::I32, &[LARGE / 8])?;
        next.fill_bytes(&home, 0xEE)?;
        copies.push((value, copy));
    }
    for (value, copy) in copies {
        let expected = i32::from_ne_bytes([value; 4]);
        assert!(copy.to_vec::<i32>(&user)?.iter().all(|&found| found == expected), "{value}");
    }
    Ok(())
}

/// Memory is freed after work on streams that were destroyed before it, however many they are.
#[test]
fn tensors_outlive_streams() -> Result<()> {
    let Some(device) = gpu("tensors_outlive_streams") else { return Ok(()) };
    let home = device.stream()?;
    let source = Tensor::from_slice(&home, &ramp(1 << 16), &[1 << 16])?;
    let mut copies = Vec::new();
    for _ in 0..8 {
        let mut large = Tensor::empty(&home, DType::I32, &[LARGE / 8])?;
        large.fill_bytes(&home, 7)?;
        let user = device.stream()?;
        let mut copy = Tensor::empty(&user, DType::I32, &[LARGE / 8])?;
        copy.copy_from(&user, &large)?;
        drop(user);
        drop(large);
        let mut next = Tensor::empty(&home, DType::I32, &[LARGE / 8])?;
        next.fill_bytes(&home, 0xEE)?;
        copies.push(copy);
    }
    for copy in copies {
        let expected = i32::from_ne_bytes([7; 4]);
        assert!(copy.to_vec::<i32>(&device.stream()?)?.iter().all(|&found| found == expected));
    }
    for _ in 0..2000 {
        let user = device.stream()?;
        let mut copy = Tensor::empty(&user, DType::F32, &[1 << 16])?;
        copy.copy_from(&user, &source)?;
    }
    assert_eq!(source.copy_to(&device.stream()?)?.to_vec::<f32>(&home)?, ramp(1 << 16));
    Ok(())
}

#[test]
fn threads_share_devices() -> Result<()> {
    let Some(device) = gpu("threads_share_devices") else { return Ok(()) };
    let shared = device.stream()?;
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let shared = &shared;
            scope.spawn(move || {
                let own = device.stream().unwrap();
                // A second GPU in the same thread: the current context changes from call to call.
                let other = Device::cuda(1).unwrap_or(device).stream().unwrap();
                let data: Vec<f32> = ramp(1000 + thread);
                for _ in 0..50 {
                    for stream in [&own, &other, shared] {
                        let tensor = Tensor::from_slice(stream, &data, &[data.len()]).unwrap();
                        assert_eq!(
                            tensor.copy_to(&own).unwrap().to_vec::<f32>(&own).unwrap(),
                            data
                        );
                    }
                }
            });
        }
    });
    Ok(())
}

/// Other CUDA code in the same thread finds its context as it left it.
#[test]
fn the_current_context_is_restored() -> Result<()> {
    let Some(device) = gpu("the_current_context_is_restored") else { return Ok(()) };
    let current = || cudarc::driver::result::ctx::get_current().unwrap();
    std::thread::spawn(move || {
        assert!(current().is_none());
        let stream = device.stream()?;
        let tensor = Tensor::from_slice(&stream, &ramp(10), &[10])?;
        let graph = stream.capture(|stream| Event::new(&device, false)?.record(stream))?;
        graph.launch(&stream)?;
        drop((tensor, graph, stream));
        assert!(current().is_none());
        Ok(())
    })
    .join()
    .unwrap()
}
