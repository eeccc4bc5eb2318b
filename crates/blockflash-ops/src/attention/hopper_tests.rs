//! Selection and planning of the Hopper kernels.

use super::super::{Align, AttentionPlan, Mask, PackedRows, plan};
use super::*;
use crate::fixtures::gpu;
use crate::selection::select_among;
use crate::{BiasProblem, Error, HeadDims, ScoresProblem};
use blockflash_safe::AttentionFwdPlan;
use blockflash_sys::Target;
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::params::BLOCKFLASH_WINDOW_UNBOUNDED;

fn select(problem: &AttentionProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    select_among(manifest::kernels(), problem, gpu)
}

fn h200() -> CudaProperties {
    CudaProperties { multiprocessors: 132, ..gpu(9, 0) }
}

fn problem(batch: usize, heads: [usize; 2], seqlen: usize, head_dim: usize) -> AttentionProblem {
    AttentionProblem::dense(DType::BF16, [batch, seqlen, seqlen], heads, head_dim)
}

fn planned(problem: &AttentionProblem) -> (AttentionPlan, AttentionFwdPlan) {
    let persistent: Vec<Kernel> = manifest::kernels()
        .iter()
        .filter(|kernel| !matches!(kernel.variant, Variant::AttentionFwdSmall(_)))
        .cloned()
        .collect();
    let kernel = select_among(&persistent, problem, &h200()).unwrap();
    let plan = plan(kernel, problem, &h200()).unwrap();
    assert!(plan.plan.heads_per_section > 0, "{problem:?} takes no persistent kernel");
    (plan, plan.plan)
}

#[test]
fn blocks_are_as_wide_as_the_grid_allows() {
    let block_q = |batch, heads, seqlen, head_dim| {
        let kernel = select(&problem(batch, [heads, heads], seqlen, head_dim), &h200()).unwrap();
        assert_eq!(kernel.target, Target::Sm90a);
        kernel.attention_tile().unwrap().block_q
    };
    assert_eq!(block_q(1, 8, 512, 64), 64);
    assert_eq!(block_q(1, 8, 4096, 64), 128);
    assert_eq!(block_q(1, 8, 8192, 64), 192);
    assert_eq!(block_q(4, 32, 4096, 64), 192);
    assert_eq!(block_q(1, 8, 512, 128), 64);
    assert_eq!(block_q(4, 16, 4096, 128), 128);
    assert_eq!([72, 136, 256].map(|head_dim| block_q(1, 1, 1, head_dim)), [128, 128, 64]);
    assert_eq!([64, 128, 256].map(|head_dim| block_q(32, 16, 512, head_dim)), [192, 128, 128]);
    assert_eq!([96, 192].map(|head_dim| block_q(4, 16, 4096, head_dim)), [192, 128]);
}

fn with_bias(
    dense: AttentionProblem,
    dtype: DType,
    broadcast: [bool; 4],
    mapped: bool,
) -> AttentionProblem {
    let bias = Some(BiasProblem { dtype, broadcast, mapped });
    AttentionProblem { scores: ScoresProblem { bias, ..dense.scores }, ..dense }
}

