use crate::common::{gpu, ramp};
use blockflash_safe::{DType, Error, Event, Graph, Result, Stream, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

const COUNT: usize = 4096;

/// Nothing of a failed capture is left behind.
fn assert_usable(stream: &Stream) -> Result<()> {
    assert!(!stream.is_capturing()?);
    assert_eq!(Tensor::from_slice(stream, &[7i32], &[1])?.to_vec::<i32>(stream)?, [7]);
    Ok(())
}

#[test]
fn graphs_repeat_what_was_captured() -> Result<()> {
    let Some(device) = gpu("graphs_repeat_what_was_captured") else { return Ok(()) };
    let stream = device.stream()?;
    let mut input = Tensor::from_slice(&stream, &ramp(COUNT), &[COUNT])?;
    let mut middle = Tensor::zeros(&stream, DType::F32, &[COUNT])?;
    let mut output = Tensor::zeros(&stream, DType::F32, &[COUNT])?;
    let graph: Graph = stream.capture(|stream| -> Result<()> {
        assert!(stream.is_capturing()?);
        middle.fill_bytes(stream, 0xFF)?;
        middle.copy_from(stream, &input)?;
        output.copy_from(stream, &middle)
    })?;
    assert_eq!(output.to_vec::<f32>(&stream)?, [0.0; COUNT], "capturing runs nothing");
    graph.launch(&stream)?;
    assert_eq!(output.to_vec::<f32>(&stream)?, ramp(COUNT));
    for round in 0..3 {
        let data = vec![round as f32; COUNT];
        input.copy_from_slice(&stream, &data)?;
        graph.launch(&stream)?;
        assert_eq!(output.to_vec::<f32>(&stream)?, data);
    }
    // Another stream, and memory whose tensor is gone: the graph keeps it.
    drop(middle);
    let mut noise = Tensor::empty(&stream, DType::F32, &[COUNT])?;
    noise.fill_bytes(&stream, 0x11)?;
    let other = device.stream()?;
    other.wait_for(&stream)?;
    graph.launch(&other)?;
    assert_eq!(output.to_vec::<f32>(&other)?, [2.0; COUNT]);
    assert_eq!(noise.to_vec::<f32>(&stream)?, [f32::from_ne_bytes([0x11; 4]); COUNT]);
    Ok(())
}

#[test]
fn what_a_graph_cannot_hold_is_refused() -> Result<()> {
    let Some(device) = gpu("what_a_graph_cannot_hold_is_refused") else { return Ok(()) };
    let (stream, other) = (device.stream()?, device.stream()?);
    let mut tensor = Tensor::zeros(&stream, DType::F32, &[COUNT])?;
    let event = Event::new(&device, false)?;
    let empty: Graph = stream.capture(|_| Ok::<(), Error>(()))?;
    let refused =
        |result: Result<()>| assert!(matches!(result, Err(Error::InCapture { .. })), "{result:?}");
    let graph: Graph = stream.capture(|stream| -> Result<()> {
        refused(Tensor::empty(stream, DType::F32, &[1]).map(drop));
        refused(tensor.copy_from_slice(stream, &[0.0f32; COUNT]));
        refused(tensor.to_vec::<f32>(stream).map(drop));
        refused(stream.synchronize());
        refused(stream.capture(|_| Ok::<(), Error>(())).map(drop));
        refused(empty.launch(stream));
        refused(stream.wait_for(&other));
        refused(other.wait_for(stream));
        event.record(stream)?;
        stream.wait(&event)?;
        refused(other.wait(&event));
        // None of the refusals has spoiled the capture.
        tensor.fill_bytes(stream, 1)
    })?;
    graph.launch(&stream)?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [f32::from_ne_bytes([1; 4]); COUNT]);
    assert_usable(&stream)
}

