//! BSR matmul on the CPU: f32 products of blocks, in parallel over block rows.
//!
//! Every tile of C is summed by one thread in the order of the blocks, so results do not depend on the number of threads.

use super::{Activation, Bias, BsrMatmul, BsrProblem};
use crate::float::Float;
use crate::{Result, math};
use blockflash_safe::{View, ViewMut, host_gemm};
use blockflash_sys::DType;
use half::{bf16, f16};
use rayon::prelude::*;

/// Widest panel of columns that is computed at a time.
const PANEL_COLUMNS: usize = 512;

/// Elements of the f32 copy of B's columns, which a panel of a very long B shrinks to keep.
const PANEL_ELEMENTS: usize = 1 << 24;

/// Computes a problem that was checked and has outputs.
pub(super) fn matmul(op: &BsrMatmul<'_>, problem: &BsrProblem, c: ViewMut<'_>) -> Result<()> {
    match problem.dtype {
        DType::F16 => matmul_from::<f16>(op, problem, c),
        DType::BF16 => matmul_from::<bf16>(op, problem, c),
        _ => matmul_from::<f32>(op, problem, c),
    }
}

fn matmul_from<T: Float>(op: &BsrMatmul<'_>, problem: &BsrProblem, c: ViewMut<'_>) -> Result<()> {
    match problem.c_dtype {
        DType::F16 => run::<T, f16>(op, problem, c),
        DType::BF16 => run::<T, bf16>(op, problem, c),
        _ => run::<T, f32>(op, problem, c),
    }
}

/// The operands as slices of their elements.
struct Operands<'a, T> {
    problem: &'a BsrProblem,
    row_ptr: &'a [i32],
    col_idx: &'a [i32],
    values: &'a [T],
    bias: BiasValues,
}

/// The bias in f32.
enum BiasValues {
    None,
    PerRow(Vec<f32>),
    PerColumn(Vec<f32>),
}

/// Columns of B in f32, `[k, width]`.
struct Panel {
    first: usize,
    width: usize,
    values: Vec<f32>,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    /// A block of A, `[block_size, block_size]`.
    block: Vec<f32>,
    /// A block row times a panel, `[block_size, width]`.
    sums: Vec<f32>,
    /// A row of the old C.
    old: Vec<f32>,
}

fn run<T: Float, U: Float>(op: &BsrMatmul<'_>, problem: &BsrProblem, mut c: ViewMut<'_>) -> Result<()> {
    let (row_ptr, col_idx, values) = (op.a.row_ptr().view(), op.a.col_idx().view(), op.a.values().view());
    let operands = Operands::<T> {
        problem,
        row_ptr: row_ptr.as_slice()?,
        col_idx: col_idx.as_slice()?,
        values: values.as_slice()?,
        bias: match &op.bias {
            Bias::None => BiasValues::None,
            Bias::PerRow(bias) => BiasValues::PerRow(widened(bias.as_slice::<T>()?)),
            Bias::PerColumn(bias) => BiasValues::PerColumn(widened(bias.as_slice::<T>()?)),
        },
    };
    let b = op.b.as_slice::<T>()?;
    let c = c.as_mut_slice::<U>()?;
    let BsrProblem { n, k, block_size, ldb, ldc, .. } = *problem;
    let width = (PANEL_ELEMENTS / k.max(1)).clamp(16, PANEL_COLUMNS).min(n);
    let mut panel = Panel { first: 0, width, values: vec![0.0; k * width] };
    for first in (0..n).step_by(width) {
        (panel.first, panel.width) = (first, width.min(n - first));
        let width = panel.width;
        panel.values[..k * width].par_chunks_mut(width).enumerate().for_each(|(row, target)| {
            T::widen(&b[row * ldb + first..][..width], target);
        });
        // Rows of C do not overlap, so block rows are disjoint slices.
        c.par_chunks_mut(block_size.saturating_mul(ldc)).enumerate().try_for_each_init(
            Buffers::default,
            |buffers, (block_row, rows)| -> Result<()> {
                operands.sum_blocks(block_row, &panel, buffers)?;
                operands.finish(block_row, &panel, buffers, rows);
                Ok(())
            },
        )?;
    }
    Ok(())
}

impl<T: Float> Operands<'_, T> {
    /// `sums = A[block row]·panel`.
    fn sum_blocks(&self, block_row: usize, panel: &Panel, buffers: &mut Buffers) -> Result<()> {
        let BsrProblem { m, k, block_size, .. } = *self.problem;
        let height = block_size.min(m - block_row * block_size);
        buffers.block.resize(block_size * block_size, 0.0);
        buffers.sums.clear();
        buffers.sums.resize(height * panel.width, 0.0);
        for block in self.row_ptr[block_row] as usize..self.row_ptr[block_row + 1] as usize {
            let values = &self.values[block * block_size * block_size..][..block_size * block_size];
            T::widen(values, &mut buffers.block);
            let first = self.col_idx[block] as usize * block_size;
            let depth = block_size.min(k - first);
            let a = View::from_slice_strided(&buffers.block, &[height, depth], &[block_size, 1])?;
            let b = &panel.values[first * panel.width..][..depth * panel.width];
            let b = View::from_slice(b, &[depth, panel.width])?;
            let sums = ViewMut::from_slice(&mut buffers.sums, &[height, panel.width])?;
            host_gemm(1.0, a, b, true, sums)?;
        }
        Ok(())
    }

    /// `C = activation(alpha·sums + beta·C + bias)` for the panel's columns; `rows` starts with the block row's first row of C.
    fn finish<U: Float>(&self, block_row: usize, panel: &Panel, buffers: &mut Buffers, rows: &mut [U]) {
        let BsrProblem { block_size, ldc, alpha, beta, activation, .. } = *self.problem;
        for (row, sums) in buffers.sums.chunks_exact_mut(panel.width).enumerate() {
            let c = &mut rows[row * ldc + panel.first..][..panel.width];
            sums.iter_mut().for_each(|sum| *sum *= alpha);
            if beta != 0.0 {
                buffers.old.resize(panel.width, 0.0);
                U::widen(c, &mut buffers.old);
                sums.iter_mut().zip(&buffers.old).for_each(|(sum, old)| *sum += beta * old);
            }
            match &self.bias {
                BiasValues::None => {}
                BiasValues::PerRow(bias) => {
                    let bias = bias[block_row * block_size + row];
                    sums.iter_mut().for_each(|sum| *sum += bias);
                }
                BiasValues::PerColumn(bias) => {
                    sums.iter_mut().zip(&bias[panel.first..]).for_each(|(sum, bias)| *sum += bias);
                }
            }
            match activation {
                Activation::None => {}
                // A comparison that NaN fails: it stays.
                Activation::Relu => sums.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x }),
                Activation::Gelu => sums.iter_mut().for_each(|x| *x = math::gelu(*x)),
                Activation::Silu => sums.iter_mut().for_each(|x| *x = math::silu(*x)),
            }
            U::narrow(sums, c);
        }
    }
}

fn widened<T: Float>(source: &[T]) -> Vec<f32> {
    let mut target = vec![0.0; source.len()];
    T::widen(source, &mut target);
    target
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
