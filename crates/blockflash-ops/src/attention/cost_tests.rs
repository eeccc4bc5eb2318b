use super::super::{BlockMaskSizes, Mask, select};
use super::*;
use crate::fixtures::gpus;
use crate::rates::tests::{a10, a100, h200, l4, l40s, rtx_4090};
use crate::selection::Problem;
use blockflash_sys::DType;

fn problem(mask: Mask, heads: usize, seqlen: usize, head_dim: usize) -> AttentionProblem {
    let dense = AttentionProblem::dense(DType::BF16, [1, seqlen, seqlen], [heads; 2], head_dim);
    dense.with_mask(mask)
}

fn block_q(problem: &AttentionProblem, gpu: &CudaProperties) -> u32 {
    select(problem, gpu).unwrap().attention_tile().unwrap().block_q
}

/// The estimates for the selected kernel and for all others of its target and head_dim.
fn estimates(problem: &AttentionProblem, gpu: &CudaProperties) -> (f64, Vec<f64>) {
    let selected = select(problem, gpu).unwrap();
    let order = |kernel: &Kernel, tile: &AttentionTile| AttentionProblem::order(kernel, tile);
    let order_of_selected = order(selected, &selected.attention_tile().unwrap());
    let all = AttentionProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    let peers = all.filter(|(kernel, tile)| {
        order(kernel, tile) == order_of_selected
            && super::super::accepts(kernel, problem, gpu).is_ok()
    });
    let time = |kernel, tile| relative_time(&Candidate { kernel, tile, problem, gpu });
    (
        time(selected, &selected.attention_tile().unwrap()),
        peers.map(|(kernel, tile)| time(kernel, tile)).collect(),
    )
}

/// What is estimated, on the GPUs of Ada and on an A100: half the queries per CTA where the wide
/// tiles would leave SMs idle.
#[test]
fn wide_tiles_where_they_fill_the_gpu() {
    let lengths = [128, 512, 1024, 2048, 4096, 8192, 16384];
    let chosen = |gpu: CudaProperties, mask, head_dim| {
        lengths.map(|seqlen| block_q(&problem(mask, 8, seqlen, head_dim), &gpu))
    };
    let full = |gpu, head_dim| chosen(gpu, Mask::Full, head_dim);
    let causal = |gpu, head_dim| chosen(gpu, Mask::causal(), head_dim);
    for head_dim in [64, 128] {
        assert_eq!(full(l4(), head_dim), [64, 64, 64, 64, 128, 128, 128]);
        assert_eq!(causal(l4(), head_dim), [64, 64, 64, 64, 128, 128, 128]);
        assert_eq!(full(l40s(), head_dim), [64, 64, 64, 64, 128, 128, 128]);
        assert_eq!(causal(l40s(), head_dim), [64, 64, 64, 64, 64, 128, 128]);
        assert_eq!(full(rtx_4090(), head_dim), [64, 64, 64, 64, 128, 128, 128]);
        assert_eq!(causal(rtx_4090(), head_dim), [64, 64, 64, 64, 64, 128, 128]);
    }
    assert_eq!(full(a100(), 64), [64, 64, 64, 128, 64, 128, 128]);
    assert_eq!(full(a100(), 128), [64, 64, 64, 128, 128, 128, 128]);
}

/// The wide tile of sm_80 at a head_dim of 128 leaves no room for a second CTA in 100 KB.
#[test]
fn two_narrow_tiles_beat_one_wide_one_in_small_shared_memory() {
    for seqlen in [512, 4096, 16384] {
        assert_eq!(block_q(&problem(Mask::Full, 16, seqlen, 128), &a10()), 64);
    }
    assert_eq!(block_q(&problem(Mask::Full, 16, 16384, 64), &a10()), 128);
}

/// Portable kernels are selected on Hopper where a tensor map is not possible and no kernel without
/// one is wide enough.
#[test]
fn hopper_keeps_the_order_that_was_measured() {
    for (seqlen, head_dim) in [(128, 192), (512, 136), (16384, 256)] {
        let mut problem = problem(Mask::Full, 1, seqlen, head_dim);
        (problem.q.seq, problem.k.seq) = (0, 0);
        let kernel = select(&problem, &h200()).unwrap();
        assert!(matches!(kernel.variant, Variant::AttentionFwd(_)), "{}", kernel.symbol());
        assert_eq!(kernel.attention_tile().unwrap().block_q, 64);
        assert_eq!(estimates(&problem, &h200()).0, 0.0);
    }
}