#[test]
fn a_failing_capture_leaves_the_stream_usable() -> Result<()> {
    let Some(device) = gpu("a_failing_capture_leaves_the_stream_usable") else { return Ok(()) };
    let stream = device.stream()?;
    let mut tensor = Tensor::zeros(&stream, DType::F32, &[COUNT])?;
    let failed = stream.capture(|stream| -> Result<()> {
        tensor.fill_bytes(stream, 1)?;
        Err(Error::TooLarge)
    });
    assert!(matches!(failed, Err(Error::TooLarge)), "{failed:?}");
    assert_usable(&stream)?;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        stream.capture(|_| -> Result<()> { panic!("on purpose") })
    }));
    assert!(panicked.is_err());
    assert_usable(&stream)?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [0.0; COUNT], "nothing of the capture ran");
    Ok(())
}

/// A tensor that is dropped inside a capture is freed afterwards, not by the graph.
#[test]
fn tensors_may_be_dropped_in_a_capture() -> Result<()> {
    let Some(device) = gpu("tensors_may_be_dropped_in_a_capture") else { return Ok(()) };
    let (stream, other) = (device.stream()?, device.stream()?);
    let source = Tensor::from_slice(&stream, &ramp(COUNT), &[COUNT])?;
    let mut unrelated = Tensor::zeros(&other, DType::F32, &[COUNT])?;
    unrelated.fill_bytes(&stream, 3)?;
    let mut output = Tensor::zeros(&stream, DType::F32, &[COUNT])?;
    let graph: Graph = stream.capture(|stream| -> Result<()> {
        output.copy_from(stream, &source)?;
        drop(source);
        drop(unrelated);
        Ok(())
    })?;
    // Whatever was freed gets new contents; what the graph uses must not be among it.
    let mut noise: Vec<Tensor> =
        (0..8).map(|_| Tensor::empty(&stream, DType::F32, &[COUNT])).collect::<Result<_>>()?;
    noise.iter_mut().try_for_each(|tensor| tensor.fill_bytes(&stream, 0xEE))?;
    for _ in 0..3 {
        output.fill_bytes(&stream, 0xFF)?;
        graph.launch(&stream)?;
        assert_eq!(output.to_vec::<f32>(&stream)?, ramp(COUNT));
    }
    drop(graph);
    assert_usable(&stream)
}

/// What the stream's own value does not know, the driver does.
#[test]
fn a_graph_is_not_launched_into_a_capture_of_others() -> Result<()> {
    let Some(device) = gpu("a_graph_is_not_launched_into_a_capture_of_others") else {
        return Ok(());
    };
    let stream = device.stream()?;
    // SAFETY: 1. A stream of the device's primary context. 2. `stream` outlives it. 3. The capture
    // below uses no tensors.
    let somebody = unsafe { Stream::from_raw(&device, stream.raw())? };
    let empty: Graph = stream.capture(|_| Ok::<(), Error>(()))?;
    let captured = somebody.capture(|_| -> Result<()> {
        assert!(stream.is_capturing()?);
        let refused = empty.launch(&stream);
        assert!(matches!(refused, Err(Error::InCapture { .. })), "{refused:?}");
        Ok(())
    })?;
    captured.launch(&stream)?;
    empty.launch(&stream)?;
    stream.synchronize()?;
    assert_usable(&stream)
}

/// An event of one capture means nothing in another one, and does not spoil it.
#[test]
fn captures_do_not_wait_for_each_other() -> Result<()> {
    let Some(device) = gpu("captures_do_not_wait_for_each_other") else { return Ok(()) };
    let (first, second) = (device.stream()?, device.stream()?);
    let (over, open) = (Event::new(&device, false)?, Event::new(&device, false)?);
    first.capture(|first| over.record(first))?;
    let mut tensor = Tensor::zeros(&second, DType::F32, &[COUNT])?;
    let mut inner = None;
    let outer = first.capture(|first| -> Result<()> {
        open.record(first)?;
        inner = Some(second.capture(|second| -> Result<()> {
            for event in [&over, &open] {
                let refused = second.wait(event);
                assert!(matches!(refused, Err(Error::InCapture { .. })), "{refused:?}");
            }
            tensor.fill_bytes(second, 1)
        })?);
        first.wait(&open)
    })?;
    outer.launch(&first)?;
    inner.unwrap().launch(&second)?;
    assert_eq!(tensor.to_vec::<f32>(&second)?, [f32::from_ne_bytes([1; 4]); COUNT]);
    assert_usable(&first)
}
