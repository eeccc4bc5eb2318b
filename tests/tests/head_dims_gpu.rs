//! Values, and so outputs, with another head dimension than queries and keys: every kernel that the
//! GPU can run against the oracle.

use blockflash_cases::case::Case;
use blockflash_sys::Kernel;
use blockflash_tests::gpu::{Gpu, Report, gpu};

/// Of models, the other way round, within one tile, odd multiples of 8, and within the widest tile.
const HEAD_DIMS: [[usize; 2]; 8] =
    [[192, 128], [128, 192], [64, 128], [72, 40], [96, 56], [168, 104], [512, 256], [320, 504]];

/// Runs a case on every kernel that computes it, and on the selected one, into outputs full of NaN.
fn check(id: &str, gpu: &Gpu, report: &mut Report) {
    let case: Case = id.parse().unwrap_or_else(|error| panic!("{id}: {error}"));
    let mut operands = case.operands(&gpu.stream, 5).unwrap();
    let selected = operands.select(&gpu.properties);
    let selected = selected.unwrap_or_else(|error| panic!("{id} on a GPU: {error}"));
    let mut run = |kernel: &'static Kernel, given| {
        report.run(kernel, || {
            let (right, relative) =
                operands.verify(given, &gpu.stream, 3).map_err(|error| format!("{id}: {error}"))?;
            if right { Ok(1) } else { Err(format!("{id}: a relative error of {relative}")) }
        });
    };
    run(selected, None);
    let kernels: Vec<_> = gpu.kernels().collect();
    for kernel in kernels {
        if case.operands(&gpu.stream, 5).unwrap().accepts(kernel, &gpu.properties).unwrap() {
            run(kernel, Some(kernel));
        }
    }
}

fn check_all(suite: &str, ids: impl Fn(&str, &str) -> Vec<String> + Sync) {
    let named = |([qk, v], dtype): ([usize; 2], &str)| ids(&format!("d{qk}v{v}"), dtype);
    let dtypes = ["f16", "bf16"];
    let cases = HEAD_DIMS.into_iter().flat_map(|dims| dtypes.map(|dtype| (dims, dtype)));
    for id in cases.clone().flat_map(named) {
        let case: Case = id.parse().unwrap_or_else(|error| panic!("{id}: {error}"));
        assert_eq!(case.to_string(), id);
    }
    let Some(gpu) = gpu(&format!("head_dims_gpu::{suite}")) else { return };
    let check = |case, gpu: &Gpu, report: &mut Report| {
        for id in named(case) {
            check(&id, gpu, report);
        }
    };
    gpu.check_groups("head_dims_gpu", &Report::default(), cases, check);
}

#[test]
fn forward_and_backward() {
    check_all("forward_and_backward", |d, dtype| {
        let ids = |pass| {
            [
                format!("{pass}b2_s300_h4kv2_{d}_causal_{dtype}"),
                format!("{pass}b1_q33_kv700_h4_{d}_full_{dtype}"),
                format!("{pass}b1_q200_kv300_h4kv1_{d}_window90_{dtype}"),
                format!("{pass}varlen140+3x2+1+257_h4kv2_{d}_causal_{dtype}"),
                format!("{pass}b1_s512_h4kv2_{d}_q128kv128_d0.5_uniform_causal_{dtype}"),
                format!("{pass}b1_s512_h2_{d}_q64kv64_d0.5_uniform_causal_{dtype}"),
            ]
        };
        ["", "bwd_"].into_iter().flat_map(ids).collect()
    });
}

#[test]
fn attention_to_a_cache() {
    check_all("attention_to_a_cache", |d, dtype| {
        let of = |rest: &str| format!("decode_{rest}_{dtype}");
        vec![
            of(&format!("b3_q1_kv900_h8kv2_{d}_contiguous_equal")),
            of(&format!("b3_q2_kv2048_h8kv2_{d}_page16_power")),
            of(&format!("b2_q16_kv704_h8kv2_{d}_page64_equal")),
            of(&format!("b2_q300_kv704_h4kv2_{d}_page64_equal")),
            of(&format!("b2_q300_kv700_h4kv2_{d}_contiguous_equal")),
            of(&format!("b3_q2_kv96_h4kv2_{d}_page16top2_full")),
        ]
    });
}
