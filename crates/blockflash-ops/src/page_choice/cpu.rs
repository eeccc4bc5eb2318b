//! Summaries and choices on the CPU.

use super::{ChoosePages, ChoosePagesProblem, SummarizePages, SummarizePagesProblem};
use crate::float::Float;
use crate::kv_cache::{HostCache, token_ranges};
use crate::{Result, math};
use blockflash_safe::{Stream, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

pub(super) fn summarize(
    op: &SummarizePages<'_>,
    problem: &SummarizePagesProblem,
    summaries: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.summaries.cache.dtype {
        DType::F16 => summarize_of::<f16>(op, problem, summaries, stream),
        DType::BF16 => summarize_of::<bf16>(op, problem, summaries, stream),
        _ => summarize_of::<f32>(op, problem, summaries, stream),
    }
}

fn summarize_of<T: Float>(
    op: &SummarizePages<'_>,
    problem: &SummarizePagesProblem,
    mut summaries: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let (sizes, cache) = (problem.summaries, problem.summaries.cache);
    let host = HostCache::new(&op.cache, cache, stream)?;
    let keys = op.cache.k.as_slice::<T>()?;
    let target = summaries.as_mut_slice::<T>()?;
    let width = cache.head_dims.qk;
    let mut key = vec![0f32; width];
    for entry in 0..cache.batch {
        let length = host.length(entry);
        let first = length.saturating_sub(problem.tokens) / cache.page_size;
        for start in (first * cache.page_size..length).step_by(cache.page_size) {
            let end = length.min(start + cache.page_size);
            for head in 0..cache.num_heads_kv {
                let mut rows = match sizes.statistics {
                    1 => vec![vec![0f32; width]],
                    _ => vec![vec![f32::INFINITY; width], vec![f32::NEG_INFINITY; width]],
                };
                for at in start..end {
                    T::widen(&keys[host.row(cache.k, [entry, at, head])..][..width], &mut key);
                    match &mut rows[..] {
                        [sum] => sum.iter_mut().zip(&key).for_each(|(sum, x)| *sum += x),
                        [least, most] => {
                            least
                                .iter_mut()
                                .zip(&key)
                                .for_each(|(least, x)| *least = least.min(*x));
                            most.iter_mut().zip(&key).for_each(|(most, x)| *most = most.max(*x));
                        }
                        _ => {}
                    }
                }
                if let [sum] = &mut rows[..] {
                    sum.iter_mut().for_each(|x| *x /= (end - start) as f32);
                }
                let page = host.page(entry, start / cache.page_size);
                for (statistic, row) in rows.iter().enumerate() {
                    T::narrow(row, &mut target[sizes.row([page, statistic, head])..][..width]);
                }
            }
        }
    }
    Ok(())
}

pub(super) fn choose(
    op: &ChoosePages<'_>,
    problem: &ChoosePagesProblem,
    lists: ViewMut<'_>,
    counts: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.summaries.cache.dtype {
        DType::F16 => choose_of::<f16>(op, problem, lists, counts, stream),
        DType::BF16 => choose_of::<bf16>(op, problem, lists, counts, stream),
        _ => choose_of::<f32>(op, problem, lists, counts, stream),
    }
}

fn choose_of<T: Float>(
    op: &ChoosePages<'_>,
    problem: &ChoosePagesProblem,
    mut lists: ViewMut<'_>,
    mut counts: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let cache = problem.summaries.cache;
    let host = HostCache::new(&op.cache, cache, stream)?;
    let sizes = [cache.batch, problem.seqlen_q];
    let ranges = token_ranges(op.packed.as_ref(), sizes, problem.total_q, stream)?;
    let (q, summaries) = (op.q.as_slice::<T>()?, op.summaries.as_slice::<T>()?);
    let columns = |entry| host.length(entry).div_ceil(cache.page_size);
    for (entry, count) in counts.as_mut_slice::<i32>()?.iter_mut().enumerate() {
        *count = columns(entry).min(problem.capacity) as i32;
    }
    let lists = lists.as_mut_slice::<i32>()?.par_chunks_exact_mut(problem.capacity);
    lists.enumerate().for_each(|(at, list)| {
        let (entry, head) = (at / cache.num_heads_kv, at % cache.num_heads_kv);
        let queries = queries(problem, q, entry, head, ranges[entry].clone());
        let score = |column: usize| {
            let rows = (0..problem.summaries.statistics).map(|statistic| {
                let page = host.page(entry, column);
                let start = problem.summaries.row([page, statistic, head]);
                widened(&summaries[start..][..cache.head_dims.qk])
            });
            let rows: Vec<Vec<f32>> = rows.collect();
            let scores = queries.iter().map(|query| match &rows[..] {
                [least, most] => query
                    .iter()
                    .zip(least.iter().zip(most))
                    .map(|(q, (least, most))| (q * least).max(q * most))
                    .sum(),
                _ => math::dot(query, &rows[0]),
            });
            // The maximum passes over NaN.
            scores.fold(f32::NEG_INFINITY, f32::max)
        };
        list.fill(0);
        let columns = columns(entry);
        let mut chosen: Vec<usize> = (0..columns).collect();
        if columns > problem.capacity {
            let mut scored: Vec<(usize, f32)> = (1..columns - 1).map(|c| (c, score(c))).collect();
            // Stable: of equal scores the first one. Adding 0 makes −0 equal to 0.
            scored.sort_by(|(_, a), (_, b)| (b + 0.0).total_cmp(&(a + 0.0)));
            let inner = scored.iter().take(problem.capacity - 2).map(|&(column, _)| column);
            chosen = [0, columns - 1].into_iter().chain(inner).collect();
            chosen.sort_unstable();
        }
        list.iter_mut().zip(chosen).for_each(|(place, column)| *place = column as i32);
    });
    Ok(())
}

/// The queries of a sequence in the heads that share a head of keys.
fn queries<T: Float>(
    problem: &ChoosePagesProblem,
    q: &[T],
    entry: usize,
    head: usize,
    tokens: Range<usize>,
) -> Vec<Vec<f32>> {
    let cache = &problem.summaries.cache;
    let group = problem.num_heads_q / cache.num_heads_kv;
    let of_token = |token| (head * group..(head + 1) * group).map(move |head| (token, head));
    let row = |(token, head): (usize, usize)| {
        let start = entry * problem.q.batch + token * problem.q.seq + head * problem.q.head;
        widened(&q[start..][..cache.head_dims.qk])
    };
    tokens.flat_map(of_token).map(row).collect()
}

fn widened<T: Float>(row: &[T]) -> Vec<f32> {
    let mut widened = vec![0.0; row.len()];
    T::widen(row, &mut widened);
    widened
}
