//! The numbers of a case, and its references.

use super::{SlopesOf, TermCase};
use crate::number::{normal, normal_rounded, rng, round};
use crate::tolerance::Reference;
use blockflash_ops::DType;
use blockflash_oracle::{
    Added, AttentionGradients, Element, PRODUCTS, Pair, Query, Rounding, Scores, attention_row,
};
use blockflash_sys::HeadDims;
use rand::Rng;

/// The numbers of a case, and what they give.
pub struct TermData {
    pub(super) qkv: [Vec<f32>; 3],
    pub(super) d_o: Vec<f32>,
    pub(super) sink: Vec<f32>,
    /// In its shape.
    pub(super) bias: Vec<f32>,
    pub(super) slopes: Vec<f32>,
    /// Of the forward pass, rounded.
    pub(super) o: Vec<f32>,
    pub(super) lse: Vec<f32>,
    pub(super) forward: [Reference; 2],
    pub(super) gradients: [Reference; 4],
    pub(super) exponent: f64,
}

impl TermData {
    /// Numbers and references.
    pub fn generate(case: &TermCase) -> Self {
        let TermCase { dtype, head_dim: d, batch, heads: [heads, heads_kv], seqlens, .. } = *case;
        let (rows, keys) = (batch * seqlens[0], batch * seqlens[1]);
        let q = normal_rounded(case.seed, rows * heads * d, dtype);
        let k = normal_rounded(case.seed + 1, keys * heads_kv * d, dtype);
        let v = normal_rounded(case.seed + 2, keys * heads_kv * d, dtype);
        let shape = case.bias_shape();
        let bias = match case.bias {
            Some(of) => normal_rounded(case.seed + 3, shape.iter().product(), of.dtype),
            None => vec![0.0; shape.iter().product()],
        };
        let mut random = rng(case.seed + 4);
        let slopes = (0..batch * heads).map(|_| random.random_range(0.0..0.1)).collect();
        let mut data = Self {
            qkv: [q, k, v],
            d_o: normal_rounded(case.seed + 5, rows * heads * d, dtype),
            sink: normal(case.seed + 6, heads),
            bias,
            slopes,
            o: vec![0.0; rows * heads * d],
            lse: vec![0.0; batch * heads * seqlens[0]],
            forward: Default::default(),
            gradients: Default::default(),
            exponent: 0.0,
        };
        if case.poisoned {
            data.poison(case);
        }
        data.compute(case);
        data
    }

    /// NaN in the elements of the bias that no pair sees, and in keys and values.
    fn poison(&mut self, case: &TermCase) {
        let shape = case.bias_shape();
        let mut seen = vec![false; self.bias.len()];
        let [heads_kv, keys] = [case.heads[1], case.seqlens[1]];
        let mut seen_keys = vec![false; case.batch * keys * heads_kv];
        for at in 0..case.batch * case.heads[0] * case.seqlens[0] {
            let [b, h, i] = [
                at / case.seqlens[0] / case.heads[0],
                at / case.seqlens[0] % case.heads[0],
                at % case.seqlens[0],
            ];
            for key in case.attended(h, i) {
                seen[index(shape, [b, h, i, key])] = true;
                seen_keys[(b * keys + key) * heads_kv + h / (case.heads[0] / heads_kv)] = true;
            }
        }
        for (element, seen) in self.bias.iter_mut().zip(seen) {
            if !seen && case.bias.is_some() {
                *element = f32::NAN;
            }
        }
        let [_, k, v] = &mut self.qkv;
        let rows = k.chunks_mut(case.head_dim).zip(v.chunks_mut(case.head_dim));
        for ((at, seen), (k, v)) in seen_keys.into_iter().enumerate().zip(rows) {
            match (case.nonfinite, seen) {
                (true, false) => (k.fill(f32::NAN), v.fill(f32::INFINITY)).1,
                (true, true) if at % 29 == 7 => v[3] = f32::NAN,
                _ => {}
            }
        }
    }

    fn added(&self, case: &TermCase, [b, h, i, key]: [usize; 4]) -> Added {
        let slope = match case.alibi {
            None => 0.0,
            Some(SlopesOf::Heads) => self.slopes[h],
            Some(SlopesOf::Entries) => self.slopes[b * case.heads[0] + h],
        };
        let bias = self.bias[index(case.bias_shape(), [b, h, i, key])];
        Added { bias, slope, distance: Added::distance(i, key, case.seqlens) }
    }

