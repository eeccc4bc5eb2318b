//! `mask show`.

use crate::harness::{Folder, integers};
use serde_json::{Value, json};

fn show(folder: &Folder, words: &str) -> Value {
    serde_json::from_str(&folder.ok(&format!("mask show {words} --json"))).unwrap()
}

/// An `.npy` file of booleans, as NumPy writes it.
fn booleans(shape: &str, values: &[bool]) -> Vec<u8> {
    let header = format!("{{'descr': '|b1', 'fortran_order': False, 'shape': {shape}, }}");
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(format!("{header:117}\n").as_bytes());
    bytes.extend(values.iter().map(|&value| u8::from(value)));
    bytes
}

#[test]
fn a_pattern_is_counted_and_drawn() {
    let folder = Folder::new();
    let pattern = "--pattern causal+window:2+sink:1 --seqlen 1024 --block 64";
    let report = show(&folder, &format!("{pattern} --out mask.svg --out copy.SVG"));
    // 16 rows of three blocks and the first column, without blocks left of the first column.
    assert_eq!(report["visited_blocks"], 16 * 3 - 3 + 13);
    assert_eq!((&report["blocks"], &report["density"]), (&json!(256), &json!(58.0 / 256.0)));
    assert_eq!(report["imbalance"], 4.0 * 16.0 / 58.0);
    // Blocks on the diagonal are partly visible.
    assert_eq!(report["visited_pairs"], (58 - 16) * 64 * 64 + 16 * (64 * 65 / 2));
    assert_eq!(report["pairs"], 1024 * 1025 / 2);
    let text = folder.text("mask.svg");
    for words in [
        "causal+window:2+sink:1: density 22.7 %, 58 blocks, imbalance 1.10",
        "1k × 1k tokens in blocks of 64 × 64",
    ] {
        assert!(text.contains(words), "{words}");
    }
    assert!(text.contains("<path ") && text.trim_end().ends_with("</svg>"));
    assert_eq!(folder.text("copy.SVG"), text);

    let table = folder.ok(&format!("mask show {pattern}"));
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
    let folder = Folder::new();
    let case = "b1_s1024_h8kv2m2_d64_q64kv128_d0.25_power_law_full_bf16";
    let report = show(&folder, &format!("--case {case} --out mask.svg"));
    assert_eq!((&report["heads"], &report["visited_blocks"]), (&json!(2), &json!(2 * 16 * 2)));
    assert_eq!((&report["block_q"], &report["block_kv"]), (&json!(64), &json!(128)));
    assert!(folder.text("mask.svg").contains("head 1: "));
    let drawn = "--pattern uniform:0.5 --seqlen 512 --seqlen-kv 1024 --heads 20 --out mask.svg";
    let report = show(&folder, &format!("{drawn} --head 17,3"));
    assert_eq!((&report["heads"], &report["visited_blocks"]), (&json!(20), &json!(20 * 4 * 4)));
    let text = folder.text("mask.svg");
    assert!(text.contains("head 17: ") && text.contains("2 of 20 heads"));
    assert!(!text.contains("head 4: "));
    assert!(show(&folder, drawn)["visited_blocks"].is_u64());
    assert!(folder.text("mask.svg").contains("16 of 20 heads"));
}

