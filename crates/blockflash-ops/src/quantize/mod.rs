//! Turns queries, keys and values into codes of 8 bits.

mod cpu;
mod plan;
mod problem;
mod select;
mod steps;

pub use plan::{QuantizeLaunches, plan};
pub use problem::QuantizeProblem;
pub use select::{accepts, select};

pub(crate) use select::support;

use crate::Result;
use crate::check::Operand;
use crate::kv_cache::PackedTokens;
use crate::operation::Operation;
use blockflash_safe::{Device, Stream, Tensor, View, ViewMut};
use blockflash_sys::DType;

/// Turns rows of attention into codes of 8 bits (`e4m3`, `e5m2`, `i8`) and their scales, as
/// [`Attention::scales`](crate::Attention::scales) takes them.
///
/// ```
/// # use blockflash_ops::{Attention, DType, Device, OperandScales, Quantize, Tensor};
/// # let stream = Device::cpu().stream()?;
/// let x = Tensor::from_slice(&stream, &vec![0.3f32; 16 * 2 * 64], &[1, 16, 2, 64])?;
/// let quantized = Quantize::new(x.view()).quantize(DType::E4M3, &stream)?;
/// let (codes, scale) = (quantized.codes.view(), quantized.scale.as_ref().map(Tensor::view));
/// let scales = OperandScales { q: scale, k: scale, v: scale };
/// let attention = Attention { scales, ..Attention::new(codes, codes, codes) };
/// assert_eq!(attention.forward(&stream)?.o.dtype(), DType::BF16);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// A row loses the mean of its sequence and head first, then it is rotated, both in f32 and only if
/// asked for; then it is divided by its scale, rounded to nearest with ties to even, and saturated
/// at ±448, ±57344 or ±127, infinities as well. NaN is NaN, and 0 for `i8`. Appends to a cache of
/// codes round in the same way.
///
/// A scale that is chosen makes the greatest magnitude of its elements the greatest code. NaN does
/// not count, the scale of zeros is 1, and that of an infinity is infinite, which leaves zeros, and
/// NaN in place of the infinity. Scales that are given should be finite and positive, which
/// [`set_checks`](crate::set_checks) verifies; what others make of the numbers is that of IEEE
/// arithmetic.
///
/// A GPU takes a `head_dim` of a multiple of 8 up to 256, rows of x and of the mean at multiples of
/// 16 bytes, and rows of codes at multiples of 8; it keeps a scale of a head or of all and the mean
/// in their outputs, which must not be left out. Codes and scales have the same bits on both. Only
/// the mean is summed in f64 on the CPU and in f32 on a GPU, there in an order that the number of
/// tokens and `head_dim` decide alone. Neither has bits that depend on threads or CTAs.
#[derive(Clone, Copy, Debug)]
pub struct Quantize<'a> {
    /// f16, bf16 or f32 `[batch, seqlen, num_heads, head_dim]`, or packed
    /// `[total, num_heads, head_dim]`, with any strides but a contiguous `head_dim`.
    pub x: View<'a>,
    /// Set when the sequences have unequal lengths.
    pub packed: Option<PackedTokens<'a>>,
    /// Which elements share a scale.
    pub scale: QuantizeScale<'a>,
    /// Subtracts the mean over the tokens of each sequence and head, element by element, where
    /// elements that are not finite do not count. Attention to keys without their mean has the same
    /// output, if scores are only scaled and masked: all scores of a query change alike, by
    /// `-softmax_scale * q · mean`, which is to be taken off the log-sum-exp.
    pub subtract_mean: bool,
    /// Multiplies each row with the orthonormal Hadamard matrix of Sylvester, which spreads a large
    /// element over all of its row and leaves the products of rows that are both rotated as they
    /// are. Needs a `head_dim` that is a power of 2.
    pub rotate: bool,
}

/// Which elements of [`Quantize::x`] share a scale.
#[derive(Clone, Copy, Debug, Default)]
pub enum QuantizeScale<'a> {
    /// Scales that are given, f32 `[1]` or `[batch, num_heads]`, where each extent may also be 1
    /// for a scale that all share.
    Given(View<'a>),
    /// All, `[1]`.
    Tensor,
    /// Those of a sequence and head, `[batch, num_heads]`.
    #[default]
    Head,
    /// Those of a token and head, `[batch, seqlen, num_heads]` or packed `[total, num_heads]`, as a
    /// [`KvCache`](crate::KvCache) takes them.
    Token,
}

