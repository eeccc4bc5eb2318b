//! Attention problems at the edges of a kernel's tiles, and the ones that broke other libraries.

use super::{AttentionCase, Content, Lengths};
use crate::placement::Placement;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::DType;

const TOP: Align = Align::TopLeft;
const BOTTOM: Align = Align::BottomRight;

/// Token masks of every kind, windows about as wide as a tile of keys.
pub(super) fn some_masks(block_kv: usize) -> [Mask; 11] {
    let window = |left, right, align| Mask::Window { left, right, align };
    [
        Mask::Full,
        Mask::Causal { align: BOTTOM },
        Mask::Causal { align: TOP },
        window(Some(block_kv), Some(0), BOTTOM),
        window(Some(3), Some(5), TOP),
        window(None, Some(block_kv - 1), BOTTOM),
        window(Some(block_kv + 1), None, TOP),
        window(Some(0), Some(0), BOTTOM),
        window(Some(2 * block_kv), Some(17), BOTTOM),
        window(Some(block_kv - 1), Some(0), TOP),
        window(None, None, BOTTOM),
    ]
}

/// A batch of equal lengths.
pub(super) fn dense(batch: usize, seqlen_q: usize, seqlen_kv: usize) -> Lengths {
    Lengths::Dense { batch, seqlen_q, seqlen_kv }
}

/// For tiles of `q` queries and `kv` keys: every pair of sequence lengths from 0 or 1 to three
/// tiles and one, with masks, head counts and head dimensions taking turns.
pub fn edge_cases(dtype: DType, head_dims: &[usize], q: usize, kv: usize) -> Vec<AttentionCase> {
    let masks = some_masks(kv);
    let queries = [1, q - 1, q, q + 1, 2 * q, 3 * q - 1, 3 * q + 1];
    let keys = [0, 1, kv - 1, kv, kv + 1, 2 * kv, 3 * kv - 1, 3 * kv + 1];
    let mut cases = Vec::new();
    for seqlen_q in queries {
        for seqlen_kv in keys {
            let turn = cases.len();
            cases.push(AttentionCase {
                seed: turn as u64,
                scores: Scores {
                    mask: masks[turn % masks.len()],
                    sink: (turn % 5 == 4).then_some(()),
                    ..Scores::default()
                },
                lengths: dense(1 + turn % 2, seqlen_q, seqlen_kv),
                ..AttentionCase::simple(
                    dtype,
                    [(1, 1), (2, 1), (7, 1), (4, 2), (3, 3)][turn % 5],
                    head_dims[(turn * 7) % head_dims.len()],
                    (0, 0),
                )
            });
        }
    }
    cases
}

/// For tiles of `q` queries and `kv` keys: all pairs of sequence lengths next to one, two and three
/// tiles, without a mask and causal.
pub fn tile_cases(dtype: DType, head_dim: usize, q: usize, kv: usize) -> Vec<AttentionCase> {
    let lengths = |tile| {
        [1, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile + 1, 3 * tile - 1, 3 * tile + 1]
    };
    let mut cases = Vec::new();
    for (seqlen_q, seqlen_kv) in lengths(q).into_iter().flat_map(|i| lengths(kv).map(|j| (i, j))) {
        for mask in [Mask::Full, Mask::Causal { align: BOTTOM }] {
            let simple = AttentionCase::simple(dtype, (2, 1), head_dim, (seqlen_q, seqlen_kv));
            cases.push(AttentionCase {
                seed: 500 + cases.len() as u64,
                scores: mask.into(),
                ..simple
            });
        }
    }
    cases
}

