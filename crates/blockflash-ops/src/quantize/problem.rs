use super::{Quantize, QuantizeOutputMut, QuantizeScale};
use crate::Result;
use crate::attention::Strides;
use crate::check::Operand;
use crate::kv_cache::{FLOATS, ScaleStrides, token_sizes};
use blockflash_sys::DType;

/// The element types of codes.
const CODES: [DType; 3] = [DType::E4M3, DType::E5M2, DType::I8];

/// A call of [`Quantize`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizeProblem {
    /// Element type of x.
    pub dtype: DType,
    /// Element type of the codes.
    pub codes: DType,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence; at most this many when packed.
    pub tokens: usize,
    /// Rows of the packed tensors.
    pub packed: Option<usize>,
    /// Heads.
    pub num_heads: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// Strides of x.
    pub x: Strides,
    /// Which elements share a scale.
    pub scale: ScaleOf,
    /// Whether rows lose the mean of their sequence and head.
    pub subtract_mean: bool,
    /// Whether rows are rotated.
    pub rotate: bool,
}

/// [`QuantizeScale`] without tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOf {
    /// Scales that are given, with these strides.
    Given(ScaleStrides),
    /// All elements.
    Tensor,
    /// Those of a sequence and head.
    Head,
    /// Those of a token and head.
    Token,
}

impl Quantize<'_> {
    /// Everything that can be checked without reading a tensor, for codes of this type, and the
    /// result as plain numbers.
    ///
    /// # Errors
    /// [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape) and
    /// [`Error::Stride`](crate::Error::Stride) for a tensor that does not fit, also for a
    /// `head_dim` that cannot be rotated.
    pub fn problem(&self, codes: DType) -> Result<QuantizeProblem> {
        let x = Operand::new("x", &self.x);
        x.dtype_in(&FLOATS)?;
        Operand { what: "codes", dtype: codes, ..x }.dtype_in(&CODES)?;
        let rows = token_sizes(&x, self.packed.as_ref())?;
        if rows.head_dim == 0 {
            return Err(x.wrong_shape("a head_dim of at least 1"));
        }
        if self.rotate && !rows.head_dim.is_power_of_two() {
            return Err(x.wrong_shape("a head_dim that is a power of 2, since it is rotated"));
        }
        let (batch, num_heads) = (rows.batch, rows.heads);
        let scale = match &self.scale {
            QuantizeScale::Given(scale) => {
                let scale = Operand::new("scale", scale);
                scale.dtype_in(&[DType::F32])?;
                ScaleOf::Given(given(&scale, scale.strides, [batch, num_heads])?)
            }
            QuantizeScale::Tensor => ScaleOf::Tensor,
            QuantizeScale::Head => ScaleOf::Head,
            QuantizeScale::Token => ScaleOf::Token,
        };
        Ok(QuantizeProblem {
            dtype: x.dtype,
            codes,
            batch,
            tokens: rows.tokens,
            packed: rows.packed,
            num_heads,
            head_dim: rows.head_dim,
            x: rows.strides,
            scale,
            subtract_mean: self.subtract_mean,
            rotate: self.rotate,
        })
    }
}

/// Strides of scales that are given.
pub(super) fn given(
    scale: &Operand<'_>,
    strides: &[usize],
    [batch, heads]: [usize; 2],
) -> Result<ScaleStrides> {
    ScaleStrides::by_sequence(scale, strides, [batch, heads])
        .ok_or_else(|| scale.wrong_shape(format!("[1] or [{batch} or 1, {heads} or 1]")))
}

impl QuantizeProblem {
    /// The shape of x and of the codes.
    pub fn shape(&self) -> Vec<usize> {
        match self.packed {
            Some(total) => vec![total, self.num_heads, self.head_dim],
            None => vec![self.batch, self.tokens, self.num_heads, self.head_dim],
        }
    }

    /// The shape of scales that are chosen.
    pub fn scale_shape(&self) -> Option<Vec<usize>> {
        match self.scale {
            ScaleOf::Given(_) => None,
            ScaleOf::Tensor => Some(vec![1]),
            ScaleOf::Head => Some(vec![self.batch, self.num_heads]),
            ScaleOf::Token => self.shape().split_last().map(|(_, rows)| rows.to_vec()),
        }
    }

    /// The shape of the mean.
    pub fn mean_shape(&self) -> Vec<usize> {
        vec![self.batch, self.num_heads, self.head_dim]
    }

    /// Whether there is nothing to write: neither codes, nor scales, nor a mean.
    pub(super) fn writes_nothing(&self) -> bool {
        let mean = self.subtract_mean.then(|| self.mean_shape());
        let mut outputs = [Some(self.shape()), self.scale_shape(), mean].into_iter().flatten();
        outputs.all(|shape| shape.contains(&0))
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Checks the shapes and layouts of the outputs.
    pub(super) fn check_outputs(&self, out: &QuantizeOutputMut<'_>) -> Result<()> {
        let codes = Operand::of_mut("codes", &out.codes);
        codes.shape_is(&self.shape())?;
        codes.last_dim_contiguous()?;
        if let Some(scale) = &out.scale {
            let scale = Operand::of_mut("scale", scale);
            scale.dtype_in(&[DType::F32])?;
            match self.scale_shape() {
                Some(shape) => scale.shape_is(&shape)?,
                None => return Err(scale.wrong_shape("no output, since the scale is given")),
            }
        }
        if let Some(mean) = &out.mean {
            let mean = Operand::of_mut("mean", mean);
            mean.dtype_in(&[DType::F32])?;
            if !self.subtract_mean {
                return Err(mean.wrong_shape("no output, since no mean is subtracted"));
            }
            mean.shape_is(&self.mean_shape())?;
            mean.last_dim_contiguous()?;
        }
        Ok(())
    }
}
