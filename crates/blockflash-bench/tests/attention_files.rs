//! `blockflash attention` with masks, sinks and packed sequences from files, and its error cases.

mod common;

use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_bench::random::normal;
use blockflash_sys::DType;
use common::{Folder, json, refused};

fn random(dtype: DType, shape: &[usize], lane: u64) -> Array {
    normal(dtype, shape, 1, lane, |_| ()).unwrap()
}

fn integers(shape: &[usize], values: &[i32]) -> Array {
    Array::new(shape, values.to_vec()).unwrap()
}

fn load(path: &str, name: &str, dtype: DType) -> Array {
    TensorFile::open(path).unwrap().load(name, dtype).unwrap()
}

/// A `.safetensors` file with one boolean tensor `mask`.
fn booleans(path: &str, shape: &[usize], values: &[bool]) {
    let header = format!(
        r#"{{"mask":{{"dtype":"BOOL","shape":{shape:?},"data_offsets":[0,{}]}}}}"#,
        values.len()
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().map(|&value| u8::from(value)));
    std::fs::write(path, bytes).unwrap();
}

/// The same mask as words, as booleans and as index arrays; with a list for each head.
#[test]
fn masks_in_files() {
    let folder = Folder::new("masks");
    let [words, flags, indices] =
        ["words.npy", "flags.npy", "indices.npy"].map(|name| folder.path(name));
    let run = |mask: &str, out: &str| {
        let sizes = ["--random", "1x200x4x16", "--kv-heads", "2", "--block", "64x128", "--check"];
        let report =
            json(&[&["attention"], &sizes[..], &["--block-mask", mask, "--out", out]].concat());
        assert_eq!(report["check"]["passed"], true, "{mask}: {report}");
        load(out, "", DType::F16)
    };
    // Four rows of blocks and two columns; the first column only.
    let of_words = run("sink:1", &words);
    let (mask, lists) = (folder.path("mask.safetensors"), folder.path("lists.safetensors"));
    booleans(&mask, &[4, 2], &[true, false].repeat(4));
    assert_eq!(run(&mask, &flags), of_words);
    let (offsets, columns) = (integers(&[1, 5], &[0, 1, 2, 3, 4]), integers(&[4], &[0; 4]));
    write(&lists, &[("row_ptr", &offsets), ("col_idx", &columns)]).unwrap();
    assert_eq!(run(&lists, &indices), of_words);
    let (row_ptr, col_idx) = (folder.path("row_ptr.npy"), folder.path("col_idx.npy"));
    write(&row_ptr, &[("", &integers(&[5], &[0, 1, 2, 3, 4]))]).unwrap();
    write(&col_idx, &[("", &columns)]).unwrap();
    let pair = [
        "--block-mask",
        &row_ptr,
        "--mask-col-idx",
        &col_idx,
        "--block",
        "64x128",
        "--out",
        &indices,
    ];
    json(&[&["attention", "--random", "1x200x4x16", "--kv-heads", "2"], &pair[..]].concat());
    assert_eq!(load(&indices, "", DType::F16), of_words);

    // A list per head of q, of k and v, and per batch entry: the last head sees the other column.
    let per_head = |heads: usize| {
        let mut flags = [true, false].repeat(4 * heads);
        let last = flags.len() - 8;
        flags[last..].copy_from_slice(&[false, true].repeat(4));
        booleans(&mask, &[heads, 4, 2], &flags);
        run(&mask, &flags_of(&folder, heads))
    };
    let rows = |array: &Array, head: usize| -> Vec<f32> {
        (0..200)
            .flat_map(|row| array.to_f32((row * 4 + head) * 16..(row * 4 + head + 1) * 16))
            .collect()
    };
    for (heads, others) in [(4, 3), (2, 2)] {
        let result = per_head(heads);
        for head in 0..4 {
            assert_eq!(
                rows(&result, head) == rows(&of_words, head),
                head < others,
                "{heads} {head}"
            );
        }
    }
    booleans(&mask, &[3, 4, 2], &[true; 24]);
    let sizes = [
        "attention",
        "--random",
        "1x200x4x16",
        "--device",
        "cpu",
        "--block",
        "64x128",
        "--block-mask",
    ];
    assert!(
        refused(&[&sizes[..], &[&mask]].concat()).contains("block_mask has shape [1, 3, 200, 200]")
    );
    booleans(&mask, &[2, 1, 4, 2], &[true; 16]);
    let batch = [
        "attention",
        "--random",
        "2x200x4x16",
        "--check",
        "--block",
        "64x128",
        "--block-mask",
        &mask,
    ];
    assert_eq!(json(&batch)["check"]["passed"], true);
}

