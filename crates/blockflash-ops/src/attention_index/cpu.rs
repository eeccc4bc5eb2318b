//! Attention by an index on the CPU: each query and list is one call of ordinary attention to the
//! keys that it sees, which are copied out of the cache in ascending order. So its bits depend on
//! no other query, and not on the order of the list.

use super::lists::{HostLists, ListedKeys};
use super::{IndexAttention, IndexAttentionOperands, IndexAttentionProblem};
use crate::Result;
use crate::attention::cpu::sequence::Sequence;
use crate::attention::cpu::terms::Terms;
use crate::attention::{Attention, AttentionOutput, Mask, Scores, check_offsets};
use crate::float::Float;
use crate::kv_cache::{HostCache, HostRows, KvCache, Stored, token_ranges};
use blockflash_safe::{E4M3, E5M2, Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Calls of attention whose results are kept before they are stored.
const KEPT: usize = 256;

/// Computes a problem that was checked and has outputs.
pub(super) fn forward(
    op: &IndexAttention<'_>,
    problem: &IndexAttentionProblem,
    operands: IndexAttentionOperands<'_>,
    stream: &Stream,
) -> Result<()> {
    match problem.attention.types.q {
        DType::F16 => beside::<f16>(op, problem, operands, stream),
        DType::BF16 => beside::<bf16>(op, problem, operands, stream),
        _ => beside::<f32>(op, problem, operands, stream),
    }
}

/// The keys and values beside queries of this type.
fn beside<T: Float>(
    op: &IndexAttention<'_>,
    problem: &IndexAttentionProblem,
    operands: IndexAttentionOperands<'_>,
    stream: &Stream,
) -> Result<()> {
    let IndexAttentionOperands { cache, o, lse } = operands;
    match problem.attention.types.kv {
        DType::E4M3 => Call::<T, E4M3>::new(op, problem, &cache, stream)?.run(o, lse),
        DType::E5M2 => Call::<T, E5M2>::new(op, problem, &cache, stream)?.run(o, lse),
        DType::I8 => Call::<T, i8>::new(op, problem, &cache, stream)?.run(o, lse),
        DType::U8 => Call::<T, u8>::new(op, problem, &cache, stream)?.run(o, lse),
        _ => Call::<T, T>::new(op, problem, &cache, stream)?.run(o, lse),
    }
}

/// Table, lengths or offsets of a cache in host memory. Offsets of packed keys are verified.
pub(super) fn host_cache(
    op: &IndexAttention<'_>,
    problem: &IndexAttentionProblem,
    cache: &KvCache<'_>,
    stream: &Stream,
) -> Result<HostCache> {
    let Some(packed) = &op.packed_kv else { return HostCache::new(cache, problem.cache, stream) };
    let offsets = packed.cu_seqlens.to_vec::<i32>(stream)?;
    check_offsets("kv", &offsets, packed.max_seqlen, Some(problem.cache.page_size))?;
    Ok(HostCache::packed(problem.cache, offsets))
}

/// The queries of each sequence, as rows of packed tensors or of one sequence, and the place of the
/// first one in the lists. Offsets are verified.
pub(super) fn queries(
    op: &IndexAttention<'_>,
    problem: &IndexAttentionProblem,
    stream: &Stream,
) -> Result<Vec<(Range<usize>, usize)>> {
    let attention = &problem.attention;
    let total = attention.packed.map(|packed| packed.total_q);
    let sizes = [attention.batch, attention.seqlen_q];
    let ranges = token_ranges(op.packed.as_ref(), sizes, total, stream)?.into_iter().enumerate();
    Ok(ranges
        .map(|(entry, rows)| {
            let first = if total.is_some() { rows.start } else { entry * attention.seqlen_q };
            (rows, first)
        })
        .collect())
}

/// A call whose lists, tables and lengths are in host memory, with queries of a type and keys and
/// values of that type, or codes. Codes times their scales are f32, and so is then everything that
/// is computed of them, up to the output.
struct Call<'a, T, C> {
    op: &'a IndexAttention<'a>,
    problem: &'a IndexAttentionProblem,
    cached: HostRows<'a, C>,
    lists: HostLists,
    terms: Option<Terms<'a>>,
    stream: &'a Stream,
    of_queries: PhantomData<T>,
}

