//! What the host side of the operations asks of the driver.
#![cfg(target_os = "linux")]

mod cases;
#[path = "cases/params.rs"]
mod params;

use blockflash_fake_driver::{Call, FakeDriver, GPUS, Launch};
use blockflash_ops::{
    Activation, Attention, Bias, BsrMatmul, BsrMatrix, BsrPattern, BsrView, DType, Device, Error,
    Mask, Operation, Result, Scores, Tensor,
};
use blockflash_safe::{Error as SafeError, param_bytes};
use blockflash_sys::manifest;
use cases::Case;
use params::fields;

/// Everything that a call which is repeated may ask of the driver: no allocation, no waiting, no
/// tensor map.
const REPEATED: [&str; 5] = [
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuStreamIsCapturing",
    "cuLaunchKernelEx",
];

fn device(ordinal: usize) -> (FakeDriver, Device) {
    let driver = FakeDriver::load();
    (driver, Device::cuda(ordinal).unwrap())
}

fn calls(driver: FakeDriver, work: impl FnOnce() -> Result<()>) -> Vec<Call> {
    let (result, calls) = driver.calls(work);
    result.unwrap();
    calls
}

fn launches(calls: &[Call]) -> Vec<&Launch> {
    calls.iter().filter_map(|call| call.launch.as_ref()).collect()
}

/// Geometry and parameters of all launches.
fn queued(calls: &[Call]) -> Vec<(Launch, String)> {
    let queued =
        |launch: &&Launch| (Launch { params: Vec::new(), ..(*launch).clone() }, fields(launch));
    launches(calls).iter().map(queued).collect()
}

fn count(calls: &[Call], function: &str) -> usize {
    calls.iter().filter(|call| call.function == function).count()
}

/// The same call where nothing is kept: by a new thread.
fn fresh(driver: FakeDriver, case: &mut Case) -> Vec<Call> {
    std::thread::scope(|scope| scope.spawn(|| calls(driver, || (case.call)(false))).join().unwrap())
}

#[test]
fn every_image_takes_the_parameters_of_the_host() {
    FakeDriver::load();
    let devices: Vec<_> = (0..GPUS.len()).map(|gpu| Device::cuda(gpu).unwrap()).collect();
    for kernel in manifest::kernels() {
        let runs = |device: &&Device| {
            let gpu = device.cuda_properties().unwrap();
            kernel.target.runs_on(gpu.compute_capability)
        };
        let device = devices.iter().find(runs).unwrap_or_else(|| panic!("{}", kernel.image_name()));
        let info = device.preload(kernel).unwrap();
        assert_eq!(Some(info.param_bytes), param_bytes(kernel), "{}", kernel.image_name());
    }
}

#[test]
fn a_repeated_call_only_launches_and_launches_the_same() {
    for (ordinal, gpu) in GPUS.iter().enumerate() {
        let (driver, device) = device(ordinal);
        for mut case in cases::all(&device).unwrap() {
            let name = format!("{} on {:?}", case.name, gpu.compute_capability);
            let first = fresh(driver, &mut case);
            (case.call)(false).unwrap();
            for prepared in [false, true] {
                let again = calls(driver, || (case.call)(prepared));
                for call in &again {
                    assert!(REPEATED.contains(&call.function), "{name}: {}", call.function);
                }
                // Parameters with all tensor maps: what was kept is what would be encoded.
                assert_eq!(queued(&again), queued(&first), "{name}");
                let launches = launches(&again).len();
                assert!(launches > 0, "{name}");
                assert_eq!(count(&again, "cuCtxGetCurrent"), launches, "{name}");
            }
        }
    }
}

#[test]
fn each_gpu_has_its_kernels() {
    for (ordinal, [target, early]) in [(0, ["_sm90a_", "true"]), (1, ["_sm80_", "false"])] {
        let (driver, device) = device(ordinal);
        let mut cases = cases::all(&device).unwrap();
        let calls = calls(driver, || (cases[0].call)(false));
        let [launch] = launches(&calls)[..] else { panic!("{calls:?}") };
        assert!(launch.symbol.contains(target), "{}", launch.symbol);
        assert_eq!(launch.early.to_string(), early);
        assert_eq!((launch.block[1..].to_vec(), launch.cluster), (vec![1, 1], None));
        let gpu = GPUS[ordinal];
        assert!(launch.smem_bytes <= gpu.smem_per_block && launch.grid[0] > 0);
        let kernel = manifest::kernels().iter().find(|kernel| kernel.symbol() == launch.symbol);
        assert_eq!(launch.block[0], kernel.unwrap().threads());
    }
}

