use super::*;
use blockflash_ops::attention;
use blockflash_ops::bsr_matmul::{self, BsrProblem};
use blockflash_ops::{ComputeCapability, CudaProperties, Kernel};

const GRID: &str = "description = 'x'\n[[attention_fwd]]\ntokens = 1024\nseqlen = [256, \
                    512]\nnum_heads_q = 4\n\
                    head_dim = 64\nmask = ['full', 'causal']\ndtype = ['bf16']\n";

fn problem(text: &str) -> String {
    Suite::parse("t".into(), text).unwrap_err()
}

#[test]
fn grids_expand_to_every_combination() {
    let suite = Suite::parse("t".into(), GRID).unwrap();
    let ids: Vec<_> = suite.cases.iter().map(Case::to_string).collect();
    let expected = [
        "b4_s256_h4_d64_full_bf16",
        "b2_s512_h4_d64_full_bf16",
        "b4_s256_h4_d64_causal_bf16",
        "b2_s512_h4_d64_causal_bf16",
    ];
    assert_eq!(ids, expected);
    assert_eq!((suite.rounds, suite.peers.as_str()), (5, "auto"));
}

#[test]
fn lengths_are_a_dimension_of_a_grid() {
    let grid =
        GRID.replace("tokens = 1024\nseqlen = [256, 512]", "lengths = [[700, 300, 300], [64]]");
    let ids: Vec<_> =
        Suite::parse("t".into(), &grid).unwrap().cases.iter().map(Case::to_string).collect();
    let expected = [
        "varlen700+300x2_h4_d64_full_bf16",
        "varlen64_h4_d64_full_bf16",
        "varlen700+300x2_h4_d64_causal_bf16",
        "varlen64_h4_d64_causal_bf16",
    ];
    assert_eq!(ids, expected);
    assert!(problem(&grid.replace("[64]", "[]")).contains("empty"));
    assert!(problem(&grid.replace("[64]", "[64, 0]")).contains("length of 0"));
    assert!(problem(&grid.replace("head_dim = 64", "head_dim = 0")).contains("size of 0"));
    assert!(
        problem(&grid.replace("lengths", "tokens = 1064\nlengths"))
            .contains("lengths cannot be combined")
    );
    let neither = "has either seqlen or lengths";
    assert!(problem(&grid.replace("lengths", "seqlen = [8]\nlengths")).contains(neither));
    assert!(problem(&GRID.replace("seqlen = [256, 512]\n", "")).contains(neither));
}

const SPARSE: &str = "description = 'x'\n[[block_sparse_fwd]]\nbatch = 1\nseqlen = \
                      [1024]\nnum_heads_q = 4\n\
                      num_heads_kv = 2\nhead_dim = 64\nblock = [[128, 64]]\ndensity = \
                      [0.5]\ndtype = ['bf16']\n";

#[test]
fn patterns_and_masks_are_dimensions_of_a_block_sparse_grid() {
    let ids = |more: &str| -> Vec<String> {
        let suite = Suite::parse("t".into(), &format!("{SPARSE}{more}\n")).unwrap();
        suite.cases.iter().map(Case::to_string).collect()
    };
    assert_eq!(ids(""), ["b1_s1024_h4kv2_d64_q128kv64_d0.5_uniform_full_bf16"]);
    let expected = [
        "b1_s1024_h4kv2_d64_q128kv64_d0.5_uniform_full_bf16",
        "b1_s1024_h4kv2_d64_q128kv64_d0.5_power_law_full_bf16",
    ];
    assert_eq!(ids("pattern = ['uniform', 'power_law']"), expected);
    let expected = [
        "b1_s1024_h4kv2m2_d64_q128kv64_d0.5_uniform_full_bf16",
        "b1_s1024_h4kv2m2_d64_q128kv64_d0.5_uniform_causal_bf16",
    ];
    assert_eq!(ids("mask_heads = 2\nmask = ['full', 'causal']"), expected);
    let mistake = |more: &str| problem(&format!("{SPARSE}{more}\n"));
    assert!(mistake("mask_heads = 3").contains("neither 1 nor 2 nor 4"));
    assert!(mistake("mask = ['causal']\npattern = ['banded']").contains("can only be uniform"));
    assert!(
        problem(&SPARSE.replace("num_heads_kv = 2", "num_heads_kv = 3")).contains("cannot share")
    );
    assert!(problem(&SPARSE.replace("[0.5]", "[1.5]")).contains("not in (0, 1]"));
}

