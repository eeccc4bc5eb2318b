//! What is added to scores: a bias and ALiBi.

use super::sequence::{QueryRows, Sequence};
use crate::Result;
use crate::attention::Scores;
use crate::float::Float;
use crate::panels::{Buffer, LANES, Lanes};
use blockflash_safe::View;
use blockflash_sys::DType;
use half::{bf16, f16};
use std::ops::Range;

/// What is added to the scores of a call.
pub(crate) struct Terms<'a> {
    bias: Option<Bias<'a>>,
    alibi: Option<Alibi<'a>>,
}

/// Strides are those of batch entries, heads, queries and keys: 0 where one element serves all.
struct Bias<'a> {
    elements: Elements<'a>,
    strides: [usize; 4],
}

enum Elements<'a> {
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
}

/// Strides are those of batch entries and heads.
struct Alibi<'a> {
    slopes: &'a [f32],
    strides: [usize; 2],
}

impl<'a> Terms<'a> {
    /// `None` if nothing is added.
    pub(crate) fn of(scores: &Scores<View<'a>>) -> Result<Option<Self>> {
        let (bias, alibi) = (scores.bias.as_ref(), scores.alibi.as_ref());
        let terms = Self {
            bias: bias.map(Bias::of).transpose()?,
            alibi: alibi.map(Alibi::of).transpose()?,
        };
        Ok((terms.bias.is_some() || terms.alibi.is_some()).then_some(terms))
    }

    /// What is added to the scores of a query and some neighbouring keys.
    pub(crate) fn load(
        &self,
        sequence: &Sequence,
        [head, query]: [usize; 2],
        keys: Range<usize>,
        row: &mut [f32],
    ) {
        match &self.bias {
            Some(bias) => bias.load([sequence.entry, head, query, keys.start], row),
            None => row.fill(0.0),
        }
        let Some(Alibi { slopes, strides }) = &self.alibi else { return };
        let slope = slopes[sequence.entry * strides[0] + head * strides[1]];
        // Lengths are at most 2^32 or so, and their sums fit.
        let aligned = (query + sequence.seqlen_kv) as i64 - sequence.seqlen_q as i64;
        for (key, term) in keys.zip(row) {
            *term -= slope * (aligned - key as i64).unsigned_abs() as f32;
        }
    }
}

impl<'a> Bias<'a> {
    fn of(view: &View<'a>) -> Result<Self> {
        let elements = match view.dtype() {
            DType::F16 => Elements::F16(view.as_slice()?),
            DType::BF16 => Elements::Bf16(view.as_slice()?),
            _ => Elements::F32(view.as_slice()?),
        };
        let dims = view.shape().iter().zip(view.strides());
        let mut dims = dims.map(|(&extent, &stride)| if extent == 1 { 0 } else { stride });
        Ok(Self { elements, strides: std::array::from_fn(|_| dims.next().unwrap_or(0)) })
    }

    fn load(&self, at: [usize; 4], row: &mut [f32]) {
        let start = at.iter().zip(self.strides).map(|(at, stride)| at * stride).sum();
        match self.elements {
            Elements::F16(elements) => load(elements, start, self.strides[3], row),
            Elements::Bf16(elements) => load(elements, start, self.strides[3], row),
            Elements::F32(elements) => load(elements, start, self.strides[3], row),
        }
    }
}

fn load<T: Float>(elements: &[T], start: usize, stride: usize, row: &mut [f32]) {
    if stride == 1 {
        return T::widen(&elements[start..][..row.len()], row);
    }
    for (at, x) in row.iter_mut().enumerate() {
        T::widen(&elements[start + at * stride..][..1], std::slice::from_mut(x));
    }
}

impl<'a> Alibi<'a> {
    fn of(view: &View<'a>) -> Result<Self> {
        let strides = match *view.strides() {
            [batch, head] => [batch, head],
            [head] => [0, head],
            _ => [0; 2],
        };
        Ok(Self { slopes: view.as_slice()?, strides })
    }
}

/// What is added to the pairs of a panel.
#[derive(Default)]
pub(crate) struct PanelTerms {
    row: Vec<f32>,
    lanes: Buffer,
}

impl PanelTerms {
    /// With queries as lanes: a row for each key.
    pub(crate) fn of_rows(
        &mut self,
        terms: Option<&Terms<'_>>,
        task: &QueryRows,
        rows: Range<usize>,
        keys: Range<usize>,
    ) -> Option<&[Lanes]> {
        let terms = terms?;
        self.lanes.reserve(keys.len() * LANES);
        self.row.resize(keys.len(), 0.0);
        let lanes = &mut self.lanes.panels_mut()[..keys.len()];
        for (lane, row) in rows.take(LANES).enumerate() {
            terms.load(&task.sequence, task.at(row), keys.clone(), &mut self.row);
            lanes.iter_mut().zip(&self.row).for_each(|(lanes, term)| lanes[lane] = *term);
        }
        Some(lanes)
    }

    /// With keys as lanes: a row for each query.
    pub(crate) fn of_keys(
        &mut self,
        terms: Option<&Terms<'_>>,
        sequence: &Sequence,
        head: usize,
        queries: Range<usize>,
        keys: Range<usize>,
    ) -> Option<&[Lanes]> {
        let terms = terms?;
        self.lanes.reserve(queries.len() * LANES);
        let lanes = &mut self.lanes.panels_mut()[..queries.len()];
        for (query, lanes) in queries.zip(&mut *lanes) {
            terms.load(sequence, [head, query], keys.clone(), &mut lanes[..keys.len()]);
        }
        Some(lanes)
    }
}

#[cfg(test)]
#[path = "terms_tests.rs"]
mod tests;
