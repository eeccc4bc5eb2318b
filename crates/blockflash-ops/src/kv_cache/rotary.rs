use crate::check::Operand;
use crate::{Result, check::to_i32};
use blockflash_safe::{Device, View};
use blockflash_sys::DType;

/// Which two elements of a row are turned together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RotaryPairs {
    /// Elements `i` and `i + rotary_dim / 2` (GPT-NeoX, Llama).
    #[default]
    Halves,
    /// Elements `2 i` and `2 i + 1` (GPT-J).
    Interleaved,
}

/// Rotary position embedding: pair `i` of a row `(x, y)` at position `p` becomes
/// `(x cos - y sin, x sin + y cos)` with `cos[p, i]` and `sin[p, i]`, computed in f32 and rounded
/// once. The first `rotary_dim` elements of a row have pairs, the others stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct Rotary<'a> {
    /// `[positions, rotary_dim / 2]`, f32 or in the element type of the rows, with at least one
    /// column and at least as many positions as the capacity of the cache.
    pub cos: View<'a>,
    /// As `cos`.
    pub sin: View<'a>,
    /// Which elements are pairs.
    pub pairs: RotaryPairs,
}

/// A [`Rotary`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotarySizes {
    /// Element type of both tables.
    pub dtype: DType,
    /// Positions of both tables.
    pub positions: usize,
    /// Elements of a row that are turned, even and at least 2.
    pub rotary_dim: usize,
    /// Elements from one position to the next, of cos and of sin.
    pub strides: [usize; 2],
    /// Which elements are pairs.
    pub pairs: RotaryPairs,
}

impl Rotary<'_> {
    /// The sizes, checked for rows of this type and width at positions below `capacity`.
    pub(crate) fn sizes(
        &self,
        dtype: DType,
        head_dim: usize,
        capacity: usize,
    ) -> Result<RotarySizes> {
        let (cos, sin) =
            (Operand::new("rotary.cos", &self.cos), Operand::new("rotary.sin", &self.sin));
        cos.dtype_in(&[dtype, DType::F32])?;
        sin.dtype_in(&[cos.dtype])?;
        let fits = |positions, half| positions >= capacity && half > 0 && half <= head_dim / 2;
        let &[positions, half] = cos.shape else {
            return Err(cos.wrong_shape("[positions, rotary_dim / 2]"));
        };
        if !fits(positions, half) {
            let most = head_dim / 2;
            return Err(cos.wrong_shape(format!("[at least {capacity}, 1 to {most}]")));
        }
        sin.shape_is(cos.shape)?;
        cos.last_dim_contiguous()?;
        sin.last_dim_contiguous()?;
        to_i32("rotary.cos", positions)?;
        let strides = [cos.strides[0], sin.strides[0]];
        let (dtype, pairs) = (cos.dtype, self.pairs);
        Ok(RotarySizes { dtype, positions, rotary_dim: 2 * half, strides, pairs })
    }

    /// Checks that both tables are on this device.
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        Operand::new("rotary.cos", &self.cos).on(device)?;
        Operand::new("rotary.sin", &self.sin).on(device)
    }
}
