use super::*;
use crate::launch::{LaunchConfig, checked};
use crate::{Device, Tensor};
use blockflash_sys::manifest;
use std::ptr::{null, null_mut};

/// 2 batch entries, 4 and 2 heads of 24 elements, 300 queries in blocks of 128, 129 keys in blocks
/// of 64; contiguous.
fn params() -> blockflash_block_scores_params {
    blockflash_block_scores_params {
        q: null(),
        k: null(),
        q_means: null_mut(),
        k_means: null_mut(),
        scores: null_mut(),
        q_stride_batch: 300 * 4 * 24,
        q_stride_seq: 4 * 24,
        q_stride_head: 24,
        k_stride_batch: 129 * 2 * 24,
        k_stride_seq: 2 * 24,
        k_stride_head: 24,
        step: BLOCKFLASH_BLOCK_SCORES_MEANS,
        batch: 2,
        num_heads_q: 4,
        num_heads_kv: 2,
        seqlen_q: 300,
        seqlen_kv: 129,
        block_q: 128,
        block_kv: 64,
        rows: 3,
        cols: 3,
        head_dim: 24,
    }
}

/// Tensors on the CPU (`fit` looks at sizes and strides only): q, k, their means, and the scores.
fn tensors() -> [Tensor; 5] {
    [
        zeros(DType::F16, &[2, 300, 4, 24]),
        zeros(DType::F16, &[2, 129, 2, 24]),
        zeros(DType::F32, &[2, 4, 3, 24]),
        zeros(DType::F32, &[2, 2, 3, 24]),
        zeros(DType::F32, &[2, 4, 3, 3]),
    ]
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

fn fit(tensors: &mut [Tensor; 5], params: &blockflash_block_scores_params, blocks: u32) -> Fit {
    let is_f16 = |row: &&Kernel| {
        matches!(row.variant, Variant::BlockMask(BlockMaskKernel::Scores { dtype: DType::F16, .. }))
    };
    let row = manifest::kernels().iter().find(is_f16).ok_or("no row")?;
    let config = LaunchConfig::of(row, blocks, false);
    let [q, k, q_means, k_means, scores] = tensors;
    let operands = BlockScoresOperands {
        q: q.view(),
        k: k.view(),
        q_means: q_means.view_mut(),
        k_means: k_means.view_mut(),
        scores: scores.view_mut(),
    };
    checked::fitted::<BlockScores>(row, &config, params, &operands).map(drop)
}

type Change = fn(&mut blockflash_block_scores_params);

#[test]
fn scores_that_fit() {
    // 12 means of q and 6 of k per batch entry; one tile of scores per batch entry and head.
    assert_eq!(fit(&mut tensors(), &params(), 36), Ok(()));
    let products =
        blockflash_block_scores_params { step: BLOCKFLASH_BLOCK_SCORES_PRODUCTS, ..params() };
    assert_eq!(fit(&mut tensors(), &products, 8), Ok(()));
}

#[test]
fn scores_that_do_not_fit() {
    let cases: [(&str, Change); 13] = [
        ("not positive", |p| p.batch = 0),
        ("not positive", |p| p.head_dim = 0),
        ("not positive", |p| p.block_kv = -64),
        ("not a multiple of the 3 of k", |p| p.num_heads_kv = 3),
        ("expected a multiple of 8", |p| p.head_dim = 20),
        ("expected a multiple of 8", |p| p.head_dim = 264),
        ("block rows, expected", |p| p.rows = 4),
        ("block columns, expected", |p| p.block_kv = 128),
        ("q is f16", |p| p.q_stride_seq = 104),
        ("k is f16", |p| p.k_stride_head = 48),
        ("k is f16", |p| p.num_heads_kv = 1),
        ("step is 2, expected one of", |p| p.step = 2),
        ("36x1x1 blocks", |p| p.step = BLOCKFLASH_BLOCK_SCORES_PRODUCTS),
    ];
    for (expected, change) in cases {
        let mut params = params();
        change(&mut params);
        let error = fit(&mut tensors(), &params, 36).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    for (at, name) in ["q", "k", "q_means", "k_means", "scores"].into_iter().enumerate() {
        let mut tensors = tensors();
        tensors[at] = zeros(DType::BF16, tensors[at].shape());
        let error = fit(&mut tensors, &params(), 36).unwrap_err();
        assert!(error.starts_with(&format!("{name} is bf16")), "{error}");
    }
}
