//! The command line from outside: exit codes, output, and the files that it reads and writes. CPU
//! only, with small shapes.

mod common;

use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_bench::random::normal;
use blockflash_sys::DType;
use common::{Folder, blockflash, json, refused};
use std::path::Path;
use std::process::{Command, Stdio};

fn random(dtype: DType, shape: &[usize], lane: u64) -> Array {
    normal(dtype, shape, 1, lane, |_| ()).unwrap()
}

fn load(path: &str, name: &str, dtype: DType) -> Array {
    TensorFile::open(path).unwrap().load(name, dtype).unwrap()
}

#[test]
fn attention_options_are_right_against_the_reference() {
    let options: [&[&str]; 8] = [
        &["--random", "2x33x4x40"],
        &[
            "--random",
            "1x33x4x40",
            "--kv-heads",
            "2",
            "--mask",
            "causal",
            "--seqlen-kv",
            "50",
            "--dtype",
            "bf16",
        ],
        &["--random", "1x50x2x16", "--mask", "causal-top-left", "--seqlen-kv", "20"],
        // Query rows without visible keys.
        &["--random", "1x50x2x16", "--mask", "causal", "--seqlen-kv", "20"],
        &["--random", "1x40x2x16", "--window", "7,3"],
        &["--random", "1x40x2x16", "--window", "-,3", "--scale", "0.3"],
        &["--random", "1x40x2x16", "--window", "5,inf", "--mask", "causal", "--softcap", "2.5"],
        &["--random", "1x0x2x16"],
    ];
    for options in options {
        let report = json(&[&["attention", "--check"], options].concat());
        assert_eq!(report["check"]["passed"], true, "{options:?}: {report}");
        assert_eq!(report["check"]["o"]["checked"], report["check"]["o"]["total"]);
    }
    let report = json(&["attention", "--random", "2x8x4x16", "--mask", "causal"]);
    assert_eq!(report["flops"], 4.0 * 2.0 * 4.0 * 16.0 * 36.0);
    assert_eq!(
        report["tensors"]["q"],
        serde_json::json!({ "shape": [2, 8, 4, 16], "dtype": "f16" })
    );
    assert_eq!((&report["device"], &report["kernel"]), (&"cpu".into(), &serde_json::Value::Null));
    assert!(report["time"]["first_us"].as_f64().unwrap() > 0.0);
    assert_eq!(report["time"]["repeats"], 0);
}

#[test]
fn bsr_options_are_right_against_the_reference() {
    let options: [&[&str]; 10] = [
        &[
            "--random",
            "50x33x70",
            "--block",
            "16",
            "--density",
            "0.4",
            "--transpose-a",
            "--dtype",
            "bf16",
        ],
        &["--random", "70x16x50", "--b-layout", "column", "--c-layout", "row", "--bias", "random"],
        &[
            "--random",
            "70x16x50",
            "--block",
            "32",
            "--density",
            "0.7",
            "--transpose-a",
            "--b-layout",
            "column",
            "--c-layout",
            "column",
            "--beta",
            "2",
            "--c",
            "random",
            "--bias",
            "random",
            "--bias-axis",
            "column",
        ],
        &["--random", "64x40x96", "--block", "16", "--density", "0.3"],
        &["--random", "50x33x70", "--block", "16", "--density", "1"],
        &["--random", "50x33x70", "--block", "32", "--density", "0"],
        &[
            "--random",
            "70x16x50",
            "--alpha",
            "-0.5",
            "--beta",
            "2",
            "--c",
            "random",
            "--out-dtype",
            "f32",
        ],
        &["--random", "70x16x50", "--bias", "random", "--activation", "gelu", "--dtype", "bf16"],
        &[
            "--random",
            "70x16x50",
            "--bias",
            "random",
            "--bias-axis",
            "column",
            "--activation",
            "silu",
        ],
        &["--random", "0x16x50"],
    ];
    for options in options {
        let report = json(&[&["bsr-matmul", "--check"], options].concat());
        assert_eq!(report["check"]["passed"], true, "{options:?}: {report}");
        assert_eq!(report["check"]["c"]["checked"], report["check"]["c"]["total"]);
    }
    let report =
        json(&["bsr-matmul", "--random", "64x10x64", "--block", "16", "--density", "0.25"]);
    assert_eq!(report["flops"], 2.0 * 4.0 * 256.0 * 10.0);
    // The option gives the sizes of the product, while A is stored transposed.
    let report = json(&["bsr-matmul", "--random", "64x10x48", "--block", "16", "--transpose-a"]);
    assert_eq!(report["tensors"]["a"]["shape"], serde_json::json!([48, 64]));
    assert_eq!(report["tensors"]["c"]["shape"], serde_json::json!([64, 10]));
}

