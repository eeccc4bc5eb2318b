//! Bad input is a typed error with a message of one line, never a panic and never a result.

use blockflash_ops::attention::{Attention, CuSeqlens, Mask};
use blockflash_ops::{
    BsrMatmul, BsrMatrix, Bias, DType, Device, Error, Layout, Stream, Tensor, View, ViewMut,
};
use blockflash_sys::manifest;
use half::f16;

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn f16s(shape: &[usize]) -> Tensor {
    Tensor::zeros(&cpu(), DType::F16, shape).unwrap()
}

fn f32s(shape: &[usize]) -> Tensor {
    Tensor::zeros(&cpu(), DType::F32, shape).unwrap()
}

fn i32s(values: &[i32]) -> Tensor {
    Tensor::from_slice(&cpu(), values, &[values.len()]).unwrap()
}

/// The error matches, and its message is one line that contains the given words.
macro_rules! assert_error {
    ($result:expr, $pattern:pat, $($word:expr),+) => {{
        let error = $result.err().expect(concat!("an error: ", stringify!($pattern)));
        let message = error.to_string();
        assert!(matches!(error, $pattern), "{error:?} is not {}", stringify!($pattern));
        assert!(!message.contains('\n') && message.len() < 300, "{message:?}");
        $(assert!(message.contains($word), "{message:?} does not say {:?}", $word);)+
    }};
}

#[test]
fn attention_shapes() {
    let (q, k) = (f16s(&[2, 5, 4, 16]), f16s(&[2, 7, 2, 16]));
    let with = |q: &Tensor, k: &Tensor, v: &Tensor| Attention::new(q.view(), k.view(), v.view()).problem();
    assert!(with(&q, &k, &k).is_ok());
    assert_error!(with(&f16s(&[2, 5, 64]), &k, &k), Error::Shape { what: "q", .. }, "q", "[2, 5, 64]");
    assert_error!(with(&q, &f16s(&[2, 7, 32]), &k), Error::Shape { what: "k", .. }, "k", "[2, 7, 32]");
    assert_error!(with(&q, &f16s(&[3, 7, 2, 16]), &k), Error::Shape { what: "k", .. }, "k", "[3, 7, 2, 16]");
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
    let with = |q: &Tensor, k: &Tensor, v: &Tensor| Attention::new(q.view(), k.view(), v.view()).problem();
    assert_error!(with(&q, &bf16, &k), Error::DType { what: "k", .. }, "k", "bf16", "f16");
    assert_error!(with(&q, &k, &bf16), Error::DType { what: "v", .. }, "v", "bf16");
    assert_error!(with(&ints, &ints, &ints), Error::DType { what: "q", .. }, "q", "i32");
    let stream = cpu();
    let call = Attention::new(q.view(), k.view(), k.view());
    let mut o = f32s(&[1, 5, 2, 16]);
    assert_error!(call.forward_into(o.view_mut(), None, &stream), Error::DType { what: "o", .. }, "o", "f32");
    let (mut o, mut lse) = (f16s(&[1, 5, 2, 16]), f16s(&[1, 2, 5]));
    let result = call.forward_into(o.view_mut(), Some(lse.view_mut()), &stream);
    assert_error!(result, Error::DType { what: "lse", .. }, "lse", "f16");
    let sink = f16s(&[2]);
    let with_sink = Attention { sink: Some(sink.view()), ..call };
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
    assert_error!(run(&[2, 4, 5, 16], &[2, 4, 5]), Error::Shape { what: "o", .. }, "o", "[2, 4, 5, 16]");
    assert_error!(run(&[10, 4, 16], &[2, 4, 5]), Error::Shape { what: "o", .. }, "o");
    assert_error!(run(&[2, 5, 4, 16], &[2, 5, 4]), Error::Shape { what: "lse", .. }, "lse", "[2, 5, 4]");
    assert_error!(run(&[2, 5, 4, 16], &[4, 10]), Error::Shape { what: "lse", .. }, "lse");
    let sink = f32s(&[2]);
    let with_sink = Attention { sink: Some(sink.view()), ..call };
    assert_error!(with_sink.problem(), Error::Shape { what: "sink", .. }, "sink", "[2]");
}

