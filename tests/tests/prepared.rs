//! Prepared calls: the same results as the others, and nothing but what was prepared.

use blockflash_ops::{
    Attention, BlockGeometry, BlockMask, BsrMatmul, BsrMatrix, DType, Device, Error, Mask,
    Operation, Result, Scores, Stream, Tensor, View,
};
use blockflash_tests::gpu::gpu;
use half::f16;

fn values(count: usize, step: f32) -> Vec<f16> {
    (0..count).map(|i| f16::from_f32((i as f32 * step).sin())).collect()
}

fn bits(tensor: &Tensor, stream: &Stream) -> Vec<u16> {
    tensor.to_vec::<f16>(stream).unwrap().into_iter().map(f16::to_bits).collect()
}

fn attention(stream: &Stream) -> Result<()> {
    let shape = [2, 40, 4, 64];
    let q = Tensor::from_slice(stream, &values(2 * 40 * 4 * 64, 0.37), &shape)?;
    let other = Tensor::from_slice(stream, &values(2 * 40 * 4 * 64, 0.11), &shape)?;
    let [mut expected, mut o] =
        [Tensor::empty(stream, DType::F16, &shape)?, Tensor::zeros(stream, DType::F16, &shape)?];

    let first =
        Attention { scores: Mask::causal().into(), ..Attention::new(q.view(), q.view(), q.view()) };
    let prepared = first.prepare(&(o.view_mut(), None), stream)?;
    assert_eq!(prepared.kernel().is_none(), stream.device().is_cpu());
    // With other tensors of the same shape.
    let second = Attention {
        scores: Mask::causal().into(),
        ..Attention::new(other.view(), q.view(), other.view())
    };
    for call in [first, second] {
        call.forward_into(expected.view_mut(), None, stream)?;
        call.run_prepared(&prepared, (o.view_mut(), None), stream)?;
        assert_eq!(bits(&o, stream), bits(&expected, stream));
    }
    let refused = |call: Attention<'_>, o: &mut Tensor| {
        let result = call.run_prepared(&prepared, (o.view_mut(), None), stream);
        assert!(matches!(result, Err(Error::NotPrepared { op: "attention" })), "{result:?}");
    };
    refused(Attention { scores: Scores { mask: Mask::Full, ..first.scores }, ..first }, &mut o);
    refused(Attention { scores: Scores { softcap: Some(3.0), ..first.scores }, ..first }, &mut o);
    let shorter = first.q.slice(1, 0..39)?;
    let mut short = Tensor::empty(stream, DType::F16, &[2, 39, 4, 64])?;
    refused(Attention { q: shorter, ..first }, &mut short);
    Ok(())
}

/// A mask may visit other blocks, and another number of them.
fn block_masks(stream: &Stream) -> Result<()> {
    let shape = [1, 100, 2, 64];
    let q = Tensor::from_slice(stream, &values(100 * 2 * 64, 0.37), &shape)?;
    let mut o = Tensor::zeros(stream, DType::F16, &shape)?;
    let mask = |block_q, blocks: &[bool]| {
        BlockMask::from_bool(BlockGeometry::new(100, 100, block_q, 64)?, 1, 1, blocks)?.to(stream)
    };
    let (first, other) =
        (mask(64, &[true, false, false, true])?, mask(64, &[false, true, true, false])?);
    let fewer = mask(64, &[true, false, false, false])?;
    let plain = Attention::new(q.view(), q.view(), q.view());
    let with = |mask| Attention { block_mask: Some(mask), ..plain };
    let prepared = with(&first).prepare(&(o.view_mut(), None), stream)?;
    for mask in [&first, &other, &fewer] {
        with(mask).run_prepared(&prepared, (o.view_mut(), None), stream)?;
        assert_eq!(bits(&o, stream), bits(&with(mask).forward(stream)?.o, stream));
    }
    let wider = mask(128, &[true, true])?;
    for call in [plain, with(&wider)] {
        let result = call.run_prepared(&prepared, (o.view_mut(), None), stream);
        assert!(matches!(result, Err(Error::NotPrepared { op: "attention" })), "{result:?}");
    }
    Ok(())
}

fn bsr(stream: &Stream) -> Result<()> {
    let blocks = values(3 * 16 * 16, 0.7);
    let host = BsrMatrix::from_parts(
        32,
        48,
        16,
        &[0, 2, 3],
        &[0, 2, 1],
        View::from_slice(&blocks, &[3, 16, 16])?,
    )?;
    let a = host.to(stream)?;
    let b = Tensor::from_slice(stream, &values(48 * 24, 0.3), &[48, 24])?;
    let [mut expected, mut c] = [
        Tensor::empty(stream, DType::F16, &[32, 24])?,
        Tensor::zeros(stream, DType::F16, &[32, 24])?,
    ];
    let call = BsrMatmul::new(&a, b.view());
    let prepared = call.prepare(&c.view_mut(), stream)?;
    assert_eq!(prepared.kernel().is_none(), stream.device().is_cpu());
    call.matmul_into(expected.view_mut(), stream)?;
    call.run_prepared(&prepared, c.view_mut(), stream)?;
    assert_eq!(bits(&c, stream), bits(&expected, stream));
    let result = BsrMatmul { alpha: 2.0, ..call }.run_prepared(&prepared, c.view_mut(), stream);
    assert!(matches!(result, Err(Error::NotPrepared { op: "bsr_matmul" })), "{result:?}");
    Ok(())
}

#[test]
fn prepared_calls_on_the_cpu() {
    let stream = Device::cpu().stream().unwrap();
    attention(&stream).unwrap();
    block_masks(&stream).unwrap();
    bsr(&stream).unwrap();
}

#[test]
fn prepared_calls_on_a_gpu() {
    let Some(gpu) = gpu("prepared_calls_on_a_gpu") else { return };
    attention(&gpu.stream).unwrap();
    block_masks(&gpu.stream).unwrap();
    bsr(&gpu.stream).unwrap();
    // Prepared for one device, used on another.
    let host = Device::cpu().stream().unwrap();
    let q = Tensor::from_slice(&host, &values(16 * 64, 0.2), &[1, 16, 1, 64]).unwrap();
    let mut o = Tensor::zeros(&host, DType::F16, &[1, 16, 1, 64]).unwrap();
    let call = Attention::new(q.view(), q.view(), q.view());
    let on_gpu = q.copy_to(&gpu.stream).unwrap();
    let mut o_gpu = Tensor::zeros(&gpu.stream, DType::F16, &[1, 16, 1, 64]).unwrap();
    let prepared = Attention::new(on_gpu.view(), on_gpu.view(), on_gpu.view())
        .prepare(&(o_gpu.view_mut(), None), &gpu.stream)
        .unwrap();
    let result = call.run_prepared(&prepared, (o.view_mut(), None), &host);
    assert!(matches!(result, Err(Error::NotPrepared { .. })), "{result:?}");
}
