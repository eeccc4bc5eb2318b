use super::blockflash_candle::{Align, Attention, KvCache, Mask, flash_attn_varlen_paged_windowed};
use super::candle_core::{DType, Device, Result, Tensor};
use super::harness::{Array, case, devices, normal_on, passed, types};
use blockflash_oracle::{AttentionCase, Scores, attention_output};

#[test]
fn every_step_sees_all_keys_so_far() -> Result<()> {
    devices()?.iter().try_for_each(steps)
}

fn steps(device: &Device) -> Result<()> {
    for &dtype in types(device) {
        let (batch, heads, heads_kv, head_dim) = (3, 6, 2, 40);
        let new = |tokens, heads| normal_on(device, &[batch, tokens, heads, head_dim], dtype);
        let mut cache = KvCache::new(device, dtype, [batch, 40], heads_kv, head_dim)?;
        assert!(cache.is_empty() && cache.capacity() == 40);
        let (mut keys, mut values) = (new(17, heads_kv)?, new(17, heads_kv)?);
        cache.append(&keys, &values)?;
        for tokens in [1, 1, 4, 1] {
            let (q, k, v) = (new(tokens, heads)?, new(tokens, heads_kv)?, new(tokens, heads_kv)?);
            (keys, values) = (Tensor::cat(&[&keys, &k], 1)?, Tensor::cat(&[&values, &v], 1)?);
            for mask in [
                Mask::causal(),
                Mask::Window { left: Some(6), right: Some(0), align: Align::BottomRight },
            ] {
                let call = Attention { scores: mask.into(), ..Attention::new(&q, &k, &v) };
                cache.truncate(keys.dims()[1] - tokens);
                let o = Array::of(&call.append_to(&mut cache)?)?;
                assert_eq!(cache.len(), keys.dims()[1]);
                let [q, k, v] = [&q, &keys, &values].map(|tensor| Array::of(tensor).unwrap());
                let case = case([&q, &k, &v], mask, 1.0 / (head_dim as f32).sqrt());
                passed("decoding", &attention_output(&case, &o, 1, |_| ()).unwrap());
            }
        }
        // Too many tokens leave the cache as it was.
        let (k, v) = (new(17, heads_kv)?, new(17, heads_kv)?);
        assert!(cache.append(&k, &v).is_err());
        assert_eq!(cache.len(), 24);
    }
    Ok(())
}

/// Pages in another order than the keys.
#[test]
fn paged_attention_is_exact() -> Result<()> {
    devices()?.iter().try_for_each(paged_attention)
}

fn paged_attention(device: &Device) -> Result<()> {
    let (lengths_q, lengths_kv, slots) = ([4usize, 0, 1], [50usize, 3, 33], 32);
    let table = Tensor::new(&[[3u32, 1], [0, 9], [4, 2]], device)?;
    let q = normal_on(device, &[5, 4, 24], DType::F16)?;
    let pages = || normal_on(device, &[5, slots, 2, 24], DType::F16);
    let (k, v) = (pages()?, pages()?);
    // The keys of each sequence one after the other.
    let gathered = |pages: &Tensor| {
        let of = |page: usize, count| pages.get(page)?.narrow(0, 0, count);
        Tensor::cat(&[of(3, 32)?, of(1, 18)?, of(0, 3)?, of(4, 32)?, of(2, 1)?], 0)
    };
    let arrays = [&q, &gathered(&k)?, &gathered(&v)?].map(|tensor| Array::of(tensor).unwrap());
    let seqlens_q = Tensor::new(&[0u32, 4, 4, 5], device)?;
    let seqlens_k = Tensor::new(&[0u32, 50, 53, 86], device)?;
    let call = |max_k, softcap, slots, ranges: Option<&Tensor>| {
        flash_attn_varlen_paged_windowed(
            &q,
            &k,
            &v,
            &seqlens_q,
            &seqlens_k,
            &table,
            ranges,
            4,
            max_k,
            0.2,
            None,
            Some(0),
            slots,
            softcap,
        )
    };
    for softcap in [None, Some(5.0)] {
        let o = Array::of(&call(50, softcap, slots, None)?)?;
        let case = case(arrays.each_ref(), Mask::causal(), 0.2);
        let lengths = Some([&lengths_q[..], &lengths_kv[..]]);
        let case = AttentionCase { lengths, scores: Scores::new(0.2, softcap), ..case };
        passed("paged", &attention_output(&case, &o, 1, |_| ()).unwrap());
    }
    if device.is_cpu() {
        assert!(call(49, None, slots, None).is_err(), "a sequence of 50 keys");
    }
    assert!(call(50, None, 16, None).is_err(), "pages of 16 slots");
    assert!(call(50, None, slots, Some(&table)).is_err(), "prefix ranges");
    Ok(())
}
