//! Attention problems with block masks: densities, block sizes, heads, token masks, tails, packed
//! sequences.

use super::edges::{dense, some_masks};
use super::{AttentionCase, BlockCase, BlockPattern, Content, Lengths, MaskHeads, smallest_block};
use blockflash_ops::attention::{Mask, Scores};
use blockflash_sys::DType;

/// From nothing to everything, holes in both directions, and what the token mask shows anyway.
fn patterns() -> impl Iterator<Item = BlockPattern> {
    let random = [0.0, 0.05, 0.3, 0.5, 0.8, 1.0].map(BlockPattern::Random);
    random.into_iter().chain([BlockPattern::EmptyRowsAndColumns, BlockPattern::Seen])
}

/// Sequences up to these lengths: tails, nothing on either side, and what is shorter than a block.
fn packed(turn: usize, seqlen_q: usize, seqlen_kv: usize) -> Lengths {
    let lengths = vec![
        (seqlen_q / 2, seqlen_kv),
        (0, seqlen_kv / 3),
        (seqlen_q, seqlen_kv / 2 + 1),
        (0, 0),
        (65, 0),
        (seqlen_kv % 70, seqlen_q % 150),
    ];
    Lengths::Packed { lengths, slack: (turn % 3, turn % 2) }
}

/// Every pattern with every token mask, one after the other dense and packed; block sizes, heads,
/// lengths, options and contents take turns.
pub fn block_cases(dtype: DType, head_dim: usize) -> Vec<AttentionCase> {
    let sizes = [(64, 64), (128, 64), (64, 128), (128, 128), (192, 64), (64, 320)];
    let lengths =
        [(300, 300), (200, 333), (333, 70), (64, 512), (1, 500), (257, 129), (400, 1), (129, 0)];
    let mut cases = Vec::new();
    for is_packed in [false, true] {
        for (pattern, mask) in
            patterns().flat_map(|pattern| some_masks(64).map(|mask| (pattern, mask)))
        {
            let turn = cases.len();
            let (sizes, (q, kv)) = (sizes[turn % sizes.len()], lengths[turn * 3 % lengths.len()]);
            let lengths =
                if is_packed { packed(turn, q, kv) } else { dense(1 + turn % 3 % 2, q, kv) };
            cases.push(block_case((dtype, head_dim), turn, pattern, mask, sizes, lengths));
        }
    }
    cases
}

/// For tiles of `q` queries and `kv` keys: every pattern in the smallest blocks that consist of
/// such tiles, dense and packed, and in multiples of them; the rest takes turns.
pub fn block_tile_cases(dtype: DType, head_dim: usize, q: u32, kv: u32) -> Vec<AttentionCase> {
    let (q, kv) = (smallest_block(&[q]), smallest_block(&[kv]));
    let masks = some_masks(kv);
    let lengths = [
        (3 * q + 5, 4 * kv + 7),
        (2 * q - 1, 3 * kv),
        (q, 5 * kv - 1),
        (4 * q + 1, kv),
        (1, 2 * kv + 1),
        (2 * q, 1),
        (q + 1, 0),
    ];
    let mut cases = Vec::new();
    for (multiples, is_packed) in
        [((1, 1), false), ((2, 1), false), ((1, 3), false), ((1, 1), true)]
    {
        for pattern in patterns() {
            let turn = cases.len();
            let (mask, (seqlen_q, seqlen_kv)) =
                (masks[turn % masks.len()], lengths[turn * 3 % lengths.len()]);
            let sizes = (multiples.0 * q, multiples.1 * kv);
            let lengths = match is_packed {
                true => packed(turn, seqlen_q, seqlen_kv),
                false => dense(1 + turn % 3 % 2, seqlen_q, seqlen_kv),
            };
            cases.push(block_case((dtype, head_dim), turn, pattern, mask, sizes, lengths));
        }
    }
    cases
}

fn block_case(
    (dtype, head_dim): (DType, usize),
    turn: usize,
    pattern: BlockPattern,
    mask: Mask,
    (block_q, block_kv): (usize, usize),
    lengths: Lengths,
) -> AttentionCase {
    let contents =
        [Content::Normal, Content::UnseenNan, Content::LargeScores, Content::NanInValues];
    let heads = [MaskHeads::Query, MaskHeads::KeyValue, MaskHeads::One][turn % 3];
    let heads_of = [(4, 2), (2, 2), (3, 1), (6, 2), (1, 1)][turn % 5];
    AttentionCase {
        seed: 700 + turn as u64,
        scores: Scores {
            mask,
            softcap: (turn % 7 == 3).then_some(5.0),
            sink: (turn % 5 > 2).then_some(()),
            ..Scores::default()
        },
        block_mask: Some(BlockCase { block_q, block_kv, per_entry: turn % 4 < 2, heads, pattern }),
        lengths,
        content: contents[turn / 2 % 4],
        ..AttentionCase::simple(dtype, heads_of, head_dim, (0, 0))
    }
}
