//! The rows of a cache: their bits, and the numbers that they stand for.

use super::{IndexCase, IndexForm, KeyLayout, RowKind};
use crate::attention_decode::codes::{code, number};
use crate::attention_latent::rows;
use crate::number::{encode, normal_rounded, rng};
use blockflash_ops::{DType, HeadDims};
use rand::Rng;

/// Rows of one sequence, `[keys, heads_kv, columns]`, of keys or of values.
#[derive(Clone, Default)]
pub(super) struct Rows {
    /// What they stand for.
    pub(super) numbers: Vec<f32>,
    /// How they are stored, `[keys, heads_kv, elements]`.
    pub(super) bits: Vec<u32>,
}

/// What codes of keys or of values are multiplied with.
pub(super) struct Scales {
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl Scales {
    /// Those of keys (0) or of values (1): none, one, or one for each sequence and head, each page
    /// and head, or each row.
    pub(super) fn of(case: &IndexCase, which: usize) -> Option<Self> {
        let [page_size, _, pages] = case.pages();
        let heads = case.heads[1];
        let kind = match case.form.rows {
            RowKind::Codes => (case.seed as usize + which) % 5,
            _ => 0,
        };
        let shape = match kind {
            0 => return None,
            1 => vec![1],
            2 if case.layout != KeyLayout::Packed => vec![case.batch(), heads],
            2 | 3 => vec![pages, 1, heads],
            _ => vec![pages, page_size, heads],
        };
        let mut random = rng(case.seed ^ 0x5CA1E ^ which as u64);
        let values = (0..shape.iter().product()).map(|_| random.random_range(0.5..2.0f32));
        Some(Self { values: values.collect(), shape })
    }

    fn get(&self, b: usize, [page, slot]: [usize; 2], head: usize) -> f32 {
        match self.shape[..] {
            [_] => self.values[0],
            [_, heads] => self.values[b * heads + head],
            [_, 1, heads] => self.values[page * heads + head],
            [_, slots, heads] => self.values[(page * slots + slot) * heads + head],
            _ => 1.0,
        }
    }
}

/// Keys and values of a sequence.
pub(super) fn generate(case: &IndexCase, table: &[i32], b: usize) -> [Rows; 2] {
    let IndexForm { dtype, head_dims, rows: kind } = case.form;
    let (count, heads, HeadDims { qk, v }) = (case.lengths[b].1, case.heads[1], head_dims);
    let seed = case.seed << 8 ^ (2 * b as u64 + 2);
    let mut all = match kind {
        RowKind::Latent | RowKind::LatentCodes => {
            let form = (dtype, head_dims, kind == RowKind::LatentCodes);
            let (bits, numbers) = rows::generate(form, seed, count * heads);
            [Rows { numbers, bits }, Rows::default()]
        }
        RowKind::Plain => [(qk, 0), (v, 1)].map(|(width, salt)| {
            let numbers = normal_rounded(seed ^ salt, count * heads * width, dtype);
            Rows { bits: numbers.iter().map(|&x| encode(dtype, x)).collect(), numbers }
        }),
        RowKind::Codes => [(qk, 0), (v, 1)].map(|(width, which)| {
            let scales = Scales::of(case, which);
            let numbers = normal_rounded(seed ^ which as u64, count * heads * width, dtype);
            let scale = |at: usize| {
                let (key, head) = (at / width / heads, at / width % heads);
                let slot = || case.slot(table, b, key);
                scales.as_ref().map_or(1.0, |scales| scales.get(b, slot(), head))
            };
            let scale: Vec<f32> = (0..numbers.len()).map(scale).collect();
            let codes = numbers.iter().zip(&scale).map(|(&x, scale)| code(DType::E4M3, x / scale));
            let bits: Vec<u32> = codes.collect();
            let stands_for = bits.iter().zip(&scale).map(|(&x, s)| number(DType::E4M3, x) * s);
            Rows { numbers: stands_for.collect(), bits }
        }),
    };
    // A value of one of the first keys and of one of the last ones.
    for key in [1, count.saturating_sub(2)] {
        if !case.nonfinite || key >= count {
            continue;
        }
        let [keys, values] = &mut all;
        let [stored, _] = case.form.stored();
        match kind {
            RowKind::Latent | RowKind::LatentCodes => {
                let bits = &mut keys.bits[key * heads * stored..][..stored];
                let row = &mut keys.numbers[key * heads * qk..][..qk];
                let form = (dtype, head_dims, kind == RowKind::LatentCodes);
                rows::make_nan(form, bits, row, v / 2);
            }
            RowKind::Plain | RowKind::Codes => {
                let at = key * heads * v + v / 2;
                values.numbers[at] = f32::NAN;
                let nan = if kind == RowKind::Codes { 0x7f } else { encode(dtype, f32::NAN) };
                values.bits[at] = nan;
            }
        }
    }
    if case.form.is_latent() {
        let first = all[0].numbers.chunks(qk).flat_map(|row| &row[..v]).copied().collect();
        all[1].numbers = first;
    }
    all
}

/// The bits of this many rows of keys (0) or of values (1) of a form.
pub(super) fn row_bits(form: IndexForm, which: usize, seed: u64, count: usize) -> Vec<u32> {
    let IndexForm { dtype, head_dims, rows: kind } = form;
    let width = form.stored()[which];
    match kind {
        RowKind::LatentCodes => rows::generate((dtype, head_dims, true), seed, count).0,
        RowKind::Plain | RowKind::Latent => {
            let numbers = normal_rounded(seed, count * width, dtype);
            numbers.into_iter().map(|x| encode(dtype, x)).collect()
        }
        RowKind::Codes => {
            let numbers = normal_rounded(seed, count * width, dtype);
            numbers.into_iter().map(|x| code(DType::E4M3, x)).collect()
        }
    }
}
