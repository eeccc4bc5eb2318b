//! Rows of a cache: elements, or codes with their scales and elements behind them.

use super::LatentForm;
use crate::number::{decode, encode, normal_rounded, rng};
use blockflash_ops::{DType, KvCache, View};
use rand::Rng;

/// Elements of a row of codes: 512 codes, 4 scales of 128 codes each, and 64 elements of bf16.
const CODES: usize = 512;
const OF_SCALE: usize = 128;
const CODE_ROW: usize = 656;

/// The element type in which rows are stored, and the elements of a row.
pub(crate) fn stored((dtype, head_dims, codes): LatentForm) -> (DType, usize) {
    if codes { (DType::U8, CODE_ROW) } else { (dtype, head_dims.qk) }
}

/// Elements of NaN behind each row of this type: 16 bytes at least.
pub(crate) fn gap(dtype: DType) -> usize {
    if dtype.size() == 1 { 16 } else { 8 }
}

/// The bits of this many rows, and the numbers that they stand for.
pub(crate) fn generate(form: LatentForm, seed: u64, count: usize) -> (Vec<u32>, Vec<f32>) {
    let (dtype, head_dims, codes) = form;
    if !codes {
        let numbers = normal_rounded(seed, count * head_dims.qk, dtype);
        return (numbers.iter().map(|&x| encode(dtype, x)).collect(), numbers);
    }
    let (mut random, mut bits) = (rng(seed), Vec::with_capacity(count * CODE_ROW));
    let turned = normal_rounded(seed, count * (head_dims.qk - CODES), DType::BF16);
    let bytes = |bits: u32, size| (0..size).map(move |at| bits >> (8 * at) & 0xff);
    for turned in turned.chunks(head_dims.qk - CODES) {
        // Any codes but NaN, the root of whose mean square is about 130.
        bits.extend((0..CODES).map(|_| {
            let sign = if random.random() { 0x80 } else { 0 };
            random.random_range(0..0x7fu32) | sign
        }));
        for _ in 0..CODES / OF_SCALE {
            let scale = random.random_range(0.2..3f32) / 130.0;
            bits.extend(bytes(scale.to_bits(), 4));
        }
        bits.extend(turned.iter().flat_map(|&x| bytes(encode(DType::BF16, x), 2)));
    }
    let numbers = bits.chunks(CODE_ROW).flat_map(numbers).collect();
    (bits, numbers)
}

/// What a row of codes stands for.
fn numbers(row: &[u32]) -> Vec<f32> {
    let word = |bytes: &[u32]| bytes.iter().rev().fold(0, |word, byte| word << 8 | byte);
    let (codes, rest) = row.split_at(CODES);
    let (scales, turned) = rest.split_at(CODES / OF_SCALE * 4);
    let scale = |at: usize| f32::from_bits(word(&scales[at / OF_SCALE * 4..][..4]));
    let values = codes.iter().zip(0..).map(|(&code, at)| decode(DType::E4M3, code) * scale(at));
    values.chain(turned.chunks(2).map(|bytes| decode(DType::BF16, word(bytes)))).collect()
}

/// Makes NaN of a value of a row, in the bits or by its scale, and in the numbers.
pub(crate) fn make_nan(form: LatentForm, bits: &mut [u32], row: &mut [f32], column: usize) {
    let (dtype, _, codes) = form;
    match codes {
        false => bits[column] = encode(dtype, f32::NAN),
        true if bits[0].is_multiple_of(2) => bits[column] = 0x7f,
        true => {
            let scale = f32::NAN.to_ne_bytes().map(u32::from);
            bits[CODES + column / OF_SCALE * 4..][..4].copy_from_slice(&scale);
        }
    }
    row[column] = f32::NAN;
    if codes {
        row.copy_from_slice(&numbers(bits));
    }
}

/// A cache of rows behind which there may be gaps.
pub(crate) fn cache<'v>(form: LatentForm, rows: View<'v>) -> blockflash_ops::Result<KvCache<'v>> {
    let (_, head_dims, codes) = form;
    let rows = rows.slice(3, 0..stored(form).1)?;
    if codes { KvCache::latent_codes(rows) } else { KvCache::latent(rows, head_dims.v) }
}
