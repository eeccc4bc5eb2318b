use super::super::launches::plan_all;
use super::super::select::{accepts, few, is_many, select};
use super::super::{PageListSizes, workspace_bytes};
use super::*;
use crate::Error;
use crate::attention::PackedRows;
use crate::fixtures::gpu;
use crate::kv_cache::{CacheSizes, TableSizes};
use blockflash_sys::DType;

fn problem(seqlen_q: usize, heads_q: usize, head_dim: usize) -> AttentionDecodeProblem {
    let cache = CacheSizes::contiguous(DType::BF16, [4, 32_768], 8, head_dim);
    AttentionDecodeProblem::of(cache, seqlen_q, heads_q)
}

#[test]
fn many_queries_have_a_kernel_of_their_own_on_hopper() {
    let (hopper, ampere) = (gpu(9, 0), gpu(8, 0));
    for (heads, fewest) in [(64, 128), (32, 256), (8, 1024), (128, 128)] {
        for head_dim in [64, 72, 128, 256] {
            // Otherwise an estimate decides for wide heads.
            let [under, from] = [fewest - 1, fewest].map(|q| AttentionDecodeProblem {
                batch_invariant: true,
                ..problem(q, heads, head_dim)
            });
            assert!(is_many(select(&from, &hopper).unwrap()), "{heads} heads, {fewest} queries");
            for (problem, gpu) in [(&under, &hopper), (&from, &ampere)] {
                assert!(!is_many(select(problem, gpu).unwrap()));
            }
        }
    }
}

/// With lengths on the device, head_dim 256 has no kernel for several queries, and the one for few
/// would read the keys once for each 16 rows.
#[test]
fn many_rows_of_wide_heads_have_it_with_lengths_on_the_device_too() {
    let hopper = gpu(9, 0);
    let of = |batch, seqlen_q| {
        let cache = CacheSizes::contiguous(DType::F16, [batch, 3840], 4, 256);
        AttentionDecodeProblem::of(CacheSizes { seqused_kv: true, ..cache }, seqlen_q, 8)
    };
    assert!(is_many(select(&of(23, 52), &hopper).unwrap()));
    assert!(!is_many(select(&of(23, 4), &hopper).unwrap()), "8 rows are one tile");
    let invariant = AttentionDecodeProblem { batch_invariant: true, ..of(23, 52) };
    assert!(!is_many(select(&invariant, &hopper).unwrap()), "whatever the batch");
    // A workspace that suffices for a batch suffices for a part of it.
    for seqlen_q in [3, 5, 8, 17, 52] {
        let bytes = |batch| {
            let problem = of(batch, seqlen_q);
            workspace_bytes(select(&problem, &hopper).unwrap(), &problem, &hopper).unwrap()
        };
        for batch in 1..=23 {
            assert!(bytes(batch) <= bytes(23), "{seqlen_q} queries of {batch} sequences");
        }
    }
}

#[test]
fn what_it_does_not_take_has_the_other_kernel() {
    let hopper = gpu(9, 0);
    let many = select(&problem(512, 32, 128), &hopper).unwrap();
    let mut listed = problem(512, 32, 128);
    listed.cache.table = Some(TableSizes { max_pages: 4, stride: 4 });
    listed.pages = Some(PageListSizes { capacity: 2 });
    let mut broadcast = problem(512, 32, 128);
    broadcast.cache.k.batch = 0;
    for problem in [listed, broadcast] {
        assert!(!is_many(select(&problem, &hopper).unwrap()));
        assert!(matches!(accepts(many, &problem, &hopper), Err(Error::Unsupported { .. })));
    }
}

#[test]
fn packed_sequences_have_two_launches() {
    let hopper = gpu(9, 0);
    let equal = problem(512, 32, 128);
    let kernel = select(&equal, &hopper).unwrap();
    let alone = plan_all(kernel, &equal, &hopper).unwrap();
    assert!(alone.few.is_none() && alone.many.unwrap().1.plan.fewest_queries == 0);
    // Fewer sequences have splits.
    assert!(workspace_bytes(kernel, &equal, &hopper).unwrap() > 0);
    let invariant = AttentionDecodeProblem { batch_invariant: true, ..equal };
    assert_eq!(workspace_bytes(kernel, &invariant, &hopper).unwrap(), 0);

    let mut packed = equal;
    packed.attention.packed = Some(PackedRows { total_q: 600, total_kv: 0 });
    let both = plan_all(kernel, &packed, &hopper).unwrap();
    let ((_, many), (other, of_others)) = (both.many.unwrap(), both.few.unwrap());
    assert_eq!(other, few(&packed, &hopper).unwrap());
    // Together they take every number of queries once.
    assert_eq!((many.plan.fewest_queries, of_others.scalars.most_queries), (256, 255));
    assert_eq!(of_others.scalars.longest, 512);
    let bytes = workspace_bytes(kernel, &packed, &hopper).unwrap();
    assert!(bytes >= of_others.items * 4);
}

#[test]
fn boxes_lie_in_one_page() {
    for (page_size, rows) in
        [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 128), (256, 128)]
    {
        assert_eq!(box_rows(page_size, 4096, 128), rows, "{page_size}");
    }
    assert_eq!(box_rows(1000, 1000, 128), 128);
    assert_eq!(box_rows(256, 4096, 64), 64);
}
