//! Summaries and scores by their definitions, in f64.

use super::PageCase;
use crate::number::{decode, encode};
use blockflash_oracle::PageScore;

/// A page and a head of keys of a sequence.
#[derive(Clone, Copy)]
pub(super) struct PageOf {
    pub(super) sequence: usize,
    pub(super) column: usize,
    pub(super) head: usize,
}

/// The bits that a summary may have, row by row: from the first to the second number.
pub(super) fn summary(case: &PageCase, keys: &[f32], table: &[i32], of: PageOf) -> Vec<[f32; 2]> {
    let PageOf { sequence, column, head } = of;
    let page = table[sequence * case.max_pages + column] as usize;
    let slots = (case.length(sequence) - column * case.page_size).min(case.page_size);
    let element = |slot: usize, i: usize| {
        let row = ((page * case.page_size + slot) * case.heads_kv + head) * case.head_dim;
        keys[row + i]
    };
    let rounded = |x: f64| decode(case.dtype, encode(case.dtype, x as f32));
    let mut rows = Vec::new();
    for (row, i) in (0..case.statistics).flat_map(|row| (0..case.head_dim).map(move |i| (row, i))) {
        let column = (0..slots).map(|slot| element(slot, i));
        rows.push(match (case.statistics, row) {
            (1, _) => {
                let count = slots as f64;
                let (sum, size) = column.fold((0f64, 0f64), |(sum, size), x| {
                    (sum + f64::from(x), size + f64::from(x).abs())
                });
                // The largest error of a sum in f32, in any order; small integers have none.
                let error = if case.exact { 0.0 } else { size * 2f64.powi(-24) };
                // Divided in f32 before it is rounded.
                let mean = |error: f64| rounded(f64::from((sum / count + error) as f32));
                [mean(-error), mean(error)]
            }
            (_, 0) => [rounded(column.fold(f32::INFINITY, f32::min).into()); 2],
            _ => [rounded(column.fold(f32::NEG_INFINITY, f32::max).into()); 2],
        });
    }
    rows
}

/// The score of a page with this summary.
pub(super) fn score(
    case: &PageCase,
    q: &[f32],
    summary: &[f32],
    sequence: usize,
    head: usize,
) -> PageScore {
    let d = case.head_dim;
    let first: usize = case.queries[..sequence].iter().sum();
    let rows = (first..first + case.queries[sequence])
        .flat_map(|token| (0..case.group).map(move |member| (token, member)))
        .map(|(token, member)| {
            let row = (token * case.heads_kv + head) * case.group + member;
            &q[row * d..][..d]
        });
    let unit = if case.exact { 0.0 } else { (d + 2) as f64 * 2f64.powi(-24) };
    PageScore::new(rows, &summary.chunks(d).collect::<Vec<_>>(), unit)
}