/// f32 `.npy` files and an f16 `.safetensors` file of the same values give the same result.
#[test]
fn attention_files_round_trip() {
    let folder = Folder::new("attention");
    let names = ["q", "k", "v"];
    let halves = [0, 1, 2].map(|lane| random(DType::F16, &[1, 12, 2, 16], lane));
    let input = folder.path("qkv.safetensors");
    write(
        &input,
        &[("q", &halves[0]), ("other", &halves[0]), ("k", &halves[1]), ("v", &halves[2])],
    )
    .unwrap();
    let paths = names.map(|name| folder.path(&format!("{name}.npy")));
    for (path, half) in paths.iter().zip(&halves) {
        let single = Array::new(half.shape(), half.to_f32(0..half.len())).unwrap();
        write(path, &[("", &single)]).unwrap();
    }
    let (both, o, lse) =
        (folder.path("both.safetensors"), folder.path("o.npy"), folder.path("lse.npy"));
    json(&["attention", "--input", &input, "--out", &both, "--lse", &both, "--check"]);
    let files = ["--q", &paths[0], "--k", &paths[1], "--v", &paths[2]];
    let report = json(&[&["attention", "--out", &o, "--lse", &lse][..], &files].concat());
    assert_eq!(report["tensors"]["q"]["dtype"], "f16");
    assert_eq!(load(&both, "o", DType::F16), load(&o, "", DType::F16));
    assert_eq!(load(&both, "lse", DType::F32), load(&lse, "", DType::F32));
    assert_eq!(load(&lse, "", DType::F32).shape(), [1, 2, 12]);

    // .npy has no bf16: f32 holds it exactly.
    let (exact, npy) = (folder.path("exact.safetensors"), folder.path("bf16.npy"));
    json(&[&["attention", "--dtype", "bf16", "--out", &exact][..], &files].concat());
    let report = json(&[&["attention", "--dtype", "bf16", "--out", &npy][..], &files].concat());
    assert!(report["written"][0].as_str().unwrap().contains("f32, because .npy has no bf16"));
    assert_eq!(load(&exact, "o", DType::BF16), load(&npy, "", DType::BF16));
}

