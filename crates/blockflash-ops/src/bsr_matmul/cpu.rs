//! BSR matmul on the CPU: f32 products of blocks, in parallel over block rows.
//!
//! Every tile of C is summed by one thread in the order of the blocks, so results do not depend on
//! the number of threads. Rows of a row-major C are finished where they were summed; columns of a
//! column-major one when all block rows are.

use super::{Activation, Bias, BsrMatmul, BsrProblem, BsrTranspose};
use crate::float::Float;
use crate::{Result, math};
use blockflash_safe::{View, ViewMut, host_gemm};
use blockflash_sys::{DType, Major};
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
    /// Which of the values each block is, if they are multiplied transposed.
    block_idx: Option<&'a [i32]>,
    values: &'a [T],
    bias: BiasValues,
}

/// The bias in f32.
enum BiasValues {
    None,
    PerRow(Vec<f32>),
    PerColumn(Vec<f32>),
}

/// The bias of a row or column of C, or of a part of it.
enum LineBias<'a> {
    None,
    Same(f32),
    Each(&'a [f32]),
}

/// Columns of B in f32, `[k, width]`, in memory as B is.
struct Panel {
    first: usize,
    width: usize,
    strides: [usize; 2],
    values: Vec<f32>,
}

/// Buffers of one thread.
#[derive(Default)]
struct Buffers {
    /// A block of A, `[block_size, block_size]`.
    block: Vec<f32>,
    /// A block row times a panel, `[block_size, width]`.
    sums: Vec<f32>,
    /// A row or column of the old C.
    old: Vec<f32>,
}

fn run<T: Float, U: Float>(
    op: &BsrMatmul<'_>,
    problem: &BsrProblem,
    mut c: ViewMut<'_>,
) -> Result<()> {
    let indices = op.transpose.map_or(op.a.pattern().indices(), BsrTranspose::indices);
    let (row_ptr, col_idx, values) =
        (indices.row_ptr().view(), indices.col_idx().view(), op.a.values());
    let operands = Operands::<T> {
        problem,
        row_ptr: row_ptr.as_slice()?,
        col_idx: col_idx.as_slice()?,
        block_idx: indices.block_idx().map(|index| index.view().as_slice()).transpose()?,
        values: values.as_slice()?,
        bias: match &op.bias {
            Bias::None => BiasValues::None,
            Bias::PerRow(bias) => BiasValues::PerRow(widened(bias.as_slice::<T>()?)),
            Bias::PerColumn(bias) => BiasValues::PerColumn(widened(bias.as_slice::<T>()?)),
        },
    };
    let b = op.b.as_slice::<T>()?;
    let c = c.as_mut_slice::<U>()?;
    let BsrProblem { m, n, k, block_size, ldc, c_major, .. } = *problem;
    // A column-major C has the sums of a panel of all its rows.
    let depth = if c_major == Major::Row { k } else { k.max(m) };
    let width = (PANEL_ELEMENTS / depth.max(1)).clamp(16, PANEL_COLUMNS).min(n);
    let mut panel = Panel { first: 0, width, strides: [0; 2], values: vec![0.0; k * width] };
    let mut all_sums = vec![0.0; if c_major == Major::Row { 0 } else { m * width }];
    for first in (0..n).step_by(width) {
        (panel.first, panel.width) = (first, width.min(n - first));
        panel.fill(b, problem);
        if c_major == Major::Row {
            // Rows of C do not overlap, so block rows are disjoint slices.
            c.par_chunks_mut(block_size.saturating_mul(ldc)).enumerate().try_for_each_init(
                Buffers::default,
                |buffers, (block_row, rows)| -> Result<()> {
                    let Buffers { block, sums, old } = buffers;
                    sums.resize(block_size.min(m - block_row * block_size) * panel.width, 0.0);
                    operands.sum_blocks(block_row, &panel, block, sums)?;
                    for (row, sums) in sums.chunks_exact_mut(panel.width).enumerate() {
                        let bias = operands.bias.of_row(block_row * block_size + row, &panel);
                        let c = &mut rows[row * ldc + panel.first..][..panel.width];
                        operands.finish(sums, &bias, old, c);
                    }
                    Ok(())
                },
            )?;
            continue;
        }
        let sums = &mut all_sums[..m * panel.width];
        sums.par_chunks_mut(block_size * panel.width)
            .enumerate()
            .try_for_each_init(Vec::new, |block, (block_row, sums)| {
                operands.sum_blocks(block_row, &panel, block, sums)
            })?;
        // Nor do columns.
        let columns = c.par_chunks_mut(ldc).enumerate().skip(first).take(panel.width);
        columns.for_each_init(Buffers::default, |buffers, (column, c)| {
            let Buffers { sums: line, old, .. } = buffers;
            line.clear();
            line.extend(sums[column - first..].iter().step_by(panel.width));
            operands.finish(line, &operands.bias.of_column(column), old, &mut c[..m]);
        });
    }
    Ok(())
}

