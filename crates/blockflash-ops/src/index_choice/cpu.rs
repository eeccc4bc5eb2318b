//! Scores and choices on the CPU.

use super::rows::Row;
use super::{BlockReduction, IndexScores, IndexScoresProblem, TopK, TopKProblem};
use crate::attention::check_offsets;
use crate::float::Float;
use crate::kv_cache::{HostCache, PackedTokens, token_ranges};
use crate::{Result, math};
use blockflash_safe::{Stream, View, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::cmp::Ordering;
use std::ops::Range;

/// Rows of results that are kept before they are stored.
const KEPT: usize = 256;

/// Table, lengths or offsets of the keys in host memory. Offsets are verified.
pub(super) fn host_cache(
    op: &IndexScores<'_>,
    problem: &IndexScoresProblem,
    stream: &Stream,
) -> Result<HostCache> {
    let Some(packed) = &op.packed_kv else {
        return HostCache::new(&op.cache, problem.cache, stream);
    };
    let offsets = packed.cu_seqlens.to_vec::<i32>(stream)?;
    check_offsets("kv", &offsets, packed.max_seqlen, Some(problem.cache.page_size))?;
    Ok(HostCache::packed(problem.cache, offsets))
}

/// The rows of packed sequences, verified, or those of any sequence.
pub(super) fn ranges(
    rows: &super::IndexRows,
    packed: Option<&PackedTokens<'_>>,
    stream: &Stream,
) -> Result<Vec<Range<usize>>> {
    token_ranges(packed, [rows.batch, rows.seqlen_q], rows.total_q, stream)
}

/// How many keys each sequence has, as it is stored. Offsets are verified.
pub(super) fn lengths(op: &TopK<'_>, problem: &TopKProblem, stream: &Stream) -> Result<Vec<i64>> {
    let capacity = problem.rows.capacity as i64;
    Ok(match (&op.packed_kv, &op.seqused_kv) {
        (Some(packed), _) => {
            let offsets = packed.cu_seqlens.to_vec::<i32>(stream)?;
            check_offsets("kv", &offsets, packed.max_seqlen, None)?;
            offsets.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0])).collect()
        }
        (None, Some(seqused)) => {
            seqused.to_vec::<i32>(stream)?.into_iter().map(i64::from).collect()
        }
        (None, None) => vec![capacity; problem.rows.batch],
    })
}

pub(super) fn scores(
    op: &IndexScores<'_>,
    problem: &IndexScoresProblem,
    scores: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.cache.dtype {
        DType::F16 => scores_of::<f16>(op, problem, scores, stream),
        DType::BF16 => scores_of::<bf16>(op, problem, scores, stream),
        _ => scores_of::<f32>(op, problem, scores, stream),
    }
}

fn scores_of<T: Float>(
    op: &IndexScores<'_>,
    problem: &IndexScoresProblem,
    mut scores: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let (sizes, cache) = (&problem.rows, &problem.cache);
    let host = host_cache(op, problem, stream)?;
    let rows = sizes.host(&ranges(sizes, op.packed.as_ref(), stream)?, |entry| host.length(entry));
    let call = Call::<T> {
        problem,
        q: op.q.as_slice()?,
        weights: op.weights.as_ref().map(View::as_slice).transpose()?,
    };
    let (target, blocks) = (scores.as_mut_slice::<f32>()?, sizes.blocks());
    let width = cache.head_dims.qk;
    let stored = op.cache.k.as_slice::<T>()?;
    // Neighbouring rows are of one sequence.
    let mut at = 0;
    for same in rows.chunk_by(|a, b| a.query[0] == b.query[0]) {
        let entry = same[0].query[0];
        let length = same.iter().map(|row| row.keys.end).max().unwrap_or_default();
        let mut keys = vec![0f32; length * cache.num_heads_kv * width];
        let of_key = cache.num_heads_kv * width;
        keys.par_chunks_exact_mut(of_key).enumerate().for_each(|(key, heads)| {
            for (head, row) in heads.chunks_exact_mut(width).enumerate() {
                T::widen(&stored[host.row(cache.k, [entry, key, head])..][..width], row);
            }
        });
        for some in same.chunks(KEPT) {
            let every = (0..problem.groups * some.len()).into_par_iter();
            let computed: Vec<Vec<f32>> = every
                .map(|i| {
                    call.row([i / some.len(), at + i % some.len()], &some[i % some.len()], &keys)
                })
                .collect();
            for (i, row) in computed.iter().enumerate() {
                let [group, row_at] = [i / some.len(), at + i % some.len()];
                let start = group * problem.scores[0] + row_at * problem.scores[1];
                target[start..][..blocks].copy_from_slice(row);
            }
            at += some.len();
        }
    }
    Ok(())
}

/// A call whose queries have this type.
struct Call<'a, T> {
    problem: &'a IndexScoresProblem,
    q: &'a [T],
    weights: Option<&'a [f32]>,
}

