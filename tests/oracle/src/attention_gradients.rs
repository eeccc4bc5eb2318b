//! Gradients of attention, query by query: every query adds to `dq`, to the rows of `dk` and `dv`
//! that it attends, and to the gradient of the sink. Attended pairs only are touched.
//!
//! With p the probabilities, the gradient of a score is `p · (d_o · v - d_o · o)`; the cap
//! multiplies it by its slope `1 - tanh²`.

use crate::attention_row::{dot_f32, dot_f64};
use crate::elements::{Element, round};
use crate::rounding::TRUNCATION;
use crate::scores::{Added, Scores};
use blockflash_sys::{DType, HeadDims};

/// A probability up to this may become 0: `e^-87`, where the result of an exponential in f32 is
/// about to leave the normal numbers.
const FLUSHED: f64 = 1.7e-38;

/// A query, what the forward pass made of it, and the gradient of its output. Output and
/// log-sum-exp are taken as they are: their own errors are those of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// The query, `[head_dim of q]`.
    pub q: &'a [f32],
    /// The output, as the forward pass rounded it.
    pub o: &'a [f32],
    /// The log-sum-exp, as the forward pass rounded it.
    pub lse: f32,
    /// The gradient of the output.
    pub d_o: &'a [f32],
}

/// A key that a query attends.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// The key and the value.
    pub kv: [&'a [f32]; 2],
    /// What is added to the score.
    pub added: Added,
    /// The place of the bias in its gradient.
    pub of_bias: Option<usize>,
}

/// One gradient while it is summed up, exactly and plainly: `[rows, width]`.
#[derive(Clone, Debug)]
pub struct GradientSums {
    width: usize,
    sums: Vec<Sum>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    exact: f64,
    squares: f64,
    /// Squares of the terms that cancel in the factors.
    spread: f64,
    plain: f32,
}

/// A number by which a row is multiplied before it is added.
#[derive(Clone, Copy, Debug)]
struct Factor {
    exact: f64,
    /// Size of the terms that cancel in it.
    spread: f64,
    plain: f32,
}

impl GradientSums {
    /// Zeros.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { width, sums: vec![Sum::default(); rows * width] }
    }

    fn add(&mut self, row: usize, factor: Factor, values: &[f32]) {
        let sums = &mut self.sums[row * self.width..][..self.width];
        for (sum, &value) in sums.iter_mut().zip(values) {
            let exact = factor.exact * f64::from(value);
            sum.exact += exact;
            sum.squares += exact * exact;
            sum.spread += (factor.spread * f64::from(value)).powi(2);
            sum.plain += factor.plain * value;
        }
    }

    /// Adds other terms of the same gradient.
    pub fn merge(&mut self, other: &Self) {
        for (sum, other) in self.sums.iter_mut().zip(&other.sums) {
            sum.exact += other.exact;
            sum.squares += other.squares;
            sum.spread += other.spread;
            sum.plain += other.plain;
        }
    }

    /// The gradient in this type: the sums times `scale`.
    pub fn elements(&self, dtype: DType, scale: f32) -> impl Iterator<Item = Element> {
        self.sums.iter().map(move |sum| {
            let factor = f64::from(scale);
            let (exact, magnitude) = (factor * sum.exact, factor * sum.squares.sqrt());
            // Any term may come first and outweigh the others: partial sums may be as large as the
            // result all along. What cancels in the factors is rounded there.
            let partial = exact.abs().max(magnitude).max(factor * sum.spread.sqrt());
            let plain = f64::from(round(dtype, sum.plain * scale));
            Element { exact, plain, magnitude, partial }
        })
    }
}

/// The gradients of a head of keys and of the query heads that share it. `dq`, `dk` and `dv` are
/// `[rows, their head_dim]`; those of q and k are still to be multiplied by the scale of the
/// scores.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// Gradient of q.
    pub dq: GradientSums,
    /// Gradient of k.
    pub dk: GradientSums,
    /// Gradient of v.
    pub dv: GradientSums,
    /// Gradient of the sinks, `[query heads, 1]`.
    pub d_sink: GradientSums,
    /// Gradient of the bias, `[elements, 1]`.
    pub dbias: GradientSums,
}

impl AttentionGradients {
    /// Zeros for this many queries of all heads, keys, and query heads.
    pub fn new([queries, keys, heads]: [usize; 3], HeadDims { qk, v }: HeadDims) -> Self {
        Self {
            dq: GradientSums::new(queries, qk),
            dk: GradientSums::new(keys, qk),
            dv: GradientSums::new(keys, v),
            d_sink: GradientSums::new(heads, 1),
            dbias: GradientSums::new(0, 1),
        }
    }