#[test]
fn bsr_files_round_trip() {
    let folder = Folder::new("bsr");
    let integers = |values: &[i32]| Array::from(values.to_vec());
    let (row_ptr, col_idx) = (integers(&[0, 1, 1, 3]), integers(&[1, 0, 1]));
    let values = random(DType::F16, &[3, 16, 16], 0);
    let b = random(DType::F16, &[32, 5], 1);
    let (a_path, b_path, c_path) =
        (folder.path("a.safetensors"), folder.path("b.npy"), folder.path("c.npy"));
    let tensors = [("row_ptr", &row_ptr), ("col_idx", &col_idx), ("values", &values)];
    write(&a_path, &tensors).unwrap();
    write(&b_path, &[("", &b)]).unwrap();
    let run = ["bsr-matmul", "--a", &a_path, "--b", &b_path];
    let report = json(&[&run[..], &["--out", &c_path, "--out-dtype", "f32", "--check"]].concat());
    assert_eq!(report["tensors"]["a"]["shape"], serde_json::json!([48, 32]));
    let c = load(&c_path, "", DType::F32);
    assert_eq!((c.shape(), c.to_f32(80..160)), (&[48, 5][..], vec![0.0; 80]));

    // A column-major file has the same meaning; the transpose needs A's shape.
    let columns = folder.path("columns.npy");
    json(&[&run[..], &["--c-layout", "column", "--out", &columns, "--out-dtype", "f32"]].concat());
    assert_eq!(load(&columns, "", DType::F32), c);
    let report =
        json(&[&run[..], &["--b-layout", "column", "--c-layout", "column", "--check"]].concat());
    assert_eq!(report["check"]["passed"], true);
    assert!(refused(&[&run[..], &["--transpose-a"]].concat()).contains("`shape`"));

    // C as an operand, and a bias.
    let bias_path = folder.path("bias.npy");
    write(&bias_path, &[("", &random(DType::F32, &[5], 2))]).unwrap();
    let more =
        ["--c", &c_path, "--beta", "-1", "--bias", &bias_path, "--bias-axis", "column", "--check"];
    assert_eq!(json(&[&run[..], &more].concat())["check"]["passed"], true);
    let text = refused(&[&run[..], &["--bias", &bias_path]].concat());
    assert!(text.contains("bias is [5], expected [48]"), "{text}");

    // A size that is no multiple of the block needs zeros beyond it.
    let shape = integers(&[47, 32]);
    write(&a_path, &[&tensors[..], &[("shape", &shape)]].concat()).unwrap();
    assert!(refused(&run).contains("not zero"), "{}", refused(&run));
    let unsorted = integers(&[1, 1, 0]);
    write(&a_path, &[tensors[0], ("col_idx", &unsorted), tensors[2]]).unwrap();
    assert!(refused(&run).contains("invalid BSR matrix"), "{}", refused(&run));
    write(&a_path, &[tensors[0], tensors[1]]).unwrap();
    assert!(refused(&run).contains("no tensor `values`"));
}

#[test]
fn bad_options_are_one_line() {
    let cases: [(&[&str], &str); 30] = [
        (&["attention"], "--random BxSxHxD"),
        (&["attention", "--random", "1x2x3"], "expected 4 sizes"),
        (&["attention", "--random", "1x2x3x4", "--input", "x"], "cannot be used with"),
        (&["attention", "--q", "x.npy"], "--k"),
        (&["attention", "--input", "x", "--kv-heads", "3"], "only apply to --random"),
        (&["attention", "--input", "x", "--q", "x", "--k", "x", "--v", "x"], "cannot be used with"),
        (&["attention", "--random", "1x8x2x16", "--v", "x"], "cannot be used with"),
        (&["bsr-matmul", "--a", "x", "--b", "y", "--density", "0.5"], "only apply to --random"),
        (&["bsr-matmul", "--random", "64x64x64", "--bias-axis", "row"], "--bias"),
        (
            &["attention", "--random", "1x8x2x16", "--mask", "diagonal"],
            "possible values: full, causal",
        ),
        (&["attention", "--random", "1x8x2x16", "--window", "3"], "two numbers of keys"),
        (
            &["attention", "--random", "1x8x2x16", "--window", "3,4", "--mask", "causal"],
            "must be 0 or -",
        ),
        (&["attention", "--random", "1x8x2x16", "--scale", "-1"], "scale"),
        (&["attention", "--random", "1x8x2x16", "--softcap", "nan"], "softcap"),
        (&["attention", "--random", "1x8x3x16", "--kv-heads", "2"], "multiple"),
        (&["attention", "--random", "1x8x3x16", "--kv-heads", "0"], "multiple"),
        (&["attention", "--random", "1000000x1000000x1000x128"], "of host memory"),
        (&["attention", "--random", "9999999999x9999999999x9999999999x1"], "host memory"),
        (&["attention", "--random", "1x8x2x16", "--device", "gpu"], "cpu, cuda or cuda:N"),
        (&["attention", "--random", "1x8x2x16", "--device", "cuda:99"], "error: "),
        (&["attention", "--random", "1x8x2x16", "--out", "o.txt"], ".npy or .safetensors"),
        (&["attention", "--random", "1x8x2x16", "--out", "/no/such/o.npy"], "does not exist"),
        (
            &["attention", "--random", "1x8x2x16", "--out", "o.npy", "--lse", "o.npy"],
            "same .npy file",
        ),
        (&["attention", "--random", "1x8x2x16", "--sead", "1"], "--seed"),
        (&["bsr-matmul", "--random", "1000000x9999999x1000000"], "host memory"),
        (&["bsr-matmul", "--random", "99999999x1x99999999", "--block", "1"], "too many blocks"),
        (&["bsr-matmul", "--random", "64x64x64", "--density", "1.5"], "expected 0 to 1"),
        (&["bsr-matmul", "--random", "64x64x64", "--block", "0"], "--block is 0"),
        (&["bsr-matmul", "--random", "64x64x64", "--beta", "1"], "--c"),
        (&["bsr-matmul", "--a", "x.safetensors"], "--b"),
    ];
    for (args, expected) in cases {
        let args = if args.contains(&"--device") {
            args.to_vec()
        } else {
            [args, &["--device", "cpu"]].concat()
        };
        let text = refused(&args);
        assert!(text.contains(expected), "{args:?}: {text}");
    }
    assert!(refused(&["frobnicate"]).contains("unrecognized subcommand"));
}

