//! The functions of mistral.rs' paged attention.

use super::blockflash_candle::flash_attn_varlen_paged_windowed_scaled as paged;
use super::blockflash_candle::paged_attn::{
    DEFAULT_FP8_KV_CACHE_SCALES, KvCacheScales, is_flashinfer_cache, paged_decode,
    reshape_and_cache_flashinfer as append,
};
use super::candle_core::{DType, Device, Result, Tensor};
use super::harness::{normal, types};
use blockflash_ops::E4M3;

const PAGES: usize = 5;
const HEADS: usize = 6;
const HEADS_KV: usize = 2;
const SLOTS: usize = 16;
const DIM: usize = 40;
/// The pages of two sequences.
const TABLE: [[u32; 2]; 2] = [[3, 1], [0, 4]];
const SCALES: KvCacheScales = KvCacheScales { k: 0.02, v: 0.5 };

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(numbers(tensor)?.into_iter().map(f32::to_bits).collect())
}

/// The slot of a token of a sequence.
fn slot(sequence: usize, at: usize) -> i64 {
    i64::from(TABLE[sequence][at / SLOTS]) * SLOTS as i64 + (at % SLOTS) as i64
}

/// What is in a cache after an append.
fn expected(before: &[f32], rows: &Tensor, slots: &[i64], scale: Option<f32>) -> Result<Vec<u32>> {
    let (rows, mut cache) = (numbers(rows)?, before.to_vec());
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        let (page, at) = (slot as usize / SLOTS, slot as usize % SLOTS);
        for head in 0..HEADS_KV {
            let row = &rows[(token * HEADS_KV + head) * DIM..][..DIM];
            let to = &mut cache[((page * HEADS_KV + head) * SLOTS + at) * DIM..][..DIM];
            let stored = |&x: &f32| scale.map_or(x, |by| E4M3::saturated(x / by).to_f32());
            to.iter_mut().zip(row).for_each(|(to, x)| *to = stored(x));
        }
    }
    Ok(cache.into_iter().map(f32::to_bits).collect())
}

#[test]
fn rows_go_to_their_slots_and_are_attended_there() -> Result<()> {
    let device = Device::Cpu;
    let new = |shape: &[usize], dtype| normal(shape, dtype);
    for (&dtype, coded) in types(&device).iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        let (of_cache, scales) =
            if coded { (DType::F8E4M3, SCALES) } else { (dtype, DEFAULT_FP8_KV_CACHE_SCALES) };
        let cache = || new(&[PAGES, HEADS_KV, SLOTS, DIM], DType::F32)?.to_dtype(of_cache);
        let (k_cache, v_cache) = (cache()?, cache()?);
        assert!(is_flashinfer_cache(&k_cache, &v_cache));
        // Prompts of 20 and 5 tokens, between them one that goes nowhere; then a token of each.
        let prompt: Vec<i64> = (0..20).map(|at| slot(0, at)).chain([-7]).collect();
        let prompt = [prompt, (0..5).map(|at| slot(1, at)).collect()].concat();
        let steps: [(Vec<i64>, &[usize], [u32; 2]); 2] =
            [(prompt, &[26], [20, 5]), (vec![slot(0, 20), slot(1, 5)], &[2, 1], [21, 6])];
        for (slots, tokens, lengths) in steps {
            let shape = [tokens, &[HEADS_KV, DIM]].concat();
            // Rows of a greater tensor, as one projection gives them.
            let wide = new(&[&shape[..shape.len() - 1], &[2 * DIM]].concat(), dtype)?;
            let key = wide.narrow(shape.len() - 1, DIM, DIM)?;
            let value = new(&shape, dtype)?;
            let before = [numbers(&k_cache)?, numbers(&v_cache)?];
            let mapping = Tensor::new(slots.as_slice(), &device)?;
            append(&key, &value, &k_cache, &v_cache, &mapping, scales)?;
            let given = |scale: f32| coded.then_some(scale);
            let [k_before, v_before] = &before;
            assert_eq!(bits(&k_cache)?, expected(k_before, &key, &slots, given(scales.k))?);
            assert_eq!(bits(&v_cache)?, expected(v_before, &value, &slots, given(scales.v))?);

            let q = new(&[2, HEADS, DIM], dtype)?;
            let (table, [a, b]) = (Tensor::new(&TABLE, &device)?, lengths);
            let lengths = Tensor::new(&lengths, &device)?;
            let (starts, ends) =
                (Tensor::new(&[0u32, 1, 2], &device)?, Tensor::new(&[0, a, a + b], &device)?);
            for (left, cap) in [(None, None), (Some(7), Some(0.0)), (Some(30), Some(5.0))] {
                let o =
                    paged_decode(&q, &k_cache, &v_cache, scales, &table, &lengths, 0.2, left, cap)?;
                let scale = |scale: f32| Tensor::new(&[scale], &device);
                let (k_scale, v_scale) = (scale(scales.k)?, scale(scales.v)?);
                let scales = if coded { [Some(&k_scale), Some(&v_scale)] } else { [None; 2] };
                let (k, v) = (k_cache.transpose(1, 2)?, v_cache.transpose(1, 2)?);
                let right = left.map(|_| 0);
                let same = paged(
                    &q, &k, &v, scales, &starts, &ends, &table, None, 1, 32, 0.2, left, right,
                    SLOTS, cap,
                )?;
                assert_eq!((o.dims(), o.dtype()), (q.dims(), dtype));
                assert_eq!(bits(&o)?, bits(&same)?, "{dtype:?} {coded} {left:?} {cap:?}");
            }
        }
        // Whichever cache is the first one in memory.
        let rows = new(&[1, HEADS_KV, DIM], dtype)?;
        let nowhere = Tensor::new(&[-1i64], &device)?;
        let before = [bits(&k_cache)?, bits(&v_cache)?];
        append(&rows, &rows, &k_cache, &v_cache, &nowhere, scales)?;
        append(&rows, &rows, &v_cache, &k_cache, &nowhere, scales)?;
        assert_eq!([bits(&k_cache)?, bits(&v_cache)?], before);
    }
    Ok(())
}

