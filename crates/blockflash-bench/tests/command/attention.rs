//! `attention` and `attention-decode`.

use crate::harness::{Folder, booleans, has_gpu, integers, random};
use blockflash_bench::io::Array;
use blockflash_ops::DType;
use serde_json::json;

/// Combinations that together use every option.
const OPTIONS: [&str; 20] = [
    "2x33x4x40",
    "1x33x4x40 --kv-heads 2 --mask causal --seqlen-kv 50 --dtype bf16",
    "1x50x2x16 --mask causal-top-left --seqlen-kv 20",
    // Query rows without visible keys.
    "1x50x2x16 --mask causal --seqlen-kv 20",
    "1x40x2x16 --window 7,3",
    "1x40x2x16 --window -,3 --scale 0.3",
    "1x40x2x16 --window 5,inf --mask causal --softcap 2.5",
    "1x0x2x16",
    "2x200x4x16 --sink random",
    "1x50x2x16 --mask causal --seqlen-kv 20 --sink random",
    "2x200x4x16 --block-mask causal+window:1,0+sink:1 --block 64",
    "1x300x4x16 --kv-heads 2 --seqlen-kv 500 --block-mask window:1",
    "1x300x4x8 --block-mask random:0.3 --block 64x128 --mask-heads 4",
    "2x300x4x8 --kv-heads 2 --block-mask uniform:0.5 --mask-heads 2",
    // Query rows without visible keys, with a window inside the blocks.
    "1x300x2x8 --block-mask full_rows:0.3 --block 64 --window 70,3",
    "1x300x4x16 --cu-seqlens 0,100,100,170,300 --mask causal",
    "1x30x2x16 --seqlen-kv 60 --cu-seqlens 0,10,30 --cu-seqlens-kv 0,50,60 --mask causal \
     --sink random --dtype bf16",
    "1x30x2x16 --seqlen-kv 60 --cu-seqlens 0,10,30 --cu-seqlens-kv 0,50,60 \
     --mask causal-top-left --window 5,0",
    "1x400x4x8 --cu-seqlens 0,130,400 --block-mask causal+window:0+sink:1 --block 64 \
     --sink random --softcap 5",
    "1x400x4x8 --cu-seqlens 0,130,400 --block-mask random:0.4 --block 64 --mask-heads 4",
];

/// What only the CPU computes.
const OPTIONS_OF_CPU: [&str; 8] = [
    "2x70x4x24 --kv-heads 2 --mask causal --dtype f32",
    "2x70x4x32 --kv-heads 2 --mask causal --window 40,- --dtype e4m3",
    "1x150x2x16 --block-mask causal+window:1 --block 64 --sink random --dtype e4m3",
    "1x50x2x59 --softcap 5 --dtype f32",
    "2x50x4x16 --kv-heads 2 --seqlen-kv 70 --bias random --alibi --mask causal --sink random",
    "2x40x3x16 --bias random --softcap 3 --window 9,- --dtype bf16",
    "1x150x2x8 --bias random --block-mask causal+window:1 --block 64 --dtype f32",
    "1x400x4x8 --cu-seqlens 0,130,400 --alibi --mask causal",
];

#[test]
fn options_are_right_on_the_cpu() {
    let folder = Folder::new();
    for options in OPTIONS.iter().chain(&OPTIONS_OF_CPU) {
        folder.right("cpu", &format!("attention --random {options}"));
    }
    let report = folder.json("attention --random 2x8x4x16 --mask causal");
    assert_eq!(report["flops"], 4.0 * 2.0 * 4.0 * 16.0 * 36.0);
    assert_eq!(report["tensors"]["q"], json!({ "shape": [2, 8, 4, 16], "dtype": "f16" }));
    assert_eq!((&report["device"], &report["kernel"]), (&json!("cpu"), &json!(null)));
    assert!(report["time"]["first_us"].as_f64().unwrap() > 0.0);
    assert_eq!(report["time"]["repeats"], 0);
}

#[test]
fn options_are_right_on_a_gpu() {
    if has_gpu("options_are_right_on_a_gpu") {
        let folder = Folder::new();
        for options in OPTIONS {
            folder.right("cuda", &format!("attention --random {options}"));
        }
        folder.refused(&format!("attention --device cuda --random {}", OPTIONS_OF_CPU[0]), "f32");
    }
}

