//! What is added to scores, and masks of pairs, against candle's own operations in f32.

use super::blockflash_candle::{
    Attention, Mask, Scores, flash_attn_alibi, flash_attn_alibi_windowed,
    flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, token_mask, v3,
};
use super::candle_core::backprop::GradStore;
use super::candle_core::{D, DType, Device, Error, Result, Tensor, Var};
use super::harness::{normal, normal_on};

const SCALE: f32 = 0.25;

/// `[batch, seqlen_q, heads, head_dim]` of tensors of as many heads, with what is added to scores
/// `[batch, heads, seqlen_q, seqlen_kv]`.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, added: &Tensor, softcap: f64) -> Result<Tensor> {
    let by_head = |of: &Tensor| of.to_dtype(DType::F32)?.transpose(1, 2)?.contiguous();
    let mut scores = (by_head(q)?.matmul(&by_head(k)?.t()?)? * f64::from(SCALE))?;
    if softcap > 0.0 {
        scores = ((scores / softcap)?.tanh()? * softcap)?;
    }
    let scores = scores.broadcast_add(added)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&by_head(v)?)?.transpose(1, 2)
}

#[track_caller]
fn close(found: &Tensor, expected: &Tensor) -> Result<()> {
    let [found, expected] = [found, expected].map(|of| of.to_dtype(DType::F32));
    let (found, expected) = (found?, expected?);
    assert_eq!(found.dims(), expected.dims());
    let error = (found - expected)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
    assert!(error < 1e-5, "{error}");
    Ok(())
}

/// ALiBi of these slopes, where a window of keys before a query's own, and none behind it, may hide
/// others.
fn alibi(slopes: &[f32], [queries, keys]: [usize; 2], left: Option<usize>) -> Result<Tensor> {
    let mut added = Vec::new();
    for slope in slopes {
        for query in 0..queries {
            for key in 0..keys {
                let position = (query + keys) as f32 - queries as f32;
                let before = position - key as f32;
                let hidden = left.is_some_and(|left| before < 0.0 || before > left as f32);
                added.push(if hidden { f32::NEG_INFINITY } else { -slope * before.abs() });
            }
        }
    }
    Tensor::from_vec(added, (1, slopes.len(), queries, keys), &Device::Cpu)
}

#[test]
fn alibi_of_all_functions() -> Result<()> {
    let new = |seqlen: usize| normal(&[1, seqlen, 4, 16], DType::F32);
    let (q, k, v) = (new(11)?, new(30)?, new(30)?);
    let slopes = [0.5f32, 0.25, 0.0, 1.0];
    let on_device = Tensor::new(&slopes, &Device::Cpu)?;
    let of = |left| alibi(&slopes, [11, 30], left);
    let causal = plain(&q, &k, &v, &of(Some(1000))?, 0.0)?;
    close(&flash_attn_alibi(&q, &k, &v, &on_device, SCALE, true)?, &causal)?;
    close(&v3::flash_attn_alibi(&q, &k, &v, &on_device, SCALE, true, true)?, &causal)?;
    let full = plain(&q, &k, &v, &of(None)?, 0.0)?;
    close(&flash_attn_alibi(&q, &k, &v, &on_device, SCALE, false)?, &full)?;
    let windowed = plain(&q, &k, &v, &of(Some(7))?, 0.0)?;
    let (left, right) = (Some(7), Some(0));
    let o = flash_attn_alibi_windowed(&q, &k, &v, &on_device, SCALE, left, right)?;
    close(&o, &windowed)?;
    let slopes_or_none = Some(&on_device);
    let o = flash_attn_alibi_windowed_softcap(&q, &k, &v, slopes_or_none, SCALE, left, right, 2.0)?;
    close(&o, &plain(&q, &k, &v, &of(Some(7))?, 2.0)?)?;
    Ok(())
}

#[test]
fn alibi_of_packed_sequences() -> Result<()> {
    let new = |rows: usize| normal(&[rows, 4, 16], DType::F32);
    let (q, k, v) = (new(16)?, new(45)?, new(45)?);
    let slopes = [0.5f32, 0.25, 0.0, 1.0];
    let on_device = Tensor::new(&slopes, &Device::Cpu)?;
    let starts = |of: [u32; 3]| Tensor::new(&of, &Device::Cpu);
    let (starts_q, starts_k) = (starts([0, 5, 16])?, starts([0, 15, 45])?);
    let expected = |left, softcap| -> Result<Tensor> {
        let part = |[from, rows]: [usize; 2], of: &Tensor| of.narrow(0, from, rows)?.unsqueeze(0);
        let parts = [([0, 5], [0, 15]), ([5, 11], [15, 30])].map(|(rows, keys)| {
            let added = alibi(&slopes, [rows[1], keys[1]], left)?;
            plain(&part(rows, &q)?, &part(keys, &k)?, &part(keys, &v)?, &added, softcap)?.squeeze(0)
        });
        let [first, second] = parts;
        Tensor::cat(&[first?, second?], 0)
    };
    let (at_q, at_k) = (&starts_q, &starts_k);
    let o = flash_attn_varlen_alibi(&q, &k, &v, &on_device, at_q, at_k, 11, 30, SCALE, true)?;
    close(&o, &expected(Some(1000), 0.0)?)?;
    let (left, right) = (Some(7), Some(0));
    let o = flash_attn_varlen_alibi_windowed(
        &q, &k, &v, &on_device, at_q, at_k, 11, 30, SCALE, left, right,
    )?;
    close(&o, &expected(left, 0.0)?)?;
    let slopes = Some(&on_device);
    let o = flash_attn_varlen_alibi_windowed_softcap(
        &q, &k, &v, slopes, at_q, at_k, 11, 30, SCALE, left, right, 2.0,
    )?;
    close(&o, &expected(left, 2.0)?)
}

