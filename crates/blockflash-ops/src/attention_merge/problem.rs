use super::AttentionMerge;
use crate::Result;
use crate::check::{Operand, to_i32};
use blockflash_safe::ViewMut;
use blockflash_sys::DType;

/// A merge reduced to plain numbers. [`AttentionMerge::problem`] makes one from tensors, with all
/// checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionMergeProblem {
    /// Element type of the parts.
    pub parts_dtype: DType,
    /// Element type of the output.
    pub o_dtype: DType,
    /// Number of parts.
    pub parts: usize,
    /// Queries.
    pub rows: usize,
    /// Heads.
    pub num_heads: usize,
    /// Elements of a row of o.
    pub head_dim: usize,
    /// Strides of the parts: between parts, rows and heads.
    pub parts_o: [usize; 3],
    /// Strides of the log-sum-exps of the parts, between parts, heads and rows; `None` for a sum.
    pub parts_lse: Option<[usize; 3]>,
    /// Strides of the output: between rows and heads.
    pub o: [usize; 2],
    /// Strides of lse, between heads and rows; `None` when the call does not ask for it.
    pub lse: Option<[usize; 2]>,
}

impl AttentionMergeProblem {
    /// Whether there is no output element to compute.
    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.num_heads == 0
    }
}

impl AttentionMerge<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape) and
    /// [`Error::Stride`](crate::Error::Stride) for tensors that do not fit each other.
    pub fn problem(
        &self,
        o: &ViewMut<'_>,
        lse: Option<&ViewMut<'_>>,
    ) -> Result<AttentionMergeProblem> {
        const FLOATS: [DType; 3] = [DType::F16, DType::BF16, DType::F32];
        let parts = Operand::new("parts.o", &self.o);
        let parts_lse = self.lse.as_ref().map(|lse| Operand::new("parts.lse", lse));
        let o = Operand::of_mut("o", o);
        parts.dtype_in(&FLOATS)?;
        o.dtype_in(&FLOATS)?;
        let &[count, rows, num_heads, head_dim] = parts.shape else {
            return Err(parts.wrong_shape("[parts, rows, num_heads, head_dim]"));
        };
        if head_dim == 0 {
            return Err(parts.wrong_shape("a head_dim of at least 1"));
        }
        if let Some(parts_lse) = &parts_lse {
            parts_lse.dtype_in(&[DType::F32])?;
            parts_lse.shape_is(&[count, num_heads, rows])?;
        }
        o.shape_is(&[rows, num_heads, head_dim])?;
        parts.last_dim_contiguous()?;
        o.last_dim_contiguous()?;
        for (what, size) in [("parts", count), ("rows", rows), ("num_heads", num_heads)] {
            to_i32(what, size)?;
        }
        let lse = lse.map(|lse| Operand::of_mut("lse", lse));
        if let Some(lse) = &lse {
            lse.dtype_in(&[DType::F32])?;
            lse.shape_is(&[num_heads, rows])?;
            if parts_lse.is_none() {
                return Err(lse.wrong_shape("no log-sum-exp, as the parts have none"));
            }
        }
        let three = |strides: &[usize]| [strides[0], strides[1], strides[2]];
        Ok(AttentionMergeProblem {
            parts_dtype: parts.dtype,
            o_dtype: o.dtype,
            parts: count,
            rows,
            num_heads,
            head_dim,
            parts_o: three(parts.strides),
            parts_lse: parts_lse.map(|parts_lse| three(parts_lse.strides)),
            o: [o.strides[0], o.strides[1]],
            lse: lse.map(|lse| [lse.strides[0], lse.strides[1]]),
        })
    }
}
