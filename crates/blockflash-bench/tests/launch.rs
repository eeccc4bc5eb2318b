//! `blockflash launch` as a profiler starts it, on the CPU.

use blockflash_bench::case::Case;
use std::process::{Command, Output};

fn launch(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_blockflash");
    Command::new(program)
        .args([&["launch", "--device", "cpu"], arguments].concat())
        .output()
        .unwrap()
}

#[test]
fn a_case_is_launched_and_its_work_counted() {
    for id in [
        "b1_q3_kv40_h4kv2_d16_causal_f16",
        "varlen40+3x2_h4kv2_d16_causal_f16",
        "b1_s128_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_bf16",
        "m64_n24_k96_b16_d0.4_banded_bf16",
    ] {
        let output = launch(&["--case", id, "--launches", "2"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&line["case"], &line["launches"]), (&id.into(), &2.into()));
        let case: Case = id.parse().unwrap();
        assert_eq!(
            (&line["op"], line["flops"].as_f64()),
            (&case.op().into(), Some(case.work().flops))
        );
        assert!(line["bytes"].as_f64().unwrap() > 0.0 && line["symbol"].is_null());
    }
}

#[test]
fn what_cannot_be_launched_is_one_line() {
    let cases: [(&[&str], &str); 5] = [
        (&["--case", "b1_s64"], "is not a case"),
        (&["--case", "b1_s64_h1_d16_full_f16", "--kernel", "sm80"], "but the CPU is used"),
        (&["--case", "b1_s64_h1_d16_full_f16", "--launches", "0"], "--launches"),
        (&["--case", "b1_s64_h3kv2_d16_full_f16"], "multiple"),
        (&["--case", "b1_s96_h2_d64_q32kv32_d0.5_uniform_full_bf16"], "block_q is 32"),
    ];
    for (arguments, expected) in cases {
        let output = launch(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(expected) && text.lines().count() == 1, "{arguments:?}: {text}");
    }
}
