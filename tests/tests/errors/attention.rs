//! Bad attention calls.

use super::{cpu, f16s, f32s, i32s};
use blockflash_ops::attention::{Attention, CuSeqlens};
use blockflash_ops::{BlockGeometry, BlockMask, DType, Error, Scores, Tensor, View, ViewMut};
use half::f16;

#[test]
fn attention_shapes() {
    let (q, k) = (f16s(&[2, 5, 4, 16]), f16s(&[2, 7, 2, 16]));
    let with =
        |q: &Tensor, k: &Tensor, v: &Tensor| Attention::new(q.view(), k.view(), v.view()).problem();
    assert!(with(&q, &k, &k).is_ok());
    assert_error!(
        with(&f16s(&[2, 5, 64]), &k, &k),
        Error::Shape { what: "q", .. },
        "q",
        "[2, 5, 64]"
    );
    assert_error!(
        with(&q, &f16s(&[2, 7, 32]), &k),
        Error::Shape { what: "k", .. },
        "k",
        "[2, 7, 32]"
    );
    assert_error!(
        with(&q, &f16s(&[3, 7, 2, 16]), &k),
        Error::Shape { what: "k", .. },
        "k",
        "[3, 7, 2, 16]"
    );
    assert_error!(with(&q, &f16s(&[2, 7, 2, 8]), &k), Error::Shape { what: "k", .. }, "k");
    assert_error!(with(&q, &k, &f16s(&[2, 8, 2, 16])), Error::Shape { what: "v", .. }, "v");
    let three = f16s(&[2, 7, 3, 16]);
    assert_error!(with(&q, &three, &three), Error::HeadGroups { .. }, "4", "3");
    let none = f16s(&[2, 7, 0, 16]);
    assert_error!(with(&q, &none, &none), Error::HeadGroups { .. }, "4", "0");
    let empty = f16s(&[2, 5, 4, 0]);
    assert_error!(with(&empty, &empty, &empty), Error::Shape { what: "q", .. }, "head_dim");
}

#[test]
fn attention_element_types() {
    let (q, k) = (f16s(&[1, 5, 2, 16]), f16s(&[1, 5, 2, 16]));
    let bf16 = Tensor::zeros(&cpu(), DType::BF16, &[1, 5, 2, 16]).unwrap();
    let ints = Tensor::zeros(&cpu(), DType::I32, &[1, 5, 2, 16]).unwrap();
    let with =
        |q: &Tensor, k: &Tensor, v: &Tensor| Attention::new(q.view(), k.view(), v.view()).problem();
    assert_error!(with(&q, &bf16, &k), Error::DType { what: "k", .. }, "k", "bf16", "f16");
    assert_error!(with(&q, &k, &bf16), Error::DType { what: "v", .. }, "v", "bf16");
    assert_error!(with(&ints, &ints, &ints), Error::DType { what: "q", .. }, "q", "i32");
    let stream = cpu();
    let call = Attention::new(q.view(), k.view(), k.view());
    let mut o = f32s(&[1, 5, 2, 16]);
    assert_error!(
        call.forward_into(o.view_mut(), None, &stream),
        Error::DType { what: "o", .. },
        "o",
        "f32"
    );
    let (mut o, mut lse) = (f16s(&[1, 5, 2, 16]), f16s(&[1, 2, 5]));
    let result = call.forward_into(o.view_mut(), Some(lse.view_mut()), &stream);
    assert_error!(result, Error::DType { what: "lse", .. }, "lse", "f16");
    let sink = f16s(&[2]);
    let with_sink = Attention { scores: Scores { sink: Some(sink.view()), ..call.scores }, ..call };
    assert_error!(with_sink.problem(), Error::DType { what: "sink", .. }, "sink", "f16");
}

