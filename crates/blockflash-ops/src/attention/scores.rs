//! What happens to a score, the product of a query and a key, on its way into the softmax.

use super::Mask;
use crate::Result;
use crate::check::{Operand, finite_positive, vector};
use blockflash_safe::{Device, View};
use blockflash_sys::DType;
use std::ops::Range;

/// What happens to a score q·kᵀ, in this order: it is scaled, capped and masked, and a sink joins
/// the denominator of the softmax. Fields left at their default do nothing:
///
/// ```
/// # use blockflash_ops::{Mask, Scores, View};
/// let causal: Scores<View<'_>> = Mask::causal().into();
/// let capped = Scores { softcap: Some(30.0), ..causal };
/// assert_eq!(capped.mask, Mask::causal());
/// ```
///
/// `S` is the tensor of the sink: a [`View`] in the operations of this crate, what a front end has
/// in its place there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores<S> {
    /// Which keys a query attends.
    pub mask: Mask,
    /// Factor of q·kᵀ, finite and positive; `None` is `1 / sqrt(head_dim)`, with that of q and k.
    pub softmax_scale: Option<f32>,
    /// Scores become `softcap * tanh(score / softcap)`; finite and positive.
    pub softcap: Option<f32>,
    /// f32 `[num_heads_q]`: a logit per head (attention sink) that joins the softmax denominator,
    /// and so the lse, but has no value.
    pub sink: Option<S>,
}

impl<S> Scores<S> {
    /// The scores of the keys that a mask shows, with the default scale.
    pub const fn of(mask: Mask) -> Self {
        Self { mask, softmax_scale: None, softcap: None, sink: None }
    }

    /// The same without a sink.
    pub const fn without_sink<T>(&self) -> Scores<T> {
        let Self { mask, softmax_scale, softcap, .. } = *self;
        Scores { mask, softmax_scale, softcap, sink: None }
    }

    /// The same with a borrowed sink.
    pub const fn as_ref(&self) -> Scores<&S> {
        Scores { sink: self.sink.as_ref(), ..self.without_sink() }
    }

    /// The same with what `make` turns the sink into.
    pub fn map_sink<T>(self, make: impl FnOnce(S) -> T) -> Scores<T> {
        let scores = self.without_sink();
        Scores { sink: self.sink.map(make), ..scores }
    }

    /// The same, where `make` may fail.
    ///
    /// # Errors
    /// That of `make`.
    pub fn try_map_sink<T, E>(self, make: impl FnOnce(S) -> Result<T, E>) -> Result<Scores<T>, E> {
        let scores = self.without_sink();
        Ok(Scores { sink: self.sink.map(make).transpose()?, ..scores })
    }
}

impl<S> Default for Scores<S> {
    /// Those of all keys, with the default scale.
    fn default() -> Self {
        Self::of(Mask::Full)
    }
}

impl<S> From<Mask> for Scores<S> {
    fn from(mask: Mask) -> Self {
        Self::of(mask)
    }
}

impl<'a> Scores<View<'a>> {
    /// The same for some of the heads of q.
    ///
    /// # Errors
    /// If the sink does not have as many.
    pub fn of_heads(self, heads: Range<usize>) -> Result<Self> {
        self.try_map_sink(|sink| Ok(sink.slice(0, heads)?))
    }

    /// Everything that can be checked, as plain numbers.
    #[inline]
    pub(crate) fn problem(&self, head_dim_qk: usize, num_heads_q: usize) -> Result<ScoresProblem> {
        let Self { mask, softmax_scale, softcap, sink } = self;
        if let Some(sink) = sink {
            vector("sink", sink, DType::F32, &[num_heads_q])?;
        }
        let default = ScoresProblem::of(head_dim_qk);
        let softmax_scale = softmax_scale.unwrap_or(default.softmax_scale);
        Ok(ScoresProblem {
            mask: *mask,
            softmax_scale: finite_positive("softmax_scale", softmax_scale)?,
            softcap: softcap.map(|softcap| finite_positive("softcap", softcap)).transpose()?,
            sink: sink.is_some(),
        })
    }

    /// Checks that every tensor is on this device.
    #[inline]
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        self.sink.as_ref().map_or(Ok(()), |sink| Operand::new("sink", sink).on(device))
    }
}

/// [`Scores`] reduced to plain numbers, which were checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoresProblem {
    /// Which keys a query attends.
    pub mask: Mask,
    /// Factor of q·kᵀ, finite and positive.
    pub softmax_scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`; finite and positive.
    pub softcap: Option<f32>,
    /// Whether a sink logit per query head joins the denominator.
    pub sink: bool,
}

impl ScoresProblem {
    /// Those of all keys, with the default scale of this head dimension of q and k.
    pub fn of(head_dim_qk: usize) -> Self {
        let softmax_scale = (1.0 / (head_dim_qk as f64).sqrt()) as f32;
        Self { mask: Mask::Full, softmax_scale, softcap: None, sink: false }
    }

    /// What two calls have to agree about besides the mask: names and values.
    pub fn numbers(&self) -> [(&'static str, u64); 3] {
        let bits = |number: f32| u64::from(number.to_bits());
        [
            ("softmax_scale", bits(self.softmax_scale)),
            ("softcap", self.softcap.map_or(u64::MAX, bits)),
            ("sink", self.sink.into()),
        ]
    }
}
