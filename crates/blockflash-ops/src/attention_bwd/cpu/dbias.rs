//! The gradient of the bias: each of its elements has the sum over the pairs that it serves.

use super::dk_dv::{Part, STEP, Tile};
use super::{BLOCK, KeyRows, Operands};
use crate::attention::cpu::sequence::{Sequence, Visited, blocks, steps, visited};
use crate::float::Float;
use crate::{BlockMask, Result};
use blockflash_safe::ViewMut;
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A tile of the gradient: the pairs that it sums. Along an axis that is broadcast these are all,
/// and the tile has one element.
struct Task {
    entries: Range<usize>,
    heads: Range<usize>,
    queries: Range<usize>,
    keys: Range<usize>,
}

/// Computes the gradient from dense sequences.
pub(super) fn bias_gradient<T: Float>(
    operands: &Operands<'_, T>,
    sequences: &[Sequence],
    broadcast: [bool; 4],
    dbias: &mut ViewMut<'_>,
) -> Result<()> {
    let strides: Vec<usize> = dbias.strides().to_vec();
    match dbias.dtype() {
        DType::F16 => {
            run::<T, f16>(operands, sequences, broadcast, dbias.as_mut_slice()?, &strides)
        }
        DType::BF16 => {
            run::<T, bf16>(operands, sequences, broadcast, dbias.as_mut_slice()?, &strides)
        }
        _ => run::<T, f32>(operands, sequences, broadcast, dbias.as_mut_slice()?, &strides),
    }
}

fn run<T: Float, D: Float>(
    operands: &Operands<'_, T>,
    sequences: &[Sequence],
    broadcast: [bool; 4],
    dbias: &mut [D],
    strides: &[usize],
) -> Result<()> {
    let elements = Mutex::new(dbias);
    let buffers = || (Tile::of_capped_scores(), Vec::new(), Vec::new());
    let compute = |(tile, sums, rounded): &mut (Tile, Vec<f64>, Vec<D>), task: &Task| {
        task.sum(operands, sequences, broadcast, tile, sums)?;
        let [rows, columns] = task.shape(broadcast);
        let sums: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
        rounded.resize(sums.len(), D::zeroed());
        D::narrow(&sums, rounded);
        let first = [&task.entries, &task.heads, &task.queries, &task.keys];
        let first = first.iter().zip(strides).map(|(range, stride)| range.start * stride);
        let start: usize = first.sum();
        let mut elements = elements.lock().unwrap_or_else(PoisonError::into_inner);
        for (at, x) in rounded.iter().take(rows * columns).enumerate() {
            elements[start + at / columns * strides[2] + at % columns * strides[3]] = *x;
        }
        Ok(())
    };
    let tasks = tasks(operands, broadcast);
    tasks.par_iter().try_for_each_init(buffers, compute)
}

fn tasks<T>(operands: &Operands<'_, T>, broadcast: [bool; 4]) -> Vec<Task> {
    let forward = &operands.problem.forward;
    let extents = [forward.batch, forward.num_heads_q, forward.seqlen_q];
    let [entries, heads, queries] = std::array::from_fn(|axis| match broadcast[axis] {
        true => all(extents[axis]),
        false => blocks(extents[axis], None, [1, 1, STEP][axis]).collect(),
    });
    let keys = if broadcast[3] { all(forward.seqlen_kv) } else { key_blocks(operands) };
    let mut tasks = Vec::new();
    for entries in entries {
        for heads in &heads {
            for queries in &queries {
                tasks.extend(keys.iter().map(|keys| Task {
                    entries: entries.clone(),
                    heads: heads.clone(),
                    queries: queries.clone(),
                    keys: keys.clone(),
                }));
            }
        }
    }
    tasks
}

/// An axis as one range.
fn all(extent: usize) -> Vec<Range<usize>> {
    std::iter::once(0..extent).collect()
}

/// All keys in blocks, each within one column of the block mask.
fn key_blocks<T>(operands: &Operands<'_, T>) -> Vec<Range<usize>> {
    let seqlen_kv = operands.problem.forward.seqlen_kv;
    blocks(seqlen_kv, operands.block_mask.map(BlockMask::block_kv), BLOCK).collect()
}

impl Task {
    /// Rows and columns of the tile.
    fn shape(&self, broadcast: [bool; 4]) -> [usize; 2] {
        let of = |broadcast: bool, pairs: &Range<usize>| if broadcast { 1 } else { pairs.len() };
        [of(broadcast[2], &self.queries), of(broadcast[3], &self.keys)]
    }

    /// The sums, in ascending order of batch entries, heads and blocks of keys.
    fn sum<T: Float>(
        &self,
        operands: &Operands<'_, T>,
        sequences: &[Sequence],
        broadcast: [bool; 4],
        tile: &mut Tile,
        sums: &mut Vec<f64>,
    ) -> Result<()> {
        let forward = &operands.problem.forward;
        let [rows, columns] = self.shape(broadcast);
        sums.clear();
        sums.resize(rows * columns, 0.0);
        let mask = operands.transposed.as_ref();
        let of_keys =
            |keys: &Range<usize>| self.keys.start <= keys.start && keys.end <= self.keys.end;
        let keys: Vec<Range<usize>> = key_blocks(operands).into_iter().filter(of_keys).collect();
        for sequence in &sequences[self.entries.clone()] {
            for head in self.heads.clone() {
                for keys in &keys {
                    let [seqlen_q, seqlen_kv] = [sequence.seqlen_q, sequence.seqlen_kv];
                    let attending = forward.scores.mask.attending(keys, seqlen_q, seqlen_kv);
                    let within = attending.start.max(self.queries.start)
                        ..attending.end.min(self.queries.end);
                    let at = [sequence.entry, head];
                    let Visited { ranges, partial } =
                        visited(mask, forward, at, keys.start, seqlen_q)?;
                    let mut queries = steps(ranges, within, STEP).peekable();
                    if queries.peek().is_none() {
                        continue;
                    }
                    let head_kv = head / (forward.num_heads_q / forward.num_heads_kv);
                    tile.load_keys(
                        operands,
                        &KeyRows { sequence: *sequence, head: head_kv, rows: keys.clone() },
                    );
                    for queries in queries {
                        tile.load_queries(operands, sequence, head, &queries);
                        let part = Part { sequence, head, queries: &queries, partial: &partial };
                        tile.each_pair(operands, &part, |[i, j], ds| {
                            let row = if broadcast[2] { 0 } else { i - self.queries.start };
                            let column = if broadcast[3] { 0 } else { j - self.keys.start };
                            sums[row * columns + column] += f64::from(ds);
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "dbias_tests.rs"]
mod tests;
