//! Dense times block-sparse, as the product of transposed views: Yᵀ = Wᵀ·Xᵀ.

use super::{BsrMatmul, BsrTranspose, BsrView};
use crate::{Error, Result};
use blockflash_safe::{Stream, Tensor, View};
use blockflash_sys::DType;

impl<'a> BsrMatmul<'a> {
    /// A linear layer, `Y = X·Wᵀ` with X `[tokens, inputs]` and a block-sparse W
    /// `[outputs, inputs]`: its transpose, `Yᵀ = W·Xᵀ`.
    ///
    /// The C of the operation is `Yᵀ`: [`matmul_transposed`](Self::matmul_transposed) allocates Y,
    /// and [`matmul_into`](Self::matmul_into) takes `y.view_mut().permute(&[1, 0])`. So
    /// [`Bias::PerRow`](super::Bias::PerRow) is one value per output, and
    /// [`Bias::PerColumn`](super::Bias::PerColumn) one per token.
    ///
    /// ```
    /// # use blockflash_ops::{Activation, Bias, BsrMatmul, BsrMatrix, DType, Device, Tensor, View};
    /// let stream = Device::cpu().stream()?;
    /// let w = BsrMatrix::from_coo(2, 3, 1, DType::F32, &[(0, 0, 2.0), (1, 2, -1.0)])?;
    /// let x = Tensor::from_slice(&stream, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    /// let bias = Bias::PerRow(View::from_slice(&[10.0f32, 20.0], &[2])?);
    /// let layer = BsrMatmul { bias, ..BsrMatmul::linear(x.view(), &w)? };
    /// let y = layer.matmul_transposed(DType::F32, &stream)?;
    /// assert_eq!(y.to_vec::<f32>(&stream)?, [12.0, 17.0, 18.0, 14.0]); // [tokens, outputs]
    ///
    /// // The same, with nothing allocated in the call.
    /// let mut y = Tensor::zeros(&stream, DType::F32, &[2, 2])?;
    /// layer.matmul_into(y.view_mut().permute(&[1, 0])?, &stream)?;
    /// # assert_eq!(y.to_vec::<f32>(&stream)?, [12.0, 17.0, 18.0, 14.0]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if X is not a matrix.
    pub fn linear(x: View<'a>, w: impl Into<BsrView<'a>>) -> Result<Self> {
        Ok(Self::new(w, transposed("x", &x)?))
    }

    /// `Y = X·W` with a dense X `[rows, inner]` and a block-sparse W `[inner, columns]`, computed
    /// as its transpose, `Yᵀ = Wᵀ·Xᵀ`. With the W of a [`linear`](Self::linear) layer it computes
    /// the gradient of X from the gradient of Y. C and the bias are laid out as in `linear`.
    ///
    /// ```
    /// # use blockflash_ops::{BsrMatmul, BsrMatrix, BsrTranspose, DType, Device, Tensor};
    /// let stream = Device::cpu().stream()?;
    /// let w = BsrMatrix::from_coo(2, 3, 1, DType::F32, &[(0, 0, 2.0), (1, 2, -1.0)])?;
    /// let index = BsrTranspose::new(&w, &stream)?; // once per pattern
    /// let x = Tensor::from_slice(&stream, &[1.0f32, 2.0], &[1, 2])?;
    /// let product = BsrMatmul::dense_sparse(x.view(), &w, &index)?;
    /// let y = product.matmul_transposed(DType::F32, &stream)?;
    /// assert_eq!(y.to_vec::<f32>(&stream)?, [2.0, 0.0, -2.0]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if X is not a matrix.
    pub fn dense_sparse(
        x: View<'a>,
        w: impl Into<BsrView<'a>>,
        index: &'a BsrTranspose,
    ) -> Result<Self> {
        Ok(Self::transposed(w, index, transposed("x", &x)?))
    }

    /// Allocates `Cᵀ` `[n, m]` in this element type and computes it, so each column of C is
    /// contiguous. This is Y where the operation is [`linear`](Self::linear) or
    /// [`dense_sparse`](Self::dense_sparse).
    ///
    /// # Errors
    /// As [`matmul`](Self::matmul).
    pub fn matmul_transposed(&self, dtype: DType, stream: &Stream) -> Result<Tensor> {
        let [m, n] = self.new_c()?;
        let mut c = Tensor::empty(stream, dtype, &[n, m])?;
        self.matmul_into(c.view_mut().permute(&[1, 0])?, stream)?;
        Ok(c)
    }
}

fn transposed<'a>(what: &'static str, matrix: &View<'a>) -> Result<View<'a>> {
    if matrix.shape().len() == 2 {
        return Ok(matrix.permute(&[1, 0])?);
    }
    Err(Error::Shape { what, expected: "two dimensions".into(), found: matrix.shape().to_vec() })
}
