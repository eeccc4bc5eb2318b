//! Scales of queries, keys and values of 8 bits.

use super::{Attention, AttentionProblem};
use crate::check::Operand;
use crate::kv_cache::{HostScale, ScaleStrides};
use crate::{Error, Result};
use blockflash_safe::{Device, Stream, View};
use blockflash_sys::DType;

/// What the codes of q, k and v are multiplied with, if they have 8 bits (`e4m3`, `e5m2`, `i8`):
/// f32, and 1 where there is none. In one of these shapes, where each extent may also be 1 for a
/// scale that all share:
///
/// - `[1]`: one scale for the whole tensor.
/// - `[batch, num_heads]`: one for each sequence, also of a packed batch, and head: `num_heads_q`
///   or `num_heads_kv` for q, `num_heads_kv` for k and v.
///
/// Strides are free. Scales are read where they are at each call. They should be finite and
/// positive, which [`set_checks`](crate::set_checks) verifies; what others make of the numbers is
/// that of IEEE arithmetic, and rows that attend nothing stay 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct OperandScales<'a> {
    /// Of the queries.
    pub q: Option<View<'a>>,
    /// Of the keys.
    pub k: Option<View<'a>>,
    /// Of the values.
    pub v: Option<View<'a>>,
}

/// [`OperandScales`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperandScalesProblem {
    /// Strides of the scales of the queries.
    pub q: Option<ScaleStrides>,
    /// Strides of the scales of the keys.
    pub k: Option<ScaleStrides>,
    /// Strides of the scales of the values.
    pub v: Option<ScaleStrides>,
    /// Whether queries have a scale for each head of the keys.
    pub q_by_kv_heads: bool,
}

impl OperandScalesProblem {
    /// Whether there is a scale.
    pub(crate) fn is_some(&self) -> bool {
        self.q.is_some() || self.k.is_some() || self.v.is_some()
    }
}

impl<'a> OperandScales<'a> {
    /// No scales.
    pub const NONE: Self = Self { q: None, k: None, v: None };

    /// Those of q, of k and of v.
    pub(super) const fn tensors(&self) -> [Option<View<'a>>; 3] {
        [self.q, self.k, self.v]
    }

    /// The scales that are given, with the names of their fields.
    fn given(&self) -> impl Iterator<Item = (&'static str, &View<'a>)> {
        let all = [("scales.q", &self.q), ("scales.k", &self.k), ("scales.v", &self.v)];
        all.into_iter().filter_map(|(what, view)| Some((what, view.as_ref()?)))
    }

    /// Checks that every scale is on this device.
    pub(super) fn on(&self, device: &Device) -> Result<()> {
        self.given().try_for_each(|(what, view)| Operand::new(what, view).on(device))
    }

    /// Everything that can be checked, as plain numbers: for a problem whose sizes are known.
    pub(super) fn problem(&self, sizes: &AttentionProblem) -> Result<OperandScalesProblem> {
        let codes = sizes.types.q;
        if let Some((what, _)) = self.given().next()
            && !codes.is_code()
        {
            let expected = format!("e4m3 or e5m2 or i8, since {what} is given");
            return Err(Error::DType { what: "q", expected, found: codes });
        }
        let strides = |what, view: &Option<View<'_>>, heads: &[usize]| {
            let Some(view) = view else { return Ok(None) };
            let scale = Operand::new(what, view);
            scale.dtype_in(&[DType::F32])?;
            by_heads(&scale, scale.strides, sizes.batch, heads).map(Some)
        };
        let (of_q, of_kv) = (sizes.num_heads_q, sizes.num_heads_kv);
        let q_by_kv_heads = of_q != of_kv
            && self.q.is_some_and(|q| matches!(*q.shape(), [_, heads] if heads == of_kv));
        Ok(OperandScalesProblem {
            q: strides("scales.q", &self.q, &[of_q, of_kv])?,
            k: strides("scales.k", &self.k, &[of_kv])?,
            v: strides("scales.v", &self.v, &[of_kv])?,
            q_by_kv_heads,
        })
    }
}

/// Strides of scales that have one of these numbers of heads.
fn by_heads(
    scale: &Operand<'_>,
    strides: &[usize],
    batch: usize,
    heads: &[usize],
) -> Result<ScaleStrides> {
    let mut fitting =
        heads.iter().filter_map(|&heads| ScaleStrides::by_sequence(scale, strides, [batch, heads]));
    fitting.next().ok_or_else(|| {
        let heads: Vec<_> = heads.iter().map(usize::to_string).collect();
        let heads = heads.join(" or ");
        scale.wrong_shape(format!("[1] or [{batch} or 1, {heads} or 1]"))
    })
}

/// The scales of a call in host memory.
pub(super) struct HostScales<'a> {
    q: Option<HostScale<'a>>,
    k: Option<HostScale<'a>>,
    v: Option<HostScale<'a>>,
    /// Heads of q that share a head of the keys, and a scale of q.
    group: [usize; 2],
}

impl<'a> HostScales<'a> {
    /// Those of a problem that was checked.
    pub(super) fn new(
        op: &Attention<'a>,
        problem: &AttentionProblem,
        stream: &Stream,
    ) -> Result<Self> {
        let AttentionProblem { batch, num_heads_q, num_heads_kv, scales, .. } = *problem;
        let host = |what, view, heads: &[usize]| {
            let by =
                |scale: &Operand<'_>, strides: &[usize]| by_heads(scale, strides, batch, heads);
            HostScale::new(what, view, by, stream)
        };
        let group = num_heads_q / num_heads_kv.max(1);
        Ok(Self {
            q: host("scales.q", op.scales.q, &[num_heads_q, num_heads_kv])?,
            k: host("scales.k", op.scales.k, &[num_heads_kv])?,
            v: host("scales.v", op.scales.v, &[num_heads_kv])?,
            group: [group.max(1), if scales.q_by_kv_heads { group.max(1) } else { 1 }],
        })
    }

    /// What scores of a sequence and a head of q are multiplied with.
    pub(super) fn of_scores(&self, entry: usize, head: usize) -> f32 {
        let [of_kv, of_q] = self.group;
        get(&self.q, entry, head / of_q) * get(&self.k, entry, head / of_kv)
    }

    /// What the values of a sequence and a head of q are multiplied with.
    pub(super) fn of_values(&self, entry: usize, head: usize) -> f32 {
        get(&self.v, entry, head / self.group[0])
    }

    /// Verifies that all scales are finite and positive.
    pub(super) fn verify(&self, problem: &AttentionProblem) -> Result<()> {
        let AttentionProblem { batch, num_heads_q, num_heads_kv, .. } = *problem;
        for (scale, heads) in [
            (&self.q, num_heads_q / self.group[1]),
            (&self.k, num_heads_kv),
            (&self.v, num_heads_kv),
        ] {
            scale.as_ref().map_or(Ok(()), |scale| scale.verify_all([batch, heads]))?;
        }
        Ok(())
    }
}

fn get(scale: &Option<HostScale<'_>>, entry: usize, head: usize) -> f32 {
    scale.as_ref().map_or(1.0, |scale| scale.get(entry, [0; 2], head))
}

#[cfg(test)]
#[path = "operand_scales_tests.rs"]
mod tests;