/// Planted NaN, stress contents, all options at once, layouts, grouped heads, packed batches with
/// empty sequences.
pub fn special_cases(dtype: DType, head_dim: usize, block_kv: usize) -> Vec<AttentionCase> {
    let base = |heads, seqlen| AttentionCase::simple(dtype, heads, head_dim, seqlen);
    let long = 2 * block_kv + 9;
    let mut cases = Vec::new();
    for (turn, mask) in some_masks(block_kv).into_iter().enumerate() {
        for content in [
            Content::UnseenNan,
            Content::NanInKeys,
            Content::NanInValues,
            Content::LargeScores,
            Content::GrowingMaxima,
            Content::OneHugeLogit,
            Content::HugeScores,
        ] {
            let seqlen = if turn % 2 == 0 { (70, long + 70) } else { (long, block_kv + 1) };
            cases.push(AttentionCase {
                seed: 100 + turn as u64,
                scores: Scores {
                    mask,
                    // The log-sum-exp of huge scores is exact then, for the reference of gradients.
                    softmax_scale: (content == Content::HugeScores).then_some(0.125),
                    ..Scores::default()
                },
                content,
                ..base((2, 1), seqlen)
            });
        }
        let packed = Lengths::Packed {
            lengths: vec![(0, 5), (1, 0), (129, long), (0, 0), (33, 1), (5, block_kv), (64, 64)],
            slack: (turn % 3, 2 - turn % 3),
        };
        cases.push(AttentionCase {
            seed: 200 + turn as u64,
            scores: mask.into(),
            lengths: packed.clone(),
            ..base((4, 2), (0, 0))
        });
        cases.push(AttentionCase {
            seed: 300 + turn as u64,
            scores: Scores {
                softcap: Some(5.0),
                softmax_scale: Some(0.3),
                sink: Some(()),
                ..mask.into()
            },
            lengths: packed,
            content: Content::UnseenNan,
            placements: [
                gapped(3, &[]),
                gapped(3, &[1, 0, 2]),
                gapped(3, &[]),
                gapped(3, &[1, 0, 2]),
            ],
            lse_placement: Placement { order: vec![], padding: vec![(0, 1), (3, 1)] },
            ..base((7, 1), (0, 0))
        });
        cases.push(AttentionCase {
            seed: 400 + turn as u64,
            scores: Scores {
                softcap: Some(20.0),
                softmax_scale: Some(0.25),
                sink: Some(()),
                ..mask.into()
            },
            lengths: dense(2, 77, long),
            broadcast_kv: turn % 3 == 1,
            lse: turn % 4 != 3,
            placements: [
                gapped(4, &[0, 2, 1, 3]),
                gapped(4, &[]),
                gapped(4, &[2, 1, 0, 3]),
                gapped(4, &[1, 0, 2, 3]),
            ],
            lse_placement: Placement {
                order: vec![1, 0, 2],
                padding: vec![(1, 0), (0, 2), (5, 0)],
            },
            ..base((6, 3), (0, 0))
        });
    }
    let causal = Mask::Causal { align: BOTTOM };
    cases.extend([
        base((14, 2), (40, 40)),
        base((16, 1), (1, 8 * block_kv + 1)),
        AttentionCase { scores: causal.into(), ..base((8, 8), (1, 5 * block_kv)) },
        AttentionCase { lengths: dense(0, 5, 5), ..base((2, 1), (0, 0)) },
        AttentionCase { lengths: dense(2, 0, 5), ..base((2, 1), (0, 0)) },
        AttentionCase {
            lengths: dense(2, 5, 0),
            scores: Scores { sink: Some(()), ..Scores::default() },
            ..base((2, 1), (0, 0))
        },
        AttentionCase {
            lengths: Lengths::Packed { lengths: vec![(0, 0); 3], slack: (0, 0) },
            ..base((2, 1), (0, 0))
        },
        AttentionCase {
            lengths: Lengths::Packed { lengths: vec![(0, 9); 2], slack: (3, 0) },
            ..base((2, 1), (0, 0))
        },
        AttentionCase {
            lengths: Lengths::Packed { lengths: vec![(9, 0); 2], slack: (1, 0) },
            ..base((2, 1), (0, 0))
        },
        AttentionCase { scores: causal.into(), ..base((2, 2), (300, 20)) },
        AttentionCase { scores: causal.into(), ..base((1, 1), (20, 1500)) },
    ]);
    cases
}

/// More heads times batch than a grid's second dimension could count.
pub fn many_heads(dtype: DType, head_dim: usize) -> Vec<AttentionCase> {
    vec![
        AttentionCase {
            lengths: dense(257, 1, 3),
            ..AttentionCase::simple(dtype, (256, 1), head_dim, (0, 0))
        },
        AttentionCase {
            lengths: dense(65_537, 1, 2),
            ..AttentionCase::simple(dtype, (1, 1), head_dim, (0, 0))
        },
    ]
}

/// Gaps in every dimension that keep rows at multiples of 8 elements.
fn gapped(rank: usize, order: &[usize]) -> Placement {
    let mut padding = vec![(1, 2); rank - 1];
    padding.push((8, 16));
    Placement { order: order.to_vec(), padding }
}
