//! `info`, `bench`, `launch` and what they print.

use crate::harness::Folder;
use blockflash_bench::case::Case;
use blockflash_bench::record::Record;
use serde_json::{Value, json};
use std::process::Stdio;

#[test]
fn info_and_help() {
    let folder = Folder::new();
    let text = folder.ok("info --device cpu");
    // Which sizes run where.
    let cells = |line: &str| -> Vec<String> {
        line.split(['│', '┆']).map(|cell| cell.trim().to_owned()).collect()
    };
    for words in [
        ["attention", "head_dim 8..=64 by 8", "f16, bf16, f32", "f16, bf16"],
        ["attention", "head_dim 16..=64 by 16", "e4m3", "e4m3"],
        ["attention", "other head_dim (59)", "f16, bf16, f32", "–"],
        ["bsr_sddmm", "other block (24)", "f16, bf16, f32", "–"],
    ] {
        let found = text.lines().any(|line| cells(line).windows(4).any(|cells| cells == words));
        assert!(found, "{words:?}: {text}");
    }
    let info: Value = serde_json::from_str(&folder.ok("info --device cpu --json")).unwrap();
    assert_eq!(info["device"], "cpu");
    assert!(info["support"].as_array().unwrap().iter().all(|row| row["runs"] == true));
    for words in ["--help", "attention --help", "bench --help", "report --help"] {
        folder.ok(words);
    }
    let version = folder.ok("--version");
    assert!(version.starts_with(concat!("blockflash ", env!("CARGO_PKG_VERSION"), " (")));
    assert!(version.contains(std::env::consts::ARCH) && version.contains(" kernel images"));
    folder.ends(2, "");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        assert!(folder.ok(&format!("completions {shell}")).contains("seqused-kv"), "{shell}");
    }
    assert!(folder.ok("man").contains(".TH blockflash 1"));
    assert!(folder.ok("man attention-decode").contains("seqused"));
    folder.refused("man nothing", "there is no command \"nothing\"");
}

