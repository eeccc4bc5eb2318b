//! What a case does to scores beyond masks: a bias, ALiBi, and bits of partial blocks.

use super::{AttentionCase, AttentionData, Blocks, Sequence};
use crate::number::{normal, normal_rounded, rng};
use crate::placement::{Placed, Placement};
use blockflash_oracle::Added;
use blockflash_sys::DType;
use rand::Rng;

/// Bias, ALiBi and bits of a case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// A bias. Sequences are equally long.
    pub bias: Option<BiasCase>,
    /// Slopes of ALiBi.
    pub alibi: Option<AlibiCase>,
    /// Two of three visited blocks of the block mask are partial.
    pub partial: bool,
}

/// The bias of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BiasCase {
    /// Its type.
    pub dtype: DType,
    /// Whether one element serves all batch entries, heads, queries, keys.
    pub broadcast: [bool; 4],
    /// What it holds.
    pub content: BiasContent,
    /// Memory layout of the bias and of its gradient.
    pub placement: Placement,
    /// Whether its gradient is f32, whatever its type.
    pub wide_gradient: bool,
}

/// What a bias holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasContent {
    /// N(0,1).
    Normal,
    /// −∞ in a third of the elements, and all along some rows.
    Hiding,
    /// NaN where all pairs that an element serves are masked.
    UnseenNan,
}

/// Slopes of ALiBi: 2^-3, 2^-4, … of the heads, times a number of each batch entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlibiCase {
    /// `[heads_q]`.
    PerHead,
    /// `[batch, heads_q]`.
    PerEntry,
}

impl BiasCase {
    /// An element for each pair, N(0,1) and without gaps.
    pub fn full(dtype: DType) -> Self {
        let (broadcast, content) = ([false; 4], BiasContent::Normal);
        Self { dtype, broadcast, content, placement: Placement::default(), wide_gradient: false }
    }

    /// The type of its gradient.
    pub fn gradient_dtype(&self) -> DType {
        if self.wide_gradient { DType::F32 } else { self.dtype }
    }
}

impl Terms {
    /// Whether nothing is added to scores.
    pub fn is_none(&self) -> bool {
        self.bias.is_none() && self.alibi.is_none()
    }
}

impl AttentionCase {
    /// Batch entries, query heads, and the most queries and keys of a sequence.
    pub fn pairs(&self) -> [usize; 4] {
        let sequences = self.sequences();
        let most = |of: fn(&super::Sequence) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        [sequences.len(), self.heads_q, most(|s| s.q_len), most(|s| s.kv_len)]
    }

    /// The shape of the bias; of none, no shape.
    pub fn bias_shape(&self) -> Vec<usize> {
        let Some(bias) = &self.terms.bias else { return Vec::new() };
        let of = |(&one, extent): (&bool, usize)| if one { 1 } else { extent };
        bias.broadcast.iter().zip(self.pairs()).map(of).collect()
    }

    /// The place of the bias.
    pub(crate) fn bias_placed(&self) -> Option<Placed> {
        Some(self.terms.bias.as_ref()?.placement.place(&self.bias_shape()))
    }

    /// The shape of the slopes.
    pub(crate) fn alibi_shape(&self) -> Option<Vec<usize>> {
        let [batch, heads, ..] = self.pairs();
        Some(match self.terms.alibi? {
            AlibiCase::PerHead => vec![heads],
            AlibiCase::PerEntry => vec![batch, heads],
        })
    }

    /// The element of the bias of a pair: batch entry, query and head, and the key.
    pub fn bias_element(&self, [entry, query, head]: [usize; 3], key: usize) -> Option<usize> {
        let bias = self.terms.bias.as_ref()?;
        let at = [entry, head, query, key];
        let axes = at.iter().zip(self.bias_shape()).zip(bias.broadcast);
        Some(axes.fold(0, |sum, ((&at, extent), one)| sum * extent + if one { 0 } else { at }))
    }

    /// What is added to the score of a pair of a sequence, for the oracle.
    pub fn added(
        &self,
        data: &AttentionData,
        sequence: &Sequence,
        at: [usize; 3],
        key: usize,
    ) -> Added {
        let [entry, query, head] = at;
        let slope = |alibi| match alibi {
            AlibiCase::PerHead => data.alibi[head],
            AlibiCase::PerEntry => data.alibi[entry * self.heads_q + head],
        };
        Added {
            bias: self.bias_element(at, key).map_or(0.0, |element| data.bias[element]),
            slope: self.terms.alibi.map_or(0.0, slope),
            distance: Added::distance(query, key, [sequence.q_len, sequence.kv_len]),
        }
    }

    /// The numbers of the bias.
    pub(super) fn bias_values(&self) -> Vec<f32> {
        let (Some(bias), shape) = (&self.terms.bias, self.bias_shape()) else { return Vec::new() };
        let count = shape.iter().product();
        let mut values = normal_rounded(self.seed ^ 0xB1A5, count, bias.dtype);
        let mut random = rng(self.seed ^ 0xB1A6);
        match bias.content {
            BiasContent::Normal => {}
            BiasContent::Hiding => {
                for row in values.chunks_mut(shape[3].max(1)) {
                    let all = random.random_range(0..5) == 0;
                    let hides = |_: &f32| all || random.random_range(0..3) == 0;
                    let hidden: Vec<bool> = row.iter().map(hides).collect();
                    let hidden = row.iter_mut().zip(hidden).filter(|(_, hidden)| *hidden);
                    hidden.for_each(|(x, _)| *x = f32::NEG_INFINITY);
                }
            }
            BiasContent::UnseenNan => {
                let (blocks, sequences) = (Blocks::of(self), self.sequences());
                let mut seen = vec![false; count];
                for (entry, sequence) in sequences.iter().enumerate() {
                    for (query, head) in
                        (0..sequence.q_len).flat_map(|i| (0..self.heads_q).map(move |h| (i, h)))
                    {
                        let at = [entry, query, head];
                        for key in self.attended_keys(blocks.as_ref(), at, sequence) {
                            self.bias_element(at, key).into_iter().for_each(|at| seen[at] = true);
                        }
                    }
                }
                let unseen = values.iter_mut().zip(seen).filter(|(_, seen)| !seen);
                unseen.for_each(|(x, _)| *x = f32::NAN);
            }
        }
        values
    }

    /// The slopes.
    pub(super) fn alibi_values(&self) -> Vec<f32> {
        let Some(shape) = self.alibi_shape() else { return Vec::new() };
        let count: usize = shape.iter().product();
        let heads = self.heads_q.max(1);
        let of_entries = normal(self.seed ^ 0xA11B, count.div_ceil(heads));
        let slope = |at: usize| {
            let factor = if shape.len() == 1 { 1.0 } else { 1.0 + 0.25 * of_entries[at / heads] };
            factor * 2f32.powi(-(3 + (at % heads % 8) as i32))
        };
        (0..count).map(slope).collect()
    }
}
