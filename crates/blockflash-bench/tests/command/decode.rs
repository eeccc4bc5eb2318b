//! `attention-decode`.

use crate::harness::{Folder, integers, random};
use blockflash_bench::io::Array;
use blockflash_ops::{AttentionDecode, DType, Device, KvCache, Mask, PageLists};
use serde_json::json;

#[test]
fn options_are_right_against_the_reference() {
    let folder = Folder::new();
    for options in [
        "2x1x4x32 --kv-heads 2 --seqlen-kv 100",
        "3x5x2x16 --seqlen-kv 64 --seqused-kv 64,7,0 --mask full",
        "2x3x4x16 --kv-heads 1 --seqlen-kv 96 --page-size 16",
        "2x3x4x16 --seqlen-kv 96 --page-size 32 --seqused-kv 33,3",
        "2x4x2x16 --seqlen-kv 80 --window 20,0 --dtype bf16",
        "1x2x2x16 --seqlen-kv 40 --softcap 5 --sink random",
        "1x2x2x16 --scale 0.5",
        "2x2x2x24 --seqlen-kv 40 --dtype f32",
        "2x0x2x16 --seqlen-kv 0",
        "2x3x4x16 --kv-heads 2 --seqlen-kv 64 --seqused-kv 64,9 --alibi",
        "2x3x4x16 --seqlen-kv 96 --page-size 32 --seqused-kv 33,3 --bias random --dtype f32",
        "2x3x4x32 --kv-heads 2 --seqlen-kv 96 --page-size 16 --kv-dtype e4m3 --seqused-kv 33,96",
        "2x1x4x16 --seqlen-kv 96 --kv-dtype e5m2 --dtype bf16 --k-scale 0.5",
        "2x2x4x16 --kv-heads 1 --seqlen-kv 64 --kv-dtype i8 --window 20,0",
    ] {
        folder.right("cpu", &format!("attention-decode --random {options}"));
    }
}

#[test]
fn pages_are_selected_and_checked() {
    let folder = Folder::new();
    for options in [
        "2x1x4x32 --kv-heads 2 --seqlen-kv 320 --page-size 16 --select-pages 4",
        "3x3x4x16 --seqlen-kv 160 --page-size 16 --seqused-kv 160,37,0 --select-pages 3",
        "2x2x4x16 --kv-heads 1 --seqlen-kv 256 --page-size 32 --select-pages 5 --summaries mean",
        "2x4x2x16 --seqlen-kv 256 --page-size 16 --select-pages 6 --window 70,0 --dtype bf16",
        "1x2x2x24 --seqlen-kv 128 --page-size 16 --select-pages 2 --dtype f32 --softcap 5",
        "1x2x2x16 --seqlen-kv 64 --page-size 16 --select-pages 9 --summaries bounds --mask full",
        "2x0x2x16 --seqlen-kv 64 --page-size 16 --select-pages 2",
    ] {
        let report = folder.right("cpu", &format!("attention-decode --random {options}"));
        let check = report["check"].as_object().unwrap();
        assert!(check.contains_key("pages") && check.contains_key("summaries"), "{report}");
    }
    // One query sees the keys of 4 of 20 pages in each of 4 heads.
    let one = "attention-decode --random 1x1x4x32 --kv-heads 2 --seqlen-kv 320 --page-size 16";
    assert_eq!(
        folder.right("cpu", &format!("{one} --select-pages 4"))["flops"],
        4.0 * 64.0 * 128.0
    );
}

