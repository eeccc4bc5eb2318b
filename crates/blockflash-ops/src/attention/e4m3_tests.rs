//! Selection and planning of the kernels of codes.

use super::super::{Mask, PackedRows, plan};
use super::*;
use crate::fixtures::{gpu, gpus};
use crate::{BiasProblem, Error, ScoresProblem};
use blockflash_sys::Target;
use blockflash_sys::manifest::{AttentionFwdE4m3, Variant};

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn problem(o: DType, seqlen: usize, head_dim: usize) -> AttentionProblem {
    let types = ElementTypes { o, ..ElementTypes::all(DType::E4M3) };
    let head_dims = HeadDims::all(head_dim);
    AttentionProblem::contiguous(types, [2, seqlen, seqlen], [16, 4], head_dims)
}

fn tile_of(kernel: &Kernel) -> AttentionFwdE4m3 {
    match kernel.variant {
        Variant::AttentionFwdE4m3(tile) => tile,
        other => panic!("{other:?}"),
    }
}

fn refusal(problem: &AttentionProblem) -> String {
    match select(problem, &h200()).unwrap_err() {
        Error::Unsupported { op: "attention", what, .. } => what,
        other => panic!("{other}"),
    }
}

fn masked(block_q: u32, block_kv: u32, bits: bool) -> Option<BlockMaskSizes> {
    Some(BlockMaskSizes { block_q, block_kv, batch: 1, heads: 1, packed_rows: None, bits })
}

#[test]
fn hopper_takes_every_multiple_of_16() {
    for (head_dim, o) in
        (16..=256).step_by(16).flat_map(|d| [DType::F16, DType::BF16].map(|o| (d, o)))
    {
        let problem = problem(o, 1000, head_dim);
        let window = Mask::Window { left: Some(30), right: Some(5), align: crate::Align::TopLeft };
        let packed = Some(PackedRows { total_q: 1500, total_kv: 1700 });
        for problem in [
            problem,
            problem.with_lse(),
            problem.with_mask(Mask::causal()),
            problem.with_mask(window),
            AttentionProblem { packed, ..problem },
            AttentionProblem { head_dims: HeadDims { qk: head_dim, v: 16 }, ..problem },
        ] {
            let kernel = select(&problem, &h200()).unwrap();
            let tile = tile_of(kernel);
            assert_eq!((tile.types, kernel.target), (problem.types, Target::Sm90a));
            let narrowest = [64, 128, 256].into_iter().find(|&width| width >= head_dim);
            assert_eq!(Some(tile.head_dims.qk), narrowest);
            let plan = plan(kernel, &problem, &h200()).unwrap();
            assert!(plan.plan.heads_per_section > 0);
        }
    }
}

#[test]
fn tiles_divide_the_blocks_of_a_mask() {
    for (head_dim, block, tile) in [
        (64, [128, 128], [128, 128]),
        (64, [64, 64], [64, 64]),
        (64, [192, 128], [192, 128]),
        (128, [128, 128], [128, 128]),
        (128, [64, 128], [64, 64]),
        (256, [128, 64], [128, 64]),
        (256, [64, 192], [64, 64]),
    ] {
        let block_mask = masked(block[0], block[1], false);
        let problem = AttentionProblem { block_mask, ..problem(DType::BF16, 4096, head_dim) };
        let chosen = tile_of(select(&problem, &h200()).unwrap());
        assert_eq!([chosen.block_q(), chosen.block_kv], tile, "{head_dim} {block:?}");
    }
}

#[test]
fn large_problems_take_wide_tiles() {
    for (head_dim, block_q) in [(64, 192), (128, 128), (256, 128)] {
        for mask in [Mask::Full, Mask::causal()] {
            let problem = problem(DType::BF16, 16384, head_dim).with_mask(mask);
            let tile = tile_of(select(&problem, &h200()).unwrap());
            assert_eq!(tile.block_q(), block_q, "{head_dim} {mask:?}");
        }
    }
}

#[test]
fn what_no_kernel_takes_is_said() {
    let plain = problem(DType::BF16, 300, 64);
    for (head_dim, what) in [
        (
            72,
            "head_dim 72: kernels take multiples of 16 up to 256; it runs with q, k and v \
              zero-padded to 80 and the softmax_scale of 72",
        ),
        (
            59,
            "head_dim 59: kernels take multiples of 16 up to 256; it runs with q, k and v \
              zero-padded to 64 and the softmax_scale of 59",
        ),
        (272, "head_dim 272: kernels take multiples of 16 up to 256"),
    ] {
        assert_eq!(refusal(&problem(DType::BF16, 300, head_dim)), what);
    }
    assert_eq!(
        refusal(&problem(DType::F32, 300, 64)),
        "o is f32: beside e4m3 kernels write f16 and bf16"
    );
    for dtype in [DType::E5M2, DType::I8] {
        let types = ElementTypes { o: DType::BF16, ..ElementTypes::all(dtype) };
        let what = refusal(&AttentionProblem { types, ..plain });
        assert!(what.contains(&format!("are {dtype}")) && what.contains("e4m3"), "{what}");
    }
    let bias = BiasProblem { dtype: DType::BF16, broadcast: [false; 4], mapped: true };
    let block_mask = masked(128, 128, true);
    for (problem, term) in [
        (
            AttentionProblem {
                scores: ScoresProblem { bias: Some(bias), ..plain.scores },
                ..plain
            },
            "bias",
        ),
        (
            AttentionProblem { scores: ScoresProblem { alibi: true, ..plain.scores }, ..plain },
            "alibi",
        ),
        (AttentionProblem { block_mask, ..plain }, "a block mask with partial blocks"),
    ] {
        let what = refusal(&problem);
        assert_eq!(what, format!("head_dim 64: {term} is given, and it takes none"));
    }
    for gpu in gpus().iter().filter(|gpu| gpu.compute_capability.major != 9) {
        let error = select(&plain, gpu).unwrap_err().to_string();
        assert!(error.contains("e4m3, which the kernels of Hopper take: convert them"), "{error}");
    }
}

/// Inputs are read, and outputs are stored, 16 bytes at a time.
#[test]
fn strides_are_multiples_of_16_bytes() {
    let plain = problem(DType::BF16, 300, 64);
    let kernel = select(&plain, &h200()).unwrap();
    let wide = |strides: Strides, by| Strides { seq: strides.seq + by, ..strides };
    let codes = AttentionProblem { k: wide(plain.k, 8), ..plain };
    let error = plan(kernel, &codes, &h200()).unwrap_err().to_string();
    assert!(error.contains("k ") && error.contains("not a multiple of 16"), "{error}");
    for fits in [
        AttentionProblem { k: wide(plain.k, 16), ..plain },
        AttentionProblem { o: wide(plain.o, 8), ..plain },
    ] {
        plan(kernel, &fits, &h200()).unwrap();
    }
    let output = AttentionProblem { o: wide(plain.o, 4), ..plain };
    let error = plan(kernel, &output, &h200()).unwrap_err().to_string();
    assert!(error.contains("not a multiple of 8"), "{error}");
    let repeated = AttentionProblem { v: Strides { batch: 0, ..plain.v }, ..plain };
    assert!(refusal(&repeated).contains("tensor map"));
}
