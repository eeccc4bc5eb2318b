//! The numbers of a case, the contents of its cache, and what an exact computation makes of them.

use super::{IndexCase, KeyLayout};
use crate::number::{encode, normal_rounded, poison};
use crate::tolerance::Reference;
use blockflash_ops::HeadDims;
use blockflash_oracle::{Added, AttentionRow, index_attention_row, listed_keys};
use rayon::prelude::*;

/// The numbers of a case.
pub struct IndexData {
    /// `[total, heads, qk]`.
    pub(super) q: Vec<f32>,
    /// Keys of each sequence, `[keys, heads_kv, qk]`.
    keys: Vec<Vec<f32>>,
    /// Values of each sequence, `[keys, heads_kv, v]`.
    values: Vec<Vec<f32>>,
    /// Of each head.
    pub(super) sink: Vec<f32>,
    /// `[groups, total, capacity]`.
    pub(super) entries: Vec<i32>,
}

impl IndexData {
    /// The numbers of a case.
    pub fn generate(case: &IndexCase) -> Self {
        let ([heads, heads_kv], HeadDims { qk, v }) = (case.heads, case.form.head_dims);
        let normal =
            |salt: u64, count| normal_rounded(case.seed << 8 ^ salt, count, case.form.dtype);
        let sequences = || case.lengths.iter().zip(1u64..);
        let mut keys: Vec<Vec<f32>> =
            sequences().map(|(lengths, b)| normal(2 * b, lengths.1 * heads_kv * qk)).collect();
        let mut values: Vec<Vec<f32>> = match case.form.latent {
            false => sequences().map(|(l, b)| normal(2 * b + 1, l.1 * heads_kv * v)).collect(),
            true => vec![],
        };
        for (b, &(_, count)) in case.lengths.iter().enumerate() {
            // One of the last keys and one of the first ones.
            for key in [1, count.saturating_sub(2)] {
                if case.nonfinite && key < count {
                    let (of, width) =
                        if case.form.latent { (&mut keys, qk) } else { (&mut values, v) };
                    of[b][key * heads_kv * width + v / 2] = f32::NAN;
                }
            }
        }
        if case.form.latent {
            let first =
                |keys: &Vec<f32>| keys.chunks(qk).flat_map(|row| &row[..v]).copied().collect();
            values = keys.iter().map(first).collect();
        }
        let (q, sink) = (normal(0, case.total() * heads * qk), normal(1, heads));
        Self { q, keys, values, sink, entries: case.entries() }
    }

    /// The keys that a unit of heads sees of a query, as often as they are listed.
    fn seen(&self, case: &IndexCase, at: [usize; 2], unit: usize) -> Vec<usize> {
        let units = case.heads[0] / case.group().max(1);
        let place = case.start(at[0]) + at[1];
        let list = (unit * case.groups / units * case.total() + place) * case.capacity;
        listed_keys(&self.entries[list..][..case.capacity], case.granularity, case.shown(at))
    }

    /// Exact and plain values of all rows: outputs, and logarithms of sums.
    pub(super) fn reference(&self, case: &IndexCase) -> [Reference; 2] {
        let ([heads, heads_kv], HeadDims { qk, v }) = (case.heads, case.form.head_dims);
        let queries: Vec<_> = case.queries().collect();
        let row = |at: usize| -> AttentionRow {
            let (token, head) = (at / heads, at % heads);
            let [b, query] = queries[token];
            let head_kv = head / (heads / heads_kv);
            let keys = self.seen(case, [b, query], head / case.group());
            let scores = blockflash_oracle::Scores {
                scale: case.factor(),
                softcap: case.softcap,
                sink: case.sink.then(|| self.sink[head]),
            };
            let q = &self.q[at * qk..][..qk];
            let key = |key: usize| &self.keys[b][(key * heads_kv + head_kv) * qk..][..qk];
            let value = |key: usize| &self.values[b][(key * heads_kv + head_kv) * v..][..v];
            let (kv, no_term) = (|at: usize| [key(at), value(at)], |_| Added::default());
            let mut row = index_attention_row(case.form.dtype, scores, q, v, &keys, kv, no_term);
            // The size of a score is its value, or the size of the terms that cancel in it.
            let size = norm(q) * f64::from(case.factor()) / (qk as f64).sqrt();
            let terms = keys.iter().map(|&at| size * norm(key(at)));
            row.lse.magnitude = terms.fold(row.lse.magnitude, f64::max);
            row
        };
        let rows: Vec<_> = (0..queries.len() * heads).into_par_iter().map(row).collect();
        let mut o = Reference { width: v, ..Reference::default() };
        let mut lse = Reference { width: rows.len(), ..Reference::default() };
        for row in rows {
            o.extend(row.o);
            lse.extend([row.lse]);
        }
        [o, lse]
    }

    /// The most keys that a row sums over.
    pub(super) fn most_keys(&self, case: &IndexCase) -> usize {
        let units = case.heads[0] / case.group().max(1);
        let count = |at| (0..units).map(move |unit| self.seen(case, at, unit).len());
        case.queries().flat_map(count).max().unwrap_or(0)
    }

    /// The bits of the memory of keys and of values, in the order of the layout, with `gap`
    /// elements behind each row. What is no key, or one that no query sees, is poison.
    pub(super) fn cache(&self, case: &IndexCase, gap: usize) -> [Vec<u32>; 2] {
        let ([_, heads_kv], HeadDims { qk, v }) = (case.heads, case.form.head_dims);
        let ([page_size, _, pages], table) = (case.pages(), case.table());
        let units = case.heads[0] / case.group().max(1);
        let dtype = case.form.dtype;
        let slots = pages * page_size * heads_kv;
        let mut bits = [qk, v].map(|width| vec![poison(dtype); slots * (width + gap)]);
        let mut is_seen: Vec<Vec<bool>> =
            case.lengths.iter().map(|lengths| vec![false; lengths.1 * heads_kv]).collect();
        for at in case.queries() {
            for unit in 0..units {
                let head_kv = unit * heads_kv / units;
                let seen = self.seen(case, at, unit);
                seen.into_iter().for_each(|key| is_seen[at[0]][key * heads_kv + head_kv] = true);
            }
        }
        for (b, is_seen) in is_seen.iter().enumerate() {
            for at in (0..is_seen.len()).filter(|&at| is_seen[at]) {
                let (key, head) = (at / heads_kv, at % heads_kv);
                let [page, slot] = case.slot(&table, b, key);
                let row = match case.layout {
                    KeyLayout::HeadsFirst(_) => (page * heads_kv + head) * page_size + slot,
                    _ => (page * page_size + slot) * heads_kv + head,
                };
                let of = [(&self.keys[b], qk), (&self.values[b], v)];
                for (bits, (numbers, width)) in bits.iter_mut().zip(of) {
                    let target = &mut bits[row * (width + gap)..][..width];
                    for (bits, &x) in target.iter_mut().zip(&numbers[at * width..][..width]) {
                        *bits = encode(dtype, x);
                    }
                }
            }
        }
        bits
    }
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}
