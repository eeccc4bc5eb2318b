//! Scores of blocks of keys for a query, and the choice among them, by their definitions.

use crate::comparison::Comparison;
use crate::elements::Element;
use crate::product::{Activation, Dot, Epilogue};
use crate::rounding::Rounding;
use blockflash_sys::DType;
use std::ops::Range;

/// A query in the heads of a group of an index.
#[derive(Clone, Debug)]
pub struct IndexQuery<'a> {
    /// Each head with its weight.
    pub heads: Vec<(&'a [f32], f32)>,
    /// Factor of products.
    pub scale: f32,
    /// Whether scaled products below 0 become 0.
    pub relu: bool,
}

impl IndexQuery<'_> {
    /// The score of a key.
    pub fn key(&self, key: &[f32]) -> Element {
        let activation = if self.relu { Activation::Relu } else { Activation::None };
        let epilogue = Epilogue { alpha: self.scale, beta: 0.0, activation, output: DType::F32 };
        let mut sum = Element::default();
        let (mut plain, mut squares) = (0f32, 0f64);
        for &(query, weight) in &self.heads {
            let of_head = Dot::of(query, key).finish(&epilogue, 0.0, 0.0);
            let size = f64::from(weight).abs();
            sum.exact += f64::from(weight) * of_head.exact;
            plain += weight * of_head.plain as f32;
            squares += (size * of_head.magnitude).powi(2);
            sum.partial += size * of_head.partial;
        }
        Element { plain: f64::from(plain), magnitude: squares.sqrt(), ..sum }
    }

    /// What a correct computation of the score of a block of this many keys is free to round.
    pub fn rounding(&self, keys: usize) -> Rounding {
        let width = self.heads.first().map_or(0, |(query, _)| query.len());
        Rounding::of_products(width, 2 * self.heads.len() + keys, DType::F32)
    }
}

/// The score of a block by those of the keys that the query sees: the largest one, or their mean.
/// −∞ without keys; NaN if one of them is.
pub fn index_block(keys: &[Element], mean: bool) -> Element {
    if keys.is_empty() {
        return Element {
            exact: f64::NEG_INFINITY,
            plain: f64::NEG_INFINITY,
            ..Element::default()
        };
    }
    // Unlike f64::max, these keep NaN.
    let largest = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
    let of = |what: fn(&Element) -> f64| {
        let all = keys.iter().map(what);
        match mean {
            true => all.sum::<f64>() / keys.len() as f64,
            false => all.fold(f64::NEG_INFINITY, largest),
        }
    };
    Element {
        exact: of(|key| key.exact),
        plain: of(|key| key.plain),
        magnitude: of(|key| key.magnitude),
        partial: of(|key| key.partial),
    }
}

/// Compares the scores of a row with the expected ones.
pub fn index_scores_row(found: &[f32], expected: &[Element], rounding: Rounding) -> Comparison {
    let row = found.iter().copied().zip(expected.iter().copied());
    Comparison::of_row(DType::F32, row, |sizes| rounding.largest(sizes))
}

/// The list of a row with room for k: of the columns that its query sees those before `first` and
/// the `last` ones, then those with the largest scores, of equal scores the lower ones, none with
/// −∞ or NaN; ascending, with −1 behind.
pub fn largest_columns(
    scores: &[f32],
    columns: Range<usize>,
    [first, last]: [usize; 2],
    k: usize,
) -> Vec<i32> {
    let is_forced = |&column: &usize| column < first || column + last >= columns.end;
    let (mut chosen, mut others): (Vec<usize>, Vec<usize>) = columns.clone().partition(is_forced);
    others.retain(|&column| !scores[column].is_nan() && scores[column] != f32::NEG_INFINITY);
    // Stable: of equal scores the first one. Adding 0 makes −0 equal to 0.
    others.sort_by(|&a, &b| (scores[b] + 0.0).total_cmp(&(scores[a] + 0.0)));
    others.truncate(k - chosen.len());
    chosen.extend(others);
    chosen.sort_unstable();
    let list = chosen.into_iter().map(|column| column as i32);
    list.chain(std::iter::repeat(-1)).take(k).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_weighted_sum_of_its_heads() {
        let heads = vec![(&[1.0, 2.0][..], 3.0), (&[-4.0, 0.0], 0.5)];
        let of = |relu| IndexQuery { heads: heads.clone(), scale: 2.0, relu }.key(&[1.0, 1.0]);
        // 3 · 2 · 3 and 0.5 · 2 · -4
        assert_eq!((of(false).exact, of(true).exact), (14.0, 18.0));
        assert_eq!((of(false).plain, of(true).plain), (14.0, 18.0));
    }

    #[test]
    fn a_block_has_the_largest_or_the_mean_score() {
        let key = |exact: f64| Element { exact, plain: exact, ..Element::default() };
        let keys = [key(1.0), key(5.0), key(-3.0)];
        assert_eq!(index_block(&keys, false).exact, 5.0);
        assert_eq!(index_block(&keys, true).exact, 1.0);
        assert_eq!(index_block(&[], false).exact, f64::NEG_INFINITY);
        for mean in [true, false] {
            assert!(index_block(&[key(1.0), key(f64::NAN), key(7.0)], mean).exact.is_nan());
        }
    }

    #[test]
    fn lists_have_the_largest_columns() {
        let scores = [1.0, 5.0, -0.0, 5.0, f32::NAN, 0.0, f32::NEG_INFINITY, 5.0, 9.0];
        let list = |columns, forced, k| largest_columns(&scores, columns, forced, k);
        assert_eq!(list(0..8, [0, 0], 2), [1, 3]);
        assert_eq!(list(0..8, [0, 0], 4), [0, 1, 3, 7]);
        assert_eq!(list(0..8, [0, 0], 5), [0, 1, 2, 3, 7]);
        assert_eq!(list(0..8, [0, 0], 8), [0, 1, 2, 3, 5, 7, -1, -1]);
        assert_eq!(list(2..7, [3, 1], 3), [2, 3, 6]);
        assert_eq!(list(4..7, [0, 3], 4), [4, 5, 6, -1]);
        assert_eq!(list(3..3, [1, 1], 2), [-1, -1]);
    }
}
