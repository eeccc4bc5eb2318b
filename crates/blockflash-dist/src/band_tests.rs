use super::*;
use std::ops::Range;

fn masks() -> Vec<Mask> {
    let sides = [None, Some(0), Some(1), Some(3), Some(9), Some(17), Some(40), Some(usize::MAX)];
    let mut masks = vec![Mask::Full, Mask::causal()];
    for left in sides {
        masks.extend(sides.map(|right| Mask::Window { left, right, align: Align::TopLeft }));
    }
    masks
}

/// Every visible pair is in exactly one part, and every query has its own key in one that says so.
#[test]
fn parts_are_the_mask() {
    for world in [1, 2, 3, 5] {
        for (seqlen, block) in [(0, 1), (1, 1), (5, 1), (24, 1), (41, 1), (300, 64)] {
            let shard = |rank| {
                let shard = Shard::new(seqlen, world, rank).unwrap();
                if block > 1 { shard.in_blocks(block, block).unwrap() } else { shard }
            };
            for mask in masks() {
                let band = Band::of(mask, seqlen).unwrap();
                let mut seen = vec![0; seqlen * seqlen];
                let mut own = vec![0; seqlen];
                for (group, source) in (0..world).flat_map(|g| (0..world).map(move |s| (g, s))) {
                    let [queries, keys] = [group, source].map(shard);
                    for part in band.parts(&queries, &keys) {
                        let Part { queries: rows, keys: columns, mask, .. } = &part;
                        let mut pairs = 0;
                        for (i, row) in rows.clone().enumerate() {
                            let query = queries.position(row);
                            own[query] += usize::from(part.own);
                            let visible: Range<_> = mask.visible(i, rows.len(), columns.len());
                            for j in visible {
                                seen[query * seqlen + keys.position(columns.start + j)] += 1;
                                pairs += 1;
                            }
                        }
                        assert_eq!(part.pairs(), f64::from(pairs), "{part:?}");
                        assert!(!rows.is_empty() && !columns.is_empty(), "{part:?}");
                    }
                }
                assert_eq!(own, vec![1; seqlen], "{mask:?}");
                for query in 0..seqlen {
                    let visible = mask.visible(query, seqlen, seqlen);
                    for key in 0..seqlen {
                        let expected = usize::from(visible.contains(&key));
                        let found = seen[query * seqlen + key];
                        assert_eq!(found, expected, "{mask:?} {world} {seqlen} ({query}, {key})");
                    }
                }
            }
        }
    }
}

/// A side that hides nothing is no side, so a window may be a causal mask.
#[test]
fn windows_that_are_simpler() {
    let band = |left, right| {
        Band::of(Mask::Window { left, right, align: Align::BottomRight }, 100).unwrap()
    };
    assert_eq!(Some(band(Some(99), Some(0))), Band::of(Mask::causal(), 100));
    assert_eq!(Some(band(None, Some(usize::MAX))), Band::of(Mask::Full, 100));
    assert!(!band(Some(98), Some(0)).is_simple() && band(None, Some(0)).is_simple());
}
