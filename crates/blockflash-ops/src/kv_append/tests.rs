use super::*;
use crate::{DType, Device, Error, KvCache, RotaryPairs, Tensor, ViewMut};

const SLOTS: usize = 6;

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn f32s(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

fn i32s(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Appends tokens to two sequences of 6 slots, whose rows have one element, and returns the keys.
fn appended(
    lengths: &[i32; 2],
    new: &Tensor,
    packed: Option<PackedTokens<'_>>,
) -> Result<Vec<f32>> {
    let mut keys = vec![0f32; 2 * SLOTS];
    let mut values = keys.clone();
    let lengths = i32s(lengths, &[2]);
    let shape = [2, SLOTS, 1, 1];
    let cache = KvCacheMut {
        seqused_kv: Some(lengths.view()),
        ..KvCacheMut::new(
            ViewMut::from_slice(&mut keys, &shape)?,
            ViewMut::from_slice(&mut values, &shape)?,
        )
    };
    AppendKv { packed, ..AppendKv::new(new.view(), new.view()) }.append_into(cache, &cpu())?;
    assert_eq!(keys, values);
    Ok(keys)
}

#[test]
fn the_last_keys_are_the_new_ones() {
    let new = f32s(&[1.0, 2.0, 3.0, 4.0], &[2, 2, 1, 1]);
    let found = |lengths: &[i32; 2]| appended(lengths, &new, None).unwrap();
    assert_eq!(found(&[2, 5]), [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 4.0, 0.0]);
    // Before the first slot and beyond the last one there is nothing to write to.
    assert_eq!(found(&[1, 7]), [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]);
    for lengths in [[0, 8], [-1, i32::MAX], [i32::MIN, 100]] {
        assert_eq!(found(&lengths), [0.0; 12], "{lengths:?}");
    }
}

#[test]
fn packed_tokens() {
    let new = f32s(&[1.0, 2.0, 3.0, 4.0, 5.0], &[5, 1, 1]);
    let run = |offsets: &[i32; 3], lengths| {
        let offsets = i32s(offsets, &[3]);
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 4 });
        appended(lengths, &new, packed)
    };
    let expected = [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(run(&[0, 3, 4], &[6, 1]).unwrap(), expected);
    assert_eq!(run(&[0, 0, 0], &[6, 1]).unwrap(), [0.0; 12]);
    for offsets in [[0, 5, 5], [1, 2, 3], [0, 3, 2], [0, 3, 6]] {
        let error = run(&offsets, &[6, 6]).unwrap_err();
        assert!(matches!(error, Error::InvalidCuSeqlens { .. }), "{error}");
    }
}

#[test]
fn pages_that_do_not_exist_are_the_first_and_the_last() {
    let (mut k, mut v) = (f32s(&[0.0; 6], &[3, 2, 1, 1]), f32s(&[0.0; 6], &[3, 2, 1, 1]));
    let (table, lengths) = (i32s(&[i32::MIN, 3, 1, i32::MAX], &[2, 2]), i32s(&[4, 3], &[2]));
    let new = f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3, 1, 1]);
    let cache = KvCacheMut {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCacheMut::new(k.view_mut(), v.view_mut())
    };
    AppendKv::new(new.view(), new.view()).append_into(cache, &cpu()).unwrap();
    // Sequence 0 fills its slots 1 to 3 of pages 0 and 2, then sequence 1 its slots 0 to 2.
    assert_eq!(k.to_vec::<f32>(&cpu()).unwrap(), [0.0, 1.0, 4.0, 5.0, 6.0, 3.0]);
}

