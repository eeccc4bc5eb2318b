use super::*;
use crate::fixtures::values;
use crate::{Attention, DType, Device, Error, Tensor};
use half::{bf16, f16};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Attention to the parts of 50 keys, merged, is attention to all of them.
#[test]
fn parts_of_the_keys_give_the_whole() {
    let stream = cpu();
    let (rows, heads, d) = (3, 2, 8);
    let [q, k, v] = [(rows, 1), (50, 2), (50, 3)].map(|(rows, seed)| {
        let values = values(rows * heads * d, seed);
        Tensor::from_slice(&stream, &values, &[1, rows, heads, d]).unwrap()
    });
    let part = |keys: std::ops::Range<usize>| {
        let [k, v] = [&k, &v].map(|t| t.view().slice(1, keys.clone()).unwrap());
        let output = Attention::new(q.view(), k, v).forward(&stream).unwrap();
        [output.o.to_vec::<f32>(&stream).unwrap(), output.lse.to_vec::<f32>(&stream).unwrap()]
    };
    let [whole_o, whole_lse] = part(0..50);
    let parts = [part(0..0), part(0..20), part(20..21), part(21..21), part(21..50)];
    let [o, lse] =
        [0, 1].map(|i| parts.iter().flat_map(|part| part[i].clone()).collect::<Vec<_>>());
    let o = Tensor::from_slice(&stream, &o, &[5, rows, heads, d]).unwrap();
    let lse = Tensor::from_slice(&stream, &lse, &[5, heads, rows]).unwrap();
    let mut merged = Tensor::empty(&stream, DType::F32, &[rows, heads, d]).unwrap();
    let mut merged_lse = Tensor::empty(&stream, DType::F32, &[rows, heads]).unwrap();
    let out = merged_lse.view_mut().permute(&[1, 0]).unwrap();
    AttentionMerge::new(o.view(), lse.view())
        .merge_into(merged.view_mut(), Some(out), &stream)
        .unwrap();
    for (found, expected) in merged.to_vec::<f32>(&stream).unwrap().iter().zip(&whole_o) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
    let merged_lse = merged_lse.to_vec::<f32>(&stream).unwrap();
    for (at, expected) in whole_lse.iter().enumerate() {
        let found = merged_lse[at % rows * heads + at / rows];
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

/// In f32 and in order: 1 + 2^-24 is 1, twice.
#[test]
fn a_sum_has_no_weights() {
    let stream = cpu();
    let small = 2f32.powi(-24);
    let parts = [1.0, 3.0, small, -7.0, small, 0.5];
    let parts = Tensor::from_slice(&stream, &parts, &[3, 1, 1, 2]).unwrap();
    let mut sum = Tensor::empty(&stream, DType::F32, &[1, 1, 2]).unwrap();
    AttentionMerge::sum(parts.view()).merge_into(sum.view_mut(), None, &stream).unwrap();
    assert_eq!(sum.to_vec::<f32>(&stream).unwrap(), [1.0, -3.5]);
}

#[test]
fn a_part_without_keys_is_not_read() {
    let stream = cpu();
    let nan = bf16::NAN;
    let merge = |logs: &[f32]| {
        let o = Tensor::from_slice(&stream, &[nan, bf16::from_f32(5.0)], &[2, 1, 1, 1]).unwrap();
        let lse = Tensor::from_slice(&stream, logs, &[2, 1, 1]).unwrap();
        let mut merged = Tensor::empty(&stream, DType::F16, &[1, 1, 1]).unwrap();
        let mut log = Tensor::empty(&stream, DType::F32, &[1, 1]).unwrap();
        AttentionMerge::new(o.view(), lse.view())
            .merge_into(merged.view_mut(), Some(log.view_mut()), &stream)
            .unwrap();
        (merged.to_vec::<f16>(&stream).unwrap()[0], log.to_vec::<f32>(&stream).unwrap()[0])
    };
    let nothing = f32::NEG_INFINITY;
    assert_eq!(merge(&[nothing, -300.0]), (f16::from_f32(5.0), -300.0));
    assert_eq!(merge(&[nothing, nothing]), (f16::ZERO, nothing));
    assert!(merge(&[-300.0, 0.0]).0.is_nan() && merge(&[f32::NAN, 0.0]).1.is_nan());
}

#[test]
fn wrong_parts_are_named() {
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
    let (parts, lse) = (zeros(DType::F16, &[4, 3, 2, 8]), zeros(DType::F32, &[4, 2, 3]));
    let mut o = zeros(DType::BF16, &[3, 2, 8]);
    let mut message = |merge: AttentionMerge<'_>| {
        merge.merge_into(o.view_mut(), None, &cpu()).unwrap_err().to_string()
    };
    let turned = lse.view().permute(&[0, 2, 1]).unwrap();
    assert!(message(AttentionMerge::new(parts.view(), turned)).contains("parts.lse"));
    assert!(message(AttentionMerge::new(lse.view(), lse.view())).contains("parts.o has shape"));
    let halves = zeros(DType::F16, &[4, 2, 3]);
    assert!(message(AttentionMerge::new(parts.view(), halves.view())).contains("parts.lse is f16"));
    let turned = parts.view().permute(&[0, 3, 2, 1]).unwrap();
    assert!(message(AttentionMerge::new(turned, lse.view())).contains("parts.lse"));
    let merge = AttentionMerge::new(parts.view(), lse.view());
    let (mut short, mut log) = (zeros(DType::F16, &[3, 2, 7]), zeros(DType::F32, &[3, 2]));
    let error = merge.merge_into(short.view_mut(), None, &cpu()).unwrap_err();
    assert!(matches!(error, Error::Shape { what: "o", .. }), "{error}");
    let error = merge.merge_into(o.view_mut(), Some(log.view_mut()), &cpu()).unwrap_err();
    assert!(matches!(error, Error::Shape { what: "lse", .. }), "{error}");
    // A sum has no log-sum-exp.
    let sum = AttentionMerge::sum(parts.view());
    let mut right = zeros(DType::F32, &[2, 3]);
    let error = sum.merge_into(o.view_mut(), Some(right.view_mut()), &cpu()).unwrap_err();
    assert!(matches!(error, Error::Shape { what: "lse", .. }), "{error}");
    // No part at all.
    let merge = AttentionMerge::new(
        parts.view().slice(0, 0..0).unwrap(),
        lse.view().slice(0, 0..0).unwrap(),
    );
    o.fill_bytes(&cpu(), 0xff).unwrap();
    merge.merge_into(o.view_mut(), None, &cpu()).unwrap();
    assert!(o.to_vec::<bf16>(&cpu()).unwrap().iter().all(|&x| x == bf16::ZERO));
}
