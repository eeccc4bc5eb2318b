//! What happens to a score, the product of a query and a key, on its way into the softmax.

use super::{AttentionProblem, Mask};
use crate::Result;
use crate::check::{Operand, finite_positive, is_tensor_map_stride, vector};
use blockflash_safe::{Device, ScoreTerms, View};
use blockflash_sys::DType;
use std::ops::Range;

/// What happens to a score q·kᵀ, in this order: it is scaled, capped, added to and masked, and a
/// sink joins the denominator of the softmax. Fields left at their default do nothing:
///
/// ```
/// # use blockflash_ops::{Mask, Scores, View};
/// let causal: Scores<View<'_>> = Mask::causal().into();
/// let capped = Scores { softcap: Some(30.0), ..causal };
/// assert_eq!(capped.mask, Mask::causal());
/// ```
///
/// `S` is a tensor: a [`View`] in the operations of this crate, what a front end has in its place
/// there.
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
    /// f16, bf16 or f32 `[batch, num_heads_q, seqlen_q, seqlen_kv]`, where any extent may be 1
    /// instead and then serves all, with any strides: added to the scaled and capped scores. Over a
    /// cache the last extent is its capacity. Packed sequences take none. A score of −∞ has
    /// probability 0.
    pub bias: Option<S>,
    /// f32 `[num_heads_q]` or `[batch, num_heads_q]`, with any strides: slopes of ALiBi. Query `i`
    /// and key `j` of a sequence get `-slope * |i + seqlen_kv - seqlen_q - j|`, which is 0 where
    /// the last query meets the last key, however the mask is aligned.
    pub alibi: Option<S>,
}

impl<S> Scores<S> {
    /// The scores of the keys that a mask shows, with the default scale.
    pub const fn of(mask: Mask) -> Self {
        let (sink, bias, alibi) = (None, None, None);
        Self { mask, softmax_scale: None, softcap: None, sink, bias, alibi }
    }

    /// The same without its tensors.
    pub const fn without_tensors<T>(&self) -> Scores<T> {
        let Self { mask, softmax_scale, softcap, .. } = *self;
        Scores { mask, softmax_scale, softcap, sink: None, bias: None, alibi: None }
    }

    /// The same with borrowed tensors.
    pub const fn as_ref(&self) -> Scores<&S> {
        let Self { mask, softmax_scale, softcap, .. } = *self;
        let (sink, bias, alibi) = (self.sink.as_ref(), self.bias.as_ref(), self.alibi.as_ref());
        Scores { mask, softmax_scale, softcap, sink, bias, alibi }
    }

    /// The tensors that are given, with the names of their fields.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &S)> {
        let Self { sink, bias, alibi, .. } = self;
        let all = [("sink", sink), ("bias", bias), ("alibi", alibi)];
        all.into_iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref()?)))
    }

    /// The same with what `make` turns each tensor into.
    pub fn map<T>(self, mut make: impl FnMut(S) -> T) -> Scores<T> {
        let scores = self.without_tensors();
        let [sink, bias, alibi] = [self.sink, self.bias, self.alibi].map(|t| t.map(&mut make));
        Scores { sink, bias, alibi, ..scores }
    }

    /// The same, where `make` gets the name of the field, too, and may fail.
    ///
    /// # Errors
    /// The first of `make`.
    pub fn try_map<T, E>(
        self,
        mut make: impl FnMut(&'static str, S) -> Result<T, E>,
    ) -> Result<Scores<T>, E> {
        let scores = self.without_tensors();
        let Self { sink, bias, alibi, .. } = self;
        let mut of = |name, tensor: Option<S>| tensor.map(|t| make(name, t)).transpose();
        let (sink, bias) = (of("sink", sink)?, of("bias", bias)?);
        Ok(Scores { sink, bias, alibi: of("alibi", alibi)?, ..scores })
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
    /// If the tensors do not have as many.
    pub fn of_heads(self, heads: Range<usize>) -> Result<Self> {
        self.try_map(|name, tensor| {
            let dim = if name == "bias" { 1 } else { tensor.shape().len().saturating_sub(1) };
            let serves_all = name == "bias" && tensor.shape().get(dim) == Some(&1);
            Ok(if serves_all { tensor } else { tensor.slice(dim, heads.clone())? })
        })
    }

    /// The same for one sequence of a batch, whose cache has this many keys.
    pub(crate) fn of_sequence(self, entry: usize, keys: usize) -> Result<Self> {
        self.try_map(|name, tensor| {
            let one = |tensor: View<'a>| match *tensor.shape() {
                [1, ..] => Ok(tensor),
                _ => tensor.slice(0, entry..entry + 1),
            };
            Ok(match (name, tensor.shape().len()) {
                ("alibi", 2) => one(tensor)?,
                ("bias", _) if tensor.shape().last() == Some(&1) => one(tensor)?,
                ("bias", _) => one(tensor)?.slice(3, 0..keys)?,
                _ => tensor,
            })
        })
    }

    /// Everything that can be checked, as plain numbers: for a problem whose sizes are known.
    #[inline]
    pub(crate) fn problem(&self, sizes: &AttentionProblem) -> Result<ScoresProblem> {
        let Self { mask, softmax_scale, softcap, sink, bias, alibi } = self;
        if let Some(sink) = sink {
            vector("sink", sink, DType::F32, &[sizes.num_heads_q])?;
        }
        if let Some(alibi) = alibi {
            check_alibi(&Operand::new("alibi", alibi), sizes)?;
        }
        let bias = bias.as_ref().map(|bias| BiasProblem::of(bias, sizes));
        let default = ScoresProblem::of(sizes.head_dims.qk);
        let softmax_scale = softmax_scale.unwrap_or(default.softmax_scale);
        Ok(ScoresProblem {
            mask: *mask,
            softmax_scale: finite_positive("softmax_scale", softmax_scale)?,
            softcap: softcap.map(|softcap| finite_positive("softcap", softcap)).transpose()?,
            sink: sink.is_some(),
            bias: bias.transpose()?,
            alibi: alibi.is_some(),
        })
    }

    /// What is added to scores, for a launch.
    pub(crate) fn terms(&self) -> ScoreTerms<'a> {
        ScoreTerms { bias: self.bias, alibi: self.alibi }
    }

    /// Checks that every tensor is on this device.
    #[inline]
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        self.tensors().try_for_each(|(name, tensor)| Operand::new(name, tensor).on(device))
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
    /// Set when a bias is added to the scores.
    pub bias: Option<BiasProblem>,
    /// Whether ALiBi is added to the scores.
    pub alibi: bool,
}