    /// The same with zeros for a bias of this many elements.
    pub fn with_bias(self, elements: usize) -> Self {
        Self { dbias: GradientSums::new(elements, 1), ..self }
    }

    /// Adds what a query contributes that attends to some keys, which `pair` gives by their
    /// positions; `row_q` and `head` are the places of the query in `dq` and in `d_sink`. Tensors
    /// are of type `dtype`.
    pub fn add<'a>(
        &mut self,
        dtype: DType,
        scores: Scores,
        query: Query<'_>,
        [row_q, head]: [usize; 2],
        keys: &[usize],
        pair: impl Fn(usize) -> Pair<'a>,
    ) {
        let Query { q, o, lse, d_o } = query;
        if keys.is_empty() || lse == f32::NEG_INFINITY {
            return;
        }
        let lse_exact = f64::from(lse);
        let (delta, delta_plain) = (dot_f64(d_o, o), dot_f32(d_o, o));
        let delta_spread = norm_of_products(d_o, o).max(delta.abs());
        for &at in keys {
            let Pair { kv: [key, value], added, of_bias } = pair(at);
            let [score, slope] = scores.exact(dot_f64(q, key) * f64::from(scores.scale), added);
            let (p, dp) = ((score - lse_exact).exp(), dot_f64(d_o, value));
            let spread = norm_of_products(d_o, value).max(dp.abs()).max(delta_spread);

            let [score, slope_plain] = scores.plain(dot_f32(q, key) * scores.scale, added);
            let p_plain = (score - lse).exp();
            let capped_plain = p_plain * (dot_f32(d_o, value) - delta_plain);
            let ds_plain = capped_plain * slope_plain;

            let plain = round(dtype, p_plain);
            let p_factor = Factor { exact: p, spread: FLUSHED / TRUNCATION, plain };
            let exact = p * (dp - delta) * slope;
            let ds_factor =
                Factor { exact, spread: spread_of(p) * spread, plain: round(dtype, ds_plain) };
            self.dv.add(at, p_factor, d_o);
            self.dk.add(at, ds_factor, q);
            self.dq.add(row_q, ds_factor, key);
            if let Some(of_bias) = of_bias {
                let factor = Factor { exact: p * (dp - delta), plain: capped_plain, ..ds_factor };
                self.dbias.add(of_bias, factor, &[1.0]);
            }
        }
        if let Some(sink) = scores.sink() {
            let (p, p_plain) = ((f64::from(sink) - lse_exact).exp(), (sink - lse).exp());
            let plain = -p_plain * delta_plain;
            let factor = Factor { exact: -p * delta, spread: spread_of(p) * delta_spread, plain };
            self.d_sink.add(head, factor, &[1.0]);
        }
    }
}

/// The size of a probability to which the errors of a gradient of a score are relative, such that
/// [`TRUNCATION`] of it covers the loss of the whole.
fn spread_of(p: f64) -> f64 {
    p.max(FLUSHED / TRUNCATION)
}

