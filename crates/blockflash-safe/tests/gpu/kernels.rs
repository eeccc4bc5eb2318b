use crate::common::gpu;
use crate::single::{Single, rows};
use blockflash_safe::{DType, Device, Error, Result, Tensor, manifest, param_bytes};

#[test]
fn every_embedded_kernel_loads() -> Result<()> {
    let Some(device) = gpu("every_embedded_kernel_loads") else { return Ok(()) };
    for row in rows(&device) {
        let info = device.preload(row)?;
        assert_eq!(Some(info.param_bytes), param_bytes(row), "{}", row.symbol());
        assert!(info.max_threads >= row.threads(), "{}: {info:?}", row.symbol());
        assert!(
            info.registers > 0 && info.static_smem_bytes + info.dynamic_smem_bytes <= 227 * 1024,
            "{info:?}"
        );
        assert_eq!(device.preload(row)?, info);
    }
    Ok(())
}

#[test]
fn images_for_other_gpus_are_refused() {
    let Some(device) = gpu("images_for_other_gpus_are_refused") else { return };
    let capability = device.cuda_properties().unwrap().compute_capability;
    for row in manifest::kernels().iter().filter(|row| !row.target.runs_on(capability)) {
        assert!(matches!(device.preload(row), Err(Error::Unsupported { .. })), "{}", row.symbol());
    }
}

#[test]
fn a_kernel_runs_also_in_a_graph_and_on_other_streams() -> Result<()> {
    let Some(device) = gpu("a_kernel_runs_also_in_a_graph_and_on_other_streams") else {
        return Ok(());
    };
    let stream = device.stream()?;
    let Some(mut single) = Single::new(&stream)? else { return Ok(()) };
    single.launch(&stream)?;
    single.check(&stream)?;
    // Captured: nothing runs until the graph is launched.
    single.o.fill_bytes(&stream, 0)?;
    let graph = stream.capture(|stream| single.launch(stream))?;
    single.o.fill_bytes(&stream, 0)?;
    graph.launch(&stream)?;
    single.check(&stream)?;
    let other = device.stream()?;
    single.o.fill_bytes(&stream, 0)?;
    other.wait_for(&stream)?;
    single.launch(&other)?;
    single.check(&other)
}

#[test]
fn launches_that_do_not_fit_are_refused() -> Result<()> {
    let Some(device) = gpu("launches_that_do_not_fit_are_refused") else { return Ok(()) };
    let (stream, host) = (device.stream()?, Device::cpu().stream()?);
    let Some(mut single) = Single::new(&stream)? else { return Ok(()) };
    let refused = |single: &mut Single, change: &dyn Fn(&mut Single), expected: &str| {
        let config = single.config;
        change(single);
        let error = single.launch(&stream).expect_err(expected);
        assert!(matches!(error, Error::Launch { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error} does not say {expected}");
        single.config = config;
    };
    refused(&mut single, &|s| s.config.grid = [2, 1, 1], "2x1x1 blocks");
    refused(&mut single, &|s| s.config.grid = [1, 1, 2], "1x1x2 blocks");
    refused(&mut single, &|s| s.config.block = 32, "threads");
    refused(&mut single, &|s| s.config.smem_bytes = 0, "shared memory");
    refused(&mut single, &|s| s.config.cluster = Some([2, 1, 1]), "clusters");
    for (shape, expected) in [
        ([1, 2, 1, 64], "k is f16"),
        ([2, 1, 1, 64], "k is f16"),
        ([1, 1, 1, 56], "k is f16"),
        ([1, 1, 0, 64], "not positive"),
    ] {
        let other = Tensor::zeros(&stream, DType::F16, &shape)?;
        let at = if expected == "not positive" { 2 } else { 1 };
        let original = std::mem::replace(&mut single.qkv[at], other);
        refused(&mut single, &|_| (), expected);
        single.qkv[at] = original;
    }
    assert!(matches!(single.launch(&host), Err(Error::NotOnGpu { .. })));
    let moved = single.qkv[1].copy_to(&host)?;
    let original = std::mem::replace(&mut single.qkv[1], moved);
    assert!(matches!(single.launch(&stream), Err(Error::DeviceMismatch { .. })));
    single.qkv[1] = original;
    single.launch(&stream)?;
    single.check(&stream)
}