#[test]
fn attention_outputs() {
    let stream = cpu();
    let (q, k) = (f16s(&[2, 5, 4, 16]), f16s(&[2, 7, 2, 16]));
    let call = Attention::new(q.view(), k.view(), k.view());
    let run = |o: &[usize], lse: &[usize]| {
        let (mut o, mut lse) = (f16s(o), f32s(lse));
        call.forward_into(o.view_mut(), Some(lse.view_mut()), &stream)
    };
    run(&[2, 5, 4, 16], &[2, 4, 5]).unwrap();
    assert_error!(
        run(&[2, 4, 5, 16], &[2, 4, 5]),
        Error::Shape { what: "o", .. },
        "o",
        "[2, 4, 5, 16]"
    );
    assert_error!(run(&[10, 4, 16], &[2, 4, 5]), Error::Shape { what: "o", .. }, "o");
    assert_error!(
        run(&[2, 5, 4, 16], &[2, 5, 4]),
        Error::Shape { what: "lse", .. },
        "lse",
        "[2, 5, 4]"
    );
    assert_error!(run(&[2, 5, 4, 16], &[4, 10]), Error::Shape { what: "lse", .. }, "lse");
    let sink = f32s(&[2]);
    let with_sink = Attention { scores: Scores { sink: Some(sink.view()), ..call.scores }, ..call };
    assert_error!(with_sink.problem(), Error::Shape { what: "sink", .. }, "sink", "[2]");
}

#[test]
fn attention_strides() {
    let data = vec![f16::ZERO; 4096];
    let strided = |shape: &[usize], strides: &[usize]| {
        View::from_slice_strided(&data, shape, strides).unwrap()
    };
    let good = strided(&[1, 5, 2, 16], &[0, 32, 16, 1]);
    let bad = strided(&[1, 5, 2, 16], &[0, 64, 32, 2]);
    assert_error!(
        Attention::new(bad, good, good).problem(),
        Error::Stride { what: "q", .. },
        "q",
        "64, 32, 2"
    );
    assert_error!(Attention::new(good, bad, good).problem(), Error::Stride { what: "k", .. }, "k");
    assert_error!(Attention::new(good, good, bad).problem(), Error::Stride { what: "v", .. }, "v");
    let mut out = vec![f16::ZERO; 4096];
    let o = ViewMut::from_slice_strided(&mut out, &[1, 5, 2, 16], &[0, 64, 32, 2]).unwrap();
    let result = Attention::new(good, good, good).forward_into(o, None, &cpu());
    assert_error!(result, Error::Stride { what: "o", .. }, "o");
    // Outputs whose elements share memory cannot even be made.
    for strides in [[0, 32, 16, 1], [160, 16, 16, 1], [160, 32, 8, 1]] {
        let overlapping = ViewMut::from_slice_strided(&mut out, &[2, 5, 2, 16], &strides);
        let message = overlapping.expect_err("an overlap").to_string();
        assert!(message.contains("overlap") && !message.contains('\n'), "{message}");
    }
}

#[test]
fn attention_factors() {
    let t = f16s(&[1, 5, 2, 16]);
    let base = Attention::new(t.view(), t.view(), t.view());
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let scale =
            Attention { scores: Scores { softmax_scale: Some(bad), ..base.scores }, ..base };
        assert_error!(
            scale.problem(),
            Error::InvalidScale { what: "softmax_scale", .. },
            "softmax_scale",
            "greater"
        );
        let softcap = Attention { scores: Scores { softcap: Some(bad), ..base.scores }, ..base };
        assert_error!(softcap.problem(), Error::InvalidScale { what: "softcap", .. }, "softcap");
    }
}