#[test]
fn bad_files_are_one_line() {
    let folder = Folder::new("bad");
    let text = folder.path("text.npy");
    std::fs::write(&text, "these are not the tensors you are looking for").unwrap();
    let integers = folder.path("integers.npy");
    write(&integers, &[("", &Array::new(&[1, 1, 1, 2], vec![1, 2]).unwrap())]).unwrap();
    let flat = folder.path("flat.npy");
    write(&flat, &[("", &random(DType::F32, &[8], 0))]).unwrap();
    let large = folder.path("large.npy");
    write(&large, &[("", &Array::new(&[1, 1, 1, 8], vec![1e6f32; 8]).unwrap())]).unwrap();
    let missing = folder.path("missing.npy");
    let check = |path: &str, expected: &str| {
        let text =
            refused(&["attention", "--q", path, "--k", path, "--v", path, "--device", "cpu"]);
        assert!(text.contains(expected) && !text.contains("panicked"), "{path}: {text}");
    };
    check(&text, "not a .npy or .safetensors file");
    check(&missing, "No such file");
    check(&folder.path("."), "not a regular file");
    check(&integers, "cannot be converted to f16");
    check(&flat, "q has shape [8]");
    check(&large, "--dtype bf16");
    let output = blockflash(&["attention", "--input", &missing]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_table_for_people() {
    let output = blockflash(&[
        "attention",
        "--random",
        "1x8x2x16",
        "--device",
        "cpu",
        "--check",
        "--repeat",
        "1",
    ]);
    assert_eq!(output.status.code(), Some(0));
    let table = String::from_utf8(output.stdout).unwrap();
    for part in ["[1, 8, 2, 16] f16", "check o", "ok: error", "FLOP/s (", "one run after the first"]
    {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

#[test]
fn the_same_seed_gives_the_same_result() {
    let folder = Folder::new("seed");
    let run = |name: &str, seed: &str, threads: &str| {
        let path = folder.path(name);
        let args = [
            "attention",
            "--random",
            "1x300x2x64",
            "--device",
            "cpu",
            "--seed",
            seed,
            "--out",
            &path,
        ];
        let status = Command::new(env!("CARGO_BIN_EXE_blockflash"))
            .args(args)
            .env("RAYON_NUM_THREADS", threads)
            .stdout(Stdio::null())
            .status();
        assert!(status.unwrap().success());
        std::fs::read(Path::new(&path)).unwrap()
    };
    let first = run("a.npy", "5", "1");
    assert!(first == run("b.npy", "5", "3"));
    assert!(first != run("c.npy", "6", "1"));
}
