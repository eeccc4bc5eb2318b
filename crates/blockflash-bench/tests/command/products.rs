//! `bsr-matmul` and `sddmm`.

use crate::harness::{Folder, integers, random};
use approx::assert_abs_diff_eq;
use blockflash_bench::io::Array;
use blockflash_ops::DType;
use serde_json::json;

#[test]
fn options_of_bsr_matmul_are_right_against_the_reference() {
    let folder = Folder::new();
    for options in [
        "50x33x70 --block 16 --density 0.4 --transpose-a --dtype bf16",
        "70x16x50 --b-layout column --c-layout row --bias random",
        "70x16x50 --block 32 --density 0.7 --transpose-a --b-layout column --c-layout column \
         --beta 2 --c random --bias random --bias-axis column",
        "64x40x96 --block 16 --density 0.3",
        "50x33x70 --block 16 --density 1",
        "50x33x70 --block 32 --density 0",
        "70x16x50 --alpha -0.5 --beta 2 --c random --out-dtype f32",
        "70x16x50 --bias random --activation gelu --dtype bf16",
        "70x16x50 --bias random --bias-axis column --activation silu",
        "0x16x50",
    ] {
        folder.right("cpu", &format!("bsr-matmul --random {options}"));
    }
    let report = folder.json("bsr-matmul --random 64x10x64 --block 16 --density 0.25");
    assert_eq!(report["flops"], 2.0 * 4.0 * 256.0 * 10.0);
    // The option gives the sizes of the product, while A is stored transposed.
    let report = folder.json("bsr-matmul --random 64x10x48 --block 16 --transpose-a");
    assert_eq!(report["tensors"]["a"]["shape"], json!([48, 64]));
    assert_eq!(report["tensors"]["c"]["shape"], json!([64, 10]));
}

#[test]
fn options_of_sddmm_are_right_against_the_reference() {
    let folder = Folder::new();
    for options in [
        "64x40x96 --block 16 --density 0.3",
        "50x33x70 --block 16 --density 1 --a-layout column",
        "50x33x70 --block 32 --density 0",
        "70x50x90 --alpha -0.5 --beta 2 --out-dtype f32 --density 1",
        "70x16x50 --b-layout column --dtype bf16 --density 0.5",
        "70x0x50 --a-layout column --b-layout column --density 1",
        "0x16x50",
        "64x40x96 --block 24 --dtype f32",
    ] {
        folder.right("cpu", &format!("sddmm --random {options}"));
    }
    let report = folder.json("sddmm --random 64x10x32 --block 16 --density 0.25 --out values.npy");
    assert_eq!(report["flops"], 2.0 * 2.0 * 256.0 * 10.0);
    // m, k and n, in the order of the option.
    assert_eq!(report["tensors"]["a"]["shape"], json!([64, 10]));
    assert_eq!(report["tensors"]["b"]["shape"], json!([10, 32]));
    assert_eq!(folder.load("values.npy", "", DType::F16).shape(), [2, 16, 16]);
}

/// Three blocks of 16 in a matrix of 48 × 32.
fn write_blocks(
    folder: &Folder,
    values: &Array,
    row_ptr: &[i32],
    col_idx: &[i32],
    shape: Option<[i32; 2]>,
) {
    let row_ptr = integers(&[row_ptr.len()], row_ptr);
    let col_idx = integers(&[col_idx.len()], col_idx);
    let shape = shape.map(|shape| integers(&[2], &shape));
    let mut tensors = vec![("row_ptr", &row_ptr), ("col_idx", &col_idx), ("values", values)];
    tensors.extend(shape.as_ref().map(|shape| ("shape", shape)));
    folder.write("blocks.safetensors", &tensors);
}

#[test]
fn files_of_bsr_matmul() {
    let folder = Folder::new();
    let values = random(DType::F16, &[3, 16, 16], 0);
    write_blocks(&folder, &values, &[0, 1, 1, 3], &[1, 0, 1], None);
    folder.write("b.npy", &[("", &random(DType::F16, &[32, 5], 1))]);
    let run = "bsr-matmul --a blocks.safetensors --b b.npy";
    let report = folder.right("cpu", &format!("{run} --out c.npy --out-dtype f32"));
    assert_eq!(report["tensors"]["a"]["shape"], json!([48, 32]));
    let c = folder.load("c.npy", "", DType::F32);
    assert_eq!((c.shape(), c.to_f32(80..160)), (&[48, 5][..], vec![0.0; 80]));

    // A column-major file has the same meaning; the transpose needs A's shape.
    folder.json(&format!("{run} --c-layout column --out columns.npy --out-dtype f32"));
    assert_eq!(folder.load("columns.npy", "", DType::F32), c);
    folder.right("cpu", &format!("{run} --b-layout column --c-layout column"));
    folder.refused(&format!("{run} --transpose-a"), "`shape`");

    // C as an operand, and a bias.
    folder.write("bias.npy", &[("", &random(DType::F32, &[5], 2))]);
    folder.right("cpu", &format!("{run} --c c.npy --beta -1 --bias bias.npy --bias-axis column"));
    folder.refused(&format!("{run} --bias bias.npy"), "bias is [5], expected [48]");

    // A size that is no multiple of the block needs zeros beyond it.
    write_blocks(&folder, &values, &[0, 1, 1, 3], &[1, 0, 1], Some([47, 32]));
    folder.refused(run, "not zero");
    write_blocks(&folder, &values, &[0, 1, 1, 3], &[1, 1, 0], None);
    folder.refused(run, "invalid BSR matrix");
    folder.write(
        "blocks.safetensors",
        &[("row_ptr", &integers(&[1], &[0])), ("col_idx", &integers(&[0], &[]))],
    );
    folder.refused(run, "no tensor `values`");
    folder.refused("bsr-matmul --a b.npy --b b.npy", "not the tensors row_ptr, col_idx, values");
}

