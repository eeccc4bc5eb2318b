//! `blockflash mask show` as a user runs it.

mod common;

use blockflash_bench::io::{Array, write};
use common::Folder;
use std::process::{Command, Output};

fn show(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_blockflash");
    Command::new(program).args([&["mask", "show"], arguments].concat()).output().unwrap()
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = show(&[arguments, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""), "{arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one line on stderr of a command that refuses, with exit code 2.
fn refused(arguments: &[&str]) -> String {
    let output = show(arguments);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {text}");
    assert_eq!(
        (text.lines().count(), text.starts_with("error: ")),
        (1, true),
        "{arguments:?}: {text}"
    );
    text
}

/// An `.npy` file of booleans, as NumPy writes it.
fn booleans(path: &str, shape: &str, values: &[bool]) {
    let header = format!("{{'descr': '|b1', 'fortran_order': False, 'shape': {shape}, }}");
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(format!("{header:117}\n").as_bytes());
    bytes.extend(values.iter().map(|&value| u8::from(value)));
    std::fs::write(path, bytes).unwrap();
}

fn integers(shape: &[usize], values: &[i32]) -> Array {
    Array::new(shape, values.to_vec()).unwrap()
}

#[test]
fn a_pattern_is_counted_and_drawn() {
    let folder = Folder::new("pattern");
    let [svg, copy] = ["mask.svg", "copy.SVG"].map(|name| folder.path(name));
    let pattern = ["--pattern", "causal+window:2+sink:1", "--seqlen", "1024", "--block", "64"];
    let report = json(&[&pattern[..], &["--out", &svg, "--out", &copy]].concat());
    // 16 rows of three blocks and the first column, without blocks left of the first column.
    assert_eq!(
        (&report["visited_blocks"], &report["blocks"]),
        (&(16 * 3 - 3 + 13).into(), &256.into())
    );
    assert_eq!(report["density"], 58.0 / 256.0);
    assert_eq!(report["imbalance"], 4.0 * 16.0 / 58.0);
    // Blocks on the diagonal are partly visible.
    assert_eq!(report["visited_pairs"], (58 - 16) * 64 * 64 + 16 * (64 * 65 / 2));
    assert_eq!(report["pairs"], 1024 * 1025 / 2);
    let text = std::fs::read_to_string(&svg).unwrap();
    for words in [
        "causal+window:2+sink:1: density 22.7 %, 58 blocks, imbalance 1.10",
        "1k × 1k tokens in blocks of 64 × 64",
    ] {
        assert!(text.contains(words), "{words}");
    }
    assert!(text.contains("<path ") && text.trim_end().ends_with("</svg>"));
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), text);

    let table = String::from_utf8(show(&pattern).stdout).unwrap();
    for part in [
        "58 of 256 blocks",
        "1.10 (longest row / mean row)",
        "% of those that the causal mask shows",
    ] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

#[test]
fn heads_and_cases() {
    let folder = Folder::new("heads");
    let svg = folder.path("mask.svg");
    let case = "b1_s1024_h8kv2m2_d64_q64kv128_d0.25_power_law_full_bf16";
    let report = json(&["--case", case, "--out", &svg]);
    assert_eq!((&report["heads"], &report["visited_blocks"]), (&2.into(), &(2 * 16 * 2).into()));
    assert_eq!((&report["block_q"], &report["block_kv"]), (&64.into(), &128.into()));
    assert!(std::fs::read_to_string(&svg).unwrap().contains("head 1: "));
    let drawn =
        ["--pattern", "uniform:0.5", "--seqlen", "512", "--seqlen-kv", "1024", "--heads", "20"];
    let report = json(&[&drawn[..], &["--head", "17,3", "--out", &svg]].concat());
    assert_eq!((&report["heads"], &report["visited_blocks"]), (&20.into(), &(20 * 4 * 4).into()));
    let text = std::fs::read_to_string(&svg).unwrap();
    assert!(
        text.contains("head 17: ") && text.contains("2 of 20 heads") && !text.contains("head 4: ")
    );
    assert!(json(&[&drawn[..], &["--out", &svg]].concat())["visited_blocks"].is_u64());
    assert!(std::fs::read_to_string(&svg).unwrap().contains("16 of 20 heads"));
}

#[test]
fn files_of_booleans_and_of_indices_are_the_same_mask() {
    let folder = Folder::new("files");
    let blocks = [true, false, false, true, true, true];
    let (mask, row_ptr, col_idx) =
        (folder.path("mask.npy"), folder.path("row_ptr.npy"), folder.path("col_idx.npy"));
    booleans(&mask, "(2, 3)", &blocks);
    write(&row_ptr, &[("", &integers(&[3], &[0, 1, 4]))]).unwrap();
    write(&col_idx, &[("", &integers(&[4], &[0, 0, 1, 2]))]).unwrap();
    let both = folder.path("both.safetensors");
    let (offsets, columns) = (integers(&[1, 1, 3], &[0, 1, 4]), integers(&[4], &[0, 0, 1, 2]));
    write(&both, &[("row_ptr", &offsets), ("col_idx", &columns)]).unwrap();
    let of_booleans = json(&[&mask, "--block", "64"]);
    assert_eq!((&of_booleans["seqlen_q"], &of_booleans["seqlen_kv"]), (&128.into(), &192.into()));
    assert_eq!(
        (&of_booleans["visited_blocks"], &of_booleans["imbalance"]),
        (&4.into(), &1.5.into())
    );
    let sizes = ["--block", "64", "--seqlen-kv", "192"];
    for file in [&["--col-idx", &col_idx, &row_ptr][..], &[&both]] {
        let mut report = json(&[file, &sizes].concat());
        report["name"] = of_booleans["name"].clone();
        assert_eq!(report, of_booleans);
    }
    // A mask beside a causal one, and lengths that end within a block.
    let report =
        json(&[&mask, "--block", "64", "--seqlen", "100", "--seqlen-kv", "130", "--causal"]);
    // Query i stands at key i + 30; the first row of blocks visits 64 keys, the second all.
    let pairs: usize =
        (0..100).map(|query| (query + 31).min(if query < 64 { 64 } else { 130 })).sum();
    assert_eq!(report["visited_pairs"], pairs);

    // Two heads whose offsets go on.
    write(&row_ptr, &[("", &integers(&[5], &[0, 1, 2, 2, 4]))]).unwrap();
    let indices = ["--col-idx", &col_idx, &row_ptr, "--block", "64x128"];
    let two = json(&[&indices[..], &["--heads", "2", "--seqlen-kv", "384"]].concat());
    assert_eq!(
        (&two["heads"], &two["blocks"], &two["seqlen_q"]),
        (&2.into(), &12.into(), &128.into())
    );

    assert!(refused(&[&row_ptr]).contains("name the file of its block columns"));
    assert!(
        refused(&[&mask, "--col-idx", &col_idx]).contains("no file of block columns may be named")
    );
    assert!(refused(&[&mask, "--block", "64", "--seqlen", "129"]).contains("have 3 x 3"));
    assert!(refused(&[&mask, "--heads", "2"]).contains("mask has 1 heads"));
    assert!(
        refused(&[&indices[..], &["--heads", "3"]].concat()).contains("does not match 3 heads")
    );
    assert!(
        refused(&[&both, "--block", "64", "--seqlen-kv", "100"])
            .contains("but there are 2 columns")
    );
    assert!(refused(&[&both, "--block", "64", "--seqlen", "500"]).contains("row_ptr has 2 rows"));
    assert!(refused(&[&col_idx, "--col-idx", &row_ptr]).contains("invalid block mask"));
    assert!(refused(&[&folder.path("missing.npy")]).contains("No such file"));
    assert!(refused(&[&both, "--col-idx", &col_idx]).contains("name no other file for it"));
    let half = folder.path("half.safetensors");
    write(&half, &[("row_ptr", &offsets)]).unwrap();
    assert!(refused(&[&half]).contains("no tensor `col_idx`"));
    write(&half, &[("mask", &offsets)]).unwrap();
    assert!(refused(&[&half]).contains("not boolean"));
    write(&half, &[("other", &offsets)]).unwrap();
    assert!(refused(&[&half]).contains("no tensor `mask`"));
    booleans(&mask, "(6,)", &blocks);
    assert!(refused(&[&mask]).contains("expected [rows, cols]"));
}

#[test]
fn bad_options_are_one_line() {
    let pattern = ["--pattern", "full", "--seqlen", "256"];
    let with = |more: &[&str]| refused(&[&pattern[..], more].concat());
    assert!(refused(&["--seqlen", "64"]).contains("nothing to show"));
    assert!(refused(&["--pattern", "full"]).contains("--seqlen"));
    assert!(
        refused(&["--pattern", "windw:3", "--seqlen", "64"])
            .contains("\"windw:3\" is not a part of a pattern")
    );
    assert!(refused(&["--pattern", "sink:3", "--seqlen", "64"]).contains("3 sink columns"));
    assert!(refused(&["--case", "b1_s64_h1_d16_full_f16"]).contains("has no block mask"));
    assert!(refused(&["--case", "b1"]).contains("is not a case"));
    assert!(with(&["--block", "60"]).contains("multiple of 64"));
    assert!(with(&["--block", "x"]).contains("block size"));
    assert!(with(&["--out", "mask.gif"]).contains("must end in .svg"));
    assert!(with(&["--out", "/no/such/folder/mask.svg"]).contains("/no/such/folder/mask.svg"));
    assert!(with(&["--head", "1"]).contains("has 1 heads"));
    assert!(with(&["--batch", "1"]).contains("--batch 1"));
    let many: Vec<String> = (0..17).map(|head| head.to_string()).collect();
    let many = ["--heads", "20", "--out", "/no/such/folder/mask.svg", "--head", &many.join(",")]
        .map(str::to_owned);
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(with(&many).contains("1 to 16 heads, not 17"));
    assert!(with(&["mask.npy"]).contains("cannot be used with"));
}
