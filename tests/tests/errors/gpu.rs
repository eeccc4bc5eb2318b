//! What only a GPU refuses. Skipped without one.

use blockflash_ops::attention::{Attention, CuSeqlens};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, BlockGeometry, BlockMask, BsrMatmul, BsrMatrix,
    BsrWorkspace, CacheAccess, DType, Error, KvCache, Operation, Scores, Tensor,
};
use blockflash_tests::gpu::gpu;

#[test]
fn attention_on_the_gpu() {
    let Some(gpu) = gpu("errors::gpu::attention_on_the_gpu") else { return };
    let stream = &gpu.stream;
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(stream, dtype, shape).unwrap();
    let good = zeros(DType::F16, &[2, 9, 2, 64]);
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| {
        Attention::new(q.view(), k.view(), v.view()).forward(stream)
    };
    run(&good, &good, &good).unwrap();

    // A first element, and strides, that are no multiples of 16 bytes.
    let wide = zeros(DType::F16, &[2, 9, 2, 72]);
    let shifted = wide.view().slice(3, 4..68).unwrap();
    let narrow = zeros(DType::F16, &[2, 9, 2, 68]);
    let strided = narrow.view().slice(3, 0..64).unwrap();
    let view = good.view();
    for bad in [shifted, strided] {
        let calls = [
            Attention::new(bad, view, view),
            Attention::new(view, bad, view),
            Attention::new(view, view, bad),
        ];
        for (call, what) in calls.into_iter().zip(["q", "k", "v"]) {
            assert_error!(call.forward(stream), Error::Misaligned { .. }, what, "16");
        }
    }
    for (start, width) in [(4, 72), (0, 68)] {
        let mut o = zeros(DType::F16, &[2, 9, 2, width]);
        let o = o.view_mut().slice(3, start..start + 64).unwrap();
        let result = Attention::new(view, view, view).forward_into(o, None, stream);
        assert_error!(result, Error::Misaligned { what: "o", .. }, "o", "16");
    }

    for (dtype, head_dim, word) in [
        (DType::F32, 64, "f32"),
        (DType::F16, 520, "520"),
        (DType::BF16, 12, "12"),
        (DType::F16, 1, "1"),
    ] {
        let t = zeros(dtype, &[1, 5, 1, head_dim]);
        assert_error!(run(&t, &t, &t), Error::Unsupported { op: "attention", .. }, word, "sm_");
    }

    let host = super::f16s(&[2, 9, 2, 64]);
    assert_error!(
        run(&host, &good, &good),
        Error::DeviceMismatch { what: "q", .. },
        "q",
        "cpu",
        "cuda"
    );
    assert_error!(run(&good, &host, &good), Error::DeviceMismatch { what: "k", .. }, "k");
    assert_error!(run(&good, &good, &host), Error::DeviceMismatch { what: "v", .. }, "v");
    let (mut o, mut lse) = (super::f16s(&[2, 9, 2, 64]), super::f32s(&[2, 2, 9]));
    let call = Attention::new(view, view, view);
    let result = call.forward_into(o.view_mut(), None, stream);
    assert_error!(result, Error::DeviceMismatch { what: "o", .. }, "o");
    let mut o = zeros(DType::F16, &[2, 9, 2, 64]);
    let result = call.forward_into(o.view_mut(), Some(lse.view_mut()), stream);
    assert_error!(result, Error::DeviceMismatch { what: "lse", .. }, "lse");
    let sink = super::f32s(&[2]);
    let result = Attention { scores: Scores { sink: Some(sink.view()), ..call.scores }, ..call }
        .forward(stream);
    assert_error!(result, Error::DeviceMismatch { what: "sink", .. }, "sink");

    // A block mask is where the tensors are.
    let mask = BlockMask::full(BlockGeometry::new(9, 9, 64, 64).unwrap()).unwrap();
    let result = Attention { block_mask: Some(&mask), ..call }.forward(stream);
    assert_error!(
        result,
        Error::DeviceMismatch { what: "block_mask", .. },
        "block_mask",
        "cpu",
        "cuda"
    );
    let mask = mask.to(stream).unwrap();
    Attention { block_mask: Some(&mask), ..call }.forward(stream).unwrap();
    let on_host = Attention {
        block_mask: Some(&mask),
        ..Attention::new(host.view(), host.view(), host.view())
    };
    let result = on_host.forward(&super::cpu());
    assert_error!(
        result,
        Error::DeviceMismatch { what: "block_mask", .. },
        "block_mask",
        "cpu",
        "cuda"
    );

    // Offsets on the GPU are checked when asked.
    let packed = zeros(DType::F16, &[9, 2, 64]);
    let offsets = Tensor::from_slice(stream, &[0i32, 5, 3], &[3]).unwrap();
    let cu_seqlens =
        CuSeqlens { q: offsets.view(), kv: offsets.view(), max_seqlen_q: 9, max_seqlen_kv: 9 };
    let view = packed.view();
    let call = Attention { cu_seqlens: Some(cu_seqlens), ..Attention::new(view, view, view) };
    assert_error!(
        call.check_cu_seqlens(stream),
        Error::InvalidCuSeqlens { which: "q", index: 2, .. },
        "q[2] is 3"
    );
    let mut o = zeros(DType::F16, &[9, 2, 64]);
    let result = call.check(&(o.view_mut(), None), stream);
    assert_error!(result, Error::InvalidCuSeqlens { which: "q", index: 2, .. }, "q[2] is 3");
    let cu_seqlens = Some(CuSeqlens { max_seqlen_q: 0, ..cu_seqlens });
    let result = Attention { cu_seqlens, ..call }.forward(stream);
    assert_error!(result, Error::MaxSeqlen { what: "max_seqlen_q", rows: 9 }, "max_seqlen_q is 0");

    // So are lengths and tables of a cache.
    let (q, pages) = (zeros(DType::F16, &[2, 1, 2, 64]), zeros(DType::F16, &[4, 16, 2, 64]));
    let table = Tensor::from_slice(stream, &[0i32, 1, 2, 9], &[2, 2]).unwrap();
    let check = |lengths: [i32; 2]| {
        let lengths = Tensor::from_slice(stream, &lengths, &[2]).unwrap();
        let cache = KvCache {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCache::new(pages.view(), pages.view())
        };
        let mut o = zeros(DType::F16, &[2, 1, 2, 64]);
        let (cache, o) = (CacheAccess::Read(cache), o.view_mut());
        let operands = AttentionDecodeOperands { cache, o, lse: None };
        AttentionDecode::new(q.view()).check(&operands, stream)
    };
    check([32, 16]).unwrap();
    let long = check([33, 16]);
    assert_error!(long, Error::InvalidData { what: "cache.seqused_kv", value: 33, .. }, "32");
    let missing = check([32, 17]);
    assert_error!(
        missing,
        Error::InvalidData { what: "cache.block_table", value: 9, .. },
        "[1, 1]",
        "4 pages"
    );
}

