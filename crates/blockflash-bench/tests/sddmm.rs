//! `blockflash sddmm` as a user runs it, on the CPU.

mod common;

use approx::assert_abs_diff_eq;
use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_bench::random::normal;
use blockflash_sys::DType;
use common::Folder;
use std::process::{Command, Output};

fn sddmm(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_blockflash");
    Command::new(program)
        .args([&["sddmm", "--device", "cpu"], arguments].concat())
        .output()
        .unwrap()
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = sddmm(&[arguments, &["--repeat", "0", "--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""), "{arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn options_are_right_against_the_reference() {
    let options: [&[&str]; 8] = [
        &["--random", "64x40x96", "--block", "16", "--density", "0.3"],
        &["--random", "50x33x70", "--block", "16", "--density", "1", "--a-layout", "column"],
        &["--random", "50x33x70", "--block", "32", "--density", "0"],
        &[
            "--random",
            "70x50x90",
            "--alpha",
            "-0.5",
            "--beta",
            "2",
            "--out-dtype",
            "f32",
            "--density",
            "1",
        ],
        &["--random", "70x16x50", "--b-layout", "column", "--dtype", "bf16", "--density", "0.5"],
        &["--random", "70x0x50", "--a-layout", "column", "--b-layout", "column", "--density", "1"],
        &["--random", "0x16x50"],
        &["--random", "64x40x96", "--block", "24", "--dtype", "f32"],
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

fn integers(values: &[i32]) -> Array {
    Array::from(values.to_vec())
}

/// The files of a product of 48 × 20 and 20 × 32 at three blocks of 16.
struct Files {
    folder: Folder,
    a: String,
    b: String,
    pattern: String,
    values: Array,
}

impl Files {
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let [a, b, pattern] =
            ["a.npy", "b.npy", "pattern.safetensors"].map(|name| folder.path(name));
        let random = |dtype, shape: &[usize], lane| normal(dtype, shape, 1, lane, |_| ()).unwrap();
        write(&a, &[("", &random(DType::F16, &[48, 20], 0))]).unwrap();
        write(&b, &[("", &random(DType::F16, &[20, 32], 1))]).unwrap();
        let files = Self { folder, a, b, pattern, values: random(DType::F32, &[3, 16, 16], 2) };
        files.write_pattern(&[0, 1, 1, 3], &[1, 0, 1], None);
        files
    }

    fn write_pattern(&self, row_ptr: &[i32], col_idx: &[i32], shape: Option<[i32; 2]>) {
        let (row_ptr, col_idx) = (integers(row_ptr), integers(col_idx));
        let shape = shape.map(|shape| integers(&shape));
        let mut tensors =
            vec![("row_ptr", &row_ptr), ("col_idx", &col_idx), ("values", &self.values)];
        tensors.extend(shape.as_ref().map(|shape| ("shape", shape)));
        write(&self.pattern, &tensors).unwrap();
    }

    fn run<'a>(&'a self, options: &[&'a str]) -> Vec<&'a str> {
        let files = ["--a", &self.a, "--b", &self.b, "--pattern", &self.pattern];
        [&files[..], options].concat()
    }
}

#[test]
fn files_are_right_against_the_reference() {
    let files = Files::new("files");
    let [plain, columns, with_old] =
        ["plain.npy", "columns.npy", "old.npy"].map(|name| files.folder.path(name));
    let values = |path: &str| TensorFile::open(path).unwrap().load("", DType::F32).unwrap();
    let report = json(&files.run(&["--out-dtype", "f32", "--out", &plain, "--check"]));
    assert_eq!(report["check"]["passed"], true, "{report}");
    assert_eq!(report["tensors"]["a"], serde_json::json!({ "shape": [48, 20], "dtype": "f16" }));
    // Layouts in memory do not change the meaning of the files.
    let layouts = ["--a-layout", "column", "--b-layout", "column", "--out-dtype", "f32", "--check"];
    let report = json(&files.run(&[&layouts[..], &["--out", &columns]].concat()));
    assert_eq!(report["check"]["passed"], true, "{report}");
    let [plain, columns] = [&plain, &columns].map(|path| values(path).to_f32(0..768));
    assert_abs_diff_eq!(plain[..], columns[..], epsilon = 1e-4);
    // The old values are the values of the pattern's file.
    let report =
        json(&files.run(&["--beta", "1", "--out-dtype", "f32", "--out", &with_old, "--check"]));
    assert_eq!(report["check"]["passed"], true, "{report}");
    let (sum, old) = (values(&with_old).to_f32(0..768), files.values.to_f32(0..768));
    let added: Vec<f32> = sum.iter().zip(&plain).map(|(sum, new)| sum - new).collect();
    assert_abs_diff_eq!(added[..], old[..], epsilon = 1e-4);
    // The output of this command is a valid input of the other one.
    files.write_pattern(&[0, 1, 1, 3], &[1, 0, 1], Some([48, 32]));
    assert_eq!(json(&files.run(&["--check"]))["check"]["passed"], true);
}

#[test]
fn wrong_files_are_one_line() {
    let files = Files::new("wrong");
    let refused = |options: &[&str]| {
        let output = sddmm(&files.run(options));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        text
    };
    assert!(refused(&["--block", "16"]).contains("only apply to --random"));
    assert!(refused(&["--random", "48x20x32"]).contains("cannot be used with"));
    assert!(refused(&["--out", "no/such/x.npy"]).contains("does not exist"));
    assert!(
        refused(&["--out", &files.pattern]).contains("--out names the file that --pattern reads")
    );
    files.write_pattern(&[0, 1, 1, 3], &[1, 0, 1], Some([48, 30]));
    assert!(refused(&[]).contains("the pattern is 48 x 30, but A·B is 48 x 32"));
    files.write_pattern(&[0, 1, 1, 3], &[1, 0, 2], None);
    assert!(refused(&[]).contains("invalid BSR matrix"));
    files.write_pattern(&[0, 1, 3], &[1, 0, 1], None);
    assert!(refused(&[]).contains("invalid BSR matrix"));
    write(&files.pattern, &[("row_ptr", &integers(&[0]))]).unwrap();
    assert!(refused(&[]).contains("no tensor `col_idx`"));
    std::fs::copy(&files.a, &files.b).unwrap();
    assert!(refused(&[]).contains("b has 48 rows, but A has 20 columns"));
    std::fs::copy(&files.a, &files.pattern).unwrap();
    let text = refused(&[]);
    assert!(text.contains("b has 48 rows") || text.contains("without a name"), "{text}");
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
        assert_eq!(
            (output.status.code(), output.stdout.len()),
            (Some(2), 0),
            "{arguments:?}: {text}"
        );
        assert!(text.contains(expected) && text.lines().count() == 1, "{arguments:?}: {text}");
    }
}
