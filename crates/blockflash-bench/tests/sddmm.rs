//! `blockflash sddmm` as a user runs it, on the CPU.

mod common;

use blockflash_bench::io::TensorFile;
use blockflash_sys::DType;
use common::Folder;
use std::process::{Command, Output};

fn sddmm(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_blockflash");
    Command::new(program).args([&["sddmm", "--device", "cpu"], arguments].concat()).output().unwrap()
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = sddmm(&[arguments, &["--repeat", "0", "--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""), "{arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn options_are_right_against_the_reference() {
    let options: [&[&str]; 7] = [
        &["--random", "64x40x96", "--block", "16", "--density", "0.3"],
        &["--random", "50x33x70", "--block", "16", "--density", "1", "--a-layout", "column"],
        &["--random", "50x33x70", "--block", "32", "--density", "0"],
        &["--random", "70x50x90", "--alpha", "-0.5", "--beta", "2", "--out-dtype", "f32", "--density", "1"],
        &["--random", "70x16x50", "--b-layout", "column", "--dtype", "bf16", "--density", "0.5"],
        &["--random", "70x0x50", "--a-layout", "column", "--b-layout", "column", "--density", "1"],
        &["--random", "0x16x50"],
    ];
    for options in options {
        let report = json(&[&["--check"], options].concat());
        assert_eq!(report["check"]["passed"], true, "{options:?}: {report}");
        assert_eq!(report["check"]["values"]["checked"], report["check"]["values"]["total"]);
    }
}

#[test]
fn what_it_says_and_writes() {
    let folder = Folder::new("sddmm");
    let path = folder.path("values.npy");
    let run = ["--random", "64x10x32", "--block", "16", "--density", "0.25", "--out", &path];
    let report = json(&run);
    assert_eq!(report["flops"], 2.0 * 2.0 * 256.0 * 10.0);
    // m, k and n, in the order of the option.
    assert_eq!(report["tensors"]["a"]["shape"], serde_json::json!([64, 10]));
    assert_eq!(report["tensors"]["b"]["shape"], serde_json::json!([10, 32]));
    let values = TensorFile::open(&path).unwrap().load("", DType::F16).unwrap();
    assert_eq!(values.shape(), [2, 16, 16]);
}

#[test]
fn what_is_wrong_is_one_line() {
    for (arguments, expected) in [
        (&["--random", "64x64x64", "--block", "0"][..], "--block is 0"),
        (&["--random", "64x64x64", "--density", "-0.5"], "expected 0 to 1"),
        (&["--random", "64x64x64", "--a-layout", "both"], "row, column"),
        (&["--random", "64x64x64", "--alpha", "nan"], "alpha"),
        (&["--random", "1000000x9999999x1000000"], "host memory"),
        (&["--random", "99999999x1x99999999", "--block", "1"], "too many blocks"),
        (&["--block", "64"], "--random"),
    ] {
        let output = sddmm(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {text}");
        assert!(text.contains(expected) && text.lines().count() == 1, "{arguments:?}: {text}");
    }
}