#[test]
fn attention_strides() {
    let data = vec![f16::ZERO; 4096];
    let strided = |shape: &[usize], strides: &[usize]| View::from_slice_strided(&data, shape, strides).unwrap();
    let good = strided(&[1, 5, 2, 16], &[0, 32, 16, 1]);
    let bad = strided(&[1, 5, 2, 16], &[0, 64, 32, 2]);
    assert_error!(Attention::new(bad, good, good).problem(), Error::Stride { what: "q", .. }, "q", "64, 32, 2");
    assert_error!(Attention::new(good, bad, good).problem(), Error::Stride { what: "k", .. }, "k");
    assert_error!(Attention::new(good, good, bad).problem(), Error::Stride { what: "v", .. }, "v");
    let mut out = vec![f16::ZERO; 4096];
    let o = ViewMut::from_slice_strided(&mut out, &[1, 5, 2, 16], &[0, 64, 32, 2]).unwrap();
    let result = Attention::new(good, good, good).forward_into(o, None, &cpu());
    assert_error!(result, Error::Stride { what: "o", .. }, "o");
    // Outputs whose elements share memory cannot even be made.
    for strides in [[0, 32, 16, 1], [160, 16, 16, 1], [160, 32, 8, 1]] {
        let overlapping = ViewMut::from_slice_strided(&mut out, &[2, 5, 2, 16], &strides);
        let message = overlapping.err().expect("an overlap").to_string();
        assert!(message.contains("overlap") && !message.contains('\n'), "{message}");
    }
}

#[test]
fn attention_factors() {
    let t = f16s(&[1, 5, 2, 16]);
    let base = Attention::new(t.view(), t.view(), t.view());
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let scale = Attention { softmax_scale: Some(bad), ..base };
        assert_error!(scale.problem(), Error::InvalidScale { what: "softmax_scale", .. }, "softmax_scale", "greater");
        let softcap = Attention { softcap: Some(bad), ..base };
        assert_error!(softcap.problem(), Error::InvalidScale { what: "softcap", .. }, "softcap");
    }
}