/// The counted pairs are the visible pairs: the word `causal` also makes the mask causal inside the
/// blocks.
#[test]
fn the_flops_are_those_of_the_visited_pairs() {
    let folder = Folder::new();
    for (options, pairs) in [
        ("2x256x4x16 --block 64 --block-mask full", 2 * 256 * 256),
        ("2x256x4x16 --block 64 --block-mask window:0", 2 * 4 * 64 * 64),
        ("2x256x4x16 --block 64 --block-mask causal+window:0", 4 * 64 * 65),
        ("2x256x4x16 --block 64 --block-mask causal+window:0 --mask full", 2 * 4 * 64 * 64),
        ("1x256x4x16 --cu-seqlens 0,56,256", 56 * 56 + 200 * 200),
        ("1x256x4x16 --cu-seqlens 0,56,256 --block-mask full", 56 * 56 + 200 * 200),
    ] {
        let report = folder.json(&format!("attention --random {options}"));
        assert_eq!(report["flops"], (4 * pairs * 4 * 16) as f64, "{options}");
    }
    let report = folder.json("attention --random 1x256x4x16 --block-mask window:0 --block 64");
    let words = "4 of 16 blocks of 64 x 64, density 0.2500, one list for all heads";
    assert_eq!(report["options"]["block mask"], words);
}

/// f32 `.npy` files and an f16 `.safetensors` file of the same values give the same result.
#[test]
fn files_round_trip() {
    let folder = Folder::new();
    let [q, k, v] = [0, 1, 2].map(|lane| random(DType::F16, &[1, 12, 2, 16], lane));
    folder.write("qkv.safetensors", &[("q", &q), ("other", &q), ("k", &k), ("v", &v)]);
    for (name, half) in [("q.npy", &q), ("k.npy", &k), ("v.npy", &v)] {
        let single = Array::new(half.shape(), half.to_f32(0..half.len())).unwrap();
        folder.write(name, &[("", &single)]);
    }
    let files = "attention --q q.npy --k k.npy --v v.npy";
    folder.right(
        "cpu",
        "attention --input qkv.safetensors --out both.safetensors --lse both.safetensors",
    );
    let report = folder.json(&format!("{files} --out o.npy --lse lse.npy"));
    assert_eq!(report["tensors"]["q"]["dtype"], "f16");
    let lse = folder.load("lse.npy", "", DType::F32);
    let o = folder.load("o.npy", "", DType::F16);
    assert_eq!(folder.load("both.safetensors", "o", DType::F16), o);
    assert_eq!(folder.load("both.safetensors", "lse", DType::F32), lse);
    assert_eq!(lse.shape(), [1, 2, 12]);

    // .npy has no bf16: f32 holds it exactly.
    folder.json(&format!("{files} --dtype bf16 --out exact.safetensors"));
    let report = folder.json(&format!("{files} --dtype bf16 --out bf16.npy"));
    assert!(report["written"][0].as_str().unwrap().contains("f32, because .npy has no bf16"));
    let exact = folder.load("exact.safetensors", "o", DType::BF16);
    assert_eq!(exact, folder.load("bf16.npy", "", DType::BF16));
}