#[test]
fn bsr_on_the_gpu() {
    let Some(gpu) = gpu("errors::gpu::bsr_on_the_gpu") else { return };
    let stream = &gpu.stream;
    let matrix =
        |block_size, dtype| BsrMatrix::from_coo(40, 70, block_size, dtype, &[(3, 5, 1.0)]).unwrap();
    let run = |a: &BsrMatrix, b: &Tensor| BsrMatmul::new(a, b.view()).matmul(DType::F32, stream);
    let b = Tensor::zeros(stream, DType::F16, &[70, 9]).unwrap();
    run(&matrix(16, DType::F16).to(stream).unwrap(), &b).unwrap();
    for block_size in [1, 8, 24, 256] {
        let a = matrix(block_size, DType::F16).to(stream).unwrap();
        assert_error!(
            run(&a, &b),
            Error::Unsupported { op: "bsr_matmul", .. },
            &block_size.to_string(),
            "sm_"
        );
    }
    let f32s = Tensor::zeros(stream, DType::F32, &[70, 9]).unwrap();
    let a = matrix(16, DType::F32).to(stream).unwrap();
    assert_error!(run(&a, &f32s), Error::Unsupported { op: "bsr_matmul", .. }, "f32");
    assert_error!(run(&matrix(16, DType::F16), &b), Error::DeviceMismatch { .. }, "cpu", "cuda");
    let a = matrix(16, DType::F16).to(stream).unwrap();
    assert_error!(run(&a, &super::f16s(&[70, 9])), Error::DeviceMismatch { what: "b", .. }, "b");
    let mut c = super::f32s(&[40, 9]);
    let result = BsrMatmul::new(&a, b.view()).matmul_into(c.view_mut(), stream);
    assert_error!(result, Error::DeviceMismatch { what: "c", .. }, "c");
    let with = |workspace: &BsrWorkspace| {
        BsrMatmul { workspace: Some(workspace), ..BsrMatmul::new(&a, b.view()) }
            .matmul(DType::F32, stream)
    };
    with(&BsrWorkspace::new(&gpu.device.stream().unwrap()).unwrap()).unwrap();
    let on_cpu = BsrWorkspace::new(&super::cpu()).unwrap();
    assert_error!(
        with(&on_cpu),
        Error::DeviceMismatch { what: "workspace", .. },
        "workspace",
        "cpu"
    );
}