    fn compute(&mut self, case: &TermCase) {
        let TermCase { dtype, head_dim: d, batch, heads: [heads, heads_kv], .. } = *case;
        let [seqlen_q, seqlen_kv] = case.seqlens;
        let group = heads / heads_kv;
        let mut o = Reference { width: d, ..Reference::default() };
        let mut logs = vec![Element::default(); batch * heads * seqlen_q];
        let of_bias = case.bias_shape();
        let mut gradients: Vec<AttentionGradients> = (0..batch * heads_kv)
            .map(|_| {
                AttentionGradients::new([seqlen_q * group, seqlen_kv, group], HeadDims::all(d))
                    .with_bias(of_bias.iter().product())
            })
            .collect();
        let [mut rounded_o, mut rounded_lse] =
            [&mut self.o, &mut self.lse].map(std::mem::take::<Vec<f32>>);
        let mut largest: f64 = 1.0;
        for b in 0..batch {
            for i in 0..seqlen_q {
                for h in 0..heads {
                    let attended = case.attended(h, i);
                    let mut scores = Scores::new(case.scale(), case.softcap);
                    scores.sink = case.sink.then_some(self.sink[h]);
                    let at = ((b * seqlen_q + i) * heads + h) * d;
                    let kv = |key: usize| {
                        let at = ((b * seqlen_kv + key) * heads_kv + h / group) * d;
                        [&self.qkv[1][at..][..d], &self.qkv[2][at..][..d]]
                    };
                    let query = &self.qkv[0][at..][..d];
                    let added = |key| self.added(case, [b, h, i, key]);
                    let row = attention_row(dtype, scores, query, d, &attended, kv, added);
                    for (to, element) in rounded_o[at..][..d].iter_mut().zip(&row.o) {
                        *to = round(dtype, element.exact as f32);
                    }
                    let of_lse = (b * heads + h) * seqlen_q + i;
                    rounded_lse[of_lse] = row.lse.exact as f32;
                    if row.lse.magnitude.is_finite() {
                        largest = largest.max(row.lse.magnitude);
                    }
                    o.extend(row.o);
                    logs[of_lse] = row.lse;
                    let query = Query {
                        q: query,
                        o: &rounded_o[at..][..d],
                        lse: rounded_lse[of_lse],
                        d_o: &self.d_o[at..][..d],
                    };
                    let place = [i * group + h % group, h % group];
                    let pair = |key| Pair {
                        kv: kv(key),
                        added: added(key),
                        of_bias: Some(index(of_bias, [b, h, i, key])),
                    };
                    let sums = &mut gradients[b * heads_kv + h / group];
                    sums.add(dtype, scores, query, place, &attended, pair);
                }
            }
        }
        let mut lse = Reference { width: logs.len(), ..Reference::default() };
        lse.extend(logs);
        let steps = 8 + d.div_ceil(PRODUCTS);
        self.exponent = steps as f64 * 2f64.powi(-24) * largest;
        (self.o, self.lse) = (rounded_o, rounded_lse);
        self.forward = [o, lse];
        self.gradients = references(case, &gradients);
    }

    /// The rounding of the output, and of gradients that sum this many terms.
    pub(super) fn rounding(&self, terms: usize, case: &TermCase) -> Rounding {
        let rounding = Rounding::of_products(terms, 1, case.dtype);
        let additions = rounding.additions + case.head_dim.div_ceil(PRODUCTS);
        let exponent = self.exponent;
        Rounding { factor: Some(case.dtype), exponent, additions, ..rounding }
    }
}

/// In the order in which results are: the oracle's references count queries in the order of heads,
/// sequences and heads of a group, so they are put in place here.
fn references(case: &TermCase, gradients: &[AttentionGradients]) -> [Reference; 4] {
    let TermCase { dtype, head_dim: d, batch, heads: [heads, heads_kv], .. } = *case;
    let [seqlen_q, seqlen_kv] = case.seqlens;
    let group = heads / heads_kv;
    let mut all = [seqlen_q * heads, seqlen_kv * heads_kv, seqlen_kv * heads_kv]
        .map(|rows| vec![Element::default(); batch * rows * d]);
    let bias = case.bias.map_or(DType::F32, |bias| bias.dtype);
    let mut dbias = AttentionGradients::new([0; 3], HeadDims::all(d))
        .with_bias(case.bias_shape().iter().product())
        .dbias;
    for (at, sums) in gradients.iter().enumerate() {
        let (b, head) = (at / heads_kv, at % heads_kv);
        let mut place = |which: usize, rows: usize, width: usize, elements: Vec<_>| {
            for (e, element) in elements.into_iter().enumerate() {
                let row = b * rows + e / width;
                all[which][(row * heads_kv + head) * width + e % width] = element;
            }
        };
        place(0, seqlen_q, group * d, sums.dq.elements(dtype, case.scale()).collect());
        place(1, seqlen_kv, d, sums.dk.elements(dtype, case.scale()).collect());
        place(2, seqlen_kv, d, sums.dv.elements(dtype, 1.0).collect());
        dbias.merge(&sums.dbias);
    }
    let reference = |width, elements: Vec<_>| {
        let mut reference = Reference { width, ..Reference::default() };
        reference.extend(elements);
        reference
    };
    let [dq, dk, dv] = all.map(|elements| reference(d, elements));
    let dbias: Vec<_> = dbias.elements(bias, 1.0).collect();
    [dq, dk, dv, reference(dbias.len().max(1), dbias)]
}

fn index(shape: [usize; 4], at: [usize; 4]) -> usize {
    (0..4).fold(0, |sum, dim| sum * shape[dim] + if shape[dim] == 1 { 0 } else { at[dim] })
}
