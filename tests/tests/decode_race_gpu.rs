//! Lengths that change while attention over a cache runs: what that call computes is unspecified,
//! and every later one with the same workspace is right.
#![forbid(unsafe_code)]

use blockflash_ops::attention_decode::{AttentionDecodeOperands, CacheAccess};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeWorkspace, DType, KvCache, Mask, Result, Stream, Tensor,
};
use blockflash_tests::gpu::{gpu, wait};
use blockflash_tests::number::{encode, normal_rounded};
use half::bf16;

const BATCH: usize = 12;
const CAPACITY: usize = 8192;
const HEADS_Q: usize = 16;
const HEADS_KV: usize = 4;
const HEAD_DIM: usize = 64;

fn normal(seed: u64, shape: &[usize], stream: &Stream) -> Result<Tensor> {
    let numbers: Vec<bf16> = normal_rounded(seed, shape.iter().product(), DType::BF16)
        .into_iter()
        .map(|x| bf16::from_bits(encode(DType::BF16, x) as u16))
        .collect();
    Ok(Tensor::from_slice(stream, &numbers, shape)?)
}

/// Queries for which one kernel or the other is selected on Hopper.
#[test]
fn later_calls_are_right() -> Result<()> {
    let Some(gpu) = gpu("decode_race_gpu::later_calls_are_right") else { return Ok(()) };
    let (stream, other) = (&gpu.stream, &gpu.device.stream()?);
    for queries in [1, 16] {
        let q = normal(1, &[BATCH, queries, HEADS_Q, HEAD_DIM], stream)?;
        let k = normal(2, &[BATCH, CAPACITY, HEADS_KV, HEAD_DIM], stream)?;
        let v = normal(3, &[BATCH, CAPACITY, HEADS_KV, HEAD_DIM], stream)?;
        let lengths_of = |step: usize, first: usize| -> Result<Tensor> {
            let lengths: Vec<i32> =
                (0..BATCH).map(|i| ((first + i * step) % CAPACITY) as i32 + 16).collect();
            Ok(Tensor::from_slice(stream, &lengths, &[BATCH])?)
        };
        let (few, many) = (lengths_of(31, 100)?, lengths_of(577, 7000)?);
        let mut lengths = many.copy_to(stream)?;
        let mut o = Tensor::zeros(stream, DType::BF16, q.shape())?;
        let races = other.capture(|stream| {
            for _ in 0..50 {
                lengths.copy_from(stream, &few)?;
                lengths.copy_from(stream, &many)?;
            }
            Ok::<(), blockflash_safe::Error>(())
        })?;

        let cache =
            KvCache { seqused_kv: Some(lengths.view()), ..KvCache::new(k.view(), v.view()) };
        let decode =
            AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(q.view()) };
        let bytes = decode.workspace_bytes(&cache, &gpu.device)?;
        let workspace = AttentionDecodeWorkspace::new(stream, bytes)?;
        let decode = AttentionDecode { workspace: Some(&workspace), ..decode };
        let graph = stream.capture(|stream| {
            let cache = CacheAccess::Read(cache);
            let operands = AttentionDecodeOperands { cache, o: o.view_mut(), lse: None };
            decode.forward_into(operands, stream)
        })?;
        for _ in 0..20 {
            races.launch(other)?;
            for _ in 0..40 {
                graph.launch(stream)?;
            }
        }
        wait(other, &|| "copies of lengths".into()).unwrap();
        wait(stream, &|| "calls that raced".into()).unwrap();

        // The copies leave the last lengths.
        let right = AttentionDecode { workspace: None, ..decode }.forward(cache, stream)?;
        let right = right.o.to_vec::<bf16>(stream)?;
        for replay in 0..900 {
            o.fill_bytes(stream, 0x7F)?;
            graph.launch(stream)?;
            let found = o.to_vec::<bf16>(stream)?;
            assert!(found == right, "replay {replay} with {queries} queries");
        }
    }
    Ok(())
}