/// The outputs of [`Quantize::quantize`].
#[derive(Debug)]
pub struct QuantizeOutput {
    /// The codes, in the shape of x, contiguous.
    pub codes: Tensor,
    /// What they are to be multiplied with, f32; `None` if scales are given.
    pub scale: Option<Tensor>,
    /// f32 `[batch, num_heads, head_dim]`: what was subtracted from x, if anything was.
    pub mean: Option<Tensor>,
}

/// The outputs of [`Quantize::quantize_into`], with any strides but a contiguous last dimension of
/// codes and mean.
#[derive(Debug)]
pub struct QuantizeOutputMut<'a> {
    /// See [`QuantizeOutput::codes`]; its element type is that of the codes.
    pub codes: ViewMut<'a>,
    /// See [`QuantizeOutput::scale`]. `None` leaves it out.
    pub scale: Option<ViewMut<'a>>,
    /// See [`QuantizeOutput::mean`]. `None` leaves it out.
    pub mean: Option<ViewMut<'a>>,
}

impl<'a> Quantize<'a> {
    /// A scale for each sequence and head, of x as it is.
    pub const fn new(x: View<'a>) -> Self {
        let scale = QuantizeScale::Head;
        Self { x, packed: None, scale, subtract_mean: false, rotate: false }
    }

    /// Writes the codes, the scales that are chosen and the mean. Rows that belong to no sequence
    /// of a packed batch are left as they are. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call; until it is complete, codes hold something
    /// else. On the CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and their like of the outputs;
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if an operand is not on the stream's
    /// device; on the CPU [`Error::InvalidCuSeqlens`](crate::Error::InvalidCuSeqlens); on a GPU
    /// [`Error::Unsupported`](crate::Error::Unsupported) for what no kernel takes and for a missing
    /// output, and [`Error::Misaligned`](crate::Error::Misaligned).
    pub fn quantize_into(&self, out: QuantizeOutputMut<'_>, stream: &Stream) -> Result<()> {
        self.run(out, stream)
    }

    /// Allocates the outputs and writes them. Rows that belong to no sequence of a packed batch are
    /// 0.
    ///
    /// # Errors
    /// As [`quantize_into`](Self::quantize_into), and out of memory.
    pub fn quantize(&self, codes: DType, stream: &Stream) -> Result<QuantizeOutput> {
        let problem = self.problem(codes)?;
        // Dense outputs are written as a whole.
        let new = if self.packed.is_none() { Tensor::empty } else { Tensor::zeros };
        let mut codes = new(stream, codes, self.x.shape())?;
        let of_f32 = |shape: Vec<usize>| new(stream, DType::F32, &shape);
        let mut scale = problem.scale_shape().map(of_f32).transpose()?;
        let mut mean = self.subtract_mean.then(|| of_f32(problem.mean_shape())).transpose()?;
        let out = QuantizeOutputMut {
            codes: codes.view_mut(),
            scale: scale.as_mut().map(Tensor::view_mut),
            mean: mean.as_mut().map(Tensor::view_mut),
        };
        self.quantize_into(out, stream)?;
        Ok(QuantizeOutput { codes, scale, mean })
    }

    /// Checks that every tensor is on this device.
    fn on(&self, out: &QuantizeOutputMut<'_>, device: &Device) -> Result<()> {
        let given = match &self.scale {
            QuantizeScale::Given(scale) => Some(scale),
            _ => None,
        };
        let offsets = self.packed.as_ref().map(|packed| &packed.cu_seqlens);
        let inputs = [("x", Some(&self.x)), ("cu_seqlens", offsets), ("scale", given)];
        for (what, view) in inputs {
            view.map_or(Ok(()), |view| Operand::new(what, view).on(device))?;
        }
        let outputs = [("scale", out.scale.as_ref()), ("mean", out.mean.as_ref())];
        for (what, view) in outputs.into_iter().chain([("codes", Some(&out.codes))]) {
            view.map_or(Ok(()), |view| Operand::of_mut(what, view).on(device))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