impl<T: Float> Call<'_, T> {
    /// The scores of all blocks for a group and a row, by the keys of its sequence
    /// `[keys, heads, head_dim]`.
    fn row(&self, [group, at]: [usize; 2], row: &Row, keys: &[f32]) -> Vec<f32> {
        let problem = self.problem;
        let (sizes, cache) = (&problem.rows, &problem.cache);
        let (width, heads_kv) = (cache.head_dims.qk, cache.num_heads_kv);
        let in_group = problem.num_heads / problem.groups;
        let head_kv = group * heads_kv / problem.groups;
        let heads: Vec<(Vec<f32>, f32)> = (group * in_group..(group + 1) * in_group)
            .map(|head| {
                let [entry, query] = row.query;
                let q = problem.q;
                let start = entry * q.batch + query * q.seq + head * q.head;
                let mut widened = vec![0.0; width];
                T::widen(&self.q[start..][..width], &mut widened);
                let weight = self.weights.zip(problem.weights);
                (
                    widened,
                    weight.map_or(1.0, |(all, [row, of]): (&[f32], _)| all[at * row + head * of]),
                )
            })
            .collect();
        let score = |key: usize| -> f32 {
            let key = &keys[(key * heads_kv + head_kv) * width..][..width];
            let of_head = |(q, weight): &(Vec<f32>, f32)| {
                let product = problem.scale * math::dot(q, key);
                // A comparison that NaN fails.
                weight * if problem.relu && product < 0.0 { 0.0 } else { product }
            };
            heads.iter().map(of_head).sum()
        };
        let mut scores = vec![f32::NEG_INFINITY; sizes.blocks()];
        for block in sizes.blocks_of(&row.keys) {
            let start = (block * sizes.granularity).max(row.keys.start);
            let end = (block + 1).saturating_mul(sizes.granularity).min(row.keys.end);
            scores[block] = match problem.reduction {
                // Unlike f32::max, this keeps NaN.
                BlockReduction::Max => (start..end)
                    .map(score)
                    .fold(f32::NEG_INFINITY, |a, b| if a.is_nan() || a > b { a } else { b }),
                BlockReduction::Mean => (start..end).map(score).sum::<f32>() / (end - start) as f32,
            };
        }
        scores
    }
}

pub(super) fn choose(
    op: &TopK<'_>,
    problem: &TopKProblem,
    mut chosen: ViewMut<'_>,
    stream: &Stream,
) -> Result<()> {
    let (sizes, k) = (&problem.rows, problem.k);
    let lengths = lengths(op, problem, stream)?;
    let length = |entry: usize| lengths[entry].clamp(0, sizes.capacity as i64) as usize;
    let rows = sizes.host(&ranges(sizes, op.packed.as_ref(), stream)?, length);
    let scores = op.scores.as_slice::<f32>()?;
    let target = chosen.as_mut_slice::<i32>()?;
    let all: Vec<[usize; 2]> =
        (0..problem.groups).flat_map(|group| (0..rows.len()).map(move |at| [group, at])).collect();
    for some in all.chunks(KEPT) {
        let lists: Vec<Vec<usize>> = some
            .par_iter()
            .map(|&[group, at]| {
                let columns = sizes.blocks_of(&rows[at].keys);
                let start = group * problem.scores[0] + at * problem.scores[1];
                // Without blocks there may be no memory.
                largest(scores.get(start..).unwrap_or_default(), columns, problem)
            })
            .collect();
        for (&[group, at], list) in some.iter().zip(&lists) {
            let start = group * problem.chosen[0] + at * problem.chosen[1];
            let list = list.iter().map(|&column| column as i32).chain(std::iter::repeat(-1));
            target[start..][..k].iter_mut().zip(list).for_each(|(place, column)| *place = column);
        }
    }
    Ok(())
}

/// The columns that a row chooses among these, ascending.
fn largest(scores: &[f32], columns: Range<usize>, problem: &TopKProblem) -> Vec<usize> {
    let [first, last] = problem.forced;
    let tail = columns.end.saturating_sub(last);
    let is_forced = |column: usize| column < first || column >= tail;
    let mut chosen: Vec<usize> = columns.clone().filter(|&column| is_forced(column)).collect();
    // A comparison that NaN fails.
    let mut others: Vec<usize> = columns
        .filter(|&column| !is_forced(column) && scores[column] > f32::NEG_INFINITY)
        .collect();
    let room = problem.k - chosen.len();
    if others.len() > room {
        let before = |&a: &usize, &b: &usize| -> Ordering {
            // None is NaN.
            scores[b].partial_cmp(&scores[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
        };
        others.select_nth_unstable_by(room, before);
        others.truncate(room);
    }
    chosen.extend(others);
    chosen.sort_unstable();
    chosen
}
