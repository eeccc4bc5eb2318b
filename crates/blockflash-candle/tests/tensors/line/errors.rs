use super::blockflash_candle::{
    Attention, BsrLinear, BsrPattern, KvCache, Mask, Packed, flash_attn, flash_attn_alibi,
    flash_attn_alibi_windowed_softcap, flash_attn_varlen, flash_attn_varlen_paged_windowed,
};
use super::candle_core::{self, DType, Device, Module, Result, Tensor, Var};
use super::harness::{devices, normal, normal_on};
use blockflash_ops::Scores;

#[track_caller]
fn refused<T>(result: Result<T>, words: &str) {
    let text = result.err().expect("an error").to_string();
    assert!(text.contains(words), "{text}");
}

#[test]
fn nothing_is_ignored() -> Result<()> {
    let new = |heads| normal(&[1, 8, heads, 16], DType::F32);
    let (q, k, v) = (new(4)?, new(2)?, new(2)?);
    let slopes = normal(&[3], DType::F32)?;
    refused(flash_attn_alibi(&q, &k, &v, &slopes, 1.0, true), "alibi has shape [3]");
    let call = flash_attn_alibi_windowed_softcap(&q, &k, &v, None, 1.0, None, None, -1.0);
    refused(call, "softcap");
    refused(flash_attn(&q, &k, &v, f32::NAN, true), "softmax_scale");
    refused(flash_attn(&q, &k.t()?, &v, 1.0, true), "k");
    refused(flash_attn(&q.transpose(2, 3)?, &k, &v, 1.0, true), "");
    refused(flash_attn(&q.to_dtype(DType::F64)?, &k, &v, 1.0, true), "f64");
    refused(flash_attn(&q.to_dtype(DType::F16)?, &k, &v, 1.0, true), "");
    refused(flash_attn(&q, &new(3)?, &new(3)?, 1.0, true), "heads");
    Ok(())
}

#[test]
fn gradients_that_would_be_lost_are_refused() -> Result<()> {
    let q = normal(&[1, 8, 4, 16], DType::F32)?;
    let sink = Var::from_tensor(&normal(&[4], DType::F32)?)?;
    let call = Attention {
        scores: Scores { sink: Some(&sink), ..Scores::default() },
        ..Attention::new(&q, &q, &q)
    };
    refused(call.forward(), "sink");
    let tracked = Var::from_tensor(&q)?;
    let mut cache = KvCache::new(&Device::Cpu, DType::F32, [1, 8], 4, 16)?;
    let call = Attention { scores: Mask::causal().into(), ..Attention::new(&tracked, &q, &q) };
    refused(call.append_to(&mut cache), "gradient");
    assert!(cache.is_empty());
    let (o, lse) = call.forward_with_lse()?;
    refused(lse.sum_all()?.backward(), "log-sum-exp of attention has no gradient");
    refused((o.sum_all()? + lse.sum_all()?)?.backward(), "has no gradient");
    let (_, detached) = Attention::new(&q, &q, &q).forward_with_lse()?;
    assert!(!detached.track_op());
    let gradients = (o.sum_all()? + lse.detach().sum_all()?)?.backward()?;
    assert!(gradients.get(&tracked).is_some());
    Ok(())
}

#[test]
fn offsets_are_checked() -> Result<()> {
    let q = normal(&[10, 2, 16], DType::F32)?;
    for (offsets, max_seqlen) in [
        (vec![0u32, 6, 11], 10),
        (vec![0, 6, 5, 10], 10),
        (vec![1, 10], 10),
        (vec![0, 10], 9),
        (vec![0, u32::MAX], 10),
        (vec![], 10),
    ] {
        let (shown, entries) = (format!("{offsets:?}"), offsets.len());
        let offsets = Tensor::from_vec(offsets, entries, &Device::Cpu)?;
        let call =
            flash_attn_varlen(&q, &q, &q, &offsets, &offsets, max_seqlen, max_seqlen, 1.0, true);
        assert!(call.is_err(), "{shown}");
        let packed =
            Packed { q: &offsets, kv: &offsets, max_seqlen_q: 10, max_seqlen_kv: max_seqlen };
        let call = Attention { cu_seqlens: Some(packed), ..Attention::new(&q, &q, &q) };
        assert!(call.forward_with_lse().is_err(), "{shown}");
    }
    Ok(())
}

/// A tensor may claim more elements than its memory has.
#[test]
fn layouts_beyond_the_memory_are_refused() -> Result<()> {
    let storage = candle_core::Storage::Cpu(candle_core::CpuStorage::F32(vec![0.0; 10]));
    let none = candle_core::op::BackpropOp::none();
    let q = Tensor::from_storage(storage, (1, 8, 4, 16), none, false);
    assert!(flash_attn(&q, &q, &q, 1.0, false).is_err());
    Ok(())
}

