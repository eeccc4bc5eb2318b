//! The definition of attention, for tests.

use crate::fixtures::values;
use crate::{Attention, Device, Mask, Scores, Stream, View};

/// One call with f32 operands, small enough for a triple loop.
#[derive(Clone)]
pub(super) struct Case {
    pub(super) sizes: [usize; 3],
    pub(super) heads: [usize; 2],
    pub(super) head_dim: usize,
    pub(super) mask: Mask,
    pub(super) softcap: Option<f32>,
    pub(super) sink: Option<Vec<f32>>,
    /// What the reference adds to the score of each pair, `[batch, heads, queries, keys]`.
    pub(super) added: Option<Vec<f32>>,
    /// Which pairs the reference counts, `[batch, heads, queries, keys]`.
    pub(super) seen: Option<Vec<bool>>,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

pub(super) fn case(
    [batch, seqlen_q, seqlen_kv]: [usize; 3],
    heads: [usize; 2],
    head_dim: usize,
    mask: Mask,
) -> Case {
    let rows_q = batch * seqlen_q * heads[0] * head_dim;
    let rows_kv = batch * seqlen_kv * heads[1] * head_dim;
    let [q, k, v] =
        [(rows_q, 1), (rows_kv, 2), (rows_kv, 3)].map(|(count, seed)| values(count, seed));
    Case {
        sizes: [batch, seqlen_q, seqlen_kv],
        heads,
        head_dim,
        mask,
        softcap: None,
        sink: None,
        added: None,
        seen: None,
        q,
        k,
        v,
    }
}

impl Case {
    pub(super) fn attention(&self) -> Attention<'_> {
        let ([batch, seqlen_q, seqlen_kv], [heads_q, heads_kv], d) =
            (self.sizes, self.heads, self.head_dim);
        let kv = [batch, seqlen_kv, heads_kv, d];
        let q = View::from_slice(&self.q, &[batch, seqlen_q, heads_q, d]).unwrap();
        let (k, v) =
            (View::from_slice(&self.k, &kv).unwrap(), View::from_slice(&self.v, &kv).unwrap());
        let sink = self.sink.as_ref().map(|sink| View::from_slice(sink, &[heads_q]).unwrap());
        Attention {
            scores: Scores { mask: self.mask, softcap: self.softcap, sink, ..Scores::default() },
            ..Attention::new(q, k, v)
        }
    }

    pub(super) fn run(&self) -> (Vec<f32>, Vec<f32>) {
        let stream = cpu();
        let output = self.attention().forward(&stream).unwrap();
        (output.o.to_vec(&stream).unwrap(), output.lse.to_vec(&stream).unwrap())
    }

    /// The definition in f64, one query after the other, over the keys it attends and no others.
    pub(super) fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let ([batch, seqlen_q, seqlen_kv], [heads_q, heads_kv], d) =
            (self.sizes, self.heads, self.head_dim);
        let mut o = vec![0f64; self.q.len()];
        let mut lse = vec![f64::NEG_INFINITY; batch * heads_q * seqlen_q];
        for (b, h, i) in (0..batch * heads_q * seqlen_q)
            .map(|at| (at / (heads_q * seqlen_q), at / seqlen_q % heads_q, at % seqlen_q))
        {
            let q_row = ((b * seqlen_q + i) * heads_q + h) * d;
            let kv_row = |j: usize| ((b * seqlen_kv + j) * heads_kv + h / (heads_q / heads_kv)) * d;
            let dot = |j: usize| {
                let (q, k) = (&self.q[q_row..][..d], &self.k[kv_row(j)..][..d]);
                let dot: f64 = q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                let score = dot / (d as f64).sqrt();
                let pair = ((b * heads_q + h) * seqlen_q + i) * seqlen_kv + j;
                let added = self.added.as_ref().map_or(0.0, |added| f64::from(added[pair]));
                let capped = self.softcap.map(f64::from).map(|cap| cap * (score / cap).tanh());
                capped.unwrap_or(score) + added
            };
            let row = ((b * heads_q + h) * seqlen_q + i) * seqlen_kv;
            let seen = |&j: &usize| self.seen.as_ref().is_none_or(|seen| seen[row + j]);
            let keys: Vec<usize> = self.mask.visible(i, seqlen_q, seqlen_kv).filter(seen).collect();
            let scores: Vec<f64> = keys.iter().copied().map(dot).collect();
            let sink = self.sink.as_ref().map(|sink| f64::from(sink[h]));
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 =
                scores.iter().copied().chain(sink).map(|score| (score - max).exp()).sum();
            if max > f64::NEG_INFINITY {
                lse[(b * heads_q + h) * seqlen_q + i] = max + sum.ln();
            }
            for (j, score) in keys.into_iter().zip(scores) {
                let p = (score - max).exp() / sum;
                let v = &self.v[kv_row(j)..][..d];
                o[q_row..][..d].iter_mut().zip(v).for_each(|(o, &v)| *o += p * f64::from(v));
            }
        }
        (o, lse)
    }

    pub(super) fn check(&self) {
        let ((o, lse), (o_reference, lse_reference)) = (self.run(), self.reference());
        assert_close(&o, &o_reference, 3e-6);
        assert_close(&lse, &lse_reference, 3e-6);
    }
}

pub(super) fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

#[track_caller]
pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let same = f64::from(found) == expected || found.is_nan() && expected.is_nan();
        let epsilon = tolerance * (1.0 + expected.abs());
        let close = approx::abs_diff_eq!(f64::from(found), expected, epsilon = epsilon);
        assert!(same || close, "element {at} is {found}, expected {expected}");
    }
}
