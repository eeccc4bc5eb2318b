//! Sampled product on the CPU: an f32 product for each block, in parallel over blocks.
//!
//! Every block is summed by one thread in the order of K, so results do not depend on the number of
//! threads.

use super::{BsrSddmm, BsrSddmmProblem, DenseLayout};
use crate::Result;
use crate::float::Float;
use blockflash_safe::{Major, View, ViewMut, host_gemm};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// How much of K is converted to f32 at a time.
const DEPTH: usize = 1024;

/// Computes a problem that was checked and has blocks.
pub(super) fn sddmm(
    op: &BsrSddmm<'_>,
    problem: &BsrSddmmProblem,
    values: ViewMut<'_>,
) -> Result<()> {
    match problem.dtype {
        DType::F16 => sddmm_from::<f16>(op, problem, values),
        DType::BF16 => sddmm_from::<bf16>(op, problem, values),
        _ => sddmm_from::<f32>(op, problem, values),
    }
}

fn sddmm_from<T: Float>(
    op: &BsrSddmm<'_>,
    problem: &BsrSddmmProblem,
    values: ViewMut<'_>,
) -> Result<()> {
    match problem.values_dtype {
        DType::F16 => run::<T, f16>(op, problem, values),
        DType::BF16 => run::<T, bf16>(op, problem, values),
        _ => run::<T, f32>(op, problem, values),
    }
}

/// A dense operand as its elements.
struct Dense<'a, T> {
    elements: &'a [T],
    layout: DenseLayout,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    /// Rows of A and columns of B, in f32.
    a: Vec<f32>,
    b: Vec<f32>,
    /// A block of the product, without what it has beyond the matrix.
    sums: Vec<f32>,
    /// A row of the old values.
    old: Vec<f32>,
}

fn run<T: Float, U: Float>(
    op: &BsrSddmm<'_>,
    problem: &BsrSddmmProblem,
    mut values: ViewMut<'_>,
) -> Result<()> {
    let BsrSddmmProblem { m, n, block_size, alpha, beta, .. } = *problem;
    let (row_ptr, col_idx) = (op.pattern.row_ptr().view(), op.pattern.col_idx().view());
    let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>()?, col_idx.as_slice::<i32>()?);
    let a = Dense { elements: op.a.as_slice::<T>()?, layout: problem.a };
    let b = Dense { elements: op.b.as_slice::<T>()?, layout: problem.b };
    let values = values.as_mut_slice::<U>()?;
    values.par_chunks_mut(block_size * block_size).enumerate().try_for_each_init(
        Buffers::default,
        |buffers, (block, values)| {
            let block_row = row_ptr.partition_point(|&first| first as usize <= block) - 1;
            let inside = |at: usize, size: usize| at * block_size..size.min((at + 1) * block_size);
            let (rows, cols) = (inside(block_row, m), inside(col_idx[block] as usize, n));
            let width = cols.len();
            multiply(&a, &b, rows.clone(), cols, problem.k, buffers)?;
            let Buffers { sums, old, .. } = buffers;
            for (at, values) in values.chunks_exact_mut(block_size).enumerate() {
                if at >= rows.len() {
                    values.fill(U::zeroed());
                    continue;
                }
                let sums = &mut sums[at * width..][..width];
                let (values, beyond) = values.split_at_mut(width);
                sums.iter_mut().for_each(|sum| *sum *= alpha);
                if beta != 0.0 {
                    old.resize(width, 0.0);
                    U::widen(values, old);
                    sums.iter_mut().zip(old.iter()).for_each(|(sum, old)| *sum += beta * old);
                }
                U::narrow(sums, values);
                beyond.fill(U::zeroed());
            }
            Ok(())
        },
    )
}

/// `sums = A[rows, :]·B[:, cols]`.
fn multiply<T: Float>(
    a: &Dense<'_, T>,
    b: &Dense<'_, T>,
    rows: Range<usize>,
    cols: Range<usize>,
    k: usize,
    buffers: &mut Buffers,
) -> Result<()> {
    let shape = [rows.len(), cols.len()];
    buffers.sums.clear();
    buffers.sums.resize(shape[0] * shape[1], 0.0);
    for first in (0..k).step_by(DEPTH) {
        let depth = first..k.min(first + DEPTH);
        let a = a.widened([rows.clone(), depth.clone()], &mut buffers.a)?;
        let b = b.widened([depth, cols.clone()], &mut buffers.b)?;
        host_gemm(1.0, a, b, true, ViewMut::from_slice(&mut buffers.sums, &shape)?)?;
    }
    Ok(())
}

impl<T: Float> Dense<'_, T> {
    /// A part of the matrix in f32.
    fn widened<'b>(
        &self,
        [rows, cols]: [Range<usize>; 2],
        buffer: &'b mut Vec<f32>,
    ) -> Result<View<'b>> {
        let DenseLayout { major, ld, .. } = self.layout;
        let (lines, inside) = if major == Major::Row { (rows, cols) } else { (cols, rows) };
        let shape = [lines.len(), inside.len()];
        buffer.resize(shape[0] * shape[1], 0.0);
        for (line, target) in lines.zip(buffer.chunks_exact_mut(shape[1])) {
            T::widen(&self.elements[line * ld + inside.start..][..shape[1]], target);
        }
        let view = View::from_slice(buffer, &shape)?;
        Ok(if major == Major::Row { view } else { view.permute(&[1, 0])? })
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
