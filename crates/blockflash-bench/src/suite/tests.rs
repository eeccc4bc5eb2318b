use super::*;
use crate::machine::benches;
use blockflash_ops::bsr_matmul::{self, BsrProblem};
use blockflash_ops::{ComputeCapability, CudaProperties, Kernel, attention};

const GRID: &str = "description = 'x'
[[attention_fwd]]
tokens = 1024
seqlen = [256, 512]
num_heads_q = 4
head_dim = 64
mask = ['full', 'causal']
dtype = ['bf16']
";
const SPARSE: &str = "[[block_sparse_fwd]]
batch = 1
seqlen = [1024]
num_heads_q = 4
num_heads_kv = 2
head_dim = 64
block = [[128, 64]]
density = [0.5]
dtype = ['bf16']
";
const MASKS: &str = "[[block_mask_build]]
seqlen = [1000, 2000]
num_heads = 4
head_dim = 64
block = [64]
top_k = 8
dtype = ['bf16']
";
const SDDMM: &str = "[[bsr_sddmm]]
size = [512]
k = [64, 128]
block_size = [64]
density = [0.5]
layout = [['column', 'row']]
dtype = ['f16']
";

fn parse(text: &str) -> Result<Suite, String> {
    let description = if text.contains("description") { "" } else { "description = 'x'\n" };
    Suite::parse("t".into(), &format!("{description}{text}"))
}

fn ids(text: &str) -> Vec<String> {
    parse(text).unwrap().cases.iter().map(Case::to_string).collect()
}

/// What is wrong if `from` is replaced by `to`, or `to` is added.
fn problem(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from));
    let text = if from.is_empty() { format!("{text}{to}\n") } else { text.replace(from, to) };
    parse(&text).unwrap_err()
}

#[test]
fn grids_expand_to_every_combination() {
    let dense = ["b4_s256_h4_d64", "b2_s512_h4_d64"];
    let both = |ids: [&str; 2]| {
        ["full", "causal"].map(|mask| ids.map(|id| format!("{id}_{mask}_bf16"))).concat()
    };
    assert_eq!(ids(GRID), both(dense));
    let grid =
        GRID.replace("tokens = 1024\nseqlen = [256, 512]", "lengths = [[700, 300, 300], [64]]");
    assert_eq!(ids(&grid), both(["varlen700+300x2_h4_d64", "varlen64_h4_d64"]));
    let windows = ids(&GRID.replace("'full', 'causal'", "'window100'"));
    assert_eq!(windows, dense.map(|id| format!("{id}_window100_bf16")));
    let sparse = "b1_s1024_h4kv2_d64_q128kv64_d0.5";
    assert_eq!(ids(SPARSE), [format!("{sparse}_uniform_full_bf16")]);
    assert_eq!(
        ids(&format!("{SPARSE}pattern = ['uniform', 'power_law']\n")),
        ["uniform", "power_law"].map(|pattern| format!("{sparse}_{pattern}_full_bf16"))
    );
    assert_eq!(
        ids(&format!("{SPARSE}mask_heads = 2\nmask = ['full', 'causal']\n")),
        ["full", "causal"]
            .map(|mask| { format!("b1_s1024_h4kv2m2_d64_q128kv64_d0.5_uniform_{mask}_bf16") })
    );
    let of_masks =
        |seqlen| ["scores_d64_bf16", "top8"].map(|step| format!("mask_s{seqlen}_h4_b64_{step}"));
    assert_eq!(ids(MASKS), [of_masks(1000), of_masks(2000)].concat());
    let decode = "[[attention_decode]]\nbatch = [2]\nseqlen_kv = [96, 128]\nnum_heads_q = 8\n\
                  head_dim = 64\nwindow = 20\ndtype = ['bf16']\n";
    let of_decode = |keys| format!("decode_b2_q1_kv{keys}_h8_d64_contiguous_full_window20_bf16");
    assert_eq!(ids(decode), [96, 128].map(of_decode));
    let of_sddmm = |k| format!("sddmm_m512_n512_k{k}_b64_d0.5_uniform_column_row_f16");
    assert_eq!(ids(SDDMM), [64, 128].map(of_sddmm));
    let with_values = |grid: &str| {
        let ids = ids(&grid.replace("head_dim = 64", "head_dim = 64\nhead_dim_v = 32"));
        assert!(!ids.is_empty() && ids.iter().all(|id| id.contains("_d64v32_")), "{ids:?}");
        ids.len()
    };
    assert_eq!([GRID, SPARSE, decode].map(with_values), [4, 1, 2]);
    assert!(ids("description = 'only ceilings'").is_empty());
    let alone = parse(&format!("{GRID}peers = 'none'\n{SPARSE}")).unwrap();
    assert_eq!((alone.cases.len(), &alone.alone[..]), (5, &alone.cases[..4]));
    assert_eq!((alone.rounds, alone.peers.as_str()), (5, "auto"));
}

