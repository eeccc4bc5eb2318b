//! Scores on the CPU, and the plan of their launches on a GPU; `tests/block_mask_gpu.rs` tests the
//! scores of a GPU.

use super::*;
use crate::fixtures::{gpu, values};
use blockflash_safe::Device;
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest::{self, Variant};
use half::f16;

/// 3 × 2 blocks.
fn geometry() -> BlockGeometry {
    BlockGeometry::new(300, 129, 128, 128).unwrap()
}

fn sizes(head_dim: usize) -> ScoreSizes {
    let dtype = DType::BF16;
    ScoreSizes { geometry: geometry(), dtype, batch: 2, heads_q: 6, heads_kv: 3, head_dim }
}

#[test]
fn the_cpu_computes_block_mean_scores() {
    let stream = Device::cpu().stream().unwrap();
    let (q, k) = (values(2 * 300 * 4 * 8, 1), values(2 * 129 * 2 * 8, 2));
    let q = View::from_slice(&q, &[2, 300, 4, 8]).unwrap();
    let k = View::from_slice(&k, &[2, 129, 2, 8]).unwrap();
    let mut scores = BlockScores::new(geometry(), q, k, &stream).unwrap();
    assert_eq!(scores.scores().shape(), [2, 4, 3, 2]);
    assert_eq!(scores.scores().to_vec::<f32>(&stream).unwrap(), [0.0; 48]);
    scores.compute(q, k, &stream).unwrap();
    let expected = block_mean_scores(geometry(), q, k).unwrap();
    assert_eq!(scores.scores().to_vec::<f32>(&stream).unwrap(), expected);

    let fewer = q.slice(0, 0..1).unwrap();
    let error = scores.compute(fewer, k.slice(0, 0..1).unwrap(), &stream).unwrap_err();
    assert!(matches!(error, Error::NotPrepared { op: "block_mask" }), "{error}");
    assert!(matches!(scores.compute(fewer, k, &stream), Err(Error::Shape { what: "k", .. })));
    let kernel = manifest::kernels().first().unwrap();
    assert!(matches!(scores.compute_with(kernel, q, k, &stream), Err(Error::Unsupported { .. })));
    let none = BlockGeometry::new(0, 0, 64, 64).unwrap();
    let empty = View::from_slice::<f16>(&[], &[2, 0, 4, 8]).unwrap();
    BlockScores::new(none, empty, empty, &stream).unwrap().compute(empty, empty, &stream).unwrap();
}

#[test]
fn launches() {
    let is_scores = |kernel: &&Kernel| {
        matches!(
            kernel.variant,
            Variant::BlockMask(BlockMaskKernel::Scores { dtype: DType::BF16, .. })
        )
    };
    let kernel = manifest::kernels().iter().find(is_scores).unwrap();
    let (q, k) = ([300 * 6 * 16, 6 * 16, 16, 1], [129 * 3 * 16, 16, 129 * 16, 1]);
    let [(means, first), (products, second)] = plan(kernel, &sizes(16), &q, &k).unwrap();
    assert_eq!(
        (means.step, products.step),
        (BLOCKFLASH_BLOCK_SCORES_MEANS, BLOCKFLASH_BLOCK_SCORES_PRODUCTS)
    );
    assert_eq!([means.q_stride_batch, means.q_stride_seq, means.q_stride_head], [28800, 96, 16]);
    assert_eq!([means.k_stride_batch, means.k_stride_seq, means.k_stride_head], [6192, 16, 2064]);
    assert_eq!([means.batch, means.num_heads_q, means.num_heads_kv, means.head_dim], [2, 6, 3, 16]);
    assert_eq!([means.rows, means.cols, means.block_q, means.block_kv], [3, 2, 128, 128]);
    // 18 means of q and 6 of k per batch entry; a tile of scores per batch entry and head.
    assert_eq!((first.grid, first.block, second.grid), ([48, 1, 1], 128, [12, 1, 1]));
    let error = plan(kernel, &sizes(16), &[28804, 96, 16, 1], &k).unwrap_err().to_string();
    assert!(error.contains("the batch stride is 28804 elements, not a multiple of 8"), "{error}");
    let other = manifest::kernels().first().unwrap();
    assert!(
        plan(other, &sizes(16), &q, &k)
            .unwrap_err()
            .to_string()
            .contains("computes something else")
    );
}

#[test]
fn what_no_kernel_computes() {
    let refused = |sizes: ScoreSizes| select(&sizes, &gpu(9, 0)).unwrap_err().to_string();
    assert!(
        refused(ScoreSizes { dtype: DType::F32, ..sizes(64) })
            .contains("kernels take f16 and bf16")
    );
    for head_dim in [0, 12, 264] {
        assert!(refused(sizes(head_dim)).contains("multiples of 8 up to 256"), "{head_dim}");
    }
}