/// The same mask as words, as booleans and as index arrays; with a list for each head.
#[test]
fn masks_in_files() {
    let folder = Folder::new();
    let sizes = "attention --random 1x200x4x16 --kv-heads 2 --block 64x128";
    let run = |mask: &str| {
        folder.right("cpu", &format!("{sizes} --block-mask {mask} --out o.npy"));
        folder.load("o.npy", "", DType::F16)
    };
    // Four rows of blocks and two columns; the first column only.
    let of_words = run("sink:1");
    folder.put("mask.safetensors", booleans(&[4, 2], &[true, false].repeat(4)));
    assert_eq!(run("mask.safetensors"), of_words);
    let columns = integers(&[4], &[0; 4]);
    let offsets = integers(&[1, 5], &[0, 1, 2, 3, 4]);
    folder.write("lists.safetensors", &[("row_ptr", &offsets), ("col_idx", &columns)]);
    assert_eq!(run("lists.safetensors"), of_words);
    folder.write("row_ptr.npy", &[("", &integers(&[5], &[0, 1, 2, 3, 4]))]);
    folder.write("col_idx.npy", &[("", &columns)]);
    assert_eq!(run("row_ptr.npy --mask-col-idx col_idx.npy"), of_words);

    // A list per head of q, and of k and v: the last head sees the other column.
    let rows = |array: &Array, head: usize| -> Vec<f32> {
        let row = |row: usize| array.to_f32((row * 4 + head) * 16..(row * 4 + head + 1) * 16);
        (0..200).flat_map(row).collect()
    };
    for (heads, others) in [(4, 3), (2, 2)] {
        let mut flags = [true, false].repeat(4 * heads);
        let last = flags.len() - 8;
        flags[last..].copy_from_slice(&[false, true].repeat(4));
        folder.put("mask.safetensors", booleans(&[heads, 4, 2], &flags));
        let result = run("mask.safetensors");
        for head in 0..4 {
            let equal = rows(&result, head) == rows(&of_words, head);
            assert_eq!(equal, head < others, "{heads} {head}");
        }
    }
    folder.put("mask.safetensors", booleans(&[3, 4, 2], &[true; 24]));
    let words = format!("{sizes} --device cpu --block-mask mask.safetensors");
    folder.refused(&words, "block_mask has shape [1, 3, 200, 200]");
    folder.put("mask.safetensors", booleans(&[2, 1, 4, 2], &[true; 16]));
    let batch = "attention --random 2x200x4x16 --block 64x128 --block-mask mask.safetensors";
    folder.right("cpu", batch);
}

/// Pairs of tokens, for all heads and for each, with blocks that are full, partial and hidden.
#[test]
fn masks_of_tokens() {
    let folder = Folder::new();
    for heads in [1, 2] {
        let visible = |at: usize| {
            let (head, query, key) = (at / (150 * 200), at / 200 % 150, at % 200);
            key < 70 || query >= 64 && key >= 128 && !(query * key + head).is_multiple_of(3)
        };
        let pairs: Vec<bool> = (0..heads * 150 * 200).map(visible).collect();
        folder.put("mask.safetensors", booleans(&[heads, 150, 200], &pairs));
        let count = pairs.iter().filter(|&&visible| visible).count() * 4 / heads;
        for options in ["", " --mask causal --sink random"] {
            let words = format!(
                "attention --random 2x150x4x16 --kv-heads 2 --seqlen-kv 200 --block 64x128 \
                 --mask-file mask.safetensors{options}"
            );
            folder.right("cpu", &words);
            if options.is_empty() {
                let report = folder.json(&words);
                assert_eq!(report["flops"], (2 * 4 * count * 16) as f64);
            }
        }
    }
}

/// Everything from one file is the same as from a file each; sequences are independent of each
/// other.
#[test]
fn packed_sequences_and_a_sink_from_files() {
    let folder = Folder::new();
    let [q, k, v] = [(30, 4), (40, 2), (40, 2)]
        .map(|(rows, heads)| random(DType::BF16, &[rows, heads, 8], heads as u64));
    let sink = Array::from(vec![0.5f32, -1.0, 0.0, 2.0]);
    let (of_q, of_kv) = (integers(&[3], &[0, 10, 30]), integers(&[3], &[0, 25, 40]));
    let [q, k, v, sink] = [("q", &q), ("k", &k), ("v", &v), ("sink", &sink)];
    let offsets = [("cu_seqlens", &of_q), ("cu_seqlens_kv", &of_kv)];
    folder.write("in.safetensors", &[&[q, k, v, sink][..], &offsets].concat());
    folder.write("of_q.npy", &[("", &of_q)]);
    folder.write("sink.npy", &[("", sink.1)]);
    let run = "attention --input in.safetensors --mask causal";
    let report = folder.right(
        "cpu",
        &format!(
            "{run} --sink in.safetensors --cu-seqlens in.safetensors \
             --cu-seqlens-kv in.safetensors --out one.safetensors --lse one.safetensors"
        ),
    );
    assert_eq!(report["tensors"]["q"], json!({ "shape": [30, 4, 8], "dtype": "bf16" }));
    let packed = folder.load("one.safetensors", "o", DType::BF16);
    let lse = folder.load("one.safetensors", "lse", DType::F32);
    assert_eq!((packed.shape(), lse.shape()), (q.1.shape(), &[4, 30][..]));
    folder.json(&format!(
        "{run} --sink sink.npy --cu-seqlens of_q.npy --cu-seqlens-kv 0,25,40 --out two.safetensors"
    ));
    assert_eq!(folder.load("two.safetensors", "o", DType::BF16), packed);

    // The second sequence alone, as a dense batch.
    let rows = |array: &Array, rows: std::ops::Range<usize>| {
        let width = array.len() / array.shape()[0];
        let shape = [&[1, rows.len()], &array.shape()[1..]].concat();
        Array::new(&shape, array.to_f32(rows.start * width..rows.end * width)).unwrap()
    };
    let [q, k, v] = [rows(q.1, 10..30), rows(k.1, 25..40), rows(v.1, 25..40)];
    folder.write("alone.safetensors", &[("q", &q), ("k", &k), ("v", &v), sink]);
    folder.json(
        "attention --input alone.safetensors --sink alone.safetensors --mask causal --dtype bf16 \
         --out o.npy",
    );
    let alone = folder.load("o.npy", "", DType::F32);
    assert_eq!(alone.to_f32(0..640), packed.to_f32(320..960));
}

