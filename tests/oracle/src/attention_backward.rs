use crate::attention_gradients::{AttentionGradients, GradientSums, Pair, Query};
use crate::blocks::Sequence;
use crate::comparison::{BUDGET, Comparison, Mismatch, Steps, ensure, rounding, sample};
use crate::elements::Elements;
use crate::rounding::{PRODUCTS, TRUNCATION};
use crate::scores::Added;
use crate::sequences::{AttentionCase, heads_of, rows_of, sequences};
use blockflash_sys::HeadDims;
use rayon::prelude::*;

/// Heads of keys that a sample takes.
const SAMPLED_HEADS: usize = 8;
/// Multiply-adds of a pair for each element of a row: products, and sums in f64 and f32.
const PAIR: usize = 8;

/// The backward pass of attention. What the forward pass made is taken as it is.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackwardCase<'a> {
    /// The forward pass.
    pub attention: AttentionCase<'a>,
    /// The output of the forward pass, in the shape of q with the `head_dim` of v.
    pub o: &'a dyn Elements,
    /// Its log-sum-exp, f32 `[batch, num_heads_q, seqlen_q]`, packed `[num_heads_q, rows]`.
    pub lse: &'a dyn Elements,
    /// The gradient of the output, in its shape.
    pub d_o: &'a dyn Elements,
}

/// Compares the gradients of q, k and v, in their shapes, with the reference. `progress` is told
/// the fraction that is done.
///
/// # Errors
/// If shapes do not belong together.
pub fn attention_backward(
    case: &AttentionBackwardCase<'_>,
    gradients: [&dyn Elements; 3],
    seed: u64,
    progress: impl Fn(f64) + Sync,
) -> Result<[Comparison; 3], Mismatch> {
    let AttentionBackwardCase { attention, o, lse, d_o } = *case;
    let sequences = sequences(&attention, o, Some(lse))?;
    let ([dq, dk, dv], AttentionCase { q, k, v, .. }) = (gradients, attention);
    for (what, array, like) in [("d_o", d_o, o), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v)] {
        let (found, expected) = (array.shape(), like.shape());
        ensure(found == expected, || format!("{what} is {found:?}, not {expected:?}"))?;
    }
    let heads_kv = heads_of(k)[0];
    let pairs = sample(SAMPLED_HEADS, sequences.len() * heads_kv, seed, 0);
    let (budget, steps) = (BUDGET / pairs.len().max(1) as u64, Steps::new(pairs.len(), &progress));
    let compared = pairs.par_iter().map(|&pair| {
        let head = Head::new(case, gradients, &sequences[pair / heads_kv], pair % heads_kv);
        let compared = head.compare(budget, seed.wrapping_add(pair as u64));
        steps.step();
        compared
    });
    let [of_q, of_k, of_v] = compared.reduce(Default::default, merge);
    Ok([of_q.finish(dq.len()), of_k.finish(dk.len()), of_v.finish(dv.len())])
}

fn merge(left: [Comparison; 3], right: [Comparison; 3]) -> [Comparison; 3] {
    std::array::from_fn(|at| left[at].merge(right[at]))
}

/// A row of this many elements.
fn row(rows: &[f32], at: usize, width: usize) -> &[f32] {
    &rows[at * width..][..width]
}

/// A head of keys of one sequence, and the heads of q that share it.
struct Head<'a> {
    case: &'a AttentionCase<'a>,
    gradients: [&'a dyn Elements; 3],
    sequence: &'a Sequence,
    head_kv: usize,
    group: usize,
    head_dims: HeadDims,
    /// Keys and values, `[seqlen_kv, their head_dim]`.
    keys: [Vec<f32>; 2],
    /// q, o and d_o, `[seqlen_q, group, their head_dim]`.
    queries: [Vec<f32>; 3],
    /// `[group, seqlen_q]`.
    lse: Vec<f32>,
}

