use super::plan::Launches;
use super::united::Unions;
use super::*;
use crate::Error;
use crate::attention::{Mask, PackedRows};
use crate::fixtures::{gpu, gpus};
use crate::kv_cache::{CacheSizes, TableSizes};
use blockflash_safe::CudaProperties;
use blockflash_sys::HeadDims;

fn h200() -> CudaProperties {
    let (memory_clock_khz, memory_bus_bits) = (3_201_000, 6144);
    CudaProperties { multiprocessors: 132, memory_clock_khz, memory_bus_bits, ..gpu(9, 0) }
}

fn lists([groups, granularity, capacity]: [usize; 3]) -> IndexListSizes {
    IndexListSizes { groups, capacity, granularity, strides: [1 << 20, capacity] }
}

/// Causal queries of sequences in pages of 128 slots.
fn problem(
    [batch, queries, keys]: [usize; 3],
    [heads_q, heads_kv]: [usize; 2],
    head_dim: usize,
    of_lists: [usize; 3],
) -> IndexAttentionProblem {
    let cache = CacheSizes::contiguous(DType::BF16, [batch * keys / 128, 128], heads_kv, head_dim);
    let max_pages = keys / 128;
    let table = Some(TableSizes { max_pages, stride: max_pages });
    let cache = CacheSizes { batch, capacity: keys, table, ..cache };
    let mut problem = IndexAttentionProblem::of(cache, [queries, heads_q], lists(of_lists));
    problem.attention = problem.attention.with_mask(Mask::causal());
    problem
}

fn latents(queries: usize, heads: usize) -> IndexAttentionProblem {
    let head_dims = HeadDims { qk: 576, v: 512 };
    let cache = CacheSizes::latent(DType::BF16, [queries, 65_536], head_dims);
    IndexAttentionProblem::of(cache, [1, heads], lists([1, 1, 2048]))
}

/// Kernel, launches and bytes of the selected one, planned within its checks.
fn selected(
    problem: &IndexAttentionProblem,
    gpu: &CudaProperties,
) -> (IndexTile, IndexAttentionPlan) {
    let kernel = select(problem, gpu).unwrap();
    (tile(kernel).unwrap(), plan(kernel, problem, gpu).unwrap())
}

