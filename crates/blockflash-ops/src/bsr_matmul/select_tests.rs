use super::super::{Activation, BiasKind, plan};
use super::*;
use crate::Error;
use crate::fixtures::{gpu, gpus};
use crate::selection::select_among;
use blockflash_sys::manifest::{self, BsrMatmul};
use blockflash_sys::{DType, Target, params};

fn problem(dtype: DType, block_size: usize, n: usize) -> BsrProblem {
    BsrProblem::new(dtype, [1000, n, 2000], block_size, 77)
}

/// Kernels that every GPU from Ampere on can run; the Hopper kernels are in `hopper_tests`.
fn bsr_rows() -> impl Iterator<Item = (&'static Kernel, BsrMatmul)> {
    manifest::kernels().iter().filter_map(|row| match row.variant {
        Variant::BsrMatmul(tile) => Some((row, tile)),
        _ => None,
    })
}

/// On Hopper the least waste is taken; the estimates for other GPUs are in `portable_tests.rs`.
#[test]
fn every_gpu_takes_machine_code_and_hopper_the_least_waste() {
    let rows: Vec<Kernel> = bsr_rows().map(|(row, _)| *row).collect();
    for gpu in gpus() {
        for (dtype, block_size) in
            bsr_rows().map(|(_, tile)| (tile.dtype, tile.block_size as usize))
        {
            for n in [1, 8, 64, 65, 128, 129, 200, 256, 257, 1000, 4096] {
                let problem = problem(dtype, block_size, n);
                let Ok(row) = select_among(&rows, &problem, &gpu) else {
                    assert!(bsr_rows().all(|(row, _)| accepts(row, &problem, &gpu).is_err()));
                    continue;
                };
                let chosen = row.bsr_matmul_tile().unwrap();
                assert!(
                    row.target.runs_on(gpu.compute_capability)
                        && row.smem_bytes() <= gpu.smem_per_block
                );
                assert!(chosen.dtype == dtype && chosen.block_size as usize == block_size);
                let columns = |tile: &BsrMatmulTile| n.next_multiple_of(tile.block_n as usize);
                for (other, tile) in
                    bsr_rows().filter(|(row, _)| accepts(row, &problem, &gpu).is_ok())
                {
                    let tile = tile.tile();
                    assert!(
                        !row.target.is_ptx() || other.target.is_ptx(),
                        "machine code comes before PTX"
                    );
                    let better = (columns(&tile), std::cmp::Reverse(tile.block_n))
                        < (columns(&chosen), std::cmp::Reverse(chosen.block_n));
                    let hopper = gpu.compute_capability.major == 9;
                    let same = other.target == row.target;
                    assert!(!hopper || !same || !better, "{} n {n}", gpu.name);
                }
                plan(row, &problem, &gpu).unwrap();
            }
        }
    }
}

#[test]
fn wide_and_narrow_tiles() {
    let row = |block_n, target| Kernel {
        variant: Variant::BsrMatmul(BsrMatmul { block_n, ..bsr_rows().next().unwrap().1 }),
        target,
    };
    let rows = [
        row(64, Target::Sm90),
        row(256, Target::Sm90),
        row(128, Target::Sm90),
        row(32, Target::Ptx80),
    ];
    let (_, tile_of_rows) = bsr_rows().next().unwrap();
    let chosen = |n| {
        let problem = problem(tile_of_rows.dtype, tile_of_rows.block_size as usize, n);
        select_among(&rows, &problem, &gpu(9, 0)).unwrap().bsr_matmul_tile().unwrap().block_n
    };
    assert_eq!(
        [1, 64, 65, 128, 129, 192, 193, 256, 300, 512, 900, 1030, 1640].map(chosen),
        [64, 64, 128, 128, 64, 64, 256, 256, 64, 256, 64, 256, 256]
    );
}

