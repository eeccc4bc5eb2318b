//! Selection, planning, support table and FLOP counts: pure functions, checked on fabricated GPUs
//! without any GPU.

use blockflash_ops::attention::{self, AttentionProblem, Mask};
use blockflash_ops::bsr_matmul::{self, BsrProblem};
use blockflash_ops::{
    Align, BlockMaskSizes, ComputeCapability, CudaProperties, DType, Error, Kernel, Major, Status,
    attention_flops, bsr_flops, support_with,
};
use blockflash_sys::manifest::{self, Variant};
use blockflash_tests::attention::{AttentionCase, masks, visible_keys};
use proptest::prelude::*;
use proptest::sample::select;
use std::collections::HashSet;

/// Name, compute capability, shared memory that a block may use in KB.
const GPUS: [(&str, (u32, u32), u32); 12] = [
    ("T4", (7, 5), 64),
    ("A100", (8, 0), 163),
    ("RTX 3090", (8, 6), 99),
    ("Jetson Orin", (8, 7), 163),
    ("L4", (8, 9), 99),
    ("H100", (9, 0), 227),
    ("H200", (9, 0), 227),
    ("B200", (10, 0), 227),
    ("B300", (10, 3), 227),
    ("Thor", (11, 0), 227),
    ("RTX 5090", (12, 0), 99),
    ("GB10", (12, 1), 99),
];

pub(crate) fn fabricated(name: &str, (major, minor): (u32, u32), smem_kb: u32) -> CudaProperties {
    CudaProperties {
        ordinal: 0,
        name: name.into(),
        compute_capability: ComputeCapability::new(major, minor),
        multiprocessors: 100,
        smem_per_block: smem_kb * 1024,
        smem_per_multiprocessor: (smem_kb + 1) * 1024,
        l2_bytes: 40 << 20,
        memory_bytes: 24 << 30,
        driver_version: 13000,
        clock_khz: 1_800_000,
        memory_clock_khz: 1_000_000,
        memory_bus_bits: 384,
    }
}

fn gpus() -> impl Strategy<Value = CudaProperties> {
    select(GPUS.to_vec()).prop_map(|(name, capability, smem)| fabricated(name, capability, smem))
}

/// Whether some kernel could run: the definition that selection must agree with.
fn runs(kernel: &Kernel, gpu: &CudaProperties) -> bool {
    kernel.target.runs_on(gpu.compute_capability) && kernel.smem_bytes() <= gpu.smem_per_block
}