fn flags_of(folder: &Folder, heads: usize) -> String {
    folder.path(&format!("flags{heads}.npy"))
}

/// Everything from one file is the same as from a file each; sequences are independent of each
/// other.
#[test]
fn packed_sequences_and_a_sink_from_files() {
    let folder = Folder::new("packed");
    let [q, k, v] = [(30, 4), (40, 2), (40, 2)]
        .map(|(rows, heads)| random(DType::BF16, &[rows, heads, 8], heads as u64));
    let sink = Array::from(vec![0.5f32, -1.0, 0.0, 2.0]);
    let (of_q, of_kv) = (integers(&[3], &[0, 10, 30]), integers(&[3], &[0, 25, 40]));
    let (input, one) = (folder.path("input.safetensors"), folder.path("one.safetensors"));
    let offsets = [("cu_seqlens", &of_q), ("cu_seqlens_kv", &of_kv)];
    write(&input, &[&[("q", &q), ("k", &k), ("v", &v), ("sink", &sink)][..], &offsets].concat())
        .unwrap();
    let run = ["attention", "--input", &input, "--sink", &input, "--mask", "causal"];
    let files = [
        "--cu-seqlens",
        &input,
        "--cu-seqlens-kv",
        &input,
        "--out",
        &one,
        "--lse",
        &one,
        "--check",
    ];
    let report = json(&[&run[..], &files].concat());
    assert_eq!(report["check"]["passed"], true);
    assert_eq!(report["tensors"]["q"], serde_json::json!({ "shape": [30, 4, 8], "dtype": "bf16" }));
    assert_eq!(
        (load(&one, "o", DType::BF16).shape(), load(&one, "lse", DType::F32).shape()),
        (q.shape(), &[4, 30][..])
    );

    let (npy, sink_npy, lists) =
        (folder.path("of_q.npy"), folder.path("sink.npy"), folder.path("lists.safetensors"));
    write(&npy, &[("", &of_q)]).unwrap();
    write(&sink_npy, &[("", &sink)]).unwrap();
    let lists_run =
        ["attention", "--input", &input, "--sink", &sink_npy, "--mask", "causal", "--out", &lists];
    json(&[&lists_run[..], &["--cu-seqlens", &npy, "--cu-seqlens-kv", "0, 25, 40"]].concat());
    assert_eq!(load(&lists, "o", DType::BF16), load(&one, "o", DType::BF16));

    // The second sequence alone, as a dense batch.
    let rows = |array: &Array, rows: std::ops::Range<usize>| {
        let width = array.len() / array.shape()[0];
        let shape = [&[1, rows.len()], &array.shape()[1..]].concat();
        Array::new(&shape, array.to_f32(rows.start * width..rows.end * width)).unwrap()
    };
    let (dense, alone) = (folder.path("dense.safetensors"), folder.path("alone.safetensors"));
    let parts = [rows(&q, 10..30), rows(&k, 25..40), rows(&v, 25..40)];
    write(&dense, &[("q", &parts[0]), ("k", &parts[1]), ("v", &parts[2]), ("sink", &sink)])
        .unwrap();
    let run =
        ["attention", "--input", &dense, "--sink", &dense, "--mask", "causal", "--dtype", "bf16"];
    json(&[&run[..], &["--out", &alone]].concat());
    let packed = load(&one, "o", DType::BF16);
    assert_eq!(load(&alone, "o", DType::F32).to_f32(0..640), packed.to_f32(320..960));
}