#[test]
fn attention_sequences() {
    let (q, k) = (f16s(&[10, 2, 16]), f16s(&[20, 2, 16]));
    let good = i32s(&[0, 4, 10]);
    let check = |cu_q: &Tensor, cu_kv: &Tensor, max: (usize, usize)| {
        let cu_seqlens = CuSeqlens {
            q: cu_q.view(),
            kv: cu_kv.view(),
            max_seqlen_q: max.0,
            max_seqlen_kv: max.1,
        };
        let call = Attention {
            cu_seqlens: Some(cu_seqlens),
            ..Attention::new(q.view(), k.view(), k.view())
        };
        let checked = call.check_cu_seqlens(&cpu());
        // On the CPU the call itself checks too.
        let run = call.forward(&cpu());
        assert_eq!(checked.is_ok(), run.is_ok(), "check_cu_seqlens and forward disagree");
        run
    };
    check(&good, &i32s(&[0, 0, 20]), (6, 20)).unwrap();
    check(&i32s(&[0, 4, 9]), &i32s(&[0, 0, 7]), (100, 100)).unwrap();
    let bad = |cu_q: &[i32], cu_kv: &[i32]| check(&i32s(cu_q), &i32s(cu_kv), (10, 20));
    assert_error!(
        bad(&[1, 4, 10], &[0, 0, 20]),
        Error::InvalidCuSeqlens { which: "q", index: 0, .. },
        "q[0] is 1"
    );
    assert_error!(
        bad(&[0, 5, 4], &[0, 0, 20]),
        Error::InvalidCuSeqlens { which: "q", index: 2, .. },
        "q[2] is 4"
    );
    assert_error!(bad(&[0, 4, 11], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", .. }, "10");
    assert_error!(bad(&[0, -4, 10], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", .. }, "-4");
    assert_error!(
        bad(&[0, 4, 10], &[0, i32::MIN, 20]),
        Error::InvalidCuSeqlens { which: "kv", .. },
        "kv[1]"
    );
    assert_error!(
        bad(&[0, 4, 10], &[0, i32::MAX, 20]),
        Error::InvalidCuSeqlens { which: "kv", .. },
        "kv[1]"
    );
    assert_error!(
        bad(&[0, 4, 10], &[0, 21, 21]),
        Error::InvalidCuSeqlens { which: "kv", .. },
        "kv"
    );
    assert_error!(
        check(&good, &good, (5, 20)),
        Error::InvalidCuSeqlens { which: "q", .. },
        "6",
        "5"
    );
    assert_error!(
        check(&good, &good, (10, 5)),
        Error::InvalidCuSeqlens { which: "kv", .. },
        "6",
        "5"
    );
    // A maximum of 0 would leave out every row; without sequences it leaves out none.
    assert_error!(
        check(&good, &good, (0, 20)),
        Error::MaxSeqlen { what: "max_seqlen_q", rows: 10 },
        "max_seqlen_q is 0",
        "10 rows"
    );
    assert_error!(
        check(&good, &good, (10, 0)),
        Error::MaxSeqlen { what: "max_seqlen_kv", rows: 20 },
        "max_seqlen_kv is 0"
    );
    check(&i32s(&[0]), &i32s(&[0]), (0, 0)).unwrap();
    assert_error!(bad(&[0, 10], &[0, 0, 20]), Error::Shape { .. }, "cu_seqlens");
    assert_error!(check(&f32s(&[3]), &good, (10, 20)), Error::DType { .. }, "cu_seqlens", "f32");
    assert_error!(check(&i32s(&[]), &good, (10, 20)), Error::Shape { .. }, "cu_seqlens");
    let dense = f16s(&[1, 10, 2, 16]);
    let cu_seqlens =
        CuSeqlens { q: good.view(), kv: good.view(), max_seqlen_q: 9, max_seqlen_kv: 9 };
    let call = Attention {
        cu_seqlens: Some(cu_seqlens),
        ..Attention::new(dense.view(), dense.view(), dense.view())
    };
    assert_error!(call.problem(), Error::Shape { what: "q", .. }, "q", "variable length");
}

#[test]
fn attention_block_masks() {
    let (q, k) = (f16s(&[3, 100, 8, 16]), f16s(&[3, 200, 2, 16]));
    let full = |seqlens: [usize; 2], batch: usize, heads: usize| {
        let geometry = BlockGeometry::new(seqlens[0], seqlens[1], 64, 128).unwrap();
        let blocks = vec![true; batch * heads * geometry.rows() * geometry.cols()];
        BlockMask::from_bool(geometry, batch, heads, &blocks).unwrap()
    };
    let with = |mask: &BlockMask| {
        let call =
            Attention { block_mask: Some(mask), ..Attention::new(q.view(), k.view(), k.view()) };
        let run = call.forward(&cpu());
        assert_eq!(call.problem().is_ok(), run.is_ok(), "problem and forward disagree");
        run
    };
    for (batch, heads) in [(1, 1), (1, 2), (1, 8), (3, 1), (3, 2), (3, 8)] {
        with(&full([100, 200], batch, heads)).unwrap();
    }
    for (seqlens, batch, heads, words) in [
        ([99, 200], 1, 1, ["99", "100"]),
        ([128, 200], 1, 1, ["128", "100"]),
        ([100, 256], 1, 1, ["256", "200"]),
        ([200, 100], 1, 1, ["200, 100]", "100, 200]"]),
        ([100, 200], 2, 1, ["[2, 1,", "1 or 3"]),
        ([100, 200], 1, 4, ["[1, 4,", "1 or 2 or 8"]),
        ([100, 200], 3, 16, ["[3, 16,", "1 or 2 or 8"]),
    ] {
        let result = with(&full(seqlens, batch, heads));
        assert_error!(result, Error::Shape { what: "block_mask", .. }, words[0], words[1]);
    }
    // Also where there is nothing to compute.
    let none = f16s(&[0, 100, 8, 16]);
    let mask = full([99, 100], 1, 1);
    let call = Attention {
        block_mask: Some(&mask),
        ..Attention::new(none.view(), none.view(), none.view())
    };
    assert_error!(call.forward(&cpu()), Error::Shape { what: "block_mask", .. }, "block_mask");
}

#[test]
fn attention_packed_block_masks() {
    let (rows, offsets) = (f16s(&[100, 2, 16]), i32s(&[0, 40, 100]));
    let of = |length: usize| {
        BlockMask::full(BlockGeometry::new(length, length, 64, 128).unwrap()).unwrap()
    };
    let packed = |lengths: &[usize]| {
        let masks: Vec<BlockMask> = lengths.iter().map(|&length| of(length)).collect();
        BlockMask::packed(&masks.iter().collect::<Vec<_>>()).unwrap()
    };
    let with = |mask: &BlockMask| {
        let cu_seqlens = CuSeqlens {
            q: offsets.view(),
            kv: offsets.view(),
            max_seqlen_q: 60,
            max_seqlen_kv: 60,
        };
        Attention {
            cu_seqlens: Some(cu_seqlens),
            block_mask: Some(mask),
            ..Attention::new(rows.view(), rows.view(), rows.view())
        }
        .forward(&cpu())
    };
    with(&packed(&[40, 60])).unwrap();
    for (mask, words) in [
        (of(60), ["[1, 1, 60, 60]", "a packed mask"]),
        (packed(&[40]), ["[1, 1, 40, 40]", "[2, 1 or 2 or 2, up to 60, up to 60]"]),
        (packed(&[40, 61]), ["[2, 1, 61, 61]", "up to 60"]),
    ] {
        assert_error!(with(&mask), Error::Shape { what: "block_mask", .. }, words[0], words[1]);
    }
    for (lengths, words) in
        [([39, 60], ["sequence 0 has 40", "39"]), ([40, 59], ["sequence 1 has 60", "59"])]
    {
        let result = with(&packed(&lengths));
        assert_error!(result, Error::InvalidCuSeqlens { which: "q", .. }, words[0], words[1]);
    }
    let dense = f16s(&[1, 100, 2, 16]);
    let mask = packed(&[100]);
    let call = Attention {
        block_mask: Some(&mask),
        ..Attention::new(dense.view(), dense.view(), dense.view())
    };
    assert_error!(call.forward(&cpu()), Error::Shape { what: "block_mask", .. }, "not packed");
}