const MASKS: &str = "description = 'x'\n[[block_mask_build]]\nseqlen = [1000, 2000]\nnum_heads = \
                     4\nhead_dim = 64\n\
                     block = [64]\ntop_k = 8\ndtype = ['bf16']\n";

#[test]
fn a_mask_is_two_cases() {
    let suite = Suite::parse("t".into(), MASKS).unwrap();
    let ids: Vec<_> = suite.cases.iter().map(Case::to_string).collect();
    let expected = [
        "mask_s1000_h4_b64_scores_d64_bf16",
        "mask_s1000_h4_b64_top8",
        "mask_s2000_h4_b64_scores_d64_bf16",
        "mask_s2000_h4_b64_top8",
    ];
    assert_eq!(ids, expected);
    assert!(problem(&MASKS.replace("top_k = 8", "top_k = 0")).contains("size of 0"));
    assert!(problem(&MASKS.replace("[1000, 2000]", "[1000, 1000]")).contains("twice"));
}

#[test]
fn grids_may_do_without_rivals() {
    let text = format!("{GRID}peers = 'none'\n{}", SPARSE.replace("description = 'x'\n", ""));
    let suite = Suite::parse("t".into(), &text).unwrap();
    assert_eq!((suite.cases.len(), &suite.alone[..]), (5, &suite.cases[..4]));
    assert!(problem(&format!("{SPARSE}peers = 'flex'\n")).contains("flex"));
}

/// What the targets are measured by.
#[test]
fn block_sparse_attention_has_its_cases() {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let suite = Suite::load(&benches, "block_sparse_fwd").unwrap();
    let has = |id: &str| assert!(suite.cases.iter().any(|case| case.to_string() == id), "{id}");
    for head_dim in [64, 128] {
        for block in [64, 128] {
            has(&format!("b1_s16384_h16_d{head_dim}_q{block}kv{block}_d0.25_uniform_full_bf16"));
            for (seqlen, density) in [(32768, "0.125"), (65536, "0.0625"), (131_072, "0.03125")] {
                has(&format!(
                    "b1_s{seqlen}_h8_d{head_dim}_q{block}kv{block}_d{density}_uniform_full_bf16"
                ));
            }
        }
        has(&format!("b1_s131072_h8_d{head_dim}_full_bf16"));
    }
    has("b1_s16384_h16_d128_q128kv128_d0.25_uniform_causal_bf16");
    has("b1_s32768_h32kv8m8_d128_q128kv128_d0.125_uniform_full_bf16");
    // Rows of very different lengths beside equal ones: as many blocks.
    let blocks = |pattern: &str| {
        let id = format!("b1_s32768_h8_d128_q128kv128_d0.125_{pattern}_full_bf16");
        has(&id);
        match id.parse().unwrap() {
            Case::BlockSparseFwd(shape) => shape.nnz_blocks(),
            _ => unreachable!(),
        }
    };
    assert_eq!(blocks("power_law"), blocks("uniform"));
    // Rivals compile and tune for seconds in every case.
    let with_rivals = suite.cases.iter().filter(|case| !suite.alone.contains(case));
    assert!(with_rivals.count() <= 8);
}

#[test]
fn patterns_of_products_have_uniform_twins_of_as_many_blocks() {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let suite = Suite::load(&benches, "bsr_matmul").unwrap();
    let blocks = |id: &str| match suite.cases.iter().find(|case| case.to_string() == id) {
        Some(Case::BsrMatmul(shape)) => shape.nnz_blocks(),
        other => panic!("{id}: {other:?}"),
    };
    let of = |block: usize, density: &str, pattern: &str| {
        blocks(&format!("m8192_n1024_k8192_b{block}_d{density}_{pattern}_f16"))
    };
    for block in [16, 32, 64, 128] {
        for pattern in ["power_law", "banded", "clustered", "butterfly"] {
            assert_eq!(of(block, "0.1", pattern), of(block, "0.1", "uniform"), "{pattern}");
        }
    }
    for (block, density) in [(64, "0.0078125"), (16, "0.001953125")] {
        assert_eq!(
            (of(block, density, "full_rows"), of(block, density, "uniform")),
            (8192 / block, 8192 / block)
        );
    }
    assert_eq!((of(64, "0.00006103515625", "random"), of(128, "1", "uniform")), (1, 64 * 64));
}