#[test]
fn mistakes_are_named() {
    let lengths =
        GRID.replace("tokens = 1024\nseqlen = [256, 512]", "lengths = [[700, 300, 300], [64]]");
    let neither = "has either seqlen or lengths";
    for (text, from, to, expected) in [
        (GRID, "num_heads_q", "heads", "line"),
        (GRID, "1024", "1000", "are not a multiple of"),
        (GRID, "512", "256", "twice"),
        (GRID, "[[att", "rounds = 0\n[[att", "rounds is 0"),
        (GRID, "[[att", "window_ms = inf\n[[att", "window_ms inf"),
        (GRID, "[[att", "gap_ms = -1\n[[att", "gap_ms is -1"),
        (GRID, "[[att", "cache = []\n[[att", "cache"),
        (GRID, "[[att", "cache = ['tepid']\n[[att", "line 2"),
        (GRID, "seqlen = [256, 512]\n", "", neither),
        (&lengths, "[64]", "[]", "empty"),
        (&lengths, "[64]", "[64, 0]", "length of 0"),
        (&lengths, "head_dim = 64", "head_dim = 0", "size of 0"),
        (GRID, "", "head_dim_v = 0", "size of 0"),
        (&lengths, "lengths", "tokens = 1064\nlengths", "lengths cannot be combined"),
        (&lengths, "lengths", "seqlen = [8]\nlengths", neither),
        (GRID, "", "block = [[64, 64]]", "for block-sparse grids"),
        (GRID, "mask = ['full', 'causal']", "", "no mask"),
        (GRID, "'full'", "'window0'", "the mask \"window0\" is neither"),
        (SPARSE, "", "mask = ['window64']", "under no window"),
        (SPARSE, "block = [[128, 64]]", "", "has block and density"),
        (SPARSE, "", "mask_heads = 3", "neither 1 nor 2 nor 4"),
        (SPARSE, "", "mask = ['causal']\npattern = ['banded']", "can only be uniform"),
        (SPARSE, "", "peers = 'flex'", "flex"),
        (SPARSE, "num_heads_kv = 2", "num_heads_kv = 3", "cannot share"),
        (SPARSE, "[0.5]", "[1.5]", "not in (0, 1]"),
        (SPARSE, "1024", "1000", "multiple"),
        (MASKS, "top_k = 8", "top_k = 0", "size of 0"),
        (MASKS, "[1000, 2000]", "[1000, 1000]", "twice"),
        (SDDMM, "[0.5]", "[1.5]", "not in (0, 1]"),
        (SDDMM, "[512]", "[0]", "size of 0"),
        (SDDMM, "'row'", "'both'", "unknown variant"),
    ] {
        let problem = problem(text, from, to);
        assert!(problem.contains(expected), "{to}: {problem}");
    }
    assert!(Suite::parse("t".into(), "not toml").unwrap_err().starts_with("line 1: "));
}

