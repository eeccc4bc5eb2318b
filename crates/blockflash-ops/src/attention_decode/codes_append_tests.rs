//! Appends to caches of codes, on the CPU, and the verification of scales.

use super::codes_tests::{DIM, HEADS, PAGE, PAGES};
use super::*;
use crate::Error;
use crate::fixtures::{codes, cpu, f32s, rounded, values, widened};
use crate::kv_cache::{CacheScale, RotaryPairs};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// What an append stores is within half a step of what it was given.
    #[test]
    fn appended_codes_are_near(
        dtype in prop_oneof![Just(DType::E4M3), Just(DType::E5M2), Just(DType::I8)],
        of_new in prop_oneof![Just(DType::F16), Just(DType::BF16), Just(DType::F32)],
        per_token: bool,
        turned: bool,
        seed in 0u64..1000,
    ) {
        let stream = cpu();
        let lengths = Tensor::from_slice(&stream, &[7, 12], &[2]).unwrap();
        let table = Tensor::from_slice(&stream, &[3, 1, 5, 0, 2, 4], &[2, 3]).unwrap();
        let new = rounded(of_new, &values(2 * 3 * HEADS * DIM, seed), &[2, 3, HEADS, DIM]);
        let shape = [PAGES, PAGE, HEADS, DIM];
        let [mut k, mut v] = [0, 1].map(|_| Tensor::zeros(&stream, dtype, &shape).unwrap());
        // Without scales of its own a row of numbers up to 1 needs one for i8.
        let given = f32s(&[if dtype == DType::I8 { 1.0 / 32.0 } else { 0.5 }], &[1]);
        let [mut own_k, mut own_v] = [0, 1].map(|_| f32s(&[-1.0; 48], &[PAGES, PAGE, HEADS]));
        let angles: Vec<f32> = (0..12 * 4).map(|i| i as f32 * 0.37).collect();
        let cos = f32s(&angles.iter().map(|x| x.cos()).collect::<Vec<_>>(), &[12, 4]);
        let sin = f32s(&angles.iter().map(|x| x.sin()).collect::<Vec<_>>(), &[12, 4]);
        let pairs = RotaryPairs::Halves;
        let rotary = turned.then(|| Rotary { cos: cos.view(), sin: sin.view(), pairs });
        let scale = |own| Some(match own {
            Some(own) => CacheScale::PerToken(own),
            None => CacheScale::Given(given.view()),
        });
        let cache = KvCacheMut {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            k_scale: scale(per_token.then(|| own_k.view_mut())),
            v_scale: scale(per_token.then(|| own_v.view_mut())),
            ..KvCacheMut::new(k.view_mut(), v.view_mut())
        };
        let append = AppendKv { rotary, ..AppendKv::new(new.view(), new.view()) };
        append.append_into(cache, &stream).unwrap();

        // The same rows in a cache of f32.
        let wide = f32s(&widened(&new), new.shape());
        let [mut wide_k, mut wide_v] =
            [0, 1].map(|_| Tensor::zeros(&stream, DType::F32, &shape).unwrap());
        let plain = KvCacheMut {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCacheMut::new(wide_k.view_mut(), wide_v.view_mut())
        };
        let append = AppendKv { rotary, ..AppendKv::new(wide.view(), wide.view()) };
        append.append_into(plain, &stream).unwrap();
        for (coded, own, wide) in [(&k, &own_k, &wide_k), (&v, &own_v, &wide_v)] {
            let (codes, wide) = (widened(coded), widened(wide));
            let own = widened(own);
            for (row, (codes, wide)) in codes.chunks(DIM).zip(wide.chunks(DIM)).enumerate() {
                if wide.iter().all(|&x| x == 0.0) {
                    prop_assert_eq!(own[row], -1.0);
                    continue;
                }
                let most = wide.iter().fold(0f32, |most, x| most.max(x.abs()));
                let greatest = match dtype {
                    DType::E4M3 => 448.0,
                    DType::E5M2 => 57344.0,
                    _ => 127.0,
                };
                let scale = if per_token { own[row] } else { widened(&given)[0] };
                if per_token {
                    prop_assert_eq!(scale, most / greatest);
                }
                for (&code, &x) in codes.iter().zip(wide) {
                    // Half of the last place, and of the smallest step.
                    let (relative, step) = match dtype {
                        DType::E4M3 => (1.0 / 16.0, 1.0 / 512.0),
                        DType::E5M2 => (1.0 / 8.0, 1.0 / 65536.0),
                        _ => (0.0, 1.0),
                    };
                    let bound = (x.abs() * relative).max(scale * step / 2.0) * 1.0001;
                    prop_assert!((code * scale - x).abs() <= bound, "{} of {x}", code * scale);
                }
            }
        }
    }
}

/// Codes, and scales that are left, of one row of one head.
fn stored(dtype: DType, row: &[f32], scale: Option<f32>) -> (Vec<f32>, f32) {
    let stream = cpu();
    let new = f32s(row, &[1, 1, 1, row.len()]);
    let [mut k, mut v] =
        [0, 1].map(|_| Tensor::zeros(&stream, dtype, &[1, 1, 1, row.len()]).unwrap());
    let mut own = f32s(&[scale.unwrap_or(-1.0)], &[1, 1, 1]);
    let given = own.copy_to(&stream).unwrap();
    let cache = KvCacheMut {
        k_scale: Some(match scale {
            Some(_) => CacheScale::Given(given.view()),
            None => CacheScale::PerToken(own.view_mut()),
        }),
        ..KvCacheMut::new(k.view_mut(), v.view_mut())
    };
    AppendKv::new(new.view(), new.view()).append_into(cache, &stream).unwrap();
    (widened(&k), widened(&own)[0])
}

