//! Every kernel of the sampled product that the GPU can run against the oracle.

use blockflash_cases::case::Operands;
use blockflash_ops::{BsrMatrix, BsrSddmm, DType, Device, Error, Major, Stream, Tensor, ViewMut};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{self, BsrSddmmTile};
use blockflash_tests::bsr::{Choice, Pattern};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use blockflash_tests::host::download;
use blockflash_tests::property;
use blockflash_tests::sddmm::{
    Limits, SddmmCase, SddmmData, SddmmReference, check_values, edge_cases, run_and_check,
    run_on_kernel, sddmm_cases,
};

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 2e8;

/// The layouts of A and B that a kernel takes.
fn layouts(tile: &BsrSddmmTile) -> Vec<[Major; 2]> {
    let all = || Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| [a, b])).collect();
    tile.majors.map_or_else(all, |majors| vec![majors])
}

/// A case for a kernel, in the first of its layouts.
fn simple(tile: &BsrSddmmTile, blocks: [usize; 2], k: usize, pattern: Pattern) -> SddmmCase {
    let size = tile.block_size as usize;
    let mnk = [blocks[0] * size - 5, blocks[1] * size - 3, k];
    SddmmCase { majors: layouts(tile)[0], ..SddmmCase::simple(tile.dtype, size, mnk, pattern) }
        .aligned()
}

fn cases_of(tile: &BsrSddmmTile) -> Vec<SddmmCase> {
    let (size, layouts) = (tile.block_size as usize, layouts(tile));
    let mut cases: Vec<_> =
        layouts.iter().flat_map(|&majors| edge_cases(tile.dtype, size, majors)).collect();
    // Tiles with all of their blocks, and with fewer, in which everything is copied 16 bytes at a
    // time.
    cases.extend(layouts.iter().flat_map(|&majors| {
        [Pattern::Full, Pattern::Random(0.3)]
            .map(|pattern| SddmmCase { majors, ..simple(tile, [4, 33], 520, pattern) }.aligned())
    }));
    // More tiles than multiprocessors; many block rows, most of them short or empty; more depth
    // than 16 bits of it can count.
    for pattern in [Pattern::Random(0.1), Pattern::OneLongRow, Pattern::EmptyRows(0.2)] {
        cases.push(simple(tile, [70, 60], 200, pattern));
        cases.push(simple(tile, [1100, 3], 72, pattern));
    }
    cases.push(simple(tile, [2, 3], 70_000, Pattern::Full));
    let limits = Limits {
        dtypes: vec![tile.dtype],
        block_sizes: vec![size],
        blocks: 9,
        depth: 700,
        majors: layouts,
    };
    cases.extend(property::samples(60, sddmm_cases(limits)));
    cases
}

/// Kernels that compute the same problems: they share cases and references.
type Group = ((DType, u32, Vec<[Major; 2]>), Vec<(&'static Kernel, BsrSddmmTile)>);

fn groups(gpu: &Gpu) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for kernel in gpu.kernels() {
        let Some(tile) = kernel.bsr_sddmm_tile() else { continue };
        let key = (tile.dtype, tile.block_size, layouts(&tile));
        match groups.iter_mut().find(|group| group.0 == key) {
            Some(group) => group.1.push((kernel, tile)),
            None => groups.push((key, vec![(kernel, tile)])),
        }
    }
    groups
}

fn prepared(case: &SddmmCase) -> (SddmmData, SddmmReference) {
    let data = SddmmData::generate(case);
    let reference = SddmmReference::compute(case, &data, BUDGET);
    (data, reference)
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("sddmm_gpu::every_kernel") else { return };
    let check = |(_, kernels): Group, gpu: &Gpu, report: &mut Report| {
        let cases = cases_of(&kernels[0].1);
        let check =
            |case: &SddmmCase,
             (data, reference): &(SddmmData, SddmmReference),
             (kernel, _): (&'static Kernel, &BsrSddmmTile),
             stream: &Stream| { run_on_kernel(case, data, reference, kernel, stream) };
        report.run_cases(gpu, &cases, &kernels, prepared, check);
        report.run_each(gpu, &kernels, |kernel, tile, stream| {
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            Ok(replays_a_graph(kernel, tile, stream).map_err(story("graph"))?
                + repeats_its_bits(kernel, tile, stream).map_err(story("repeat"))?
                + runs_in_two_threads(kernel, tile, gpu).map_err(story("threads"))?)
        });
    };
    gpu.check_groups("sddmm_gpu", &Report::default(), groups(&gpu), check);
}

/// Captures a call once and replays it with other matrices.
fn replays_a_graph(
    kernel: &'static Kernel,
    tile: &BsrSddmmTile,
    stream: &Stream,
) -> Result<usize, String> {
    let case = simple(tile, [5, 7], 130, Pattern::Random(0.5));
    let mut data = SddmmData::generate(&case);
    let mut operands = data.operands(&case, stream)?;
    let graph = stream
        .capture(|stream| operands.launch(Some(kernel), stream))
        .map_err(|error| format!("capture: {error}"))?;
    for replay in 0..4 {
        data.a.rotate_left(17 * replay + 1);
        data.b.rotate_left(23 * replay + 1);
        // What nothing reads may now hold numbers, and what is read NaN: make all of them numbers.
        data.a.iter_mut().chain(&mut data.b).filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
        let reference = SddmmReference::compute(&case, &data, BUDGET);
        let set = operands.set_inputs(data.inputs(&case), stream);
        let refilled = set.and_then(|()| operands.reset(None, stream));
        refilled.map_err(|error| error.to_string())?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay {replay} of {} with {case:?}", kernel.image_name()))?;
        check_values(operands.values(), &case, &data, &reference, stream)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(4)
}

fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &BsrSddmmTile,
    stream: &Stream,
) -> Result<usize, String> {
    let case = simple(tile, [40, 30], 500, Pattern::Random(0.3));
    let data = SddmmData::generate(&case);
    let mut operands = data.operands(&case, stream)?;
    let mut first = None;
    for repeat in 0..20 {
        let reset = operands.reset(None, stream);
        let launched = reset.and_then(|()| operands.launch(Some(kernel), stream));
        launched.map_err(|error| error.to_string())?;
        wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
        let bits = download(stream, operands.values())?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(20)
}

fn runs_in_two_threads(
    kernel: &'static Kernel,
    tile: &BsrSddmmTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let work = |thread: usize| {
        let stream = gpu.device.stream().map_err(|error| error.to_string())?;
        let mut compared = 0;
        for seed in 0..6 {
            let case =
                SddmmCase { seed, ..simple(tile, [9 + thread, 11], 200, Pattern::Random(0.4)) };
            let (data, reference) = prepared(&case);
            compared += run_and_check(&case, &data, &reference, Choice::This(kernel), &stream)?;
        }
        Ok(compared)
    };
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|thread| scope.spawn(move || work(thread)));
        threads.into_iter().try_fold(0, |sum, thread| {
            let compared: Result<usize, String> =
                thread.join().map_err(|_| "a thread panicked".to_string())?;
            Ok(sum + compared?)
        })
    })
}

