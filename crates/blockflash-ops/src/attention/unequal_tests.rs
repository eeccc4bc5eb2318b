//! Selection where values have another head dimension than queries and keys.

use super::super::plan;
use super::*;
use crate::fixtures::{gpu, gpus};
use crate::{Mask, ScoresProblem};

fn problem(dtype: DType, [qk, v]: [usize; 2]) -> AttentionProblem {
    let types = ElementTypes::all(dtype);
    AttentionProblem::contiguous(types, [2, 300, 500], [8, 2], HeadDims { qk, v })
}

/// A problem whose head dimensions differ takes the narrowest tile that covers both. Hopper has
/// tiles for such problems.
#[test]
fn unequal_head_dims_take_a_tile_that_covers_both() {
    let dims = [(192, 128), (128, 192), (64, 128), (72, 40), (96, 56), (8, 256), (512, 8)];
    for ((qk, v), gpu) in
        dims.into_iter().flat_map(|dims| gpus().into_iter().map(move |gpu| (dims, gpu)))
    {
        let head_dims = HeadDims { qk, v };
        let of_widest = select(&problem(DType::BF16, [qk.max(v); 2]), &gpu).unwrap();
        let of_widest = of_widest.attention_tile().unwrap();
        let problem = problem(DType::BF16, [qk, v]);
        let kernel = select(&problem, &gpu).unwrap();
        let tile = kernel.attention_tile().unwrap();
        let is_own = (qk, v) == (192, 128) && gpu.compute_capability.major == 9;
        let expected = if is_own { head_dims } else { of_widest.head_dims };
        assert_eq!(tile.head_dims, expected, "{head_dims} on {}", gpu.name);
        let plan = plan(kernel, &problem, &gpu).unwrap();
        let p = &plan.plan.scalars;
        assert_eq!(p.scores.scale, (1.0 / (qk as f64).sqrt()) as f32);
    }
}

#[test]
fn unequal_head_dims_that_no_tile_covers() {
    let of = |qk, v| select(&problem(DType::F16, [qk, v]), &gpu(9, 0)).unwrap_err().to_string();
    for (qk, v) in [(520, 64), (64, 520), (64, 60), (60, 64)] {
        let error = of(qk, v);
        let expected = format!("head_dim {qk} of q and k, {v} of v: kernels take multiples of 8");
        assert!(error.contains(&expected), "{error}");
    }
    let mixed = ElementTypes { kv: DType::BF16, ..ElementTypes::all(DType::F16) };
    let problem = AttentionProblem::contiguous(mixed, [2, 300, 500], [8, 2], HeadDims::all(64));
    let error = select(&problem, &gpu(9, 0)).unwrap_err().to_string();
    assert!(error.contains("q is f16, k and v are bf16 and o is f16"), "{error}");
}

/// On Hopper the tiles of 192 and 128 are for whatever fits into them and into no narrower one.
/// Blocks that they do not divide and score terms take wider tiles.
#[test]
fn hopper_has_tiles_for_narrow_values() {
    let h200 = CudaProperties { multiprocessors: 132, ..gpu(9, 0) };
    let name = |problem: AttentionProblem| {
        let symbol = select(&problem, &h200).unwrap().symbol();
        symbol.strip_prefix("blockflash_attention_fwd_sm90a_bf16_").unwrap().to_owned()
    };
    let of = |qk, v| problem(DType::BF16, [qk, v]);
    for (qk, v) in [(192, 128), (136, 128), (192, 8), (136, 136), (128, 136), (200, 128)] {
        let fits = qk <= 192 && v <= 128;
        assert_eq!(name(of(qk, v)).starts_with("d192v128_q128_"), fits, "{qk}, {v}");
        assert!(name(of(qk, v).with_lse()).ends_with("_lse"));
    }
    let blocks = |block_q, block_kv| {
        let (batch, heads, packed_rows, bits) = (1, 1, None, false);
        let mask = BlockMaskSizes { block_q, block_kv, batch, heads, packed_rows, bits };
        name(AttentionProblem { block_mask: Some(mask), ..of(192, 128) })
    };
    assert_eq!(blocks(128, 128), "d192v128_q128_kv128_s2");
    assert_eq!(blocks(256, 64), "d192v128_q128_kv64_s3");
    assert_eq!(blocks(64, 64), "d256_q64_kv64_s2");
    let alibi = AttentionProblem {
        scores: ScoresProblem { alibi: true, ..of(192, 128).scores },
        ..of(192, 128)
    };
    assert_eq!(name(alibi), "d256_q64_kv64_s2_terms");
    let long = |seqlen, mask| {
        let head_dims = HeadDims { qk: 192, v: 128 };
        let (types, sizes) = (ElementTypes::all(DType::BF16), [1, seqlen, seqlen]);
        name(AttentionProblem::contiguous(types, sizes, [16; 2], head_dims).with_mask(mask))
    };
    assert_eq!(long(16384, Mask::Full), "d192v128_q128_kv128_s2");
    assert_eq!(long(2048, Mask::causal()), "d192v128_q128_kv64_s3");
}