/// The sum of the output times a direction.
fn loss(call: &Attention<'_>, direction: &Tensor) -> Result<Tensor> {
    (call.forward()? * direction)?.sum_all()
}

#[test]
fn a_bias_and_its_gradient() -> Result<()> {
    let new = |seqlen: usize| normal(&[2, seqlen, 4, 16], DType::F32);
    let (q, k, v, direction) = (new(11)?, new(30)?, new(30)?, new(11)?);
    let qkv = [&q, &k, &v].map(Var::from_tensor);
    let [q, k, v] = qkv;
    let (q, k, v) = (q?, k?, v?);
    for shape in [[2, 4, 11, 30], [1, 4, 11, 30], [2, 1, 1, 30], [1, 1, 11, 1], [1, 1, 1, 1]] {
        let bias = Var::from_tensor(&normal_on(&Device::Cpu, &shape, DType::F32)?)?;
        let scores = Scores {
            bias: Some(bias.as_tensor()),
            softmax_scale: Some(SCALE),
            ..Scores::default()
        };
        let call = Attention { scores, ..Attention::new(&q, &k, &v) };
        let expected = plain(&q, &k, &v, &bias, 0.0)?;
        close(&call.forward()?, &expected)?;
        let (found, expected) =
            (loss(&call, &direction)?.backward()?, (expected * &direction)?.sum_all()?.backward()?);
        let of = |grads: &GradStore, name: &str, tensor: &Tensor| match grads.get(tensor) {
            Some(gradient) => Ok(gradient.clone()),
            None => Err(Error::Msg(format!("{name} has no gradient")).bt()),
        };
        for (name, of_what) in [("q", &q), ("k", &k), ("v", &v), ("bias", &bias)] {
            let [found, expected] = [&found, &expected].map(|grads| of(grads, name, of_what));
            let (found, expected) = (found?, expected?);
            assert_eq!(found.dims(), of_what.dims(), "{name}");
            let scale = expected.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?.max(1.0);
            close(&(found / f64::from(scale))?, &(expected / f64::from(scale))?)?;
        }
        // Again, and of the bias alone.
        let again = loss(&call, &direction)?.backward()?;
        close(&of(&again, "bias", &bias)?, &of(&found, "bias", &bias)?)?;
        let (q, k, v) = (q.detach(), k.detach(), v.detach());
        let alone = Attention { scores, ..Attention::new(&q, &k, &v) };
        let alone = loss(&alone, &direction)?.backward()?;
        close(&of(&alone, "bias", &bias)?, &of(&found, "bias", &bias)?)?;
        assert!(alone.get(&q).is_none());
    }
    let slopes = Var::from_tensor(&Tensor::new(&[1f32, 0.5, 0.25, 0.0], &Device::Cpu)?)?;
    let scores = Scores { alibi: Some(slopes.as_tensor()), ..Scores::default() };
    let call = Attention { scores, ..Attention::new(&q, &k, &v) };
    assert!(call.forward().unwrap_err().to_string().contains("the alibi of attention"));
    Ok(())
}

/// Differences of the loss along a direction in the bias, and the gradient along it.
#[test]
fn the_gradient_of_a_bias_is_that_of_differences() -> Result<()> {
    let new = |seqlen: usize| normal(&[2, seqlen, 4, 16], DType::F32);
    let (q, k, v, direction) = (new(11)?, new(30)?, new(30)?, new(11)?);
    for shape in [[2, 4, 11, 30], [1, 4, 1, 30]] {
        let [bias, along] = [0, 1].map(|_| normal_on(&Device::Cpu, &shape, DType::F32));
        let (bias, along) = (bias?, along?);
        let at = |bias: &Tensor| -> Result<Tensor> {
            let scores = Scores { bias: Some(bias), ..Scores::default() };
            loss(&Attention { scores, ..Attention::new(&q, &k, &v) }, &direction)
        };
        let step = 1e-2;
        let moved = |by: f64| at(&(&bias + (&along * by)?)?)?.to_scalar::<f32>();
        let difference = f64::from(moved(step)? - moved(-step)?) / (2.0 * step);
        let bias = Var::from_tensor(&bias)?;
        let gradients = at(&bias)?.backward()?;
        let gradient = gradients.get(&bias).map(|of| (of * &along)?.sum_all());
        let gradient =
            f64::from(gradient.transpose()?.map_or(Ok(0.0), |of| of.to_scalar::<f32>())?);
        assert!((gradient - difference).abs() < 2e-2 * difference.abs().max(1.0));
    }
    Ok(())
}

#[test]
fn a_mask_of_pairs() -> Result<()> {
    let new = |seqlen: usize| normal(&[2, seqlen, 4, 16], DType::F32);
    let (q, k, v) = (new(70)?, new(90)?, new(90)?);
    let shown = |at: usize| u8::from(at % 7 != 3 && at % 11 != 5);
    let pairs =
        Tensor::from_vec((0..2 * 70 * 90).map(shown).collect(), (2, 1, 70, 90), q.device())?;
    let mask = token_mask(&pairs, 64)?;
    let softmax_scale = Some(SCALE);
    let call = Attention {
        scores: Scores { softmax_scale, ..Mask::Full.into() },
        block_mask: Some(&mask),
        ..Attention::new(&q, &k, &v)
    };
    let added = pairs.to_dtype(DType::F32)?.affine(1e9, -1e9)?;
    close(&call.forward()?, &plain(&q, &k, &v, &added, 0.0)?)?;
    assert!(token_mask(&pairs, 60).is_err());
    assert!(token_mask(&pairs.to_dtype(DType::F32)?, 64).is_err());
    Ok(())
}
