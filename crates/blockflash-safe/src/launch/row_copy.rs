//! Copies of rows by few CTAs.

use super::checked::{Launch, Operands};
use super::fit::{Fit, ceil_div, pointer, pointer_mut, require, starts_at};
use crate::view::Used;
use crate::{Kernel, View, ViewMut};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_ROW_COPIES, blockflash_row_copy, blockflash_row_copy_params,
};

/// Tensors `[rows, columns]`: each target beside its source, of the same shape and element type.
#[derive(Debug)]
pub struct RowCopyOperands<'a> {
    /// At most [`BLOCKFLASH_ROW_COPIES`] of them.
    pub copies: Vec<(ViewMut<'a>, View<'a>)>,
}

impl Operands for RowCopyOperands<'_> {
    fn used(&self) -> impl AsRef<[Option<Used<'_>>]> {
        let both = |(to, from)| [Some(ViewMut::used(to)), Some(View::used(from))];
        self.copies.iter().map(|(to, from)| (to, from)).flat_map(both).collect::<Vec<_>>()
    }
}

/// Bytes that a thread moves at once.
const PIECE: i64 = 16;

/// Checks a copy, and returns its pieces.
fn fits(copy: &blockflash_row_copy, to: &ViewMut<'_>, from: &View<'_>) -> Fit<i64> {
    let size = from.dtype().size() as i64;
    require(
        to.dtype() == from.dtype(),
        format_args!("the target has elements of {}, the source of {}", to.dtype(), from.dtype()),
    )?;
    let (rows, pieces) = (i64::from(copy.rows), i64::from(copy.pieces));
    require(
        rows > 0 && pieces > 0,
        format_args!("{rows} rows of {pieces} pieces: a size is not positive"),
    )?;
    let sides = [("target", &to.as_view(), copy.to_pitch), ("source", from, copy.from_pitch)];
    for (name, view, pitch) in sides {
        let (&[found, columns], &[stride, step]) = (view.shape(), view.strides()) else {
            return Err(format!(
                "the {name} has shape {:?}, expected [rows, columns]",
                view.shape()
            ));
        };
        let wide = columns as i64 * size == pieces * PIECE && (step == 1 || columns == 1);
        require(
            found as i64 == rows && wide,
            format_args!(
                "the {name} is {found} × {columns}, expected {rows} rows of {pieces} pieces of 16 \
                 bytes"
            ),
        )?;
        let same = rows == 1 || stride as i64 * size == pitch;
        require(
            same && pitch % PIECE == 0,
            format_args!(
                "rows of the {name} are {stride} elements apart, expected {pitch} bytes, a \
                 multiple of {PIECE}"
            ),
        )?;
        starts_at(PIECE as usize, name, view)?;
    }
    Ok(rows * pieces)
}

// SAFETY:
// 1. This is the parameter struct of the kernel that copies rows.
// 2. Rows and pieces are those of the views; no address follows from the contents of a tensor.
// 3. The targets are `ViewMut`.
unsafe impl Launch for manifest::RowCopy {
    type Operands<'a> = RowCopyOperands<'a>;
    type Plan = blockflash_row_copy_params;
    type Params = blockflash_row_copy_params;
    const FAMILY: &'static str = "copying rows";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::RowCopy(kernel) => Some(kernel),
            _ => None,
        }
    }

    fn fit(
        &self,
        p: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (count, most) = (operands.copies.len(), BLOCKFLASH_ROW_COPIES as usize);
        require(
            (1..=most).contains(&count) && p.count == count as i32,
            format_args!("{} copies of {count}, expected 1 to {most}", p.count),
        )?;
        *params = *p;
        let mut pieces = 0;
        for (copy, (to, from)) in params.copies.iter_mut().zip(&operands.copies) {
            pieces += fits(copy, to, from)?;
            (copy.to, copy.from) = (pointer_mut(to), pointer(from));
        }
        Ok(ceil_div(pieces, manifest::Family::warps(self) * 32))
    }
}

#[cfg(test)]
#[path = "row_copy_tests.rs"]
mod tests;
