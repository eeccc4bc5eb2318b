//! Attention on the CPU: blocked online softmax in f32, in parallel over batch entries, heads and
//! blocks of queries.
//!
//! Every block of queries is computed by one thread in a fixed order, so results do not depend on
//! the number of threads. Keys that a block mask does not visit are not even read.

mod tile;

use super::{Attention, AttentionProblem};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::{Stream, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tile::Tile;

/// Queries per task: enough that converting keys and values to f32 is small beside the products.
const BLOCK_Q: usize = 128;

/// One batch entry: its index, offsets of its first rows in elements, and its lengths.
#[derive(Clone, Copy)]
struct Sequence {
    entry: usize,
    q: usize,
    k: usize,
    v: usize,
    o: usize,
    lse: usize,
    seqlen_q: usize,
    seqlen_kv: usize,
}

/// One block of queries of one head, all in one row of the block mask.
struct Task {
    sequence: Sequence,
    head: usize,
    queries: Range<usize>,
}

/// The operands as slices of their elements.
struct Operands<'a, T> {
    problem: &'a AttentionProblem,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    sink: Option<&'a [f32]>,
    block_mask: Option<&'a BlockMask>,
}

/// The outputs. Strided rows of several tasks interleave, so that tasks take turns at writing;
/// computing takes far longer.
struct Outputs<'a, T> {
    o: &'a mut [T],
    lse: Option<&'a mut [f32]>,
}

/// Computes a problem that was checked and has outputs.
pub(super) fn forward(
    op: &Attention<'_>,
    problem: &AttentionProblem,
    o: ViewMut<'_>,
    lse: Option<ViewMut<'_>>,
    stream: &Stream,
) -> Result<()> {
    let sequences = sequences(op, problem, stream)?;
    match problem.dtype {
        DType::F16 => run::<f16>(op, problem, &sequences, o, lse),
        DType::BF16 => run::<bf16>(op, problem, &sequences, o, lse),
        _ => run::<f32>(op, problem, &sequences, o, lse),
    }
}

fn sequences(
    op: &Attention<'_>,
    problem: &AttentionProblem,
    stream: &Stream,
) -> Result<Vec<Sequence>> {
    let AttentionProblem { batch, seqlen_q, seqlen_kv, q, k, v, o, lse, .. } = *problem;
    let lse_batch = lse.map_or(0, |lse| lse.batch);
    let (Some(cu_seqlens), Some(packed)) = (&op.cu_seqlens, problem.packed) else {
        let entry = |b| Sequence {
            entry: b,
            q: b * q.batch,
            k: b * k.batch,
            v: b * v.batch,
            o: b * o.batch,
            lse: b * lse_batch,
            seqlen_q,
            seqlen_kv,
        };
        return Ok((0..batch).map(entry).collect());
    };
    let (cu_q, cu_kv) = cu_seqlens.read(stream, packed.total_q, packed.total_kv, op.block_mask)?;
    let pairs = cu_q.windows(2).zip(cu_kv.windows(2)).enumerate();
    Ok(pairs
        .map(|(entry, (rows_q, rows_kv))| {
            let [first_q, end_q, first_kv, end_kv] =
                [rows_q[0], rows_q[1], rows_kv[0], rows_kv[1]].map(|row| row as usize);
            Sequence {
                entry,
                q: first_q * q.seq,
                k: first_kv * k.seq,
                v: first_kv * v.seq,
                o: first_q * o.seq,
                lse: first_q,
                seqlen_q: end_q - first_q,
                seqlen_kv: end_kv - first_kv,
            }
        })
        .collect())
}

fn run<T: Float>(
    op: &Attention<'_>,
    problem: &AttentionProblem,
    sequences: &[Sequence],
    mut o: ViewMut<'_>,
    mut lse: Option<ViewMut<'_>>,
) -> Result<()> {
    let operands = Operands::<T> {
        problem,
        q: op.q.as_slice()?,
        k: op.k.as_slice()?,
        v: op.v.as_slice()?,
        sink: op.sink.as_ref().map(|sink| sink.as_slice()).transpose()?,
        block_mask: op.block_mask,
    };
    let lse = lse.as_mut().map(|lse| lse.as_mut_slice()).transpose()?;
    let outputs = Mutex::new(Outputs { o: o.as_mut_slice::<T>()?, lse });
    let tasks: Vec<Task> = sequences
        .iter()
        .flat_map(|&sequence| (0..problem.num_heads_q).map(move |head| (sequence, head)))
        .flat_map(|(sequence, head)| {
            let blocks = query_blocks(sequence.seqlen_q, op.block_mask.map(BlockMask::block_q));
            blocks.map(move |queries| Task { sequence, head, queries })
        })
        .collect();
    tasks.par_iter().try_for_each_init(
        || (Tile::new(problem), Vec::new()),
        |(tile, rounded), task| {
            tile.compute(&operands, task)?;
            rounded.resize(tile.o().len(), T::zeroed());
            T::narrow(tile.o(), rounded);
            let mut outputs = outputs.lock().unwrap_or_else(PoisonError::into_inner);
            outputs.write(problem, task, rounded, tile.lse());
            Ok(())
        },
    )
}

/// All queries of a sequence in blocks of at most [`BLOCK_Q`], each within one row of the block
/// mask.
fn query_blocks(
    seqlen_q: usize,
    mask_block_q: Option<usize>,
) -> impl Iterator<Item = Range<usize>> {
    let row = mask_block_q.unwrap_or(seqlen_q).max(1);
    (0..seqlen_q).step_by(row).flat_map(move |first| {
        let end = (first + row).min(seqlen_q);
        (first..end).step_by(BLOCK_Q).map(move |start| start..(start + BLOCK_Q).min(end))
    })
}

impl<T> Operands<'_, T> {
    /// The keys that a task visits, whatever the token mask shows, as ascending ranges with gaps
    /// between them.
    fn visited_keys(&self, task: &Task) -> Result<Vec<Range<usize>>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let (Some(mask), Some(sizes)) = (self.block_mask, self.problem.block_mask) else {
            ranges.push(0..task.sequence.seqlen_kv);
            return Ok(ranges);
        };
        let entry = if sizes.batch == 1 { 0 } else { task.sequence.entry };
        let head = sizes.head(task.head, self.problem.num_heads_q);
        for col in mask.row(entry, head, task.queries.start / mask.block_q())? {
            let keys = mask.geometry_of(entry).keys(col);
            match ranges.last_mut() {
                Some(last) if last.end == keys.start => last.end = keys.end,
                _ => ranges.push(keys),
            }
        }
        Ok(ranges)
    }
}

impl<T: Float> Outputs<'_, T> {
    /// Stores the rows of a task.
    fn write(&mut self, problem: &AttentionProblem, task: &Task, o: &[T], lse: &[f32]) {
        let first = task.sequence.o + task.head * problem.o.head;
        for (query, row) in task.queries.clone().zip(o.chunks_exact(problem.head_dim)) {
            self.o[first + query * problem.o.seq..][..row.len()].copy_from_slice(row);
        }
        if let (Some(target), Some(strides)) = (&mut self.lse, problem.lse) {
            let first = task.sequence.lse + task.head * strides.head + task.queries.start;
            target[first..][..lse.len()].copy_from_slice(lse);
        }
    }
}

#[cfg(test)]
mod block_tests;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