/// An installed program has no folder `benches`, but every suite.
#[test]
fn suites_of_the_repository_are_valid_and_the_program_has_them_with_it() {
    let (nowhere, benches) = (Path::new("no/such/folder"), benches().unwrap());
    let names = Suite::names(nowhere);
    assert!(names.iter().any(|name| name == "smoke") && names == Suite::names(&benches));
    for name in names {
        let [own, file] = [nowhere, &benches].map(|at| Suite::load(at, &name).unwrap());
        assert_eq!((own.cases, own.description), (file.cases, file.description), "{name}");
    }
    let missing = Suite::load(&benches, "nothing").unwrap_err().to_string();
    assert!(missing.contains("\"nothing\"") && missing.contains("smoke"));
}

/// The number of cases of each suite, and a hash (FNV-1a) of their ids, a line for each. Who
/// changes a suite on purpose changes its line here; nothing else does.
const EXPANSIONS: [(&str, usize, u64); 28] = [
    ("attention_bwd", 26, 0x58CB_AEEE_47E6_7DF1),
    ("attention_decode", 141, 0xDCD3_5CAF_40F8_737A),
    ("attention_e4m3", 32, 0xA2DB_9110_F63C_3BAF),
    ("attention_floor", 4, 0x6628_C877_4CB1_3A39),
    ("attention_fwd", 58, 0xA3DC_37A2_F6A9_8E53),
    ("attention_index", 27, 0xB6FF_1464_354B_49A5),
    ("attention_unequal", 29, 0x1D04_475B_40CB_0B75),
    ("attention_wide", 22, 0xBCAF_39B1_5211_8D69),
    ("block_mask", 6, 0xC19A_530C_8EA9_ABBB),
    ("block_sparse_bwd", 14, 0xD7C4_8D08_71BA_027A),
    ("block_sparse_fwd", 43, 0xF2E7_47AD_FCA8_AD81),
    ("block_sparse_mlp", 80, 0xBEAF_F3F4_3353_1A55),
    ("block_sparse_vsa", 8, 0x4305_F405_3B29_E975),
    ("bsr_floor", 4, 0x07B1_F34F_3929_18B4),
    ("bsr_matmul", 94, 0x2BCD_BB49_1626_082A),
    ("bsr_sddmm", 12, 0x1A74_42EA_0A98_5966),
    ("ceilings", 0, 0xCBF2_9CE4_8422_2325),
    ("decode", 6, 0xB25F_EAA3_4C53_475E),
    ("decode_codes", 40, 0x83CB_AA7C_D694_30FB),
    ("energy", 10, 0xA80A_DB12_2962_A5AB),
    ("index_choice", 11, 0xB5EF_0D68_4667_56A1),
    ("masks", 71, 0xC30B_4EB1_EBCB_8D1C),
    ("mla_decode", 10, 0x9236_E1F7_335C_C8AA),
    ("quantize", 20, 0x6EC3_EC59_B2BA_486A),
    ("selection", 108, 0xF940_39FA_E487_8256),
    ("small", 8, 0x6DA7_7958_2E91_D7DC),
    ("small_attention", 24, 0x6F28_7A2A_F4E9_3C45),
    ("smoke", 14, 0x75A8_4ED6_10FD_818C),
];

#[test]
fn suites_expand_to_the_same_cases_in_the_same_order() {
    let benches = benches().unwrap();
    for (name, count, hash) in EXPANSIONS {
        let cases = Suite::load(&benches, name).unwrap().cases;
        let ids = cases.iter().map(Case::to_string).collect::<Vec<_>>().join("\n");
        let fnv = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        let found = ids.bytes().fold(0xCBF2_9CE4_8422_2325, fnv);
        assert_eq!((cases.len(), found), (count, hash), "{name} is {found:#X}");
    }
    assert_eq!(Suite::names(&benches), EXPANSIONS.map(|(name, ..)| name));
}

