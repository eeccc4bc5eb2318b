use super::super::BlockGeometry;
use super::*;
use crate::attention::Align;
use crate::{Mask, Target};
use blockflash_safe::View;
use blockflash_sys::BlockMaskKernel;
use blockflash_sys::manifest;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::BLOCKFLASH_WINDOW_UNBOUNDED;

fn kernel() -> &'static Kernel {
    let is_build = |kernel: &&Kernel| {
        matches!(kernel.variant, Variant::BlockMask(BlockMaskKernel::Build { .. }))
    };
    manifest::kernels()
        .iter()
        .filter(is_build)
        .find(|kernel| kernel.target == Target::Sm90)
        .unwrap()
}

/// 40 rows and 19 columns of 2 batch entries and 3 heads.
fn sizes() -> Sizes {
    Sizes::new(BlockGeometry::new(40 * 128 - 5, 19 * 64, 128, 64).unwrap(), 2, 3).unwrap()
}

fn scores(k: usize, scores: &[f32]) -> BlockSource<'_> {
    BlockSource::Scores { scores: View::from_slice(scores, &[2, 3, 40, 19]).unwrap(), k }
}

#[test]
fn scores_under_a_window() {
    let data = vec![0f32; 2 * 3 * 40 * 19];
    let mask = Mask::Window { left: Some(100), right: None, align: Align::TopLeft };
    let choice = BlockChoice { mask, ..BlockChoice::new(scores(7, &data)) };
    let (params, config) = plan(kernel(), &sizes(), &choice, 999).unwrap();
    assert_eq!(
        (params.step, params.source_kind, params.k),
        (STEPS[0], BLOCKFLASH_BLOCK_SOURCE_SCORES, 7)
    );
    assert_eq!([params.batch, params.heads, params.rows, params.cols], [2, 3, 40, 19]);
    assert_eq!(
        [params.seqlen_q, params.seqlen_kv, params.block_q, params.block_kv],
        [5115, 1216, 128, 64]
    );
    let window = &params.window;
    assert_eq!(
        (window.left, window.right, window.align_bottom_right),
        (100, BLOCKFLASH_WINDOW_UNBOUNDED, 0)
    );
    assert_eq!((params.capacity, params.always.rows), (999, 0));
    // Three slabs of 16 rows for each of 6 heads.
    assert_eq!((config.grid, config.block, config.smem_bytes), ([18, 1, 1], 512, 0));
    // No row has more columns than there are.
    let choice = BlockChoice::new(scores(usize::MAX, &data));
    assert_eq!(plan(kernel(), &sizes(), &choice, 1).unwrap().0.k, 19);
}

#[test]
fn what_cannot_be_planned() {
    let data = vec![0f32; 2 * 3 * 40 * 19];
    let other =
        manifest::kernels().iter().find(|kernel| kernel.source() == "bsr_matmul_sm80").unwrap();
    let error =
        plan(other, &sizes(), &BlockChoice::new(scores(1, &data)), 1).unwrap_err().to_string();
    assert!(error.contains("computes something else"), "{error}");
    let one = View::from_slice(&[-1i32], &[1, 1, 1, 1]).unwrap();
    let lists = one.expand(3, (1 << 30) + 1).unwrap();
    let error =
        plan(kernel(), &sizes(), &BlockChoice::new(BlockSource::TopK(lists)), 1).unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "k", .. }), "{error}");
}