/// Portable kernels take a bias of which there is no tensor map.
#[test]
fn score_terms_take_their_kernels() {
    let name = |problem: AttentionProblem| {
        let symbol = select(&problem, &h200()).unwrap().symbol();
        let name = symbol.strip_prefix("blockflash_attention_fwd_").unwrap().to_owned();
        assert!(name.ends_with("_terms") || name.ends_with("_bits"), "{name}");
        name
    };
    let is_portable = |problem: AttentionProblem| name(problem).starts_with("sm80_");
    let dense = |head_dim| problem(4, [16, 16], 4096, head_dim);
    let full = [false; 4];
    for head_dim in [64, 96, 128, 192, 256] {
        for broadcast in [full, [true, false, false, false], [true, true, false, false]] {
            assert!(!is_portable(with_bias(dense(head_dim), DType::BF16, broadcast, true)));
        }
        for (dtype, broadcast, mapped) in [
            (DType::BF16, full, false),
            (DType::F16, full, true),
            (DType::F32, full, false),
            (DType::BF16, [false, false, true, false], true),
            (DType::BF16, [false, false, false, true], true),
        ] {
            assert!(is_portable(with_bias(dense(head_dim), dtype, broadcast, mapped)));
        }
    }
    let with_alibi = |dense: AttentionProblem| AttentionProblem {
        scores: ScoresProblem { alibi: true, ..dense.scores },
        ..dense
    };
    let of = |head_dim| name(with_alibi(dense(head_dim)));
    assert_eq!(of(64), "sm90a_bf16_d64_q192_kv128_s2_terms");
    assert_eq!(of(72), "sm90a_bf16_d128_q128_kv128_s2_terms");
    assert_eq!(of(256), "sm90a_bf16_d256_q128_kv64_s2_terms");
    // The log-sum-exp makes no difference.
    let lse = with_alibi(dense(64)).with_lse();
    assert_eq!(name(lse), of(64));
    let masked = |head_dim, block| {
        let [block_q, block_kv] = [block; 2];
        let (batch, heads, packed_rows, bits) = (1, 1, None, true);
        let mask = BlockMaskSizes { block_q, block_kv, batch, heads, packed_rows, bits };
        AttentionProblem { block_mask: Some(mask), ..dense(head_dim) }
    };
    // Bits alone have kernels of their own where the log-sum-exp is not asked for.
    let under = |head_dim, block| name(masked(head_dim, block));
    assert_eq!(under(64, 64), "sm90a_bf16_d64_q64_kv64_s2_bits");
    for block in [128, 192, 384] {
        let tile = if block == 192 { "q64_kv64" } else { "q128_kv128" };
        assert_eq!(under(64, block), format!("sm90a_bf16_d64_{tile}_s2_bits"));
    }
    assert_eq!(under(128, 64), "sm90a_bf16_d128_q64_kv64_s2_bits");
    assert_eq!(under(256, 128), "sm90a_bf16_d256_q128_kv64_s2_terms");
    for changed in [masked(64, 128).with_lse(), with_alibi(masked(64, 128))] {
        assert_eq!(name(changed), "sm90a_bf16_d64_q128_kv128_s2_terms");
    }
}

/// Heads that read the same bias are computed together.
#[test]
fn readers_of_a_bias_share_a_section() {
    let section = |heads, broadcast| {
        let dense = problem(8, heads, 4096, 64);
        planned(&with_bias(dense, DType::BF16, broadcast, true)).1.heads_per_section
    };
    assert_eq!(section([32, 32], [false; 4]), 1);
    assert_eq!(section([32, 8], [false; 4]), 4);
    assert_eq!(section([32, 32], [true, false, false, false]), 8);
    assert_eq!(section([32, 8], [true, false, false, false]), 32);
    // Keys of all heads would not fit into L2.
    assert_eq!(section([32, 32], [false, true, false, false]), 32);
    assert_eq!(section([128, 128], [false, true, false, false]), 32);
}