#[test]
fn maps_follow_addresses_shapes_and_strides() {
    let (driver, device) = device(0);
    let stream = device.stream().unwrap();
    // No kernel of this width does without maps.
    let memory = Tensor::zeros(&stream, DType::F16, &[8, 512, 8, 96]).unwrap();
    let mut o = Tensor::empty(&stream, DType::F16, &[8, 512, 8, 96]).unwrap();
    let mut variants = Vec::new();
    for start in [0, 1, 5] {
        for batch in [1, 3] {
            for rows in [128, 100, 512] {
                variants.extend([4, 8].map(|heads| [start, batch, rows, heads]));
            }
        }
    }
    // Many more maps than a thread keeps, and some of them twice in a row.
    let order = (0..4 * variants.len()).map(|at| variants[at / 2 * 7 % variants.len()]);
    for [start, batch, rows, heads] in order {
        let part = |axis: usize| [start..start + batch, 0..rows, 0..heads][axis].clone();
        let view = memory.view().slice(0, part(0)).unwrap();
        let view = view.slice(1, part(1)).unwrap().slice(2, part(2)).unwrap();
        let mut out = o.view_mut().slice(0, part(0)).unwrap();
        out = out.slice(1, part(1)).unwrap().slice(2, part(2)).unwrap();
        let call = Attention { scores: Mask::causal().into(), ..Attention::new(view, view, view) };
        let kept = calls(driver, || call.run((out.reborrow(), None), &stream));
        let fresh = std::thread::scope(|scope| {
            let fresh = || calls(driver, || call.run((out.reborrow(), None), &stream));
            scope.spawn(fresh).join().unwrap()
        });
        assert!(count(&fresh, "cuTensorMapEncodeTiled") > 0);
        assert_eq!(queued(&kept), queued(&fresh), "{start} {batch} {rows} {heads}");
    }
}

#[test]
fn plans_follow_options() {
    let (driver, device) = device(0);
    let stream = device.stream().unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(&stream, DType::F16, shape).unwrap();
    let q = zeros(&[2, 256, 8, 128]);
    let (mut o, mut lse) =
        (zeros(&[2, 256, 8, 128]), Tensor::zeros(&stream, DType::F32, &[2, 8, 256]).unwrap());
    let sink = Tensor::zeros(&stream, DType::F32, &[8]).unwrap();
    let plain = Attention::new(q.view(), q.view(), q.view());
    let attentions = [
        plain,
        Attention { scores: Scores { mask: Mask::causal(), ..plain.scores }, ..plain },
        Attention { scores: Scores { softmax_scale: Some(0.5), ..plain.scores }, ..plain },
        Attention { scores: Scores { softcap: Some(30.0), ..plain.scores }, ..plain },
        Attention { scores: Scores { sink: Some(sink.view()), ..plain.scores }, ..plain },
    ];
    let blocks: Vec<_> = (0..4).map(|row| (row, row * 5 % 4)).collect();
    let pattern = BsrPattern::from_blocks(256, 256, 64, &blocks).unwrap().to(&stream).unwrap();
    let (values, b, mut c) =
        (zeros(&pattern.values_shape()), zeros(&[256, 512]), zeros(&[256, 512]));
    let bias = zeros(&[512]);
    let plain = BsrMatmul::new(BsrView::new(&pattern, values.view()).unwrap(), b.view());
    let products = [
        plain,
        BsrMatmul { alpha: 0.0, ..plain },
        BsrMatmul { alpha: -0.0, ..plain },
        BsrMatmul { beta: 1.0, ..plain },
        BsrMatmul { bias: Bias::PerColumn(bias.view()), ..plain },
        BsrMatmul { activation: Activation::Gelu, ..plain },
    ];
    let mut of_thread = || {
        let mut all = Vec::new();
        for call in &attentions {
            for with_lse in [false, true] {
                let out = (o.view_mut(), with_lse.then(|| lse.view_mut()));
                all.push(queued(&calls(driver, || call.run(out, &stream))));
            }
        }
        for call in &products {
            all.push(queued(&calls(driver, || call.run(c.view_mut(), &stream))));
        }
        all
    };
    // The first round makes all plans, and the second one finds them.
    let [first, second] = [of_thread(), of_thread()];
    assert_eq!(first, second);
    let different: std::collections::HashSet<_> =
        first.iter().flatten().map(|(launch, fields)| format!("{launch:?} {fields}")).collect();
    // Two products differ in nothing but the sign of a zero.
    assert_eq!(different.len(), first.len() - 1);
}

