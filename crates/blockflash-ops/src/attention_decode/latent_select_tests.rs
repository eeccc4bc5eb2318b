//! Selection and plans for caches whose values are the first columns of the keys.

use super::{AttentionDecodeProblem, CacheTile, accepts, plan, select, tile, workspace_bytes};
use crate::Error;
use crate::fixtures::{gpu, gpus};
use crate::kv_cache::{CacheSizes, TableSizes};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{Variant, kernels};
use blockflash_sys::{DType, HeadDims, Kernel};

const MLA: HeadDims = HeadDims { qk: 576, v: 512 };

fn problem(sizes: [usize; 2], head_dims: HeadDims, heads: usize) -> AttentionDecodeProblem {
    AttentionDecodeProblem::of(CacheSizes::latent(DType::BF16, sizes, head_dims), 1, heads)
}

fn refusal(problem: &AttentionDecodeProblem, gpu: &CudaProperties) -> String {
    match select(problem, gpu) {
        Err(Error::Unsupported { what, .. }) => what,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_gpu_has_kernels_for_latent_rows() {
    for gpu in gpus() {
        for head_dims in [MLA, HeadDims::all(512)] {
            for (dtype, heads, queries) in
                [(DType::F16, 1, 1), (DType::BF16, 16, 1), (DType::BF16, 128, 4)]
            {
                let cache = CacheSizes::latent(dtype, [3, 1000], head_dims);
                let problem = AttentionDecodeProblem::of(cache, queries, heads);
                let kernel = select(&problem, &gpu).unwrap();
                let Some(CacheTile::Latent(tile)) = tile(kernel) else { panic!("{kernel:?}") };
                assert_eq!((tile.types.q, tile.head_dims), (dtype, head_dims));
                assert!(plan(kernel, &problem, &gpu).is_ok() || !cfg!(feature = "all-gpus"));
            }
        }
    }
}

#[test]
fn other_rows_have_other_kernels() {
    let gpu = gpu(9, 0);
    // Short keys, which other kernels read twice.
    let short = problem([3, 1000], HeadDims { qk: 192, v: 128 }, 8);
    assert!(!matches!(tile(select(&short, &gpu).unwrap()), Some(CacheTile::Latent(_))));
    let mut apart = problem([3, 1000], MLA, 8);
    apart.cache.shared = false;
    assert_eq!(
        refusal(&apart, &gpu),
        "head_dim 576 of q and k, 512 of v: kernels take multiples of 8 up to 512"
    );
    for head_dims in [HeadDims { qk: 576, v: 504 }, HeadDims { qk: 640, v: 512 }] {
        let found = refusal(&problem([3, 1000], head_dims, 8), &gpu);
        assert!(
            found
                .ends_with("512 with values in the first 512, or 576 with values in the first 512")
        );
    }
    let kernel = select(&problem([3, 1000], MLA, 8), &gpu).unwrap();
    for other in [short, apart] {
        let Err(Error::Unsupported { what, .. }) = accepts(kernel, &other, &gpu) else { panic!() };
        assert!(what.contains("it takes keys of 576 with values in the first 512"), "{what}");
    }
}

#[test]
fn what_kernels_for_latent_rows_do_not_take_is_named() {
    let gpu = gpu(9, 0);
    let latent = problem([3, 1024], MLA, 8);
    let table = Some(TableSizes { max_pages: 128, stride: 128 });
    let mut pages = latent;
    (pages.cache.page_size, pages.cache.table) = (8, table);
    assert_eq!(refusal(&pages, &gpu), "pages of 8 slots, not of a multiple of 16");
    let mut tail = latent;
    tail.tail_mask = Some(super::TailMaskSizes { tail: 4 });
    assert_eq!(refusal(&tail, &gpu), "tail_mask is given, and it takes none");
    let mut listed = latent;
    listed.pages = Some(super::PageListSizes { capacity: 4 });
    assert_eq!(refusal(&listed, &gpu), "pages is given, and it visits all pages");
    let cache = CacheSizes::latent(DType::E4M3, [3, 1024], MLA);
    let codes = AttentionDecodeProblem::of(cache, 1, 8).with_queries(DType::BF16);
    assert!(refusal(&codes, &gpu).contains("e4m3"), "{}", refusal(&codes, &gpu));
}

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn portable(problem: &AttentionDecodeProblem) -> &'static Kernel {
    let gpu = h200();
    let is_portable = |kernel: &&Kernel| {
        matches!(kernel.variant, Variant::AttentionLatent(_))
            && accepts(kernel, problem, &gpu).is_ok()
    };
    kernels().iter().find(is_portable).unwrap()
}

/// Where only the device knows the lengths, the batch decides into how many parts sequences are
/// divided, unless bits must not depend on it.
#[test]
fn sequences_are_divided_by_the_batch_or_by_their_lengths_alone() {
    let planned = |batch, invariant| {
        let mut problem = problem([batch, 32_768], MLA, 16);
        problem.batch_invariant = invariant;
        let scalars = plan(portable(&problem), &problem, &h200()).unwrap().scalars;
        (scalars.splits, scalars.chunk_min)
    };
    assert_eq!([1, 8, 64, 1000].map(|batch| planned(batch, false).0), [256, 99, 13, 1]);
    assert!([1, 64, 1000].iter().all(|&batch| planned(batch, true) == (32, 256)));
}

#[test]
fn workspaces_hold_the_items_of_a_plan() {
    for (batch, heads, known) in
        [(1, 1, true), (1, 128, true), (128, 16, true), (1, 16, false), (128, 128, false)]
    {
        let mut problem = problem([batch, 32_768], MLA, heads);
        problem.cache.seqused_kv = !known;
        let kernel = portable(&problem);
        let plan = plan(kernel, &problem, &h200()).unwrap();
        let sums = (plan.items << plan.scalars.run_log2) * plan.partial_rows * (512 + 2) * 4;
        let bytes = workspace_bytes(kernel, &problem, &h200()).unwrap();
        assert!(plan.scalars.splits == 1 || sums <= bytes, "{batch} x {heads}: {sums} of {bytes}");
        assert!(bytes < 1 << 30, "{batch} x {heads}: {bytes}");
    }
}

/// Hopper divides the keys of all sequences evenly by lengths on the device, also of short ones.
#[test]
fn hopper_divides_by_lengths_on_the_device() {
    for capacity in [16, 1024, 100_000] {
        let mut problem = problem([128, capacity], MLA, 16);
        let of = |problem: &AttentionDecodeProblem| {
            let kernel = select(problem, &h200()).unwrap();
            assert!(matches!(kernel.variant, Variant::AttentionLatentHopper(_)));
            plan(kernel, problem, &h200()).unwrap().scalars.even_ctas
        };
        assert_eq!(of(&problem), 132);
        problem.batch_invariant = true;
        assert_eq!(of(&problem), 0);
        (problem.batch_invariant, problem.cache.seqused_kv) = (false, false);
        assert_eq!(of(&problem), 0);
    }
}

#[test]
fn every_gpu_has_a_kernel_for_rows_of_codes() {
    for gpu in gpus() {
        let cache = CacheSizes::latent_codes([3, 1000]);
        let problem = |dtype| AttentionDecodeProblem::of(cache, 2, 16).with_queries(dtype);
        let kernel = select(&problem(DType::BF16), &gpu).unwrap();
        let Some(CacheTile::Latent(tile)) = tile(kernel) else { panic!("{kernel:?}") };
        assert_eq!((tile.types.q, tile.types.kv, tile.hopper), (DType::BF16, DType::U8, false));
        assert!(plan(kernel, &problem(DType::BF16), &gpu).is_ok() || !cfg!(feature = "all-gpus"));
        // It takes no other rows, and no other kernel takes these.
        let plain =
            AttentionDecodeProblem::of(CacheSizes::latent(DType::BF16, [3, 1000], MLA), 2, 16);
        assert!(accepts(kernel, &plain, &gpu).is_err());
        let other = select(&plain, &gpu).unwrap();
        assert!(accepts(other, &problem(DType::BF16), &gpu).is_err());
        for dtype in [DType::F16, DType::F32] {
            let expected = format!("q is {dtype}: beside latent rows of codes it takes bf16");
            assert_eq!(refusal(&problem(dtype), &gpu), expected);
        }
    }
}
