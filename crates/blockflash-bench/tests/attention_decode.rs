//! `blockflash attention-decode` as a user runs it, on the CPU.

mod common;

use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_bench::random::normal;
use blockflash_sys::DType;
use common::{Folder, json, refused};

#[test]
fn options_are_right_against_the_reference() {
    let options: [&[&str]; 9] = [
        &["--random", "2x1x4x32", "--kv-heads", "2", "--seqlen-kv", "100"],
        &["--random", "3x5x2x16", "--seqlen-kv", "64", "--seqused-kv", "64,7,0", "--mask", "full"],
        &["--random", "2x3x4x16", "--kv-heads", "1", "--seqlen-kv", "96", "--page-size", "16"],
        &["--random", "2x3x4x16", "--seqlen-kv", "96", "--page-size", "32", "--seqused-kv", "33,3"],
        &["--random", "2x4x2x16", "--seqlen-kv", "80", "--window", "20,0", "--dtype", "bf16"],
        &["--random", "1x2x2x16", "--seqlen-kv", "40", "--softcap", "5", "--sink", "random"],
        &["--random", "1x2x2x16", "--scale", "0.5"],
        &["--random", "2x2x2x24", "--seqlen-kv", "40", "--dtype", "f32"],
        &["--random", "2x0x2x16", "--seqlen-kv", "0"],
    ];
    for options in options {
        let options = [&["attention-decode", "--check"], options].concat();
        let report = json(&options);
        assert_eq!(report["check"]["passed"], true, "{options:?}: {report}");
        let o = &report["check"]["o"];
        assert_eq!(o["checked"], o["total"], "{options:?}");
    }
}

/// The files of a cache of 6 pages of 16 keys, of which two sequences have three each.
struct Files {
    folder: Folder,
    arrays: [Array; 3],
}

impl Files {
    fn new(name: &str) -> Self {
        let folder = Folder::new(name);
        let random = |shape: &[usize], lane| normal(DType::F16, shape, 1, lane, |_| ()).unwrap();
        let arrays =
            [random(&[2, 2, 4, 8], 0), random(&[6, 16, 2, 8], 1), random(&[6, 16, 2, 8], 2)];
        for (name, array) in ["q", "k", "v"].into_iter().zip(&arrays) {
            write(folder.path(&format!("{name}.npy")), &[("", array)]).unwrap();
        }
        let files = Self { folder, arrays };
        files.table([5, 0, 2, 4, 3, 1]);
        files
    }

    fn table(&self, pages: [i32; 6]) {
        let table = Array::new(&[2, 3], pages.to_vec()).unwrap();
        write(self.folder.path("table.npy"), &[("", &table)]).unwrap();
    }

    /// Runs on these files with more options.
    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let file = |name: &str| self.folder.path(&format!("{name}.npy"));
        let [q, k, v, table] = ["q", "k", "v", "table"].map(file);
        let own = ["attention-decode", "--q", &q, "--k", &k, "--v", &v, "--block-table", &table];
        let own = [&own, more].concat();
        own.into_iter().map(str::to_owned).collect()
    }
}

fn texts(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn pages_in_files_are_what_the_table_says() {
    let files = Files::new("pages");
    let [o, lse] = ["o.safetensors", "contiguous.npy"].map(|name| files.folder.path(name));
    let paged = files.arguments(&["--seqused-kv", "40,17", "--check", "--out", &o, "--lse", &o]);
    let report = json(&texts(&paged));
    assert_eq!(report["check"]["passed"], true, "{report}");
    assert_eq!(report["written"].as_array().unwrap().len(), 1);
    assert_eq!(report["tensors"]["k"]["shape"], serde_json::json!([6, 16, 2, 8]));
    // Two queries of each sequence see one key less and all keys.
    assert_eq!(report["flops"], 4.0 * (39.0 + 40.0 + 16.0 + 17.0) * 4.0 * 8.0);

    // The same keys in their order, without a table.
    let in_order = |array: &Array| {
        let pages =
            [5, 0, 2, 4, 3, 1].map(|page: usize| array.to_f32(page * 256..(page + 1) * 256));
        Array::new(&[2, 48, 2, 8], pages.concat()).unwrap()
    };
    let input = files.folder.path("input.safetensors");
    let [k, v] = [in_order(&files.arrays[1]), in_order(&files.arrays[2])];
    write(&input, &[("q", &files.arrays[0]), ("k", &k), ("v", &v)]).unwrap();
    let lengths = files.folder.path("lengths.safetensors");
    write(&lengths, &[("seqused_kv", &Array::from(vec![40, 17]))]).unwrap();
    json(&[
        "attention-decode",
        "--input",
        &input,
        "--seqused-kv",
        &lengths,
        "--dtype",
        "f16",
        "--out",
        &lse,
    ]);
    let read = |path: &str, name| TensorFile::open(path).unwrap().load(name, DType::F16).unwrap();
    assert_eq!(read(&o, "o"), read(&lse, ""));
    assert_eq!(read(&o, "lse").shape(), [2, 4, 2]);
}

#[test]
fn mistakes_are_named() {
    let files = Files::new("mistakes");
    let of_files = |more: &[&str]| refused(&texts(&files.arguments(more)));
    assert!(of_files(&["--seqused-kv", "40"]).contains("expected [2]"));
    assert!(of_files(&["--seqused-kv", "40,49"]).contains("sequence 1 has 49 keys"));
    assert!(of_files(&["--seqused-kv=-1,4"]).contains("0 to 48"));
    assert!(of_files(&["--kv-heads", "2"]).contains("only apply to --random"));
    files.table([5, 0, 2, 4, 3, 6]);
    assert!(of_files(&[]).contains("page 2 of sequence 1 is 6, but there are 6"));
    // A page that no key lies in does not count.
    json(&texts(&files.arguments(&["--seqused-kv", "48,32"])));
    let random = |more: &[&str]| refused(&[&["attention-decode"], more].concat());
    assert!(random(&[]).contains("nothing to compute"));
    assert!(random(&["--random", "1x1x4x8", "--kv-heads", "3"]).contains("4"));
    assert!(random(&["--random", "1x1x4x8", "--page-size", "48"]).contains("pages of 48"));
    assert!(random(&["--random", "1x1x4x8", "--page-size", "0"]).contains("pages of 0"));
}
