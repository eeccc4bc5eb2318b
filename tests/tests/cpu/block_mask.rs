//! Block-sparse attention on the CPU against the oracle.

use blockflash_ops::DType;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, BlockCase, BlockPattern,
    Blocks, Choice, Lengths, Limits, MaskHeads, block_cases, block_sparse_cases, block_tile_cases,
    head_dims, run_case,
};
use blockflash_tests::host::cpu;
use blockflash_tests::number::decode;
use blockflash_tests::property;

/// Bits of o and of the lse.
fn outputs(case: &AttentionCase, data: &AttentionData) -> [Vec<u32>; 2] {
    let stream = cpu();
    let inputs = AttentionInputs::upload(case, data, &stream).unwrap();
    let mut outputs = AttentionOutputs::poisoned(case, &stream).unwrap();
    outputs.launch(&inputs, Choice::Selected, &stream).unwrap();
    outputs.bits(&stream).unwrap()
}

fn block(block_q: usize, block_kv: usize, pattern: BlockPattern) -> Option<BlockCase> {
    Some(BlockCase { block_q, block_kv, per_entry: false, heads: MaskHeads::One, pattern })
}

#[test]
fn random_cases() {
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16, DType::F32],
        head_dims: head_dims(8..=128),
        seqlen: 400,
        alignment: 8,
        work: 3_000_000,
    };
    let stream = cpu();
    property::check(120, block_sparse_cases(limits), |case| {
        run_case(&case, Choice::Selected, &stream).map(drop)
    });
}

#[test]
fn densities_masks_and_block_sizes() {
    let stream = cpu();
    for (dtype, head_dim) in [(DType::F16, 64), (DType::BF16, 24), (DType::F32, 33)] {
        let cases = block_cases(dtype, head_dim);
        let failures: Vec<String> = cases
            .iter()
            .filter_map(|case| run_case(case, Choice::Selected, &stream).err())
            .collect();
        assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    }
}

/// What kernels with such tiles are asked.
#[test]
fn blocks_that_consist_of_tiles() {
    let stream = cpu();
    for (q, kv) in [(64, 64), (128, 32), (192, 128), (128, 80)] {
        let cases = block_tile_cases(DType::BF16, 16, q, kv);
        let failures: Vec<String> = cases
            .iter()
            .filter_map(|case| run_case(case, Choice::Selected, &stream).err())
            .collect();
        assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    }
}

