use super::most_splits;

/// The rule of `decode/items.cuh`.
fn splits_of(keys: i64, [splits, shortest, longest]: [i64; 3]) -> i64 {
    let up = |a: i64, b: i64| (a + b - 1) / b;
    let chunk = up(keys, splits).max(shortest).min(longest).max(up(keys, 256));
    up(keys, up(chunk, 64) * 64).max(1)
}

/// The workspace has room for every length up to the capacity, and two levels of 16 combine all
/// splits.
#[test]
fn no_length_has_more_splits_than_the_capacity_allows() {
    for rule in [[16, 128, 4096], [128, 128, 4096], [1, 64, 64], [256, 64, 4096], [3, 192, 320]] {
        let mut largest = 1;
        for keys in (0..70_000).step_by(7).chain((70_000..2_000_000).step_by(4_001)) {
            largest = largest.max(splits_of(keys, rule));
            assert!(largest <= most_splits(keys, rule), "{rule:?}: {largest} of {keys} keys");
            assert!(largest <= 256, "{rule:?}: {largest} of {keys} keys");
        }
    }
}