#[test]
fn files_of_sddmm() {
    let folder = Folder::new();
    let old = random(DType::F32, &[3, 16, 16], 2);
    folder.write("a.npy", &[("", &random(DType::F16, &[48, 20], 0))]);
    folder.write("b.npy", &[("", &random(DType::F16, &[20, 32], 1))]);
    write_blocks(&folder, &old, &[0, 1, 1, 3], &[1, 0, 1], None);
    let run = "sddmm --a a.npy --b b.npy --pattern blocks.safetensors";
    let values = |name: &str| folder.load(name, "", DType::F32).to_f32(0..768);
    let report = folder.right("cpu", &format!("{run} --out-dtype f32 --out plain.npy"));
    assert_eq!(report["tensors"]["a"], json!({ "shape": [48, 20], "dtype": "f16" }));
    // Layouts in memory do not change the meaning of the files.
    let layouts = "--a-layout column --b-layout column --out-dtype f32 --out columns.npy";
    folder.right("cpu", &format!("{run} {layouts}"));
    assert_abs_diff_eq!(values("plain.npy")[..], values("columns.npy")[..], epsilon = 1e-4);
    // The old values are the values of the pattern's file.
    folder.right("cpu", &format!("{run} --beta 1 --out-dtype f32 --out sum.npy"));
    let added: Vec<f32> =
        values("sum.npy").iter().zip(values("plain.npy")).map(|(sum, new)| sum - new).collect();
    assert_abs_diff_eq!(added[..], old.to_f32(0..768)[..], epsilon = 1e-4);
    // The output of this command is a valid input of the other one.
    write_blocks(&folder, &old, &[0, 1, 1, 3], &[1, 0, 1], Some([48, 32]));
    folder.right("cpu", run);

    folder.refuses(
        run,
        &[
            ("--block 16", "only apply to --random"),
            ("--random 48x20x32", "cannot be used with"),
            ("--out no/such/x.npy", "does not exist"),
            ("--out blocks.safetensors", "--out names the file that --pattern reads"),
        ],
    );
    for (row_ptr, col_idx, shape, expected) in [
        (
            &[0, 1, 1, 3][..],
            [1, 0, 1],
            Some([48, 30]),
            "the pattern is 48 x 30, but A·B is 48 x 32",
        ),
        (&[0, 1, 1, 3], [1, 0, 2], None, "invalid BSR matrix"),
        (&[0, 1, 3], [1, 0, 1], None, "invalid BSR matrix"),
    ] {
        write_blocks(&folder, &old, row_ptr, &col_idx, shape);
        folder.refused(run, expected);
    }
    folder.write("blocks.safetensors", &[("row_ptr", &integers(&[1], &[0]))]);
    folder.refused(run, "no tensor `col_idx`");
    std::fs::copy(folder.path("a.npy"), folder.path("b.npy")).unwrap();
    folder.refused(run, "b has 48 rows, but A has 20 columns");
    std::fs::copy(folder.path("a.npy"), folder.path("blocks.safetensors")).unwrap();
    folder.refused(run, "");
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new();
    folder.refuses(
        "bsr-matmul --device cpu",
        &[
            ("--a x --b y --density 0.5", "only apply to --random"),
            ("--random 64x64x64 --bias-axis row", "--bias"),
            ("--random 1000000x9999999x1000000", "host memory"),
            ("--random 99999999x1x99999999 --block 1", "too many blocks"),
            ("--random 64x64x64 --density 1.5", "expected 0 to 1"),
            ("--random 64x64x64 --block 0", "--block is 0"),
            ("--random 64x64x64 --beta 1", "--c"),
            ("--a x.safetensors", "--b"),
        ],
    );
    folder.refuses(
        "sddmm --device cpu",
        &[
            ("--random 64x64x64 --block 0", "--block is 0"),
            ("--random 64x64x64 --density -0.5", "expected 0 to 1"),
            ("--random 64x64x64 --a-layout both", "row, column"),
            ("--random 64x64x64 --alpha nan", "alpha"),
            ("--random 1000000x9999999x1000000", "host memory"),
            ("--random 99999999x1x99999999 --block 1", "too many blocks"),
            ("--block 64", "--random"),
        ],
    );
}