#[test]
fn listed_blocks_are_visited_and_checked() {
    let folder = Folder::new();
    for options in [
        "2x3x4x32 --kv-heads 2 --seqlen-kv 320 --page-size 32 --granularity 16 --entries 5",
        "2x2x4x16 --kv-heads 2 --seqlen-kv 200 --seqused-kv 200,90 --granularity 4 --entries 40",
        "1x70x4x16 --kv-heads 1 --seqlen-kv 300 --list-groups 4 --window 150,0 --dtype bf16",
        "3x2x2x24 --seqlen-kv 256 --list-groups 1 --softcap 5 --sink random --dtype f32",
        "2x1x4x24 --kv-heads 1 --v-head-dim 16 --latent --seqlen-kv 128 --granularity 1",
        "2x2x4x32 --kv-heads 2 --seqlen-kv 96 --page-size 16 --kv-dtype e4m3 --granularity 16",
    ] {
        let o = "--lists random --lse o.safetensors --out o.safetensors";
        folder.right("cpu", &format!("attention-decode --random {options} {o}"));
    }
    // Two queries at keys 46 and 47 of blocks of 16: 16 + 15 and 16 + 16 keys.
    let [q, k, v] = [&[1, 2, 4, 8], &[1, 48, 2, 8], &[1, 48, 2, 8]];
    let arrays = [q, k, v].map(|shape| random(DType::F16, shape, shape[1] as u64));
    for (name, array) in ["q.npy", "k.npy", "v.npy"].into_iter().zip(&arrays) {
        folder.write(name, &[("", array)]);
    }
    folder.write("lists.npy", &[("", &integers(&[1, 2, 3], &[2, i32::MIN, 0, 1, 2, 9]))]);
    let files = "attention-decode --q q.npy --k k.npy --v v.npy --granularity 16";
    let report = folder.right("cpu", &format!("{files} --lists lists.npy"));
    assert_eq!(report["flops"], 4.0 * (31.0 + 32.0) * 4.0 * 8.0);
    assert_eq!(report["tensors"]["lists"]["shape"], json!([1, 2, 3]));
    folder.refuses(
        files,
        &[
            ("--lists lists.npy --entries 3", "--lists random"),
            ("--lists lists.npy --select-pages 3", "--select-pages"),
            ("--lists lists.npy --bias random", "--lists does not take --bias"),
            ("--lists lists.npy --pages p.npy", "--lists"),
            ("--lists lists.npy --summaries mean", "--lists"),
            ("--lists random --list-groups 3", "groups is 3"),
            ("--lists lists.npy --out lists.npy", "--lists"),
            ("--entries 3", "--lists"),
        ],
    );
}

/// What is selected is what attention visits: the same lists by the library.
#[test]
fn selected_pages_are_written() {
    let folder = Folder::new();
    let [q, k, v] = files(&folder);
    let outputs = "--out o.safetensors --pages o.safetensors";
    folder.right("cpu", &format!("{FILES} --seqused-kv 40,17 --select-pages 2 {outputs}"));
    let lists = folder.load("o.safetensors", "pages", DType::I32);
    // The first and the last page: of three, and of two.
    assert_eq!(lists.shape(), [2, 2, 2]);
    assert_eq!(lists.as_i32().unwrap(), [0, 2, 0, 2, 0, 1, 0, 1]);
    let stream = Device::cpu().stream().unwrap();
    let [table, lengths, lists, counts] = [
        integers(&[2, 3], &[5, 0, 2, 4, 3, 1]),
        integers(&[2], &[40, 17]),
        lists,
        integers(&[2], &[2, 2]),
    ]
    .map(|array| array.upload(&stream).unwrap());
    let [q, k, v] = [q, k, v].map(|array| array.upload(&stream).unwrap());
    let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
    let cache = KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCache::new(k.view(), v.view())
    };
    let decode =
        AttentionDecode { scores: Mask::causal().into(), pages, ..AttentionDecode::new(q.view()) };
    let o = decode.forward(cache, &stream).unwrap().o;
    let o = Array::download(&o, &stream).unwrap();
    assert_eq!(o, folder.load("o.safetensors", "o", DType::F16));
}

const FILES: &str = "attention-decode --q q.npy --k k.npy --v v.npy --block-table table.npy";

/// The files of a cache of 6 pages of 16 keys, of which two sequences have three each.
fn files(folder: &Folder) -> [Array; 3] {
    let shapes: [&[usize]; 3] = [&[2, 2, 4, 8], &[6, 16, 2, 8], &[6, 16, 2, 8]];
    let arrays = [0, 1, 2].map(|lane| random(DType::F16, shapes[lane], lane as u64));
    for (name, array) in ["q.npy", "k.npy", "v.npy"].into_iter().zip(&arrays) {
        folder.write(name, &[("", array)]);
    }
    folder.write("table.npy", &[("", &integers(&[2, 3], &[5, 0, 2, 4, 3, 1]))]);
    arrays
}

