//! Every attention kernel that the GPU can run against the oracle.

use blockflash_ops::attention::{Attention, Mask, Scores};
use blockflash_ops::{DType, Operation, Stream, Tensor};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::AttentionTile;
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, Choice,
    KernelGroup, Lengths, Limits, attention_cases, dims_of_tile, edge_cases, kernel_groups,
    many_heads, run_and_check, run_or_refuse, same_bits, special_cases, takes_packed,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use blockflash_tests::number::{POISON, encode};
use blockflash_tests::property;
use half::{bf16, f16};
use std::collections::BTreeSet;

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 3e8;

fn cases_of(
    (dtype, head_dim): (DType, usize),
    kernels: &[(&'static Kernel, AttentionTile)],
) -> Vec<AttentionCase> {
    let dims = dims_of_tile(head_dim);
    let (narrow, wide) = (dims[0], dims[dims.len() - 1]);
    let mut tiles: Vec<(usize, usize)> =
        kernels.iter().map(|(_, tile)| (tile.block_q as usize, tile.block_kv as usize)).collect();
    tiles.sort_unstable();
    tiles.dedup();
    let mut cases = Vec::new();
    for &(block_q, block_kv) in &tiles {
        cases.extend(edge_cases(dtype, &dims, block_q, block_kv));
    }
    let blocks_kv: BTreeSet<usize> = tiles.into_iter().map(|(_, block_kv)| block_kv).collect();
    cases.extend(blocks_kv.into_iter().flat_map(|block_kv| special_cases(dtype, wide, block_kv)));
    cases.extend(many_heads(dtype, narrow));
    // A kernel takes all head dimensions up to its own.
    cases.push(AttentionCase {
        scores: Mask::causal().into(),
        ..AttentionCase::simple(dtype, (3, 1), 8, (130, 200))
    });
    cases.push(AttentionCase {
        scores: Mask::causal().into(),
        ..AttentionCase::simple(dtype, (4, 2), wide, (1030, 2050))
    });
    let limits = Limits {
        dtypes: vec![dtype],
        head_dims: dims,
        seqlen: 400,
        alignment: 8,
        work: 30_000_000,
    };
    cases.extend(property::samples(40, attention_cases(limits)));
    cases
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_gpu::every_kernel") else { return };
    let check = |(key, kernels): KernelGroup, gpu: &Gpu, report: &mut Report| {
        for case in cases_of(key, &kernels) {
            let data = AttentionData::generate(&case);
            let reference = AttentionReference::compute(&case, &data, BUDGET);
            report.run_each(gpu, &kernels, |kernel, _, stream| {
                run_or_refuse(&case, &data, &reference, kernel, stream)
            });
        }
        report.run_each(gpu, &kernels, |kernel, tile, stream| {
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            Ok(replays_a_graph(kernel, tile, stream).map_err(story("graph"))?
                + repeats_its_bits(kernel, tile, stream).map_err(story("repeat"))?
                + runs_in_two_threads(kernel, tile, gpu).map_err(story("threads"))?)
        });
    };
    let mut before = Report::default();
    beyond_31_bits(&gpu, &mut before);
    gpu.check_groups("attention_gpu", &before, kernel_groups(&gpu), check);
}

fn prepared(case: &AttentionCase) -> (AttentionData, AttentionReference) {
    let data = AttentionData::generate(case);
    let reference = AttentionReference::compute(case, &data, BUDGET);
    (data, reference)
}

/// Captures a call once and replays it with other numbers, and other sequences under the same
/// maxima.
fn replays_a_graph(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let base = AttentionCase {
        scores: Scores { mask: Mask::causal(), sink: Some(()), ..Scores::default() },
        ..AttentionCase::of_tile(tile, (4, 2), (0, 0))
    };
    let dense = |seed| AttentionCase {
        seed,
        lengths: Lengths::Dense { batch: 2, seqlen_q: 150, seqlen_kv: 190 },
        ..base.clone()
    };
    let packed = |lengths: [(usize, usize); 2], slack| AttentionCase {
        seed: 3 * lengths[1].1 as u64,
        lengths: Lengths::Packed { lengths: lengths.to_vec(), slack },
        ..base.clone()
    };
    let dense = vec![dense(1), dense(2), dense(3)];
    let packed = vec![
        packed([(90, 290), (10, 10)], (0, 0)),
        packed([(40, 120), (60, 180)], (0, 0)),
        packed([(0, 7), (70, 280)], (30, 13)),
        packed([(90, 0), (0, 200)], (10, 100)),
    ];
    let mut compared = 0;
    let packed = takes_packed(kernel).then_some(packed);
    for cases in [Some(dense), packed].into_iter().flatten() {
        let (first, _) = prepared(&cases[0]);
        let mut inputs = AttentionInputs::upload(&cases[0], &first, stream)?;
        let mut outputs = AttentionOutputs::poisoned(&cases[0], stream)?;
        let graph = stream
            .capture(|stream| outputs.launch(&inputs, Choice::This(kernel), stream))
            .map_err(|error| format!("capture: {error}"))?;
        for case in &cases {
            let (data, reference) = prepared(case);
            inputs.refill(case, &data, stream)?;
            outputs.poison(stream)?;
            graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
            wait(stream, &|| format!("replay of {} with {case:?}", kernel.image_name()))?;
            compared += outputs
                .check(case, &reference, stream)
                .map_err(|error| format!("{error}\n    {case:?}"))?;
        }
    }
    Ok(compared)
}

fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let case = AttentionCase {
        lengths: Lengths::Dense { batch: 3, seqlen_q: 500, seqlen_kv: 777 },
        scores: Mask::causal().into(),
        ..AttentionCase::of_tile(tile, (8, 2), (0, 0))
    };
    same_bits(&case, kernel, stream)
}

fn runs_in_two_threads(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let work = |thread: u64| {
        let stream = gpu.device.stream().map_err(|error| error.to_string())?;
        let mut compared = 0;
        for seed in 0..6 {
            let case = AttentionCase {
                seed: 10 * thread + seed,
                scores: Mask::causal().into(),
                ..AttentionCase::of_tile(tile, (6, 3), (200 + 31 * thread as usize, 333))
            };
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

/// Batch entries 2²⁷ elements apart: the 17th starts at element 2³¹. Whatever is between them is
/// NaN.
fn beyond_31_bits(gpu: &Gpu, report: &mut Report) {
    const BATCH: usize = 17;
    const SEQLEN: usize = 70;
    const HEAD_DIM: usize = 64;
    const ROWS: usize = (1 << 27) / HEAD_DIM;
    if !gpu.has_memory(24, "attention_gpu: tensors beyond 2^31 elements") {
        return;
    }
    let stream = &gpu.stream;
    for dtype in [DType::F16, DType::BF16] {
        let case = AttentionCase {
            lengths: Lengths::Dense { batch: BATCH, seqlen_q: SEQLEN, seqlen_kv: SEQLEN },
            scores: Mask::causal().into(),
            ..AttentionCase::simple(dtype, (1, 1), HEAD_DIM, (0, 0))
        };
        let mut data = AttentionData::generate(&case);
        (data.k, data.v) = (data.q.clone(), data.q.clone());
        let reference = AttentionReference::compute(&case, &data, BUDGET);
        let shape = [BATCH, ROWS, 1, HEAD_DIM];
        let upload = || {
            let mut bits = vec![u16::from_ne_bytes([POISON; 2]); shape.iter().product()];
            for (batch, entry) in data.q.chunks(SEQLEN * HEAD_DIM).enumerate() {
                let start = batch * ROWS * HEAD_DIM;
                bits[start..start + entry.len()]
                    .iter_mut()
                    .zip(entry)
                    .for_each(|(bits, &x)| *bits = encode(dtype, x) as u16);
            }
            match dtype {
                DType::F16 => {
                    Tensor::from_slice::<f16>(stream, bytemuck::cast_slice(&bits), &shape)
                }
                _ => Tensor::from_slice::<bf16>(stream, bytemuck::cast_slice(&bits), &shape),
            }
        };
        let qkv = upload().expect("memory for a tensor beyond 2^31 elements");
        let mut spread = Tensor::empty(stream, dtype, &shape)
            .expect("memory for an output beyond 2^31 elements");
        for (kernel, _) in gpu
            .kernels()
            .filter_map(|kernel| Some((kernel, kernel.attention_tile()?)))
            .filter(|(_, tile)| tile.types.q == dtype && tile.heads == 1 && !tile.terms)
        {
            report.run(kernel, || {
                let entries = qkv.view().slice(1, 0..SEQLEN).map_err(|error| error.to_string())?;
                let call = Attention {
                    scores: case.scores.mask.into(),
                    ..Attention::new(entries, entries, entries)
                };
                let case = case.as_asked(kernel);
                let mut outputs = AttentionOutputs::poisoned(&case, stream)?;
                let launched = outputs.launch_call(&case, &call, Choice::This(kernel), stream);
                launched.map_err(|error| error.to_string())?;
                wait(stream, &|| format!("{} beyond 2^31 elements", kernel.image_name()))?;
                let compared = outputs.check(&case, &reference, stream)?;
                let [expected, _] = outputs.bits(stream)?;

                spread.fill_bytes(stream, POISON).map_err(|error| error.to_string())?;
                let o = spread.view_mut().slice(1, 0..SEQLEN).map_err(|error| error.to_string())?;
                let lse = case.lse.then(|| Tensor::empty(stream, DType::F32, &[BATCH, 1, SEQLEN]));
                let mut lse = lse.transpose().map_err(|error| error.to_string())?;
                let lse = lse.as_mut().map(Tensor::view_mut);
                call.run_with(kernel, (o, lse), stream).map_err(|error| error.to_string())?;
                wait(stream, &|| {
                    format!("{} into a tensor beyond 2^31 elements", kernel.image_name())
                })?;
                for (batch, expected) in expected.chunks(SEQLEN * HEAD_DIM).enumerate() {
                    check_entry(&spread, batch, expected, stream)?;
                }
                Ok(compared + 1)
            });
        }
    }
}

/// One batch entry of the output that is spread over more than 2³¹ elements, and as much of the gap
/// behind it.
fn check_entry(
    spread: &Tensor,
    batch: usize,
    expected: &[u32],
    stream: &Stream,
) -> Result<(), String> {
    let rows = 2 * expected.len() / spread.shape()[3];
    let part = spread.view().slice(0, batch..batch + 1).and_then(|view| view.slice(1, 0..rows));
    let part = part.map_err(|error| error.to_string())?;
    let bits: Vec<u16> = match spread.dtype() {
        DType::F16 => part.to_vec::<f16>(stream).map(|x| x.into_iter().map(f16::to_bits).collect()),
        _ => part.to_vec::<bf16>(stream).map(|x| x.into_iter().map(bf16::to_bits).collect()),
    }
    .map_err(|error| error.to_string())?;
    let gap = u32::from(u16::from_ne_bytes([POISON; 2]));
    let due = |at: usize| expected.get(at).copied().unwrap_or(gap);
    match (0..bits.len()).find(|&at| u32::from(bits[at]) != due(at)) {
        None => Ok(()),
        Some(at) => Err(format!(
            "output beyond 2^31 elements, batch {batch}, element {at}: bits {:#x}, expected {:#x} \
             as in a small tensor",
            bits[at],
            due(at)
        )),
    }
}
