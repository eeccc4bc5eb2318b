//! Records that tests invent.

use super::run::CEILING;
use crate::case::Case;
use crate::record::{OURS, Record};
use crate::suite::Suite;
use std::path::Path;

pub(crate) fn record(case: &str, implementation: &str, us: Option<f64>) -> Record {
    Record {
        suite: "s".into(),
        op: "bsr_matmul".into(),
        case: case.into(),
        implementation: implementation.into(),
        us,
        us_min: us.map(|us| us * 0.995),
        us_max: us.map(|us| us * 1.005),
        tflops: us.map(|us| 100.0 / us),
        flops: 1e8,
        verified: us.is_some(),
        error: us.is_none().then(|| "it failed".to_owned()),
        run: "r1".into(),
        rounds: 3,
        gpu: "G".into(),
        commit: "abcdef012345".into(),
        cache: "warm".into(),
        date: "2026-11-21T08:00:00Z".into(),
        ..Record::default()
    }
}

/// Two cases with two rivals and a mark; the second case has no result of ours.
pub(crate) fn suite() -> Vec<Record> {
    let dense = Record { reference: true, ..record("a", "dense", Some(0.1)) };
    vec![
        record("a", OURS, Some(2.0)),
        record("a", "x", Some(3.0)),
        record("a", "y", Some(4.0)),
        dense,
        record("b", OURS, None),
        record("b", "x", Some(5.0)),
    ]
}

pub(crate) fn ceiling(name: &str, rate: f64, unit: &str) -> Record {
    let (rate, unit) = (Some(rate), Some(unit.to_owned()));
    Record { suite: "ceilings".into(), op: CEILING.into(), rate, unit, ..record(name, OURS, None) }
}

/// The block-sparse suite of the repository as if it had been measured: ours at 0.8 of the dense
/// rate, rivals where they are asked.
pub(crate) fn block_sparse() -> Vec<Record> {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let suite = Suite::load(&benches, "block_sparse_fwd").unwrap();
    let mut records = vec![
        ceiling("wgmma_bf16", 830e12, "FLOP/s"),
        ceiling("exp2", 4.2e12, "exp/s"),
        ceiling("hbm_read", 4.2e12, "B/s"),
        ceiling("l2_bulk", 9.1e12, "B/s"),
    ];
    for case in &suite.cases {
        let work = case.work();
        let dense = if case.to_string().contains("d128") { 650.0 } else { 520.0 };
        let ours = match case {
            Case::BlockSparseFwd(shape) if shape.block_q == 64 => 0.7 * dense,
            Case::BlockSparseFwd(_) => 0.8 * dense,
            _ => dense,
        };
        let rivals = [("flex_attention", 0.55), ("flex_attention_tuned", 0.7)];
        let rivals = rivals.into_iter().filter(|_| !suite.alone.contains(case));
        for (implementation, part) in [(OURS, 1.0)].into_iter().chain(rivals) {
            let tflops = ours * part;
            let us = work.flops / tflops * 1e-6;
            records.push(Record {
                suite: suite.name.clone(),
                op: case.op().into(),
                flops: work.flops,
                bytes: work.bytes,
                l2_bytes: work.l2_bytes,
                exps: work.exps,
                tflops: Some(tflops),
                ceiling: Some("matmul".into()),
                ceiling_us: Some(work.flops / 830e6),
                ceiling_fraction: Some(tflops / 830.0),
                symbol: (implementation == OURS).then(|| "blockflash_kernel".to_owned()),
                ..record(&case.to_string(), implementation, Some(us))
            });
        }
    }
    records
}

/// A grid that has enough lengths, densities and sizes for every kind of plot, with ceilings.
pub(crate) fn grid() -> Vec<Record> {
    let mut records = vec![
        ceiling("wgmma_bf16", 830e12, "FLOP/s"),
        ceiling("wgmma_f16", 832e12, "FLOP/s"),
        ceiling("exp2", 4.2e12, "exp/s"),
        ceiling("hbm_read", 4.2e12, "B/s"),
        ceiling("l2_bulk", 9.1e12, "B/s"),
    ];
    let mut add = |suite: &str, op: &str, case: String, [flops, bytes, exps]: [f64; 3]| {
        let us = flops / 500e6;
        for (implementation, factor) in [
            (OURS, 1.0),
            ("flash_attention_3", 0.9),
            ("torch_sdpa_cudnn", 1.2),
            ("torch_matmul_dense", 3.0),
        ] {
            let us = us * factor;
            records.push(Record {
                suite: suite.into(),
                op: op.into(),
                flops,
                bytes,
                l2_bytes: bytes * 20.0,
                exps,
                tflops: Some(flops / us * 1e-6),
                ceiling: Some("matmul".into()),
                ceiling_us: Some(us * 0.5),
                ceiling_fraction: Some(0.5),
                reference: implementation == "torch_matmul_dense",
                symbol: (implementation == OURS).then(|| "blockflash_kernel".to_owned()),
                ..record(&case, implementation, Some(us))
            });
        }
    };
    for (head_dim, mask, length) in [64, 128].iter().flat_map(|d| {
        ["full", "causal"].iter().flat_map(move |m| [512, 1024, 2048].map(|s| (d, m, s)))
    }) {
        let pairs = 16.0 * 16384.0 * f64::from(length);
        let case = format!("b{}_s{length}_h16_d{head_dim}_{mask}_bf16", 16384 / length);
        let head_dim = f64::from(*head_dim);
        add(
            "attention_fwd",
            "attention_fwd",
            case,
            [4.0 * pairs * head_dim, 8.0 * 16.0 * 16384.0 * head_dim, pairs],
        );
    }
    for (block, density) in [64, 32].iter().flat_map(|b| [0.05, 0.1, 0.5].map(|d| (b, d))) {
        let case = format!("m8192_n1024_k8192_b{block}_d{density}_uniform_f16");
        let blocks = 8192.0 * 8192.0 * density;
        add(
            "bsr_matmul",
            "bsr_matmul",
            case,
            [2.0 * blocks * 1024.0, 2.0 * (blocks + 2.0 * 8192.0 * 1024.0), 0.0],
        );
    }
    for (length, density) in [(8192, 0.5), (8192, 0.25), (16384, 0.25)] {
        let case = format!("b1_s{length}_h16_d128_q128kv128_d{density}_uniform_full_bf16");
        let pairs = 16.0 * f64::from(length) * f64::from(length) * density;
        add(
            "block_sparse_fwd",
            "block_sparse_fwd",
            case,
            [512.0 * pairs, 8.0 * 16.0 * 128.0 * f64::from(length), pairs],
        );
    }
    records
}