/// One CTA per tile where the tiles do not fill the GPU and have few keys.
#[test]
fn small_grids_take_kernels_for_them() {
    let warps = |problem: AttentionProblem| {
        let kernel = select(&problem, &h200()).unwrap();
        matches!(kernel.variant, Variant::AttentionFwdSmall(_)).then(|| kernel.threads() / 32)
    };
    let of = |heads, seqlen, head_dim| problem(1, [heads; 2], seqlen, head_dim);
    assert_eq!(
        [64, 256, 512, 2048, 2049].map(|seqlen| warps(of(4, seqlen, 64))),
        [Some(8), Some(8), Some(16), Some(16), None]
    );
    assert_eq!(
        [64, 512, 2048, 2049].map(|seqlen| warps(of(4, seqlen, 128))),
        [Some(8), Some(8), Some(8), None]
    );
    assert_eq!([96, 192, 256].map(|head_dim| warps(of(8, 512, head_dim))), [None; 3]);
    // 132 tiles of queries, and one more.
    assert_eq!(
        [(132, 64), (133, 64)].map(|(heads, seqlen)| warps(of(heads, seqlen, 64))),
        [Some(8), None]
    );
    let changed = |change: &dyn Fn(&mut AttentionProblem)| {
        let mut problem = of(8, 512, 64);
        change(&mut problem);
        warps(problem)
    };
    assert_eq!(changed(&|p| p.scores.mask = Mask::causal()), Some(16));
    assert_eq!(changed(&|p| p.packed = Some(PackedRows { total_q: 512, total_kv: 512 })), None);
    let mask = BlockMaskSizes {
        block_q: 64,
        block_kv: 64,
        batch: 1,
        heads: 1,
        packed_rows: None,
        bits: false,
    };
    assert_eq!(changed(&|p| p.block_mask = Some(mask)), None);
    let small = select(&of(8, 512, 64), &h200()).unwrap();
    let packed = Some(PackedRows { total_q: 512, total_kv: 512 });
    for problem in [
        AttentionProblem { packed, ..of(8, 512, 64) },
        AttentionProblem { block_mask: Some(mask), ..of(8, 512, 64) },
    ] {
        let error = accepts(small, &problem, &h200()).unwrap_err().to_string();
        assert!(error.contains("neither packed sequences nor block masks"), "{error}");
    }
    let plan = |problem: &AttentionProblem| {
        plan(select(problem, &h200()).unwrap(), problem, &h200()).unwrap()
    };
    let small = plan(&of(8, 512, 64));
    assert_eq!((small.config.grid, small.config.programmatic_dependent_launch), ([64, 1, 1], true));
    assert_eq!(small.plan.heads_per_section, 0);
}

/// A short causal sequence has few key tiles for each tile of queries: three narrow blocks change
/// tiles at different times.
#[test]
fn short_causal_sequences_take_narrow_tiles() {
    let block_q = |batch, seqlen, head_dim| {
        let causal = problem(batch, [32, 32], seqlen, head_dim).with_mask(Mask::causal());
        select(&causal, &h200()).unwrap().attention_tile().unwrap().block_q
    };
    assert_eq!([(32, 512), (16, 1024)].map(|(batch, seqlen)| block_q(batch, seqlen, 64)), [64, 64]);
    assert_eq!(
        [(4, 4096), (1, 16384)].map(|(batch, seqlen)| block_q(batch, seqlen, 64)),
        [192, 192]
    );
    assert_eq!(
        [(32, 512), (4, 4096)].map(|(batch, seqlen)| block_q(batch, seqlen, 128)),
        [128, 128]
    );
}

/// Two heads of q share a tile where they share keys and blocks of 64 queries.
#[test]
fn heads_that_share_blocks_share_tiles() {
    let heads = |heads: [usize; 2], mask_heads| {
        let mask = BlockMaskSizes {
            block_q: 64,
            block_kv: 64,
            batch: 1,
            heads: mask_heads,
            packed_rows: None,
            bits: false,
        };
        let problem = AttentionProblem { block_mask: Some(mask), ..problem(1, heads, 8192, 128) };
        let tile = select(&problem, &h200()).unwrap().attention_tile().unwrap();
        (tile.block_q, tile.heads)
    };
    assert_eq!([heads([32, 8], 8), heads([32, 8], 1)], [(64, 2); 2]);
    assert_eq!([heads([32, 8], 32), heads([32, 32], 1), heads([24, 8], 8)], [(64, 1); 3]);
}