#[test]
fn rows_that_have_no_code_saturate() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let (codes, _) = stored(DType::E4M3, &[1e9, -1e9, infinity, 3.0, nan], Some(2.0));
    assert_eq!(codes[..4], [448.0, -448.0, 448.0, 1.5]);
    assert!(codes[4].is_nan());
    let (codes, _) = stored(DType::E5M2, &[1e9, -infinity, nan], Some(2.0));
    assert_eq!(codes[..2], [57344.0, -57344.0]);
    assert!(codes[2].is_nan());
    let (codes, _) = stored(DType::I8, &[1e9, -1e9, infinity, 3.0, 5.0, nan], Some(2.0));
    assert_eq!(codes, [127.0, -127.0, 127.0, 2.0, 2.0, 0.0]);
    // A scale of 0 is that of IEEE, too.
    let (codes, _) = stored(DType::I8, &[1.0, -1.0, 0.0], Some(0.0));
    assert_eq!(codes, [127.0, -127.0, 0.0]);
    // Rows of zeros have a scale of 1, and so have those whose scale would be 0.
    for row in [[0.0, -0.0], [1e-45, 0.0]] {
        assert_eq!(stored(DType::E4M3, &row, None).1, 1.0);
    }
    let (codes, scale) = stored(DType::I8, &[nan, -254.0, 3.0], None);
    assert_eq!((&codes[..], scale), (&[0.0, -127.0, 2.0][..], 2.0));
}

/// An append that attends finds the codes that it stored, with their scales.
#[test]
fn appended_codes_are_read_at_once() {
    let stream = cpu();
    let lengths = Tensor::from_slice(&stream, &[3, 4], &[2]).unwrap();
    let (k, _) = codes(DType::E4M3, 1, &[2, PAGE, HEADS, DIM]);
    let new = rounded(DType::BF16, &values(2 * 2 * HEADS * DIM, 5), &[2, 2, HEADS, DIM]);
    let q = rounded(DType::BF16, &values(2 * 2 * 4 * DIM, 6), &[2, 2, 4, DIM]);
    let decode =
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(q.view()) };
    let [mut a, mut b] = [0, 1].map(|_| k.copy_to(&stream).unwrap());
    let [mut k_scale, mut v_scale] = [0, 1].map(|_| f32s(&[0.5; 16], &[2, PAGE, HEADS]));
    let cache = KvCacheMut {
        seqused_kv: Some(lengths.view()),
        k_scale: Some(CacheScale::PerToken(k_scale.view_mut())),
        v_scale: Some(CacheScale::PerToken(v_scale.view_mut())),
        ..KvCacheMut::new(a.view_mut(), b.view_mut())
    };
    let append = AppendKv::new(new.view(), new.view());
    let found = decode.append(&append, cache, &stream).unwrap();
    let after = KvCache {
        seqused_kv: Some(lengths.view()),
        k_scale: Some(k_scale.view()),
        v_scale: Some(v_scale.view()),
        ..KvCache::new(a.view(), b.view())
    };
    let again = decode.forward(after, &stream).unwrap();
    assert_eq!(widened(&found.o), widened(&again.o));
    assert!(widened(&k_scale).iter().any(|&scale| scale != 0.5));
}

#[test]
fn scales_of_keys_are_verified() {
    let stream = cpu();
    let [(mut k, _), (mut v, _)] =
        [1, 2].map(|seed| codes(DType::E4M3, seed, &[2, PAGE, HEADS, DIM]));
    let q = rounded(DType::F16, &values(2 * 4 * DIM, 3), &[2, 1, 4, DIM]);
    let new = rounded(DType::F16, &values(2 * HEADS * DIM, 4), &[2, 1, HEADS, DIM]);
    let lengths = Tensor::from_slice(&stream, &[2, 3], &[2]).unwrap();
    let mut o = Tensor::zeros(&stream, DType::F16, q.shape()).unwrap();
    let decode = AttentionDecode::new(q.view());
    // Of sequence 1, slots 0 to 2 are used, the last one by a new token.
    for (slot, reads, gives, chooses) in
        [(0, false, false, false), (2, false, false, true), (3, true, true, true)]
    {
        for bad in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            let mut scales = [1f32; 2 * PAGE * HEADS];
            scales[(PAGE + slot) * HEADS + 1] = bad;
            let mut scale = f32s(&scales, &[2, PAGE, HEADS]);
            let given = f32s(&scales, &[2, PAGE, HEADS]);
            let is_right = |result: Result<()>, expected: bool| match result {
                Ok(()) => assert!(expected, "{slot} {bad}"),
                Err(error) => {
                    let named = matches!(error, Error::InvalidScale { what: "cache.v_scale", .. });
                    assert!(named && !expected, "{error}");
                }
            };
            let cache = KvCache {
                seqused_kv: Some(lengths.view()),
                v_scale: Some(given.view()),
                ..KvCache::new(k.view(), v.view())
            };
            let cache = CacheAccess::Read(cache);
            let out = AttentionDecodeOperands { cache, o: o.view_mut(), lse: None };
            is_right(decode.check(&out, &stream), reads);
            let append = AppendKv::new(new.view(), new.view());
            let mut is_right_for = |v_scale, expected| {
                let cache = KvCacheMut {
                    seqused_kv: Some(lengths.view()),
                    v_scale: Some(v_scale),
                    ..KvCacheMut::new(k.view_mut(), v.view_mut())
                };
                is_right(append.check(&cache, &stream), expected);
            };
            is_right_for(CacheScale::Given(given.view()), gives);
            is_right_for(CacheScale::PerToken(scale.view_mut()), chooses);
        }
    }
}
