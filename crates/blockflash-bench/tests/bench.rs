//! `blockflash bench` and `blockflash report` as a user runs them, on the CPU.

use std::path::PathBuf;
use std::process::{Command, Output};

fn blockflash(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_blockflash")).args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one line on stderr of a command that refuses, with exit code 2.
fn refusal(arguments: &[&str]) -> String {
    let output = blockflash(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    assert_eq!((text.lines().count(), text.starts_with("error: ")), (1, true), "{text}");
    text
}

fn scratch(name: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("blockflash-bench-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_suite_is_measured_recorded_and_reported() {
    let folder = scratch("run");
    let record = folder.join("smoke.jsonl");
    let out = record.to_str().unwrap();
    let options = [
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--window-ms",
        "2",
        "--out",
        out,
        "--filter",
        "d64_full,b64",
    ];
    let output = blockflash(&[&["bench", "smoke"], &options[..]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        text.contains("this is the CPU backend") && text.contains("3 records appended"),
        "{text}"
    );

    let lines = std::fs::read_to_string(&record).unwrap();
    assert_eq!(lines.lines().count(), 3);
    let backward = "\"op\":\"attention_bwd\",\"case\":\"bwd_b1_s512_h4_d64_full_bf16\"";
    assert!(lines.contains(backward), "{lines}");
    assert!(
        lines
            .lines()
            .all(|line| line.contains("\"verified\":true") && line.contains("\"schema\":1"))
    );

    let report = blockflash(&["report", folder.to_str().unwrap()]);
    let table = stdout(&report);
    assert!(report.status.success() && table.contains("| b1_s512_h4_d64_full_bf16 |"), "{table}");

    let readme = folder.join("README.md");
    let marks = "a\n<!-- results:begin -->\n<!-- results:end -->\nb\n";
    std::fs::write(&readme, marks).unwrap();
    assert!(blockflash(&["report", out, "--into", readme.to_str().unwrap()]).status.success());
    let document = std::fs::read_to_string(&readme).unwrap();
    assert!(
        document.starts_with("a\n<!-- results:begin -->\n### `smoke` on cpu")
            && document.ends_with("-->\nb\n")
    );
    std::fs::write(&readme, "no marks").unwrap();
    assert!(
        refusal(&["report", out, "--into", readme.to_str().unwrap()]).contains("results:begin")
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn packed_sequences_are_measured_recorded_and_reported() {
    let folder = scratch("varlen");
    let suite = folder.join("lengths.toml");
    let text = "description = 'x'\nrounds = 1\nwindow_ms = 2\ngap_ms = 0\n[[attention_fwd]]\n\
                lengths = [[70, 30, 30], [64, 64]]\nnum_heads_q = 2\nhead_dim = 16\nmask = \
                ['full', 'causal']\n\
                dtype = ['bf16']\n";
    std::fs::write(&suite, text).unwrap();
    let record = folder.join("lengths.jsonl");
    let out = record.to_str().unwrap();
    let options = ["--device", "cpu", "--out", out, "--filter", "varlen70+30x2"];
    let output = blockflash(&[&["bench", suite.to_str().unwrap()], &options[..]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("2 records appended"), "{text}");

    let lines = std::fs::read_to_string(&record).unwrap();
    let case = "\"op\":\"attention_fwd\",\"case\":\"varlen70+30x2_h2_d16_causal_bf16\"";
    assert!(lines.contains(case) && lines.matches("\"verified\":true").count() == 2, "{lines}");
    let report = blockflash(&["report", out, "--full"]);
    let table = stdout(&report);
    assert!(
        report.status.success() && table.contains("| varlen70+30x2_h2_d16_causal_bf16 |"),
        "{table}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn lists_of_blocks_are_measured_recorded_and_reported() {
    let folder = scratch("blocks");
    let record = folder.join("smoke.jsonl");
    let out = record.to_str().unwrap();
    let options =
        ["--device", "cpu", "--rounds", "1", "--window-ms", "2", "--out", out, "--filter", "kv2m2"];
    let output = blockflash(&[&["bench", "smoke"], &options[..]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("4 records appended"), "{text}");

    let lines = std::fs::read_to_string(&record).unwrap();
    let case = "b1_s512_h4kv2m2_d64_q64kv64_d0.25_uniform_causal_bf16";
    assert_eq!(lines.matches("\"verified\":true").count(), 4, "{lines}");
    let table = stdout(&blockflash(&["report", out, "--full"]));
    for (op, case) in
        [("block_sparse_fwd", case.to_owned()), ("block_sparse_bwd", format!("bwd_{case}"))]
    {
        assert!(lines.contains(&format!("\"op\":\"{op}\",\"case\":\"{case}\"")), "{lines}");
        assert!(table.contains(&format!("| {case} |")), "{table}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What has no floating-point operations has a time and no rate.
#[test]
fn masks_are_measured_recorded_and_shown() {
    let folder = scratch("masks");
    let (suite, record) = (folder.join("masks.toml"), folder.join("masks.jsonl"));
    let grid = "seqlen = [1024]\nnum_heads = 2\nhead_dim = 16\nblock = [64]\ntop_k = 3\ndtype = \
                ['bf16']\n";
    std::fs::write(&suite, format!("description = 'x'\n[[block_mask_build]]\n{grid}")).unwrap();
    let out = record.to_str().unwrap();
    let options = ["--device", "cpu", "--rounds", "1", "--window-ms", "2", "--out", out];
    let output = blockflash(&[&["bench", suite.to_str().unwrap()], &options[..]].concat());
    let text = stdout(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));

    let lines = std::fs::read_to_string(&record).unwrap();
    assert!(lines.matches("\"op\":\"block_mask_build\"").count() == 2, "{lines}");
    assert!(
        lines.matches("\"verified\":true").count() == 2 && lines.contains("\"tflops\":null"),
        "{lines}"
    );
    let table = stdout(&blockflash(&["report", out, "--full"]));
    for case in ["mask_s1024_h2_b64_scores_d16_bf16", "mask_s1024_h2_b64_top3"] {
        assert!(table.contains(&format!("| {case} |")), "{table}");
    }
    assert!(!table.contains("error"), "{table}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn refusals_are_one_line() {
    let folder = scratch("refusals");
    let out = folder.join("x.jsonl");
    let out = out.to_str().unwrap();
    let smoke = ["bench", "smoke", "--device", "cpu", "--out", out];
    let with = |more: &[&str]| refusal(&[&smoke[..], more].concat());
    assert!(refusal(&["bench", "nothing"]).contains("smoke"));
    assert!(with(&["--filter", "nothing"]).contains("no case"));
    assert!(with(&["--kernel", "sm80"]).contains("CPU"));
    assert!(with(&["--cache", "cold"]).contains("only be measured on a GPU"));
    assert!(with(&["--energy"]).contains("the CPU has no such counter"));
    assert!(with(&["--energy", "--cache", "cold"]).contains("overwriting it would count"));
    assert!(with(&["--cache", "tepid"]).contains("warm, cold"));
    assert!(
        refusal(&["bench", "ceilings", "--device", "cpu", "--out", out]).contains("measures a GPU")
    );
    with(&["--rounds", "0"]);
    with(&["--window-ms", "0"]);
    with(&["--gap-ms", "-1"]);
    assert!(with(&["--swap-check"]).contains("cannot be used with"));
    let rivals = ["bench", "smoke", "--device", "cpu", "--swap-check", "--peers", "none"];
    assert!(refusal(&rivals).contains("two rivals"));
    refusal(&["bench", "smoke", "--device", "cuda:99"]);
    let suite = folder.join("bad.toml");
    std::fs::write(&suite, "description = 'x'\n[[attention_fwd]]\nbatch = 'one'\n").unwrap();
    assert!(refusal(&["bench", suite.to_str().unwrap()]).contains("line 3"));
    assert!(refusal(&["report", folder.join("nothing").to_str().unwrap()]).contains("nothing"));
    std::fs::write(out, "{}\n").unwrap();
    assert!(refusal(&["report", out]).contains("line 1"));
    std::fs::remove_dir_all(&folder).unwrap();
}
