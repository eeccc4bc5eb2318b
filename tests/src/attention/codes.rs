//! Queries, keys and values in e4m3: their scales, and what only such cases hold.

use super::{AttentionCase, Lengths, Sequence};
use crate::number::rng;
use blockflash_oracle::{CodeRow, Precision};
use blockflash_sys::DType;
use rand::Rng;

/// That q, k and v of a case are codes in e4m3. The type of the case is that of the output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    /// Scales of q, of k and of v.
    pub scales: [OperandScale; 3],
    /// What the scales are: which of them is replaced (0 to 2), and by what.
    pub hostile: Option<(usize, f32)>,
    /// Keys of a tile, whose maximum probabilities are relative to in the plain computation.
    pub tile: usize,
    /// What is added to the content of a case.
    pub more: MoreContent,
}

/// What has a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandScale {
    /// Nothing: none is given.
    Absent,
    /// The tensor.
    Whole,
    /// Each sequence.
    Sequences,
    /// Each head of the tensor.
    Heads,
    /// Each sequence and head of the tensor.
    Both,
    /// Each sequence and head of the keys.
    KeyHeads,
}

impl OperandScale {
    /// Every one of them.
    pub const ALL: [Self; 6] =
        [Self::Absent, Self::Whole, Self::Sequences, Self::Heads, Self::Both, Self::KeyHeads];
}

/// What is changed in a case of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoreContent {
    /// Nothing.
    Nothing,
    /// Values have a mean of 4: sums of equal signs, of which a tensor core loses most.
    MeanInValues,
    /// One of 64 keys of each sequence outweighs the others by far, and has small values.
    Sinks,
    /// Queries point away from keys: all scores are far below 0.
    Negative,
    /// Queries and keys are ±448.
    Saturating,
}

impl MoreContent {
    /// Every one of them.
    pub const ALL: [Self; 5] =
        [Self::Nothing, Self::MeanInValues, Self::Sinks, Self::Negative, Self::Saturating];
}

impl Codes {
    /// Without scales, by tiles of this many keys.
    pub const fn plain(tile: usize) -> Self {
        let scales = [OperandScale::Absent; 3];
        Self { scales, hostile: None, tile, more: MoreContent::Nothing }
    }

    /// With other scales and contents for each seed. Now and then a scale is hostile.
    pub fn drawn(tile: usize, seed: u64) -> Self {
        let mut random = rng(seed ^ 0xC0DE);
        let mut of = |count: usize| random.random_range(0..count);
        let scales = [0; 3].map(|_: usize| OperandScale::ALL[of(6)]);
        let values = [f32::NAN, 0.0, -1.5, f32::INFINITY, f32::NEG_INFINITY, -0.25];
        let hostile = (of(6) == 0).then(|| (of(3), values[of(6)]));
        let more = if of(2) == 0 { MoreContent::Nothing } else { MoreContent::ALL[of(5)] };
        Self { scales, hostile, tile, more }
    }
}

impl AttentionCase {
    /// Type of q, k and v.
    pub fn input_type(&self) -> DType {
        if self.codes.is_some() { DType::E4M3 } else { self.dtype }
    }

    /// The same in codes, with an output of its type, and with twice as wide gaps between their
    /// rows, which keep these at multiples of as many bytes.
    pub fn coded(mut self, codes: Codes) -> Self {
        for placement in &mut self.placements[..3] {
            if let Some((before, after)) = placement.padding.last_mut() {
                (*before, *after) = (2 * *before, 2 * *after);
            }
        }
        Self { codes: Some(codes), ..self }
    }

