//! `blockflash attention` with block masks, a sink and packed sequences, on random tensors.

mod common;

use common::{has_gpu, json, json_on, refused};

/// Combinations that together use every option.
const OPTIONS: [&str; 12] = [
    "--random 2x200x4x16 --sink random",
    "--random 1x50x2x16 --mask causal --seqlen-kv 20 --sink random",
    "--random 2x200x4x16 --block-mask causal+window:1,0+sink:1 --block 64",
    "--random 1x300x4x16 --kv-heads 2 --seqlen-kv 500 --block-mask window:1",
    "--random 1x300x4x8 --block-mask random:0.3 --block 64x128 --mask-heads 4",
    "--random 2x300x4x8 --kv-heads 2 --block-mask uniform:0.5 --mask-heads 2",
    // Query rows without visible keys, with a window inside the blocks.
    "--random 1x300x2x8 --block-mask full_rows:0.3 --block 64 --window 70,3",
    "--random 1x300x4x16 --cu-seqlens 0,100,100,170,300 --mask causal",
    "--random 1x30x2x16 --seqlen-kv 60 --cu-seqlens 0,10,30 --cu-seqlens-kv 0,50,60 \
     --mask causal --sink random --dtype bf16",
    "--random 1x30x2x16 --seqlen-kv 60 --cu-seqlens 0,10,30 --cu-seqlens-kv 0,50,60 \
     --mask causal-top-left --window 5,0",
    "--random 1x400x4x8 --cu-seqlens 0,130,400 --block-mask causal+window:0+sink:1 --block 64 \
     --sink random --softcap 5",
    "--random 1x400x4x8 --cu-seqlens 0,130,400 --block-mask random:0.4 --block 64 --mask-heads 4",
];

/// Element types that only the CPU computes in.
const OPTIONS_OF_CPU: [&str; 2] = [
    "--random 2x70x4x24 --kv-heads 2 --mask causal --dtype f32",
    "--random 1x50x2x59 --softcap 5 --dtype f32",
];

fn right_against_the_reference(device: &str, options: &[&str]) {
    for options in options {
        let words: Vec<&str> = options.split_whitespace().collect();
        let report = json_on(device, &[&["attention", "--check"], &words[..]].concat());
        assert_eq!(report["check"]["passed"], true, "{options:?}: {report}");
        for result in ["o", "lse"] {
            let result = &report["check"][result];
            assert_eq!(result["checked"], result["total"], "{options:?}");
        }
    }
}

#[test]
fn options_are_right_on_the_cpu() {
    right_against_the_reference("cpu", &OPTIONS);
    right_against_the_reference("cpu", &OPTIONS_OF_CPU);
}

#[test]
fn options_are_right_on_a_gpu() {
    if has_gpu("options_are_right_on_a_gpu") {
        right_against_the_reference("cuda", &OPTIONS);
        let words = OPTIONS_OF_CPU[0].split_whitespace();
        let words: Vec<&str> = ["attention", "--device", "cuda"].into_iter().chain(words).collect();
        assert!(refused(&words).contains("f32"));
    }
}

/// The counted pairs are the visible pairs: the word `causal` also makes the mask causal inside the
/// blocks.
#[test]
fn the_flops_are_those_of_the_visited_pairs() {
    let flops = |options: &[&str]| {
        json(&[&["attention", "--random"], options].concat())["flops"].as_f64().unwrap()
    };
    let words = ["2x256x4x16", "--block", "64", "--block-mask"];
    let pairs = |count: usize| (4 * count * 2 * 4 * 16) as f64;
    assert_eq!(flops(&[&words[..], &["full"]].concat()), pairs(256 * 256));
    assert_eq!(flops(&[&words[..], &["window:0"]].concat()), pairs(4 * 64 * 64));
    assert_eq!(flops(&[&words[..], &["causal+window:0"]].concat()), pairs(4 * 64 * 65 / 2));
    assert_eq!(
        flops(&[&words[..], &["causal+window:0", "--mask", "full"]].concat()),
        pairs(4 * 64 * 64)
    );
    let packed = ["1x256x4x16", "--cu-seqlens", "0,56,256"];
    assert_eq!(flops(&packed), pairs(56 * 56 + 200 * 200) / 2.0);
    assert_eq!(
        flops(&[&packed[..], &["--block-mask", "full"]].concat()),
        pairs(56 * 56 + 200 * 200) / 2.0
    );
    let report =
        json(&["attention", "--random", "1x256x4x16", "--block-mask", "window:0", "--block", "64"]);
    let words = "4 of 16 blocks of 64 x 64, density 0.2500, one list for all heads";
    assert_eq!(report["options"]["block mask"], words);
}
