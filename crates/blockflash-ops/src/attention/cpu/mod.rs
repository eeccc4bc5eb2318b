//! Attention on the CPU: blocked online softmax in f32, in parallel over batch entries, heads and
//! blocks of queries.
//!
//! Every block of queries is computed by one thread in a fixed order, so results do not depend on
//! the number of threads. Keys that a block mask does not visit are not even read.

mod scores;
pub(crate) mod sequence;
mod tile;

use super::{Attention, AttentionProblem};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::{Stream, ViewMut};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use sequence::{Sequence, blocks, sequences};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use tile::Tile;

/// Queries per task: enough that converting keys and values to f32 is small beside the products.
const BLOCK_Q: usize = 128;

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
    match problem.types.q {
        DType::F16 => run::<f16>(op, problem, &sequences, o, lse),
        DType::BF16 => run::<bf16>(op, problem, &sequences, o, lse),
        _ => run::<f32>(op, problem, &sequences, o, lse),
    }
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
        sink: op.scores.sink.as_ref().map(|sink| sink.as_slice()).transpose()?,
        block_mask: op.block_mask,
    };
    let lse = lse.as_mut().map(|lse| lse.as_mut_slice()).transpose()?;
    let outputs = Mutex::new(Outputs { o: o.as_mut_slice::<T>()?, lse });
    let tasks: Vec<Task> = sequences
        .iter()
        .flat_map(|&sequence| (0..problem.num_heads_q).map(move |head| (sequence, head)))
        .flat_map(|(sequence, head)| {
            let mask_block = op.block_mask.map(BlockMask::block_q);
            let blocks = blocks(sequence.seqlen_q, mask_block, BLOCK_Q);
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

impl<T: Float> Outputs<'_, T> {
    /// Stores the rows of a task.
    fn write(&mut self, problem: &AttentionProblem, task: &Task, o: &[T], lse: &[f32]) {
        for (query, row) in task.queries.clone().zip(o.chunks_exact(problem.head_dims.v)) {
            let start = task.sequence.q_row(problem.o, task.head, query);
            self.o[start..][..row.len()].copy_from_slice(row);
        }
        if let (Some(target), Some(strides)) = (&mut self.lse, problem.lse) {
            let first = task.sequence.lse(strides, task.head, task.queries.start);
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
