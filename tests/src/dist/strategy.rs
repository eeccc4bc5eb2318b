//! Random cases.

use super::DistCase;
use crate::attention::{AttentionCase, BlockCase, BlockPattern, Lengths, MaskHeads};
use blockflash_dist::Scheme;
use blockflash_ops::{Align, DType, Mask, Scores};
use proptest::prelude::*;
use proptest::sample::select;

/// Random masks: of windows, such that hide almost everything and such that hide almost nothing.
fn masks(longest: usize) -> impl Strategy<Value = Mask> {
    let align = select(vec![Align::TopLeft, Align::BottomRight]);
    let side = prop_oneof![
        2 => Just(None),
        2 => (0..=9usize).prop_map(Some),
        3 => (0..=longest).prop_map(Some),
        1 => Just(Some(usize::MAX)),
    ];
    prop_oneof![
        1 => Just(Mask::Full),
        2 => align.clone().prop_map(|align| Mask::Causal { align }),
        3 => (side.clone(), side, align)
            .prop_map(|(left, right, align)| Mask::Window { left, right, align }),
    ]
}

/// Random cases for 1 to `most` ranks.
pub fn dist_cases(
    most: usize,
    dtypes: Vec<DType>,
    head_dims: Vec<usize>,
    longest: usize,
) -> impl Strategy<Value = DistCase> {
    let sizes = (1..=most, select(vec![1usize, 2, 3, 4, 6, 8]), 1..=3usize, 1..=2usize);
    let seqlen = prop_oneof![1 => 0..=20usize, 4 => 1..=longest];
    let softcap = prop_oneof![3 => Just(None), 1 => Just(Some(15.0f32))];
    let cut = prop_oneof![6 => Just(None), 1 => Just(Some([64, 64]))];
    let options = (masks(longest), softcap, any::<bool>(), cut, any::<u32>());
    (sizes, seqlen, select(dtypes), select(head_dims), options, any::<prop::sample::Index>())
        .prop_map(
            |(
                (world, heads_kv, ratio, batch),
                seqlen,
                dtype,
                head_dim,
                (mask, softcap, sink, cut, seed),
                which,
            )| {
                let schemes = Scheme::all(world, heads_kv);
                let scheme = schemes[which.index(schemes.len())];
                let simple =
                    AttentionCase::simple(dtype, (heads_kv * ratio, heads_kv), head_dim, (0, 0));
                let lengths = Lengths::Dense { batch, seqlen_q: seqlen, seqlen_kv: seqlen };
                let seed = seed.into();
                let whole = AttentionCase {
                    lengths,
                    scores: Scores { mask, softcap, sink: sink.then_some(()), ..Scores::default() },
                    seed,
                    ..simple
                };
                DistCase { whole, scheme, cut }
            },
        )
}

/// Random cases of packed batches: of a few long sequences, of many short ones, of both, and some
/// without rows.
pub fn dist_packed_cases(
    most: usize,
    dtypes: Vec<DType>,
    head_dims: Vec<usize>,
    longest: usize,
) -> impl Strategy<Value = DistCase> {
    let rows = prop_oneof![
        1 => Just(0),
        4 => 1..=9usize,
        4 => 1..=longest / 3,
        1 => 1..=longest,
    ];
    let batch = prop::collection::vec(rows, 0..12);
    (dist_cases(most, dtypes, head_dims, longest), batch).prop_map(|(mut case, rows)| {
        let lengths = rows.into_iter().map(|rows| (rows, rows)).collect();
        case.whole.lengths = Lengths::Packed { lengths, slack: (0, 0) };
        case
    })
}

/// Random cases with block masks. Where keys are divided, there are no windows with them.
pub fn dist_block_cases(
    most: usize,
    dtypes: Vec<DType>,
    head_dims: Vec<usize>,
    longest: usize,
) -> impl Strategy<Value = DistCase> {
    let sizes = select(vec![[64, 64], [128, 64], [64, 128], [128, 192]]);
    let heads = select(vec![MaskHeads::One, MaskHeads::KeyValue, MaskHeads::Query]);
    let patterns = select(vec![
        BlockPattern::Random(0.0),
        BlockPattern::Random(0.1),
        BlockPattern::Random(0.4),
        BlockPattern::Random(1.0),
        BlockPattern::EmptyRowsAndColumns,
        BlockPattern::Seen,
    ]);
    let cases = dist_cases(most, dtypes, head_dims, longest);
    (cases, sizes, heads, any::<bool>(), patterns, 0..2usize).prop_map(
        |(mut case, [block_q, block_kv], heads, per_entry, pattern, mask)| {
            let block = BlockCase { block_q, block_kv, per_entry, heads, pattern };
            case.whole.block_mask = Some(block);
            case.cut = Some([block_q, block_kv]);
            if case.scheme.keys > 1 {
                case.whole.scores.mask = [Mask::Full, Mask::causal()][mask];
            }
            case
        },
    )
}