#[test]
fn files_of_booleans_and_of_indices_are_the_same_mask() {
    let folder = Folder::new();
    let blocks = [true, false, false, true, true, true];
    let (offsets, columns) = (integers(&[1, 1, 3], &[0, 1, 4]), integers(&[4], &[0, 0, 1, 2]));
    folder.put("mask.npy", booleans("(2, 3)", &blocks));
    folder.write("row_ptr.npy", &[("", &integers(&[3], &[0, 1, 4]))]);
    folder.write("col_idx.npy", &[("", &columns)]);
    folder.write("both.safetensors", &[("row_ptr", &offsets), ("col_idx", &columns)]);
    let of_booleans = show(&folder, "mask.npy --block 64");
    for (field, value) in
        [("seqlen_q", json!(128)), ("seqlen_kv", json!(192)), ("visited_blocks", json!(4))]
    {
        assert_eq!(of_booleans[field], value, "{field}");
    }
    assert_eq!(of_booleans["imbalance"], 1.5);
    for file in ["--col-idx col_idx.npy row_ptr.npy", "both.safetensors"] {
        let mut report = show(&folder, &format!("{file} --block 64 --seqlen-kv 192"));
        report["name"] = of_booleans["name"].clone();
        assert_eq!(report, of_booleans);
    }
    // A mask beside a causal one, and lengths that end within a block.
    let report = show(&folder, "mask.npy --block 64 --seqlen 100 --seqlen-kv 130 --causal");
    // Query i stands at key i + 30; the first row of blocks visits 64 keys, the second all.
    let visible = |query: usize| (query + 31).min(if query < 64 { 64 } else { 130 });
    assert_eq!(report["visited_pairs"], (0..100).map(visible).sum::<usize>());

    // Two heads whose offsets go on.
    folder.write("row_ptr.npy", &[("", &integers(&[5], &[0, 1, 2, 2, 4]))]);
    let indices = "--col-idx col_idx.npy row_ptr.npy --block 64x128";
    let two = show(&folder, &format!("{indices} --heads 2 --seqlen-kv 384"));
    let sizes = [&two["heads"], &two["blocks"], &two["seqlen_q"]];
    assert_eq!(sizes, [&json!(2), &json!(12), &json!(128)]);

    folder.refuses(
        "mask show",
        &[
            ("row_ptr.npy", "name the file of its block columns"),
            ("mask.npy --col-idx col_idx.npy", "no file of block columns may be named"),
            ("mask.npy --block 64 --seqlen 129", "have 3 x 3"),
            ("mask.npy --heads 2", "mask has 1 heads"),
            (&format!("{indices} --heads 3"), "does not match 3 heads"),
            ("both.safetensors --block 64 --seqlen-kv 100", "but there are 2 columns"),
            ("both.safetensors --block 64 --seqlen 500", "row_ptr has 2 rows"),
            ("col_idx.npy --col-idx row_ptr.npy", "invalid block mask"),
            ("missing.npy", "No such file"),
            ("both.safetensors --col-idx col_idx.npy", "name no other file for it"),
        ],
    );
    for (name, expected) in
        [("row_ptr", "no tensor `col_idx`"), ("mask", "not boolean"), ("other", "no tensor `mask`")]
    {
        folder.write("half.safetensors", &[(name, &offsets)]);
        folder.refused("mask show half.safetensors", expected);
    }
    folder.put("mask.npy", booleans("(6,)", &blocks));
    folder.refused("mask show mask.npy", "expected [rows, cols]");
}

#[test]
fn files_of_tokens_make_partial_blocks() {
    let folder = Folder::new();
    // 100 queries in two blocks, 130 keys in three: below the diagonal, and keys from 64 on.
    let visible = |query: usize, key: usize| key <= query || key >= 64;
    let tokens: Vec<bool> = (0..100 * 130).map(|at| visible(at / 130, at % 130)).collect();
    folder.put("mask.npy", booleans("(1, 100, 130)", &tokens));
    let report = show(&folder, "mask.npy --tokens --block 64 --out mask.svg");
    for (field, value) in [
        ("seqlen_q", 100),
        ("seqlen_kv", 130),
        ("visited_blocks", 6),
        ("partial_blocks", 1),
        ("bit_bytes", 512),
        ("visited_pairs", tokens.iter().filter(|&&visible| visible).count()),
    ] {
        assert_eq!(report[field], value, "{field}");
    }
    assert!(folder.text("mask.svg").contains("all pairs of a block visible"));
    let table = folder.ok("mask show mask.npy --tokens --block 64");
    assert!(table.contains("1 of them, with 512 bytes of bits"), "{table}");
    let (offsets, columns) = (integers(&[3], &[0, 1, 4]), integers(&[4], &[0, 0, 1, 2]));
    folder.write("lists.safetensors", &[("row_ptr", &offsets), ("col_idx", &columns)]);
    folder.refuses(
        "mask show",
        &[
            ("lists.safetensors --tokens", "holds lists of blocks, not booleans of tokens"),
            ("mask.npy --tokens --seqlen 101", "the file has 100 x 130 tokens, not 101 x 130"),
        ],
    );
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new();
    folder.refuses(
        "mask show",
        &[
            ("--seqlen 64", "nothing to show"),
            ("--pattern full", "--seqlen"),
            ("--pattern windw:3 --seqlen 64", "\"windw:3\" is not a part of a pattern"),
            ("--pattern sink:3 --seqlen 64", "3 sink columns"),
            ("--case b1_s64_h1_d16_full_f16", "has no block mask"),
            ("--case b1", "is not a case"),
        ],
    );
    let many: Vec<String> = (0..17).map(|head| head.to_string()).collect();
    folder.refuses(
        "mask show --pattern full --seqlen 256",
        &[
            ("--block 60", "multiple of 64"),
            ("--block x", "block size"),
            ("--out mask.gif", "must end in .svg"),
            ("--out /no/such/folder/mask.svg", "/no/such/folder/mask.svg"),
            ("--head 1", "has 1 heads"),
            ("--batch 1", "--batch 1"),
            (
                &format!("--heads 20 --out /no/such/mask.svg --head {}", many.join(",")),
                "1 to 16 heads, not 17",
            ),
            ("mask.npy", "cannot be used with"),
        ],
    );
}