fn norm_of_products(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) * f64::from(b)).powi(2)).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention_row::attention_row;

    const D: usize = 3;

    /// Multiples of 1/64, which f32 sums exactly after a step.
    fn grid(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| (((i * 37 + seed * 91 + i * i * 5) % 193) as f32 - 96.0) / 64.0)
            .collect()
    }

    /// Two query heads that share three keys; queries attend different ones.
    struct Small {
        tensors: [Vec<f32>; 4],
        sinks: Vec<f32>,
        /// Of the 4 queries and 3 keys; one element serves two heads.
        bias: Vec<f32>,
        slopes: [f32; 2],
        scores: Scores,
    }

    const ATTENDED: [&[usize]; 4] = [&[0, 1, 2], &[1], &[0, 2], &[]];

    impl Small {
        fn new(cap: Option<f32>, sink: bool, bias: bool) -> Self {
            let tensors = [grid(4 * D, 1), grid(3 * D, 2), grid(3 * D, 3), grid(4 * D, 4)];
            let sinks = if sink { vec![0.25, -0.5] } else { vec![f32::NEG_INFINITY; 2] };
            let (bias, slopes) =
                if bias { (grid(6, 5), [0.5, 0.25]) } else { (vec![0.0; 6], [0.0; 2]) };
            Self { tensors, sinks, bias, slopes, scores: Scores::new(0.75, cap) }
        }

        fn of_query(&self, at: usize) -> (Scores, &[f32], &[f32], [usize; 2]) {
            let scores = Scores { sink: Some(self.sinks[at % 2]), ..self.scores };
            let row = at * D..(at + 1) * D;
            (scores, &self.tensors[0][row.clone()], &self.tensors[3][row], [at, at % 2])
        }

        fn key(&self, at: usize) -> [&[f32]; 2] {
            [&self.tensors[1][at * D..][..D], &self.tensors[2][at * D..][..D]]
        }

        fn pair(&self, query: usize, key: usize) -> Pair<'_> {
            let (row, head) = (query / 2, query % 2);
            let distance = Added::distance(row, key, [2, 3]);
            let at = row * 3 + key;
            let added = Added { bias: self.bias[at], slope: self.slopes[head], distance };
            Pair { kv: self.key(key), added, of_bias: Some(at) }
        }

        /// The sum of `o · d_o`.
        fn value(&self) -> f64 {
            let of_query = |at: usize| {
                let (scores, q, d_o, _) = self.of_query(at);
                let (keys, added) = (ATTENDED[at], |key| self.pair(at, key).added);
                let row = attention_row(DType::F32, scores, q, D, keys, |key| self.key(key), added);
                row.o.iter().zip(d_o).map(|(o, &d_o)| o.exact * f64::from(d_o)).sum::<f64>()
            };
            (0..4).map(of_query).sum()
        }

        fn gradients(&self) -> AttentionGradients {
            let mut gradients =
                AttentionGradients::new([4, 3, 2], HeadDims::all(D)).with_bias(self.bias.len());
            for (at, keys) in ATTENDED.into_iter().enumerate() {
                let (scores, q, d_o, place) = self.of_query(at);
                let pair = |key| self.pair(at, key);
                let row = attention_row(
                    DType::F32,
                    scores,
                    q,
                    D,
                    keys,
                    |key| pair(key).kv,
                    |key| pair(key).added,
                );
                let o: Vec<f32> = row.o.iter().map(|o| o.exact as f32).collect();
                let query = Query { q, o: &o, lse: row.lse.exact as f32, d_o };
                gradients.add(DType::F32, scores, query, place, keys, pair);
            }
            gradients
        }
    }

    #[test]
    fn finite_differences() {
        const STEP: f32 = 1.0 / 1024.0;
        for (cap, sink, bias) in [
            (None, false, false),
            (Some(1.5), false, false),
            (None, true, false),
            (Some(0.5), true, false),
            (None, false, true),
            (Some(1.5), true, true),
        ] {
            let small = Small::new(cap, sink, bias);
            let gradients = small.gradients();
            let scale = small.scores.scale;
            let agree = |which: &str,
                         sums: &GradientSums,
                         scale: f32,
                         memory: fn(&mut Small) -> &mut Vec<f32>| {
                for (at, element) in sums.elements(DType::F32, scale).enumerate() {
                    let [up, down] = [STEP, -STEP].map(|step| {
                        let mut moved = Small::new(cap, sink, bias);
                        memory(&mut moved)[at] += step;
                        moved.value()
                    });
                    let difference = (up - down) / f64::from(2.0 * STEP);
                    let what = format!("{which}[{at}] {cap:?} {sink} {bias}");
                    assert!(
                        (element.exact - difference).abs() < 3e-6,
                        "{what}: {element:?} {difference}"
                    );
                    assert!((element.exact - element.plain).abs() < 1e-6, "{what}: {element:?}");
                }
            };
            agree("dq", &gradients.dq, scale, |small| &mut small.tensors[0]);
            agree("dk", &gradients.dk, scale, |small| &mut small.tensors[1]);
            agree("dv", &gradients.dv, 1.0, |small| &mut small.tensors[2]);
            agree("dbias", &gradients.dbias, 1.0, |small| &mut small.bias);
            if sink {
                agree("d_sink", &gradients.d_sink, 1.0, |small| &mut small.sinks);
            }
        }
    }

    #[test]
    fn a_single_key_has_no_gradient_of_its_score() {
        let small = Small::new(None, false, false);
        let dq: Vec<Element> = small.gradients().dq.elements(DType::F32, 1.0).collect();
        assert!(dq[D..2 * D].iter().all(|dq| dq.exact.abs() < 1e-15 && dq.partial > 0.01));
        assert!(dq[3 * D..].iter().all(|dq| *dq == Element::default()), "it attends nothing");
    }
}
