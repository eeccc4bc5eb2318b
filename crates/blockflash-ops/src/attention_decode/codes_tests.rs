//! Attention to caches of codes, on the CPU: what it is to the numbers that they stand for.

use super::select::is_many;
use super::*;
use crate::Error;
use crate::fixtures::{codes, cpu, f32s, gpus, rounded, values, widened};
use crate::kv_cache::{CacheScale, CacheSizes};
use proptest::prelude::*;

pub(super) const PAGES: usize = 6;
pub(super) const PAGE: usize = 4;
pub(super) const HEADS: usize = 2;
pub(super) const DIM: usize = 8;

/// The shapes of scales of 2 sequences, 6 pages of 4 slots, and 2 heads.
fn shapes() -> impl Strategy<Value = Option<Vec<usize>>> {
    let extent = |n| prop_oneof![Just(1usize), Just(n)];
    prop_oneof![
        Just(None),
        Just(Some(vec![1])),
        (extent(2), extent(HEADS)).prop_map(|(a, b)| Some(vec![a, b])),
        (extent(PAGES), extent(PAGE), extent(HEADS)).prop_map(|(a, b, c)| Some(vec![a, b, c])),
    ]
}

fn scale(shape: &Option<Vec<usize>>, seed: u64) -> Option<Tensor> {
    let shape = shape.as_ref()?;
    let scales: Vec<f32> =
        values(shape.iter().product(), seed).iter().map(|x| 0.1 + x.abs()).collect();
    Some(f32s(&scales, shape))
}

