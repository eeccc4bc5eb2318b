//! Random calls.

use super::{CacheLayout, CodeCase, CodeScales, DecodeCase, RotaryCase, TailCase};
use crate::attention::{AlibiCase, AttentionCase, Content, Lengths, Limits, Terms, biases, masks};
use crate::placement::Placement;
use blockflash_ops::{RotaryPairs, Scores};
use blockflash_sys::DType;
use proptest::prelude::*;
use proptest::sample::select;

fn keys(longest: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 1 => select(vec![1, 15, 16, 17, 64]), 4 => 0..=longest]
}

fn lengths(longest: usize) -> impl Strategy<Value = (Vec<(usize, usize)>, bool)> {
    let queries = || prop_oneof![4 => Just(1usize), 3 => 0..=8usize, 1 => 0..=70usize];
    let equal = (1..=20usize, prop::collection::vec(keys(longest), 1..=5))
        .prop_map(|(q, keys)| (keys.into_iter().map(|keys| (q, keys)).collect(), true));
    let mixed = prop::collection::vec((queries(), keys(longest)), 1..=5)
        .prop_map(|lengths| (lengths, false));
    prop_oneof![1 => equal, 2 => mixed]
}

fn layout(page_sizes: Vec<usize>) -> impl Strategy<Value = (Option<usize>, usize, usize, bool)> {
    let page_size = prop_oneof![1 => Just(None), 3 => select(page_sizes).prop_map(Some)];
    (page_size, 0..=3usize, 0..=2usize, any::<bool>())
}

/// Calls within the limits, every option included, with pages of these sizes.
pub fn decode_cases(limits: Limits, page_sizes: Vec<usize>) -> impl Strategy<Value = DecodeCase> {
    let heads = (1..=3usize, select(vec![1usize, 1, 2, 3, 4, 8, 64]))
        .prop_map(|(kv, ratio)| if ratio == 64 { (64, 1) } else { (kv * ratio, kv) });
    let options = (
        masks(limits.seqlen),
        prop::option::weighted(0.3, 0.02..0.6f32),
        prop::option::weighted(0.3, 0.5..50.0f32),
        any::<bool>(),
        prop::bool::weighted(0.8),
    );
    let content = prop_oneof![
        5 => Just(Content::Normal),
        1 => Just(Content::LargeScores),
        2 => Just(Content::UnseenNan),
        1 => Just(Content::NanInKeys),
        1 => Just(Content::NanInValues),
    ];
    let pairs = select(vec![RotaryPairs::Halves, RotaryPairs::Interleaved]);
    let extras = (
        prop::bool::weighted(0.7),
        prop::option::weighted(0.25, 0.0..=1.0f64),
        prop::option::weighted(0.4, (1..=4usize, pairs, any::<bool>())),
        any::<bool>(),
        any::<bool>(),
    );
    let orders = select(vec![vec![], vec![1, 0, 2]]);
    let placed = (orders, 0..=2usize, 0..=3usize);
    let alignment = limits.alignment;
    let rest =
        (heads, lengths(limits.seqlen), layout(page_sizes), options, content, extras, placed);
    (any::<u32>(), select(limits.dtypes), select(limits.head_dims), rest).prop_map(
        move |(seed, dtype, head_dim, rest)| {
            let (heads, (lengths, equal), layout, options, content, extras, placed) = rest;
            let (mask, softmax_scale, softcap, sink, lse) = options;
            let (seqused, listed, rotary, append, batch_invariant) = extras;
            let (order, padding, slack) = placed;
            let placement = || Placement {
                order: order.clone(),
                padding: vec![(padding, 0), (0, padding), (0, padding * alignment)],
            };
            // A lone key that a sink outweighs by e^87 and more is the smallest number of f32, for
            // which the CPU's exponential is 0.
            let vanishes = dtype == DType::F32 && sink && content == Content::LargeScores;
            let content = if vanishes { Content::Normal } else { content };
            let longest = lengths.iter().map(|lengths| lengths.1).max().unwrap_or(0);
            let (page_size, spare, shared, heads_first) = layout;
            let simple = DecodeCase::simple(dtype, heads, head_dim, &lengths);
            let attention = AttentionCase {
                seed: seed.into(),
                lengths: Lengths::Packed { lengths, slack: (slack, 0) },
                scores: Scores { softmax_scale, softcap, sink: sink.then_some(()), ..mask.into() },
                lse,
                content,
                placements: [placement(), Placement::default(), Placement::default(), placement()],
                ..simple.attention
            };
            let layout = match page_size {
                None => CacheLayout::Contiguous { capacity: longest + spare },
                Some(page_size) => {
                    let max_pages = longest.div_ceil(page_size) + spare % 2;
                    CacheLayout::Paged { page_size, max_pages, spare, shared, heads_first }
                }
            };
            let rotary =
                rotary.filter(|_| head_dim >= 2).map(|(quarters, pairs, f32)| RotaryCase {
                    dim: (head_dim * quarters / 8 * 2).max(2),
                    pairs,
                    dtype: if f32 { DType::F32 } else { dtype },
                });
            DecodeCase {
                attention,
                equal,
                layout,
                seqused,
                listed,
                rotary,
                append,
                batch_invariant,
                tail: None,
                codes: None,
            }
            .consistent()
        },
    )
}

/// These calls with ALiBi, a mask of the last keys and, where sequences have equally many queries,
/// a bias.
pub fn decode_cases_with_terms(
    limits: Limits,
    page_sizes: Vec<usize>,
) -> impl Strategy<Value = DecodeCase> {
    let alibi = select(vec![AlibiCase::PerHead, AlibiCase::PerEntry]);
    let terms = (prop::option::weighted(0.8, biases()), prop::option::weighted(0.6, alibi));
    let length = prop_oneof![1 => Just(1), 1 => Just(usize::MAX), 4 => 1..=limits.seqlen.max(1)];
    let tail = (length, any::<bool>()).prop_map(|(tail, shared)| TailCase { tail, shared });
    let options = (terms, prop::option::weighted(0.6, tail));
    (decode_cases(limits, page_sizes), options).prop_map(|(case, ((bias, alibi), tail))| {
        let attention =
            AttentionCase { terms: Terms { bias, alibi, partial: false }, ..case.attention };
        DecodeCase { attention, tail, ..case }.consistent()
    })
}

/// The calls of [`decode_cases_with_terms`] over caches of codes, to which nothing is appended.
pub fn decode_cases_of_codes(
    limits: Limits,
    page_sizes: Vec<usize>,
) -> impl Strategy<Value = DecodeCase> {
    let scales = || select(CodeScales::ALL.to_vec());
    let codes = (select(vec![DType::E4M3, DType::E5M2, DType::I8]), scales(), scales())
        .prop_map(|(dtype, k, v)| CodeCase { dtype, scales: [k, v] });
    (decode_cases_with_terms(limits, page_sizes), codes)
        .prop_map(|(case, codes)| DecodeCase { codes: Some(codes), ..case }.consistent())
}
