//! Products of f32 matrices on the CPU, whose right factor and result are panels: rows of [`LANES`]
//! elements, one or more vectors of whatever the CPU has.
//!
//! Elements of the left factor are broadcast, so either its rows or its columns are contiguous.
//! Each element of a result is one chain of additions in the order of the terms, whatever else is
//! computed beside it.

mod buffer;
mod kernel;

pub(crate) use buffer::Buffer;
use kernel::Product;
use pulp::{Arch, WithSimd};

/// Columns of a panel.
pub(crate) const LANES: usize = 32;

/// Rows that are computed at a time: results have a multiple of it.
pub(crate) const ROWS: usize = 8;

/// A row of a panel.
pub(crate) type Lanes = [f32; LANES];

/// The factors that leave old columns as they are.
pub(crate) const ONES: Lanes = [1.0; LANES];

/// The left factor.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// Row `m` begins at `m * stride`.
    Rows { values: &'a [f32], stride: usize },
    /// Column `l` begins at `l * stride`.
    Columns { values: &'a [f32], stride: usize },
}

/// What becomes of a product.
#[derive(Clone, Copy)]
pub(crate) enum Into<'a> {
    /// The result is its multiple. Old contents do not matter.
    Set(f32),
    /// It is added to the multiples of the old columns.
    AddTo(&'a Lanes),
}

/// `c = left · right`, or what `into` says, for all rows of `c`, whose number is a multiple of
/// [`ROWS`]. The right factor has a row for each term.
pub(crate) fn multiply(c: &mut [Lanes], left: Left<'_>, right: &[Lanes], into: Into<'_>) {
    vectorized(Product { c, left, right, into });
}

/// Compiles what is inlined into `work` for the vectors of this CPU.
pub(crate) fn vectorized<W: WithSimd>(work: W) -> W::Output {
    Arch::new().dispatch(work)
}

/// A length in whole [`ROWS`].
pub(crate) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(ROWS)
}

#[cfg(test)]
mod tests;
