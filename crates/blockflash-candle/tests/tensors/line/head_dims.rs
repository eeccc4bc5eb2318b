use super::blockflash_candle::{Attention, KvCache, Mask, Scores};
use super::candle_core::{DType, Device, Result, Tensor, Var};
use super::harness::{Array, case, normal_on, passed};
use blockflash_oracle::{attention, attention_output};

/// Values with rows of another length than queries and keys: on the CPU, and the gradients are
/// those of values that are padded with zeros.
#[test]
fn values_may_have_their_own_head_dim() -> Result<()> {
    let device = Device::Cpu;
    let new = |heads, width| normal_on(&device, &[2, 20, heads, width], DType::F32);
    for [qk, width] in [[24usize, 16], [16, 24]] {
        let (q, k, v) = (new(4, qk)?, new(2, qk)?, new(2, width)?);
        let (o, lse) = Attention { scores: Mask::causal().into(), ..Attention::new(&q, &k, &v) }
            .forward_with_lse()?;
        assert_eq!(o.dims(), [2, 20, 4, width]);
        let [q_array, k_array, v_array, o, lse] =
            [&q, &k, &v, &o, &lse].map(|tensor| Array::of(tensor).unwrap());
        let scale = 1.0 / (qk as f32).sqrt();
        let case = case([&q_array, &k_array, &v_array], Mask::causal(), scale);
        for comparison in attention(&case, &o, &lse, 1, |_| ()).unwrap() {
            passed(&format!("{qk} and {width}"), &comparison);
        }
        let gradients = |pads: [usize; 2]| -> Result<Vec<Tensor>> {
            let [q, k, v] = [&q, &k, &v].map(|tensor| Var::from_tensor(tensor).unwrap());
            let pad = |tensor: &Var, by| tensor.as_tensor().pad_with_zeros(3, 0, by);
            let (padded_q, padded_k) = (pad(&q, pads[0])?, pad(&k, pads[0])?);
            let padded_v = pad(&v, pads[1])?;
            let scores = Scores { softmax_scale: Some(scale), ..Mask::causal().into() };
            let attention = Attention::new(&padded_q, &padded_k, &padded_v);
            let o = Attention { scores, ..attention }.forward()?.narrow(3, 0, width)?;
            let found = (o.sqr()? * 0.5)?.sum_all()?.backward()?;
            Ok([&q, &k, &v].map(|var| found.get(var).unwrap().clone()).to_vec())
        };
        let widest = qk.max(width);
        let expected = gradients([widest - qk, widest - width])?;
        for (found, expected) in gradients([0, 0])?.iter().zip(&expected) {
            assert_eq!(found.dims(), expected.dims());
            let difference = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference < 1e-4, "{qk} and {width}: {difference}");
        }
    }
    Ok(())
}

#[test]
fn a_cache_may_have_values_of_their_own_head_dim() -> Result<()> {
    let device = Device::Cpu;
    let new = |tokens, heads, width| normal_on(&device, &[2, tokens, heads, width], DType::F16);
    let mut cache = KvCache::with_head_dims(&device, DType::F16, [2, 30], 2, [24, 16])?;
    let (mut keys, mut values) = (new(9, 2, 24)?, new(9, 2, 16)?);
    cache.append(&keys, &values)?;
    for tokens in [1, 3] {
        let (q, k, v) = (new(tokens, 4, 24)?, new(tokens, 2, 24)?, new(tokens, 2, 16)?);
        (keys, values) = (Tensor::cat(&[&keys, &k], 1)?, Tensor::cat(&[&values, &v], 1)?);
        let call = Attention { scores: Mask::causal().into(), ..Attention::new(&q, &k, &v) };
        let o = call.append_to(&mut cache)?;
        assert_eq!(o.dims(), [2, tokens, 4, 16]);
        let [q, k, v, o] = [&q, &keys, &values, &o].map(|tensor| Array::of(tensor).unwrap());
        let case = case([&q, &k, &v], Mask::causal(), 1.0 / 24f32.sqrt());
        passed("decoding", &attention_output(&case, &o, 1, |_| ()).unwrap());
    }
    Ok(())
}
