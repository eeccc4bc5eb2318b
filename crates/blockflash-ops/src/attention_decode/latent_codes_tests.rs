//! Caches of latent rows of codes, against the numbers that they stand for.

use super::*;
use crate::fixtures::{cpu, f32s, values, widened};
use crate::{AppendLatentCodes, LatentCodesMut};
use blockflash_safe::E4M3;
use half::bf16;

const PAGES: usize = 7;
const SLOTS: usize = 4;
/// Pages that do not exist count as the first and the last one.
const TABLE: [i32; 12] = [3, 0, -1, 6, 2, 1, i32::MAX, i32::MIN, 5, 1, 4, 5];
const LENGTHS: [i32; 4] = [5, 12, -3, i32::MAX];

fn ints(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Rows of codes, and what they stand for: keys of 576 and values of 512 elements.
fn rows(pages: usize, slots: usize) -> (Vec<u8>, [Vec<f32>; 2]) {
    let count = pages * slots;
    let (codes, turned) = (values(count * 512, 3), values(count * 64, 4));
    let (mut bytes, mut keys, mut of_values) = (vec![], vec![], vec![]);
    for (row, (codes, turned)) in codes.chunks(512).zip(turned.chunks(64)).enumerate() {
        let scales = [0.5, 3.0, 1e-3, 7.0].map(|scale| scale * (row % 5 + 1) as f32);
        let codes: Vec<_> = codes.iter().map(|&x| E4M3::from_f32(x * 10.0)).collect();
        let numbers = codes.iter().zip(0..).map(|(code, i)| code.to_f32() * scales[i / 128]);
        let numbers: Vec<f32> = numbers.collect();
        let turned: Vec<_> = turned.iter().map(|&x| bf16::from_f32(x)).collect();
        bytes.extend(codes.iter().map(|code| code.0));
        bytes.extend(scales.iter().flat_map(|scale| scale.to_ne_bytes()));
        bytes.extend(turned.iter().flat_map(|x| x.to_ne_bytes()));
        keys.extend(&numbers);
        keys.extend(turned.iter().map(|x| x.to_f32()));
        of_values.extend(numbers);
    }
    (bytes, [keys, of_values])
}

fn bytes(rows: &[u8], shape: [usize; 2]) -> Tensor {
    let [pages, slots] = shape;
    Tensor::from_slice(&cpu(), rows, &[pages, slots, 1, 656]).unwrap()
}

#[test]
fn rows_of_codes_are_what_they_stand_for() {
    let (stored, [keys, of_values]) = rows(PAGES, SLOTS);
    let stored = bytes(&stored, [PAGES, SLOTS]);
    let (k, v) = (f32s(&keys, &[PAGES, SLOTS, 1, 576]), f32s(&of_values, &[PAGES, SLOTS, 1, 512]));
    let (table, lengths) = (ints(&TABLE, &[4, 3]), ints(&LENGTHS, &[4]));
    let paged = |cache| KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..cache
    };
    for (queries, mask) in [(1, Mask::Full), (3, Mask::causal())] {
        let q = values(4 * queries * 6 * 576, 6);
        let scores = Scores { softmax_scale: Some(0.01), ..mask.into() };
        let exact = f32s(&q, &[4, queries, 6, 576]);
        let decode = AttentionDecode { scores, ..AttentionDecode::new(exact.view()) };
        let output =
            decode.forward(paged(KvCache::latent_codes(stored.view()).unwrap()), &cpu()).unwrap();
        let expected = decode.forward(paged(KvCache::new(k.view(), v.view())), &cpu()).unwrap();
        assert_eq!(output.o.shape(), [4, queries, 6, 512]);
        assert_eq!(widened(&output.o), widened(&expected.o));
        assert_eq!(widened(&output.lse), widened(&expected.lse));
        // Queries in bf16 give the same, rounded.
        let rounded: Vec<_> = q.iter().map(|&x| bf16::from_f32(x)).collect();
        let rounded = Tensor::from_slice(&cpu(), &rounded, &[4, queries, 6, 576]).unwrap();
        let exact = f32s(&widened(&rounded), &[4, queries, 6, 576]);
        let of = |q: &Tensor| {
            let decode = AttentionDecode { scores, ..AttentionDecode::new(q.view()) };
            let cache = KvCache::latent_codes(stored.view()).unwrap();
            decode.forward(paged(cache), &cpu()).unwrap()
        };
        let (output, expected) = (of(&rounded), of(&exact));
        assert_eq!(output.o.dtype(), DType::BF16);
        let expected: Vec<_> =
            widened(&expected.o).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!(widened(&output.o), expected);
    }
}

#[test]
fn contiguous_rows_without_lengths() {
    let (stored, [keys, of_values]) = rows(2, 9);
    let stored = bytes(&stored, [2, 9]);
    let (k, v) = (f32s(&keys, &[2, 9, 1, 576]), f32s(&of_values, &[2, 9, 1, 512]));
    let q = f32s(&values(2 * 2 * 576, 6), &[2, 2, 1, 576]);
    let decode = AttentionDecode::new(q.view());
    let output = decode.forward(KvCache::latent_codes(stored.view()).unwrap(), &cpu()).unwrap();
    let expected = decode.forward(KvCache::new(k.view(), v.view()), &cpu()).unwrap();
    assert_eq!(widened(&output.o), widened(&expected.o));
}