/// What each key of one sequence is multiplied with, by the documented shapes.
fn expected_scale(scale: Option<&Tensor>, at: [usize; 4]) -> f32 {
    let Some(scale) = scale else { return 1.0 };
    let [sequence, page, slot, head] = at;
    let index: &[usize] = match scale.shape().len() {
        1 => &[0],
        2 => &[sequence, head],
        _ => &[page, slot, head],
    };
    let flat = index
        .iter()
        .zip(scale.shape())
        .fold(0, |flat, (&i, &extent)| flat * extent + if extent == 1 { 0 } else { i });
    scale.to_vec::<f32>(&cpu()).unwrap()[flat]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// A cache of codes is the cache of f32 that they stand for, in any layout and of any scales.
    #[test]
    fn codes_stand_for_numbers(
        dtype in prop_oneof![Just(DType::E4M3), Just(DType::E5M2), Just(DType::I8)],
        of_q in prop_oneof![Just(DType::F16), Just(DType::BF16), Just(DType::F32)],
        (of_k, of_v) in (shapes(), shapes()),
        paged: bool,
        softcap: bool,
        seed in 0u64..1000,
    ) {
        let stream = cpu();
        let table = [3i32, 1, 5, 0, 2, 4];
        // Without a table the sequences are the first two pages.
        let pages = if paged { PAGES } else { 2 };
        let fits = |shape: Option<Vec<usize>>| shape.map(|mut shape| {
            if shape.len() == 3 && shape[0] == PAGES {
                shape[0] = pages;
            }
            shape
        });
        let (of_k, of_v) = (fits(of_k), fits(of_v));
        let shape = [pages, PAGE, HEADS, DIM];
        let ((k, mut wide_k), (v, mut wide_v)) =
            (codes(dtype, seed, &shape), codes(dtype, seed + 1, &shape));
        let (k_scale, v_scale) = (scale(&of_k, seed + 2), scale(&of_v, seed + 3));
        let table_of = Tensor::from_slice(&stream, &table, &[2, 3]).unwrap();
        let lengths = Tensor::from_slice(&stream, &[if paged { 11 } else { 4 }, 3], &[2]).unwrap();
        let sequence = |page: usize| match paged {
            true => table.iter().position(|&p| p as usize == page).unwrap() / 3,
            false => page,
        };
        for (wide, scale) in [(&mut wide_k, &k_scale), (&mut wide_v, &v_scale)] {
            for (row, wide) in wide.chunks_mut(DIM).enumerate() {
                let [page, slot, head] = [row / HEADS / PAGE, row / HEADS % PAGE, row % HEADS];
                let scale = expected_scale(scale.as_ref(), [sequence(page), page, slot, head]);
                wide.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let (wide_k, wide_v) = (f32s(&wide_k, &shape), f32s(&wide_v, &shape));
        let q = rounded(of_q, &values(2 * 3 * 4 * DIM, seed + 4), &[2, 3, 4, DIM]);
        let wide_q = f32s(&widened(&q), q.shape());
        let decode = |q| AttentionDecode {
            scores: Scores { softcap: softcap.then_some(5.0), ..Mask::causal().into() },
            ..AttentionDecode::new(q)
        };
        let cache = |k, v| KvCache {
            block_table: paged.then(|| table_of.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCache::new(k, v)
        };
        let coded = KvCache {
            k_scale: k_scale.as_ref().map(Tensor::view),
            v_scale: v_scale.as_ref().map(Tensor::view),
            ..cache(k.view(), v.view())
        };
        let found = decode(q.view()).forward(coded, &stream).unwrap();
        let of = cache(wide_k.view(), wide_v.view());
        let expected = decode(wide_q.view()).forward(of, &stream).unwrap();
        prop_assert_eq!(found.o.dtype(), of_q);
        let expected_o = rounded(of_q, &widened(&expected.o), expected.o.shape());
        prop_assert_eq!(widened(&found.o), widened(&expected_o));
        prop_assert_eq!(widened(&found.lse), widened(&expected.lse));
    }
}

/// A prompt over a cache of codes runs on the kernel for few queries with the most rows, which is
/// one of 8 rows for e5m2, whether the host knows the lengths or not.
#[test]
fn prompts_over_codes_have_the_kernel_with_the_most_rows() {
    for gpu in gpus() {
        let hopper = gpu.compute_capability.major == 9;
        for (head_dim, many) in [(64, 32), (128, if hopper { 32 } else { 16 }), (256, 16)] {
            for seqused_kv in [false, true] {
                let of = |dtype| {
                    let cache = CacheSizes::contiguous(dtype, [1, 16_384], 2, head_dim);
                    let cache = CacheSizes { seqused_kv, ..cache };
                    AttentionDecodeProblem::of(cache, 4096, 8).with_queries(DType::BF16)
                };
                for (dtype, rows) in [(DType::E4M3, many), (DType::I8, many), (DType::E5M2, 8)] {
                    let kernel = select(&of(dtype), &gpu).unwrap();
                    let Some(CacheTile::Few(tile)) = tile(kernel) else { panic!("{}", gpu.name) };
                    assert_eq!((tile.types.kv, tile.rows), (dtype, rows), "{}", gpu.name);
                    plan(kernel, &of(dtype), &gpu).unwrap();
                    // Partial results are not many times as large as the output.
                    let room = workspace_bytes(kernel, &of(dtype), &gpu).unwrap();
                    assert!(room <= 5 * 4096 * 8 * head_dim * 4, "{}: {room}", gpu.name);
                }
                let kernel = select(&of(DType::BF16), &gpu).unwrap();
                assert_eq!(is_many(kernel), hopper, "{}", gpu.name);
                // Nor do 16 bits have the fewest rows where they have no such kernel.
                if let Some(CacheTile::Few(tile)) = tile(kernel) {
                    assert!(tile.rows >= 16, "{}", gpu.name);
                }
            }
        }
    }
}

/// Scales of any value stay within the tensors, and follow IEEE.
#[test]
fn hostile_scales_are_arithmetic() {
    let stream = cpu();
    let (k, _) = codes(DType::I8, 1, &[1, PAGE, 1, DIM]);
    let q = rounded(DType::F16, &values(DIM, 2), &[1, 1, 1, DIM]);
    let out = |k_scale: f32, v_scale: f32| {
        let (k_scale, v_scale) = (f32s(&[k_scale], &[1]), f32s(&[v_scale], &[1]));
        let cache = KvCache {
            k_scale: Some(k_scale.view()),
            v_scale: Some(v_scale.view()),
            ..KvCache::new(k.view(), k.view())
        };
        widened(&AttentionDecode::new(q.view()).forward(cache, &stream).unwrap().o)
    };
    assert_eq!(out(0.5, 0.0), [0.0; DIM]);
    assert_eq!(out(0.5, -2.0), out(0.5, 2.0).iter().map(|x| -x).collect::<Vec<_>>());
    for hostile in [f32::NAN, f32::INFINITY] {
        assert!(out(hostile, 1.0).iter().all(|x| x.is_nan()));
        assert!(out(1.0, hostile).iter().all(|x| !x.is_finite()));
    }
}

#[test]
fn what_does_not_fit_codes_is_named() {
    let stream = cpu();
    let (k, _) = codes(DType::E4M3, 1, &[2, PAGE, HEADS, DIM]);
    let ints = Tensor::zeros(&stream, DType::I32, &[2, 1, 4, DIM]).unwrap();
    let cache = KvCache::new(k.view(), k.view());
    let message = AttentionDecode::new(ints.view()).problem(&cache).unwrap_err().to_string();
    assert_eq!(message, "q is i32, expected f16 or bf16 or f32");
    // Codes are not appended to codes.
    let (new, _) = codes(DType::E4M3, 1, &[2, 1, HEADS, DIM]);
    let append = AppendKv::new(new.view(), new.view());
    let message = append.problem(&cache).unwrap_err().to_string();
    assert_eq!(message, "new.k is e4m3, expected f16 or bf16 or f32");
    // Scales that an append writes are one for each row.
    let new = f32s(&[1.0; 2 * HEADS * DIM], &[2, 1, HEADS, DIM]);
    let (mut k, mut v) = (k.copy_to(&stream).unwrap(), k.copy_to(&stream).unwrap());
    let mut short = f32s(&[1.0; 4], &[2, 1, HEADS]);
    let cache = KvCacheMut {
        v_scale: Some(CacheScale::PerToken(short.view_mut())),
        ..KvCacheMut::new(k.view_mut(), v.view_mut())
    };
    let error = AppendKv::new(new.view(), new.view()).append_into(cache, &stream).unwrap_err();
    assert!(matches!(error, Error::Shape { what: "cache.v_scale", .. }), "{error}");
}
