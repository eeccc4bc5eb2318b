//! Attention on the CPU: blocked online softmax in f32, in parallel over batch entries, heads of
//! keys and blocks of queries.
//!
//! Every block of queries is computed by one thread in a fixed order, so results do not depend on
//! the number of threads. Keys that a block mask does not visit are not even read.

mod few;
mod scores;
pub(crate) mod sequence;
mod softmax;
pub(crate) mod terms;
mod tile;
pub(crate) mod visible;

use super::{Attention, AttentionProblem};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::{Stream, ViewMut};
use blockflash_sys::{DType, HeadDims};
use half::{bf16, f16};
use rayon::prelude::*;
use sequence::{QueryRows, Sequence, query_rows, sequences};
use std::sync::{Mutex, PoisonError};
use terms::Terms;
use tile::Tile;

/// Multiply-adds of a problem that the calling thread computes alone.
const SMALL: f64 = 1e6;

/// The operands as slices of their elements.
struct Operands<'a, T> {
    problem: &'a AttentionProblem,
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    sink: Option<&'a [f32]>,
    terms: Option<Terms<'a>>,
    block_mask: Option<&'a BlockMask>,
}

impl<T> Operands<'_, T> {
    /// The score of a head that has no value: its sink, or −∞.
    fn without_value(&self, head: usize) -> f32 {
        self.sink.map_or(f32::NEG_INFINITY, |sink| sink[head])
    }
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
        terms: Terms::of(&op.scores)?,
        block_mask: op.block_mask,
    };
    let lse = lse.as_mut().map(|lse| lse.as_mut_slice()).transpose()?;
    let outputs = Mutex::new(Outputs { o: o.as_mut_slice::<T>()?, lse });
    let tasks = query_rows(problem, sequences, op.block_mask);
    let buffers = || (Tile::new(problem), Vec::new());
    let compute = |(tile, rounded): &mut (Tile, Vec<T>), task: &QueryRows| -> Result<()> {
        tile.compute(&operands, task)?;
        rounded.resize(tile.o().len(), T::zeroed());
        T::narrow(tile.o(), rounded);
        let mut outputs = outputs.lock().unwrap_or_else(PoisonError::into_inner);
        outputs.write(problem, task, rounded, tile.lse());
        Ok(())
    };
    if is_small(problem, sequences) {
        let mut buffers = buffers();
        return tasks.iter().try_for_each(|task| compute(&mut buffers, task));
    }
    tasks.par_iter().try_for_each_init(buffers, compute)
}

/// Whether a problem takes less time than waking other threads.
fn is_small(problem: &AttentionProblem, sequences: &[Sequence]) -> bool {
    let pairs: f64 = sequences.iter().map(|s| s.seqlen_q as f64 * s.seqlen_kv as f64).sum();
    let HeadDims { qk, v } = problem.head_dims;
    pairs * (problem.num_heads_q * (qk + v)) as f64 <= SMALL
}

impl<T: Float> Outputs<'_, T> {
    /// Stores the rows of a task.
    fn write(&mut self, problem: &AttentionProblem, task: &QueryRows, o: &[T], lse: &[f32]) {
        let rows = task.rows.clone().map(|row| task.at(row));
        for ([head, query], row) in rows.clone().zip(o.chunks_exact(problem.head_dims.v)) {
            let start = task.sequence.q_row(problem.o, head, query);
            self.o[start..][..row.len()].copy_from_slice(row);
        }
        if let (Some(target), Some(strides)) = (&mut self.lse, problem.lse) {
            for ([head, query], &lse) in rows.zip(lse) {
                target[task.sequence.lse(strides, head, query)] = lse;
            }
        }
    }
}

#[cfg(test)]
mod bits_tests;
#[cfg(test)]
mod block_tests;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