#[test]
fn what_is_missing_is_said() {
    let refusal = |dtype, block_size, major, minor| match select(
        &problem(dtype, block_size, 64),
        &gpu(major, minor),
    )
    .unwrap_err()
    {
        Error::Unsupported { op: "bsr_matmul", arch, what } => format!("{arch}: {what}"),
        other => panic!("{other}"),
    };
    assert!(refusal(DType::F16, 48, 9, 0).starts_with("sm_90: block size 48: kernels take ["));
    assert!(
        refusal(DType::F32, 64, 9, 0)
            .contains("kernels take f16 and bf16, but the matrices are f32")
    );
    assert!(refusal(DType::F16, 64, 7, 5).contains("sm_75: kernels need compute capability 8.0"));
    let mut small = gpu(9, 0);
    small.smem_per_block = 1024;
    let error = select(&problem(DType::F16, 64, 64), &small).unwrap_err().to_string();
    assert!(error.contains("1024 bytes of shared memory"), "{error}");
}

#[test]
fn every_row_has_a_plan() {
    for (row, tile) in bsr_rows() {
        let problem = BsrProblem {
            c_dtype: DType::F32,
            ldc: 304,
            alpha: 0.5,
            beta: 2.0,
            bias: BiasKind::PerRow,
            activation: Activation::Gelu,
            ..problem(tile.dtype, tile.block_size as usize, 300)
        };
        let plan = plan(row, &problem, &gpu(9, 0)).unwrap();
        let block_rows = 1000u32.div_ceil(tile.block_size);
        assert_eq!(plan.config.grid, [300u32.div_ceil(tile.block_n) * block_rows, 1, 1]);
        assert_eq!((plan.config.block, plan.config.smem_bytes), (row.threads(), row.smem_bytes()));
        assert_eq!((plan.config.cluster, plan.parts), (None, 1));
        let p = plan.params;
        assert!(
            p.row_ptr.is_null()
                && p.values.is_null()
                && p.b.is_null()
                && p.c.is_null()
                && p.bias.is_null()
        );
        assert_eq!([p.m, p.n, p.k, p.ldb, p.ldc], [1000, 300, 2000, 300, 304]);
        assert_eq!((p.c_dtype, p.bias_per_row), (params::BLOCKFLASH_DTYPE_F32, 1));
        assert_eq!((p.activation, p.alpha, p.beta), (params::BLOCKFLASH_ACTIVATION_GELU, 0.5, 2.0));
        // 300 elements are no multiple of 16 bytes.
        assert_eq!((p.b_vectorized, p.c_vectorized), (0, 0));
    }
}

#[test]
fn plans_have_limits() {
    let (h100, (row, tile)) = (gpu(9, 0), bsr_rows().next().unwrap());
    let good = problem(tile.dtype, tile.block_size as usize, 64);
    let huge = BsrProblem { m: 1 << 36, n: 1 << 20, ..good };
    assert!(matches!(plan(row, &huge, &h100), Err(Error::TooLarge { what: "grid", .. })));
    let integers = BsrProblem { c_dtype: DType::I32, ..good };
    assert!(matches!(plan(row, &integers, &h100), Err(Error::DType { what: "c", .. })));
    let blocks = BsrProblem { block_size: 48, ..good };
    assert!(matches!(plan(row, &blocks, &h100), Err(Error::Unsupported { .. })));
    let other = manifest::kernels().iter().find(|row| row.bsr_matmul_tile().is_none()).unwrap();
    assert!(matches!(plan(other, &good, &h100), Err(Error::Unsupported { .. })));
    assert!(matches!(accepts(other, &good, &h100), Err(Error::Unsupported { .. })));
    for (activation, code) in [
        (Activation::None, params::BLOCKFLASH_ACTIVATION_NONE),
        (Activation::Relu, params::BLOCKFLASH_ACTIVATION_RELU),
        (Activation::Silu, params::BLOCKFLASH_ACTIVATION_SILU),
    ] {
        assert_eq!(
            plan(row, &BsrProblem { activation, ..good }, &h100).unwrap().params.activation,
            code
        );
    }
}
