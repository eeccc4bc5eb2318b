use crate::*;
use half::{bf16, f16};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

#[test]
fn tensors_on_the_cpu() -> Result<()> {
    let stream = cpu();
    let mut tensor = Tensor::from_slice(&stream, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    assert_eq!(
        (tensor.dtype(), tensor.shape(), tensor.device()),
        (DType::F32, &[2, 2][..], Device::cpu())
    );
    tensor.view_mut().as_mut_slice::<f32>()?[3] = 5.0;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [1.0, 2.0, 3.0, 5.0]);
    let mut copy = tensor.copy_to(&stream)?;
    copy.copy_from_slice(&stream, &[0.5f32; 4])?;
    assert_eq!(tensor.view().as_slice::<f32>()?, [1.0, 2.0, 3.0, 5.0]);
    tensor.copy_from(&stream, &copy)?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [0.5; 4]);
    Ok(())
}

#[test]
fn fresh_memory_is_poisoned_or_zero() -> Result<()> {
    let stream = cpu();
    let mut tensor = Tensor::empty(&stream, DType::BF16, &[3])?;
    assert!(tensor.to_vec::<bf16>(&stream)?.iter().all(|value| value.is_nan()));
    tensor.fill_bytes(&stream, 0)?;
    assert_eq!(tensor.to_vec::<bf16>(&stream)?, [bf16::ZERO; 3]);
    assert_eq!(Tensor::zeros(&stream, DType::F16, &[5])?.to_vec::<f16>(&stream)?, [f16::ZERO; 5]);
    Ok(())
}

#[test]
fn a_view_is_filled_if_it_has_no_gaps() -> Result<()> {
    let stream = cpu();
    let mut data = [1f32; 12];
    let whole = ViewMut::from_slice(&mut data, &[3, 4])?;
    let mut columns = whole.permute(&[1, 0])?.slice(0, 1..3)?;
    let error = columns.fill_bytes(&stream, 0).unwrap_err();
    assert!(matches!(error, Error::Flatten { start: 0, end: 2, .. }), "{error}");
    let rows = ViewMut::from_slice(&mut data, &[3, 4])?.slice(0, 1..3)?;
    rows.permute(&[1, 0])?.fill_bytes(&stream, 0)?;
    assert_eq!(data[..4], [1.0; 4]);
    assert_eq!(data[4..], [0.0; 8]);
    Ok(())
}

#[test]
fn tensors_without_elements() -> Result<()> {
    let stream = cpu();
    let tensor = Tensor::zeros(&stream, DType::F32, &[2, 0, 3])?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, []);
    assert_eq!(tensor.copy_to(&stream)?.shape(), [2, 0, 3]);
    assert_eq!(Tensor::from_slice::<i32>(&stream, &[], &[0])?.layout().elements(), 0);
    Ok(())
}

#[test]
fn mistakes_are_errors() -> Result<()> {
    let stream = cpu();
    let mut tensor = Tensor::zeros(&stream, DType::F32, &[4])?;
    let other = Tensor::zeros(&stream, DType::I32, &[4])?;
    let longer = Tensor::zeros(&stream, DType::F32, &[5])?;
    assert!(matches!(tensor.to_vec::<i32>(&stream), Err(Error::DType { .. })));
    assert!(matches!(tensor.copy_from_slice(&stream, &[1i32; 4]), Err(Error::DType { .. })));
    assert!(matches!(tensor.copy_from_slice(&stream, &[1f32; 3]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(tensor.copy_from(&stream, &other), Err(Error::DType { .. })));
    assert!(matches!(tensor.copy_from(&stream, &longer), Err(Error::OutOfBounds { .. })));
    assert!(matches!(Tensor::from_slice(&stream, &[1f32], &[2]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(
        Tensor::zeros(&stream, DType::F32, &[1; 5]),
        Err(Error::Rank { found: 5, .. })
    ));
    assert!(matches!(Tensor::zeros(&stream, DType::F32, &[usize::MAX]), Err(Error::TooLarge)));
    let bytes = 1 << 58;
    let huge = Tensor::empty(&stream, DType::F32, &[bytes / 4]);
    assert!(matches!(huge, Err(Error::OutOfMemory { bytes: found }) if found == bytes), "{huge:?}");
    Ok(())
}

#[test]
fn graphs_and_launches_need_a_gpu() -> Result<()> {
    let stream = cpu();
    let captured: Result<Graph> = stream.capture(|_| panic!("nothing is captured"));
    assert!(matches!(captured, Err(Error::NotOnGpu { .. })));
    let row = &manifest::kernels()[0];
    assert!(matches!(Device::cpu().preload(row), Err(Error::NotOnGpu { .. })));
    assert!(!stream.is_capturing()?);
    stream.synchronize()
}

#[test]
fn events_on_the_cpu() -> Result<()> {
    let stream = cpu();
    let (start, end) = (Event::new(&Device::cpu(), true)?, Event::new(&Device::cpu(), true)?);
    assert!(matches!(start.elapsed_us(&end), Err(Error::Event { .. })));
    start.record(&stream)?;
    std::thread::sleep(std::time::Duration::from_millis(2));
    end.record(&stream)?;
    stream.wait(&end)?;
    assert!(end.is_done()?);
    let elapsed = start.elapsed_us(&end)?;
    assert!(elapsed >= 2000.0, "{elapsed}");
    assert_eq!(end.elapsed_us(&start)?, -elapsed);
    assert_eq!(end.elapsed_us(&end)?, 0.0);
    let untimed = Event::new(&Device::cpu(), false)?;
    untimed.record(&stream)?;
    assert!(matches!(untimed.elapsed_us(&end), Err(Error::Event { .. })));
    Ok(())
}

/// Whoever may have written a tensor since it came from the host may do so again, in a graph.
#[test]
fn what_is_settled() -> Result<()> {
    let stream = &cpu();
    let tensor = || Tensor::from_slice(stream, &[1f32, 2.0], &[2]);
    assert!(tensor()?.view().is_settled());
    assert!(tensor()?.copy_to(stream)?.view().slice(0, 1..2)?.is_settled());
    let writers: [fn(&mut Tensor, &Stream) -> Result<()>; 4] = [
        |tensor, _| tensor.view_mut().permute(&[0]).map(|_| ()),
        |tensor, stream| tensor.fill_bytes(stream, 0),
        |tensor, stream| tensor.copy_from_slice(stream, &[3f32, 4.0]),
        |tensor, stream| tensor.copy_from(stream, &Tensor::zeros(stream, DType::F32, &[2])?),
    ];
    for (number, write) in writers.into_iter().enumerate() {
        let mut tensor = tensor()?;
        write(&mut tensor, stream)?;
        assert!(!tensor.view().is_settled(), "writer {number}");
        assert!(tensor.copy_to(stream)?.view().is_settled());
    }
    assert!(!Tensor::zeros(stream, DType::F32, &[2])?.view().is_settled());
    assert!(!View::from_slice(&[1f32], &[1])?.is_settled());
    Ok(())
}
