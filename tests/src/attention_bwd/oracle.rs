//! The gradients of an attention case, computed by the oracle.

use super::BackwardData;
use crate::attention::{AttentionCase, BiasCase, Blocks, Content};
use crate::tolerance::Reference;
use blockflash_oracle::{
    AttentionGradients, Element, GradientSums, PRODUCTS, Pair, Query, Rounding,
};
use blockflash_sys::{DType, HeadDims};
use rayon::prelude::*;

/// Exact and plain values of all gradients of a case, without rows that belong to no sequence.
#[derive(Clone, Debug, Default)]
pub struct BackwardReference {
    /// Gradients of q, k and v, `[rows, heads, head_dim]`.
    pub qkv: [Reference; 3],
    /// Gradient of the sink, `[heads_q]`.
    pub d_sink: Reference,
    /// Gradient of the bias, in its shape.
    pub dbias: Reference,
    exponent: f64,
}

impl BackwardReference {
    /// Computes the reference.
    pub fn compute(case: &AttentionCase, data: &BackwardData) -> Self {
        let (heads, blocks) = (case.heads_kv, Blocks::of(case));
        let of_head = |head| gradients(case, data, blocks.as_ref(), head);
        let gradients: Vec<_> = (0..heads).into_par_iter().map(of_head).collect();
        let (d, group) = (case.head_dim, case.heads_q / heads);
        let ([queries, keys], _) = case.rows();
        let [mut dq, mut dk, mut dv] = [queries * case.heads_q, keys * heads, keys * heads]
            .map(|rows| vec![Element::default(); rows * d]);
        let mut d_sink = Vec::new();
        let elements: usize = case.bias_shape().iter().product();
        let mut dbias = GradientSums::new(elements, 1);
        for (head, gradients) in gradients.iter().enumerate() {
            let AttentionGradients { dq: q, dk: k, dv: v, d_sink: sink, dbias: bias } = gradients;
            dbias.merge(bias);
            // Query heads of a group are neighbours.
            scatter(&mut dq, q.elements(case.dtype, case.scale()), [head, heads, group * d]);
            scatter(&mut dk, k.elements(case.dtype, case.scale()), [head, heads, d]);
            scatter(&mut dv, v.elements(case.dtype, 1.0), [head, heads, d]);
            d_sink.extend(sink.elements(DType::F32, 1.0));
        }
        let bias_dtype = case.terms.bias.as_ref().map_or(DType::F32, BiasCase::gradient_dtype);
        let bias_width = case.bias_shape().last().copied().unwrap_or(1);
        let reference = |width: usize, elements: Vec<Element>| {
            let mut reference = Reference { width, ..Reference::default() };
            reference.extend(elements);
            reference
        };
        Self {
            qkv: [dq, dk, dv].map(|elements| reference(d, elements)),
            d_sink: reference(case.heads_q, d_sink),
            dbias: reference(bias_width, dbias.elements(bias_dtype, 1.0).collect()),
            exponent: data.exponent,
        }
    }

    /// The roundings that a correct implementation may make in the gradients of q, k and v: as in
    /// the forward pass, and in the products `d_o · v` and `d_o · o` before those. The gradients of
    /// the scores of a row add up to 0, so for parallel keys almost everything cancels but the
    /// roundings.
    pub fn rounding(&self, case: &AttentionCase) -> [Rounding; 3] {
        let longest = |length: fn(&crate::attention::Sequence) -> usize| {
            case.sequences().iter().map(length).max().unwrap_or(0)
        };
        let (keys, queries) = (longest(|s| s.kv_len), longest(|s| s.q_len));
        let queries = queries * (case.heads_q / case.heads_kv);
        let along = case.content == Content::GrowingMaxima;
        [(keys, along), (queries, along), (queries, false)].map(|(terms, parallel)| {
            let rounding = Rounding::of_products(terms, 1, case.dtype);
            let additions = rounding.additions + case.head_dim.div_ceil(PRODUCTS);
            let factor = Some(case.dtype);
            Rounding { factor, parallel, exponent: self.exponent, additions, ..rounding }
        })
    }

    /// The same for the gradient of the sink, a sum over all queries in f32.
    pub fn sink_rounding(&self, case: &AttentionCase) -> Rounding {
        let ([queries, _], _) = case.rows();
        self.rounding_of_sum(case, queries, DType::F32)
    }

    /// The same for the gradient of the bias, sums over the pairs that an element serves.
    pub fn bias_rounding(&self, case: &AttentionCase) -> Rounding {
        let Some(bias) = &case.terms.bias else { return self.sink_rounding(case) };
        let served = case.pairs().into_iter().zip(bias.broadcast);
        let served = served.filter(|(_, one)| *one).map(|(extent, _)| extent).product();
        self.rounding_of_sum(case, served, bias.gradient_dtype())
    }

    fn rounding_of_sum(&self, case: &AttentionCase, terms: usize, dtype: DType) -> Rounding {
        let rounding = Rounding::of_products(terms, 8, dtype);
        let additions = rounding.additions + case.head_dim.div_ceil(PRODUCTS);
        Rounding { exponent: self.exponent, additions, ..rounding }
    }
}

/// Places the rows of one of several heads.
fn scatter(
    target: &mut [Element],
    source: impl Iterator<Item = Element>,
    [head, heads, width]: [usize; 3],
) {
    for (at, element) in source.enumerate() {
        target[(at / width * heads + head) * width + at % width] = element;
    }
}

/// The gradients of a head of keys and of its query heads.
fn gradients(
    case: &AttentionCase,
    data: &BackwardData,
    blocks: Option<&Blocks>,
    head_kv: usize,
) -> AttentionGradients {
    let (d, group) = (case.head_dim, case.heads_q / case.heads_kv);
    let ([queries, keys], _) = case.rows();
    let elements = case.bias_shape().iter().product::<usize>();
    let elements = if case.terms.bias.is_some() { elements } else { 0 };
    let mut gradients = AttentionGradients::new([queries * group, keys, group], HeadDims::all(d))
        .with_bias(elements);
    let mut attended = Vec::new();
    for (b, sequence) in case.sequences().iter().enumerate() {
        for (i, member) in (0..sequence.q_len).flat_map(|i| (0..group).map(move |m| (i, m))) {
            let (row, head) = (sequence.q_start + i, head_kv * group + member);
            let at = (row * case.heads_q + head) * d;
            let query = Query {
                q: &data.forward.q[at..][..d],
                o: &data.o[at..][..d],
                lse: data.lse[case.lse_index(b, head, i)],
                d_o: &data.d_o[at..][..d],
            };
            attended.clear();
            let positions = case.attended_keys(blocks, [b, i, head], sequence);
            attended.extend(positions.map(|key| sequence.kv_start + key));
            let scores = case.scores_of(head, &data.forward.sink);
            let place = [row * group + member, member];
            gradients.add(case.dtype, scores, query, place, &attended, |row| {
                let (of_row, key) = ((row * case.heads_kv + head_kv) * d, row - sequence.kv_start);
                Pair {
                    kv: [&data.forward.k[of_row..][..d], &data.forward.v[of_row..][..d]],
                    added: case.added(&data.forward, sequence, [b, i, head], key),
                    of_bias: case.bias_element([b, i, head], key),
                }
            });
        }
    }
    gradients
}
