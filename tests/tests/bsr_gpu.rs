//! Every BSR kernel that the GPU can run against the oracle.

use blockflash_cases::case::Operands;
use blockflash_ops::{BsrMatmul, DType, Operation, Stream, Tensor};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::BsrMatmulTile;
use blockflash_tests::bsr::{
    BsrCase, BsrData, BsrReference, Limits, Pattern, Workspace, bsr_cases, check_output,
    column_cases, edge_cases, epilogue_cases, run_on_kernel, tiles,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use blockflash_tests::host::{download, poisoned};
use blockflash_tests::number::{POISON, encode};
use blockflash_tests::property;
use half::{bf16, f16};
use std::collections::BTreeMap;

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 2e8;

/// Kernels that compute the same problems: they share cases and references. A kernel that takes any
/// layout is there with each.
type Group = ((DType, u32), Vec<(&'static Kernel, BsrMatmulTile)>);

fn groups(gpu: &Gpu) -> BTreeMap<(DType, u32), Vec<(&'static Kernel, BsrMatmulTile)>> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (kernel, tile) in
        gpu.kernels().flat_map(|kernel| tiles(kernel).into_iter().map(move |tile| (kernel, tile)))
    {
        groups.entry((tile.dtype, tile.block_size)).or_default().push((kernel, tile));
    }
    groups
}

fn cases_of(
    (dtype, block_size): (DType, u32),
    kernels: &[(&'static Kernel, BsrMatmulTile)],
) -> Vec<BsrCase> {
    let size = block_size as usize;
    let mut tiles: Vec<(usize, usize)> =
        kernels.iter().map(|(_, tile)| (tile.block_n as usize, tile.block_k as usize)).collect();
    tiles.sort_unstable();
    tiles.dedup();
    let mut cases: Vec<BsrCase> = tiles
        .iter()
        .flat_map(|&(block_n, block_k)| edge_cases(dtype, size, block_n, block_k))
        .chain(tiles.iter().flat_map(|&(block_n, _)| column_cases(dtype, size, block_n)))
        .collect();
    cases.extend(epilogue_cases(dtype, size));
    // More block rows than multiprocessors, more steps than pipeline stages.
    for pattern in [Pattern::Random(0.1), Pattern::OneLongRow, Pattern::EmptyRows(0.2)] {
        let case = BsrCase::simple(dtype, size, [300 * size - 5, 520, 70 * size - 3], pattern);
        cases.push(case.clone());
        cases.push(BsrCase { workspace: Workspace::Parts(5), ..case });
    }
    let limits = Limits {
        dtypes: vec![dtype],
        block_sizes: vec![size],
        blocks: 9,
        columns: 600,
        any_layout: true,
    };
    cases.extend(property::samples(60, bsr_cases(limits)));
    cases
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("bsr_gpu::every_kernel") else { return };
    let check = |(key, kernels): Group, gpu: &Gpu, report: &mut Report| {
        let cases = cases_of(key, &kernels);
        report.run_cases(
            gpu,
            &cases,
            &kernels,
            prepared,
            |case, (data, reference), tile, stream| {
                run_on_kernel(case, data, reference, tile, stream)
            },
        );
        report.run_each(gpu, &kernels, |kernel, tile, stream| {
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            let transposed = || match tile.a_transposed {
                true => is_the_transposed_matrix(kernel, tile, &kernels, stream),
                false => Ok(0),
            };
            Ok(replays_a_graph(kernel, tile, stream).map_err(story("graph"))?
                + repeats_its_bits(kernel, tile, stream).map_err(story("repeat"))?
                + runs_in_two_threads(kernel, tile, gpu).map_err(story("threads"))?
                + transposed().map_err(story("transpose"))?)
        });
    };
    let mut before = Report::default();
    beyond_31_bits(&gpu, &mut before);
    gpu.check_groups("bsr_gpu", &before, groups(&gpu), check);
}

fn prepared(case: &BsrCase) -> (BsrData, BsrReference) {
    let data = BsrData::generate(case);
    let reference = BsrReference::compute(case, &data, BUDGET);
    (data, reference)
}

/// Captures a call once and replays it with another B.
fn replays_a_graph(
    kernel: &'static Kernel,
    tile: &BsrMatmulTile,
    stream: &Stream,
) -> Result<usize, String> {
    let size = tile.block_size as usize;
    let case = BsrCase {
        workspace: Workspace::Parts(2),
        ..BsrCase::simple(tile.dtype, size, [5 * size + 3, 130, 7 * size], Pattern::Random(0.5))
            .for_kernel(kernel, tile)
    };
    let mut data = BsrData::generate(&case);
    let mut operands = data.operands(&case, stream)?;
    let graph = stream
        .capture(|stream| operands.launch(Some(kernel), stream))
        .map_err(|error| format!("capture: {error}"))?;
    for replay in 0..4 {
        data.b.rotate_left(17 * replay + 1);
        // Rows that nothing reads may now hold numbers, and rows that are read NaN: make all of
        // them numbers.
        data.b.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = 0.5);
        let reference = BsrReference::compute(&case, &data, BUDGET);
        let b = data.stored(&case).b;
        let refilled = operands.set_b(b, stream).and_then(|()| operands.reset(None, stream));
        refilled.map_err(|error| error.to_string())?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay {replay} of {} with {case:?}", kernel.image_name()))?;
        check_output(operands.c(), &case, &data, &reference, stream)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(4)
}

/// Also where tiles are computed in parts, whoever is first: all tiles alike, and one among empty
/// ones.
fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &BsrMatmulTile,
    stream: &Stream,
) -> Result<usize, String> {
    let of = |(pattern, workspace)| same_bits(kernel, tile, pattern, workspace, stream);
    let cases = [
        (Pattern::Random(0.3), Workspace::None),
        (Pattern::Random(0.3), Workspace::Parts(3)),
        (Pattern::OneLongRow, Workspace::Parts(8)),
    ];
    cases.into_iter().map(of).sum()
}

fn same_bits(
    kernel: &'static Kernel,
    tile: &BsrMatmulTile,
    pattern: Pattern,
    workspace: Workspace,
    stream: &Stream,
) -> Result<usize, String> {
    let size = tile.block_size as usize;
    let case = BsrCase {
        workspace,
        ..BsrCase::simple(tile.dtype, size, [40 * size, 300, 30 * size], pattern)
            .for_kernel(kernel, tile)
    };
    let data = BsrData::generate(&case);
    let mut operands = data.operands(&case, stream)?;
    let mut first = None;
    for repeat in 0..30 {
        let reset = operands.reset(None, stream);
        let launched = reset.and_then(|()| operands.launch(Some(kernel), stream));
        launched.map_err(|error| error.to_string())?;
        wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
        let bits = download(stream, operands.c())?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(30)
}

/// Aᵀ by an index, and the transposed matrix by the kernel with the same tiles: equal bits.
fn is_the_transposed_matrix(
    kernel: &'static Kernel,
    tile: &BsrMatmulTile,
    kernels: &[(&'static Kernel, BsrMatmulTile)],
    stream: &Stream,
) -> Result<usize, String> {
    let same = BsrMatmulTile { a_transposed: false, ..*tile };
    let is_other = |(other, tile): &&(&'static Kernel, BsrMatmulTile)| {
        *tile == same && (other.source(), other.target) == (kernel.source(), kernel.target)
    };
    let (other, _) = kernels.iter().find(is_other).ok_or("no kernel with the same tiles")?;
    let size = tile.block_size as usize;
    let mut compared = 0;
    for (seed, pattern) in
        [Pattern::Random(0.3), Pattern::EmptyRows(0.5), Pattern::Full].into_iter().enumerate()
    {
        let mnk = [11 * size - 3, 2 * tile.block_n as usize + 40, 9 * size - 5];
        let case = BsrCase { seed: seed as u64, ..BsrCase::simple(tile.dtype, size, mnk, pattern) };
        let data = BsrData::generate(&case);
        let bits = |kernel: &'static Kernel, tile: &BsrMatmulTile| -> Result<Vec<u32>, String> {
            let mut operands = data.operands(&case.clone().for_kernel(kernel, tile), stream)?;
            operands.launch(Some(kernel), stream).map_err(|error| error.to_string())?;
            wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
            download(stream, operands.c())
        };
        if bits(kernel, tile)? != bits(other, &same)? {
            return Err(format!(
                "bits differ from the bits of {}\n    {case:?}",
                other.image_name()
            ));
        }
        compared += 1;
    }
    Ok(compared)
}

fn runs_in_two_threads(
    kernel: &'static Kernel,
    tile: &BsrMatmulTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let size = tile.block_size as usize;
    let work = |thread: usize| {
        let stream = gpu.device.stream().map_err(|error| error.to_string())?;
        let mut compared = 0;
        for seed in 0..6 {
            let mnk = [9 * size + thread, 200 + 57 * thread, 11 * size];
            let case =
                BsrCase { seed, ..BsrCase::simple(tile.dtype, size, mnk, Pattern::Random(0.4)) };
            let (data, reference) = prepared(&case);
            compared += run_on_kernel(&case, &data, &reference, (kernel, tile), &stream)?;
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

/// Rows of B and of C 2²⁰ + 8 elements apart, and more than 2¹¹ of them. Whatever is between them
/// is NaN.
fn beyond_31_bits(gpu: &Gpu, report: &mut Report) {
    const STRIDE: usize = (1 << 20) + 8;
    const ROWS: usize = (1 << 11) + 40;
    const COLUMNS: usize = 72;
    if !gpu.has_memory(24, "bsr_gpu: matrices beyond 2^31 elements") {
        return;
    }
    let stream = &gpu.stream;
    for dtype in [DType::F16, DType::BF16] {
        // B does not depend on the block size.
        let case = |size| BsrCase {
            nan_in_b: blockflash_tests::bsr::NanInB::Nowhere,
            ..BsrCase::simple(dtype, size, [ROWS, COLUMNS, ROWS], Pattern::Banded)
        };
        let b_data = BsrData::generate(&case(128)).b;
        let upload = || {
            let mut bits = vec![u16::from_ne_bytes([POISON; 2]); ROWS * STRIDE];
            for (kernel, numbers) in b_data.chunks(COLUMNS).enumerate() {
                let to = &mut bits[(kernel + 1) * STRIDE - COLUMNS..(kernel + 1) * STRIDE];
                to.iter_mut().zip(numbers).for_each(|(bits, &x)| *bits = encode(dtype, x) as u16);
            }
            match dtype {
                DType::F16 => {
                    Tensor::from_slice::<f16>(stream, bytemuck::cast_slice(&bits), &[ROWS, STRIDE])
                }
                _ => {
                    Tensor::from_slice::<bf16>(stream, bytemuck::cast_slice(&bits), &[ROWS, STRIDE])
                }
            }
        };
        let b = upload().expect("memory for a matrix beyond 2^31 elements");
        let mut spread = Tensor::empty(stream, dtype, &[ROWS, STRIDE])
            .expect("memory for C beyond 2^31 elements");
        let mut prepared = BTreeMap::new();
        for (kernel, tile) in gpu
            .kernels()
            .filter_map(|kernel| Some((kernel, kernel.bsr_matmul_tile()?)))
            .filter(|(_, tile)| tile.dtype == dtype)
        {
            // B and C are by rows here, and A as it is.
            if tile.a_transposed || tile.b_column_major {
                continue;
            }
            let (case, data, reference) = prepared.entry(tile.block_size).or_insert_with(|| {
                let case = case(tile.block_size as usize);
                let data = BsrData { b: b_data.clone(), ..BsrData::generate(&case) };
                let reference = BsrReference::compute(&case, &data, BUDGET);
                (case, data, reference)
            });
            report.run(kernel, || {
                let a = data.matrix(case, stream)?;
                let b = b
                    .view()
                    .slice(1, STRIDE - COLUMNS..STRIDE)
                    .map_err(|error| error.to_string())?;
                let product = BsrMatmul::new(&a, b);
                let mut c = poisoned(stream, dtype, &[ROWS, COLUMNS])?;
                product
                    .run_with(kernel, c.view_mut(), stream)
                    .map_err(|error| error.to_string())?;
                wait(stream, &|| format!("{} with B beyond 2^31 elements", kernel.image_name()))?;
                check_output(&c, case, data, reference, stream)?;
                let expected = download(stream, &c)?;

                spread.fill_bytes(stream, POISON).map_err(|error| error.to_string())?;
                let out = spread
                    .view_mut()
                    .slice(1, 8..8 + COLUMNS)
                    .map_err(|error| error.to_string())?;
                product.run_with(kernel, out, stream).map_err(|error| error.to_string())?;
                wait(stream, &|| format!("{} with C beyond 2^31 elements", kernel.image_name()))?;
                for i in (0..ROWS).step_by(97).chain(ROWS - 45..ROWS) {
                    check_row(&spread, i, &expected[i * COLUMNS..][..COLUMNS], stream)?;
                }
                Ok(2)
            });
        }
    }
}

/// One row of the C that is spread over more than 2³¹ elements, with the gap around it.
fn check_row(spread: &Tensor, row: usize, expected: &[u32], stream: &Stream) -> Result<(), String> {
    let part =
        spread.view().slice(0, row..row + 1).and_then(|view| view.slice(1, 0..expected.len() + 64));
    let part = part.map_err(|error| error.to_string())?;
    let bits: Vec<u16> = match spread.dtype() {
        DType::F16 => part.to_vec::<f16>(stream).map(|x| x.into_iter().map(f16::to_bits).collect()),
        _ => part.to_vec::<bf16>(stream).map(|x| x.into_iter().map(bf16::to_bits).collect()),
    }
    .map_err(|error| error.to_string())?;
    let gap = u32::from(u16::from_ne_bytes([POISON; 2]));
    let due = |at: usize| at.checked_sub(8).and_then(|at| expected.get(at)).copied().unwrap_or(gap);
    match (0..bits.len()).find(|&at| u32::from(bits[at]) != due(at)) {
        None => Ok(()),
        Some(at) => Err(format!(
            "C beyond 2^31 elements, row {row}, column {}: bits {:#x}, expected {:#x} as in \
             a small matrix",
            at as isize - 8,
            bits[at],
            due(at)
        )),
    }
}
