//! Kernels whose CTAs compute two block rows, against the oracle: lists that share everything,
//! something or nothing, and equal bits in every repeat.

use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_ops::{Kernel, Stream};
use blockflash_sys::manifest::AttentionTile;
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, BlockCase, BlockPattern,
    Choice, Content, Lengths, MaskHeads, Pairs, run_case,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, say, wait};
use blockflash_tests::placement::Placement;

type Tiled = (&'static Kernel, AttentionTile);

#[test]
fn every_kernel_of_two_block_rows() {
    let Some(gpu) = gpu("block_rows_gpu::every_kernel_of_two_block_rows") else { return };
    let tiled = |kernel: &'static Kernel| Some((kernel, kernel.attention_tile()?));
    let pairs: Vec<Tiled> =
        gpu.kernels().filter_map(tiled).filter(|(_, tile)| tile.block_rows == 2).collect();
    if pairs.is_empty() {
        say("SKIPPED (no kernel of two block rows): block_rows_gpu");
        return;
    }
    let check = |(kernel, tile): Tiled, gpu: &Gpu, report: &mut Report| {
        for case in hostile_lists(&tile) {
            report.run(kernel, || run_case(&case, Choice::This(kernel), &gpu.stream));
        }
        report.run(kernel, || repeats_its_bits(kernel, &tile, &gpu.stream));
    };
    gpu.check_groups("block_rows_gpu", &Report::default(), pairs, check);
}

/// Every kind of pair under every token mask: odd numbers of block rows, a single row, sequences
/// of unequal length; contents, options and strides take turns.
fn hostile_lists(tile: &AttentionTile) -> Vec<AttentionCase> {
    let window = |left, right| Mask::Window { left, right, align: Align::BottomRight };
    let masks = [
        Mask::Full,
        Mask::causal(),
        Mask::Causal { align: Align::TopLeft },
        window(Some(300), Some(70)),
        window(Some(3), Some(0)),
    ];
    let contents =
        [Content::Normal, Content::UnseenNan, Content::LargeScores, Content::NanInValues];
    let patterns = Pairs::ALL.map(BlockPattern::Pairs).into_iter().chain([
        BlockPattern::Random(0.05),
        BlockPattern::Random(0.25),
        BlockPattern::EmptyRowsAndColumns,
        BlockPattern::Random(0.0),
    ]);
    let lengths = [(1217, 1351), (1152, 1400), (1100, 1100), (64, 1000), (65, 600), (1, 700)];
    let mut cases = Vec::new();
    for (pattern, mask) in patterns.flat_map(|pattern| masks.map(|mask| (pattern, mask))) {
        let turn = cases.len();
        // The kinds of pairs need many rows.
        let (seqlen_q, seqlen_kv) = lengths[if turn % 5 < 3 { turn % 3 } else { turn % 6 }];
        let dense = Lengths::Dense { batch: 1 + turn % 2, seqlen_q, seqlen_kv };
        let packed = Lengths::Packed {
            lengths: vec![(seqlen_q, seqlen_kv), (0, 70), (200, 0), (333, 900), (1, 1)],
            slack: (2, 1),
        };
        let block_mask = Some(BlockCase {
            block_q: 64,
            block_kv: [64, 64, 128][turn % 3],
            per_entry: turn % 4 < 2,
            heads: [MaskHeads::Query, MaskHeads::KeyValue, MaskHeads::One][turn / 2 % 3],
            pattern,
        });
        let is_packed = turn % 7 == 4;
        let gapped = Placement { order: vec![0, 2, 1, 3], padding: vec![(1, 0), (0, 2), (1, 1)] };
        let placement = if turn % 4 == 1 && !is_packed { gapped } else { Placement::default() };
        cases.push(AttentionCase {
            seed: 4000 + turn as u64,
            scores: Scores {
                mask,
                softcap: (turn % 6 == 5).then_some(5.0),
                sink: (turn % 5 > 2).then_some(()),
                ..Scores::default()
            },
            block_mask,
            lengths: if is_packed { packed } else { dense },
            content: contents[turn % contents.len()],
            placements: std::array::from_fn(|_| placement.clone()),
            ..AttentionCase::of_tile(tile, [(4, 2), (3, 3), (2, 1)][turn % 3], (0, 0))
        });
    }
    cases
}

/// More pairs of rows than multiprocessors, with lists of every kind of length, a thousand times.
fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    stream: &Stream,
) -> Result<usize, String> {
    for pattern in [BlockPattern::Random(0.25), BlockPattern::Pairs(Pairs::Gaps)] {
        let case = AttentionCase {
            scores: Mask::causal().into(),
            block_mask: Some(BlockCase {
                block_q: 64,
                block_kv: 64,
                per_entry: false,
                heads: MaskHeads::Query,
                pattern,
            }),
            ..AttentionCase::of_tile(tile, (32, 8), (1217, 1351))
        };
        let inputs = AttentionInputs::upload(&case, &AttentionData::generate(&case), stream)?;
        let mut outputs = AttentionOutputs::poisoned(&case, stream)?;
        let mut first = None;
        for repeat in 0..500 {
            // Several launches back to back, so that one begins before the previous one ends.
            for _ in 0..3 {
                outputs
                    .launch(&inputs, Choice::This(kernel), stream)
                    .map_err(|error| error.to_string())?;
            }
            wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
            let bits = outputs.bits(stream)?;
            if *first.get_or_insert_with(|| bits.clone()) != bits {
                return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
            }
        }
    }
    Ok(1000)
}