#[test]
fn what_is_wrong_is_one_line() {
    let folder = Folder::new("wrong");
    let mask = folder.path("mask.safetensors");
    booleans(&mask, &[2, 2], &[true; 4]);
    let sink = folder.path("sink.npy");
    write(&sink, &[("", &random(DType::F32, &[3], 0))]).unwrap();
    let packed = ["--cu-seqlens", "0,10,30"];
    let cases: [(&[&str], &str); 18] = [
        (&["--block-mask", "windw:3"], "\"windw:3\" is not a part of a pattern"),
        (&["--block-mask", "windw:3"], "or the name of a file"),
        (&["--block-mask", "no/such.npy"], "No such file"),
        (&["--block-mask", "full", "--block", "60"], "multiple of 64"),
        (&["--block-mask", "full", "--mask-heads", "3"], "block_mask has shape [1, 3, 30, 30]"),
        (&["--block-mask", "full", "--mask-col-idx", &mask], "needs a file in --block-mask"),
        (&["--block-mask", &mask], "have 1 x 1 of 128 x 128"),
        (
            &["--block-mask", &mask, "--cu-seqlens", "0,10,30"],
            "with --cu-seqlens, describe it by words",
        ),
        (&["--block", "64"], "--block-mask"),
        (&["--sink", &sink], "sink has shape [3], expected [2]"),
        (&["--cu-seqlens", "0,ten"], "integers with commas"),
        (&["--cu-seqlens", "0,99999999999"], "integers with commas"),
        (&["--cu-seqlens", "0,10,31"], "the offsets of q end at 31, but it has 30 rows"),
        (&["--cu-seqlens", "0,20,10,30"], "descend from 20 to 10"),
        (&["--cu-seqlens", "1,30"], "do not begin with 0"),
        (&["--cu-seqlens-kv", "0,30"], "--cu-seqlens"),
        (&[&packed[..], &["--cu-seqlens-kv", "0,10"]].concat(), "the offsets of k end at 10"),
        (&[&packed[..], &["--cu-seqlens-kv", "0,30"]].concat(), "cu_seqlens.kv"),
    ];
    for (options, expected) in cases {
        let text = refused(
            &[&["attention", "--random", "1x30x2x16", "--device", "cpu"], options].concat(),
        );
        assert!(text.contains(expected), "{options:?}: {text}");
    }
    let text =
        refused(&["attention", "--random", "2x30x2x16", "--device", "cpu", "--cu-seqlens", "0,60"]);
    assert!(text.contains("--random 1xROWSxHxD"), "{text}");
    let dense = folder.path("q.npy");
    write(&dense, &[("", &random(DType::F16, &[1, 30, 2, 16], 0))]).unwrap();
    let text = refused(&[
        "attention",
        "--q",
        &dense,
        "--k",
        &dense,
        "--v",
        &dense,
        "--cu-seqlens",
        "0,30",
    ]);
    assert!(text.contains("expected [rows, heads, head_dim]"), "{text}");
}

/// The one array of a `.npy` file is not q, k and v at once.
#[test]
fn input_is_no_npy_file() {
    let folder = Folder::new("input");
    let path = folder.path("x.npy");
    write(&path, &[("", &random(DType::F16, &[1, 8, 2, 16], 0))]).unwrap();
    let text = refused(&["attention", "--input", &path]);
    assert!(text.contains("holds one array without a name, not the tensors q, k, v"), "{text}");
    assert!(text.contains("give .npy files by --q, --k and --v"), "{text}");
    // Said by name, one file may be all three.
    json(&["attention", "--q", &path, "--k", &path, "--v", &path]);
    let text = refused(&["bsr-matmul", "--a", &path, "--b", &path]);
    assert!(text.contains("not the tensors row_ptr, col_idx, values"), "{text}");
}
