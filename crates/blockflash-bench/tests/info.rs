//! `blockflash info`, help, and output that nobody reads.

use std::process::{Command, Output, Stdio};

fn blockflash(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_blockflash")).args(args).output().unwrap()
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_blockflash"))
        .args(["info", "--device", "cpu"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[test]
fn info_and_help() {
    let output = blockflash(&["info", "--device", "cpu"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    // Which sizes run where.
    let line = |words: [&str; 4]| {
        let cells = |line: &str| {
            line.split(['│', '┆']).map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
        };
        assert!(
            text.lines().any(|line| cells(line).windows(4).any(|cells| cells == words)),
            "{words:?}: {text}"
        );
    };
    line(["attention", "head_dim 8..=64 by 8", "f16, bf16, f32", "f16, bf16"]);
    line(["attention", "other head_dim (59)", "f16, bf16, f32", "–"]);
    line(["bsr_sddmm", "other block (24)", "f16, bf16, f32", "–"]);
    let output = blockflash(&["info", "--device", "cpu", "--json"]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["device"], "cpu");
    assert!(info["support"].as_array().unwrap().iter().all(|row| row["runs"] == true));
    for args in [
        &["--help"][..],
        &["attention", "--help"],
        &["bench", "--help"],
        &["report", "--help"],
        &["--version"],
    ] {
        assert_eq!(blockflash(args).status.code(), Some(0), "{args:?}");
    }
    let version = String::from_utf8(blockflash(&["--version"]).stdout).unwrap();
    assert!(version.starts_with(concat!("blockflash ", env!("CARGO_PKG_VERSION"), " (")));
    assert!(version.trim_end().ends_with(" kernel images)"), "{version}");
    assert!(version.contains(std::env::consts::ARCH), "{version}");
    assert_eq!(blockflash(&[]).status.code(), Some(2));
}
