//! Caches of 8 bits: attention to them is that to what codes times their scales are.

use super::blockflash_candle::{
    Attention, KvCache, Mask, Scales, flash_attn_varlen_paged_windowed_scaled as paged,
};
use super::candle_core::{DType, Device, Result, Tensor, Var};
use super::harness::{normal, types};
use blockflash_ops::E4M3;

const BATCH: usize = 2;
const CAPACITY: usize = 24;
const HEADS: usize = 6;
const HEADS_KV: usize = 2;
const DIM: usize = 40;

fn ones(shape: &[usize]) -> Result<Tensor> {
    Tensor::ones(shape, DType::F32, &Device::Cpu)
}

/// Numbers from 0.01 to 0.02, as scales.
fn scales(shape: &[usize]) -> Result<Tensor> {
    (Tensor::rand(0f32, 1., shape, &Device::Cpu)? * 0.01)? + 0.01
}

/// Scales of keys and of values.
fn pair(shape: &[usize]) -> Result<[Tensor; 2]> {
    Ok([scales(shape)?, scales(shape)?])
}

/// What rows `[batch, tokens, heads, dim]` are in a cache, f32, with scales that are broadcast, or
/// those by which the greatest magnitude of a row becomes 448.
fn rounded(rows: &Tensor, scale: Option<&Tensor>) -> Result<Tensor> {
    let rows = rows.to_dtype(DType::F32)?;
    let scale = match scale {
        Some(scale) => scale.clone(),
        None => {
            let chosen =
                rows.abs()?.max_keepdim(3)?.broadcast_div(&Tensor::new(448f32, &Device::Cpu)?)?;
            chosen.eq(0f32)?.where_cond(&chosen.ones_like()?, &chosen)?
        }
    };
    let scale = scale.broadcast_as(rows.shape())?;
    let numbers = (&rows / &scale)?.flatten_all()?.to_vec1::<f32>()?;
    let numbers = numbers.iter().map(|&x| E4M3::saturated(x).to_f32()).collect();
    Tensor::from_vec(numbers, rows.shape(), &Device::Cpu)? * scale
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    let numbers = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(numbers.into_iter().map(f32::to_bits).collect())
}

/// Attention over codes is that over what they stand for.
#[test]
fn codes_without_a_cache() -> Result<()> {
    let rows = |heads| normal(&[BATCH, CAPACITY, heads, DIM], DType::F32);
    let [q, k, v] =
        [rows(HEADS)?, rows(HEADS_KV)?, rows(HEADS_KV)?].map(|x| x.to_dtype(DType::F8E4M3));
    let (q, k, v) = (q?, k?, v?);
    let scales = [scales(&[BATCH, HEADS])?, scales(&[BATCH, 1])?, scales(&[1])?];
    let [of_q, of_k, of_v] = &scales;
    let wide = |codes: &Tensor, scale: &Tensor| -> Result<Tensor> {
        let scale = if scale.rank() == 1 { scale.reshape((1, 1))? } else { scale.clone() };
        codes.to_dtype(DType::F32)?.broadcast_mul(&scale.unsqueeze(1)?.unsqueeze(3)?)
    };
    let scores = Mask::causal().into();
    let scales = Scales { q: Some(of_q), k: Some(of_k), v: Some(of_v) };
    let (o, lse) = Attention { scores, scales, ..Attention::new(&q, &k, &v) }.forward_with_lse()?;
    assert_eq!((o.dtype(), o.dims()), (DType::BF16, q.dims()));
    let (q, k, v) = (wide(&q, of_q)?, wide(&k, of_k)?, wide(&v, of_v)?);
    let exact = Attention { scores, ..Attention::new(&q, &k, &v) };
    let (exact, exact_lse) = exact.forward_with_lse()?;
    let most = |of: &Tensor| of.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
    let error = most(&(o.to_dtype(DType::F32)? - &exact)?)?;
    assert!(error < 0.005 * most(&exact)?, "{error}");
    assert!(most(&(lse - exact_lse)?)? < 1e-5);
    Ok(())
}

