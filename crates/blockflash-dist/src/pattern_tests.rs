use super::*;
use blockflash_ops::Align;

/// Offsets of sequences of 41 rows: short and long ones, and such without rows.
pub(crate) const BATCHES: [&[i32]; 7] = [
    &[0, 41],
    &[0, 3, 10, 41],
    &[0, 0, 20, 20, 21, 41, 41],
    &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 41],
    &[0, 5, 9, 14, 17, 22, 26, 30, 33, 38, 41],
    &[0, 39, 40, 41],
    &[0, 10, 31, 41],
];

fn masks() -> Vec<Mask> {
    let sides = [None, Some(0), Some(1), Some(3), Some(9), Some(30), Some(usize::MAX)];
    let window = |left, right| Mask::Window { left, right, align: Align::TopLeft };
    let windows = sides.into_iter().flat_map(|left| sides.map(|right| window(left, right)));
    windows.chain([Mask::Full, Mask::causal()]).collect()
}

/// The keys of a query of a part, as rows of its source.
fn visible(part: &Part, query: usize) -> Range<usize> {
    let one = [0, part.queries.len() as i32];
    let offsets = part.cu_seqlens.as_deref().unwrap_or(&one);
    let rows = sequence(offsets, sequence_at(offsets, query));
    let length = if part.cu_seqlens.is_some() { rows.len() } else { part.keys.len() };
    let keys = part.mask.visible(query - rows.start, rows.len(), length);
    let start = part.keys.start + rows.start;
    start + keys.start..start + keys.end
}

/// Every visible pair of each sequence is in exactly one part, and every query has its own key in
/// one that says so.
#[test]
fn parts_are_the_mask_of_each_sequence() {
    const ROWS: usize = 41;
    for (world, offsets) in [1, 2, 3, 5].into_iter().flat_map(|w| BATCHES.map(|o| (w, o))) {
        let shard = |rank| Shard::new(ROWS, world, rank).unwrap();
        for mask in masks() {
            let pattern = Pattern::of(mask, ROWS, Some(offsets)).unwrap();
            let mut seen = vec![0; ROWS * ROWS];
            let mut own = [0; ROWS];
            for (group, source) in (0..world).flat_map(|g| (0..world).map(move |s| (g, s))) {
                let [queries, keys] = [group, source].map(shard);
                for part in pattern.parts(&queries, &keys) {
                    assert!(!part.queries.is_empty() && !part.keys.is_empty(), "{part:?}");
                    let mut pairs = 0;
                    for (i, row) in part.queries.clone().enumerate() {
                        let query = queries.position(row);
                        own[query] += usize::from(part.own);
                        for row in visible(&part, i) {
                            seen[query * ROWS + keys.position(row)] += 1;
                            pairs += 1;
                        }
                    }
                    assert_eq!(part.pairs(), f64::from(pairs), "{part:?}");
                }
            }
            assert_eq!(own, [1; ROWS], "{mask:?} {world} {offsets:?}");
            for query in 0..ROWS {
                let rows = sequence(offsets, sequence_at(offsets, query));
                let keys = mask.visible(query - rows.start, rows.len(), rows.len());
                for key in 0..ROWS {
                    let expected = rows.contains(&key) && keys.contains(&(key - rows.start));
                    let found = seen[query * ROWS + key];
                    let place = format!("{mask:?} {world} {offsets:?} ({query}, {key})");
                    assert_eq!(found, usize::from(expected), "{place}");
                }
            }
        }
    }
}

/// Sequences that are within a rank are one call, and nothing of them travels.
#[test]
fn short_sequences_stay() {
    let offsets: Vec<i32> = (0..=10).map(|at| at * 4).collect();
    let pattern = Pattern::of(Mask::causal(), 40, Some(&offsets)).unwrap();
    let shard = |rank| Shard::new(40, 5, rank).unwrap();
    for (group, source) in (0..5).flat_map(|g| (0..5).map(move |s| (g, s))) {
        let parts = pattern.parts(&shard(group), &shard(source));
        match group == source {
            false => assert!(parts.is_empty(), "{parts:?}"),
            true => assert_eq!(parts[0].cu_seqlens.as_deref(), Some(&[0, 4, 8][..])),
        }
        assert!(parts.len() <= 1);
    }
}

#[test]
fn bad_offsets_are_named() {
    let problem = |offsets: &[i32]| check_offsets(offsets, 7).unwrap_err().to_string();
    assert_eq!(problem(&[]), "the length of cu_seqlens is 0, expected at least 1");
    assert_eq!(problem(&[1, 7]), "cu_seqlens[0] is 1: the first offset must be 0");
    let descends = "cu_seqlens[2] is 4: offsets must not descend, the one before is 5";
    assert_eq!(problem(&[0, 5, 4, 7]), descends);
    for (offsets, last) in [(&[0, 6][..], "[1] is 6"), (&[0, 3, 8], "[2] is 8"), (&[0], "[0] is 0")]
    {
        let expected = format!("cu_seqlens{last}: the last offset must be the 7 rows of all ranks");
        assert_eq!(problem(offsets), expected);
    }
    assert!(problem(&[0, i32::MIN]).contains("descend"));
    for offsets in [&[0, 7][..], &[0, 0, 7], &[0, 3, 3, 7, 7]] {
        check_offsets(offsets, 7).unwrap();
    }
    check_offsets(&[0], 0).unwrap();
}
