//! From scores and `d_o · v` to probabilities and gradients of scores. They are 0 where a pair is
//! masked, whatever its products are.

use crate::attention::ScoresProblem;
use crate::attention::cpu::visible::mask_by_words;
use crate::panels::{LANES, Lanes};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// A query.
#[derive(Clone)]
pub(super) struct Query {
    /// Log-sum-exp and the sum of `o · d_o`.
    pub(super) statistics: [f32; 2],
    /// The keys that it sees.
    pub(super) visible: Range<usize>,
}

/// Pairs of a panel of keys, a row for each query.
pub(super) struct OfKeys<'a> {
    pub(super) p: &'a mut [Lanes],
    pub(super) ds: &'a mut [Lanes],
    pub(super) queries: &'a [Query],
    /// The first key of the panel.
    pub(super) first: usize,
    pub(super) scores: &'a ScoresProblem,
    /// What is added to the scores.
    pub(super) terms: Option<&'a [Lanes]>,
    /// Whether to differentiate by capped scores.
    pub(super) capped: bool,
    /// A word for each query, with the bits of the keys that it sees, if some blocks are partial.
    pub(super) words: Option<&'a [u32]>,
}

impl WithSimd for OfKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { p, ds, queries, first, scores, terms, capped, words } = self;
        for (at, ((p, ds), query)) in p.iter_mut().zip(&mut *ds).zip(queries).enumerate() {
            let statistics = query.statistics.map(|x| [x; LANES]);
            let terms = terms.map(|terms| &terms[at]);
            scores.gradients([p, ds], terms, statistics.each_ref(), capped);
            let lane = |key: usize| key.clamp(first, first + LANES) - first;
            let (start, end) = (lane(query.visible.start), lane(query.visible.end));
            if start > 0 || end < LANES {
                for pairs in [p, ds] {
                    pairs[..start].fill(0.0);
                    pairs[end..].fill(0.0);
                }
            }
        }
        if let Some(words) = words {
            mask_by_words(words, p, 0.0);
            mask_by_words(words, ds, 0.0);
        }
    }
}