/// A query and the heads that share a list and a head of keys.
#[derive(Clone, Copy)]
struct Task {
    /// The sequence, with the row of its first query in a packed tensor.
    sequence: Sequence,
    /// The query among those of the sequence.
    query: usize,
    /// Its place in the lists.
    place: usize,
    unit: usize,
}

impl<'a, T: Float, C: Stored> Call<'a, T, C> {
    fn new(
        op: &'a IndexAttention<'a>,
        problem: &'a IndexAttentionProblem,
        cache: &KvCache<'a>,
        stream: &'a Stream,
    ) -> Result<Self> {
        let host = host_cache(op, problem, cache, stream)?;
        Ok(Self {
            op,
            problem,
            cached: HostRows::new(cache, host, stream)?,
            lists: HostLists::new(&op.lists, problem.lists, stream)?,
            terms: Terms::of(&op.scores)?,
            stream,
            of_queries: PhantomData,
        })
    }

    fn run(&self, mut o: ViewMut<'_>, mut lse: Option<ViewMut<'_>>) -> Result<()> {
        let tasks = self.tasks()?;
        if let Some(packed) = self.problem.attention.packed {
            let first = tasks.last().map_or(0, |task| task.place + 1);
            self.clear(first..packed.total_q, &mut o, lse.as_mut())?;
        }
        for tasks in tasks.chunks(KEPT) {
            let results: Vec<_> = tasks.par_iter().map(|task| self.attend(task)).collect();
            for (task, result) in tasks.iter().zip(results) {
                let AttentionOutput { o: rows, lse: sums } = result?;
                let (target, strides) = (o.as_mut_slice::<T>()?, self.problem.attention.o);
                let width = self.problem.attention.head_dims.v;
                for (at, head) in self.heads(task.unit).enumerate() {
                    let start = task.sequence.q_row(strides, head, task.query);
                    let (row, target) =
                        (at * width..(at + 1) * width, &mut target[start..][..width]);
                    match C::IS_CODED {
                        true => T::narrow(&rows.view().as_slice::<f32>()?[row], target),
                        false => target.copy_from_slice(&rows.view().as_slice::<T>()?[row]),
                    }
                }
                if let (Some(lse), Some(strides)) = (&mut lse, self.problem.attention.lse) {
                    let (sums, target) = (sums.view(), lse.as_mut_slice::<f32>()?);
                    for (&sum, head) in sums.as_slice()?.iter().zip(self.heads(task.unit)) {
                        target[task.sequence.lse(strides, head, task.query)] = sum;
                    }
                }
            }
        }
        Ok(())
    }

