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

use super::operand_scales::HostScales;
use super::{Attention, AttentionProblem};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::{E4M3, E5M2, Stream, ViewMut};
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
    scales: HostScales<'a>,
}

impl<T> Operands<'_, T> {
    /// The score of a head that has no value: its sink, or −∞.
    fn without_value(&self, head: usize) -> f32 {
        self.sink.map_or(f32::NEG_INFINITY, |sink| sink[head])
    }

    /// What the products of a head of q are multiplied with.
    fn factor(&self, sequence: &Sequence, head: usize) -> f32 {
        let softmax_scale = self.problem.scores.softmax_scale;
        match self.problem.scales.is_some() {
            true => softmax_scale * self.scales.of_scores(sequence.entry, head),
            false => softmax_scale,
        }
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
    let compute = match problem.types.q {
        DType::F16 => of_type::<f16>(op, problem, stream),
        DType::BF16 => of_type::<bf16>(op, problem, stream),
        DType::E4M3 => of_type::<E4M3>(op, problem, stream),
        DType::E5M2 => of_type::<E5M2>(op, problem, stream),
        DType::I8 => of_type::<i8>(op, problem, stream),
        _ => of_type::<f32>(op, problem, stream),
    }?;
    let tasks = query_rows(problem, &sequences, op.block_mask);
    let tasks = Tasks { problem, tasks, compute, is_small: is_small(problem, &sequences) };
    match problem.types.o {
        DType::F16 => tasks.run::<f16>(o, lse),
        DType::BF16 => tasks.run::<bf16>(o, lse),
        _ => tasks.run::<f32>(o, lse),
    }
}

/// Computes a block of rows, or few rows of several heads, in f32.
type Compute<'a> = Box<dyn Fn(&mut Tile, &[QueryRows]) -> Result<()> + Sync + 'a>;

/// How blocks of rows of queries, keys and values of this type are computed.
fn of_type<'a, T: Float>(
    op: &Attention<'a>,
    problem: &'a AttentionProblem,
    stream: &Stream,
) -> Result<Compute<'a>> {
    let operands = Operands::<T> {
        problem,
        q: op.q.as_slice()?,
        k: op.k.as_slice()?,
        v: op.v.as_slice()?,
        sink: op.scores.sink.as_ref().map(|sink| sink.as_slice()).transpose()?,
        terms: Terms::of(&op.scores)?,
        block_mask: op.block_mask,
        scales: HostScales::new(op, problem, stream)?,
    };
    Ok(Box::new(move |tile, tasks| tile.compute(&operands, tasks)))
}

/// All blocks of rows.
struct Tasks<'a> {
    problem: &'a AttentionProblem,
    tasks: Vec<QueryRows>,
    compute: Compute<'a>,
    is_small: bool,
}

impl Tasks<'_> {
    /// Computes them and rounds outputs to this type.
    fn run<T: Float>(&self, mut o: ViewMut<'_>, mut lse: Option<ViewMut<'_>>) -> Result<()> {
        let lse = lse.as_mut().map(|lse| lse.as_mut_slice()).transpose()?;
        let outputs = Mutex::new(Outputs { o: o.as_mut_slice::<T>()?, lse });
        let buffers = || (Tile::new(self.problem), Vec::new());
        let compute = |(tile, rounded): &mut (Tile, Vec<T>), tasks: &[QueryRows]| -> Result<()> {
            (self.compute)(tile, tasks)?;
            rounded.resize(tile.o().len(), T::zeroed());
            T::narrow(tile.o(), rounded);
            let mut outputs = outputs.lock().unwrap_or_else(PoisonError::into_inner);
            let mut first = 0;
            for task in tasks {
                let start = first * self.problem.head_dims.v;
                outputs.write(self.problem, task, &rounded[start..], &tile.lse()[first..]);
                first += task.rows.len();
            }
            Ok(())
        };
        let threads = if self.is_small { 1 } else { rayon::current_num_threads() };
        let groups = few::groups(self.problem, &self.tasks, threads);
        if self.is_small {
            let mut buffers = buffers();
            return groups.iter().try_for_each(|tasks| compute(&mut buffers, tasks));
        }
        groups.par_iter().try_for_each_init(buffers, |buffers, tasks| compute(buffers, tasks))
    }
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