#[test]
fn pages_in_files_are_what_the_table_says() {
    let folder = Folder::new();
    let [q, k, v] = files(&folder);
    let outputs = "--out o.safetensors --lse o.safetensors";
    let report = folder.right("cpu", &format!("{FILES} --seqused-kv 40,17 {outputs}"));
    assert_eq!(report["written"].as_array().unwrap().len(), 1);
    assert_eq!(report["tensors"]["k"]["shape"], json!([6, 16, 2, 8]));
    // Two queries of each sequence see one key less and all keys.
    assert_eq!(report["flops"], 4.0 * (39.0 + 40.0 + 16.0 + 17.0) * 4.0 * 8.0);

    // The same keys in their order, without a table.
    let in_order = |array: &Array| {
        let pages =
            [5, 0, 2, 4, 3, 1].map(|page: usize| array.to_f32(page * 256..(page + 1) * 256));
        Array::new(&[2, 48, 2, 8], pages.concat()).unwrap()
    };
    let [k, v] = [in_order(&k), in_order(&v)];
    folder.write("in.safetensors", &[("q", &q), ("k", &k), ("v", &v)]);
    folder.write("lengths.safetensors", &[("seqused_kv", &Array::from(vec![40, 17]))]);
    folder.json(
        "attention-decode --input in.safetensors --seqused-kv lengths.safetensors --dtype f16 \
         --out contiguous.npy",
    );
    let o = folder.load("o.safetensors", "o", DType::F16);
    assert_eq!(o, folder.load("contiguous.npy", "", DType::F16));
    assert_eq!(folder.load("o.safetensors", "lse", DType::F32).shape(), [2, 4, 2]);
}

#[test]
fn mistakes_are_named() {
    let folder = Folder::new();
    files(&folder);
    folder.refuses(
        FILES,
        &[
            ("--seqused-kv 40", "expected [2]"),
            ("--seqused-kv 40,49", "sequence 1 has 49 keys"),
            ("--seqused-kv=-1,4", "0 to 48"),
            ("--kv-heads 2", "only apply to --random"),
        ],
    );
    folder.write("table.npy", &[("", &integers(&[2, 3], &[5, 0, 2, 4, 3, 6]))]);
    folder.refused(FILES, "page 2 of sequence 1 is 6, but there are 6");
    folder.write("table.npy", &[("", &integers(&[2, 3], &[5, 0, 2, 4, 0, 1]))]);
    let shared = "share page 0 have 16 and 4 keys in it";
    folder.refused(&format!("{FILES} --seqused-kv 40,20 --select-pages 2"), shared);
    folder.write("table.npy", &[("", &integers(&[2, 3], &[5, 0, 2, 4, 3, 6]))]);
    // A page without a key does not count.
    folder.json(&format!("{FILES} --seqused-kv 48,32"));
    folder.refuses(
        "attention-decode",
        &[
            ("", "nothing to compute"),
            ("--random 1x1x4x8 --kv-heads 3", "4"),
            ("--random 1x1x4x8 --page-size 48", "pages of 48"),
            ("--random 1x1x4x8 --page-size 0", "pages of 0"),
            ("--random 1x1x4x8 --select-pages 4", "needs a cache in pages"),
            ("--random 1x1x4x8 --page-size 16 --select-pages 1", "2.."),
            ("--random 1x1x4x8 --page-size 16 --summaries mean", "--select-pages"),
            ("--random 1x1x4x8 --page-size 16 --pages p.npy", "--select-pages"),
            ("--random 1x1x4x8 --k-scale 2", "--kv-dtype"),
            ("--random 1x1x4x8 --kv-dtype i8 --v-scale 0", "greater than 0"),
            ("--random 1x1x4x8 --kv-dtype f16", "e4m3"),
            ("--random 1x1x4x8 --page-size 16 --select-pages 2 --kv-dtype e4m3", "cache.k is e4m3"),
        ],
    );
}
