//! The gradients of an attention case, computed by the oracle.

use super::BackwardData;
use crate::attention::{AttentionCase, Blocks, Content};
use crate::tolerance::Reference;
use blockflash_oracle::{AttentionGradients, Element, PRODUCTS, Query, Rounding};
use blockflash_sys::{DType, HeadDims};
use rayon::prelude::*;

/// Exact and plain values of all gradients of a case, without rows that belong to no sequence.
#[derive(Clone, Debug, Default)]
pub struct BackwardReference {
    /// Gradients of q, k and v, `[rows, heads, head_dim]`.
    pub qkv: [Reference; 3],
    /// Gradient of the sink, `[heads_q]`.
    pub d_sink: Reference,
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
        for (head, gradients) in gradients.iter().enumerate() {
            let AttentionGradients { dq: q, dk: k, dv: v, d_sink: sink } = gradients;
            // Query heads of a group are neighbours.
            scatter(&mut dq, q.elements(case.dtype, case.scale()), [head, heads, group * d]);
            scatter(&mut dk, k.elements(case.dtype, case.scale()), [head, heads, d]);
            scatter(&mut dv, v.elements(case.dtype, 1.0), [head, heads, d]);
            d_sink.extend(sink.elements(DType::F32, 1.0));
        }
        let reference = |width: usize, elements: Vec<Element>| {
            let mut reference = Reference { width, ..Reference::default() };
            reference.extend(elements);
            reference
        };
        Self {
            qkv: [dq, dk, dv].map(|elements| reference(d, elements)),
            d_sink: reference(case.heads_q, d_sink),
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
        let rounding = Rounding::of_products(queries, 8, DType::F32);
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
    let mut gradients = AttentionGradients::new([queries * group, keys, group], HeadDims::all(d));
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
            gradients.add(case.dtype, scores, query, place, &attended, |key| {
                let at = (key * case.heads_kv + head_kv) * d;
                [&data.forward.k[at..][..d], &data.forward.v[at..][..d]]
            });
        }
    }
    gradients
}
