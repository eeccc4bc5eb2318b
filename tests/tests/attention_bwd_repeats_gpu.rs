//! The gradients of attention have the same bits in a thousand runs, whatever else the GPU does.
#![forbid(unsafe_code)]

use blockflash_ops::attention::{Mask, Scores};
use blockflash_ops::{DType, Stream, Tensor};
use blockflash_tests::attention::{
    AttentionCase, BlockCase, BlockPattern, Choice, Lengths, MaskHeads,
};
use blockflash_tests::attention_bwd::repeated_gradients;
use blockflash_tests::gpu::gpu;
use std::sync::atomic::{AtomicBool, Ordering};

const REPEATS: usize = 1000;

/// Keeps some SMs busy with copies until it is told to stop.
fn disturb(stop: &AtomicBool, stream: &Stream) {
    let zeros = || Tensor::zeros(stream, DType::U8, &[32 << 20]).unwrap();
    let (from, mut to) = (zeros(), zeros());
    while !stop.load(Ordering::Relaxed) {
        (0..8).for_each(|_| to.copy_from(stream, &from).unwrap());
        stream.synchronize().unwrap();
    }
}

/// Alone and beside copies of another stream.
fn repeat(name: &str, case: &AttentionCase) {
    let Some(gpu) = gpu(name) else { return };
    repeated_gradients(case, Choice::Selected, REPEATS / 2, &gpu.stream).unwrap();
    let (stop, other) = (AtomicBool::new(false), gpu.device.stream().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| disturb(&stop, &other));
        let beside = repeated_gradients(case, Choice::Selected, REPEATS / 2, &gpu.stream);
        stop.store(true, Ordering::Relaxed);
        beside.unwrap();
    });
}

/// Enough keys for the scheme that sums dq in turns.
fn dense(mask: Mask) -> AttentionCase {
    let simple = AttentionCase::simple(DType::BF16, (4, 2), 128, (1100, 1300));
    AttentionCase { scores: Scores { mask, sink: Some(()), ..Scores::default() }, ..simple }
}

/// The last heads start with their first block of keys.
fn ascending() -> AttentionCase {
    AttentionCase { heads_q: 8, heads_kv: 8, ..dense(Mask::causal()) }
}

#[test]
fn dense_gradients() {
    repeat("attention_bwd_repeats_gpu::dense_gradients", &dense(Mask::Full));
}

#[test]
fn causal_gradients() {
    let wide = AttentionCase { head_dim: 192, ..ascending() };
    for case in [dense(Mask::causal()), ascending(), wide] {
        repeat("attention_bwd_repeats_gpu::causal_gradients", &case);
    }
}

/// A mask of square blocks.
fn masked(block: usize) -> AttentionCase {
    let block_mask = Some(BlockCase {
        block_q: block,
        block_kv: block,
        per_entry: true,
        heads: MaskHeads::KeyValue,
        pattern: BlockPattern::Random(0.4),
    });
    AttentionCase { block_mask, ..dense(Mask::causal()) }
}

#[test]
fn gradients_under_a_block_mask() {
    repeat("attention_bwd_repeats_gpu::gradients_under_a_block_mask", &masked(128));
}

#[test]
fn gradients_under_narrow_blocks() {
    repeat("attention_bwd_repeats_gpu::gradients_under_narrow_blocks", &masked(64));
}

fn packed() -> AttentionCase {
    let lengths = vec![(300, 500), (0, 40), (700, 1200), (1, 1)];
    let lengths = Lengths::Packed { lengths, slack: (3, 5) };
    AttentionCase { lengths, ..dense(Mask::causal()) }
}

#[test]
fn gradients_of_packed_sequences() {
    repeat("attention_bwd_repeats_gpu::gradients_of_packed_sequences", &packed());
}

/// Tiles of 128 queries, and warpgroups with unequal shares of dq.
#[test]
fn narrow_gradients() {
    for case in [dense(Mask::Full), dense(Mask::causal()), ascending(), packed()] {
        for head_dim in [64, 96] {
            let case = AttentionCase { head_dim, ..case.clone() };
            repeat("attention_bwd_repeats_gpu::narrow_gradients", &case);
        }
    }
}

/// The heads of a group are split over CTAs, unequally; with sums of dq, and without.
#[test]
fn gradients_of_groups() {
    for head_dim in [64, 128, 256] {
        let group = AttentionCase { heads_q: 14, heads_kv: 2, head_dim, ..dense(Mask::causal()) };
        repeat("attention_bwd_repeats_gpu::gradients_of_groups", &group);
    }
}
