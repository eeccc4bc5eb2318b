//! Summaries, scores and choices by their definitions, in f64.

use super::PageCase;
use crate::number::{decode, encode};

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

/// The score of a page with this summary, and how far a sum in f32 may be off.
pub(super) fn score(
    case: &PageCase,
    q: &[f32],
    summary: &[f32],
    sequence: usize,
    head: usize,
) -> [f64; 2] {
    let d = case.head_dim;
    let first: usize = case.queries[..sequence].iter().sum();
    let rows = (first..first + case.queries[sequence])
        .flat_map(|token| (0..case.group).map(move |member| (token, member)))
        .map(|(token, member)| {
            let row = (token * case.heads_kv + head) * case.group + member;
            &q[row * d..][..d]
        });
    let mut best = [f64::NEG_INFINITY, 0.0];
    for row in rows {
        // Products of 16-bit numbers are exact in f32, and f32::max passes over NaN.
        let product = |statistic: usize, i: usize| row[i] * summary[statistic * d + i];
        let products = (0..d).map(|i| match case.statistics {
            1 => f64::from(product(0, i)),
            _ => f64::from(product(0, i).max(product(1, i))),
        });
        let (sum, size) = products.fold((0f64, 0f64), |(sum, size), x| (sum + x, size + x.abs()));
        best[0] = best[0].max(sum + 0.0); // 0 and -0 are the same score
        if !case.exact {
            best[1] = best[1].max(size * (d + 2) as f64 * 2f64.powi(-24));
        }
    }
    best
}

/// Checks the list of a head against the scores of all columns. Scores that are further apart than
/// their errors decide; with errors of 0 the list is unique.
pub(super) fn check_list(list: &[i32], scores: &[[f64; 2]]) -> Result<(), String> {
    let (capacity, columns) = (list.len(), scores.len());
    if columns <= capacity {
        let expected: Vec<i32> =
            (0..capacity).map(|i| if i < columns { i as i32 } else { 0 }).collect();
        return if list == expected { Ok(()) } else { Err(format!("{list:?}, not {expected:?}")) };
    }
    let is_ascending = list.windows(2).all(|pair| pair[0] < pair[1]);
    if !is_ascending || list[0] != 0 || list[capacity - 1] != columns as i32 - 1 {
        return Err(format!("{list:?} of {columns} columns"));
    }
    let mut is_chosen = vec![false; columns];
    list.iter().for_each(|&column| is_chosen[column as usize] = true);
    let inner = 1..columns - 1;
    // The last chosen one and the first other one in the order of choice: descending, and of equal
    // scores the first ones first.
    let worst = inner.clone().filter(|&c| is_chosen[c]).map(|c| (c, scores[c][0] + scores[c][1]));
    let worst = worst.min_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    let best = inner.filter(|&c| !is_chosen[c]).map(|c| (c, scores[c][0] - scores[c][1]));
    let best = best.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    match (worst, best) {
        (Some((chosen, low)), Some((other, high)))
            if low < high || (low == high && scores[chosen][1] == 0.0 && other < chosen) =>
        {
            Err(format!("column {chosen} of score {low} is chosen, {other} of {high} is not"))
        }
        _ => Ok(()),
    }
}
