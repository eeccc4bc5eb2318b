//! Random attention problems.

use super::{
    AlibiCase, AttentionCase, BiasCase, BiasContent, BlockCase, BlockPattern, Content, Lengths,
    MaskHeads, Terms,
};
use crate::placement::Placement;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::DType;
use proptest::prelude::*;
use proptest::sample::select;
use std::ops::RangeInclusive;

/// How far the generated cases reach.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Types of the tensors.
    pub dtypes: Vec<DType>,
    /// Head dimensions.
    pub head_dims: Vec<usize>,
    /// Longest sequence.
    pub seqlen: usize,
    /// Strides are multiples of this many elements; the GPU needs 8.
    pub alignment: usize,
    /// Most visited pairs times head_dim of a case, in about one head.
    pub work: usize,
}

impl Limits {
    /// What kernels take, for the CPU.
    pub fn in_half_precision(work: usize) -> Self {
        let dtypes = vec![DType::F16, DType::BF16];
        Self { dtypes, head_dims: head_dims(8..=512), seqlen: 200, alignment: 8, work }
    }

    /// Element types, head dimensions and strides that only the CPU takes.
    pub fn of_the_cpu(work: usize) -> Self {
        Self {
            dtypes: vec![DType::F32, DType::F32, DType::F16, DType::BF16],
            head_dims: vec![1, 2, 3, 5, 7, 12, 20, 33, 60, 100, 129, 250, 264, 300],
            seqlen: 140,
            alignment: 1,
            work,
        }
    }
}

/// Multiples of 8.
pub fn head_dims(range: RangeInclusive<usize>) -> Vec<usize> {
    range.filter(|d| d % 8 == 0).collect()
}

/// Masks of every kind, with windows about as wide as the sequences.
pub fn masks(seqlen: usize) -> impl Strategy<Value = Mask> {
    let align = || select(vec![Align::TopLeft, Align::BottomRight]);
    let side =
        move || prop_oneof![1 => Just(None), 1 => Just(Some(0)), 3 => (0..=seqlen).prop_map(Some)];
    let window = |(left, right, align)| Mask::Window { left, right, align };
    prop_oneof![
        2 => Just(Mask::Full),
        2 => align().prop_map(|align| Mask::Causal { align }),
        3 => (side(), side(), align()).prop_map(window),
    ]
}

fn seqlens(longest: usize) -> impl Strategy<Value = usize> {
    let edges: Vec<usize> =
        [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193]
            .into_iter()
            .filter(|n| *n <= longest)
            .collect();
    prop_oneof![2 => select(edges), 3 => 1..=longest, 1 => 1..=longest.min(20)]
}

fn lengths(longest: usize) -> impl Strategy<Value = Lengths> {
    let maybe_empty = move || prop_oneof![1 => Just(0), 4 => seqlens(longest.min(130))];
    let dense =
        (1..=3usize, seqlens(longest), prop_oneof![1 => Just(0usize), 15 => seqlens(longest)])
            .prop_map(|(batch, seqlen_q, seqlen_kv)| Lengths::Dense { batch, seqlen_q, seqlen_kv });
    let packed =
        (prop::collection::vec((maybe_empty(), maybe_empty()), 1..=4), (0..=3usize, 0..=3usize))
            .prop_map(|(lengths, slack)| Lengths::Packed { lengths, slack });
    prop_oneof![3 => dense, 2 => packed]
}

/// Layouts of a tensor of this rank: each order of the outer dimensions that people use, with and
/// without gaps.
fn placement(rank: usize, alignment: usize) -> impl Strategy<Value = Placement> {
    let orders = if rank == 4 {
        vec![vec![], vec![0, 2, 1, 3], vec![1, 0, 2, 3], vec![2, 1, 0, 3]]
    } else {
        vec![vec![], vec![1, 0, 2]]
    };
    let outer = prop::collection::vec((0..=2usize, 0..=2usize), rank - 1);
    let inner = (0..=2usize, 0..=2usize).prop_map(move |(a, b)| (a * alignment, b * alignment));
    let padded = (outer, inner).prop_map(|(mut outer, inner)| {
        outer.push(inner);
        outer
    });
    (select(orders), prop_oneof![1 => Just(Vec::new()), 1 => padded])
        .prop_map(|(order, padding)| Placement { order, padding })
}

fn lse_placement(rank: usize) -> impl Strategy<Value = Placement> {
    let padding = prop::collection::vec((0..=2usize, 0..=3usize), rank);
    let orders = if rank == 3 { vec![vec![], vec![1, 0, 2]] } else { vec![vec![]] };
    (select(orders), prop_oneof![1 => Just(Vec::new()), 1 => padding])
        .prop_map(|(order, padding)| Placement { order, padding })
}

