//! Block masks from pairs of tokens, and attention under them, held against the definition of each
//! pair.

use crate::token_attention::assert_attends;
use blockflash_ops::{Align, BlockGeometry, BlockMask, Mask, Result};
use blockflash_tests::property::config;
use proptest::collection::vec;
use proptest::prelude::*;

fn geometry(lengths: [usize; 2], blocks: [usize; 2]) -> BlockGeometry {
    let [block_q, block_kv] = blocks.map(|block| 64 * block);
    BlockGeometry::new(lengths[0], lengths[1], block_q, block_kv).unwrap()
}

fn lengths() -> impl Strategy<Value = [usize; 2]> {
    prop_oneof![[0..300usize, 0..300usize], (1..200usize).prop_map(|n| [n, n])]
}

fn blocks() -> impl Strategy<Value = [usize; 2]> {
    [1..4usize, 1..4usize]
}

fn token_mask() -> impl Strategy<Value = Mask> {
    let side = || prop_oneof![Just(None), (0..150usize).prop_map(Some)];
    let align = || prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)];
    prop_oneof![
        Just(Mask::Full),
        align().prop_map(|align| Mask::Causal { align }),
        (side(), side(), align()).prop_map(|(left, right, align)| Mask::Window {
            left,
            right,
            align
        }),
    ]
}

/// Whether a query sees a key under a token mask.
fn shows(mask: Mask, geometry: &BlockGeometry, query: usize, key: usize) -> bool {
    mask.visible(query, geometry.seqlen_q(), geometry.seqlen_kv()).contains(&key)
}

/// The mask shows the pairs for which the definition holds, also to attention, and no more blocks
/// or bits than it must.
fn assert_is(mask: Result<BlockMask>, visible: impl Fn(usize, usize, usize, usize) -> bool) {
    let mask = mask.unwrap();
    let pairs = mask.to_token_mask().unwrap();
    let (rows, keys) = (mask.seqlen_q(), mask.seqlen_kv());
    let at = |[batch, head, query, key]: [usize; 4]| {
        ((batch * mask.heads() + head) * rows + query) * keys + key
    };
    let [mut blocks, mut partial] = [0; 2];
    for (batch, head) in (0..mask.batch()).flat_map(|b| (0..mask.heads()).map(move |h| (b, h))) {
        for (row, col) in
            (0..mask.rows()).flat_map(|row| (0..mask.cols()).map(move |col| (row, col)))
        {
            let (mut all, mut any) = (true, false);
            for query in mask.geometry().queries(row) {
                for key in mask.geometry().keys(col) {
                    let expected = visible(batch, head, query, key);
                    let found = pairs[at([batch, head, query, key])];
                    assert_eq!(found, expected, "query {query}, key {key}");
                    all &= expected;
                    any |= expected;
                }
            }
            blocks += usize::from(any);
            partial += usize::from(any && !all);
        }
    }
    let stream = blockflash_ops::Device::cpu().stream().unwrap();
    let first = mask.bits().map(|[first, _]| first.to_vec::<i32>(&stream).unwrap());
    let with_bits = first.map_or(0, |first| first.iter().filter(|&&first| first >= 0).count());
    assert_eq!([mask.nnz(), with_bits], [blocks, partial]);
    assert_attends(&mask, &pairs);
}