    /// Packed rows that belong to no sequence: nothing is visible to them.
    fn clear(
        &self,
        rows: Range<usize>,
        o: &mut ViewMut<'_>,
        mut lse: Option<&mut ViewMut<'_>>,
    ) -> Result<()> {
        let attention = &self.problem.attention;
        let zeros = vec![0.0; attention.head_dims.v];
        for (row, head) in rows.flat_map(|row| (0..attention.num_heads_q).map(move |h| (row, h))) {
            let start = row * attention.o.seq + head * attention.o.head;
            T::narrow(&zeros, &mut o.as_mut_slice::<T>()?[start..][..zeros.len()]);
            if let (Some(lse), Some(strides)) = (&mut lse, attention.lse) {
                lse.as_mut_slice::<f32>()?[head * strides.head + row] = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// All queries of all sequences with each unit.
    fn tasks(&self) -> Result<Vec<Task>> {
        let packed = self.problem.attention.packed.is_some();
        let mut tasks = Vec::new();
        for (entry, (rows, first)) in
            queries(self.op, self.problem, self.stream)?.into_iter().enumerate()
        {
            let sequence = Sequence {
                entry,
                first_q: if packed { rows.start } else { 0 },
                first_kv: 0,
                seqlen_q: rows.len(),
                seqlen_kv: self.cached.host.length(entry),
            };
            let of_query = |query| {
                let place = first + query;
                (0..self.problem.units()).map(move |unit| Task { sequence, query, place, unit })
            };
            tasks.extend((0..rows.len()).flat_map(of_query));
        }
        Ok(tasks)
    }

    /// The heads of queries of a unit.
    fn heads(&self, unit: usize) -> Range<usize> {
        let group = self.problem.group();
        unit * group..(unit + 1) * group
    }

    /// One call of attention, `[1, 1, heads of the unit, head_dim]`.
    fn attend(&self, task: &Task) -> Result<AttentionOutput> {
        let IndexAttentionProblem { attention, cache, lists, .. } = self.problem;
        let Task { sequence, query, place, unit } = *task;
        let (units, heads) = (self.problem.units(), self.heads(unit));
        let shown = attention.scores.mask.visible(query, sequence.seqlen_q, sequence.seqlen_kv);
        let group = unit * lists.groups / units;
        let listed = self.lists.keys([group, place], &shown);

        let q = match attention.packed {
            Some(_) => {
                let row = sequence.first_q + query;
                self.op.q.slice(0, row..row + 1)?.insert(0)?
            }
            None => {
                let entry = sequence.entry;
                self.op.q.slice(0, entry..entry + 1)?.slice(1, query..query + 1)?
            }
        };
        let q = q.slice(2, heads.clone())?;
        let wide = C::IS_CODED.then(|| self.widened(&q)).transpose()?;
        let q = wide.as_ref().map_or(q, Tensor::view);

        let head_kv = unit * cache.num_heads_kv / units;
        let keys = listed.keys.iter().copied();
        let [k, v] = self.cached.gather(sequence.entry, keys, head_kv..head_kv + 1, self.stream)?;
        let (k, v) = (k.view().insert(0)?, v.view().insert(0)?);
        let added = self.added(&sequence, query, heads.clone(), &listed)?;
        let scores = Scores {
            mask: Mask::Full,
            bias: added.as_ref().map(Tensor::view),
            alibi: None,
            ..self.op.scores.of_heads(heads)?
        };
        Attention { scores, ..Attention::new(q, k, v) }.forward(self.stream)
    }

    /// What is added to the scores of a query in some heads at listed keys, f32
    /// `[1, heads, 1, keys]`: a key that is listed `n` times has `n` times its probability.
    fn added(
        &self,
        sequence: &Sequence,
        query: usize,
        heads: Range<usize>,
        ListedKeys { keys, repeats }: &ListedKeys,
    ) -> Result<Option<Tensor>> {
        if self.terms.is_none() && repeats.is_empty() {
            return Ok(None);
        }
        let shape = [1, heads.len(), 1, keys.len()];
        let mut added = vec![0f32; heads.len() * keys.len()];
        for (head, row) in heads.zip(added.chunks_exact_mut(keys.len().max(1))) {
            if let Some(terms) = &self.terms {
                for (&key, term) in keys.iter().zip(&mut *row) {
                    let term = std::slice::from_mut(term);
                    terms.load(sequence, [head, query], key..key + 1, term);
                }
            }
            row.iter_mut().zip(repeats).for_each(|(term, repeats)| *term += repeats);
        }
        Ok(Some(Tensor::from_slice(self.stream, &added, &shape)?))
    }

    /// The same numbers in f32.
    fn widened(&self, view: &View<'_>) -> Result<Tensor> {
        let elements = view.to_vec::<T>(self.stream)?;
        let mut wide = vec![0.0; elements.len()];
        T::widen(&elements, &mut wide);
        Ok(Tensor::from_slice(self.stream, &wide, view.shape())?)
    }
}