/// Kernels may read values ahead of their turn unless somebody may have written them since they
/// came from the host.
#[test]
fn values_are_settled_until_somebody_may_write_them() {
    for ordinal in 0..GPUS.len() {
        let (driver, device) = device(ordinal);
        let stream = device.stream().unwrap();
        let host = BsrMatrix::from_blocks(64, 64, 64, DType::F16, &[(0, 0)], &[1.0; 64 * 64]);
        let host = host.unwrap();
        let zeros = |columns| Tensor::zeros(&stream, DType::F16, &[64, columns]).unwrap();
        let (b, mut c) = (zeros(64), zeros(64));
        let mut settled = |a: BsrView<'_>| {
            let product = BsrMatmul::new(a, b.view());
            let calls = calls(driver, || product.matmul_into(c.view_mut(), &stream));
            let [launch] = launches(&calls)[..] else { panic!("{calls:?}") };
            fields(launch).contains("values_settled: 1")
        };
        let mut matrix = host.to(&stream).unwrap();
        assert!(settled(matrix.view()));
        assert!(settled(BsrView::new(matrix.pattern(), matrix.values().view()).unwrap()));
        let zeros = Tensor::zeros(&stream, DType::F16, &[1, 64, 64]).unwrap();
        assert!(!settled(BsrView::new(matrix.pattern(), zeros.view()).unwrap()));
        // A copy on the GPU may still be under way.
        assert!(!settled(matrix.to(&stream).unwrap().view()));
        matrix.set_values(host.values(), &stream).unwrap();
        assert!(!settled(matrix.view()));
        let mut matrix = host.to(&stream).unwrap();
        assert!(matrix.values_mut().is_ok());
        assert!(!settled(matrix.view()));
    }
}

#[test]
fn failures_of_the_driver_are_typed_and_nothing_of_them_is_kept() {
    let (driver, device) = device(0);
    let stream = device.stream().unwrap();
    for (function, code) in [("cuTensorMapEncodeTiled", 1), ("cuLaunchKernelEx", 700)] {
        for mut case in cases::all(&device).unwrap() {
            let expected = fresh(driver, &mut case);
            if count(&expected, function) == 0 {
                continue;
            }
            std::thread::scope(|scope| {
                let failing = || {
                    driver.fail_next(function, code);
                    let error = (case.call)(false).unwrap_err();
                    let Error::Safe(SafeError::Cuda { call, code: found, .. }) = error else {
                        panic!("{error:?}")
                    };
                    assert_eq!((call, found), (function, code as i32));
                    let again = calls(driver, || (case.call)(false));
                    assert_eq!(queued(&again), queued(&expected), "{}", case.name);
                };
                scope.spawn(failing).join().unwrap();
            });
        }
    }
    driver.fail_next("cuMemAllocAsync", 2);
    let error = Tensor::empty(&stream, DType::F16, &[64]).unwrap_err();
    assert!(matches!(error, SafeError::DeviceOutOfMemory { bytes: 128, .. }), "{error}");
    // What a forked process gets of a driver that its parent has initialised.
    driver.fail_next("cuStreamSynchronize", 3);
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, SafeError::Forked { call: "cuStreamSynchronize" }), "{error}");
    driver.fail_next("cuStreamSynchronize", 700);
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, SafeError::Cuda { code: 700, .. }), "{error}");
    stream.synchronize().unwrap();
}

#[test]
fn a_graph_of_a_call_is_one_launch() {
    let (driver, device) = device(0);
    for mut case in cases::all(&device).unwrap() {
        let direct = calls(driver, || (case.call)(false));
        let stream = case.stream.clone();
        let (graph, captured) = driver.calls(|| stream.capture(|_| (case.call)(true)));
        let kernels = count(&captured, "cuLaunchKernelEx");
        assert_eq!(kernels, count(&direct, "cuLaunchKernelEx"), "{}", case.name);
        let launched = calls(driver, || Ok(graph.unwrap().launch(&stream)?));
        assert_eq!(count(&launched, "cuGraphLaunch"), 1, "{}", case.name);
        assert_eq!(count(&launched, "cuLaunchKernelEx"), 0, "{}", case.name);
    }
}

/// Calls that wait, allocate or copy would break a capture, or be replayed with its graph.
#[test]
fn a_capture_by_another_library_takes_every_call() {
    let (driver, device) = device(0);
    let never = [
        "cuStreamSynchronize",
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "cuMemcpyHtoDAsync",
    ];
    for mut case in cases::all(&device).unwrap() {
        let direct = fresh(driver, &mut case);
        let stream = case.stream.clone();
        let captured = driver.captured(stream.raw(), || {
            assert!(stream.is_capturing().unwrap());
            fresh(driver, &mut case)
        });
        let launches = |calls| count(calls, "cuLaunchKernelEx");
        assert_eq!(launches(&captured), launches(&direct), "{}", case.name);
        for function in never {
            assert_eq!(count(&captured, function), 0, "{}: {function}", case.name);
        }
    }
}
