//! Calls at the edges: pages, lengths, masks, and the ones that broke other libraries.

use super::{CacheLayout, DecodeCase, RotaryCase, TailCase};
use crate::attention::{AlibiCase, AttentionCase, BiasCase, BiasContent, Content, Lengths, Terms};
use crate::placement::Placement;
use blockflash_ops::RotaryPairs;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::DType;

fn paged(page_size: usize, longest: usize) -> CacheLayout {
    let max_pages = longest.div_ceil(page_size) + 1;
    CacheLayout::Paged { page_size, max_pages, spare: 3, shared: 0, heads_first: false }
}

fn packed(lengths: &[(usize, usize)]) -> Lengths {
    Lengths::Packed { lengths: lengths.to_vec(), slack: (0, 0) }
}

/// One query of each sequence against lengths about every boundary of steps, pages and splits, up
/// to `longest`.
pub fn decode_lengths(dtype: DType, head_dim: usize, longest: usize) -> Vec<DecodeCase> {
    let around = |n: usize| [n.saturating_sub(1), n, n + 1];
    let lengths: Vec<(usize, usize)> = [16, 32, 64, 128, 192, 256, 1024, 2048, 4096]
        .into_iter()
        .flat_map(around)
        .chain([0, 1, 2, 5, 300, 777, 3000, 4200])
        .filter(|&n| n <= longest)
        .map(|n| (1, n))
        .collect();
    let mut cases = Vec::new();
    for (heads, page_size) in [((4, 1), 16), ((3, 3), 48), ((8, 2), 256)] {
        let simple = DecodeCase::simple(dtype, heads, head_dim, &lengths);
        let in_pages = DecodeCase { layout: paged(page_size, longest), ..simple.clone() };
        let attention = AttentionCase { content: Content::HugeScores, ..simple.attention.clone() };
        cases.push(DecodeCase { attention, ..in_pages.clone() });
        cases.push(in_pages);
        let layout = CacheLayout::Contiguous { capacity: longest + 3 };
        cases.push(DecodeCase { layout, equal: true, ..simple }.consistent());
    }
    cases
}

/// Many queries of a sequence, alone and beside sequences with few, in pages of every kind.
pub fn decode_prefills(dtype: DType, head_dim: usize) -> Vec<DecodeCase> {
    let window = |left, right| Mask::Window { left, right, align: Align::BottomRight };
    let masks = [Mask::causal(), Mask::Full, window(Some(140), Some(0)), window(Some(60), Some(9))];
    let mixed = [(200, 333), (1, 70), (130, 130), (0, 9), (140, 400), (64, 0), (300, 5)];
    // With 64 heads, 128 queries are many; with fewer heads the kernel takes all sequences.
    let two_kernels = [(129, 100), (1, 70), (3, 200), (0, 30), (127, 60)];
    let pages = [None, Some(16), Some(64), Some(48), Some(128), Some(256), Some(32)];
    let mut cases = Vec::new();
    for (turn, mask) in masks.into_iter().cycle().take(21).enumerate() {
        let equal = turn % 3 == 2;
        let lengths: Vec<(usize, usize)> = match equal {
            true => [200, 333, 0, 129].map(|keys| (150 + turn, keys)).to_vec(),
            false if turn % 3 == 1 => two_kernels.to_vec(),
            false => mixed.to_vec(),
        };
        let heads = [(4, 2), (64, 16), (3, 1)][turn % 3];
        let case = DecodeCase::simple(dtype, heads, head_dim, &lengths);
        let layout = match pages[turn % pages.len()] {
            None => CacheLayout::Contiguous { capacity: 411 },
            Some(page_size) => CacheLayout::Paged {
                page_size,
                max_pages: 400usize.div_ceil(page_size) + turn % 2,
                spare: turn % 4,
                shared: turn % 5 / 4,
                heads_first: turn % 4 == 3,
            },
        };
        let attention = AttentionCase {
            seed: turn as u64,
            scores: Scores {
                mask,
                softcap: (turn % 4 == 2).then_some(15.0),
                sink: (turn % 5 == 1).then_some(()),
                ..Scores::default()
            },
            lse: turn % 6 != 5,
            content: [
                Content::Normal,
                Content::UnseenNan,
                Content::LargeScores,
                Content::NanInValues,
                Content::HugeScores,
            ][turn % 5],
            ..case.attention.clone()
        };
        cases.push(DecodeCase { attention, equal, layout, ..case }.consistent());
    }
    cases
}