/// Problems within the limits, every option included.
pub fn attention_cases(limits: Limits) -> impl Strategy<Value = AttentionCase> {
    let heads = (1..=3usize, select(vec![1usize, 1, 2, 3, 4, 7, 8]))
        .prop_map(|(kv, ratio)| (kv * ratio, kv));
    let options = (
        masks(limits.seqlen),
        prop::option::of(0.02..0.6f32),
        prop::option::weighted(0.3, 0.5..50.0f32),
        any::<bool>(),
        prop::bool::weighted(0.8),
    );
    let content = prop_oneof![
        5 => Just(Content::Normal),
        1 => Just(Content::LargeScores),
        1 => Just(Content::GrowingMaxima),
        1 => Just(Content::OneHugeLogit),
        2 => Just(Content::UnseenNan),
        1 => Just(Content::NanInKeys),
        1 => Just(Content::NanInValues),
    ];
    let layout = lengths(limits.seqlen).prop_flat_map(move |lengths| {
        let rank = if matches!(lengths, Lengths::Dense { .. }) { 4 } else { 3 };
        let placement = || placement(rank, limits.alignment);
        let broadcast = if rank == 4 { 0.15 } else { 0.0 };
        let tensors = (placement(), placement(), placement(), placement())
            .prop_map(|(q, k, v, o)| [q, k, v, o]);
        (Just(lengths), tensors, lse_placement(rank - 1), prop::bool::weighted(broadcast))
    });
    let work = limits.work;
    (any::<u32>(), select(limits.dtypes), select(limits.head_dims), heads, layout, options, content)
        .prop_map(move |(seed, dtype, head_dim, heads, layout, options, content)| {
            let (lengths, placements, lse_placement, broadcast_kv) = layout;
            let (mask, softmax_scale, softcap, sink, lse) = options;
            let case = AttentionCase {
                seed: seed.into(),
                lengths,
                scores: Scores { softmax_scale, softcap, sink: sink.then_some(()), ..mask.into() },
                lse,
                placements,
                lse_placement,
                broadcast_kv,
                content,
                ..AttentionCase::simple(dtype, heads, head_dim, (0, 0))
            };
            affordable(case, work)
        })
}

/// Problems within the limits with a block mask.
pub fn block_sparse_cases(limits: Limits) -> impl Strategy<Value = AttentionCase> {
    let pattern = prop_oneof![
        4 => (0.0..=1.0f64).prop_map(BlockPattern::Random),
        1 => Just(BlockPattern::EmptyRowsAndColumns),
        1 => Just(BlockPattern::Seen),
    ];
    let block = || select(vec![64usize, 64, 128, 128, 192, 256]);
    let heads = select(vec![MaskHeads::One, MaskHeads::KeyValue, MaskHeads::Query]);
    let block = (block(), block(), any::<bool>(), heads, pattern);
    (attention_cases(limits), block).prop_map(
        |(case, (block_q, block_kv, per_entry, heads, pattern))| {
            let per_entry = per_entry && !case.broadcast_kv;
            let block_mask = Some(BlockCase { block_q, block_kv, per_entry, heads, pattern });
            AttentionCase { block_mask, ..case }
        },
    )
}

/// These problems with a bias of any type, broadcast and layout, where sequences are equally long,
/// slopes of ALiBi, and partial blocks, where there is a block mask.
pub fn with_terms(
    cases: impl Strategy<Value = AttentionCase>,
) -> impl Strategy<Value = AttentionCase> {
    let alibi = || select(vec![AlibiCase::PerHead, AlibiCase::PerEntry]);
    let terms = (
        prop::option::weighted(0.8, biases()),
        prop::option::weighted(0.5, alibi()),
        prop::bool::weighted(0.8),
    );
    (cases, terms).prop_map(|(case, (bias, alibi, partial))| {
        let bias = bias.filter(|_| matches!(case.lengths, Lengths::Dense { .. }));
        let partial = partial && case.block_mask.is_some();
        let alibi = alibi.or_else(|| (bias.is_none() && !partial).then_some(AlibiCase::PerHead));
        // A lone key that a sink outweighs by e^87 and more is the smallest number of f32, for
        // which the CPU's exponential is 0.
        let large = [Content::LargeScores, Content::GrowingMaxima, Content::OneHugeLogit];
        let vanishes = case.scores.sink.is_some() && large.contains(&case.content);
        let content = if vanishes { Content::Normal } else { case.content };
        AttentionCase { terms: Terms { bias, alibi, partial }, content, ..case }
    })
}

/// Biases of every kind.
pub(crate) fn biases() -> impl Strategy<Value = BiasCase> {
    let dtype = select(vec![DType::F16, DType::BF16, DType::F32]);
    let broadcast = prop_oneof![1 => Just([false; 4]), 3 => prop::array::uniform4(any::<bool>())];
    let content = select(vec![BiasContent::Normal, BiasContent::Hiding, BiasContent::UnseenNan]);
    let order = select(vec![vec![], vec![1, 0, 2, 3], vec![0, 1, 3, 2]]);
    let padding = prop::collection::vec((0..=2usize, 0..=3usize), 4);
    let padding = prop_oneof![1 => Just(Vec::new()), 1 => padding];
    let placement = (order, padding).prop_map(|(order, padding)| Placement { order, padding });
    (dtype, broadcast, content, placement, any::<bool>()).prop_map(
        |(dtype, broadcast, content, placement, wide_gradient)| BiasCase {
            dtype,
            broadcast,
            content,
            placement,
            wide_gradient,
        },
    )
}

/// Fewer heads where the case would cost too much.
fn affordable(mut case: AttentionCase, work: usize) -> AttentionCase {
    let pairs: usize = case.sequences().iter().map(|s| s.q_len * s.kv_len).sum();
    if pairs * case.head_dim * case.heads_q > work {
        case.heads_q /= case.heads_kv;
        case.heads_kv = 1;
    }
    if pairs * case.head_dim * case.heads_q > 2 * work {
        case.heads_q = 1;
    }
    case
}
