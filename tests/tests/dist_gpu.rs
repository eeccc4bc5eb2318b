//! Attention over ranks in threads that share one GPU, against the oracle of the whole sequence:
//! the same path as with a GPU for each, but for the way of the messages.

use blockflash_dist::Scheme;
use blockflash_ops::{DType, Mask};
use blockflash_tests::attention::{AttentionCase, Lengths};
use blockflash_tests::dist::{
    DistCase, dist_block_cases, dist_cases, dist_packed_cases, repeats, run_backward, run_forward,
};
use blockflash_tests::gpu::gpu;
use blockflash_tests::property;

#[test]
fn random_cases() {
    let Some(gpu) = gpu("dist_gpu::random_cases") else { return };
    let cases = || dist_cases(8, vec![DType::BF16, DType::F16], vec![8, 64, 72, 128, 256], 400);
    property::check(60, cases(), |case| run_forward(&case, &gpu.device).map(drop));
    property::check(60, cases(), |case| run_backward(&case, &gpu.device).map(drop));
}

#[test]
fn packed_sequences() {
    let Some(gpu) = gpu("dist_gpu::packed_sequences") else { return };
    let dtypes = vec![DType::BF16, DType::F16];
    let cases = dist_packed_cases(8, dtypes, vec![8, 64, 72, 128, 256], 400);
    for case in property::samples(60, cases) {
        run_forward(&case, &gpu.device).unwrap();
        run_backward(&case, &gpu.device).unwrap();
        repeats(&case, &gpu.device).unwrap();
    }
}

#[test]
fn block_masks() {
    let Some(gpu) = gpu("dist_gpu::block_masks") else { return };
    let cases = dist_block_cases(8, vec![DType::BF16, DType::F16], vec![64, 128], 1500);
    for case in property::samples(40, cases) {
        run_forward(&case, &gpu.device).unwrap();
        run_backward(&case, &gpu.device).unwrap();
    }
}

/// Sizes at which tiles are full, and one row more or less than that.
#[test]
fn long_sequences() {
    let Some(gpu) = gpu("dist_gpu::long_sequences") else { return };
    for seqlen in [2047, 2048, 2049] {
        for (heads, keys) in [(1, 4), (2, 2), (4, 1)] {
            for mask in [Mask::Full, Mask::causal()] {
                let simple = AttentionCase::simple(DType::BF16, (8, 4), 128, (0, 0));
                let lengths = Lengths::Dense { batch: 1, seqlen_q: seqlen, seqlen_kv: seqlen };
                let whole = AttentionCase { lengths, scores: mask.into(), ..simple };
                let case = DistCase { whole, scheme: Scheme { heads, keys }, cut: None };
                run_forward(&case, &gpu.device).unwrap();
                run_backward(&case, &gpu.device).unwrap();
                repeats(&case, &gpu.device).unwrap();
            }
        }
    }
}