/// A bias that has one row for all pairs of a head is the same as all of it, and slopes of ALiBi
/// are a bias, too.
#[test]
fn a_bias_and_slopes_from_files() {
    let folder = Folder::new();
    let row: Vec<f32> = (0..20).map(|key| (key as f32 * 0.7).sin()).collect();
    let slopes = [0.5f32, 0.25];
    let away =
        |head: usize, query: usize, key: usize| -slopes[head] * (query as f32 - key as f32).abs();
    let all = |of: &dyn Fn(usize, usize, usize) -> f32| -> Vec<f32> {
        let pairs = (0..2).flat_map(|head| (0..400).map(move |at| (head, at / 20, at % 20)));
        pairs.map(|(head, query, key)| of(head, query, key)).collect()
    };
    let array = |shape: &[usize], values: Vec<f32>| Array::new(shape, values).unwrap();
    folder.write("row.npy", &[("", &array(&[1, 1, 1, 20], row.clone()))]);
    let rows = array(&[1, 2, 20, 20], all(&|_, _, key| row[key]));
    let of_slopes = array(&[1, 2, 20, 20], all(&away));
    folder.write("all.safetensors", &[("bias", &rows)]);
    folder.write("slopes.safetensors", &[("alibi", &Array::from(slopes.to_vec()))]);
    folder.write("away.npy", &[("", &of_slopes)]);
    let run = |options: &str, out: &str| {
        let words = "attention --random 2x20x2x16 --dtype f32 --mask causal";
        folder.right("cpu", &format!("{words} {options} --out {out}"));
        folder.load(out, "", DType::F32)
    };
    assert_eq!(run("--bias row.npy", "a.npy"), run("--bias all.safetensors", "b.npy"));
    let o = run("--alibi=slopes.safetensors", "c.npy");
    assert_eq!(o, run("--bias away.npy", "d.npy"));
    assert_ne!(o, run("", "e.npy"));
}

#[test]
fn the_same_seed_gives_the_same_result() {
    let folder = Folder::new();
    let run = |seed: u64, threads: &str| {
        let words = format!("attention --random 1x300x2x64 --device cpu --seed {seed} --out o.npy");
        assert!(
            folder
                .command(&words)
                .env("RAYON_NUM_THREADS", threads)
                .output()
                .unwrap()
                .status
                .success()
        );
        std::fs::read(folder.path("o.npy")).unwrap()
    };
    let first = run(5, "1");
    assert!(first == run(5, "3") && first != run(6, "1"));
}