#[test]
fn attention_sequences() {
    let (q, k) = (f16s(&[10, 2, 16]), f16s(&[20, 2, 16]));
    let good = i32s(&[0, 4, 10]);
    let check = |cu_q: &Tensor, cu_kv: &Tensor, max: (usize, usize)| {
        let cu_seqlens = CuSeqlens { q: cu_q.view(), kv: cu_kv.view(), max_seqlen_q: max.0, max_seqlen_kv: max.1 };
        let call = Attention { cu_seqlens: Some(cu_seqlens), ..Attention::new(q.view(), k.view(), k.view()) };
        let checked = call.check_cu_seqlens(&cpu());
        // On the CPU the call itself checks too.
        let run = call.forward(&cpu());
        assert_eq!(checked.is_ok(), run.is_ok(), "check_cu_seqlens and forward disagree");
        run
    };
    check(&good, &i32s(&[0, 0, 20]), (6, 20)).unwrap();
    check(&i32s(&[0, 4, 9]), &i32s(&[0, 0, 7]), (100, 100)).unwrap();
    let bad = |cu_q: &[i32], cu_kv: &[i32]| check(&i32s(cu_q), &i32s(cu_kv), (10, 20));
    assert_error!(bad(&[1, 4, 10], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", index: 0, .. }, "q[0] is 1");
    assert_error!(bad(&[0, 5, 4], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", index: 2, .. }, "q[2] is 4");
    assert_error!(bad(&[0, 4, 11], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", .. }, "10");
    assert_error!(bad(&[0, -4, 10], &[0, 0, 20]), Error::InvalidCuSeqlens { which: "q", .. }, "-4");
    assert_error!(bad(&[0, 4, 10], &[0, i32::MIN, 20]), Error::InvalidCuSeqlens { which: "kv", .. }, "kv[1]");
    assert_error!(bad(&[0, 4, 10], &[0, i32::MAX, 20]), Error::InvalidCuSeqlens { which: "kv", .. }, "kv[1]");
    assert_error!(bad(&[0, 4, 10], &[0, 21, 21]), Error::InvalidCuSeqlens { which: "kv", .. }, "kv");
    assert_error!(check(&good, &good, (5, 20)), Error::InvalidCuSeqlens { which: "q", .. }, "6", "5");
    assert_error!(check(&good, &good, (10, 5)), Error::InvalidCuSeqlens { which: "kv", .. }, "6", "5");
    assert_error!(bad(&[0, 10], &[0, 0, 20]), Error::Shape { .. }, "cu_seqlens");
    assert_error!(check(&f32s(&[3]), &good, (10, 20)), Error::DType { .. }, "cu_seqlens", "f32");
    assert_error!(check(&i32s(&[]), &good, (10, 20)), Error::Shape { .. }, "cu_seqlens");
    let dense = f16s(&[1, 10, 2, 16]);
    let cu_seqlens = CuSeqlens { q: good.view(), kv: good.view(), max_seqlen_q: 9, max_seqlen_kv: 9 };
    let call = Attention { cu_seqlens: Some(cu_seqlens), ..Attention::new(dense.view(), dense.view(), dense.view()) };
    assert_error!(call.problem(), Error::Shape { what: "q", .. }, "q", "variable length");
}

#[test]
fn bsr_products() {
    let stream = cpu();
    let a = BsrMatrix::from_coo(40, 70, 16, DType::F16, &[(3, 5, 1.0), (39, 69, 2.0)]).unwrap();
    let b = f16s(&[70, 9]);
    let base = BsrMatmul::new(&a, b.view());
    let run = |call: BsrMatmul<'_>, c: &[usize]| call.matmul_into(f32s(c).view_mut(), &stream);
    run(base, &[40, 9]).unwrap();
    assert_error!(run(base, &[40, 8]), Error::Shape { what: "c", .. }, "c", "[40, 8]");
    assert_error!(run(base, &[9, 40]), Error::Shape { what: "c", .. }, "c");
    assert_error!(run(base, &[360]), Error::Shape { what: "c", .. }, "c");
    let other = f16s(&[71, 9]);
    assert_error!(run(BsrMatmul { b: other.view(), ..base }, &[40, 9]), Error::Shape { what: "b", .. }, "b", "70");
    let other = f16s(&[630]);
    assert_error!(run(BsrMatmul { b: other.view(), ..base }, &[40, 9]), Error::Shape { what: "b", .. }, "b");
    let other = f32s(&[70, 9]);
    assert_error!(run(BsrMatmul { b: other.view(), ..base }, &[40, 9]), Error::DType { what: "b", .. }, "b", "f32");
    let transposed = f16s(&[9, 70]);
    let transposed = BsrMatmul { b: transposed.view().permute(&[1, 0]).unwrap(), ..base };
    assert_error!(run(transposed, &[40, 9]), Error::Stride { what: "b", .. }, "b", "contiguous");
    let ints = base.matmul_into(i32s(&[0; 360]).view_mut(), &stream);
    assert_error!(ints, Error::Shape { .. } | Error::DType { .. }, "c");
    for bad in [f32::NAN, f32::INFINITY] {
        assert_error!(run(BsrMatmul { alpha: bad, ..base }, &[40, 9]), Error::InvalidScale { what: "alpha", .. }, "alpha");
        assert_error!(run(BsrMatmul { beta: bad, ..base }, &[40, 9]), Error::InvalidScale { what: "beta", .. }, "beta");
    }
    let bias = |bias: &Tensor, per_row| {
        let bias = if per_row { Bias::PerRow(bias.view()) } else { Bias::PerColumn(bias.view()) };
        run(BsrMatmul { bias, ..base }, &[40, 9])
    };
    bias(&f16s(&[40]), true).unwrap();
    bias(&f16s(&[9]), false).unwrap();
    assert_error!(bias(&f16s(&[9]), true), Error::Shape { what: "bias", .. }, "bias", "[9]");
    assert_error!(bias(&f16s(&[40]), false), Error::Shape { what: "bias", .. }, "bias");
    assert_error!(bias(&f32s(&[40]), true), Error::DType { what: "bias", .. }, "bias", "f32");
    assert_error!(BsrMatmul { beta: 1.0, ..base }.matmul(DType::F32, &stream), Error::InvalidScale { .. }, "beta");
    assert_error!(base.matmul(DType::I32, &stream), Error::DType { what: "c", .. }, "c", "i32");
}

#[test]
fn bsr_constructors() {
    let coo = |triplets: &[(usize, usize, f32)]| BsrMatrix::from_coo(40, 70, 16, DType::F16, triplets);
    assert_error!(coo(&[(40, 0, 1.0)]), Error::InvalidBsr(_), "triplet 0", "(40, 0)");
    assert_error!(coo(&[(0, 0, 1.0), (0, 70, 1.0)]), Error::InvalidBsr(_), "triplet 1");
    assert_error!(coo(&[(1, 2, 1.0), (5, 5, 1.0), (1, 2, 3.0)]), Error::InvalidBsr(_), "(1, 2)", "twice");
    let blocks = |blocks: &[(usize, usize)]| {
        BsrMatrix::from_blocks(40, 70, 16, DType::F16, blocks, &vec![0.0; 256 * blocks.len()])
    };
    assert_error!(blocks(&[(3, 0)]), Error::InvalidBsr(_), "(3, 0)");
    assert_error!(blocks(&[(0, 5)]), Error::InvalidBsr(_), "(0, 5)");
    assert_error!(blocks(&[(1, 1), (0, 0), (1, 1)]), Error::InvalidBsr(_), "(1, 1)", "twice");
    let short = BsrMatrix::from_blocks(40, 70, 16, DType::F16, &[(0, 0)], &[0.0; 255]);
    assert_error!(short, Error::InvalidBsr(_), "255");
    let padding = BsrMatrix::from_blocks(40, 70, 16, DType::F16, &[(2, 4)], &[1.0; 256]);
    assert_error!(padding, Error::NonzeroPadding { .. }, "beyond");
    let csr = |row_ptr: &[i32], col_idx: &[i32]| {
        BsrMatrix::from_csr(2, 3, 16, DType::F16, row_ptr, col_idx, &vec![1.0; col_idx.len()])
    };
    csr(&[0, 1, 3], &[2, 0, 1]).unwrap();
    assert_error!(csr(&[0, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[1, 1, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 2, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 1, 2], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 1, 1], &[-1]), Error::InvalidBsr(_), "-1");
    assert_error!(csr(&[0, 1, 1], &[3]), Error::InvalidBsr(_), "3");
    assert_error!(csr(&[0, 2, 2], &[1, 1]), Error::InvalidBsr(_), "twice");
    for block_size in [0, 1025, usize::MAX] {
        let matrix = BsrMatrix::from_coo(4, 4, block_size, DType::F16, &[]);
        assert_error!(matrix, Error::InvalidBsr(_), "block_size");
    }
    // Sizes that nobody has memory for are errors, not attempts.
    let huge = BsrMatrix::from_coo(usize::MAX, usize::MAX, 1, DType::F16, &[]);
    assert_error!(huge, Error::TooLarge { .. }, "block rows");
    let ints = BsrMatrix::from_coo(4, 4, 16, DType::I32, &[]);
    assert_error!(ints, Error::DType { .. }, "i32");
}

#[test]
fn kernels_do_not_run_on_the_cpu() {
    let row = manifest::rows().iter().find(|row| row.symbol().contains("attention")).unwrap();
    let t = f16s(&[1, 5, 2, 64]);
    let mut o = f16s(&[1, 5, 2, 64]);
    let call = Attention { mask: Mask::causal(), ..Attention::new(t.view(), t.view(), t.view()) };
    assert_error!(call.forward_with(row, o.view_mut(), None, &cpu()), Error::Unsupported { .. }, "cpu");
    let row = manifest::rows().iter().find(|row| row.symbol().contains("bsr")).unwrap();
    let a = BsrMatrix::from_coo(16, 16, 16, DType::F16, &[]).unwrap();
    let b = f16s(&[16, 4]);
    let mut c = f16s(&[16, 4]);
    let call = BsrMatmul::new(&a, b.view());
    assert_error!(call.matmul_with(row, c.view_mut(), &cpu()), Error::Unsupported { .. }, "cpu");
}

#[test]
fn layouts_that_cannot_be_addressed() {
    use blockflash_safe::Error;
    let huge = [usize::MAX, 2, 3];
    assert_error!(Layout::contiguous(&huge), Error::TooLarge, "large");
    assert_error!(Layout::strided(&[2, 2], &[usize::MAX, 1]), Error::TooLarge, "large");
    assert_error!(Layout::contiguous(&[1; 5]), Error::Rank { found: 5 }, "5");
    assert_error!(Layout::strided(&[1, 2], &[1]), Error::ShapeStrides { .. }, "2", "1");
    let data = [0f32; 10];
    assert_error!(View::from_slice(&data, &[11]), Error::OutOfBounds { needed: 11, available: 10 }, "11", "10");
    assert_error!(View::from_slice_strided(&data, &[2, 2], &[9, 1]), Error::OutOfBounds { .. }, "11", "10");
    let view = View::from_slice(&data, &[2, 5]).unwrap();
    assert_error!(view.slice(1, 3..6), Error::Slice { .. }, "3..6");
    assert_error!(view.slice(2, 0..1), Error::Slice { .. }, "dimension 2");
    assert_error!(view.permute(&[0, 0]), Error::Permutation { .. }, "[0, 0]");
    assert_error!(view.as_slice::<f16>(), Error::DType { .. }, "f16", "f32");
}

#[test]
fn devices_that_are_not_there() {
    for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "CUDA", "cuda:1:2", "cpu:0"] {
        let error = text.parse::<Device>().err().unwrap_or_else(|| panic!("{text:?} is no device"));
        assert!(matches!(error, blockflash_safe::Error::InvalidDevice { .. }), "{text:?}: {error:?}");
    }
    assert_eq!("cpu".parse::<Device>().unwrap(), Device::cpu());
    let error = Device::cuda(9999).err().expect("no machine has 10,000 GPUs");
    use blockflash_safe::Error;
    assert_error!(Err::<(), _>(error), Error::NoDriver | Error::DriverTooOld { .. } | Error::NoSuchDevice { .. } | Error::Cuda { .. }, " ");
}