#[test]
fn a_mask_that_hides_nothing_changes_nothing() {
    let (top, bottom) = (Align::TopLeft, Align::BottomRight);
    let window = |left, right, align| Mask::Window { left, right, align };
    let masks = [
        Mask::Full,
        Mask::Causal { align: top },
        Mask::Causal { align: bottom },
        window(Some(70), Some(3), top),
        window(Some(200), Some(0), bottom),
    ];
    let dense = |(seqlen_q, seqlen_kv)| Lengths::Dense { batch: 1, seqlen_q, seqlen_kv };
    let packed =
        Lengths::Packed { lengths: vec![(300, 300), (0, 9), (65, 129), (200, 70)], slack: (0, 0) };
    let lengths = [dense((300, 300)), dense((200, 450)), dense((330, 100)), packed];
    for (mask, lengths) in masks.into_iter().flat_map(|mask| lengths.clone().map(|l| (mask, l))) {
        let simple = AttentionCase::simple(DType::F32, (4, 2), 40, (0, 0));
        let plain = AttentionCase { scores: mask.into(), lengths, ..simple };
        let lengths = &plain.lengths;
        let data = AttentionData::generate(&plain);
        let expected = outputs(&plain, &data);
        // All blocks, or those that the token mask shows anything of: causal blocks with a causal
        // mask.
        for pattern in [BlockPattern::Random(1.0), BlockPattern::Seen] {
            for (block_q, block_kv) in [(64, 64), (128, 64), (64, 128), (128, 128)] {
                let block_mask = block(block_q, block_kv, pattern);
                let got = outputs(&AttentionCase { block_mask, ..plain.clone() }, &data);
                let all = pattern == BlockPattern::Random(1.0) && block_q == 128;
                assert!(!all || got == expected, "{mask:?} {lengths:?}: not the same bits");
                for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
                    let [got, expected] = [got, expected].map(|&bits| decode(DType::F32, bits));
                    let epsilon = 4e-6 * (1.0 + expected.abs());
                    assert!(
                        got == expected || approx::abs_diff_eq!(got, expected, epsilon = epsilon),
                        "{mask:?} {lengths:?} {pattern:?}: {got} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_without_blocks_are_zero() {
    let case = AttentionCase {
        block_mask: block(64, 64, BlockPattern::Random(0.0)),
        ..AttentionCase::simple(DType::F32, (2, 1), 16, (100, 200))
    };
    let data = AttentionData::generate(&case);
    let [o, lse] = outputs(&case, &data);
    assert!(o.iter().all(|&bits| f32::from_bits(bits) == 0.0));
    assert!(lse.iter().all(|&bits| f32::from_bits(bits) == f32::NEG_INFINITY));
    let [o, lse] =
        outputs(&AttentionCase { scores: Scores { sink: Some(()), ..case.scores }, ..case }, &data);
    assert!(o.iter().all(|&bits| f32::from_bits(bits) == 0.0));
    for (at, &bits) in lse.iter().enumerate() {
        // The sink alone.
        approx::assert_abs_diff_eq!(f32::from_bits(bits), data.sink[at / 100], epsilon = 1e-6);
    }
}

/// NaN in every key and value that no visited block holds, for one head and for several that share
/// it.
#[test]
fn nan_in_blocks_that_are_not_visited_does_not_leak() {
    for (heads, per_entry) in [MaskHeads::One, MaskHeads::KeyValue, MaskHeads::Query]
        .into_iter()
        .flat_map(|h| [(h, false), (h, true)])
    {
        let pattern = BlockPattern::EmptyRowsAndColumns;
        let dirty = AttentionCase {
            lengths: Lengths::Dense { batch: 2, seqlen_q: 300, seqlen_kv: 500 },
            block_mask: Some(BlockCase { block_q: 64, block_kv: 64, per_entry, heads, pattern }),
            ..AttentionCase::simple(DType::F16, (4, 2), 32, (0, 0))
        };
        let blocks = Blocks::of(&dirty).unwrap();
        let clean = AttentionData::generate(&dirty);
        let mut data = clean.clone();
        let mut planted = 0;
        for (entry, head, key) in (0..2 * 2 * 500).map(|at| (at / 1000, at / 500 % 2, at % 500)) {
            let unseen =
                (0..300).all(|i| (0..2).all(|h| !blocks.visits(entry, head * 2 + h, i, key)));
            if unseen {
                let row = ((entry * 500 + key) * 2 + head) * 32;
                data.k[row..][..32].fill(f32::NAN);
                data.v[row..][..32].fill([f32::NAN, f32::INFINITY][key % 2]);
                planted += 1;
            }
        }
        assert!(planted > 0 && blocks.count().0 > 0);
        assert!(outputs(&dirty, &data) == outputs(&dirty, &clean), "{heads:?}");
    }
}

#[test]
fn every_property_of_a_mask_acts() {
    let base = AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 300, seqlen_kv: 300 },
        ..AttentionCase::simple(DType::F16, (4, 2), 32, (0, 0))
    };
    let data = AttentionData::generate(&base);
    let with = |block_q, block_kv, per_entry, heads, density| {
        let pattern = BlockPattern::Random(density);
        let block_mask = Some(BlockCase { block_q, block_kv, per_entry, heads, pattern });
        outputs(&AttentionCase { block_mask, ..base.clone() }, &data)
    };
    let results = [
        outputs(&base, &data),
        with(64, 64, false, MaskHeads::One, 0.5),
        with(64, 64, false, MaskHeads::One, 0.7),
        with(128, 64, false, MaskHeads::One, 0.5),
        with(64, 128, false, MaskHeads::One, 0.5),
        with(64, 64, true, MaskHeads::One, 0.5),
        with(64, 64, false, MaskHeads::KeyValue, 0.5),
        with(64, 64, false, MaskHeads::Query, 0.5),
    ];
    for (i, j) in (0..results.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
        assert!(
            results[i][0] != results[j][0] && results[i][1] != results[j][1],
            "{i} and {j} are the same"
        );
    }
}

#[test]
fn repeats_are_equal_bit_by_bit() {
    let case = AttentionCase {
        scores: Mask::causal().into(),
        block_mask: block(64, 128, BlockPattern::Random(0.4)),
        ..AttentionCase::simple(DType::BF16, (6, 2), 40, (500, 700))
    };
    let data = AttentionData::generate(&case);
    let first = outputs(&case, &data);
    assert!((0..10).all(|_| outputs(&case, &data) == first));
}