#[test]
fn suites_and_their_cases_are_listed() {
    let folder = Folder::new();
    let list = folder.ok("bench --list");
    assert!(list.contains("│ smoke ") && list.contains("A few small cases"), "{list}");
    let cases = folder.ok("bench smoke --list --filter d64_full");
    assert_eq!(cases, "b1_s512_h4_d64_full_bf16\nbwd_b1_s512_h4_d64_full_bf16\n");
    folder.refused("bench nothing --list", "smoke");
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let folder = Folder::new();
    let mut command = folder.command("info --device cpu");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

/// Measured once, briefly, into a record.
const QUICK: &str = "--device cpu --rounds 1 --window-ms 2 --gap-ms 0 --out record.jsonl";

/// A suite is measured, recorded and reported: its name and filter, records, operations and cases.
#[test]
fn suites_are_measured_recorded_and_reported() {
    let lengths = "[[attention_fwd]]\nlengths = [[70, 30, 30], [64, 64]]\nnum_heads_q = 2\n\
                   head_dim = 16\nmask = ['full', 'causal']\ndtype = ['bf16']\n";
    let masks = "[[block_mask_build]]\nseqlen = [1024]\nnum_heads = 2\nhead_dim = 16\n\
                 block = [64]\ntop_k = 3\ndtype = ['bf16']\n";
    let causal = "b1_s512_h4kv2m2_d64_q64kv64_d0.25_uniform_causal_bf16";
    let bwd_causal = format!("bwd_{causal}");
    let cases = [
        (
            "smoke --filter d64_full,b64",
            3,
            [
                ("attention_fwd", "b1_s512_h4_d64_full_bf16"),
                ("attention_bwd", "bwd_b1_s512_h4_d64_full_bf16"),
            ],
        ),
        (
            "smoke --filter kv2m2",
            4,
            [("block_sparse_fwd", causal), ("block_sparse_bwd", &bwd_causal)],
        ),
        (
            "lengths.toml --filter varlen70+30x2",
            2,
            [
                ("attention_fwd", "varlen70+30x2_h2_d16_full_bf16"),
                ("attention_fwd", "varlen70+30x2_h2_d16_causal_bf16"),
            ],
        ),
        // What has no floating-point operations has a time and no rate.
        (
            "masks.toml",
            2,
            [
                ("block_mask_build", "mask_s1024_h2_b64_scores_d16_bf16"),
                ("block_mask_build", "mask_s1024_h2_b64_top3"),
            ],
        ),
    ];
    for (suite, count, cases) in cases {
        let folder = Folder::new();
        folder.put("lengths.toml", format!("description = 'x'\n{lengths}"));
        folder.put("masks.toml", format!("description = 'x'\n{masks}"));
        let [text, _] = folder.ends(0, &format!("bench {suite} {QUICK}"));
        assert!(text.contains("this is the CPU backend"), "{text}");
        assert!(text.contains(&format!("{count} records appended")), "{text}");
        let lines = folder.text("record.jsonl");
        assert_eq!(lines.lines().count(), count);
        let right =
            |line: &str| line.contains("\"verified\":true") && line.contains("\"schema\":1");
        assert!(lines.lines().all(right), "{lines}");
        assert_eq!(lines.contains("\"tflops\":null"), suite == "masks.toml");
        let table = folder.ok("report record.jsonl --full");
        for (op, case) in cases {
            assert!(lines.contains(&format!("\"op\":\"{op}\",\"case\":\"{case}\"")), "{lines}");
            assert!(table.contains(&format!("| {case} |")) && !table.contains("error"), "{table}");
        }
    }
}

/// Shapes of every operation are drawn, measured into one record and reported.
#[test]
fn drawn_shapes_are_measured_recorded_and_reported() {
    let folder = Folder::new();
    let tiny = "bench drawn --seed 3 --cases 2 --most-mib 4 --most-gflop 1";
    let ids = folder.ok(&format!("{tiny} --list"));
    assert_eq!(ids.lines().count(), 12, "{ids}");
    assert_eq!(ids, folder.ok(&format!("{tiny} --list")));
    let some = folder.ok(&format!("{tiny} --list --operation packed,decode"));
    assert!(some.lines().all(|id| ids.contains(id)) && some.lines().count() == 4, "{some}");
    let [text, _] = folder.ends(0, &format!("{tiny} {QUICK}"));
    for operation in ["decode", "forward", "backward", "block_sparse", "bsr", "packed"] {
        let suite = format!("suite drawn_{operation}_3: 2 shapes of published models");
        assert!(text.contains(&suite), "{suite}: {text}");
    }
    let lines = folder.text("record.jsonl");
    let records: Vec<Record> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records.iter().all(|record| record.verified), "{lines}");
    let cases: Vec<_> = records.iter().map(|record| record.case.as_str()).collect();
    assert_eq!(cases, ids.lines().collect::<Vec<_>>());
    assert!(cases.iter().all(|id| id.parse::<Case>().unwrap().to_string() == **id));
    let report = folder.ok("report record.jsonl");
    assert!(report.contains("### Drawn shapes on cpu") && report.contains("| `drawn_bsr_3` | 2 |"));
    assert!(report.contains("### `drawn_packed_3`") && report.contains("| shapes | cases |"));
    folder.refuses(
        "bench",
        &[
            ("drawn --list", "needs --seed"),
            ("drawn --list --seed 1 --operation sddmm", "--operation"),
            ("drawn --list --seed 1 --cases 0", "--cases"),
            ("drawn --list --seed 1 --filter nothing", "no case of the suite drawn"),
            ("drawn --list --seed 1 --most-gflop 1 --most-mib 1", "allow more"),
            ("smoke --list --operation decode", "--operation is for the suite drawn"),
            ("smoke --list --most-mib 3", "--most-mib is for the suite drawn"),
            ("--list --cases 3", "--cases is for the suite drawn"),
        ],
    );
}

#[test]
fn refusals_of_bench_are_one_line() {
    let folder = Folder::new();
    folder.refuses(
        &format!("bench smoke {}", QUICK.replace("--rounds 1 --window-ms 2 --gap-ms 0 ", "")),
        &[
            ("--filter nothing", "no case"),
            ("--kernel sm80", "CPU"),
            ("--cache cold", "only be measured on a GPU"),
            ("--energy", "the CPU has no such counter"),
            ("--energy --cache cold", "overwriting it would count"),
            ("--cache tepid", "warm, cold"),
            ("--rounds 0", ""),
            ("--window-ms 0", ""),
            ("--gap-ms -1", ""),
            ("--swap-check", "cannot be used with"),
        ],
    );
    folder.put("bad.toml", "description = 'x'\n[[attention_fwd]]\nbatch = 'one'\n");
    folder.put("bad.jsonl", "{}\n");
    folder.refuses(
        "",
        &[
            ("bench nothing", "smoke"),
            ("bench ceilings --device cpu --out x.jsonl", "measures a GPU"),
            ("bench smoke --device cpu --swap-check --peers none", "two"),
            ("bench smoke --device cuda:99", ""),
            ("bench bad.toml", "line 3"),
            ("report missing", "missing"),
            ("report bad.jsonl", "line 1"),
        ],
    );
}

