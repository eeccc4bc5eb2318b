//! Every kernel of attention forward in e4m3 against the f64 oracle of what its codes and scales
//! stand for.

use blockflash_ops::attention::{Mask, Scores};
use blockflash_ops::{DType, Kernel};
use blockflash_sys::manifest::{AttentionTile, Variant};
use blockflash_tests::attention::persistent::{
    repeats_its_bits, replays_graphs, shares_the_gpu, stress, without_keys,
};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionReference, Codes, Content, Lengths, Limits, MoreContent,
    OperandScale, attention_cases, block_sparse_cases, block_tile_cases, edge_cases, run_or_refuse,
    special_cases, tile_cases,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, say};
use blockflash_tests::property::samples;

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 1e7;

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_fwd_e4m3_gpu::every_kernel") else { return };
    let of_codes = |kernel: &&Kernel| matches!(kernel.variant, Variant::AttentionFwdE4m3(_));
    let kernels: Vec<_> = gpu
        .kernels()
        .filter(of_codes)
        .filter_map(|kernel| Some((kernel, kernel.attention_tile()?)))
        .collect();
    if kernels.is_empty() {
        say("SKIPPED (no kernel of e4m3 to run): attention_fwd_e4m3_gpu::every_kernel");
        return;
    }
    let check = |(kernel, tile): (&'static Kernel, AttentionTile),
                 gpu: &Gpu,
                 report: &mut Report| {
        let prepare = |case: &AttentionCase| {
            let data = AttentionData::generate(case);
            let reference = AttentionReference::compute(case, &data, BUDGET);
            (data, reference)
        };
        report.run_cases(
            gpu,
            &all_cases(&tile),
            &[(kernel, tile)],
            prepare,
            |case, (data, reference), (kernel, _), stream| {
                run_or_refuse(case, data, reference, kernel, stream)
            },
        );
        let story =
            |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
        for seed in [1, 2] {
            report.run(kernel, || {
                repeats_its_bits(kernel, &tile, gpu, seed, 100).map_err(story("repeat"))
            });
        }
        report.run(kernel, || shares_the_gpu(kernel, &tile, gpu).map_err(story("two streams")));
        report.run(kernel, || replays_graphs(kernel, &tile, gpu).map_err(story("graphs")));
    };
    gpu.check_groups("attention_fwd_e4m3_gpu", &Report::default(), kernels, check);
}

/// Edges of tiles, contents that are hard to sum, block masks, and random cases. Scales and more
/// contents take turns.
fn all_cases(tile: &AttentionTile) -> Vec<AttentionCase> {
    let (o, widest) = (tile.types.o, tile.head_dims.qk);
    let [block_q, block_kv] = [tile.block_q, tile.block_kv].map(|size| size as usize);
    let head_dims: Vec<usize> = (16..=widest).step_by(16).collect();
    let of_the_cpu = |case: &AttentionCase| case.content == Content::HugeScores;
    let mut cases = tile_cases(o, widest, block_q, block_kv);
    cases.extend(edge_cases(o, &head_dims, block_q, block_kv));
    cases.extend(special_cases(o, widest, block_kv));
    cases.extend(block_tile_cases(o, widest, tile.block_q, tile.block_kv));
    cases.extend(stress(tile));
    cases.extend(without_keys(tile));
    cases.extend(samples(60, attention_cases(limits(o, &head_dims))));
    cases.extend(samples(40, block_sparse_cases(limits(o, &head_dims))));
    cases.retain(|case| !of_the_cpu(case));
    let cases = cases.into_iter().enumerate();
    let coded = |(at, case): (usize, AttentionCase)| {
        let codes = Codes::drawn(block_kv, at as u64);
        // A content of its own is enough.
        let more = if case.content == Content::Normal { codes.more } else { MoreContent::Nothing };
        case.coded(Codes { more, ..codes })
    };
    cases.map(coded).chain(long_rows(tile)).chain(scaled(tile)).collect()
}

fn limits(o: DType, head_dims: &[usize]) -> Limits {
    Limits {
        dtypes: vec![o],
        head_dims: head_dims.to_vec(),
        seqlen: 700,
        alignment: 8,
        work: 20_000_000,
    }
}

/// Sums over thousands of keys, which lose their small terms without promotion.
fn long_rows(tile: &AttentionTile) -> Vec<AttentionCase> {
    let simple = |seqlen| AttentionCase::of_tile(tile, (2, 1), seqlen);
    let codes = |more| Codes { more, ..Codes::plain(tile.block_kv as usize) };
    MoreContent::ALL
        .into_iter()
        .flat_map(|more| {
            [(Mask::Full, (200, 9001)), (Mask::causal(), (3000, 3000))].map(|(mask, seqlen)| {
                let lse = more != MoreContent::Negative;
                AttentionCase { scores: mask.into(), lse, ..simple(seqlen) }.coded(codes(more))
            })
        })
        .collect()
}

/// Scales of every kind, of every tensor, dense and packed, and hostile ones.
fn scaled(tile: &AttentionTile) -> Vec<AttentionCase> {
    let hostile = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, -0.75, f32::MIN_POSITIVE];
    let lengths = [
        Lengths::Dense { batch: 3, seqlen_q: 70, seqlen_kv: 300 },
        Lengths::Packed { lengths: vec![(9, 200), (100, 0), (0, 7), (65, 129)], slack: (1, 2) },
    ];
    let mut cases = Vec::new();
    for lengths in lengths {
        for which in 0..3 {
            for scale in OperandScale::ALL {
                let turn = cases.len();
                let mut scales = [OperandScale::ALL[turn % 6]; 3];
                scales[which] = scale;
                // Hostile values take turns, each beside a case without one.
                let value = (scale != OperandScale::Absent).then(|| hostile[turn / 2 % 7]);
                for value in [None].into_iter().chain(value.map(Some)) {
                    let hostile = value.map(|value| (which, value));
                    let codes = Codes { scales, hostile, ..Codes::plain(tile.block_kv as usize) };
                    let mask = if turn % 2 == 0 { Mask::Full } else { Mask::causal() };
                    let sink = (turn % 3 == 2).then_some(());
                    let case = AttentionCase {
                        seed: cases.len() as u64,
                        lengths: lengths.clone(),
                        scores: Scores { sink, ..mask.into() },
                        ..AttentionCase::of_tile(tile, (6, 3), (0, 0))
                    };
                    cases.push(case.coded(codes));
                }
            }
        }
    }
    cases
}