#[test]
fn a_cache_of_codes_is_one_of_rounded_rows() -> Result<()> {
    let shapes: [Option<&[usize]>; 5] = [
        None,
        Some(&[1]),
        Some(&[BATCH, HEADS_KV]),
        Some(&[BATCH, 1]),
        Some(&[BATCH, CAPACITY, HEADS_KV]),
    ];
    for (&dtype, shape) in types(&Device::Cpu).iter().flat_map(|of| shapes.map(|s| (of, s))) {
        let given = shape.map(pair).transpose()?;
        let made = |dtype| KvCache::new(&Device::Cpu, dtype, [BATCH, CAPACITY], HEADS_KV, DIM);
        let mut coded = made(DType::F8E4M3)?;
        if let Some([k, v]) = &given {
            coded = coded.with_scales(k, v)?;
        }
        let mut wide = made(DType::F32)?;
        for tokens in [17, 1, 3] {
            let new = |heads| normal(&[BATCH, tokens, heads, DIM], dtype);
            let (q, k, v) = (new(HEADS)?, new(HEADS_KV)?, new(HEADS_KV)?);
            let k = if tokens == 1 { k.zeros_like()? } else { k };
            let at = wide.len();
            // The scales of these rows: [batch, tokens, heads, 1].
            let of_rows = |which: usize| -> Result<Option<Tensor>> {
                let Some(scale) = given.as_ref().map(|given| &given[which]) else {
                    return Ok(None);
                };
                let all = match scale.rank() {
                    1 => scale.reshape((1, 1, 1))?,
                    2 => scale.unsqueeze(1)?,
                    _ => scale.narrow(1, at, tokens)?,
                };
                let shape = (BATCH, tokens, HEADS_KV);
                all.broadcast_as(shape)?.unsqueeze(3).map(Some)
            };
            let seen_k = rounded(&k, of_rows(0)?.as_ref())?;
            let seen_v = rounded(&v, of_rows(1)?.as_ref())?;
            let scores = Mask::causal().into();
            let o = if tokens == 17 {
                // The prompt alone first.
                coded.append(&k, &v)?;
                wide.append(&seen_k, &seen_v)?;
                continue;
            } else {
                Attention { scores, ..Attention::new(&q, &k, &v) }.append_to(&mut coded)?
            };
            let q = q.to_dtype(DType::F32)?;
            let call = Attention { scores, ..Attention::new(&q, &seen_k, &seen_v) };
            let expected = call.append_to(&mut wide)?;
            assert_eq!((coded.len(), o.dtype()), (wide.len(), dtype));
            assert_eq!(bits(&o)?, bits(&expected.to_dtype(dtype)?)?, "{dtype:?} {shape:?}");
        }
    }
    Ok(())
}

#[test]
fn pages_may_hold_codes() -> Result<()> {
    let (device, pages, slots) = (Device::Cpu, 5, 16);
    let table = Tensor::new(&[[3u32, 1], [0, 4]], &device)?;
    let (seqlens_q, seqlens_k) =
        (Tensor::new(&[0u32, 3, 4], &device)?, Tensor::new(&[0u32, 30, 47], &device)?);
    // A part of the heads of a greater tensor.
    let codes = |seed: f64| -> Result<Tensor> {
        let rows = (normal(&[pages + 1, slots, HEADS_KV + 1, DIM], DType::F32)? * seed)?;
        rows.to_dtype(DType::F8E4M3)?.narrow(0, 1, pages)?.narrow(2, 1, HEADS_KV)
    };
    let (k, v) = (codes(1.0)?, codes(20.0)?);
    let shapes: [Option<&[usize]>; 5] = [
        None,
        Some(&[1]),
        Some(&[2, HEADS_KV]),
        Some(&[pages, 1, HEADS_KV]),
        Some(&[pages, slots, HEADS_KV]),
    ];
    for (&dtype, shape) in types(&device).iter().flat_map(|of| shapes.map(|s| (of, s))) {
        let given = shape.map(pair).transpose()?;
        let q = normal(&[4, HEADS, DIM], dtype)?;
        let call = |[q, k, v]: [&Tensor; 3], scales: [Option<&Tensor>; 2]| {
            let (table, softcap) = (&table, Some(5.0));
            let (starts, ends) = (&seqlens_q, &seqlens_k);
            paged(
                q,
                k,
                v,
                scales,
                starts,
                ends,
                table,
                None,
                3,
                30,
                0.2,
                None,
                Some(0),
                slots,
                softcap,
            )
        };
        let [k_scale, v_scale] = [0, 1].map(|at| given.as_ref().map(|given| &given[at]));
        let o = call([&q, &k, &v], [k_scale, v_scale])?;
        // The pages of a sequence have its scales.
        let wide = |codes: &Tensor, scale: Option<&Tensor>| -> Result<Tensor> {
            let scale = match scale {
                None => ones(&[1, 1, 1])?,
                Some(scale) if scale.rank() == 1 => scale.reshape((1, 1, 1))?,
                Some(scale) if scale.rank() == 2 => {
                    let of_pages = Tensor::new(&[1u32, 0, 0, 0, 1], &device)?;
                    scale.index_select(&of_pages, 0)?.unsqueeze(1)?
                }
                Some(scale) => scale.clone(),
            };
            codes.contiguous()?.to_dtype(DType::F32)?.broadcast_mul(&scale.unsqueeze(3)?)
        };
        let (k, v) = (wide(&k, k_scale)?, wide(&v, v_scale)?);
        let expected = call([&q.to_dtype(DType::F32)?, &k, &v], [None; 2])?;
        assert_eq!(o.dtype(), dtype);
        assert_eq!(bits(&o)?, bits(&expected.to_dtype(dtype)?)?, "{dtype:?} {shape:?}");
    }
    Ok(())
}