/// Two stages and warps that share rows where shared memory has room for them.
#[test]
fn tiles_by_shared_memory() {
    let chosen = |gpu: &CudaProperties, mask: Mask, head_dim| {
        [512, 1024, 2048, 4096, 16384].map(|seqlen| {
            match select(&problem(mask, 64, seqlen, head_dim), gpu).unwrap().variant {
                Variant::AttentionFwd(tile) => [tile.block_q, tile.warps, tile.split, tile.stages],
                other => panic!("{other:?}"),
            }
        })
    };
    // By the estimate, short sequences without a mask take narrow tiles at 64.
    let [wide, narrow] = [128, 64].map(|block_q| [block_q, 4, 1, 2]);
    assert_eq!(chosen(&a100(), Mask::Full, 64), [narrow, wide, wide, wide, wide]);
    assert_eq!(chosen(&a100(), Mask::causal(), 64), [wide; 5]);
    for mask in [Mask::Full, Mask::causal()] {
        let stages = chosen(&l4(), mask, 64).map(|[.., split, stages]| [split, stages]);
        assert_eq!(stages, [[1, 1]; 5]);
        assert_eq!(chosen(&a100(), mask, 192), [[64, 4, 2, 1]; 5]);
        assert_eq!(chosen(&a100(), mask, 256), [[64, 4, 2, 1]; 5]);
        assert_eq!(chosen(&l4(), mask, 192), [[64, 4, 2, 1]; 5]);
        assert_eq!(chosen(&l4(), mask, 256), [[64, 4, 1, 1]; 5]);
    }
}

/// Sums in f32 at half the rate double the time of a problem that products limit.
#[test]
fn the_rate_of_products_decides() {
    let geforce = rtx_4090();
    let full_rate = CudaProperties { name: "NVIDIA RTX".into(), ..geforce.clone() };
    let problem = problem(Mask::Full, 64, 8192, 128);
    let [slow, fast] = [geforce, full_rate].map(|gpu| estimates(&problem, &gpu).0);
    assert!((1.9..=2.0).contains(&(slow / fast)), "{slow} {fast}");
}

/// At 300 GB/s a few queries against many keys wait for device memory, whatever the tile.
#[test]
fn device_memory_bounds() {
    let gpu = l4();
    let long = AttentionProblem::dense(DType::BF16, [64, 16, 65536], [8, 8], 64);
    let bytes = 2.0 * 64.0 * 8.0 * 65536.0 * 64.0 * 2.0;
    let seconds = estimates(&long, &gpu).0 / GpuRates::of(&gpu).clock;
    assert!((seconds / (bytes / 300e9) - 1.0).abs() < 0.01, "{seconds}");
    assert_eq!(block_q(&long, &gpu), 128);
}

/// Estimates are numbers, and the least wins. Under a block mask the largest tile does.
#[test]
fn the_least_estimate_is_taken() {
    let mut known = vec![a100(), a10(), l4(), l40s(), rtx_4090(), h200()];
    known.extend(gpus());
    for gpu in &known {
        for (heads, seqlen, head_dim) in
            [(0, 0, 8), (1, 1, 64), (7, 1000, 64), (64, 333, 128), (3, 1 << 30, 256)]
        {
            for mask in [Mask::Full, Mask::causal()] {
                let problem = problem(mask, heads, seqlen, head_dim);
                // No head is shared where there are none.
                let Ok(_) = select(&problem, gpu) else { continue };
                let (least, all) = estimates(&problem, gpu);
                // Infinite where a kernel for small grids is not to be taken.
                assert!(least.is_finite() && all.iter().all(|time| *time >= 0.0), "{all:?}");
                assert!(all.iter().all(|time| least <= *time), "{}: {all:?}", gpu.name);
                let [block_q_of_mask, block_kv] = [128; 2];
                let sizes = BlockMaskSizes {
                    block_q: block_q_of_mask,
                    block_kv,
                    batch: 1,
                    heads: 1,
                    packed_rows: None,
                    bits: false,
                };
                let masked = AttentionProblem { block_mask: Some(sizes), ..problem };
                if head_dim <= 128 {
                    assert_eq!(block_q(&masked, gpu), 128, "{}", gpu.name);
                }
            }
        }
    }
}
