use super::*;
use std::collections::BTreeSet;

const TINY: Limits = Limits { mib: 8, gflop: 1 };

fn drawn(operation: Operation, seed: u64, cases: usize) -> Vec<String> {
    let suite = Suite::drawn(operation, seed, cases, Limits::default()).unwrap();
    suite.cases.iter().map(Case::to_string).collect()
}

/// For any seed: as many cases as are wanted, all of them different and within the limits, with
/// ids that are read again.
#[test]
fn cases_are_within_the_limits_and_their_ids_are_read_again() {
    for (operation, limits) in
        Operation::ALL.into_iter().flat_map(|op| [(op, Limits::default()), (op, TINY)])
    {
        for seed in [0, 1, 77] {
            let suite = Suite::drawn(operation, seed, 40, limits).unwrap();
            assert_eq!(suite.name, format!("drawn_{}_{seed}", operation.name()));
            let ids: BTreeSet<_> = suite.cases.iter().map(Case::to_string).collect();
            assert_eq!((suite.cases.len(), ids.len()), (40, 40));
            for case in &suite.cases {
                assert_eq!(case.to_string().parse::<Case>().as_ref(), Ok(case));
                assert!(case.work().bytes <= f64::from(limits.mib << 20), "{case}");
                assert!(case.work().flops <= f64::from(limits.gflop) * 1e9, "{case}");
            }
        }
    }
}

#[test]
fn fewer_cases_are_the_first_of_more_and_seeds_differ() {
    for operation in Operation::ALL {
        let all = drawn(operation, 5, 30);
        assert_eq!(all[..7], drawn(operation, 5, 7));
        let other: BTreeSet<_> = drawn(operation, 6, 30).into_iter().collect();
        assert!(all.iter().filter(|id| other.contains(*id)).count() < 3, "{operation:?}");
    }
}

/// What the draw is for: lengths and batches between the powers of two, every kind of cache, mask,
/// type and grouping of heads.
#[test]
fn a_draw_covers_the_settings() {
    let has = |operation, words: &[&str]| {
        let ids = drawn(operation, 3, 60).join("\n");
        words.iter().for_each(|word| assert!(ids.contains(word), "{operation:?} lacks {word}"));
        ids
    };
    let decode =
        ["_q1_", "_contiguous_full", "_power_", "_page16_", "_window", "_page256_", "_bf16"];
    has(Operation::Decode, &decode);
    has(Operation::Forward, &["_causal_", "_full_", "_window", "_q", "_d64_", "_d256_"]);
    has(Operation::Backward, &["bwd_", "_causal_", "_full_"]);
    has(Operation::BlockSparse, &["q64kv64", "q128kv128", "power_law", "m1_", "_causal_"]);
    has(Operation::Bsr, &["_n1_", "_n8_", "_b16_", "_b128_", "banded"]);
    has(Operation::Packed, &["varlen", "_causal_", "_full_", "_window"]);
    let odd = |case: &Case| match case {
        Case::Attention(shape) => !shape.seqlen_q.is_multiple_of(2),
        _ => false,
    };
    let forward = Suite::drawn(Operation::Forward, 3, 60, Limits::default()).unwrap();
    assert!(forward.cases.iter().filter(|case| odd(case)).count() > 10);
}

#[test]
fn limits_that_leave_nothing_are_an_error() {
    let narrow = Limits { mib: 1, gflop: 0 };
    let error = Suite::drawn(Operation::Forward, 0, 1, narrow).unwrap_err().to_string();
    assert!(error.contains("0 of 1 shapes were found within 1 MiB and 0 GFLOP"), "{error}");
}

#[test]
fn the_table_holds_models_of_all_kinds() {
    let Models { decoders, encoders } = Models::published().unwrap();
    assert!(decoders.len() + encoders.len() >= 40 && encoders.len() >= 10);
    for (name, model) in decoders.iter().chain(&encoders) {
        let [q, kv, head_dim] = model.heads;
        assert!(q >= kv && q.is_multiple_of(kv) && head_dim.is_multiple_of(8), "{name}");
        assert!(model.mlp.iter().all(|size| size.is_multiple_of(16)), "{name}");
    }
    let some = |wanted: fn(&Model) -> bool| decoders.values().filter(|model| wanted(model)).count();
    assert!(some(|model| model.heads[1] == 1) >= 3, "several share one head of keys");
    assert!(some(|model| model.window.is_some()) >= 3 && some(|model| model.sinks) > 0);
    assert!(some(|model| model.softcap.is_some()) > 0);
}

/// Of each operation with this seed, a hash (FNV-1a) of the ids of 30 cases, and the first id. A
/// record says by its seed what was drawn: who changes the table of models or the draw on purpose
/// changes these lines; nothing else does, no machine and no toolchain.
const SEED: u64 = 57;
const IDS: [(Operation, u64, &str); 6] = [
    (
        Operation::Decode,
        0x5883_66AC_AF17_1072,
        "decode_b2_q10_kv95488_h32kv16_d128_page256_power_window1024_bf16",
    ),
    (Operation::Forward, 0x0D9A_584A_B287_D93C, "b10_s546_h32_d128_causal_bf16"),
    (Operation::Backward, 0xEC01_03E4_669C_82B8, "bwd_b9_s1717_h64kv8_d128_causal_bf16"),
    (
        Operation::BlockSparse,
        0x9798_31E6_1FF4_E470,
        "b1_s4224_h71kv1m1_d64_q64kv64_d0.061_uniform_causal_f16",
    ),
    (Operation::Bsr, 0xC0F1_0752_C26C_BBD7, "m2048_n24_k11008_b64_d0.042_full_rows_bf16"),
    (
        Operation::Packed,
        0x9119_C68D_972E_CEF4,
        "varlen72+2143+3274+3273+1874+397_h48kv2_d128_full_f16",
    ),
];

#[test]
fn a_seed_draws_the_same_cases_everywhere() {
    for (operation, hash, first) in IDS {
        let ids = drawn(operation, SEED, 30);
        let fnv = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        let found = ids.join("\n").bytes().fold(0xCBF2_9CE4_8422_2325, fnv);
        assert_eq!((ids[0].as_str(), found), (first, hash), "{operation:?} is {found:#X}");
    }
}