#[test]
fn wrong_slots_scales_and_caches_are_errors() -> Result<()> {
    let device = &Device::Cpu;
    let cache = || normal(&[PAGES, HEADS_KV, SLOTS, DIM], DType::F32);
    let (k, v) = (cache()?, cache()?);
    let rows = normal(&[2, HEADS_KV, DIM], DType::F32)?;
    let slots = |slots: [i64; 2]| Tensor::new(&slots, device);
    let (good, one) = (slots([3, 4])?, DEFAULT_FP8_KV_CACHE_SCALES);
    let fails = |text: &str, result: Result<()>| {
        let error = result.expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    };
    append(&rows, &rows, &k, &v, &good, one)?;
    let with = |slots: &Tensor, scales| append(&rows, &rows, &k, &v, slots, scales);
    fails("slot 80 for token 1, expected less than 80", with(&slots([79, 80])?, one));
    fails("slot_mapping is i64 [1]", with(&Tensor::new(&[1i64], device)?, one));
    fails("slot_mapping is u32 [2]", with(&Tensor::new(&[1u32, 2], device)?, one));
    fails("scales.k is 0.02, expected 1: the cache is f32", with(&good, SCALES));
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scales = KvCacheScales { v: wrong, ..one };
        fails("expected a finite positive number", with(&good, scales));
    }
    let to = |k: &Tensor, v: &Tensor| append(&rows, &rows, k, v, &good, one);
    fails("value_cache and key_cache share memory", to(&k, &k.transpose(1, 2)?));
    let part = k.get(0)?.transpose(0, 1)?.narrow(0, 0, 2)?;
    fails("key_cache and key share memory", append(&part, &rows, &k, &v, &good, one));
    fails("cache.v is f32, expected f16", to(&k.to_dtype(DType::F16)?, &v));
    fails("new.k", append(&normal(&[2, 3, DIM], DType::F32)?, &rows, &k, &v, &good, one));
    fails("key has 2 dimensions", append(&rows.get(0)?, &rows, &k, &v, &good, one));
    fails("key_cache has 5 pages of 0 slots", to(&k.narrow(2, 0, 0)?, &v.narrow(2, 0, 0)?));
    let q = normal(&[2, HEADS, DIM], DType::F32)?;
    let decode = |lengths: [u32; 2], table: [[u32; 2]; 2], scales| {
        let (table, lengths) = (Tensor::new(&table, device)?, Tensor::new(&lengths, device)?);
        paged_decode(&q, &k, &v, scales, &table, &lengths, 0.2, None, None).map(drop)
    };
    decode([32, 0], TABLE, one)?;
    fails("33 keys of sequence 0, expected 0 to 32", decode([33, 1], TABLE, one));
    fails("page 5 of sequence 0, expected less than 5", decode([17, 1], [[3, 5], [0, 4]], one));
    fails("scales.v is 2", decode([1, 1], TABLE, KvCacheScales { v: 2.0, ..one }));
    assert!(!is_flashinfer_cache(&k, &rows) && !is_flashinfer_cache(&k, &k.transpose(1, 2)?));
    Ok(())
}
