//! Appending to caches whose values are the first columns of their keys.

use super::*;
use crate::fixtures::{cpu, f32s, values, widened};
use crate::{AttentionDecode, DType, RotaryPairs, Tensor};

fn ints(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Two sequences of 6 slots with rows of 12 columns, the first 8 of them values, to which two and
/// three tokens come, and the rows of the cache after that.
fn appended(
    lengths: [i32; 2],
    append: impl for<'a> Fn(PackedTokens<'a>, View<'a>) -> AppendKv<'a>,
    rotary: Option<Rotary<'_>>,
) -> Result<Vec<f32>> {
    let (mut rows, lengths) = (f32s(&[-1.0; 144], &[2, 6, 1, 12]), ints(&lengths, &[2]));
    let (offsets, new) = (ints(&[0, 2, 5], &[3]), f32s(&values(60, 9), &[5, 1, 12]));
    let packed = PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 3 };
    let cache =
        KvCacheMut { seqused_kv: Some(lengths.view()), ..KvCacheMut::latent(rows.view_mut(), 8)? };
    AppendKv { rotary, ..append(packed, new.view()) }.append_into(cache, &cpu())?;
    Ok(widened(&rows))
}

fn whole<'a>(packed: PackedTokens<'a>, new: View<'a>) -> AppendKv<'a> {
    AppendKv { packed: Some(packed), ..AppendKv::latent(new) }
}

fn parts<'a>(packed: PackedTokens<'a>, new: View<'a>) -> AppendKv<'a> {
    let [values, rotary] = [0..8, 8..12].map(|columns| new.slice(2, columns).unwrap());
    AppendKv { packed: Some(packed), ..AppendKv::latent_parts(values, rotary) }
}

#[test]
fn new_rows_are_written_once_and_nothing_else_is() {
    let new = values(60, 9);
    // A token before the first slot and one beyond the last are dropped.
    for (lengths, places) in [
        ([2, 6], [Some(0), Some(1), Some(9), Some(10), Some(11)]),
        ([1, 7], [None, Some(0), Some(10), Some(11), None]),
        ([i32::MAX, i32::MIN], [None; 5]),
    ] {
        let mut expected = vec![-1.0; 144];
        for (token, place) in places.into_iter().enumerate() {
            let Some(place) = place else { continue };
            expected[place * 12..][..12].copy_from_slice(&new[token * 12..][..12]);
        }
        assert_eq!(appended(lengths, whole, None).unwrap(), expected);
        assert_eq!(appended(lengths, parts, None).unwrap(), expected);
    }
}