#[test]
fn gpus_have_kernels() {
    for gpu in gpus() {
        for (head_dim, heads, widest) in [(64, [8, 8], 64), (72, [64, 4], 128), (256, [24, 2], 256)]
        {
            for invariant in [false, true] {
                let of = problem([3, 1, 4096], heads, head_dim, [heads[1], 64, 16]);
                let of = IndexAttentionProblem { batch_invariant: invariant, ..of };
                let (tile, _) = selected(&of, &gpu);
                let IndexTile::Listed(tile) = tile else { panic!("{tile:?}") };
                assert_eq!(tile.tile.head_dims.qk, widest, "{}", gpu.name);
            }
        }
        let codes = CacheSizes::contiguous(DType::E4M3, [3, 4096], 2, 128);
        let codes = IndexAttentionProblem::of(codes, [1, 8], lists([1, 16, 20]));
        for dtype in [DType::F16, DType::BF16] {
            assert!(matches!(selected(&codes.with_queries(dtype), &gpu).0, IndexTile::Listed(_)));
        }
        let message = |problem: &IndexAttentionProblem| match select(problem, &gpu) {
            Err(Error::Unsupported { op: "attention_index", what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert!(message(&codes.with_queries(DType::F32)).contains("q is f32: beside e4m3"));
        let of = |dtype, head_dim, of_lists| {
            let cache = CacheSizes::contiguous(dtype, [3, 4096], 2, head_dim);
            IndexAttentionProblem::of(cache, [1, 8], lists(of_lists))
        };
        assert!(message(&of(DType::F32, 64, [1, 1, 4])).contains("f32"));
        assert!(message(&of(DType::F16, 264, [1, 1, 4])).contains("up to 256"));
        let odd = message(&of(DType::F16, 64, [1, 32, 4]));
        assert!(odd.contains("blocks of 32 tokens: kernels take [1, 4, 16, 64, 128]"), "{odd}");
        let long = message(&of(DType::F16, 64, [1, 128, 1 << 23]));
        assert!(long.contains("not below 1073741824"), "{long}");
        let mut alibi = of(DType::F16, 64, [1, 1, 4]);
        alibi.attention.scores.alibi = true;
        assert!(message(&alibi).contains("alibi is given"), "{}", message(&alibi));
        let mut paged = of(DType::F16, 64, [1, 1, 4]);
        paged.cache.page_size = 24;
        paged.cache.table = Some(TableSizes { max_pages: 2, stride: 2 });
        assert!(message(&paged).contains("a multiple of 16"));
        let wide = message(&{
            let cache = CacheSizes::latent(DType::F16, [1, 64], HeadDims { qk: 320, v: 256 });
            IndexAttentionProblem::of(cache, [1, 8], lists([1, 1, 4]))
        });
        assert!(wide.contains("576 with values in the first 512"), "{wide}");
    }
}

/// Few heads of few queries have clusters, many heads have tiles of 64 rows
/// (`kernels/attention_latent_index_sm80/NOTES.md`).
#[test]
fn latent_rows_have_kernels() {
    let gpu = h200();
    for (queries, heads, expected) in [
        (1, 16, (LatentScheme::Clusters, 128)),
        (8, 16, (LatentScheme::Clusters, 256)),
        (16, 16, (LatentScheme::Clusters, 448)),
        (24, 16, (LatentScheme::Clusters, 512)),
        (32, 16, (LatentScheme::Clusters, 704)),
        (64, 16, (LatentScheme::Clusters, 1024)),
        (128, 16, (LatentScheme::Clusters, 2048)),
        (8, 64, (LatentScheme::Persistent, 128)),
        (8, 128, (LatentScheme::Persistent, 256)),
        (64, 128, (LatentScheme::Persistent, 2048)),
    ] {
        let (tile, plan) = selected(&latents(queries, heads), &gpu);
        let IndexTile::Latent(tile) = tile else { panic!("{tile:?}") };
        let Launches::Listed { plan: scalars, config } = plan.launches else { panic!("{plan:?}") };
        assert_eq!((tile.scheme, scalars.chunk), expected, "{queries} queries, {heads} heads");
        let splits = 2048_u32.div_ceil(scalars.chunk as u32);
        let clusters = tile.scheme == LatentScheme::Clusters && splits > 1;
        assert_eq!(config.cluster, clusters.then_some([splits, 1, 1]));
        assert_eq!(plan.workspace_bytes > 0, splits > 1);
    }
    for gpu in gpus() {
        let (tile, _) = selected(&latents(8, 16), &gpu);
        let IndexTile::Latent(tile) = tile else { panic!("{tile:?}") };
        let hopper = gpu.compute_capability.major == 9;
        assert_eq!(tile.scheme == LatentScheme::Clusters, hopper, "{}", gpu.name);
        let codes = CacheSizes::latent_codes([8, 4096]);
        let codes = IndexAttentionProblem::of(codes, [1, 128], lists([1, 1, 2048]));
        selected(&codes.with_queries(DType::BF16), &gpu);
        let error = select(&codes.with_queries(DType::F16), &gpu).unwrap_err().to_string();
        assert!(error.contains("beside latent rows of codes it takes bf16"), "{error}");
    }
}

/// Prompts take the kernel that unites lists, decoding does not.
#[test]
fn prompts_on_hopper_unite_lists() {
    let gpu = h200();
    let msa = |sizes| problem(sizes, [64, 4], 128, [4, 128, 16]);
    for (of, unites) in [
        (msa([1, 8192, 8192]), true),
        (msa([1, 32_768, 32_768]), true),
        (msa([16, 1, 65_536]), false),
        (msa([256, 1, 65_536]), false),
        (problem([1, 16_384, 16_384], [24, 2], 256, [2, 16, 128]), true),
        // Blocks of fewer tokens than a box of a tensor map has.
        (problem([1, 16_384, 16_384], [24, 2], 256, [2, 4, 512]), false),
    ] {
        let (tile, _) = selected(&of, &gpu);
        assert_eq!(matches!(tile, IndexTile::United(_)), unites, "{of:?}");
        let of = IndexAttentionProblem { batch_invariant: true, ..of };
        assert!(matches!(selected(&of, &gpu).0, IndexTile::Listed(_)));
    }
}

#[test]
fn tiles_of_united_lists_are_divided_among_launches() {
    let gpu = h200();
    let of = problem([1, 131_072, 131_072], [64, 4], 128, [4, 128, 64]);
    let (_, plan) = selected(&of, &gpu);
    let Launches::United { pairs, .. } = &plan.launches else { panic!("{plan:?}") };
    let unions = Unions::of(&of).unwrap();
    assert_eq!(unions.tiles, 4 * 131_072 / 8);
    assert!(pairs.len() > 1 && plan.workspace_bytes < 64 << 20, "{}", plan.workspace_bytes);
    let mut next = 0;
    for pair in pairs {
        assert_eq!(pair.plan.first, next);
        next += pair.plan.count;
        assert_eq!(pair.configs[0].grid[0], pair.plan.count as u32);
        assert_eq!(pair.configs[1].grid[0], 132.min(pair.plan.count as u32));
        assert_eq!(pair.plan.box_rows, 128);
    }
    assert_eq!(next as usize, unions.tiles);
    // Offsets of packed queries may ask for a tile more of each sequence.
    let mut packed = problem([5, 4096, 4096], [16, 1], 128, [1, 64, 16]);
    packed.attention.packed = Some(PackedRows { total_q: 10_000, total_kv: 0 });
    assert_eq!(Unions::of(&packed).unwrap().tiles, 10_000 / 8 + 5);
}

/// Splits follow from the capacity of lists alone.
#[test]
fn a_batch_changes_no_split_of_an_invariant_call() {
    for gpu in gpus() {
        for of_lists in [[1, 1, 2048], [1, 128, 16], [1, 16, 3], [1, 64, 0], [1, 4, 9000]] {
            let mut found = Vec::new();
            for batch in [1, 3, 40, 700] {
                let of = problem([batch, 1, 8192], [16, 1], 128, of_lists);
                let of = IndexAttentionProblem { batch_invariant: true, ..of };
                let (_, plan) = selected(&of, &gpu);
                let Launches::Listed { plan, .. } = plan.launches else { panic!("{plan:?}") };
                found.push(plan.chunk);
            }
            found.dedup();
            assert_eq!(found.len(), 1, "{of_lists:?}");
        }
    }
}

/// One query of each sequence gives work to all SMs.
#[test]
fn splits_fill_the_gpu() {
    let gpu = h200();
    for (batch, least) in [(1, 8), (4, 4), (16, 2), (512, 1)] {
        let (_, plan) = selected(&problem([batch, 1, 65_536], [64, 4], 128, [4, 128, 16]), &gpu);
        let Launches::Listed { plan: scalars, config } = plan.launches else { panic!("{plan:?}") };
        let splits = 2048 / scalars.chunk as usize;
        assert!(splits >= least && splits <= 32, "{splits} splits of {batch}");
        assert!(config.grid[0] as usize >= (batch * 4 * splits).min(132), "{config:?}");
    }
}