#[test]
fn suites_of_any_sizes_are_refused() {
    let folder = Folder::new();
    let decode = "[[attention_decode]]\nbatch = [N]\nseqlen_kv = [1024]\nnum_heads_q = 8\n\
                  head_dim = 64\ndtype = ['bf16']\n";
    let attention = "[[attention_fwd]]\nbatch = N\nseqlen = [1024]\nnum_heads_q = 8\n\
                     head_dim = 64\nmask = ['full']\ndtype = ['bf16']\n";
    let product = "[[bsr_matmul]]\nm = N\nk = N\nn = [64]\nblock_size = [1]\ndensity = [0.5]\n\
                   pattern = ['uniform']\ndtype = ['f16']\n";
    let run = "bench x.toml --device cpu";
    for (grid, number) in [
        (decode, "9223372036854775807"),
        (decode, "4000000000"),
        (attention, "9223372036854775807"),
        (attention, "4000000000"),
        (product, "9223372036854775807"),
        (product, "4000000000"),
        (product, "1000000"),
    ] {
        folder.put("x.toml", format!("description = 'x'\n{}", grid.replace('N', number)));
        folder.refused(run, "the limit is");
    }
    // A case of this size can be counted, but not drawn: its record says so.
    let text = attention.replace('N', "60000").replace("[1024]", "[256]").replace("= 8", "= 256");
    folder.put("x.toml", format!("description = 'x'\n{text}"));
    let [text, _] = folder.ends(1, &format!("{run} --out record.jsonl"));
    assert!(text.contains("of host memory"), "{text}");
}

#[cfg(unix)]
#[test]
fn a_record_keeps_whole_lines_under_a_limit_of_files() {
    let folder = Folder::new();
    // In blocks of 512 or 1024 bytes.
    let output = folder.limited(2, &format!("bench smoke --filter d64_full,b64 {QUICK}"));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && text.contains("(ulimit -f)"), "{text}");
    let text = folder.text("record.jsonl");
    assert!(text.is_empty() || text.ends_with('\n'), "{text}");
    assert_eq!(folder.names(), ["record.jsonl"]);
}

#[test]
fn a_torn_record_is_repaired_and_named() {
    let folder = Folder::new();
    let run = || folder.ends(0, &format!("bench smoke --filter m1024 {QUICK}"))[1].clone();
    assert_eq!(run(), "");
    let whole = folder.text("record.jsonl");
    let lines = whole.lines().count();
    assert!(lines > 0);
    folder.put("record.jsonl", format!("{whole}{}", &whole[..100]));
    let [_, text] = folder.ends(0, "report record.jsonl");
    assert!(text.contains(&format!("line {}: the last line is torn", lines + 1)), "{text}");
    assert!(run().contains("the last line was torn, and is removed"));
    assert_eq!(folder.text("record.jsonl").lines().count(), 2 * lines);
    folder.ok("report record.jsonl");
}

#[test]
fn a_case_is_launched_and_its_work_counted() {
    let folder = Folder::new();
    for id in [
        "b1_q3_kv40_h4kv2_d16_causal_f16",
        "b1_q30_kv40_h4kv2_d16_window7_f16",
        "decode_b2_q3_kv48_h4kv2_d16_page16_power_window9_f16",
        "varlen40+3x2_h4kv2_d16_window9_f16",
        "varlen40+3x2_h4kv2_d16_causal_f16",
        "b1_s128_h4kv2m2_d16_q64kv64_d0.5_uniform_causal_bf16",
        "m64_n24_k96_b16_d0.4_banded_bf16",
    ] {
        let text = folder.ok(&format!("launch --device cpu --case {id} --launches 2"));
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["case"], &line["launches"]), (&json!(id), &json!(2)));
        let case: Case = id.parse().unwrap();
        let counted = (line["op"].as_str(), line["flops"].as_f64());
        assert_eq!(counted, (Some(case.op()), Some(case.work().flops)));
        assert!(line["bytes"].as_f64().unwrap() > 0.0 && line["symbol"].is_null());
    }
    folder.refuses(
        "launch --device cpu --case",
        &[
            ("b1_s64", "is not a case"),
            ("b1_s64_h1_d16_full_f16 --kernel sm80", "but the CPU is used"),
            ("b1_s64_h1_d16_full_f16 --launches 0", "--launches"),
            ("b1_s64_h3kv2_d16_full_f16", "multiple"),
            ("b1_s96_h2_d64_q32kv32_d0.5_uniform_full_bf16", "block_q is 32"),
        ],
    );
}