/// Rows of queries times heads that do and do not fill tiles, and sequences so few or so unequal
/// that their keys are divided: with every mask and option in turns.
pub fn decode_splits(dtype: DType, head_dim: usize) -> Vec<DecodeCase> {
    let window = |left, right| Mask::Window { left, right, align: Align::BottomRight };
    let masks = [Mask::causal(), Mask::Full, window(Some(900), Some(0)), window(Some(70), Some(3))];
    let heads = [(71, 1), (14, 2), (33, 1), (8, 8), (142, 2), (9, 3), (64, 1)];
    let mut cases = Vec::new();
    for turn in 0..28 {
        let queries = [1, 3, 20, 70][turn % 4];
        let seqused = turn % 7 != 6;
        let keys = match (seqused, turn % 3) {
            (false, _) => vec![2048; 2],
            (_, 0) => vec![3000],
            (_, 1) => vec![1, 2500, 0, 16, 130, 64, 7],
            _ => vec![700, 65, 701],
        };
        let lengths: Vec<_> = keys.iter().map(|&keys| (queries, keys)).collect();
        let layout = match turn % 3 {
            _ if !seqused => CacheLayout::Contiguous { capacity: 2048 },
            0 => paged(16, 3000),
            1 => paged(128, 2500),
            _ => CacheLayout::Contiguous { capacity: 3100 },
        };
        let case = DecodeCase::simple(dtype, heads[turn % heads.len()], head_dim, &lengths);
        let attention = AttentionCase {
            seed: turn as u64,
            scores: Scores {
                mask: masks[turn / 2 % 4],
                softcap: (turn % 6 == 5).then_some(15.0),
                sink: (turn % 5 < 2).then_some(()),
                ..Scores::default()
            },
            lse: turn % 4 != 3,
            content: [
                Content::Normal,
                Content::UnseenNan,
                Content::HugeScores,
                Content::NanInValues,
                Content::Normal,
            ][turn % 5],
            ..case.attention.clone()
        };
        cases.push(DecodeCase { attention, equal: true, layout, seqused, ..case }.consistent());
    }
    cases
}

/// Every mask, number of queries and option, in turns.
pub fn decode_edges(dtype: DType, head_dim: usize) -> Vec<DecodeCase> {
    let window = |left, right| Mask::Window { left, right, align: Align::BottomRight };
    let masks = [
        Mask::causal(),
        Mask::Full,
        window(Some(40), Some(0)),
        window(Some(0), Some(0)),
        window(Some(100), Some(3)),
        window(None, Some(2)),
    ];
    let heads = [(8, 1), (4, 4), (6, 2), (64, 1), (16, 2)];
    let mixed = [(1, 70), (4, 4), (0, 33), (130, 130), (7, 3), (2, 0), (1, 1), (16, 300)];
    let mut cases = Vec::new();
    for (turn, mask) in masks.into_iter().cycle().take(24).enumerate() {
        let equal = turn % 3 == 0;
        let queries = [1, 2, 4, 5, 16, 33][turn / 3 % 6];
        let lengths: Vec<(usize, usize)> = match equal {
            true => [1, 16, 200, 0, 65, 333].map(|keys| (queries, keys)).to_vec(),
            false => mixed.to_vec(),
        };
        let pairs = [RotaryPairs::Halves, RotaryPairs::Interleaved][turn % 2];
        let dim = if turn % 4 < 2 { head_dim } else { head_dim / 2 };
        let rotary = RotaryCase { dim: dim / 2 * 2, pairs, dtype: DType::F32 };
        let order = if turn % 5 == 0 { vec![1, 0, 2] } else { Vec::new() };
        let placement = || Placement { order: order.clone(), padding: Vec::new() };
        let layout = match turn % 4 {
            0 => CacheLayout::Contiguous { capacity: 350 },
            1 => paged(16, 340),
            2 => CacheLayout::Paged {
                page_size: 32,
                max_pages: 12,
                spare: 1,
                shared: 1,
                heads_first: true,
            },
            _ => paged(128, 340),
        };
        let case = DecodeCase::simple(dtype, heads[turn % heads.len()], head_dim, &lengths);
        let attention = AttentionCase {
            seed: turn as u64,
            scores: Scores {
                mask,
                softcap: (turn % 4 == 3).then_some(20.0),
                sink: (turn % 3 == 1).then_some(()),
                ..Scores::default()
            },
            lse: turn % 7 != 6,
            placements: [placement(), Placement::default(), Placement::default(), placement()],
            content: [Content::Normal, Content::UnseenNan, Content::NanInValues][turn % 3],
            ..case.attention.clone()
        };
        let with_rotary = attention.content == Content::Normal && turn % 2 == 0;
        let case = DecodeCase {
            attention,
            equal,
            layout,
            listed: (turn % 5 == 2).then_some(0.5),
            rotary: with_rotary.then_some(rotary),
            append: turn % 2 == 0,
            ..case
        };
        cases.push(case.consistent());
    }
    // Nothing at all, nobody with a key, and a cache that is exactly full without lengths.
    let simple = DecodeCase::simple(dtype, (4, 2), head_dim, &[(3, 0), (1, 0)]);
    cases.push(simple.clone());
    let empty = AttentionCase { lengths: packed(&[(0, 5), (0, 0)]), ..simple.attention.clone() };
    cases.push(DecodeCase { attention: empty, ..simple.clone() });
    let full = AttentionCase { lengths: packed(&[(2, 96), (2, 96)]), ..simple.attention.clone() };
    for layout in [
        CacheLayout::Contiguous { capacity: 96 },
        CacheLayout::Paged { page_size: 32, max_pages: 3, spare: 0, shared: 2, heads_first: true },
    ] {
        let attention = full.clone();
        let case = DecodeCase { attention, layout, seqused: false, equal: true, ..simple.clone() };
        cases.push(DecodeCase { append: true, ..case.clone() }.consistent());
        cases.push(case.consistent());
    }
    cases
}