#[test]
fn mistakes_are_named() {
    assert!(Suite::parse("t".into(), "description = 'only ceilings'").unwrap().cases.is_empty());
    assert!(problem(&GRID.replace("num_heads_q", "heads")).contains("line"));
    assert!(problem(&GRID.replace("1024", "1000")).contains("are not a multiple of"));
    assert!(problem(&GRID.replace("512", "256")).contains("twice"));
    assert!(problem(&format!("rounds = 0\n{GRID}")).contains("positive"));
    assert!(problem(&format!("cache = []\n{GRID}")).contains("cache"));
    assert!(problem(&format!("cache = ['tepid']\n{GRID}")).starts_with("line 1"));
    assert!(problem(&SPARSE.replace("1024", "1000")).contains("multiple"));
    assert!(problem("not toml").starts_with("line 1: "));
}

#[test]
fn the_suites_of_the_repository_are_valid() {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let names = Suite::names(&benches);
    assert!(names.iter().any(|name| name == "smoke"));
    for name in names {
        Suite::load(&benches, &name).unwrap();
    }
    let missing = Suite::load(&benches, "nothing").unwrap_err().to_string();
    assert!(missing.contains("\"nothing\"") && missing.contains("smoke"));
}

/// Estimates from the rates of a GPU are for GPUs on which nothing was measured: on Hopper neither
/// clock nor memory nor name changes what is selected for a case, also where no tensor map is
/// possible.
#[test]
fn selection_on_hopper_does_not_depend_on_rates() {
    let h200 = CudaProperties {
        ordinal: 0,
        name: "NVIDIA H200".into(),
        compute_capability: ComputeCapability::new(9, 0),
        multiprocessors: 132,
        smem_per_block: 227 * 1024,
        smem_per_multiprocessor: 228 * 1024,
        l2_bytes: 50 << 20,
        memory_bytes: 141 << 30,
        driver_version: 13000,
        clock_khz: 1_980_000,
        memory_clock_khz: 3_201_000,
        memory_bus_bits: 6144,
    };
    let slow = CudaProperties {
        name: "NVIDIA GeForce".into(),
        l2_bytes: 1 << 20,
        clock_khz: 10_000,
        memory_clock_khz: 1000,
        ..h200.clone()
    };
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let mut compared = 0;
    for name in Suite::names(&benches) {
        for case in Suite::load(&benches, &name).unwrap().cases {
            let selected = |gpu: &CudaProperties| -> Vec<&'static Kernel> {
                match &case {
                    Case::AttentionFwd(shape) => {
                        let mut problem = shape.problem();
                        let mapped = attention::select(&problem, gpu).unwrap();
                        (problem.q.seq, problem.k.seq) = (0, 0);
                        vec![mapped, attention::select(&problem, gpu).unwrap()]
                    }
                    Case::BsrMatmul(shape) => {
                        let problem = shape.problem();
                        let odd = BsrProblem { b_vectorized: false, ..problem };
                        [problem, odd].map(|p| bsr_matmul::select(&p, gpu).unwrap()).into()
                    }
                    _ => Vec::new(),
                }
            };
            let of_h200 = selected(&h200);
            compared += of_h200.len();
            assert_eq!(of_h200, selected(&slow), "{case}");
        }
    }
    assert!(compared > 300, "{compared}");
}

const SDDMM: &str = "description = 'x'\n[[bsr_sddmm]]\nsize = [512]\nk = [64, 128]\nblock_size = \
                     [64]\n\
                    density = [0.5]\nlayout = [['column', 'row']]\ndtype = ['f16']\n";

#[test]
fn grids_of_sampled_products_expand_to_every_combination() {
    let suite = Suite::parse("t".into(), SDDMM).unwrap();
    let ids: Vec<_> = suite.cases.iter().map(ToString::to_string).collect();
    let expected = [
        "sddmm_m512_n512_k64_b64_d0.5_uniform_column_row_f16",
        "sddmm_m512_n512_k128_b64_d0.5_uniform_column_row_f16",
    ];
    assert_eq!(ids, expected);
    let problem = |from, to| problem(&SDDMM.replace(from, to));
    assert!(problem("[0.5]", "[1.5]").contains("not in (0, 1]"));
    assert!(problem("[512]", "[0]").contains("size of 0"));
    assert!(problem("'row'", "'both'").contains("unknown variant"));
}

/// An installed program has no folder `benches`, but every suite.
#[test]
fn the_program_has_the_suites_with_it() {
    let (nowhere, benches) = (Path::new("no/such/folder"), crate::machine::benches().unwrap());
    assert_eq!(Suite::names(nowhere), Suite::names(&benches));
    for name in Suite::names(nowhere) {
        let [own, file] = [nowhere, &benches].map(|at| Suite::load(at, &name).unwrap());
        assert_eq!((own.cases, own.description), (file.cases, file.description), "{name}");
    }
}
