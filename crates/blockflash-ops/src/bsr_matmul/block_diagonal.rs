//! A batch of block-sparse matrices as one matrix, and so a batch of products as one product.

use super::validate::{Shape, invalid};
use super::{BsrMatmul, BsrMatrix, BsrPattern, BsrView};
use crate::Result;
use crate::check::{Operand, reserved, to_i32};
use crate::float::Float;
use blockflash_safe::View;
use blockflash_sys::DType;
use half::{bf16, f16};

impl BsrMatrix {
    /// The block-diagonal matrix of these matrices, from the upper left on: the A of
    /// [`BsrMatmul::batched`]. On the CPU.
    ///
    /// All have the same element type and block size. All but the last have rows and columns that
    /// are multiples of the block size, since blocks of the next begin there. The values are those
    /// of the matrices one after another.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`](crate::Error::InvalidBsr) for no matrix, another block size, or sizes
    /// that are no multiples; [`Error::DType`](crate::Error::DType),
    /// [`Error::TooLarge`](crate::Error::TooLarge); a matrix that is not on the CPU.
    pub fn block_diagonal(matrices: &[&BsrMatrix]) -> Result<Self> {
        let Some(first) = matrices.first() else {
            return invalid("a block diagonal of 0 matrices, expected at least 1".into());
        };
        match first.dtype() {
            DType::F16 => block_diagonal::<f16>(matrices, first.block_size()),
            DType::BF16 => block_diagonal::<bf16>(matrices, first.block_size()),
            _ => block_diagonal::<f32>(matrices, first.block_size()),
        }
    }
}

fn block_diagonal<T: Float>(matrices: &[&BsrMatrix], block_size: usize) -> Result<BsrMatrix> {
    for (at, matrix) in matrices.iter().enumerate() {
        let (rows, cols, found) = (matrix.rows(), matrix.cols(), matrix.block_size());
        Operand::new("a matrix of the block diagonal", &matrix.values.view())
            .dtype_in(&[T::DTYPE])?;
        if found != block_size {
            return invalid(format!(
                "matrix {at} of the block diagonal has blocks of {found}, not {block_size}"
            ));
        }
        let whole = rows.is_multiple_of(block_size) && cols.is_multiple_of(block_size);
        if !whole && at + 1 < matrices.len() {
            return invalid(format!(
                "matrix {at} of the block diagonal is {rows} x {cols}, no multiples of \
                 {block_size}, and not the last"
            ));
        }
    }
    let sum = |size: fn(&BsrPattern) -> usize| {
        matrices.iter().fold(0usize, |sum, matrix| sum.saturating_add(size(matrix)))
    };
    let shape = Shape::new(sum(BsrPattern::rows), sum(BsrPattern::cols), block_size)?;
    // Places are added up in 32 bits below.
    let blocks = sum(BsrPattern::nnz_blocks);
    to_i32("nnz_blocks", blocks)?;

    let (mut row_ptr, mut col_idx) = (reserved(shape.block_rows + 1)?, reserved(blocks)?);
    let mut values: Vec<T> = reserved(blocks * shape.block_elements())?;
    row_ptr.push(0);
    let mut first_col = 0;
    for matrix in matrices {
        let first_block = col_idx.len() as i32;
        let ends = &matrix.row_ptr().view().as_slice::<i32>()?[1..];
        row_ptr.extend(ends.iter().map(|end| first_block + end));
        col_idx
            .extend(matrix.col_idx().view().as_slice::<i32>()?.iter().map(|col| first_col + col));
        values.extend_from_slice(matrix.values.view().as_slice()?);
        first_col += matrix.block_cols() as i32;
    }
    let values = View::from_slice(&values, &[blocks, block_size, block_size])?;
    BsrMatrix::from_parts(shape.rows, shape.cols, block_size, &row_ptr, &col_idx, values)
}

impl<'a> BsrMatmul<'a> {
    /// A batch of products with a pattern each, `C[i] = A[i]·B[i]`, as one: the `A[i]` are along
    /// the diagonal of `a` ([`BsrMatrix::block_diagonal`]), B is `[batch, k, n]` and C
    /// `[batch·m, n]`, the `C[i]` one below the other. So all of it is one launch, and long and
    /// short products are balanced.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Tensor};
    /// let stream = Device::cpu().stream()?;
    /// let a0 = BsrMatrix::from_coo(2, 4, 2, DType::F32, &[(0, 3, 2.0), (1, 2, 1.0)])?;
    /// let a1 = BsrMatrix::from_coo(2, 4, 2, DType::F32, &[(0, 0, -1.0), (1, 1, 5.0)])?;
    /// let a = BsrMatrix::block_diagonal(&[&a0, &a1])?;
    /// let b = [1.0f32, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0];
    /// let b = Tensor::from_slice(&stream, &b, &[2, 4, 1])?;
    /// let product = BsrMatmul::batched(&a, b.view())?;
    /// let c = product.matmul(DType::F32, &stream)?;
    /// assert_eq!(c.to_vec::<f32>(&stream)?, [8.0, 3.0, -10.0, 100.0]);
    ///
    /// // The same into a tensor [batch, m, n].
    /// let mut c = Tensor::zeros(&stream, DType::F32, &[2, 2, 1])?;
    /// product.matmul_into(c.view_mut().flatten(0..2)?, &stream)?;
    /// # assert_eq!(c.to_vec::<f32>(&stream)?, [8.0, 3.0, -10.0, 100.0]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// Where all entries of a batch share one A, as the tokens of all sequences share the weight of
    /// a layer, this is not needed: they are rows of one matrix, `x.flatten(0..2)?` for
    /// [`linear`](Self::linear).
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if B has not three dimensions, and the error of
    /// [`View::flatten`] if its entries are not one behind the other, as the rows of one matrix.
    pub fn batched(a: impl Into<BsrView<'a>>, b: View<'a>) -> Result<Self> {
        if b.shape().len() != 3 {
            return Err(Operand::new("b", &b).wrong_shape("[batch, k, n]"));
        }
        Ok(Self::new(a, b.flatten(0..2)?))
    }
}

#[cfg(test)]
#[path = "block_diagonal_tests.rs"]
mod tests;