impl BiasValues {
    /// Of the panel's part of a row of C.
    fn of_row(&self, row: usize, panel: &Panel) -> LineBias<'_> {
        match self {
            BiasValues::None => LineBias::None,
            BiasValues::PerRow(bias) => LineBias::Same(bias[row]),
            BiasValues::PerColumn(bias) => LineBias::Each(&bias[panel.first..]),
        }
    }

    fn of_column(&self, column: usize) -> LineBias<'_> {
        match self {
            BiasValues::None => LineBias::None,
            BiasValues::PerRow(bias) => LineBias::Each(bias),
            BiasValues::PerColumn(bias) => LineBias::Same(bias[column]),
        }
    }
}

impl Panel {
    /// Converts the panel's columns of B, a contiguous row or column at a time.
    fn fill<T: Float>(&mut self, b: &[T], problem: &BsrProblem) {
        let BsrProblem { k, ldb, b_major, .. } = *problem;
        let (lines, length, strides, start, next) = match b_major {
            Major::Row => (k, self.width, [self.width, 1], self.first, ldb),
            Major::Column => (self.width, k, [1, k], self.first * ldb, ldb),
        };
        self.strides = strides;
        let lines = self.values[..lines * length].par_chunks_mut(length.max(1)).enumerate();
        lines.for_each(|(line, target)| T::widen(&b[start + line * next..][..length], target));
    }
}

impl<T: Float> Operands<'_, T> {
    /// `sums = A[block row]·panel`, `[rows of the block row, width]`; `buffer` has room for a
    /// block.
    fn sum_blocks(
        &self,
        block_row: usize,
        panel: &Panel,
        buffer: &mut Vec<f32>,
        sums: &mut [f32],
    ) -> Result<()> {
        let BsrProblem { k, block_size, .. } = *self.problem;
        let height = sums.len() / panel.width;
        buffer.resize(block_size * block_size, 0.0);
        sums.fill(0.0);
        for block in self.row_ptr[block_row] as usize..self.row_ptr[block_row + 1] as usize {
            let (place, strides) = match self.block_idx {
                None => (block, [block_size, 1]),
                Some(index) => (index[block] as usize, [1, block_size]),
            };
            T::widen(
                &self.values[place * block_size * block_size..][..block_size * block_size],
                buffer,
            );
            let first = self.col_idx[block] as usize * block_size;
            let depth = block_size.min(k - first);
            let a = View::from_slice_strided(buffer, &[height, depth], &strides)?;
            let b = &panel.values[first * panel.strides[0]..];
            let b = View::from_slice_strided(b, &[depth, panel.width], &panel.strides)?;
            host_gemm(1.0, a, b, true, ViewMut::from_slice(sums, &[height, panel.width])?)?;
        }
        Ok(())
    }

    /// `C = activation(alpha·sums + beta·C + bias)` for a part of a row or column of C.
    fn finish<U: Float>(
        &self,
        sums: &mut [f32],
        bias: &LineBias<'_>,
        old: &mut Vec<f32>,
        c: &mut [U],
    ) {
        let BsrProblem { alpha, beta, activation, .. } = *self.problem;
        sums.iter_mut().for_each(|sum| *sum *= alpha);
        if beta != 0.0 {
            old.resize(c.len(), 0.0);
            U::widen(c, old);
            sums.iter_mut().zip(&*old).for_each(|(sum, old)| *sum += beta * old);
        }
        match bias {
            LineBias::None => {}
            LineBias::Same(bias) => sums.iter_mut().for_each(|sum| *sum += bias),
            LineBias::Each(bias) => sums.iter_mut().zip(*bias).for_each(|(sum, bias)| *sum += bias),
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

fn widened<T: Float>(source: &[T]) -> Vec<f32> {
    let mut target = vec![0.0; source.len()];
    T::widen(source, &mut target);
    target
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod layout_tests;

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