    /// Shape and values of the scales of q, k or v.
    pub fn scales(&self, which: usize) -> Option<(Vec<usize>, Vec<f32>)> {
        let codes = self.codes?;
        let batch = match &self.lengths {
            Lengths::Dense { batch, .. } => *batch,
            Lengths::Packed { lengths, .. } => lengths.len(),
        };
        let heads = if which == 0 { self.heads_q } else { self.heads_kv };
        let shape = match codes.scales[which] {
            OperandScale::Absent => return None,
            OperandScale::Whole => vec![1],
            OperandScale::Sequences => vec![batch, 1],
            OperandScale::Heads => vec![1, heads],
            OperandScale::Both => vec![batch, heads],
            OperandScale::KeyHeads => vec![batch, self.heads_kv],
        };
        let mut random = rng(self.seed ^ 0x5CA1E ^ which as u64);
        let count: usize = shape.iter().product();
        // Of 8 significant bits, so that products of scales and codes are exact in f32.
        let mut values: Vec<f32> =
            (0..count).map(|_| random.random_range(64..256) as f32 / 128.0).collect();
        if let Some((hostile, value)) = codes.hostile
            && hostile == which
            && let Some(last) = values.last_mut()
        {
            *last = value;
        }
        Some((shape, values))
    }

    /// The scale of q, k or v of a sequence and a head of q.
    fn scale_of(&self, which: usize, b: usize, head: usize) -> f32 {
        let Some((shape, values)) = self.scales(which) else { return 1.0 };
        let group = self.heads_q / self.heads_kv;
        match *shape {
            [batch, heads] => {
                let head = if heads == self.heads_q && which == 0 { head } else { head / group };
                let at = |at: usize, extent: usize| if extent == 1 { 0 } else { at };
                values[at(b, batch) * heads + at(head, heads)]
            }
            _ => values[0],
        }
    }

    /// How the oracle computes a row of a sequence and a head of q.
    pub(super) fn precision(&self, b: usize, head: usize) -> Precision {
        let codes = self.codes.map(|codes| CodeRow {
            of_scores: self.scale_of(0, b, head) * self.scale_of(1, b, head),
            of_values: self.scale_of(2, b, head),
            tile: codes.tile,
        });
        Precision { output: self.dtype, codes }
    }

    /// Whether a scale makes numbers that are not finite.
    pub(super) fn has_infinite_scales(&self) -> bool {
        self.codes.is_some_and(|codes| codes.hostile.is_some_and(|(_, value)| !value.is_finite()))
    }

    /// Changes the numbers of a sequence as the content of its codes says.
    pub(super) fn add_content(&self, s: &Sequence, [q, k, v]: [&mut [f32]; 3]) {
        let Some(Codes { more, .. }) = self.codes else { return };
        let d = self.head_dim;
        let queries = s.q_start * self.heads_q * d..(s.q_start + s.q_len) * self.heads_q * d;
        let keys = s.kv_start * self.heads_kv * d..(s.kv_start + s.kv_len) * self.heads_kv * d;
        let values = keys.clone();
        match more {
            MoreContent::Nothing => {}
            MoreContent::MeanInValues => v[keys].iter_mut().for_each(|x| *x += 4.0),
            MoreContent::Sinks => {
                let (width, size) = (self.heads_kv * d, 7.0 / (self.scale() * d as f32));
                q[queries].iter_mut().for_each(|x| *x += 1.0);
                for key in (3..s.kv_len).step_by(64) {
                    let row = (s.kv_start + key) * width..(s.kv_start + key + 1) * width;
                    k[row.clone()].iter_mut().for_each(|x| *x += size);
                    v[row].iter_mut().for_each(|x| *x *= 0.01);
                }
            }
            MoreContent::Negative => {
                let size = (20.0 / (self.scale() * d as f32)).sqrt();
                q[queries].iter_mut().for_each(|x| *x = -size + 0.1 * *x);
                k[keys].iter_mut().for_each(|x| *x = size + 0.1 * *x);
            }
            MoreContent::Saturating => {
                let saturate = |x: &mut f32| *x = 448f32.copysign(*x);
                q[queries].iter_mut().for_each(saturate);
                k[keys].iter_mut().for_each(saturate);
            }
        }
        // The sign of a sum of both signs is not certain, and infinity shows it.
        if let Some((2, scale)) = self.codes.and_then(|codes| codes.hostile)
            && scale.is_infinite()
        {
            v[values].iter_mut().for_each(|x| *x = x.abs() + 0.5);
        }
    }
}
