//! Sampled dense-dense product by kernels that take every layout of A and B.

use super::BsrSddmmOperands;
use super::bsr_sddmm::{fits_dense, fits_tiles};
use super::checked::Launch;
use super::fit::{Fit, pointer, pointer_mut};
use crate::{Kernel, Major, View};
use blockflash_sys::manifest::{BsrSddmm, Variant};
use blockflash_sys::params::{blockflash_bsr_sddmm_params, blockflash_bsr_sddmm_portable_params};

// SAFETY:
// 1. This is the parameter struct of the portable kernels of the sampled product.
// 2. As for the Hopper kernels; A and B are read only where `fit` has checked their lines.
// 3. `values` is a `ViewMut`.
unsafe impl Launch for BsrSddmm {
    type Operands<'a> = BsrSddmmOperands<'a>;
    /// Of which only sizes, the type of the values and the factors are used: layouts are those of
    /// the operands, of which A and B are contiguous along any one dimension.
    type Plan = blockflash_bsr_sddmm_params;
    type Params = blockflash_bsr_sddmm_portable_params;
    const FAMILY: &'static str = "the portable sampled product";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrSddmm(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let tiles = fits_tiles(&self.tile(), p, operands)?;
        let [m, n, k] = [p.m, p.n, p.k].map(i64::from);
        let BsrSddmmOperands { a, b, .. } = operands;
        let [of_a, of_b] = [a, b].map(Lines::of);
        fits_dense("a", a, self.dtype, [m, k], of_a.major)?;
        fits_dense("b", b, self.dtype, [k, n], of_b.major)?;
        *params = blockflash_bsr_sddmm_portable_params {
            row_ptr: pointer(&operands.pattern.row_ptr().view()).cast(),
            col_idx: pointer(&operands.pattern.col_idx().view()).cast(),
            a: pointer(a),
            b: pointer(b),
            values: pointer_mut(&operands.values),
            lda: of_a.ld,
            ldb: of_b.ld,
            m: p.m,
            n: p.n,
            k: p.k,
            a_column_major: i32::from(of_a.major == Major::Column),
            b_column_major: i32::from(of_b.major == Major::Column),
            a_vectorized: of_a.vectorized.into(),
            b_vectorized: of_b.vectorized.into(),
            values_vectorized: operands.values.is_aligned(16).into(),
            values_dtype: p.values_dtype,
            alpha: p.alpha,
            beta: p.beta,
        };
        Ok(tiles)
    }
}

/// The layout of a matrix in memory.
#[derive(Debug, PartialEq)]
struct Lines {
    major: Major,
    /// Elements from one line to the next.
    ld: i64,
    /// Whether each line starts at a multiple of 16 bytes.
    vectorized: bool,
}

impl Lines {
    /// The lines of a matrix, which `fit` checks. A single row or column could be read either way;
    /// then the layout that can be copied 16 bytes at a time is taken.
    fn of(view: &View<'_>) -> Self {
        let size = |dim: usize| view.shape().get(dim).map_or(0, |&size| size);
        let step = |dim: usize| view.strides().get(dim).map_or(0, |&stride| stride as i64);
        let lines = |major, across: usize, along: usize| {
            let ld = step(across);
            // No line follows a single one.
            let vectorized = view.is_aligned(16) && (ld % 8 == 0 || size(across) <= 1);
            let contiguous = size(along) <= 1 || step(along) == 1 || view.layout().is_empty();
            (contiguous, Self { major, ld, vectorized })
        };
        match [lines(Major::Row, 0, 1), lines(Major::Column, 1, 0)] {
            [(true, row), (true, column)] if column.vectorized && !row.vectorized => column,
            [(false, _), (true, column)] => column,
            [(_, row), _] => row,
        }
    }
}

#[cfg(test)]
#[path = "bsr_sddmm_portable_tests.rs"]
mod tests;
