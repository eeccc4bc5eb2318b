//! The numbers of a case, and the contents of its cache.

use super::codes::{Scales, code, number};
use super::{CacheLayout, DecodeCase};
use crate::attention::AttentionData;
use crate::number::{encode, normal_rounded, poison, round_all};
use blockflash_ops::RotaryPairs;
use blockflash_oracle::Element;
use blockflash_oracle::rotated;

/// The numbers of a case.
#[derive(Clone, Debug)]
pub struct DecodeData {
    /// Queries before rotation, and keys and values of all sequences, one after another. Of keys
    /// that are appended these are the ones before rotation.
    pub attention: AttentionData,
    /// New keys and values, `[rows of q, heads_kv, head_dim]`.
    pub new: [Vec<f32>; 2],
    /// cos and sin, `[capacity, dim / 2]`.
    pub tables: [Vec<f32>; 2],
}

impl DecodeData {
    /// The data of a case.
    pub fn generate(case: &DecodeCase) -> Self {
        let call = &case.attention;
        let mut attention = AttentionData::generate(call);
        let width = call.heads_kv * call.head_dim;
        let sequences = call.sequences();
        if let CacheLayout::Paged { page_size, shared, .. } = case.layout {
            for sequence in sequences.iter().skip(1).filter(|sequence| case.shares(sequence)) {
                let (from, to) = (sequences[0].kv_start * width, sequence.kv_start * width);
                let count = shared * page_size * width;
                attention.k.copy_within(from..from + count, to);
                attention.v.copy_within(from..from + count, to);
            }
        }
        round_to_codes(case, &mut attention);
        let rows = attention.q.len() / (call.heads_q * call.head_dim).max(1);
        let mut new = [8, 9].map(|salt| normal_rounded(call.seed ^ salt, rows * width, call.dtype));
        for (sequence, query) in
            sequences.iter().flat_map(|s| (0..s.q_len).map(move |query| (s, query)))
        {
            let Ok(key) = usize::try_from(case.first_new(sequence) + query as i64) else {
                continue;
            };
            let from = (sequence.kv_start + key) * width;
            let to = (sequence.q_start + query) * width;
            for (new, all) in new.iter_mut().zip([&attention.k, &attention.v]) {
                new[to..to + width].copy_from_slice(&all[from..from + width]);
            }
        }
        Self { attention, new, tables: tables(case) }
    }

    /// The row of a query or new key at a position after rotation.
    pub fn turned(&self, case: &DecodeCase, row: &[f32], position: i64) -> Vec<Element> {
        let half = case.rotary.map_or(0, |rotary| rotary.dim / 2);
        let last = case.capacity() as i64 - 1;
        let start = position.clamp(0, last.max(0)) as usize * half;
        let [cos, sin] = &self.tables;
        let tables = match last {
            0.. => [&cos[start..start + half], &sin[start..start + half]],
            _ => [&[][..]; 2],
        };
        let interleaved =
            case.rotary.is_some_and(|rotary| rotary.pairs == RotaryPairs::Interleaved);
        rotated(case.attention.dtype, row, tables, interleaved)
    }

    /// The keys that a call appends, after rotation.
    pub(super) fn new_keys(&self, case: &DecodeCase) -> Vec<NewKey> {
        let call = &case.attention;
        let mut keys = Vec::new();
        for (b, sequence) in call.sequences().iter().enumerate().filter(|_| case.append) {
            let first = case.first_new(sequence);
            for (key, head) in (first.max(0) as usize..sequence.kv_len)
                .flat_map(|k| (0..call.heads_kv).map(move |h| (k, h)))
            {
                let token = sequence.q_start + (key as i64 - first) as usize;
                let new = (token * call.heads_kv + head) * call.head_dim;
                let row = &self.new[0][new..][..call.head_dim];
                let turned = self.turned(case, row, key as i64);
                keys.push(NewKey { at: [b, key, head], new, turned });
            }
        }
        keys
    }

    /// The keys as they are in the cache after the call.
    pub fn keys(&self, case: &DecodeCase) -> Vec<f32> {
        let (call, sequences) = (&case.attention, case.attention.sequences());
        let mut keys = self.attention.k.clone();
        for NewKey { at: [b, key, head], turned, .. } in self.new_keys(case) {
            let row = (sequences[b].kv_start + key) * call.heads_kv + head;
            let row = &mut keys[row * call.head_dim..][..call.head_dim];
            row.iter_mut().zip(turned).for_each(|(to, key)| *to = key.plain as f32);
        }
        keys
    }