#[test]
fn keys_are_turned_by_their_positions() {
    // One full turn in four positions, of the first two or three of four elements.
    let (cos, sin) = (f32s(&[1.0, 0.0, -1.0, 0.0], &[4, 1]), f32s(&[0.0, 1.0, 0.0, -1.0], &[4, 1]));
    let new = f32s(&[1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0], &[1, 2, 1, 4]);
    let lengths = i32s(&[4], &[1]);
    for (pairs, expected) in [
        (RotaryPairs::Interleaved, [-1.0, -2.0, 3.0, 4.0, 2.0, -1.0, 3.0, 4.0]),
        (RotaryPairs::Halves, [-1.0, -2.0, 3.0, 4.0, 2.0, -1.0, 3.0, 4.0]),
    ] {
        let (mut k, mut v) = (f32s(&[0.0; 16], &[1, 4, 1, 4]), f32s(&[0.0; 16], &[1, 4, 1, 4]));
        let cache = KvCacheMut {
            seqused_kv: Some(lengths.view()),
            ..KvCacheMut::new(k.view_mut(), v.view_mut())
        };
        let rotary = Some(Rotary { cos: cos.view(), sin: sin.view(), pairs });
        let append = AppendKv { rotary, ..AppendKv::new(new.view(), new.view()) };
        append.append_into(cache, &cpu()).unwrap();
        assert_eq!(k.to_vec::<f32>(&cpu()).unwrap()[8..], expected, "{pairs:?}");
        assert_eq!(v.to_vec::<f32>(&cpu()).unwrap()[8..], new.to_vec::<f32>(&cpu()).unwrap());
    }
}

#[test]
fn wrong_tokens_are_named() {
    let k = f32s(&[0.0; 48], &[2, 3, 2, 4]);
    let cache = KvCache::new(k.view(), k.view());
    for (shape, what) in [
        (&[1, 2, 2, 4][..], "expected [2, tokens, 2, 4]"),
        (&[2, 2, 1, 4], "expected [2, tokens, 2, 4]"),
        (&[2, 2, 2, 5], "expected [2, tokens, 2, 4]"),
        (&[2, 2, 4], "[batch, seqlen, num_heads, head_dim]"),
    ] {
        let new = Tensor::zeros(&cpu(), DType::F32, shape).unwrap();
        let message =
            AppendKv::new(new.view(), new.view()).problem(&cache).unwrap_err().to_string();
        assert!(message.contains("new.k") && message.contains(what), "{message}");
    }
    let (good, short) = (f32s(&[0.0; 32], &[2, 2, 2, 4]), f32s(&[0.0; 16], &[2, 1, 2, 4]));
    let message = |op: AppendKv<'_>| op.problem(&cache).unwrap_err().to_string();
    assert!(message(AppendKv::new(good.view(), short.view())).contains("new.v"));
    let halves = Tensor::zeros(&cpu(), DType::F16, &[2, 2, 2, 4]).unwrap();
    assert!(message(AppendKv::new(halves.view(), halves.view())).contains("new.k is f16"));
    let offsets = i32s(&[0; 4], &[4]);
    let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 1 });
    let rows = f32s(&[0.0; 24], &[3, 2, 4]);
    let op = AppendKv { packed, ..AppendKv::new(rows.view(), rows.view()) };
    assert!(message(op).contains("of 2 sequences"));
    let op = AppendKv { packed, ..AppendKv::new(good.view(), good.view()) };
    assert!(message(op).contains("[total, num_heads, head_dim]"));
}

