//! The choice of the pages of a cache that queries visit, by its definition.

use crate::block_scores::BlockMean;
use crate::comparison::Comparison;
use crate::elements::Element;
use crate::rounding::Rounding;
use blockflash_sys::DType;

/// Compares the summary of a page for one head with the keys there: one row for their mean, two for
/// their minimum and maximum.
pub fn page_summary(dtype: DType, keys: &[Vec<f32>], rows: &[Vec<f32>]) -> Comparison {
    let head_dim = keys.first().map_or(0, Vec::len);
    let [mean] = rows else {
        let bound = |bound: fn(f32, f32) -> f32, start: f32| {
            let of = |i| keys.iter().map(|key: &Vec<f32>| key[i]).fold(start, bound);
            (0..head_dim).map(of).map(f64::from).collect::<Vec<_>>()
        };
        let bounds = [bound(f32::min, f32::INFINITY), bound(f32::max, f32::NEG_INFINITY)];
        let exact = |exact: f64| Element { exact, plain: exact, ..Element::default() };
        let compare = |(row, bound): (&Vec<f32>, Vec<f64>)| {
            let row = row.iter().copied().zip(bound.into_iter().map(exact));
            Comparison::of_row(dtype, row, |_| 0.0)
        };
        return rows.iter().zip(bounds).map(compare).fold(Comparison::default(), Comparison::merge);
    };
    let expected = BlockMean::of(head_dim, keys.iter());
    let rounding = Rounding::of_products(0, keys.len(), dtype);
    let row = mean.iter().copied().zip(expected.elements(dtype));
    Comparison::of_row(dtype, row, |sizes| rounding.largest(sizes))
}

/// The score of a page in f64, and how far the same in f32 may be from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageScore {
    /// The score.
    pub score: f64,
    /// Its largest error.
    pub error: f64,
}

impl PageScore {
    /// The largest score of a page with these rows of a summary among all queries. `unit` is the
    /// error of a sum, relative to the sum of sizes: 0 where sums are exact.
    pub fn new<'q>(
        queries: impl IntoIterator<Item = &'q [f32]>,
        summary: &[&[f32]],
        unit: f64,
    ) -> Self {
        let mut best = Self { score: f64::NEG_INFINITY, error: 0.0 };
        for query in queries {
            // Products of 16-bit numbers are exact in f32, and f32::max passes over NaN.
            let products = query.iter().enumerate().map(|(i, q)| {
                let products = summary.iter().map(|row| q * row[i]);
                f64::from(products.fold(f32::NAN, f32::max))
            });
            let (sum, size) =
                products.fold((0f64, 0f64), |(sum, size), x| (sum + x, size + x.abs()));
            best.score = best.score.max(sum + 0.0); // 0 and -0 are the same score
            best.error = best.error.max(size * unit);
        }
        best
    }
}

/// Judges the list of a head by the scores of all pages of a sequence. The first page and the last
/// one are in it, and of the others those with the largest scores, of equal scores the first ones;
/// what is behind the last entry is 0. Scores that are further apart than their errors decide; with
/// errors of 0 the list is unique.
pub fn page_choice(list: &[i32], scores: &[PageScore]) -> Comparison {
    let (room, pages) = (list.len(), scores.len());
    let verdict = |error: f64, limit: f64| {
        let mut found = Comparison::default();
        (found.checked, found.total) = (room as u64, room as u64);
        (found.error, found.limit) = (error, limit);
        found
    };
    let (right, wrong) = (verdict(0.0, 0.0), verdict(f64::INFINITY, 0.0));
    if pages <= room {
        let all = (0..pages as i32).chain(std::iter::repeat(0)).take(room);
        return if all.eq(list.iter().copied()) { right } else { wrong };
    }
    let ascends = list.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascends || list.first() != Some(&0) || list.last() != Some(&(pages as i32 - 1)) {
        return wrong;
    }
    let mut is_chosen = vec![false; pages];
    list.iter().for_each(|&page| is_chosen[page as usize] = true);
    let inner = || 1..pages - 1;
    // The last chosen one and the first other one in the order of choice: descending, and of equal
    // scores the first ones first.
    let worst = inner().filter(|&page| is_chosen[page]);
    let worst = worst.map(|page| (page, scores[page].score + scores[page].error));
    let worst = worst.min_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    let best = inner().filter(|&page| !is_chosen[page]);
    let best = best.map(|page| (page, scores[page].score - scores[page].error));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    let (Some((chosen, low)), Some((other, high))) = (worst, best) else { return right };
    if low < high || low == high && scores[chosen].error == 0.0 && other < chosen {
        let excess = scores[other].score - scores[chosen].score;
        return if excess > 0.0 { verdict(excess, 0.0) } else { wrong };
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(scores: &[f64]) -> Vec<PageScore> {
        scores.iter().map(|&score| PageScore { score, error: 0.0 }).collect()
    }

    #[test]
    fn a_list_has_the_ends_and_the_best_pages() {
        let scores = exact(&[0.0, 1.0, 3.0, 1.0, 9.0, 0.0]);
        let passes = |list: &[i32]| page_choice(list, &scores).passed();
        assert!(passes(&[0, 2, 4, 5]) && passes(&[0, 1, 2, 4, 5]) && passes(&[0, 5]));
        assert!(passes(&[0, 1, 2, 3, 4, 5]) && passes(&[0, 1, 2, 3, 4, 5, 0]));
        for list in [&[0, 1, 4, 5][..], &[0, 2, 3, 4, 5], &[0, 2, 4], &[1, 2, 4, 5], &[0, 4, 2, 5]]
        {
            assert!(!passes(list), "{list:?}");
        }
        assert!(!passes(&[0, 1, 2, 3, 4, 5, 5]));
    }

    #[test]
    fn scores_within_their_errors_are_equal() {
        let mut scores = exact(&[0.0, 1.0, 1.5, 0.0]);
        assert!(!page_choice(&[0, 1, 3], &scores).passed());
        scores.iter_mut().for_each(|score| score.error = 0.3);
        assert!(page_choice(&[0, 1, 3], &scores).passed());
    }

    #[test]
    fn a_score_is_the_largest_of_all_queries() {
        let queries = [[1.0, -2.0], [0.5, 0.5]];
        let of = |summary: &[&[f32]]| PageScore::new(queries.iter().map(|q| &q[..]), summary, 0.5);
        assert_eq!(of(&[&[3.0, 1.0]]), PageScore { score: 2.0, error: 2.5 });
        // 1·3 and -2·-1; .5·3 and .5·1
        assert_eq!(of(&[&[1.0, -1.0], &[3.0, 1.0]]), PageScore { score: 5.0, error: 2.5 });
    }

    #[test]
    fn a_summary_is_that_of_the_keys() {
        let keys = [vec![1.0, 4.0], vec![2.0, -6.0]];
        let passes = |rows: &[Vec<f32>]| page_summary(DType::F16, &keys, rows).passed();
        assert!(passes(&[vec![1.5, -1.0]]) && passes(&[vec![1.0, -6.0], vec![2.0, 4.0]]));
        assert!(!passes(&[vec![1.5, -1.1]]) && !passes(&[vec![1.0, -6.0], vec![2.0, 4.5]]));
    }
}