impl ScoresProblem {
    /// Those of all keys, with the default scale of this head dimension of q and k.
    pub fn of(head_dim_qk: usize) -> Self {
        let softmax_scale = (1.0 / (head_dim_qk as f64).sqrt()) as f32;
        let (mask, softcap, sink) = (Mask::Full, None, false);
        Self { mask, softmax_scale, softcap, sink, bias: None, alibi: false }
    }

    /// The name of the first tensor that is added to scores, if there is one.
    pub const fn added(&self) -> Option<&'static str> {
        match self {
            Self { bias: Some(_), .. } => Some("bias"),
            Self { alibi: true, .. } => Some("alibi"),
            _ => None,
        }
    }

    /// What two calls have to agree about besides the mask and what is added: names and values.
    pub fn numbers(&self) -> [(&'static str, u64); 3] {
        let bits = |number: f32| u64::from(number.to_bits());
        [
            ("softmax_scale", bits(self.softmax_scale)),
            ("softcap", self.softcap.map_or(u64::MAX, bits)),
            ("sink", self.sink.into()),
        ]
    }
}

/// A bias reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasProblem {
    /// Its element type: f16, bf16 or f32.
    pub dtype: DType,
    /// Whether one element serves all batch entries, heads of q, queries and keys: where the bias
    /// has extent 1 and the problem another.
    pub broadcast: [bool; 4],
    /// Whether a tensor map can describe it: a 16-bit type, contiguous keys, everything else at
    /// multiples of 16 bytes.
    pub mapped: bool,
}

impl BiasProblem {
    fn of(view: &View<'_>, sizes: &AttentionProblem) -> Result<Self> {
        let bias = Operand::new("bias", view);
        bias.dtype_in(&[DType::F16, DType::BF16, DType::F32])?;
        if sizes.packed.is_some() {
            return Err(bias.wrong_shape("no bias, as sequences are packed (cu_seqlens)"));
        }
        let full = pairs(sizes);
        let fits = bias.shape.len() == full.len()
            && bias.shape.iter().zip(full).all(|(&extent, full)| extent == full || extent == 1);
        if !fits {
            let extents = full.map(|full| match full {
                1 => "1".to_owned(),
                full => format!("{full} or 1"),
            });
            return Err(bias.wrong_shape(format!("[{}]", extents.join(", "))));
        }
        let broadcast = std::array::from_fn(|dim| bias.shape[dim] != full[dim]);
        let mut dims = bias.shape.iter().zip(bias.strides).filter(|(extent, _)| **extent > 1);
        let keys = (full[3] > 1 && !broadcast[3]).then(|| dims.next_back()).flatten();
        let mapped = bias.dtype.size() == 2
            && (view.is_cpu() || view.is_aligned(16))
            && keys.is_none_or(|(_, &stride)| stride == 1)
            && dims.all(|(_, &stride)| stride % 8 == 0 && is_tensor_map_stride(stride, bias.dtype));
        Ok(Self { dtype: bias.dtype, broadcast, mapped })
    }

    /// The shape of the bias of a problem.
    pub(crate) fn shape(&self, sizes: &AttentionProblem) -> [usize; 4] {
        let full = pairs(sizes);
        std::array::from_fn(|dim| if self.broadcast[dim] { 1 } else { full[dim] })
    }
}

/// The shape of all scores.
fn pairs(sizes: &AttentionProblem) -> [usize; 4] {
    [sizes.batch, sizes.num_heads_q, sizes.seqlen_q, sizes.seqlen_kv]
}

fn check_alibi(alibi: &Operand<'_>, sizes: &AttentionProblem) -> Result<()> {
    let AttentionProblem { batch, num_heads_q, .. } = *sizes;
    alibi.dtype_in(&[DType::F32])?;
    match *alibi.shape {
        [heads] if heads == num_heads_q => Ok(()),
        [entries, heads] if [entries, heads] == [batch, num_heads_q] => Ok(()),
        _ => Err(alibi.wrong_shape(format!("[{num_heads_q}] or [{batch}, {num_heads_q}]"))),
    }
}

#[cfg(test)]
#[path = "scores_tests.rs"]
mod tests;
