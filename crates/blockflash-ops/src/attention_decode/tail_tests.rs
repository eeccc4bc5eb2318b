use super::super::{AttentionDecode, PageLists};
use crate::attention::{Align, Mask, Scores};
use crate::fixtures::values;
use crate::kv_cache::{KvCache, PackedTokens};
use crate::{Device, Tensor};
use blockflash_safe::Stream;
use blockflash_sys::DType;

const BATCH: usize = 3;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 8;
const PAGES: usize = 10;
const PAGE: usize = 4;
const CAPACITY: usize = 12;
const TABLE: [usize; 9] = [3, 1, 4, 2, 0, 5, 7, 6, 9];

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// A call, and what it should give.
#[derive(Clone, Debug)]
struct Case {
    queries: [usize; BATCH],
    lengths: [usize; BATCH],
    packed: bool,
    paged: bool,
    listed: bool,
    tail: usize,
    shared: bool,
    mask: Mask,
    alibi: bool,
}

impl Case {
    fn first_query(&self, entry: usize) -> usize {
        self.queries[..entry].iter().sum()
    }

    fn total(&self) -> usize {
        self.queries.iter().sum()
    }

    fn row_of_mask(&self, entry: usize, query: usize) -> usize {
        if self.shared { query } else { self.first_query(entry) + query }
    }

    fn entries(&self) -> Vec<u8> {
        let rows = if self.shared { self.queries[0] } else { self.total() };
        // A hash, not a pattern of the length of a row.
        let entry = |at: usize| ((at as u32).wrapping_mul(2_654_435_761) >> 20) as u8;
        (0..rows * self.tail)
            .map(|at| if entry(at).is_multiple_of(3) { 0 } else { entry(at) | 1 })
            .collect()
    }

    fn row_of_cache(&self, entry: usize, key: usize) -> usize {
        if self.paged {
            TABLE[entry * 3 + key / PAGE] * PAGE + key % PAGE
        } else {
            entry * CAPACITY + key
        }
    }

    fn sees(&self, entries: &[u8], [entry, head_kv, query]: [usize; 3], key: usize) -> bool {
        let length = self.lengths[entry];
        let in_window = self.mask.visible(query, self.queries[entry], length).contains(&key);
        // Head 0 lists pages 0 and 2, head 1 page 1.
        let listed = !self.listed || (key / PAGE == 1) == (head_kv == 1);
        let shown = match (key + self.tail).checked_sub(length) {
            None => true,
            Some(at) => entries[self.row_of_mask(entry, query) * self.tail + at] != 0,
        };
        in_window && listed && shown
    }

    /// Outputs and log-sum-exp of every query in order, head by head.
    fn expected(&self, [q, k, v]: [&[f32]; 3], slopes: &[f32]) -> Vec<(Vec<f64>, f64)> {
        let (entries, mut found) = (self.entries(), Vec::new());
        let row = |x: &[f32], at: usize| -> Vec<f64> {
            x[at * DIM..][..DIM].iter().map(|&x| f64::from(x)).collect()
        };
        for entry in 0..BATCH {
            for query in 0..self.queries[entry] {
                for (head, slope) in slopes.iter().enumerate() {
                    let head_kv = head / (HEADS / HEADS_KV);
                    let q = row(q, (self.first_query(entry) + query) * HEADS + head);
                    let (mut sum, mut o) = (0.0, vec![0.0; DIM]);
                    for key in 0..self.lengths[entry] {
                        if !self.sees(&entries, [entry, head_kv, query], key) {
                            continue;
                        }
                        let at = self.row_of_cache(entry, key) * HEADS_KV + head_kv;
                        let dot: f64 = q.iter().zip(row(k, at)).map(|(a, b)| a * b).sum();
                        let place =
                            (query + self.lengths[entry]) as f64 - self.queries[entry] as f64;
                        let slope = if self.alibi { f64::from(*slope) } else { 0.0 };
                        let score = dot / (DIM as f64).sqrt() - slope * (place - key as f64).abs();
                        sum += score.exp();
                        o.iter_mut().zip(row(v, at)).for_each(|(o, v)| *o += score.exp() * v);
                    }
                    let lse = if sum > 0.0 { sum.ln() } else { f64::NEG_INFINITY };
                    o.iter_mut().for_each(|o| *o /= sum.max(f64::MIN_POSITIVE));
                    found.push((o, lse));
                }
            }
        }
        found
    }

