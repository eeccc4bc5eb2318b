use crate::common::{gpu, ramp};
use blockflash_safe::{DType, Device, Error, Result, Swizzle, Tensor, TensorMapSpec};

#[test]
fn properties_are_sensible() {
    let Some(device) = gpu("properties_are_sensible") else { return };
    let gpu = device.cuda_properties().unwrap();
    assert!(gpu.compute_capability.major >= 8 && gpu.driver_version >= 13_000, "{gpu:?}");
    assert!(
        gpu.multiprocessors > 0 && gpu.memory_bytes > 1 << 30 && gpu.smem_per_block >= 99 * 1024,
        "{gpu:?}"
    );
    assert!(gpu.l2_bytes > 0 && gpu.clock_khz > 0 && !gpu.name.is_empty(), "{gpu:?}");
    assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
}

#[test]
fn elements_survive_the_round_trip() -> Result<()> {
    let Some(device) = gpu("elements_survive_the_round_trip") else { return Ok(()) };
    let stream = device.stream()?;
    let data = ramp(3 * 5 * 7);
    let mut tensor = Tensor::from_slice(&stream, &data, &[3, 5, 7])?;
    assert_eq!(tensor.device(), device);
    assert_eq!(tensor.to_vec::<f32>(&stream)?, data);
    assert!(tensor.view().is_aligned(256));
    assert!(matches!(tensor.view().as_slice::<f32>(), Err(Error::NotOnCpu { .. })));
    assert!(matches!(tensor.view_mut().as_mut_slice::<f32>(), Err(Error::NotOnCpu { .. })));
    let turned = tensor.view().permute(&[2, 0, 1])?.slice(0, 1..3)?;
    let expected: Vec<f32> =
        (1..3).flat_map(|k| (0..15).map(move |row| (row * 7 + k) as f32)).collect();
    assert_eq!(turned.to_vec::<f32>(&stream)?, expected);
    tensor.copy_from_slice(&stream, &vec![1.5f32; 105])?;
    assert_eq!(tensor.to_vec::<f32>(&stream)?, [1.5; 105]);
    tensor.fill_bytes(&stream, 0xFF)?;
    assert!(tensor.to_vec::<f32>(&stream)?.iter().all(|value| value.is_nan()));
    assert_eq!(Tensor::zeros(&stream, DType::I32, &[1000])?.to_vec::<i32>(&stream)?, [0; 1000]);
    Ok(())
}

#[test]
fn views_are_copied_in_the_order_of_a_stream() -> Result<()> {
    let Some(device) = gpu("views_are_copied_in_the_order_of_a_stream") else { return Ok(()) };
    let stream = device.stream()?;
    let mut tensor = Tensor::from_slice(&stream, &ramp(2 * 3 * 5 * 7), &[2, 3, 5, 7])?;
    for order in [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [1, 0, 3, 2]] {
        for range in [0..1, 1..2, 0..2] {
            let view = tensor.view().permute(&order)?.slice(1, range)?;
            let view = if view.shape()[1] == 1 { view.expand(1, 4)? } else { view };
            let copy = view.to_tensor(&stream)?;
            assert_eq!((copy.shape(), copy.device()), (view.shape(), device));
            assert_eq!(copy.to_vec::<f32>(&stream)?, view.to_vec::<f32>(&stream)?);
        }
    }
    // What is queued later does not change the copy.
    let copy = tensor.view().permute(&[0, 2, 1, 3])?.to_tensor(&stream)?;
    let expected = tensor.view().permute(&[0, 2, 1, 3])?.to_vec::<f32>(&stream)?;
    tensor.fill_bytes(&stream, 0)?;
    assert_eq!(copy.to_vec::<f32>(&stream)?, expected);
    let host = Device::cpu().stream()?;
    assert!(matches!(copy.view().to_tensor(&host), Err(Error::DeviceMismatch { .. })));
    Ok(())
}

#[test]
fn tensors_without_elements() -> Result<()> {
    let Some(device) = gpu("tensors_without_elements") else { return Ok(()) };
    let stream = device.stream()?;
    let mut tensor = Tensor::zeros(&stream, DType::F16, &[4, 0])?;
    tensor.fill_bytes(&stream, 1)?;
    let copy = tensor.copy_to(&stream)?;
    assert!(copy.to_vec::<half::f16>(&stream)?.is_empty());
    Ok(())
}

#[test]
fn copies_between_devices() -> Result<()> {
    let Some(device) = gpu("copies_between_devices") else { return Ok(()) };
    let (stream, host) = (device.stream()?, Device::cpu().stream()?);
    let data = ramp(1 << 16);
    let first = Tensor::from_slice(&host, &data, &[1 << 16])?.copy_to(&stream)?;
    let mut second = first.copy_to(&device.stream()?)?;
    assert_eq!(second.copy_to(&host)?.view().as_slice::<f32>()?, data);
    second.copy_from(&stream, &Tensor::zeros(&stream, DType::F32, &[1 << 16])?)?;
    assert_eq!(second.to_vec::<f32>(&stream)?, vec![0.0; 1 << 16]);
    assert!(matches!(second.copy_from(&host, &first), Err(Error::DeviceMismatch { .. })));
    assert!(matches!(first.to_vec::<f32>(&host), Err(Error::DeviceMismatch { .. })));
    let Ok(other) = Device::cuda(1) else { return Ok(()) };
    let elsewhere = other.stream()?;
    let third = first.copy_to(&elsewhere)?;
    assert_eq!((third.device(), third.to_vec::<f32>(&elsewhere)?), (other, data));
    assert!(matches!(third.to_vec::<f32>(&stream), Err(Error::DeviceMismatch { .. })));
    Ok(())
}

#[test]
fn too_much_memory_is_an_error_and_nothing_worse() -> Result<()> {
    let Some(device) = gpu("too_much_memory_is_an_error_and_nothing_worse") else { return Ok(()) };
    let stream = device.stream()?;
    // More than is free, and more than there is.
    let all = device.cuda_properties().unwrap().memory_bytes as usize / 4 * 4;
    for bytes in [all, 1 << 46, 1 << 60] {
        let result = Tensor::empty(&stream, DType::F32, &[bytes / 4]);
        assert!(
            matches!(result, Err(Error::DeviceOutOfMemory { bytes: found, .. }) if found == bytes),
            "{result:?}"
        );
    }
    assert_eq!(Tensor::from_slice(&stream, &[1i32, 2], &[2])?.to_vec::<i32>(&stream)?, [1, 2]);
    Ok(())
}

#[test]
fn tensor_maps_are_encoded() -> Result<()> {
    let Some(device) = gpu("tensor_maps_are_encoded") else { return Ok(()) };
    let stream = device.stream()?;
    let tensor = Tensor::zeros(&stream, DType::F16, &[512, 128])?;
    let spec = TensorMapSpec {
        dtype: DType::F16,
        shape: &[128, 512],
        strides_bytes: &[256],
        box_shape: &[64, 128],
        swizzle: Swizzle::B128,
    };
    let map = spec.encode(&tensor.view());
    if device.cuda_properties().unwrap().compute_capability.major < 9 {
        assert!(matches!(map, Err(Error::Unsupported { .. })));
    } else {
        assert_ne!(map?.opaque, [0; 16]);
    }
    Ok(())
}