/// A bias of every type, ALiBi and masks of the last keys, alone and together, with every mask,
/// layout and option in turns.
pub fn decode_terms(dtype: DType, head_dim: usize) -> Vec<DecodeCase> {
    let window = |left, right| Mask::Window { left, right, align: Align::BottomRight };
    let masks = [Mask::causal(), Mask::Full, window(Some(40), Some(0)), window(Some(100), Some(3))];
    let heads = [(4, 4), (8, 2), (8, 1), (7, 1), (14, 2)];
    let mixed = [(1, 70), (4, 4), (0, 33), (64, 130), (7, 3), (2, 0), (1, 1), (16, 300)];
    let tails = [None, Some(1), Some(16), Some(63), Some(64), Some(usize::MAX)];
    let mut cases = Vec::new();
    for turn in 0..60 {
        let equal = turn % 4 != 3;
        let queries = [1, 5, 16, 33, 64][turn % 5];
        let lengths: Vec<(usize, usize)> = match equal {
            true => [1, 16, 200, 0, 65, 333].map(|keys| (queries, keys)).to_vec(),
            false => mixed.to_vec(),
        };
        let layout = match turn % 3 {
            0 => CacheLayout::Contiguous { capacity: 350 },
            1 => paged(16, 340),
            _ => paged(128, 340),
        };
        let broadcast = std::array::from_fn(|dim| turn >> dim & 1 == 1);
        let biases = [None, Some(DType::F16), Some(DType::BF16), Some(DType::F32)];
        let bias = biases[turn / 3 % 4].map(|dtype| BiasCase {
            dtype,
            broadcast,
            content: BiasContent::Normal,
            placement: Placement::default(),
            wide_gradient: false,
        });
        let alibi = [None, Some(AlibiCase::PerHead), Some(AlibiCase::PerEntry)][turn / 2 % 3];
        let tail = tails[turn % 6].map(|tail| TailCase { tail, shared: turn % 5 == 0 });
        // Something at least.
        let tail = match (&bias, alibi) {
            (None, None) => tail.or(Some(TailCase { tail: 20, shared: false })),
            _ => tail,
        };
        let case = DecodeCase::simple(dtype, heads[turn % 5], head_dim, &lengths);
        let attention = AttentionCase {
            seed: turn as u64,
            scores: Scores {
                mask: masks[turn % 4],
                softcap: (turn % 7 == 3).then_some(20.0),
                sink: (turn % 5 == 1).then_some(()),
                ..Scores::default()
            },
            lse: turn % 7 != 6,
            content: [Content::Normal, Content::UnseenNan, Content::NanInValues][turn % 3],
            terms: Terms { bias, alibi, partial: false },
            ..case.attention.clone()
        };
        let listed = (turn % 9 == 4).then_some(0.5);
        let batch_invariant = turn % 2 == 0;
        let case = DecodeCase { attention, equal, layout, listed, tail, batch_invariant, ..case };
        cases.push(case.consistent());
    }
    cases
}
