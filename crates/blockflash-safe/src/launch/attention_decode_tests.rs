use super::{AttentionDecodeOperands, AttentionDecodeScalars, Fit, KvCacheViews, most_splits};
use crate::launch::attention_fixtures::PLAIN_SCORES;
use crate::launch::checked::{Launch, zeros};
use crate::{BsrPartsMemory, DType, Device, Kernel, LaunchConfig, ScoreTerms, Tensor, View};
use blockflash_sys::manifest::{AttentionDecode, AttentionDecodeHopper, Variant, kernels};
use blockflash_sys::params::{blockflash_attention_decode_terms_params, blockflash_kv_cache};
use blockflash_sys::{ElementTypes, HeadDims, Target};

/// One query of each sequence.
const SCALARS: AttentionDecodeScalars = AttentionDecodeScalars {
    scores: PLAIN_SCORES,
    longest: 0,
    most_queries: 1,
    splits: 128,
    chunk_min: 128,
    chunk_max: 4096,
    run_log2: 0,
    run: 1,
    even_ctas: 0,
    even_items: 0,
};

/// The rule of `decode/items.cuh`.
fn splits_of(keys: i64, [splits, shortest, longest]: [i64; 3]) -> i64 {
    let up = |a: i64, b: i64| (a + b - 1) / b;
    let chunk = up(keys, splits).max(shortest).min(longest).max(up(keys, 256));
    up(keys, up(chunk, 64) * 64).max(1)
}

/// The workspace has room for every length up to the capacity, and two levels of 16 combine all
/// splits.
#[test]
fn no_length_has_more_splits_than_the_capacity_allows() {
    for rule in [[16, 128, 4096], [128, 128, 4096], [1, 64, 64], [256, 64, 4096], [3, 192, 320]] {
        let mut largest = 1;
        for keys in (0..70_000).step_by(7).chain((70_000..2_000_000).step_by(4_001)) {
            largest = largest.max(splits_of(keys, rule));
            assert!(largest <= most_splits(keys, rule), "{rule:?}: {largest} of {keys} keys");
            assert!(largest <= 256, "{rule:?}: {largest} of {keys} keys");
        }
    }
}

#[test]
fn a_launch_chooses_clusters_up_to_the_limit_of_the_kernel() {
    let kernel = |rows, target| {
        let fits = |kernel: &&Kernel| {
            let Variant::AttentionDecode(tile) = kernel.variant else { return false };
            tile.rows == rows && kernel.target == target
        };
        kernels().iter().find(fits).unwrap()
    };
    let fit = |kernel: &Kernel, blocks, cluster| {
        LaunchConfig { cluster, ..LaunchConfig::of(kernel, blocks, false) }.fits(kernel, 20, true)
    };
    let hopper = kernel(8, Target::Sm90);
    // The last CTAs may have no split.
    for (blocks, size) in [(20, 2), (32, 8), (32, 16)] {
        fit(hopper, blocks, Some([size, 1, 1])).unwrap();
    }
    fit(hopper, 20, None).unwrap();
    for (kernel, blocks, cluster, reason) in [
        (hopper, 32, Some([32, 1, 1]), "expected None or [2..="),
        (hopper, 20, Some([1, 1, 1]), "expected None or [2..="),
        (hopper, 32, Some([8, 2, 1]), "expected None or [2..="),
        (hopper, 20, Some([16, 1, 1]), "do not divide into clusters"),
        (hopper, 21, None, "a grid of 21x1x1"),
        (kernel(16, Target::Sm90), 32, Some([8, 1, 1]), "expected None"),
        (kernel(8, Target::Sm80), 32, Some([8, 1, 1]), "expected None"),
    ] {
        let found = fit(kernel, blocks, cluster).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}

/// A CTA of a cluster reads the results of all splits of its group.
#[test]
fn clusters_hold_the_splits_of_a_group() {
    let tile = kernels().iter().find_map(AttentionDecode::of).unwrap();
    // SAFETY: a struct of numbers and pointers.
    let mut params: blockflash_attention_decode_terms_params = unsafe { std::mem::zeroed() };
    let p = &mut params.base;
    (p.splits, p.chunk_min, p.chunk_max) = (128, 128, 4096);
    for (capacity, fewest) in [(100, 1), (300, 3), (1024, 8), (2048, 16), (100_000, 16)] {
        params.base.cache.capacity = capacity;
        assert_eq!(tile.fewest_in_cluster(&SCALARS, &params), fewest, "{capacity}");
    }
    (params.base.cache.page_size, params.base.page_list_capacity) = (64, 8);
    params.base.cache.capacity = 0;
    assert_eq!(tile.fewest_in_cluster(&SCALARS, &params), 4);
}

/// As for attention forward: queries and keys have one head dimension, values and outputs another.
#[test]
fn each_tensor_has_its_own_head_dimension() {
    let stream = Device::cpu().stream().unwrap();
    let wide = |rows| Tensor::zeros(&stream, DType::F16, &[1, rows, 1, 16]).unwrap();
    let (q, cache, mut written) = (wide(1), wide(16), wide(1));
    for [qk, v] in [[16, 8], [8, 16]] {
        let mut fit = |columns: [usize; 4], rotated: bool| {
            let operands = AttentionDecodeOperands {
                q: (!rotated).then(|| q.view().slice(3, 0..columns[0]).unwrap()),
                cache: KvCacheViews {
                    k: cache.view().slice(3, 0..columns[1]).unwrap(),
                    v: cache.view().slice(3, 0..columns[2]).unwrap(),
                    block_table: None,
                    seqused: None,
                    scales: [None; 2],
                },
                o: written.view_mut().slice(3, 0..columns[3]).unwrap(),
                lse: None,
                sink: None,
                cu_seqlens_q: None,
                pages: None,
                terms: ScoreTerms::default(),
                tail_mask: None,
                workspace: None,
            };
            // SAFETY: a struct of numbers and pointers.
            let mut p: blockflash_kv_cache = unsafe { std::mem::zeroed() };
            let (types, widest) = (ElementTypes::all(DType::F16), HeadDims::all(64));
            let sizes = operands.fit_queries(types, widest, 0, &mut p)?.sizes;
            assert_eq!((p.pages, p.page_size, p.capacity), (1, 16, 16));
            let strides = [
                [p.k_stride_page, p.k_stride_slot, p.k_stride_head],
                [p.v_stride_page, p.v_stride_slot, p.v_stride_head],
            ];
            assert_eq!(strides, [[256, 16, 16]; 2]);
            Fit::Ok([sizes.head_dim_qk as usize, sizes.head_dim_v as usize])
        };
        let right = [qk, qk, v, v];
        assert_eq!(fit(right, false), Ok([qk, v]));
        // Rotated queries are in the output, which has no room for them, or too much.
        assert!(fit(right, true).unwrap_err().starts_with("q is f16 "));
        // Those of the cache are the measure of the others.
        for (i, name) in ["q", "q", "o", "o"].into_iter().enumerate() {
            let mut columns = right;
            columns[i] = qk + v - columns[i];
            let error = fit(columns, false).unwrap_err();
            assert!(error.starts_with(&format!("{name} is f16 ")), "{error}");
        }
    }
}

/// Attention of rows of one head to a contiguous cache whose values are its keys.
fn over_rows<'a>(
    q: &'a Tensor,
    cache: &'a Tensor,
    seqused: Option<View<'a>>,
    written: &'a mut Tensor,
    workspace: Option<&'a BsrPartsMemory>,
) -> AttentionDecodeOperands<'a> {
    AttentionDecodeOperands {
        q: Some(q.view()),
        cache: KvCacheViews {
            k: cache.view(),
            v: cache.view(),
            block_table: None,
            seqused,
            scales: [None; 2],
        },
        o: written.view_mut(),
        lse: None,
        sink: None,
        cu_seqlens_q: None,
        pages: None,
        terms: ScoreTerms::default(),
        tail_mask: None,
        workspace,
    }
}