/// Whatever some kernel takes is computed, and what none takes is refused by name.
#[test]
fn selection() {
    let Some(gpu) = gpu("sddmm_gpu::selection") else { return };
    let tiles: Vec<_> = gpu.all_kernels().filter_map(Kernel::bsr_sddmm_tile).collect();
    for (size, [a, b]) in [16, 32, 48, 64, 128].into_iter().flat_map(|size| {
        Major::ALL.into_iter().flat_map(move |a| Major::ALL.map(move |b| (size, [a, b])))
    }) {
        let base = SddmmCase::simple(DType::F16, size, [3 * size, 2 * size, 64], Pattern::Full);
        let case = SddmmCase { majors: [a, b], ..base };
        let (data, reference) = prepared(&case);
        let found = run_and_check(&case, &data, &reference, Choice::Selected, &gpu.stream);
        let taken = tiles.iter().any(|tile| tile.block_size as usize == size);
        match found {
            Ok(_) => assert!(taken, "there is no kernel for blocks of {size}"),
            Err(error) => {
                assert!(!taken, "{error}");
                assert!(error.contains("bsr_sddmm is not supported on sm_"), "{error}");
            }
        }
    }
    assert!(manifest::kernels().iter().any(|kernel| kernel.bsr_sddmm_tile().is_some()));
}

#[test]
fn operands_elsewhere_are_named() {
    let Some(gpu) = gpu("sddmm_gpu::operands_elsewhere_are_named") else { return };
    let (here, host) = (&gpu.stream, &Device::cpu().stream().unwrap());
    let pattern = BsrMatrix::from_coo(70, 70, 64, DType::F16, &[(3, 5, 1.0)]).unwrap();
    let on = |stream| {
        let zeros = |shape: &[usize]| Tensor::zeros(stream, DType::F16, shape).unwrap();
        (pattern.to(stream).unwrap(), zeros(&[70, 8]), zeros(&[8, 70]), zeros(&[1, 64, 64]))
    };
    let ((pattern, a, b, mut values), mut other) = (on(here), on(host));
    let call = BsrSddmm::new(&pattern, a.view(), b.view());
    let elsewhere = |op: BsrSddmm<'_>, values: ViewMut<'_>| match op.sddmm_into(values, here) {
        Err(Error::DeviceMismatch { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(elsewhere(BsrSddmm { pattern: &other.0, ..call }, values.view_mut()), "pattern");
    assert_eq!(elsewhere(BsrSddmm { a: other.1.view(), ..call }, values.view_mut()), "a");
    assert_eq!(elsewhere(BsrSddmm { b: other.2.view(), ..call }, values.view_mut()), "b");
    assert_eq!(elsewhere(call, other.3.view_mut()), "values");
}