/// A number that looks random.
fn noise(seed: u64, numbers: [usize; 4]) -> u64 {
    numbers.iter().fold(seed, |hash, &number| {
        (hash ^ number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
    })
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn pairs_ranges_and_functions(
        lengths in lengths(),
        blocks in blocks(),
        [batch, heads] in [1..3usize, 1..3usize],
        scale in 1..90usize,
        seed: u64,
    ) {
        let geometry = geometry(lengths, blocks);
        // Constant in squares, some of which are larger than blocks.
        let visible = |batch, head, query: usize, key: usize| {
            noise(seed, [batch, head, query / scale, key / scale]).is_multiple_of(3)
        };
        assert_is(BlockMask::from_fn(geometry, batch, heads, visible), visible);
        let mut pairs = Vec::new();
        for group in 0..batch * heads {
            for query in 0..lengths[0] {
                pairs.extend(
                    (0..lengths[1]).map(|key| visible(group / heads, group % heads, query, key)),
                );
            }
        }
        assert_is(BlockMask::from_token_mask(geometry, batch, heads, &pairs), visible);
        // Ranges overlap, are empty, reach beyond the keys, and come in any order.
        let ranges = |batch, head, query: usize| {
            [0, 1, 2].map(|range| {
                let random = noise(seed, [batch, head, query / scale, range]) as usize;
                let start = random % 400;
                start..start + random / 1000 % 200
            })
        };
        let mask = BlockMask::from_ranges(geometry, batch, heads, ranges);
        assert_is(mask, |b, h, q, key| ranges(b, h, q).iter().any(|range| range.contains(&key)));
    }

    #[test]
    fn token_masks_of_heads(
        lengths in lengths(),
        blocks in blocks(),
        masks in vec(token_mask(), 1..4),
        within in token_mask(),
    ) {
        let geometry = geometry(lengths, blocks);
        let mask = BlockMask::from_masks(geometry, &masks);
        let complement = mask.as_ref().unwrap().complement(within);
        assert_is(mask, |_, head, q, key| shows(masks[head], &geometry, q, key));
        assert_is(complement, |_, head, q, key| {
            shows(within, &geometry, q, key) && !shows(masks[head], &geometry, q, key)
        });
    }

    #[test]
    fn documents(
        lengths in [1..300usize, 1..300usize],
        blocks in blocks(),
        batch in 1..3usize,
        longest in 1..120usize,
        sorted: bool,
        seed: u64,
    ) {
        let geometry = geometry(lengths, blocks);
        let ids = |length: usize, which: usize| -> Vec<i32> {
            let id = |at: usize| {
                let (batch, token) = (at / length, at % length);
                if sorted {
                    return (token / longest) as i32 - 1;
                }
                noise(seed, [batch, token / longest, which, 0]) as i32 % 4 - 1
            };
            (0..batch * length).map(id).collect()
        };
        let (q, kv) = (ids(lengths[0], 0), ids(lengths[1], 1));
        assert_is(BlockMask::documents(geometry, &q, &kv), |batch, _, query, key| {
            let id = q[batch * lengths[0] + query];
            id >= 0 && id == kv[batch * lengths[1] + key]
        });
    }

    #[test]
    fn prefixes_sinks_and_padding(
        lengths in lengths(),
        blocks in blocks(),
        numbers in vec(0..350usize, 1..4),
        mask in token_mask(),
    ) {
        let geometry = geometry(lengths, blocks);
        assert_is(BlockMask::prefix(geometry, &numbers, mask), |batch, _, query, key| {
            key < numbers[batch] || shows(mask, &geometry, query, key)
        });
        let sink = numbers[0];
        assert_is(BlockMask::streaming(geometry, sink, mask), |_, _, query, key| {
            let end = mask.visible(query, lengths[0], lengths[1]).end;
            key < sink && key < end || shows(mask, &geometry, query, key)
        });
        let ranges: Vec<_> = numbers.iter().map(|&n| n / 3..n).collect();
        assert_is(BlockMask::key_padding(geometry, &ranges), |batch, _, _, key| {
            ranges[batch].contains(&key)
        });
    }

    #[test]
    fn trees(
        [queries, before] in [1..150usize, 0..200usize],
        blocks in blocks(),
        batch in 1..3usize,
        reach in 1..20usize,
        seed: u64,
    ) {
        let geometry = geometry([queries, before + queries], blocks);
        let parent = |at: usize| {
            let (batch, query) = (at / queries, at % queries);
            let step = 1 + noise(seed, [batch, query, 0, 0]) as usize % reach;
            query as i32 - step.min(query + 1) as i32
        };
        let parents: Vec<i32> = (0..batch * queries).map(parent).collect();
        assert_is(BlockMask::tree(geometry, &parents), |batch, _, query, key| {
            let Some(key) = key.checked_sub(before) else { return true };
            let mut at = query as i32;
            while at > key as i32 {
                at = parents[batch * queries + at as usize];
            }
            at == key as i32
        });
    }

    #[test]
    fn dilated_windows(
        lengths in lengths(),
        blocks in blocks(),
        dilation in 1..9usize,
        [left, right] in [prop::option::of(0..40usize), prop::option::of(0..40usize)],
        bottom: bool,
    ) {
        let geometry = geometry(lengths, blocks);
        let (align, diagonal) = match bottom {
            true => (Align::BottomRight, lengths[1] as i64 - lengths[0] as i64),
            false => (Align::TopLeft, 0),
        };
        let mask = BlockMask::dilated_window(geometry, dilation, left, right, align);
        assert_is(mask, |_, _, query, key| {
            let distance = key as i64 - query as i64 - diagonal;
            let far = |side: Option<usize>, steps: i64| side.is_none_or(|n| steps <= n as i64);
            distance % dilation as i64 == 0
                && far(left, -distance / dilation as i64)
                && far(right, distance / dilation as i64)
        });
    }

    #[test]
    fn neighborhoods(
        axes in vec((1..7usize, 0..7usize, 1..4usize), 1..4),
        blocks in blocks(),
    ) {
        let grid: Vec<usize> = axes.iter().map(|(size, ..)| *size).collect();
        let dilation: Vec<usize> = axes.iter().map(|&(size, _, step)| step.min(size)).collect();
        let longest = grid.iter().zip(&dilation).map(|(size, step)| size / step);
        let window: Vec<usize> =
            axes.iter().zip(longest).map(|(axis, most)| 1 + axis.1 % most).collect();
        let tokens = grid.iter().product();
        let mask =
            BlockMask::neighborhood(geometry([tokens; 2], blocks), &grid, &window, &dilation);
        assert_is(mask, |_, _, mut query, mut key| {
            let mut sees = true;
            for axis in (0..grid.len()).rev() {
                let (size, step, count) = (grid[axis], dilation[axis], window[axis]);
                let (at, seen) = (query % size, key % size);
                (query, key) = (query / size, key / size);
                // Positions that can be seen, of which the window takes those in a row.
                let all: Vec<usize> = (0..size).filter(|place| place % step == at % step).collect();
                let own = all.iter().position(|&place| place == at).unwrap();
                let start = own.saturating_sub(count / 2).min(all.len() - count);
                sees &= all[start..start + count].contains(&seen);
            }
            sees
        });
    }

    #[test]
    fn sets_of_pairs(
        lengths in lengths(),
        blocks in blocks(),
        [batch, heads] in [1..3usize, 1..3usize],
        scales in [1..90usize, 1..90usize],
        seed: u64,
    ) {
        let geometry = geometry(lengths, blocks);
        let visible = |which: usize| move |batch, head, query: usize, key: usize| {
            let scale = scales[which];
            noise(seed.wrapping_add(which as u64), [batch, head, query / scale, key / scale])
                .is_multiple_of(2)
        };
        let first = visible(0);
        let a_fn = move |_, head, query, key| first(0, head, query, key);
        let b_fn = visible(1);
        let a = BlockMask::from_fn(geometry, 1, heads, a_fn).unwrap();
        let b = BlockMask::from_fn(geometry, batch, heads, b_fn).unwrap();
        assert_is(a.union(&b), |b, h, q, k| a_fn(b, h, q, k) || b_fn(b, h, q, k));
        assert_is(a.intersection(&b), |b, h, q, k| a_fn(b, h, q, k) && b_fn(b, h, q, k));
        assert_is(a.difference(&b), |b, h, q, k| a_fn(b, h, q, k) && !b_fn(b, h, q, k));
        assert_is(b.transpose(), |batch, head, q, k| b_fn(batch, head, k, q));
        assert_is(b.expand(blocks[0], blocks[1]), b_fn);
        let packed = BlockMask::packed(&[&a, &b.entry(0).unwrap()]).unwrap();
        assert_is(packed.entry(1), b_fn);
        assert_is(packed.complement(Mask::Full).unwrap().entry(0), |b, h, q, k| !a_fn(b, h, q, k));
    }
}