#[test]
fn columns_behind_the_values_are_turned() {
    let angles = |of: fn(f32) -> f32| f32s(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5].map(of), &[6, 1]);
    let (cos, sin) = (angles(f32::cos), angles(f32::sin));
    let pairs = RotaryPairs::Interleaved;
    let rotary = Some(Rotary { cos: cos.view(), sin: sin.view(), pairs });
    let plain = appended([4, 6], whole, None).unwrap();
    let found = appended([4, 6], whole, rotary).unwrap();
    assert_eq!(appended([4, 6], parts, rotary).unwrap(), found);
    for (slot, (found, plain)) in found.chunks(12).zip(plain.chunks(12)).enumerate() {
        let mut expected = plain.to_vec();
        if plain[0] != -1.0 {
            let (sin, cos) = ((slot % 6) as f32 * 0.5).sin_cos();
            expected[8] = plain[8] * cos - plain[9] * sin;
            expected[9] = plain[8] * sin + plain[9] * cos;
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-6, "slot {slot}");
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let mut rows = f32s(&[0.0; 288], &[2, 6, 2, 12]);
    for columns in [0, 13] {
        let message = KvCache::latent(rows.view(), columns).unwrap_err().to_string();
        let expected = format!("head_dim_v has shape [{columns}], expected [1 to 12], the columns");
        assert!(message.contains(&expected), "{message}");
        assert!(KvCacheMut::latent(rows.view_mut(), columns).is_err());
    }
    let own = f32s(&[0.0; 288], &[2, 6, 2, 12]);
    let new = |width: usize| f32s(&vec![0.0; 4 * width], &[2, 1, 2, width]);
    let (new, values, behind) = (new(12), new(8), new(4));
    let whole = AppendKv::latent(new.view());
    let both = AppendKv::latent_parts(values.view(), behind.view());
    let message = |append: AppendKv<'_>, rows: &mut Tensor, columns| {
        let cache = KvCacheMut::latent(rows.view_mut(), columns).unwrap();
        append.append_into(cache, &cpu()).unwrap_err().to_string()
    };
    for (append, columns, expected) in [
        (both, 7, "new.k has shape [2, 1, 2, 4], expected [2, tokens, 2, 5]"),
        (AppendKv { k: new.view(), ..both }, 8, "expected [2, tokens, 2, 4]"),
        (AppendKv { v: Some(new.view()), ..both }, 8, "new.v has shape [2, 1, 2, 12], expected"),
        (AppendKv::latent(values.view()), 8, "new.k has shape [2, 1, 2, 8], expected"),
        (AppendKv::new(new.view(), new.view()), 12, "new.v has shape [2, 1, 2, 12], expected none"),
    ] {
        let message = message(append, &mut rows, columns);
        assert!(message.contains(expected), "{message}");
    }
    // A cache whose values have memory of their own takes no rows that hold both.
    let mut copy = f32s(&[0.0; 288], &[2, 6, 2, 12]);
    let cache = KvCacheMut::new(rows.view_mut(), copy.view_mut());
    let error = whole.append_into(cache, &cpu()).unwrap_err().to_string();
    assert!(error.contains("new.v has shape [], expected the new values"), "{error}");
    // Positions turn what is behind the values, and queries come turned.
    let table = f32s(&[0.0; 18], &[6, 3]);
    let (cos, pairs) = (table.view(), RotaryPairs::Halves);
    let rotary = Some(Rotary { cos, sin: cos, pairs });
    for (columns, expected) in [(8, "[at least 6, 1 to 2]"), (12, "[at least 6, 1 to 0]")] {
        let message = message(AppendKv { rotary, ..whole }, &mut rows, columns);
        assert!(message.contains("rotary.cos") && message.contains(expected), "{message}");
    }
    let q = f32s(&[0.0; 48], &[2, 1, 2, 12]);
    let decode = AttentionDecode { rotary, ..AttentionDecode::new(q.view()) };
    let error = decode.forward(KvCache::latent(rows.view(), 8).unwrap(), &cpu()).unwrap_err();
    let expected = "rotary.cos has shape [6, 3], expected none: the queries of a latent cache";
    assert!(error.to_string().contains(expected), "{error}");
    let cache = KvCacheMut::latent(rows.view_mut(), 12).unwrap();
    let error = decode.append(&whole, cache, &cpu()).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    assert!(decode.forward(KvCache::new(own.view(), own.view()), &cpu()).is_ok());
    // Columns of keys cannot have scales of their own.
    let mut codes = Tensor::zeros(&cpu(), DType::E4M3, &[2, 6, 2, 12]).unwrap();
    let cache = KvCacheMut::latent(codes.view_mut(), 8).unwrap();
    let error = whole.append_into(cache, &cpu()).unwrap_err().to_string();
    assert!(error.contains("cache.k is e4m3, expected f16 or bf16 or f32, since"), "{error}");
}

/// On each GPU there is a kernel that appends to what kernels of attention take.
#[test]
fn gpus_have_kernels_that_append() {
    use crate::fixtures::gpus;
    for gpu in gpus() {
        for (dtype, [qk, v]) in [(DType::BF16, [576, 512]), (DType::F16, [512, 512])] {
            let rows = Tensor::zeros(&cpu(), dtype, &[4, 64, 1, qk]).unwrap();
            let new = Tensor::zeros(&cpu(), dtype, &[4, 2, 1, qk]).unwrap();
            let problem = AppendKv::latent(new.view())
                .problem(&KvCache::latent(rows.view(), v).unwrap())
                .unwrap();
            assert!(problem.is_latent());
            let kernel = select(&problem, &gpu).unwrap();
            accepts(kernel, &problem, &gpu).unwrap();
            // A thread writes 8 elements of the values, and of what is behind them.
            let blocks = plan(kernel, &problem, &gpu).unwrap().config.grid[0];
            let pieces = problem.head_dims.max() / 8;
            assert_eq!(blocks as usize, (8 * pieces).div_ceil(kernel.threads() as usize));
        }
        let odd = Tensor::zeros(&cpu(), DType::BF16, &[4, 64, 1, 576]).unwrap();
        let new = Tensor::zeros(&cpu(), DType::BF16, &[4, 2, 1, 576]).unwrap();
        let problem = AppendKv::latent(new.view())
            .problem(&KvCache::latent(odd.view(), 500).unwrap())
            .unwrap();
        assert!(select(&problem, &gpu).is_err());
    }
}