#[test]
fn a_table_for_people() {
    let table = Folder::new().ok("attention --random 1x8x2x16 --device cpu --check --repeat 1");
    for part in ["[1, 8, 2, 16] f16", "check o", "ok: error", "FLOP/s (", "one run after the first"]
    {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new();
    folder.put("mask.safetensors", booleans(&[2, 2], &[true; 4]));
    folder.write("sink.npy", &[("", &random(DType::F32, &[3], 0))]);
    folder.write("dense.npy", &[("", &random(DType::F16, &[1, 30, 2, 16], 0))]);
    folder.refuses(
        "attention --device cpu",
        &[
            ("", "--random BxSxHxD"),
            ("--random 1x2x3", "expected 4 sizes"),
            ("--random 1x2x3x4 --input x", "cannot be used with"),
            ("--q x.npy", "--k"),
            ("--input x --kv-heads 3", "only apply to --random"),
            ("--input x --q x --k x --v x", "cannot be used with"),
            ("--random 2x30x2x16 --cu-seqlens 0,60", "--random 1xROWSxHxD"),
            ("--random 1x8x3x16 --kv-heads 2", "multiple"),
            ("--random 1x8x3x16 --kv-heads 0", "multiple"),
            ("--random 1000000x1000000x1000x128", "of host memory"),
            ("--random 9999999999x9999999999x9999999999x1", "host memory"),
            (
                "--q dense.npy --k dense.npy --v dense.npy --cu-seqlens 0,30",
                "expected [rows, heads, head_dim]",
            ),
            ("--input dense.npy", "holds one array without a name, not the tensors q, k, v"),
            ("--input dense.npy", "give .npy files by --q, --k and --v"),
        ],
    );
    folder.refuses(
        "attention --random 1x8x2x16",
        &[("--device gpu", "cpu, cuda or cuda:N"), ("--device cuda:99", "error: ")],
    );
    // Said by name, one file may be all three.
    folder.json("attention --q dense.npy --k dense.npy --v dense.npy");
    folder.refuses(
        "attention --device cpu --random 1x30x2x16",
        &[
            ("--v x", "cannot be used with"),
            ("--mask diagonal", "possible values: full, causal"),
            ("--window 3", "two numbers of keys"),
            ("--window 3,4 --mask causal", "must be 0 or -"),
            ("--scale -1", "scale"),
            ("--softcap nan", "softcap"),
            ("--out o.txt", ".npy or .safetensors"),
            ("--out /no/such/o.npy", "does not exist"),
            ("--out o.npy --lse o.npy", "same .npy file"),
            ("--sead 1", "--seed"),
            ("--block-mask windw:3", "\"windw:3\" is not a part of a pattern"),
            ("--block-mask windw:3", "or the name of a file"),
            ("--block-mask no/such.npy", "No such file"),
            ("--block-mask full --block 60", "multiple of 64"),
            ("--block-mask full --mask-heads 3", "block_mask has shape [1, 3, 30, 30]"),
            ("--block-mask full --mask-col-idx mask.safetensors", "needs a file in --block-mask"),
            ("--block-mask mask.safetensors", "have 1 x 1 of 128 x 128"),
            (
                "--block-mask mask.safetensors --cu-seqlens 0,10,30",
                "with --cu-seqlens, describe it by words",
            ),
            ("--block 64", "--block-mask"),
            ("--sink sink.npy", "sink has shape [3], expected [2]"),
            ("--bias sink.npy", "bias has shape [3], expected [1, 2 or 1, 30 or 1, 30 or 1]"),
            ("--bias random --cu-seqlens 0,10,30", "--bias is not for packed sequences"),
            ("--alibi=sink.npy", "alibi has shape [3], expected [2]"),
            ("--cu-seqlens 0,ten", "integers with commas"),
            ("--cu-seqlens 0,99999999999", "integers with commas"),
            ("--cu-seqlens 0,10,31", "the offsets of q end at 31, but it has 30 rows"),
            ("--cu-seqlens 0,20,10,30", "descend from 20 to 10"),
            ("--cu-seqlens 1,30", "do not begin with 0"),
            ("--cu-seqlens-kv 0,30", "--cu-seqlens"),
            ("--cu-seqlens 0,10,30 --cu-seqlens-kv 0,10", "the offsets of k end at 10"),
            ("--cu-seqlens 0,10,30 --cu-seqlens-kv 0,30", "cu_seqlens.kv"),
        ],
    );
    folder.refused("frobnicate", "unrecognized subcommand");
}