/// Two block rows of 64 queries share a tile where each has a list of its own, the pairs fill the
/// GPU and there is a bit for each key tile.
#[test]
fn two_block_rows_share_a_tile() {
    let is_pair = |kernel: &&'static Kernel| {
        kernel.attention_tile().is_some_and(|tile| tile.block_rows == 2 && tile.lse.suits(false))
    };
    let pairs: Vec<_> = manifest::kernels().iter().filter(is_pair).collect();
    assert_eq!(pairs.len(), 2);
    let masked = |heads, seqlen, head_dim, block_q: Option<u32>| {
        let mask = block_q.map(|block_q| BlockMaskSizes {
            block_q,
            block_kv: 64,
            batch: 1,
            heads,
            packed_rows: None,
            bits: false,
        });
        let heads = heads as usize;
        AttentionProblem { block_mask: mask, ..problem(1, [heads, heads], seqlen, head_dim) }
    };
    let rows = |problem: &AttentionProblem| {
        select(problem, &h200()).unwrap().attention_tile().unwrap().block_rows
    };
    for (block_q, expected) in [(None, 1), (Some(64), 2), (Some(128), 1), (Some(192), 1)] {
        let problem = masked(32, 8192, 128, block_q);
        assert_eq!(rows(&problem), expected, "{block_q:?}");
        let kernel = pairs.iter().find(|pair| accepts(pair, &problem, &h200()).is_ok()).unwrap();
        assert_eq!(plan(kernel, &problem, &h200()).unwrap().config.grid, [132, 1, 1]);
    }
    assert_eq!(rows(&masked(32, 8192, 96, Some(64))), 2);
    assert_eq!(rows(&masked(32, 8192, 64, Some(64))), 1);
    // 128 pairs for 132 SMs.
    assert_eq!(
        [rows(&masked(4, 4096, 128, Some(64))), rows(&masked(5, 4096, 128, Some(64)))],
        [1, 2]
    );
    let longest = masked(4, 2048 * 64, 128, Some(64));
    assert_eq!(rows(&longest), 2);
    let longer = masked(4, 2048 * 64 + 1, 128, Some(64));
    assert_eq!(rows(&longer), 1);
    assert!(pairs.iter().all(|pair| accepts(pair, &longer, &h200()).is_err()));
    // Two heads of a list come first: their key tiles are the same.
    let shared = AttentionProblem {
        num_heads_kv: 8,
        block_mask: longest.block_mask.map(|mask| BlockMaskSizes { heads: 8, ..mask }),
        ..masked(32, 8192, 128, Some(64))
    };
    assert_eq!(rows(&shared), 1);
}

#[test]
fn strides_that_tensor_maps_lack_take_another_kernel() {
    let good = problem(16, [4, 2], 300, 64);
    let hopper = select(&good, &h200()).unwrap();
    let falls_back = |problem: AttentionProblem, reason: &str| {
        let kernel = select(&problem, &h200()).unwrap();
        assert!(matches!(kernel.variant, Variant::AttentionFwdSmall(_)), "{reason}");
        assert_eq!(plan(kernel, &problem, &h200()).unwrap().plan.heads_per_section, 0);
        let error = accepts(hopper, &problem, &h200()).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("tensor map"), "{error}");
        let wide = AttentionProblem { head_dims: HeadDims::all(192), ..problem };
        assert_eq!(select(&wide, &h200()).unwrap().target, Target::Sm90, "{reason}");
    };
    let with = |change: &dyn Fn(&mut AttentionProblem)| {
        let mut problem = good;
        change(&mut problem);
        problem
    };
    falls_back(with(&|p| p.k.batch = 0), "the batch stride of k is 0");
    falls_back(with(&|p| p.v.head = 0), "the head stride of v is 0");
    falls_back(with(&|p| p.q.seq = 0), "the sequence stride of q is 0");
    falls_back(with(&|p| p.q.batch = 1 << 39), "the batch stride of q is 549755813888");
    // What is never stepped over does not matter.
    let one = with(&|p| (p.batch, p.q.batch, p.k.batch, p.o.batch) = (1, 0, 1 << 50, 0));
    assert_eq!(
        select(&one, &h200()).unwrap(),
        select(&problem(1, [4, 2], 300, 64), &h200()).unwrap()
    );
    let packed = PackedRows { total_q: 600, total_kv: 600 };
    let packed = with(&|p| (p.packed, p.q.batch, p.k.batch, p.v.batch) = (Some(packed), 0, 0, 0));
    assert_eq!(select(&packed, &h200()).unwrap().target, Target::Sm90a);
    let no_keys = with(&|p| (p.seqlen_kv, p.k.batch, p.v.batch) = (0, 0, 0));
    assert_eq!(select(&no_keys, &h200()).unwrap().target, Target::Sm90a);
}

#[test]
fn blocks_stay_and_start_early() {
    let (plan, _) = planned(&problem(4, [32, 32], 4096, 64));
    assert_eq!((plan.config.grid, plan.config.programmatic_dependent_launch), ([132, 1, 1], true));
    let (plan, _) = planned(&problem(1, [8, 8], 128, 64));
    assert_eq!(plan.config.grid, [16, 1, 1]);
    let huge = problem(1 << 20, [1 << 12, 1 << 12], 300, 64);
    let kernel = select(&huge, &h200()).unwrap();
    assert!(matches!(
        super::super::plan(kernel, &huge, &h200()),
        Err(Error::TooLarge { what: "grid", .. })
    ));
}

