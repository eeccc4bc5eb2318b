//! Sampled dense-dense product by kernels that take every layout of A and B.

use super::bsr_sddmm::fits_tiles;
use super::{BsrSddmmOperands, fits, fits_row, pointer, pointer_mut, starts_last};
use crate::{DType, Error, LaunchConfig, Major, Result, Row, Stream, View};
use blockflash_sys::manifest::{BsrSddmmTile, Variant};
use blockflash_sys::params::{blockflash_bsr_sddmm_params, blockflash_bsr_sddmm_portable_params};

impl Stream {
    /// Launches a kernel of [`Variant::BsrSddmm`]. Of `params` only sizes, the type of the values
    /// and the factors are used: pointers and layouts are those of the operands, of which A and B
    /// are contiguous along any one dimension.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_sddmm_portable(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_sddmm_params,
        operands: BsrSddmmOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrSddmm(tile) = row.variant else {
            return Err(failed("not a portable kernel of the sampled product".to_owned()));
        };
        let views = operands.views();
        self.expect_all(&views)?;
        let params = fit(row, &tile.tile(), config, params, &operands).map_err(failed)?;
        // SAFETY:
        // 1. The row is a portable variant of the sampled product, whose parameter struct this is.
        // 2. As in `launch_bsr_sddmm`; A and B are read where `fit` has found their lines.
        // 3. `values` are borrowed exclusively.
        unsafe {
            self.launch_with(
                row,
                config,
                |_| params,
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

/// The kernel argument for operands that fit.
fn fit(
    row: &Row,
    tile: &BsrSddmmTile,
    config: &LaunchConfig,
    p: &blockflash_bsr_sddmm_params,
    operands: &BsrSddmmOperands<'_>,
) -> std::result::Result<blockflash_bsr_sddmm_portable_params, String> {
    let tiles = fits_tiles(tile, p, operands)?;
    let [m, n, k] = [p.m, p.n, p.k].map(i64::from);
    let a = Lines::of("a", &operands.a, tile.dtype, [m, k])?;
    let b = Lines::of("b", &operands.b, tile.dtype, [k, n])?;
    starts_last(config)?;
    fits_row(config, row, tiles..=tiles)?;
    Ok(blockflash_bsr_sddmm_portable_params {
        row_ptr: pointer(&operands.pattern.row_ptr().view()).cast(),
        col_idx: pointer(&operands.pattern.col_idx().view()).cast(),
        a: pointer(&operands.a),
        b: pointer(&operands.b),
        values: pointer_mut(&operands.values),
        lda: a.ld,
        ldb: b.ld,
        m: p.m,
        n: p.n,
        k: p.k,
        a_column_major: i32::from(a.major == Major::Column),
        b_column_major: i32::from(b.major == Major::Column),
        a_vectorized: a.vectorized.into(),
        b_vectorized: b.vectorized.into(),
        values_vectorized: operands.values.is_aligned(16).into(),
        values_dtype: p.values_dtype,
        alpha: p.alpha,
        beta: p.beta,
    })
}

/// How a matrix lies in memory.
#[derive(Debug, PartialEq)]
struct Lines {
    major: Major,
    /// Elements from one line to the next.
    ld: i64,
    /// Whether each starts at a multiple of 16 bytes.
    vectorized: bool,
}

impl Lines {
    /// The lines of a matrix of this type and shape. A single row or column is both, and then what
    /// can be copied 16 bytes at a time.
    fn of(
        name: &str,
        view: &View<'_>,
        dtype: DType,
        [rows, cols]: [i64; 2],
    ) -> std::result::Result<Self, String> {
        let step = |dim: usize| view.strides().get(dim).map_or(0, |&stride| stride as i64);
        let lines = |major| {
            let (ld, strides, count) = match major {
                Major::Row => (step(0), [step(0), 1], rows),
                Major::Column => (step(1), [1, step(1)], cols),
            };
            fits(name, view, dtype, [(rows, strides[0]), (cols, strides[1])])?;
            // Behind a single line comes none.
            Ok(Self { major, ld, vectorized: view.is_aligned(16) && (ld % 8 == 0 || count <= 1) })
        };
        match [lines(Major::Row), lines(Major::Column)] {
            [Ok(row), Ok(column)] => {
                Ok(if column.vectorized && !row.vectorized { column } else { row })
            }
            [Ok(found), _] | [_, Ok(found)] => Ok(found),
            [Err(error), _] => Err(error),
        }
    }
}

#[cfg(test)]
#[path = "bsr_sddmm_portable_tests.rs"]
mod tests;