/// The device divides the keys of all sequences where it knows their lengths, and there is room for
/// as many items as it is told.
#[test]
fn even_splits_need_lengths_on_the_device() {
    let stream = Device::cpu().stream().unwrap();
    let rows = |rows| Tensor::zeros(&stream, DType::F16, &[1, rows, 1, 16]).unwrap();
    let (q, cache, mut written) = (rows(1), rows(256), rows(1));
    let lengths = Tensor::zeros(&stream, DType::I32, &[1]).unwrap();
    let f16 = |tile: &AttentionDecodeHopper| tile.types.q == DType::F16;
    let tile = kernels().iter().filter_map(AttentionDecodeHopper::of).find(f16).unwrap();
    let mut fit = |even_ctas, given: bool, items| {
        let lengths = given.then(|| lengths.view());
        let operands = over_rows(&q, &cache, lengths, &mut written, None);
        let plan = AttentionDecodeScalars {
            splits: 256,
            chunk_min: 256,
            chunk_max: 1 << 20,
            even_ctas,
            even_items: items,
            ..SCALARS
        };
        let mut params = zeros::<AttentionDecodeHopper>();
        let blocks = tile.fit(&plan, &operands, &mut params)?;
        assert_eq!((params.run, params.even_ctas, params.base.items), (1, even_ctas, 1));
        Fit::Ok(blocks)
    };
    assert_eq!((fit(0, false, 1), fit(264, true, 1)), (Ok(1), Ok(1)));
    for (even_ctas, given) in [(264, false), (-1, true)] {
        assert!(fit(even_ctas, given, 1).unwrap_err().starts_with("even_ctas is "));
    }
    for items in [0, 2] {
        assert!(fit(264, true, items).unwrap_err().contains("expected 1 to 1"));
    }
}

/// Where no sequence is divided, a workspace may be of any size, and the kernel does not see it.
#[test]
fn a_workspace_that_is_not_needed_is_not_passed_on() {
    let stream = Device::cpu().stream().unwrap();
    let rows = |rows| Tensor::zeros(&stream, DType::F16, &[1, rows, 1, 16]).unwrap();
    let (q, cache, mut written) = (rows(1), rows(256), rows(1));
    let f16 = |tile: &AttentionDecodeHopper| tile.types.q == DType::F16;
    let tile = kernels().iter().filter_map(AttentionDecodeHopper::of).find(f16).unwrap();
    let memory = |numbers: usize, words| {
        let tensor = Tensor::zeros(&stream, DType::F32, &[numbers + words]).unwrap();
        BsrPartsMemory::from_tensor(tensor, words).unwrap()
    };
    let mut fit = |splits, memory: &BsrPartsMemory| {
        let operands = over_rows(&q, &cache, None, &mut written, Some(memory));
        let plan = AttentionDecodeScalars { splits, chunk_min: 64, chunk_max: 4096, ..SCALARS };
        let mut params = zeros::<AttentionDecodeHopper>();
        tile.fit(&plan, &operands, &mut params)?;
        Fit::Ok(params.base.arrivals.is_null())
    };
    assert_eq!(fit(1, &memory(1, 0)), Ok(true));
    assert!(fit(4, &memory(1, 0)).unwrap_err().starts_with("the workspace has "));
    assert_eq!(fit(4, &memory(4 * 18, 12)), Ok(false));
}