#[test]
fn sections_fit_into_l2_and_give_each_cta_two_tiles_when_there_is_a_window() {
    let heads = |problem: AttentionProblem| planned(&problem).1.heads_per_section;
    let causal = |problem: AttentionProblem| problem.with_mask(Mask::causal());
    assert_eq!(heads(problem(4, [32, 8], 4096, 64)), 4);
    // 264 tiles for 132 CTAs: 66 of 512 heads with 4 tiles, which makes eight sections.
    assert_eq!(heads(causal(problem(32, [16, 16], 512, 128))), 64);
    // 8 of 32 heads with 32 tiles; 64 tiles of 4 heads that share keys are 256.
    assert_eq!(heads(causal(problem(4, [8, 8], 4096, 192))), 8);
    assert_eq!(heads(causal(problem(2, [16, 4], 8192, 192))), 4);
    // 12 of 128 heads with 22 tiles; the same in three groups of 4.
    assert_eq!(heads(causal(problem(4, [32, 32], 4096, 64))), 12);
    assert_eq!(heads(causal(problem(4, [32, 8], 4096, 64))), 12);
    assert_eq!(heads(causal(problem(4, [32, 8], 1 << 20, 64))), 4);
    assert_eq!(heads(causal(problem(2, [6, 2], 16, 128))), 12);
    let packed = Some(PackedRows { total_q: 100, total_kv: 100 });
    assert_eq!(heads(AttentionProblem { packed, ..causal(problem(2, [6, 2], 16, 128)) }), 6);
    // Few queries and many keys, 32 MiB for each head: L2 is the limit.
    let long = AttentionProblem::dense(DType::BF16, [1, 256, 1 << 16], [64; 2], 128);
    assert_eq!(heads(causal(long)), 1);
    // A window that hides nothing is none.
    let mask = Mask::Window { left: Some(9999), right: None, align: Align::BottomRight };
    assert_eq!(heads(problem(4, [32, 8], 4096, 64).with_mask(mask)), 4);
}

#[test]
fn scales_are_those_of_the_exponent() {
    let close = |got: f32, expected: f64| {
        approx::assert_abs_diff_eq!(f64::from(got) / expected, 1.0, epsilon = 1e-6);
    };
    let log2_e = std::f64::consts::LOG2_E;
    let mut base = problem(1, [1, 1], 100, 64);
    base.scores.softmax_scale = 0.25;
    let (_, params) = planned(&base);
    close(params.scalars.scores.scale_log2, 0.25 * log2_e);
    close(params.scalars.scores.inverse_scale_log2, 4.0 / log2_e);
    assert_eq!(params.scalars.scores.scale_over_cap, 0.0);
    let (_, params) = planned(&AttentionProblem {
        scores: ScoresProblem { softcap: Some(50.0), ..base.scores },
        ..base
    });
    close(params.scalars.scores.scale_log2, log2_e);
    close(params.scalars.scores.inverse_scale_log2, 1.0 / log2_e);
    close(params.scalars.scores.scale_over_cap, 0.005);
}

/// The kernel adds windows to positions in 32 bits.
#[test]
fn windows_are_no_longer_than_both_sequences() {
    let sides = [0, 1, 299, 300, 800, 1 << 30, usize::MAX];
    for align in [Align::TopLeft, Align::BottomRight] {
        for (left, right) in sides.into_iter().flat_map(|left| sides.map(|right| (left, right))) {
            let mask = Mask::Window { left: Some(left), right: Some(right), align };
            let problem =
                AttentionProblem::dense(DType::F16, [1, 300, 500], [1, 1], 64).with_mask(mask);
            let (_, params) = planned(&problem);
            for side in [params.scalars.scores.window.left, params.scalars.scores.window.right] {
                assert!(
                    side == BLOCKFLASH_WINDOW_UNBOUNDED || (0..800).contains(&side),
                    "{mask:?}: {side}"
                );
            }
        }
    }
}
