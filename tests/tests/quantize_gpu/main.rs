//! Quantising on the GPU against that on the CPU, bit by bit.
#![forbid(unsafe_code)]

mod case;
mod tensors;

use self::case::Case;
use self::tensors::{Outcome, Tensors, Written, are_means, expected, run, told};
use blockflash_ops::{DType, Quantize, QuantizeOutputMut, QuantizeScale, Stream, Tensor};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::host::{all_pass, cpu, download, upload};

/// Compares codes and scales with their margins, and means.
fn judge(case: &Case, x: &[u32], found: &Written) -> Outcome {
    let [codes, scales, means] = expected(case, x, &found[2])?;
    let names = ["codes", "scales"];
    for ((name, found), expected) in names.iter().zip(found).zip([&codes, &scales]) {
        if let Some(at) = found.iter().zip(expected).position(|(x, y)| x != y) {
            let (x, y) = (found[at], expected[at]);
            return Err(format!("{name}[{at}] is {x:#x} in place of {y:#x}\n    {case:?}"));
        }
    }
    match are_means(&found[2], &means, x, case.dtype) {
        true => Ok(1 + usize::from(!scales.is_empty()) + usize::from(!means.is_empty())),
        false => Err(format!("the means are wrong\n    {case:?}")),
    }
}

fn check(case: &Case, kernel: Option<&'static Kernel>, stream: &Stream) -> Outcome {
    let x = case.numbers(1);
    let mut tensors = Tensors::new(case, &x, stream)?;
    tensors.quantize(case, kernel, stream)?;
    judge(case, &x, &tensors.written(case, stream)?)
}

/// Offsets that lead anywhere: only the margins are known.
fn survives(seed: u64, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, true);
    let x = case.numbers(1);
    let mut tensors = Tensors::new(&case, &x, stream)?;
    tensors.quantize(&case, Some(kernel), stream)?;
    let found = tensors.written(&case, stream)?;
    match case.are_margins_untouched(&found) {
        true => Ok(1),
        false => Err(format!("a margin is written\n    {case:?}")),
    }
}

/// A graph of one call, with other numbers and offsets each time.
fn replays(seed: u64, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let case = Case::draw(seed, false);
    let mut tensors = Tensors::new(&case, &case.numbers(1), stream)?;
    tensors.quantize(&case, Some(kernel), stream)?;
    let graph = tensors.captured(&case, kernel, stream)?;
    let mut compared = 0;
    for turn in 0..4 {
        let mut case = case.clone();
        if let Some((offsets, _)) = &mut case.packed {
            // Sequences become shorter, each in its turn.
            let last = offsets.len() - 1;
            offsets[last - turn % last.max(1)..].iter_mut().for_each(|x| *x -= (*x).min(1));
            (1..=last).for_each(|at| offsets[at] = offsets[at].max(offsets[at - 1]));
        }
        let x = case.numbers(turn as u64 + 5);
        tensors.refill(&case, &x, stream)?;
        tensors.poison(stream)?;
        graph.launch(stream).map_err(told)?;
        compared += judge(&case, &x, &tensors.written(&case, stream)?)?;
    }
    Ok(compared)
}

/// The same bits each time, means as well.
fn repeats(case: &Case, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let mut tensors = Tensors::new(case, &case.numbers(1), stream)?;
    let mut first = None;
    for _ in 0..100 {
        tensors.poison(stream)?;
        tensors.quantize(case, Some(kernel), stream)?;
        let found = tensors.written(case, stream)?;
        if *first.get_or_insert_with(|| found.clone()) != found {
            return Err(format!("other bits in another run\n    {case:?}"));
        }
    }
    Ok(100)
}