/// On each GPU there is a kernel, planned within its checks, for what attention over a cache takes.
#[test]
fn gpus_have_kernels() {
    use crate::fixtures::gpus;
    use crate::kv_cache::{CacheSizes, TableSizes};
    let of = |dtype, head_dim| {
        let cache = CacheSizes::contiguous(dtype, [3, 1000], 2, head_dim);
        let new =
            crate::attention::Strides { batch: 8 * head_dim, seq: 2 * head_dim, head: head_dim };
        AppendKvProblem { tokens: 4, k: new, v: new, ..AppendKvProblem::nothing(cache, dtype) }
    };
    for gpu in gpus() {
        for (head_dim, dtype) in [(8, DType::F16), (72, DType::BF16), (512, DType::BF16)] {
            let problem = of(dtype, head_dim);
            let kernel = select(&problem, &gpu).unwrap();
            let AppendKvPlan { plan, config } = plan(kernel, &problem, &gpu).unwrap();
            assert_eq!(config.grid[0] as usize, (3 * 4 * 2 * head_dim / 8).div_ceil(256));
            assert_eq!(config.programmatic_dependent_launch, kernel.waits_for_predecessor());
            assert_eq!((plan.longest[0], plan.capacity), (4, 1000));
            assert_eq!(select_for(kernel.target, &problem, &gpu).unwrap(), kernel);
        }
        let message = |problem: &AppendKvProblem| select(problem, &gpu).unwrap_err().to_string();
        assert!(message(&of(DType::F32, 64)).contains("f32"));
        assert!(message(&of(DType::F16, 60)).contains("multiples of 8"));
        let mut paged = of(DType::F16, 64);
        paged.cache.table = Some(TableSizes { max_pages: 2, stride: 2 });
        assert!(message(&paged).contains("multiple of 16"));
        let mut odd = of(DType::F16, 64);
        odd.k.seq += 4;
        let error = plan(select(&odd, &gpu).unwrap(), &odd, &gpu).unwrap_err();
        assert!(matches!(error, Error::Misaligned { what: "new.k", .. }), "{error}");
    }
}

/// Caches of codes, which have one kernel for all types.
#[test]
fn gpus_have_kernels_for_codes() {
    use crate::fixtures::gpus;
    use crate::kv_cache::CacheSizes;
    let of = |codes, dtype, head_dim| {
        let cache = CacheSizes::contiguous(codes, [3, 1000], 2, head_dim);
        let new =
            crate::attention::Strides { batch: 8 * head_dim, seq: 2 * head_dim, head: head_dim };
        AppendKvProblem { tokens: 4, k: new, v: new, ..AppendKvProblem::nothing(cache, dtype) }
    };
    for gpu in gpus() {
        for (codes, dtype, head_dim, lanes) in [
            (DType::E4M3, DType::F16, 16, 2),
            (DType::E5M2, DType::BF16, 80, 16),
            (DType::I8, DType::BF16, 128, 16),
            (DType::I8, DType::F16, 528, 32),
        ] {
            let problem = of(codes, dtype, head_dim);
            let kernel = select(&problem, &gpu).unwrap();
            let AppendKvPlan { config, .. } = plan(kernel, &problem, &gpu).unwrap();
            assert_eq!(config.grid[0] as usize, (3 * 4 * 2 * lanes as usize).div_ceil(256));
            assert_eq!(select_for(kernel.target, &problem, &gpu).unwrap(), kernel);
            let plain = of(dtype, dtype, head_dim);
            let message = accepts(kernel, &plain, &gpu).unwrap_err().to_string();
            assert!(message.contains("codes of f16 and bf16"), "{message}");
            let message = accepts(select(&plain, &gpu).unwrap(), &problem, &gpu).unwrap_err();
            assert!(message.to_string().contains(&format!("the cache is {codes}")), "{message}");
        }
        let message = |problem: &AppendKvProblem| select(problem, &gpu).unwrap_err().to_string();
        let found = message(&of(DType::E4M3, DType::F32, 64));
        assert!(found.contains("new keys are f32 and the cache is e4m3"), "{found}");
        let found = message(&of(DType::I8, DType::F16, 72));
        assert!(found.contains("head_dim 72: kernels take multiples of 16"), "{found}");
        let mut odd = of(DType::I8, DType::F16, 64);
        odd.cache.v.seq += 8;
        let error = plan(select(&odd, &gpu).unwrap(), &odd, &gpu).unwrap_err();
        assert!(matches!(error, Error::Misaligned { what: "cache.v", .. }), "{error}");
    }
}