/// The row that an append stores, by its definition.
fn stored(values: &[bf16], turned: &[bf16]) -> Vec<u8> {
    let (mut codes, mut scales) = (vec![], vec![]);
    for group in values.chunks(128) {
        let most = group.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        let scale = if most == 0.0 { 1.0 } else { most / 448.0 };
        codes.extend(group.iter().map(|x| E4M3::saturated(x.to_f32() / scale).0));
        scales.extend(scale.to_ne_bytes());
    }
    codes.extend(scales);
    codes.extend(turned.iter().flat_map(|x| x.to_ne_bytes()));
    codes
}

#[test]
fn appends_choose_the_scales_of_groups() {
    let rounded = |count, seed| -> Vec<bf16> {
        values(count, seed).iter().map(|&x| bf16::from_f32(x)).collect()
    };
    let (mut new, turned) = (rounded(6 * 512, 8), rounded(6 * 64, 9));
    new[128..256].fill(bf16::ZERO);
    new[700] = bf16::NAN;
    let (table, lengths) = (ints(&TABLE, &[4, 3]), ints(&[3, 13, 0, 1], &[4]));
    let offsets = ints(&[0, 2, 4, 4, 6], &[5]);
    let (values, rotary) = (
        Tensor::from_slice(&cpu(), &new, &[6, 1, 512]).unwrap(),
        Tensor::from_slice(&cpu(), &turned, &[6, 1, 64]).unwrap(),
    );
    let mut found =
        Tensor::from_slice(&cpu(), &vec![7u8; PAGES * SLOTS * 656], &[PAGES, SLOTS, 1, 656])
            .unwrap();
    let mut expected = vec![7u8; PAGES * SLOTS * 656];
    // Two tokens of sequence 0 at 1 and 2; of sequence 1 at 11, and one beyond the capacity; of
    // sequence 3 at 0, and one before it.
    for (token, [page, slot]) in [(0, [3, 1]), (1, [3, 2]), (2, [1, 3]), (5, [1, 0])] {
        let row = stored(&new[token * 512..][..512], &turned[token * 64..][..64]);
        expected[(page * SLOTS + slot) * 656..][..656].copy_from_slice(&row);
    }
    let cache = LatentCodesMut {
        rows: found.view_mut(),
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
    };
    let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 2 });
    let append =
        AppendLatentCodes { packed, ..AppendLatentCodes::new(values.view(), rotary.view()) };
    append.append_into(cache, &cpu()).unwrap();
    assert_eq!(found.to_vec::<u8>(&cpu()).unwrap(), expected);
}

#[test]
fn other_rows_are_refused() {
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
    let told = |error: crate::Error| error.to_string();
    let narrow = zeros(DType::U8, &[2, 4, 1, 640]);
    let found = told(KvCache::latent_codes(narrow.view()).unwrap_err());
    assert_eq!(found, "cache.k has shape [2, 4, 1, 640], expected [pages, page_size, 1, 656]");
    let codes = zeros(DType::E4M3, &[2, 4, 1, 656]);
    let found = told(KvCache::latent_codes(codes.view()).unwrap_err());
    assert_eq!(found, "cache.k is e4m3, expected u8");
    let mut rows = zeros(DType::U8, &[2, 4, 1, 656]);
    let other = zeros(DType::U8, &[2, 4, 1, 656]);
    let found = told(KvCache::new(rows.view(), other.view()).sizes().unwrap_err());
    assert!(found.contains("the rows of codes of cache.k themselves"), "{found}");
    let found = told(KvCache::new(narrow.view(), narrow.view()).sizes().unwrap_err());
    assert!(found.starts_with("cache.k is u8, expected f16 or bf16"), "{found}");
    let scale = f32s(&[1.0], &[1]);
    let cache = KvCache::latent_codes(rows.view()).unwrap();
    let scaled = KvCache { k_scale: Some(scale.view()), ..cache };
    assert!(told(scaled.sizes().unwrap_err()).contains("since cache.k_scale is given"));
    let q = zeros(DType::BF16, &[2, 1, 4, 512]);
    let found = told(AttentionDecode::new(q.view()).problem(&cache).unwrap_err());
    assert!(found.starts_with("q has shape [2, 1, 4, 512], expected"), "{found}");
    let new = zeros(DType::BF16, &[2, 1, 1, 576]);
    let found = told(AppendKv::latent(new.view()).problem(&cache).unwrap_err());
    assert!(found.contains("AppendLatentCodes"), "{found}");
    let (values, turned) =
        (zeros(DType::BF16, &[2, 1, 1, 512]), zeros(DType::BF16, &[2, 1, 1, 64]));
    let (two, half) = (zeros(DType::BF16, &[2, 2, 1, 64]), zeros(DType::F16, &[2, 1, 1, 512]));
    let mut append = |values: &Tensor, rotary: &Tensor| {
        let cache = LatentCodesMut { rows: rows.view_mut(), block_table: None, seqused_kv: None };
        let append = AppendLatentCodes::new(values.view(), rotary.view());
        append.append_into(cache, &cpu()).map_err(told)
    };
    append(&values, &turned).unwrap();
    assert_eq!(append(&half, &turned).unwrap_err(), "new.v is f16, expected bf16");
    let found = append(&turned, &turned).unwrap_err();
    assert_eq!(found, "new.v has shape [2, 1, 1, 64], expected [2, tokens, 1, 512]");
    let found = append(&values, &two).unwrap_err();
    assert_eq!(found, "new.k has shape [2, 2, 1, 64], expected [2, 1, 1, 64]");
}