#[test]
fn wrong_codes_and_scales_are_errors() -> Result<()> {
    let made = |dtype| KvCache::new(&Device::Cpu, dtype, [BATCH, CAPACITY], HEADS_KV, DIM);
    let fails = |text: &str, result: Result<()>| {
        let error = result.expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    };
    let one = ones(&[1])?;
    let scaled = |dtype, k: &Tensor, v: &Tensor| made(dtype)?.with_scales(k, v).map(drop);
    fails("k_scale is given", scaled(DType::F16, &one, &one));
    fails("k_scale has shape [3]", scaled(DType::F8E4M3, &ones(&[3])?, &one));
    fails("v_scale has shape [2, 3]", scaled(DType::F8E4M3, &one, &ones(&[2, 3])?));
    fails("v_scale is f16", scaled(DType::F8E4M3, &one, &one.to_dtype(DType::F16)?));
    fails("a cache is u8", made(DType::U8).map(drop));
    let new = normal(&[BATCH, 1, HEADS_KV, DIM], DType::F32)?;
    let codes = new.to_dtype(DType::F8E4M3)?;
    let mut cache = made(DType::F8E4M3)?;
    fails("k is f8e4m3", cache.append(&codes, &codes));
    fails("k is e4m3", Attention::new(&new, &codes, &codes).forward().map(drop));
    let coded = Attention::new(&codes, &codes, &codes);
    let by = |scale| Scales { k: Some(scale), ..Scales::default() };
    let var = Var::from_tensor(&one)?;
    let tracked = Attention { scales: by(var.as_tensor()), ..coded };
    fails("the scales.k of attention have no gradient", tracked.forward().map(drop));
    let wrong = ones(&[BATCH, 3])?;
    let wrong = Attention { scales: by(&wrong), ..coded };
    fails("scales.k has shape [2, 3]", wrong.forward().map(drop));
    let plain = Attention { scales: by(&one), ..Attention::new(&new, &new, &new) };
    fails("since scales.k is given", plain.forward().map(drop));
    assert!(cache.is_empty());
    cache.append(&new, &new)?;
    fails("the cache has 1 keys", cache.with_scales(&one, &one).map(drop));

    let device = &Device::Cpu;
    let (q, pages) = (normal(&[1, HEADS, DIM], DType::F16)?, &[2, 16, HEADS_KV, DIM]);
    let (starts, ends) = (Tensor::new(&[0u32, 1], device)?, Tensor::new(&[0u32, 20], device)?);
    let (table, ranges) =
        (Tensor::new(&[[0u32, 1]], device)?, Tensor::new(&[[[0i64, 2]]], device)?);
    let plain = normal(pages, DType::F16)?;
    let codes = plain.to_dtype(DType::F8E4M3)?;
    let call = |k: &Tensor, v: &Tensor, scale: Option<&Tensor>, ranges: Option<&Tensor>| {
        let o = paged(
            &q, k, v, [scale; 2], &starts, &ends, &table, ranges, 1, 20, 0.2, None, None, 16, None,
        );
        o.map(drop)
    };
    call(&codes, &codes, Some(&one), None)?;
    fails("cache.v is f16", call(&codes, &plain, None, None));
    fails("k_scale is given", call(&plain, &plain, Some(&one), None));
    fails("mm_prefix_ranges is given", call(&codes, &codes, None, Some(&ranges)));
    fails("mm_prefix_ranges is given", call(&plain, &plain, Some(&one), Some(&ranges)));
    fails("k_scale has shape", call(&codes, &codes, Some(&ones(&[1, 2, 3, 4])?), None));
    Ok(())
}
