//! Every attention kernel that the GPU can run, with block masks, against the oracle and against
//! itself without one.

use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_ops::{DType, Stream};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::AttentionTile;
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, BlockCase,
    BlockPattern, Blocks, Choice, KernelGroup, Lengths, Limits, MaskHeads, block_sparse_cases,
    block_tile_cases, dims_of_tile, kernel_groups, run_case, run_or_refuse, same_bits,
    smallest_block, takes_blocks,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use blockflash_tests::property;
use std::collections::BTreeSet;

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 1e8;

#[test]
fn every_row_with_block_masks() {
    let Some(gpu) = gpu("block_sparse_gpu::every_row_with_block_masks") else { return };
    let check = |((dtype, head_dim), kernels): KernelGroup, gpu: &Gpu, report: &mut Report| {
        let kernels: Vec<_> =
            kernels.into_iter().filter(|(kernel, _)| takes_blocks(kernel)).collect();
        let dims = dims_of_tile(head_dim);
        let tiles: BTreeSet<_> =
            kernels.iter().map(|(_, tile)| (tile.block_q, tile.block_kv)).collect();
        let mut cases: Vec<AttentionCase> = tiles
            .into_iter()
            .flat_map(|(q, kv)| block_tile_cases(dtype, head_dim, q, kv))
            .collect();
        let limits = Limits {
            dtypes: vec![dtype],
            head_dims: dims,
            seqlen: 400,
            alignment: 8,
            work: 30_000_000,
        };
        cases.extend(property::samples(15, block_sparse_cases(limits)));
        for case in cases {
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
            Ok(equals_dense(kernel, tile, stream).map_err(story("dense"))?
                + repeats_its_bits(kernel, tile, stream).map_err(story("repeat"))?
                + replays_a_graph(kernel, tile, stream).map_err(story("graph"))?
                + unvisited_nan_is_not_read(kernel, tile, stream).map_err(story("NaN"))?)
        });
    };
    gpu.check_groups("block_sparse_gpu", &Report::default(), kernel_groups(&gpu), check);
}

/// The smallest blocks that consist of whole tiles, times `multiples`.
fn block(tile: &AttentionTile, multiples: [usize; 2], pattern: BlockPattern) -> BlockCase {
    let block_q = multiples[0] * smallest_block(&[tile.block_q]);
    let block_kv = multiples[1] * smallest_block(&[tile.block_kv]);
    BlockCase { block_q, block_kv, per_entry: true, heads: MaskHeads::KeyValue, pattern }
}

/// Bits of o and of the lse.
fn bits(
    case: &AttentionCase,
    data: &AttentionData,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<[Vec<u32>; 2], String> {
    let inputs = AttentionInputs::upload(case, data, stream)?;
    let mut outputs = AttentionOutputs::poisoned(case, stream)?;
    outputs.launch(&inputs, Choice::This(kernel), stream).map_err(|error| error.to_string())?;
    wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
    outputs.bits(stream)
}

/// A mask that hides nothing lets a kernel visit the same key tiles in the same order, so the bits
/// are the same. It is enough to list the blocks in which the token mask shows a pair. Also for
/// packed sequences. A kernel that pairs block rows by the lengths of their lists has other pairs
/// where a window makes the lists unequal: there its numbers are compared with the oracle's.
fn equals_dense(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let window = Mask::Window { left: Some(70), right: Some(3), align: Align::TopLeft };
    let masks = [Mask::Full, Mask::causal(), Mask::Causal { align: Align::TopLeft }, window];
    let mut compared = 0;
    let packed = Lengths::Packed {
        lengths: vec![(130, 333), (0, 70), (400, 400), (65, 0), (1, 9)],
        slack: (2, 1),
    };
    for (turn, mask) in masks.into_iter().flat_map(|mask| [mask; 2]).enumerate() {
        let (seqlen_q, seqlen_kv) = [(517, 700), (700, 517)][turn / 2 % 2];
        let lengths =
            [packed.clone(), Lengths::Dense { batch: 1, seqlen_q, seqlen_kv }][turn % 2].clone();
        let simple = AttentionCase::of_tile(tile, (2, 1), (0, 0));
        let dense = AttentionCase {
            scores: Scores { mask, sink: Some(()), ..Scores::default() },
            lengths,
            ..simple
        };
        let data = AttentionData::generate(&dense);
        let expected = bits(&dense, &data, kernel, stream)?;
        for pattern in [BlockPattern::Random(1.0), BlockPattern::Seen] {
            for multiples in [[1, 1], [2, 2]] {
                let block_mask = Some(block(tile, multiples, pattern));
                let sparse = AttentionCase { block_mask, ..dense.clone() };
                if tile.block_rows > 1 && mask == window && pattern == BlockPattern::Seen {
                    let reference = AttentionReference::compute(&sparse, &data, BUDGET);
                    compared += run_or_refuse(&sparse, &data, &reference, kernel, stream)?;
                    continue;
                }
                if bits(&sparse, &data, kernel, stream)? != expected {
                    return Err(format!("not the bits of dense attention\n    {sparse:?}"));
                }
                compared += 2;
            }
        }
    }
    Ok(compared)
}

/// Rows of very unequal length, for several heads of several entries.
fn uneven(tile: &AttentionTile, pattern: BlockPattern) -> AttentionCase {
    AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 600, seqlen_kv: 1300 },
        scores: Mask::causal().into(),
        block_mask: Some(block(tile, [1, 1], pattern)),
        ..AttentionCase::of_tile(tile, (4, 2), (0, 0))
    }
}

fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let case = uneven(tile, BlockPattern::EmptyRowsAndColumns);
    same_bits(&case, kernel, stream)
}

/// Captures a call once and replays it with other numbers under the same mask.
fn replays_a_graph(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let dense = Lengths::Dense { batch: 2, seqlen_q: 300, seqlen_kv: 700 };
    let packed = Lengths::Packed { lengths: vec![(200, 400), (0, 3), (300, 700)], slack: (1, 0) };
    let replayed = [dense, packed].map(|lengths| replays(lengths, kernel, tile, stream));
    replayed.into_iter().sum()
}

fn replays(
    lengths: Lengths,
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let case = AttentionCase {
        lengths,
        scores: Scores { mask: Mask::Full, sink: Some(()), ..Scores::default() },
        ..uneven(tile, BlockPattern::Random(0.5))
    };
    let data = |seed| AttentionData::generate(&AttentionCase { seed, ..case.clone() });
    let mut inputs = AttentionInputs::upload(&case, &data(1), stream)?;
    let mut outputs = AttentionOutputs::poisoned(&case, stream)?;
    let graph = stream
        .capture(|stream| outputs.launch(&inputs, Choice::This(kernel), stream))
        .map_err(|error| format!("capture: {error}"))?;
    let mut compared = 0;
    for data in [1, 2, 3].map(data) {
        let reference = AttentionReference::compute(&case, &data, BUDGET);
        inputs.refill(&case, &data, stream)?;
        outputs.poison(stream)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay of {} with {case:?}", kernel.image_name()))?;
        compared += outputs
            .check(&case, &reference, stream)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(compared)
}

/// Keys and values that no query of an entry attends are NaN or infinite: not a bit changes.
fn unvisited_nan_is_not_read(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    let mut compared = 0;
    for pattern in [BlockPattern::EmptyRowsAndColumns, BlockPattern::Random(0.1)] {
        let case = AttentionCase { scores: Mask::Full.into(), ..uneven(tile, pattern) };
        let blocks = Blocks::of(&case).expect("the case has a block mask");
        let clean = AttentionData::generate(&case);
        let mut dirty = clean.clone();
        let (d, block) = (case.head_dim, case.block_mask.expect("it was just read"));
        let mut planted = 0;
        for (entry, key, head) in
            (0..2).flat_map(|b| (0..1300).flat_map(move |j| [0, 1].map(|h| (b, j, h))))
        {
            let mut queries = (0..600).step_by(block.block_q);
            if !queries.any(|i| blocks.visits(entry, 2 * head, i, key)) {
                let at = ((entry * 1300 + key) * 2 + head) * d;
                dirty.k[at..][..d].fill([f32::NAN, f32::INFINITY][key % 2]);
                dirty.v[at..][..d].fill([f32::NEG_INFINITY, f32::NAN][key / 2 % 2]);
                planted += 1;
            }
        }
        if planted == 0 && pattern == BlockPattern::EmptyRowsAndColumns {
            return Err(format!("every key is visited\n    {case:?}"));
        }
        if bits(&case, &dirty, kernel, stream)? != bits(&case, &clean, kernel, stream)? {
            return Err(format!("keys that are not visited act\n    {case:?}"));
        }
        compared += 2;
    }
    Ok(compared)
}

/// Whatever the blocks, the library has a kernel.
#[test]
fn every_block_size_is_selected() {
    let Some(gpu) = gpu("block_sparse_gpu::every_block_size_is_selected") else { return };
    let mut failures = Vec::new();
    for (turn, (block_q, block_kv)) in [64, 128, 192, 320, 384, 1024]
        .into_iter()
        .flat_map(|q| [64, 128, 192, 640].map(|kv| (q, kv)))
        .enumerate()
    {
        let dtype = [DType::F16, DType::BF16][turn % 2];
        let head_dim = [64, 128, 96, 256, 8, 192, 120][turn % 7];
        let pattern = BlockPattern::Random(0.6);
        let block =
            BlockCase { block_q, block_kv, per_entry: false, heads: MaskHeads::Query, pattern };
        let case = AttentionCase {
            scores: [Mask::Full, Mask::causal()][turn / 2 % 2].into(),
            block_mask: Some(block),
            ..AttentionCase::simple(dtype, (4, 1), head_dim, (700, 900))
        };
        failures.extend(run_case(&case, Choice::Selected, &gpu.stream).err());
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}
