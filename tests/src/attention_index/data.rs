//! The numbers of a case, the contents of its cache, and what an exact computation makes of them.

use super::stored::{Rows, generate};
use super::{IndexCase, KeyLayout};
use crate::number::{normal_rounded, poison};
use crate::tolerance::Reference;
use blockflash_ops::HeadDims;
use blockflash_oracle::{Added, AttentionRow, index_attention_row, listed_keys};
use rayon::prelude::*;

/// The numbers of a case.
pub struct IndexData {
    /// `[total, heads, qk]`.
    pub(super) q: Vec<f32>,
    /// Keys of each sequence.
    keys: Vec<Rows>,
    /// Values of each sequence.
    values: Vec<Rows>,
    /// Of each head.
    pub(super) sink: Vec<f32>,
    /// `[groups, total, capacity]`.
    pub(super) entries: Vec<i32>,
}

impl IndexData {
    /// The numbers of a case.
    pub fn generate(case: &IndexCase) -> Self {
        let ([heads, _], HeadDims { qk, .. }) = (case.heads, case.form.head_dims);
        let normal =
            |salt: u64, count| normal_rounded(case.seed << 8 ^ salt, count, case.form.dtype);
        let table = case.table();
        let sequences = (0..case.batch()).map(|b| generate(case, &table, b));
        let [keys, values] = sequences.fold([vec![], vec![]], |[mut keys, mut values], [k, v]| {
            keys.push(k);
            values.push(v);
            [keys, values]
        });
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
            let key = |key: usize| &self.keys[b].numbers[(key * heads_kv + head_kv) * qk..][..qk];
            let value = |key: usize| &self.values[b].numbers[(key * heads_kv + head_kv) * v..][..v];
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
        let ([_, heads_kv], [qk, v]) = (case.heads, case.form.stored());
        let ([page_size, _, pages], table) = (case.pages(), case.table());
        let units = case.heads[0] / case.group().max(1);
        let dtype = case.form.cache_dtype();
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
                let of = [(&self.keys[b].bits, qk), (&self.values[b].bits, v)];
                for (to, (from, width)) in bits.iter_mut().zip(of) {
                    // Values that are columns of keys have no bits of their own.
                    if let Some(from) = from.get(at * width..(at + 1) * width) {
                        to[row * (width + gap)..][..width].copy_from_slice(from);
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
