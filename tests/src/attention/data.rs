//! The numbers of an attention case.

use super::{AttentionCase, Blocks, Content, Sequence};
use crate::number::{normal, normal_rounded, rng, round_all};
use blockflash_sys::DType;
use rand::Rng;

/// Logical tensors of a case, already rounded to its type and held as f32.
#[derive(Clone, Debug)]
pub struct AttentionData {
    /// `[rows of q, heads_q, head_dim]`.
    pub q: Vec<f32>,
    /// `[rows of k, heads_kv, head_dim]`.
    pub k: Vec<f32>,
    /// `[rows of k, heads_kv, head_dim]`.
    pub v: Vec<f32>,
    /// `[heads_q]`, f32; used when the case has a sink.
    pub sink: Vec<f32>,
    /// The bias in its shape, rounded to its type.
    pub bias: Vec<f32>,
    /// Slopes of ALiBi in their shape, f32.
    pub alibi: Vec<f32>,
}

impl AttentionData {
    /// The data of a case.
    pub fn generate(case: &AttentionCase) -> Self {
        let (used, [rows_q, rows_kv]) = case.rows();
        let (q_width, kv_width) = (case.heads_q * case.head_dim, case.heads_kv * case.head_dim);
        let values = |salt: u64, n| {
            normal_rounded(case.seed.wrapping_mul(4).wrapping_add(salt), n, case.input_type())
        };
        let mut data = Self {
            q: values(0, rows_q * q_width),
            k: values(1, rows_kv * kv_width),
            v: values(2, rows_kv * kv_width),
            sink: normal(case.seed.wrapping_mul(4).wrapping_add(3), case.heads_q),
            bias: case.bias_values(),
            alibi: case.alibi_values(),
        };
        for (entry, sequence) in case.sequences().iter().enumerate() {
            data.shape_scores(case, sequence);
            case.add_content(sequence, [&mut data.q, &mut data.k, &mut data.v]);
            data.plant_nan(case, entry, sequence);
        }
        if case.broadcast_kv {
            // Also what was planted: the first entry's keys serve all.
            let first = case.sequences().first().map_or(0, |s| s.kv_len * kv_width);
            for tensor in [&mut data.k, &mut data.v] {
                (1..rows_kv * kv_width / first.max(1))
                    .for_each(|b| tensor.copy_within(..first, b * first));
            }
        }
        data.q[used[0] * q_width..].fill(f32::NAN);
        data.k[used[1] * kv_width..].fill(f32::NAN);
        data.v[used[1] * kv_width..].fill(f32::INFINITY);
        for tensor in [&mut data.q, &mut data.k, &mut data.v] {
            round_all(case.input_type(), tensor);
        }
        data
    }

    fn shape_scores(&mut self, case: &AttentionCase, s: &Sequence) {
        let d = case.head_dim;
        let ratio = case.heads_q / case.heads_kv;
        // Standard deviation of a score of N(0,1) vectors.
        let unit = case.scale() * (d as f32).sqrt();
        let queries = s.q_start * case.heads_q * d..(s.q_start + s.q_len) * case.heads_q * d;
        match case.content {
            Content::LargeScores => self.q[queries].iter_mut().for_each(|x| *x *= 40.0 / unit),
            Content::GrowingMaxima => {
                let sign = |i: usize| if i.is_multiple_of(3) { -1.0 } else { 1.0 };
                self.q[queries]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, x)| *x = sign(i % d) + 0.1 * *x);
                for (at, x) in self.k[s.kv_start * case.heads_kv * d..].iter_mut().enumerate() {
                    let key = at / (case.heads_kv * d);
                    if key < s.kv_len {
                        *x += sign(at % d) * 60.0 / (unit * (d as f32).sqrt()) * key as f32
                            / s.kv_len as f32;
                    }
                }
            }
            Content::OneHugeLogit if s.kv_len > 0 => {
                for query in 0..s.q_len {
                    let key = (query * 7 + 3) % s.kv_len;
                    for head in 0..case.heads_kv {
                        let q = ((s.q_start + query) * case.heads_q + head * ratio) * d;
                        let k = ((s.kv_start + key) * case.heads_kv + head) * d;
                        for i in 0..d {
                            self.k[k + i] = self.q[q + i] * 80.0 / (unit * (d as f32).sqrt());
                        }
                    }
                }
            }
            Content::HugeScores => {
                // The products of neighbouring elements are 2^x·(64·(n / 64) + n % 64).
                let (of_q, of_k) =
                    (if case.dtype == DType::F16 { 2f32.powi(15) } else { 2f32.powi(30) }, 4.0);
                for (i, x) in self.q[queries].iter_mut().enumerate() {
                    let row = i / d;
                    *x = if row % 3 == 1 { -of_q } else { of_q };
                }
                let keys =
                    s.kv_start * case.heads_kv * d..(s.kv_start + s.kv_len) * case.heads_kv * d;
                for (i, x) in self.k[keys.clone()].iter_mut().enumerate() {
                    // Neither ascending nor descending along the keys.
                    let number = (i / (case.heads_kv * d) * 8191) % s.kv_len.max(1) + 1;
                    let part = if i % 2 == 0 { number / 64 * 64 } else { number % 64 };
                    *x = part as f32 * of_k;
                }
                self.v[keys].iter_mut().for_each(|x| *x = (*x * 4.0).round());
            }
            _ => {}
        }
    }

    fn plant_nan(&mut self, case: &AttentionCase, entry: usize, s: &Sequence) {
        let d = case.head_dim;
        let mut random = rng(case.seed ^ s.kv_start as u64);
        let row = |key: usize, head: usize| ((s.kv_start + key) * case.heads_kv + head) * d;
        match case.content {
            Content::UnseenNan => {
                let blocks = Blocks::of(case);
                for head in 0..case.heads_kv {
                    // Without a block mask all heads of a group see the same.
                    let group = if blocks.is_some() { case.heads_q / case.heads_kv } else { 1 };
                    let mut seen = vec![false; s.kv_len];
                    for (query, head_q) in
                        (0..s.q_len).flat_map(|i| (0..group).map(move |h| (i, head * group + h)))
                    {
                        let keys = case.attended_keys(blocks.as_ref(), [entry, query, head_q], s);
                        keys.for_each(|key| seen[key] = true);
                    }
                    for key in (0..s.kv_len).filter(|&key| !seen[key]) {
                        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                        self.k[row(key, head)..][..d].fill(bad[key % 3]);
                        self.v[row(key, head)..][..d].fill(bad[(key / 3) % 3]);
                    }
                }
            }
            Content::NanInKeys | Content::NanInValues if s.kv_len > 0 => {
                for _ in 0..2 {
                    let at = row(
                        random.random_range(0..s.kv_len),
                        random.random_range(0..case.heads_kv),
                    ) + random.random_range(0..d);
                    let tensor =
                        if case.content == Content::NanInKeys { &mut self.k } else { &mut self.v };
                    tensor[at] = f32::NAN;
                }
            }
            _ => {}
        }
    }
}
