use super::*;
use crate::attention::{BlockCase, BlockPattern, Content, Lengths, MaskHeads};
use approx::{abs_diff_eq, assert_abs_diff_eq};
use blockflash_ops::attention::{Align, Scores};

fn reference(case: &AttentionCase) -> (AttentionData, AttentionReference) {
    let data = AttentionData::generate(case);
    let reference = AttentionReference::compute(case, &data, f64::INFINITY);
    (data, reference)
}

fn case(seqlen: (usize, usize)) -> AttentionCase {
    AttentionCase::simple(DType::F16, (2, 1), 8, seqlen)
}

#[test]
fn one_key_returns_its_value() {
    let (data, reference) = reference(&case((3, 1)));
    for (row, &[_, i, h]) in reference.rows.iter().enumerate() {
        let q = &data.q[(i * 2 + h) * 8..][..8];
        let score: f64 = q.iter().zip(&data.k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        assert_abs_diff_eq!(reference.lse.exact[row], score / 8f64.sqrt(), epsilon = 1e-6);
        for e in 0..8 {
            assert_eq!(reference.o.exact[row * 8 + e], f64::from(data.v[e]));
            assert_eq!(reference.o.plain[row * 8 + e], f64::from(data.v[e]));
        }
    }
}

#[test]
fn masks_by_their_definition() {
    let mask = |mask: Mask, seqlen: (usize, usize), query| {
        let case = AttentionCase { scores: mask.into(), ..case(seqlen) };
        visible_keys(&case, &case.sequences()[0], query)
    };
    let causal = |align| Mask::Causal { align };
    assert_eq!(mask(Mask::Full, (4, 6), 1), 0..6);
    assert_eq!(mask(causal(Align::TopLeft), (4, 6), 1), 0..2);
    assert_eq!(mask(causal(Align::BottomRight), (4, 6), 1), 0..4);
    assert_eq!(mask(causal(Align::BottomRight), (6, 4), 1), 0..0);
    assert_eq!(mask(causal(Align::BottomRight), (6, 4), 5), 0..4);
    assert_eq!(mask(causal(Align::TopLeft), (6, 4), 5), 0..4);
    let window = |left, right, align| Mask::Window { left, right, align };
    assert_eq!(mask(window(Some(1), Some(2), Align::TopLeft), (9, 9), 4), 3..7);
    assert_eq!(mask(window(Some(1), None, Align::TopLeft), (9, 9), 4), 3..9);
    assert_eq!(mask(window(None, Some(2), Align::BottomRight), (5, 9), 0), 0..7);
    assert_eq!(mask(window(Some(0), Some(0), Align::TopLeft), (9, 3), 4), 3..3);
    assert_eq!(mask(window(Some(usize::MAX), Some(usize::MAX), Align::TopLeft), (2, 3), 1), 0..3);
}

#[test]
fn empty_rows_are_zero_and_sinks_join_the_sum() {
    let (_, empty) = reference(&case((2, 0)));
    assert!(empty.o.exact.iter().chain(&empty.o.plain).all(|&o| o == 0.0));
    assert!(empty.lse.exact.iter().chain(&empty.lse.plain).all(|&lse| lse == f64::NEG_INFINITY));
    let (data, sink) = reference(&AttentionCase {
        scores: Scores { sink: Some(()), ..Scores::default() },
        ..case((2, 0))
    });
    assert!(sink.o.exact.iter().chain(&sink.o.plain).all(|&o| o == 0.0));
    for (row, &[_, _, h]) in sink.rows.iter().enumerate() {
        assert_eq!(sink.lse.exact[row], f64::from(data.sink[h]));
        assert_eq!(sink.lse.plain[row], f64::from(data.sink[h]));
    }
}

#[test]
fn the_plain_computation_is_close_in_every_option() {
    for (content, softcap, sink) in [
        (Content::Normal, None, false),
        (Content::Normal, Some(2.0), true),
        (Content::LargeScores, None, true),
        (Content::GrowingMaxima, Some(30.0), false),
        (Content::OneHugeLogit, None, false),
        (Content::HugeScores, None, false),
    ] {
        for dtype in [DType::F16, DType::BF16] {
            let case = AttentionCase {
                dtype,
                lengths: Lengths::Packed {
                    lengths: vec![(5, 40), (0, 3), (33, 70)],
                    slack: (2, 1),
                },
                scores: Scores {
                    mask: Mask::Causal { align: Align::BottomRight },
                    softcap,
                    sink: sink.then_some(()),
                    ..Scores::default()
                },
                content,
                head_dim: 32,
                ..case((0, 0))
            };
            let (_, reference) = reference(&case);
            assert_eq!(reference.rows.len(), 38 * 2);
            let bound = 8.0 * crate::number::unit_roundoff(dtype);
            for (i, &exact) in reference.o.exact.iter().enumerate() {
                let plain = reference.o.plain[i];
                let close = abs_diff_eq!(plain, exact, epsilon = bound * (1.0 + exact.abs()));
                assert!(close, "{case:?} {i} {exact} {plain}");
            }
            for (&exact, &plain) in reference.lse.exact.iter().zip(&reference.lse.plain) {
                let close = abs_diff_eq!(plain, exact, epsilon = 1e-6 * (10.0 + exact.abs()));
                assert!(close, "{case:?} {exact} {plain}");
            }
        }
    }
}

#[test]
fn nan_shows_exactly_where_it_is_seen() {
    let causal = Mask::Causal { align: Align::TopLeft };
    for content in [Content::NanInKeys, Content::NanInValues] {
        let case = AttentionCase { scores: causal.into(), content, ..case((40, 40)) };
        let (data, reference) = reference(&case);
        let nan_from = |t: &[f32]| t.iter().position(|x| x.is_nan()).map(|at| at / 8);
        let first = nan_from(&data.k).or(nan_from(&data.v)).unwrap();
        for (row, &[_, i, _]) in reference.rows.iter().enumerate() {
            let any = reference.o.exact[row * 8..][..8].iter().any(|o| o.is_nan());
            assert_eq!(any, i >= first, "row {i}, NaN from key {first}");
        }
    }
    let case =
        AttentionCase { scores: causal.into(), content: Content::UnseenNan, ..case((10, 40)) };
    let (data, reference) = reference(&case);
    assert!(data.k.iter().any(|k| k.is_nan()) && data.v.iter().any(|v| v.is_infinite()));
    assert!(reference.o.exact.iter().chain(&reference.o.plain).all(|o| o.is_finite()));
}

#[test]
fn stress_contents_are_what_they_say() {
    let scores = |content| {
        let case = AttentionCase { content, head_dim: 64, ..case((50, 50)) };
        let (_, reference) = reference(&case);
        reference.lse.magnitude.iter().copied().fold(0.0, f64::max)
    };
    assert!(scores(Content::LargeScores) > 80.0);
    assert!(scores(Content::GrowingMaxima) > 40.0);
    assert!(scores(Content::OneHugeLogit) > 60.0);
    assert!(scores(Content::HugeScores) > 1e7);
    assert!(scores(Content::Normal) < 8.0);
}

#[test]
fn large_cases_are_sampled_within_the_budget() {
    let case = AttentionCase { head_dim: 64, ..case((300, 300)) };
    let data = AttentionData::generate(&case);
    let reference = AttentionReference::compute(&case, &data, 1e6);
    assert!(reference.rows.len() > 8 && reference.rows.len() < 60, "{}", reference.rows.len());
    assert!(reference.rows.contains(&[0, 0, 0]) && reference.rows.contains(&[0, 299, 1]));
}

#[test]
fn block_masks_by_their_definition() {
    let pattern = BlockPattern::Random(0.5);
    let dense = Lengths::Dense { batch: 2, seqlen_q: 150, seqlen_kv: 300 };
    let packed = Lengths::Packed { lengths: vec![(140, 330), (150, 300)], slack: (3, 1) };
    for (heads, per_entry, lengths) in [
        (MaskHeads::One, false, &dense),
        (MaskHeads::KeyValue, true, &dense),
        (MaskHeads::Query, false, &dense),
        (MaskHeads::One, true, &packed),
        (MaskHeads::KeyValue, true, &packed),
    ] {
        let block_mask = Some(BlockCase { block_q: 64, block_kv: 128, per_entry, heads, pattern });
        let case = AttentionCase {
            lengths: lengths.clone(),
            scores: Mask::Causal { align: Align::TopLeft }.into(),
            block_mask,
            ..AttentionCase::simple(DType::F16, (4, 2), 8, (0, 0))
        };
        let blocks = Blocks::of(&case).unwrap();
        let stream = blockflash_ops::Device::cpu().stream().unwrap();
        let mask = case.block_mask(&stream).unwrap().unwrap();
        assert_eq!(blocks.count(), (mask.nnz(), mask.batch() * mask.heads() * 9));
        for at @ [b, i, h] in
            [[0, 0, 0], [0, 63, 1], [1, 64, 2], [1, 127, 3], [0, 128, 3], [1, 149, 0]]
        {
            let head = match heads {
                MaskHeads::One => 0,
                MaskHeads::KeyValue => h / 2,
                MaskHeads::Query => h,
            };
            let columns: Vec<usize> =
                mask.row(if per_entry { b } else { 0 }, head, i / 64).unwrap().collect();
            let expected: Vec<usize> = (0..=i).filter(|j| columns.contains(&(j / 128))).collect();
            let sequence = case.sequences()[b];
            let attended: Vec<usize> = case.attended_keys(Some(&blocks), at, &sequence).collect();
            assert_eq!(attended, expected, "{heads:?} {at:?}");
        }
        // A row that attends nothing is 0.
        let (_, reference) = reference(&case);
        for (row, &at) in reference.rows.iter().enumerate() {
            let sequence = case.sequences()[at[0]];
            let nothing = case.attended_keys(Some(&blocks), at, &sequence).next().is_none();
            assert_eq!(reference.lse.exact[row] == f64::NEG_INFINITY, nothing);
            assert!(!nothing || reference.o.exact[row * 8..][..8] == [0.0; 8]);
        }
    }
}