#[test]
fn caches_and_layers_refuse_what_does_not_fit() -> Result<()> {
    let new = |tokens, heads| normal(&[2, tokens, heads, 16], DType::F32);
    let mut cache = KvCache::new(&Device::Cpu, DType::F32, [2, 8], 2, 16)?;
    refused(cache.append(&new(9, 2)?, &new(9, 2)?), "k has 9 tokens, and the cache has room for 8");
    assert!(cache.append(&new(2, 4)?, &new(2, 4)?).is_err());
    assert!(cache.append(&new(2, 2)?, &new(3, 2)?).is_err());
    assert!(cache.append(&new(2, 2)?.to_dtype(DType::F16)?, &new(2, 2)?).is_err());
    assert!(cache.is_empty());
    refused(KvCache::new(&Device::Cpu, DType::U32, [1, 8], 2, 16), "u32");
    refused(
        KvCache::new(&Device::Cpu, DType::F32, [1, 8], 0, 16),
        "num_heads_kv and head_dim are 0 and 16",
    );

    let values = normal(&[1, 16, 16], DType::F32)?;
    let edge = BsrPattern::from_blocks(20, 32, 16, &[(1, 0)]).unwrap();
    refused(BsrLinear::new(edge, values.clone()), "beyond the weights: they are 20 x 32, expected");
    let pattern = || BsrPattern::from_blocks(32, 32, 16, &[(1, 0)]).unwrap();
    let layer = BsrLinear::new(pattern(), values.clone())?;
    assert!(layer.forward(&normal(&[3, 31], DType::F32)?).is_err());
    let layer = BsrLinear::new(pattern(), normal(&[2, 16, 16], DType::F32)?)?;
    assert!(layer.forward(&normal(&[3, 32], DType::F32)?).is_err());
    Ok(())
}

/// What the CPU takes and a GPU does not.
#[test]
fn a_gpu_says_what_it_does_not_take() -> Result<()> {
    for device in devices()?.into_iter().skip(1) {
        let new = |heads, head_dim, dtype| normal_on(&device, &[1, 8, heads, head_dim], dtype);
        let q = new(4, 16, DType::F32)?;
        refused(flash_attn(&q, &q, &q, 1.0, true), "f32");
        let q = new(4, 520, DType::F16)?;
        refused(flash_attn(&q, &q, &q, 1.0, true), "head_dim");
        let q = new(4, 20, DType::F16)?;
        refused(flash_attn(&q, &q, &q, 1.0, true), "");
        let (q, host) = (new(4, 16, DType::F16)?, normal(&[1, 8, 4, 16], DType::F16)?);
        refused(flash_attn(&q, &host, &host, 1.0, true), "");
        refused(flash_attn(&host, &q, &q, 1.0, true), "");
        let narrow = new(4, 24, DType::F16)?.narrow(3, 4, 16)?;
        refused(flash_attn(&narrow, &narrow, &narrow, 1.0, true), "");
    }
    Ok(())
}

/// A GPU cannot check offsets and tables before the call. Whatever they are, nothing outside the
/// tensors is touched, and the next call is right.
#[test]
fn hostile_offsets_do_no_harm() -> Result<()> {
    for device in devices()?.into_iter().skip(1) {
        let q = normal_on(&device, &[40, 4, 64], DType::BF16)?;
        let pages = normal_on(&device, &[3, 16, 4, 64], DType::BF16)?;
        let good = Tensor::new(&[0u32, 20, 40], &device)?;
        let table = |entries: [u32; 4]| Tensor::new(&entries, &device)?.reshape((2, 2));
        let valid = table([0, 1, 2, 0])?;
        let attend = |offsets_q: &Tensor, offsets_kv: &Tensor| {
            flash_attn_varlen(&q, &q, &q, offsets_q, offsets_kv, 40, 40, 1.0, true)
        };
        let look_up = |offsets_q: &Tensor, offsets_kv: &Tensor, table: &Tensor| {
            flash_attn_varlen_paged_windowed(
                &q,
                &pages,
                &pages,
                offsets_q,
                offsets_kv,
                table,
                None,
                40,
                32,
                1.0,
                None,
                Some(0),
                16,
                None,
            )
        };
        let values = |o: Tensor| o.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let expected = [values(attend(&good, &good)?)?, values(look_up(&good, &good, &valid)?)?];
        for hostile in [[5, 4_000_000_000, 7], [u32::MAX; 3], [1 << 31, 0, 1 << 30], [40, 20, 0]] {
            let offsets = Tensor::new(&hostile, &device)?;
            let tables = table([hostile[0], hostile[1], hostile[2], 3])?;
            for o in [
                attend(&offsets, &good)?,
                attend(&good, &offsets)?,
                attend(&offsets, &offsets)?,
                look_up(&offsets, &good, &valid)?,
                look_up(&good, &offsets, &valid)?,
                look_up(&good, &good, &tables)?,
                look_up(&offsets, &offsets, &tables)?,
            ] {
                values(o)?;
            }
            let found = [values(attend(&good, &good)?)?, values(look_up(&good, &good, &valid)?)?];
            assert_eq!(found, expected, "{hostile:?}");
        }
    }
    Ok(())
}
