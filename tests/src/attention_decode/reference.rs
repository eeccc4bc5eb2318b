//! The rows of a case, computed by the oracle.

use super::{DecodeCase, DecodeData};
use crate::attention::{AttentionReference, visible_keys};
use blockflash_oracle::{AttentionRow, attention_row};
use rayon::prelude::*;

/// Exact and plain values of all rows of a case.
pub fn decode_reference(case: &DecodeCase, data: &DecodeData) -> AttentionReference {
    let k = data.keys(case);
    let (call, sequences, lists) = (&case.attention, case.attention.sequences(), case.lists());
    let rows: Vec<[usize; 3]> = sequences
        .iter()
        .enumerate()
        .flat_map(|(b, s)| {
            (0..s.q_len).flat_map(move |i| (0..call.heads_q).map(move |h| [b, i, h]))
        })
        .collect();
    let (d, [page_size, ..]) = (call.head_dim, case.pages());
    let row = |&[b, i, h]: &[usize; 3]| -> AttentionRow {
        let sequence = &sequences[b];
        let kv_head = h / (call.heads_q / call.heads_kv);
        let listed = |key: &usize| {
            let column = (key / page_size.max(1)) as i32;
            lists.as_ref().is_none_or(|lists| lists[b][kv_head].binary_search(&column).is_ok())
        };
        let keys: Vec<usize> = visible_keys(call, sequence, i)
            .filter(listed)
            .filter(|&key| case.shows(sequence, i, key))
            .collect();
        let q = &data.attention.q[((sequence.q_start + i) * call.heads_q + h) * d..][..d];
        let position = case.first_new(sequence) + i as i64;
        let q: Vec<f32> =
            data.turned(case, q, position).iter().map(|element| element.plain as f32).collect();
        let at = |key: usize| ((sequence.kv_start + key) * call.heads_kv + kv_head) * d;
        let scores = call.scores_of(h, &data.attention.sink);
        let kv = |key: usize| [&k[at(key)..][..d], &data.attention.v[at(key)..][..d]];
        let added = |key: usize| call.added(&data.attention, sequence, [b, i, h], key);
        let mut row = attention_row(call.dtype, scores, &q, d, &keys, kv, added);
        // The size of a score is its value, or the size of the terms that cancel in it.
        let q_norm = norm(&q) * f64::from(call.scale()) / (d as f64).sqrt();
        let terms = keys.iter().map(|&key| q_norm * norm(&k[at(key)..][..d]));
        row.lse.magnitude = terms.fold(row.lse.magnitude, f64::max);
        row
    };
    let computed: Vec<AttentionRow> = rows.par_iter().map(row).collect();
    let mut reference = AttentionReference { rows, ..AttentionReference::default() };
    reference.o.width = d;
    reference.lse.width = computed.len();
    for AttentionRow { o, lse } in computed {
        reference.o.extend(o);
        reference.lse.extend([lse]);
    }
    reference
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}