impl<'a> Head<'a> {
    fn new(
        AttentionBackwardCase { attention: case, o, lse, d_o }: &'a AttentionBackwardCase<'a>,
        gradients: [&'a dyn Elements; 3],
        sequence: &'a Sequence,
        head_kv: usize,
    ) -> Self {
        let ([heads, qk], [heads_kv, v]) = (heads_of(case.q), heads_of(case.v));
        let (group, Sequence { seqlen_q, seqlen_kv, .. }) = (heads / heads_kv, sequence);
        let members = head_kv * group..(head_kv + 1) * group;
        let of_keys = sequence.kv..sequence.kv + seqlen_kv;
        let of_queries = sequence.q..sequence.q + seqlen_q;
        let start = |head: usize| sequence.lse + head * sequence.lse_head;
        let lse = members.clone().flat_map(|head| lse.to_f32(start(head)..start(head) + seqlen_q));
        Self {
            case,
            gradients,
            sequence,
            head_kv,
            group,
            head_dims: HeadDims { qk, v },
            keys: [case.k, case.v].map(|of| rows_of(of, of_keys.clone(), head_kv..head_kv + 1)),
            queries: [case.q, *o, *d_o].map(|of| rows_of(of, of_queries.clone(), members.clone())),
            lse: lse.collect(),
        }
    }

    /// Compares a sample of rows of each gradient.
    fn compare(&self, budget: u64, seed: u64) -> [Comparison; 3] {
        let Sequence { seqlen_q, seqlen_kv, .. } = *self.sequence;
        let keys = self.case.blocks.map_or(seqlen_kv, |blocks| blocks.mean_keys());
        // Half of the budget is for rows of dq, half for rows of dk and dv.
        let pairs = self.group * seqlen_q * keys;
        let rows = |total: usize| {
            let cost = (pairs / total.max(1) * PAIR * self.head_dims.sum() / 2).max(1) as u64;
            ((budget / 2 / cost) as usize).max(2).min(total)
        };
        let queries = self.group * seqlen_q;
        let of_queries = sample(rows(queries), queries, seed, 1);
        let of_keys = sample(rows(seqlen_kv), seqlen_kv, seed, 2);
        let of_q = of_queries.par_iter().map(|&at| {
            let found = self.compare_query([at / self.group, at % self.group]);
            [found, Comparison::default(), Comparison::default()]
        });
        let of_kv = of_keys.par_iter().map(|&key| {
            let [of_k, of_v] = self.compare_key(key);
            [Comparison::default(), of_k, of_v]
        });
        of_q.chain(of_kv).reduce(Default::default, merge)
    }

    /// The row of dq of a query: its position, and its head within the group.
    fn compare_query(&self, query: [usize; 2]) -> Comparison {
        let attended = self.attended(query, 0..self.sequence.seqlen_kv);
        let mut sums = AttentionGradients::new([1; 3], self.head_dims);
        let [position, member] = query;
        let added = self.added(query, 0..self.sequence.seqlen_kv);
        attended.iter().for_each(|&key| self.add(&mut sums, query, key, added[key]));
        let place = [self.sequence.q + position, self.head_kv * self.group + member];
        self.row(0, &sums.dq, self.case.scores.scale, place, attended.len())
    }

    /// The rows of dk and dv of a key.
    fn compare_key(&self, key: usize) -> [Comparison; 2] {
        let (mut sums, mut pairs) = (AttentionGradients::new([1; 3], self.head_dims), 0);
        for position in 0..self.sequence.seqlen_q {
            for query in (0..self.group).map(|member| [position, member]) {
                if !self.attended(query, key..key + 1).is_empty() {
                    self.add(&mut sums, query, key, self.added(query, key..key + 1)[0]);
                    pairs += 1;
                }
            }
        }
        let place = [self.sequence.kv + key, self.head_kv];
        [
            self.row(1, &sums.dk, self.case.scores.scale, place, pairs),
            self.row(2, &sums.dv, 1.0, place, pairs),
        ]
    }

    fn attended(&self, [position, member]: [usize; 2], keys: std::ops::Range<usize>) -> Vec<usize> {
        let head = self.head_kv * self.group + member;
        self.case.attended(self.sequence, [head, position], keys)
    }

    fn added(&self, [position, member]: [usize; 2], keys: std::ops::Range<usize>) -> Vec<Added> {
        let head = self.head_kv * self.group + member;
        self.case.added(self.sequence, [head, position], keys)
    }

    /// Adds what a pair contributes to the only row of each gradient.
    fn add(
        &self,
        sums: &mut AttentionGradients,
        [position, member]: [usize; 2],
        key: usize,
        added: Added,
    ) {
        let (HeadDims { qk, v }, [q, o, d_o]) = (self.head_dims, &self.queries);
        let at = position * self.group + member;
        let [q, o, d_o] = [(q, qk), (o, v), (d_o, v)].map(|(of, width)| row(of, at, width));
        let lse = self.lse[member * self.sequence.seqlen_q + position];
        let scores = self.case.scores(self.head_kv * self.group + member);
        let query = Query { q, o, lse, d_o };
        let kv = [row(&self.keys[0], key, qk), row(&self.keys[1], key, v)];
        let pair = Pair { kv, added, of_bias: None };
        sums.add(self.case.q.dtype(), scores, query, [0, 0], &[0], |_| pair);
    }

    /// Compares a row and a head of a gradient with the sum of some terms.
    fn row(
        &self,
        gradient: usize,
        sums: &GradientSums,
        scale: f32,
        [row, head]: [usize; 2],
        terms: usize,
    ) -> Comparison {
        let gradient = self.gradients[gradient];
        let (dtype, [heads, width]) = (gradient.dtype(), heads_of(gradient));
        let start = (row * heads + head) * width;
        let found = gradient.to_f32(start..start + width);
        let of_scores = self.head_dims.max().div_ceil(PRODUCTS);
        let additions = (terms.div_ceil(PRODUCTS) + of_scores) as f64;
        // The result is rounded, and the factors of the products are, the probabilities and the
        // gradients of the scores: as in the forward pass.
        Comparison::of_row(dtype, found.into_iter().zip(sums.elements(dtype, scale)), |sizes| {
            rounding(dtype, sizes.exact)
                + 4.0 * rounding(dtype, sizes.magnitude)
                + additions * TRUNCATION * sizes.partial
        })
    }
}