    fn check(&self) {
        let (stream, total) = (cpu(), self.total());
        let q = values(total * HEADS * DIM, 1);
        let slots = if self.paged { PAGES * PAGE } else { BATCH * CAPACITY };
        let [mut k, mut v] = [2, 3].map(|seed| values(slots * HEADS_KV * DIM, seed));
        // Keys that no query of their sequence sees, and slots of nobody.
        let entries = self.entries();
        for entry in 0..BATCH {
            for key in 0..CAPACITY {
                for head in 0..HEADS_KV {
                    let sees = |query| self.sees(&entries, [entry, head, query], key);
                    if key < self.lengths[entry] && (0..self.queries[entry]).any(sees) {
                        continue;
                    }
                    let row = (self.row_of_cache(entry, key) * HEADS_KV + head) * DIM;
                    k[row..][..DIM].fill(f32::NAN);
                    v[row..][..DIM].fill(f32::NAN);
                }
            }
        }
        let slopes = [0.5, 0.25, 0.125, 1.0];
        let expected = self.expected([&q, &k, &v], &slopes);
        let tensor = |x: &[f32], shape: &[usize]| Tensor::from_slice(&stream, x, shape).unwrap();
        let ints = |x: &[usize]| -> Vec<i32> { x.iter().map(|&x| x as i32).collect() };
        let queries = self.queries[0];
        let (q_shape, mask_shape) = match (self.packed, self.shared) {
            (true, _) => (vec![total, HEADS, DIM], vec![total, self.tail]),
            (false, true) => (vec![BATCH, queries, HEADS, DIM], vec![1, queries, self.tail]),
            (false, false) => (vec![BATCH, queries, HEADS, DIM], vec![BATCH, queries, self.tail]),
        };
        let kv_shape = match self.paged {
            true => [PAGES, PAGE, HEADS_KV, DIM],
            false => [BATCH, CAPACITY, HEADS_KV, DIM],
        };
        let (q, k, v) = (tensor(&q, &q_shape), tensor(&k, &kv_shape), tensor(&v, &kv_shape));
        let mask = Tensor::from_slice(&stream, &entries, &mask_shape).unwrap();
        let table = Tensor::from_slice(&stream, &ints(&TABLE), &[BATCH, 3]).unwrap();
        let lengths = Tensor::from_slice(&stream, &ints(&self.lengths), &[BATCH]).unwrap();
        let offsets: Vec<usize> = (0..=BATCH).map(|entry| self.first_query(entry)).collect();
        let offsets = Tensor::from_slice(&stream, &ints(&offsets), &[BATCH + 1]).unwrap();
        let lists = [[0, 2], [1, 1]].concat().repeat(BATCH);
        let lists = Tensor::from_slice(&stream, &ints(&lists), &[BATCH, HEADS_KV, 2]).unwrap();
        let counts = Tensor::from_slice(&stream, &[2; BATCH], &[BATCH]).unwrap();
        let slopes = tensor(&slopes, &[HEADS]);
        let decode = AttentionDecode {
            packed: self.packed.then(|| PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 9 }),
            scores: Scores { alibi: self.alibi.then(|| slopes.view()), ..self.mask.into() },
            pages: self.listed.then(|| PageLists { lists: lists.view(), counts: counts.view() }),
            tail_mask: Some(mask.view()),
            ..AttentionDecode::new(q.view())
        };
        let cache = KvCache {
            block_table: self.paged.then(|| table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCache::new(k.view(), v.view())
        };
        let output = decode.forward(cache, &stream).unwrap();
        let o = output.o.to_vec::<f32>(&stream).unwrap();
        let lse = output.lse.to_vec::<f32>(&stream).unwrap();
        for (at, (row, sum)) in expected.iter().enumerate() {
            let (token, head) = (at / HEADS, at % HEADS);
            let place = match self.packed {
                true => head * total + token,
                false => (token / queries * HEADS + head) * queries + token % queries,
            };
            let is = |x: f32, y: f64| f64::from(x) == y || (f64::from(x) - y).abs() < 1e-5;
            assert!(is(lse[place], *sum), "{self:?}: lse {} is {}, not {sum}", at, lse[place]);
            for (x, y) in o[at * DIM..][..DIM].iter().zip(row) {
                assert!(is(*x, *y), "{self:?}: row {at} has {x}, not {y}");
            }
        }
    }
}

#[test]
fn what_a_boolean_mask_gives() {
    let window = Mask::Window { left: Some(6), right: Some(0), align: Align::BottomRight };
    let start = Case {
        queries: [4; BATCH],
        lengths: [12, 7, 0],
        packed: false,
        paged: false,
        listed: false,
        tail: 4,
        shared: false,
        mask: Mask::Full,
        alibi: false,
    };
    for tail in [1, 3, 5, 11, 12] {
        for mask in [Mask::Full, Mask::causal(), window] {
            for alibi in [false, true] {
                let case = Case { tail, mask, alibi, ..start.clone() };
                case.check();
                Case { paged: true, lengths: [1, 12, 9], ..case.clone() }.check();
                Case { shared: true, ..case.clone() }.check();
                Case { paged: true, listed: true, ..case.clone() }.check();
                Case { packed: true, paged: true, queries: [5, 0, 9], ..case }.check();
            }
        }
    }
}

#[test]
fn wrong_masks_are_named() {
    let stream = cpu();
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
    let (q, kv) = (zeros(DType::F32, &[2, 3, 4, 8]), zeros(DType::F32, &[2, 12, 2, 8]));
    let message = |mask: &Tensor| {
        let tail_mask = Some(mask.view());
        let decode = AttentionDecode { tail_mask, ..AttentionDecode::new(q.view()) };
        decode.problem(&KvCache::new(kv.view(), kv.view())).map_err(|error| error.to_string())
    };
    for shape in [[2, 3, 1], [1, 3, 12]] {
        assert_eq!(message(&zeros(DType::U8, &shape)).unwrap().terms(), Some("tail_mask"));
    }
    assert!(message(&zeros(DType::I32, &[2, 3, 4])).unwrap_err().contains("tail_mask is i32"));
    for shape in [&[2, 3, 13][..], &[2, 3, 0], &[3, 3, 4], &[2, 1, 4], &[6, 4]] {
        let message = message(&zeros(DType::U8, shape)).unwrap_err();
        assert!(
            message.contains("tail_mask") && message.contains("[2 or 1, 3, 1 to 12]"),
            "{message}"
        );
    }
}