    /// The bits of the cache before the call, `[pages, page_size, heads_kv, head_dim]` in the order
    /// of the layout: keys, then values. Slots that no key takes are poison, and so are those of
    /// new keys, and of keys that the mask of the last ones hides from all queries.
    pub fn cache(&self, case: &DecodeCase) -> [Vec<u32>; 2] {
        let call = &case.attention;
        let [page_size, _, pages] = case.pages();
        let size = pages * page_size * call.heads_kv * call.head_dim;
        let mut bits = [(); 2].map(|()| vec![poison(case.cache_dtype()); size]);
        let places = places(case);
        let scales = case.codes.map(|codes| [0, 1].map(|which| Scales::new(case, codes, which)));
        let sequences = call.sequences();
        let shares = sequences.iter().any(|sequence| case.shares(sequence));
        for (b, sequence) in sequences.iter().enumerate() {
            let old = if case.append { case.first_new(sequence).max(0) } else { i64::MAX };
            let queries = || 0..sequence.q_len;
            let hidden = |key: usize| {
                !shares && case.tail.is_some() && queries().all(|i| !case.shows(sequence, i, key))
            };
            for key in (0..sequence.kv_len).take_while(|&key| (key as i64) < old) {
                if hidden(key) {
                    continue;
                }
                for head in 0..call.heads_kv {
                    let from = ((sequence.kv_start + key) * call.heads_kv + head) * call.head_dim;
                    let to = places.of([b, key, head]);
                    let slot = places.slot(b, key);
                    for (which, values) in
                        [&self.attention.k, &self.attention.v].into_iter().enumerate()
                    {
                        let scale = scales.as_ref().map(|scales| scales[which].get(b, slot, head));
                        let values = &values[from..][..call.head_dim];
                        for (bits, &x) in bits[which][to..].iter_mut().zip(values) {
                            *bits = match scale {
                                // The code that `round_to_codes` has found.
                                Some(scale) => code(case.cache_dtype(), x / scale),
                                None => encode(call.dtype, x),
                            };
                        }
                    }
                }
            }
        }
        bits
    }
}

/// Makes keys and values what codes times scales are.
fn round_to_codes(case: &DecodeCase, data: &mut AttentionData) {
    let (Some(codes), call, places) = (case.codes, &case.attention, places(case)) else { return };
    for (which, values) in [&mut data.k, &mut data.v].into_iter().enumerate() {
        let scales = Scales::new(case, codes, which);
        for (b, sequence) in call.sequences().iter().enumerate() {
            for key in 0..sequence.kv_len {
                let slot = places.slot(b, key);
                for head in 0..call.heads_kv {
                    let scale = scales.get(b, slot, head);
                    let row = (sequence.kv_start + key) * call.heads_kv + head;
                    for x in &mut values[row * call.head_dim..][..call.head_dim] {
                        *x = number(codes.dtype, code(codes.dtype, *x / scale)) * scale;
                    }
                }
            }
        }
    }
}

/// A row that is appended to the keys.
pub(super) struct NewKey {
    /// Sequence, key and head.
    pub(super) at: [usize; 3],
    /// Its first element before rotation.
    pub(super) new: usize,
    pub(super) turned: Vec<Element>,
}

/// cos and sin of the angles of each position, in the type of the tables.
fn tables(case: &DecodeCase) -> [Vec<f32>; 2] {
    let Some(rotary) = case.rotary else { return [Vec::new(), Vec::new()] };
    let half = rotary.dim / 2;
    let angle = |at: usize| {
        let (position, i) = (at / half, at % half);
        position as f64 * 10_000f64.powf(-(i as f64) / half as f64)
    };
    let of = |f: fn(f64) -> f64| {
        let mut values: Vec<f32> =
            (0..case.capacity() * half).map(|at| f(angle(at)) as f32).collect();
        round_all(rotary.dtype, &mut values);
        values
    };
    [of(f64::cos), of(f64::sin)]
}

/// Where keys are in the physical cache.
pub(super) struct Places<'a> {
    case: &'a DecodeCase,
    /// Rows of a page, and pages of a sequence.
    extents: [usize; 2],
    table: Vec<i32>,
}

pub(super) fn places(case: &DecodeCase) -> Places<'_> {
    let [page_size, max_pages, _] = case.pages();
    Places { case, extents: [page_size, max_pages], table: case.table(false) }
}

impl Places<'_> {
    /// Page and slot of a key of a sequence.
    pub(super) fn slot(&self, b: usize, key: usize) -> [usize; 2] {
        let [page_size, max_pages] = self.extents;
        [self.table[b * max_pages + key / page_size] as usize, key % page_size]
    }

    /// First element of a key of a head of a sequence.
    pub(super) fn of(&self, [b, key, head]: [usize; 3]) -> usize {
        let [page_size, _] = self.extents;
        let (heads, d) = (self.case.attention.heads_kv, self.case.attention.head_dim);
        let [page, slot] = self.slot(b, key);
        let heads_first = matches!(self.case.layout, CacheLayout::Paged { heads_first: true, .. });
        let row = match heads_first {
            true => (page * heads + head) * page_size + slot,
            false => (page * page_size + slot) * heads + head,
        };
        row * d
    }
}