/// Every number of 16 bits, and numbers of f32 next to ties of codes, divided by some scales.
fn divides(dtype: DType, codes: DType, kernel: &'static Kernel, stream: &Stream) -> Outcome {
    let numbers = |scale: f32| -> Vec<u32> {
        let next_to_tie = |at: u32| {
            let tie = ((at % 512) as f32 / 32.0 + 0.03125) * scale;
            (at >> 15 << 31) | (tie.to_bits() + (at >> 9 & 63) - 32)
        };
        let of_f32 = dtype == DType::F32;
        (0..1 << 16).map(|at| if of_f32 { next_to_tie(at) } else { at }).collect()
    };
    let scales: Vec<f32> =
        (0..64u32).map(|at| f32::from_bits(0x3f80_0000 + at * 131_071)).collect();
    let shape = [1, 256, 1, 256];
    let of = |stream: &Stream, bits: &[u32], scale: f32| -> Outcome<Vec<u32>> {
        let x = upload(stream, dtype, bits, &shape)?;
        let scale = Tensor::from_slice(stream, &[scale], &[1]).map_err(told)?;
        let scale = QuantizeScale::Given(scale.view());
        let call = Quantize { scale, ..Quantize::new(x.view()) };
        let mut found = Tensor::zeros(stream, codes, &shape).map_err(told)?;
        let out = QuantizeOutputMut { codes: found.view_mut(), scale: None, mean: None };
        run(&call, out, (!stream.device().is_cpu()).then_some(kernel), stream)?;
        download(stream, &found)
    };
    for &scale in &scales {
        let bits = numbers(scale);
        let (found, exact) = (of(stream, &bits, scale)?, of(&cpu(), &bits, scale)?);
        if let Some(at) = found.iter().zip(&exact).position(|(x, y)| x != y) {
            let (x, found, exact) = (bits[at], found[at], exact[at]);
            return Err(format!("{x:#x} of {dtype} / {scale} is {found:#x}, not {exact:#x}"));
        }
    }
    Ok(scales.len())
}

fn check_all(kernel: &'static Kernel, gpu: &Gpu, report: &mut Report) {
    let stream = &gpu.stream;
    for seed in 0..500 {
        let case = Case::draw(seed * 100, false);
        report.run(kernel, || check(&case, Some(kernel), stream));
        report.run(kernel, || check(&case, None, stream));
    }
    for seed in 0..30 {
        report.run(kernel, || check(&Case::empty(seed), Some(kernel), stream));
    }
    for (seed, (tokens, heads, head_dim)) in LONG.into_iter().enumerate() {
        let case = Case::long(seed as u64, tokens, heads, head_dim);
        report.run(kernel, || check(&case, Some(kernel), stream));
        report.run(kernel, || repeats(&case, kernel, stream));
    }
    for seed in 0..200 {
        report.run(kernel, || survives(seed * 100 + 7, kernel, stream));
    }
    for seed in 0..60 {
        report.run(kernel, || replays(seed * 100 + 3, kernel, stream));
    }
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for codes in [DType::E4M3, DType::E5M2, DType::I8] {
            report.run(kernel, || divides(dtype, codes, kernel, stream));
        }
    }
}

/// Tokens, heads and head_dim of one sequence: many chunks, many heads, odd sizes.
const LONG: [(usize, usize, usize); 8] = [
    (40_000, 1, 128),
    (5000, 8, 128),
    (9001, 3, 64),
    (2047, 40, 72),
    (33_333, 1, 8),
    (4097, 2, 256),
    (1, 1000, 128),
    (3000, 7, 96),
];

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("quantize_gpu::every_kernel") else { return };
    let quantizes = |kernel: &&'static Kernel| matches!(kernel.variant, Variant::Quantize(_));
    let kernels: Vec<_> = gpu.kernels().filter(quantizes).collect();
    gpu.check_groups("quantize_gpu", &Report::default(), kernels, check_all);
}

/// What the suite above asks of a kernel holds for the CPU, with its own means.
#[test]
fn the_cases_on_the_cpu() {
    let drawn = (0..60).map(|seed| Case::draw(seed * 100, false));
    let cases: Vec<_> = drawn.chain((0..30).map(Case::empty)).collect();
    all_pass(&cases, |case, stream| check(case, None, stream));
}