proptest! {
    #![proptest_config(blockflash_tests::property::config(400))]

    #[test]
    fn attention_rows_are_usable_or_nothing_is(
        gpu in gpus(),
        dtype in select(vec![DType::F16, DType::BF16, DType::F32]),
        head_dim in 1..=300usize,
        sizes in (0..5usize, 0..3000usize, 0..3000usize),
        heads in (0..6usize, 1..6usize),
        right in prop::option::of(0..50usize),
        blocks in prop::option::of((1..=6u32, 1..=6u32, any::<[bool; 2]>())),
    ) {
        let heads = [heads.0 * heads.1, heads.1];
        let block_mask = blocks.map(|(q, kv, [per_entry, per_head])| BlockMaskSizes {
            block_q: 64 * q,
            block_kv: 64 * kv,
            batch: if per_entry { sizes.0.max(1) as u32 } else { 1 },
            heads: if per_head { heads[1] as u32 } else { 1 },
            packed_rows: None, bits: false
        });
        let problem = AttentionProblem::dense(dtype, [sizes.0, sizes.1, sizes.2], heads, head_dim);
        let mask = Mask::Window { left: None, right, align: Align::BottomRight };
        let problem = AttentionProblem { block_mask, ..problem.with_mask(mask) };
        let fits = |kernel: &Kernel| kernel.attention_tile().is_some_and(|tile| {
            let divides = |mask: BlockMaskSizes| {
                mask.block_q.is_multiple_of(tile.block_q)
                    && mask.block_kv.is_multiple_of(tile.block_kv)
            };
            !tile.terms
                && tile.types.q == dtype
                && tile.head_dims.min() >= head_dim
                && head_dim % 8 == 0
                && block_mask.is_none_or(divides)
        }) && runs(kernel, &gpu);
        let possible: Vec<&Kernel> =
            manifest::kernels().iter().filter(|kernel| fits(kernel)).collect();
        match attention::select(&problem, &gpu) {
            Ok(kernel) => {
                prop_assert!(fits(kernel), "{} on {}", kernel.image_name(), gpu.name);
                let machine_code = possible.iter().any(|kernel| !kernel.target.is_ptx());
                let fastest = !machine_code || !kernel.target.is_ptx();
                prop_assert!(fastest, "PTX where {} has machine code", gpu.name);
                let plan = attention::plan(kernel, &problem, &gpu).unwrap();
                let tile = kernel.attention_tile().unwrap();
                // Rows of a mask have equally many tiles, also the last one.
                let block_q = block_mask.map_or(tile.block_q, |mask| mask.block_q);
                let tiles_per_block = (block_q / tile.block_q) as usize;
                let tiles_q = sizes.1.div_ceil(block_q as usize) * tiles_per_block;
                let tiles = (tiles_q * heads[0] * sizes.0) as u32;
                let stay = match kernel.variant {
                    Variant::AttentionFwdHopper(tile) => {
                        Some(gpu.multiprocessors * tile.blocks_per_multiprocessor)
                    }
                    _ => None,
                };
                let (config, scalars) = (&plan.config, &plan.plan.scalars);
                let blocks = stay.map_or(tiles, |blocks| tiles.min(blocks));
                prop_assert_eq!(config.grid, [blocks, 1, 1]);
                prop_assert_eq!(
                    config.programmatic_dependent_launch,
                    kernel.waits_for_predecessor()
                );
                prop_assert_eq!(config.block, kernel.threads());
                prop_assert_eq!(config.smem_bytes, kernel.smem_bytes());
                prop_assert_eq!(scalars.longest, [sizes.1, sizes.2].map(|size| size as i32));
                let blocks = block_mask.map_or([0; 2], |mask| [mask.block_q, mask.block_kv]);
                prop_assert_eq!(scalars.blocks, blocks.map(|size| size as i32));
            }
            Err(Error::Unsupported { op, arch, what }) => {
                let unused = possible.first().map(|kernel| kernel.image_name());
                prop_assert!(unused.is_none(), "{op} on {arch}: {what}; but {unused:?} runs");
                prop_assert_eq!(arch, gpu.compute_capability.to_string());
                prop_assert!(!what.is_empty() && !what.contains('\n'));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn bsr_rows_are_usable_or_nothing_is(
        gpu in gpus(),
        dtype in select(vec![DType::F16, DType::BF16, DType::F32]),
        block_size in select(vec![1usize, 8, 16, 32, 48, 64, 128, 256]),
        mnk in (0..5000usize, 0..5000usize, 0..5000usize),
        // Mostly as most kernels take them.
        (a_transposed, [b, c]) in prop_oneof![
            3 => Just((false, [Major::Row; 2])),
            1 => (any::<bool>(), [select(Major::ALL.to_vec()), select(Major::ALL.to_vec())]),
        ],
    ) {
        let problem = BsrProblem::new(dtype, [mnk.0, mnk.1, mnk.2], block_size, 7)
            .with_layouts(a_transposed, b, c);
        let is_hopper = |kernel: &Kernel| matches!(kernel.variant, Variant::BsrMatmulHopper(_));
        // Tensor maps want rows or columns of B at multiples of 16 bytes.
        let line = if b == Major::Row { mnk.1 } else { mnk.2 };
        let any_c = |kernel: &Kernel| {
            matches!(kernel.variant, Variant::BsrMatmulHopper(tile) if !tile.gathers())
        };
        let b_column_major = b == Major::Column;
        let fits = |kernel: &Kernel| kernel.bsr_matmul_tile().is_some_and(|tile| {
            tile.dtype == dtype && tile.block_size as usize == block_size
                && (kernel.takes_any_layout() || c == Major::Row || any_c(kernel))
                && (kernel.takes_any_layout()
                    || tile.a_transposed == a_transposed && tile.b_column_major == b_column_major)
        }) && runs(kernel, &gpu)
            && (!is_hopper(kernel) || line % 8 == 0 || mnk.1 == 0 || mnk.2 == 0);
        let possible: Vec<&Kernel> =
            manifest::kernels().iter().filter(|kernel| fits(kernel)).collect();
        match bsr_matmul::select(&problem, &gpu) {
            Ok(kernel) => {
                prop_assert!(fits(kernel), "{} on {}", kernel.image_name(), gpu.name);
                let machine_code = possible.iter().any(|kernel| !kernel.target.is_ptx());
                let fastest = !machine_code || !kernel.target.is_ptx();
                prop_assert!(fastest, "PTX where {} has machine code", gpu.name);
                let plan = bsr_matmul::plan(kernel, &problem, &gpu).unwrap();
                let tile = kernel.bsr_matmul_tile().unwrap();
                let tiles_m = mnk.0.div_ceil(block_size).div_ceil(tile.block_rows as usize);
                let tiles = mnk.1.div_ceil(tile.block_n as usize) * tiles_m;
                let blocks = plan.config.grid[0] as usize;
                match kernel.variant {
                    // Some CTAs of a pair may have no columns, and some that share an SM no tile.
                    Variant::BsrMatmulHopper(tile) => {
                        let shared = tile.blocks_per_multiprocessor as usize;
                        let stay = gpu.multiprocessors as usize * shared;
                        prop_assert!(blocks <= stay && blocks >= tiles.min(stay - 1));
                        prop_assert!((blocks == 0) == (tiles == 0));
                    }
                    _ => prop_assert_eq!(blocks, tiles),
                }
                let early = plan.config.programmatic_dependent_launch;
                prop_assert_eq!(early, kernel.waits_for_predecessor());
                prop_assert_eq!(&plan.config.grid[1..], &[1, 1]);
                let params = &plan.params;
                prop_assert_eq!(
                    (params.m, params.n, params.k),
                    (mnk.0 as i64, mnk.1 as i64, mnk.2 as i64)
                );
            }
            Err(Error::Unsupported { op, arch, what }) => {
                let unused = possible.first().map(|kernel| kernel.image_name());
                prop_assert!(unused.is_none(), "{op} on {arch}: {what}; but {unused:?} runs");
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn flops_count_visible_pairs(
        case in masks(40),
        seqlen in (0..40usize, 0..40usize),
        heads in 1..4usize,
    ) {
        let problem = AttentionProblem::dense(DType::F16, [2, seqlen.0, seqlen.1], [heads, 1], 16);
        let problem = problem.with_mask(case);
        let oracle = AttentionCase {
            scores: case.into(),
            ..AttentionCase::simple(DType::F16, (heads, 1), 16, seqlen)
        };
        let sequence = oracle.sequences()[0];
        let pairs: usize =
            (0..seqlen.0).map(|i| visible_keys(&oracle, &sequence, i).len()).sum();
        prop_assert_eq!(attention_flops(&problem), Some(4 * (2 * heads * pairs * 16) as u64));
    }
}

#[test]
fn every_supported_gpu_runs_every_attention_size() {
    for (name, capability, smem) in GPUS.into_iter().filter(|gpu| gpu.1.0 >= 8) {
        let gpu = fabricated(name, capability, smem);
        for dtype in [DType::F16, DType::BF16] {
            for head_dim in (8..=512).step_by(8) {
                let problem = AttentionProblem::dense(dtype, [1, 100, 100], [4, 1], head_dim);
                if let Err(error) = attention::select(&problem, &gpu) {
                    panic!("{name}, {dtype}, head_dim {head_dim}: {error}");
                }
            }
        }
    }
}

#[test]
fn every_supported_gpu_runs_every_block_size() {
    for (name, capability, smem) in GPUS.into_iter().filter(|gpu| gpu.1.0 >= 8) {
        let gpu = fabricated(name, capability, smem);
        for dtype in [DType::F16, DType::BF16] {
            for (block_size, n) in
                [16, 32, 64, 128].into_iter().flat_map(|b| [1, 64, 256, 1000].map(|n| (b, n)))
            {
                let problem = BsrProblem::new(dtype, [1000, n, 1000], block_size, 100);
                if let Err(error) = bsr_matmul::select(&problem, &gpu) {
                    panic!("{name}, {dtype}, blocks of {block_size}, n {n}: {error}");
                }
            }
        }
    }
}

#[test]
fn rows_fit_the_gpus_of_their_target_and_have_names_of_their_own() {
    let mut names = HashSet::new();
    for kernel in manifest::kernels() {
        assert!(names.insert(kernel.image_name()), "{} comes twice", kernel.image_name());
        assert!(
            kernel.smem_bytes() <= kernel.target.smem_limit(),
            "{} needs {} bytes",
            kernel.image_name(),
            kernel.smem_bytes()
        );
        assert!(kernel.threads() <= 1024 && kernel.threads() % 32 == 0);
    }
}

#[test]
fn the_support_table_tells_the_truth() {
    assert!(
        support_with(None).iter().all(|kernel| kernel.status == Status::Cpu),
        "the CPU runs everything"
    );
    for (name, capability, smem) in GPUS {
        let gpu = fabricated(name, capability, smem);
        let table = support_with(Some(&gpu));
        assert!(!table.is_empty());
        for kernel in &table {
            match &kernel.status {
                Status::Kernel { symbol, target, image } => {
                    let found =
                        manifest::kernels().iter().find(|kernel| kernel.image_name() == *image);
                    let found =
                        found.unwrap_or_else(|| panic!("{name}: no kernel has the image {image}"));
                    assert_eq!((found.symbol(), found.target), (symbol.clone(), *target));
                    assert!(runs(found, &gpu), "{name} cannot run {image}");
                }
                Status::Cpu => panic!("{name}: the CPU backend in the table of a GPU"),
                Status::Unsupported { reason } => {
                    assert!(!reason.is_empty() && !reason.contains('\n'), "{name}: {reason}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        let any_kernel = table.iter().any(|kernel| matches!(kernel.status, Status::Kernel { .. }));
        assert_eq!(any_kernel, capability.0 >= 8, "{name}");
    }
}

#[test]
fn bsr_flops_count_stored_blocks_only() {
    assert_eq!(
        bsr_flops(&BsrProblem::new(DType::F16, [1000, 33, 1000], 64, 5)),
        2 * 5 * 64 * 64 * 33
    );
    assert_eq!(bsr_flops(&BsrProblem::new(DType::F16, [1000, 33, 1000], 64, 0)), 0);
}

#[test]
fn strides_that_no_kernel_takes_are_errors() {
    let h200 = fabricated("H200", (9, 0), 227);
    let good = AttentionProblem::dense(DType::F16, [2, 5, 7], [4, 2], 64);
    let kernel = attention::select(&good, &h200).unwrap();
    attention::plan(kernel, &good, &h200).unwrap();
    for (what, at) in
        ["q", "k", "v", "o"].into_iter().flat_map(|what| (0..3).map(move |at| (what, at)))
    {
        let mut bad = good;
        let strides = match what {
            "q" => &mut bad.q,
            "k" => &mut bad.k,
            "v" => &mut bad.v,
            _ => &mut bad.o,
        };
        *[&mut strides.batch, &mut strides.seq, &mut strides.head][at] += 4;
        let error = attention::plan(kernel, &bad, &h200).unwrap_err();
        assert!(
            matches!(error, Error::Misaligned { what: found, .. } if found == what),
            "{what}: {error}"
        );
    }
}

#[test]
fn grids_that_no_gpu_takes_are_errors() {
    let h200 = fabricated("H200", (9, 0), 227);
    let problem = AttentionProblem::dense(DType::F16, [1 << 20, 1 << 20, 64], [64, 64], 64);
    let kernel = attention::select(&problem, &h200).unwrap();
    assert!(matches!(attention::plan(kernel, &problem, &h200), Err(Error::TooLarge { .. })));
    let problem = BsrProblem::new(DType::F16, [1 << 40, 1 << 30, 64], 64, 1);
    let kernel = bsr_matmul::select(&problem, &h200).unwrap();
    assert!(matches!(bsr_matmul::plan(kernel, &problem, &h200), Err(Error::TooLarge { .. })));
}
