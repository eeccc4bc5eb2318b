//! Attention of a query to the blocks of keys that a list names, by its definition.

use crate::attention_row::{AttentionRow, Precision, attention_row};
use crate::scores::{Added, Scores};
use std::collections::HashMap;
use std::ops::Range;

/// The keys of a list, in its order and as often as they are listed: of block `e` the keys
/// `e * granularity .. (e + 1) * granularity`, as far as they are in a range of positions. Negative
/// entries name nothing.
pub fn listed_keys(list: &[i32], granularity: usize, seen: Range<usize>) -> Vec<usize> {
    let block = |&entry: &i32| {
        let start = usize::try_from(entry).ok()?.saturating_mul(granularity);
        Some(start.max(seen.start)..start.saturating_add(granularity).min(seen.end))
    };
    list.iter().filter_map(block).flatten().collect()
}

/// Attention of a query to [`listed_keys`], as [`attention_row`] takes them.
pub fn index_attention_row<'a>(
    precision: impl Into<Precision>,
    scores: Scores,
    query: &[f32],
    width: usize,
    keys: &[usize],
    row: impl Fn(usize) -> [&'a [f32]; 2],
    added: impl Fn(usize) -> Added,
) -> AttentionRow {
    let mut counts = HashMap::new();
    keys.iter().for_each(|key| *counts.entry(key).or_insert(0u32) += 1);
    let most = counts.values().copied().max().unwrap_or(1);
    let mut found = attention_row(precision, scores, query, width, keys, row, added);
    // The probabilities of a key that is there several times are rounded alike, so their errors add
    // up.
    found.o.iter_mut().for_each(|element| element.magnitude *= f64::from(most).sqrt());
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::DType;

    #[test]
    fn lists_name_blocks_in_any_order() {
        let keys = |list: &[i32]| listed_keys(list, 4, 2..11);
        assert_eq!(keys(&[2, -1, 0, i32::MIN, 3, i32::MAX]), [8, 9, 10, 2, 3]);
        assert_eq!(keys(&[1, 1]), [4, 5, 6, 7, 4, 5, 6, 7]);
        assert_eq!(listed_keys(&[0, 1], 4, 5..5), []);
        assert_eq!(listed_keys(&[], 1, 0..9), []);
    }

    #[test]
    fn a_key_that_is_listed_twice_has_twice_its_probability() {
        let (keys, values) = ([[1.0f32], [1.0]], [[3.0f32], [6.0]]);
        let row = |at: usize| [&keys[at][..], &values[at][..]];
        let scores = Scores::new(1.0, None);
        let of = |keys: &[usize]| {
            let no_term = |_| Added::default();
            index_attention_row(DType::F32, scores, &[2.0], 1, keys, row, no_term)
        };
        let twice = of(&[1, 0, 1]);
        assert!((twice.o[0].exact - 5.0).abs() < 1e-12);
        assert!((twice.lse.exact - (2.0 + 3f64.ln())).abs() < 1e-12);
        let nothing = of(&[]);
        assert_eq!((nothing.o[0].exact, nothing.lse.exact), (0.0, f64::NEG_INFINITY));
    }
}