/// What the targets are measured by.
#[test]
fn block_sparse_attention_has_its_cases() {
    let suite = Suite::load(&benches().unwrap(), "block_sparse_fwd").unwrap();
    let has = |id: &str| assert!(suite.cases.iter().any(|case| case.to_string() == id), "{id}");
    for (head_dim, block) in [(64, 64), (64, 128), (128, 64), (128, 128)] {
        has(&format!("b1_s16384_h16_d{head_dim}_q{block}kv{block}_d0.25_uniform_full_bf16"));
        for (seqlen, density) in [(32768, "0.125"), (65536, "0.0625"), (131_072, "0.03125")] {
            let of = format!("b1_s{seqlen}_h8_d{head_dim}_q{block}kv{block}_d{density}");
            has(&format!("{of}_uniform_full_bf16"));
        }
        has(&format!("b1_s131072_h8_d{head_dim}_full_bf16"));
    }
    has("b1_s16384_h16_d128_q128kv128_d0.25_uniform_causal_bf16");
    has("b1_s32768_h32kv8m8_d128_q128kv128_d0.125_uniform_full_bf16");
    // Rows of very different lengths beside equal ones: as many blocks.
    let blocks = |pattern: &str| {
        let id = format!("b1_s32768_h8_d128_q128kv128_d0.125_{pattern}_full_bf16");
        has(&id);
        let case: Case = id.parse().unwrap();
        case.attention().unwrap().block_sparse().unwrap().nnz_blocks()
    };
    assert_eq!(blocks("power_law"), blocks("uniform"));
    // Competitors compile and tune for seconds in every case.
    assert!(suite.cases.len() - suite.alone.len() <= 8);
}

#[test]
fn patterns_of_products_have_uniform_twins_of_as_many_blocks() {
    let suite = Suite::load(&benches().unwrap(), "bsr_matmul").unwrap();
    let of = |block: usize, density: &str, pattern: &str| {
        let id = format!("m8192_n1024_k8192_b{block}_d{density}_{pattern}_f16");
        match suite.cases.iter().find(|case| case.to_string() == id) {
            Some(Case::BsrMatmul(shape)) => shape.nnz_blocks(),
            other => panic!("{id}: {other:?}"),
        }
    };
    for block in [16, 32, 64, 128] {
        for pattern in ["power_law", "banded", "clustered", "butterfly"] {
            assert_eq!(of(block, "0.1", pattern), of(block, "0.1", "uniform"), "{pattern}");
        }
    }
    for (block, density) in [(64, "0.0078125"), (16, "0.001953125")] {
        let blocks = ["full_rows", "uniform"].map(|pattern| of(block, density, pattern));
        assert_eq!(blocks, [8192 / block; 2]);
    }
    assert_eq!((of(64, "0.00006103515625", "random"), of(128, "1", "uniform")), (1, 64 * 64));
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
    let selected = |case: &Case, gpu: &CudaProperties| -> Vec<&'static Kernel> {
        match case {
            Case::Attention(shape) if case.op() == "attention_fwd" && shape.lengths.is_none() => {
                let mapped = shape.problem();
                if mapped.types.q.is_code() {
                    // Without tensor maps there is no kernel.
                    return vec![attention::select(&mapped, gpu).unwrap()];
                }
                let mut problem = mapped;
                (problem.q.seq, problem.k.seq) = (0, 0);
                [mapped, problem].map(|p| attention::select(&p, gpu).unwrap()).into()
            }
            Case::BsrMatmul(shape) => {
                let problem = shape.problem();
                let odd = BsrProblem { b_vectorized: false, ..problem };
                [problem, odd].map(|p| bsr_matmul::select(&p, gpu).unwrap()).into()
            }
            _ => Vec::new(),
        }
    };
    let (benches, mut compared) = (benches().unwrap(), 0);
    for name in Suite::names(&benches) {
        for case in Suite::load(&benches, &name).unwrap().cases {
            let of_h200 = selected(&case, &h200);
            compared += of_h200.len();
            assert_eq!(of_h200, selected(&case, &slow), "{case}");
        }
    }
    assert!(compared > 300, "{compared}");
}
