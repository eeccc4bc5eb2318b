//! The examples check themselves, and fail if something is wrong: they run with small sizes.

use crate::harness::example;

fn works(name: &str, options: &str) -> String {
    let output = example(name, &format!("{options} --device cpu"));
    let texts = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{name} {options}: {texts:?}");
    texts[0].clone()
}

fn fails(name: &str, options: &str, expected: &str) {
    let output = example(name, &format!("{options} --device cpu"));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains(expected), "{name} {options}: {stderr}");
}

/// Tokens of batches, pages and joining sequences are those of a single step for each sequence.
#[test]
fn generation() {
    let text =
        works("generation", "--layers 2 --sequences 6 --tokens 20 --batch 4 --vocabulary 192");
    for words in ["prompt              6", "batch of 4", "tokens equal, 0 tied"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    fails("generation", "--batch 0", "positive");
}

/// Gradients are those of the loss, and the loss falls.
#[test]
fn block_sparse_training() {
    let small = "--inputs 64 --outputs 48 --block 16 --batch 64 --batches 8 --seed 3";
    let text = works(
        "block_sparse_training",
        &format!("{small} --hidden 128 --density 0.5 --steps 60 --goal 0.5"),
    );
    assert_eq!(text.matches("gradient of layer").count(), 4, "{text}");
    assert!(text.contains("of the first loss is left"), "{text}");
    for (options, expected) in [
        ("--hidden 128 --steps 2 --goal 0.01", "--goal"),
        // Steps that are far too large end in NaN or infinity.
        ("--hidden 128 --steps 20 --rate 1e6", "--goal"),
        ("--hidden 128 --density 1.5", "--density is 1.5"),
        ("--hidden 100", "--hidden is 100"),
        ("--steps 0", "positive"),
    ] {
        fails("block_sparse_training", &format!("{small} {options}"), expected);
    }
}

/// The same for attention, dense and under a block mask.
#[test]
fn block_sparse_attention() {
    let small = "--seqlen 150 --heads 2 --head-dim 16 --local 0 --stride 2";
    let text = works("block_sparse_attention", &format!("{small} --steps 40 --goal 0.95"));
    assert_eq!(text.matches("gradient of").count(), 10, "{text}");
    assert!(text.contains("block-sparse     40"), "{text}");
    fails("block_sparse_attention", &format!("{small} --steps 1 --goal 0.5"), "above --goal");
    fails("block_sparse_attention", "--seqlen 1000000", "--seqlen at most");
    fails("block_sparse_attention", "--seqlen 150 --stride 0", "stride");
}

/// More blocks are closer to dense attention, all blocks equal it, and scores are worth their time.
#[test]
fn long_context() {
    let small = "--seqlen 2048 --heads 4 --heads-kv 2 --head-dim 64 --block 64 --segment 256 \
                 --seed 7 --window 1 --window-ms 1";
    let text = works("long_context", &format!("{small} --top-k 2,6,14,32"));
    let rows = |choice: &str| -> Vec<[f64; 3]> {
        let rows = text.lines().filter(|line| line.starts_with(choice));
        let cells = rows.map(|line| line.split_whitespace().filter_map(|cell| cell.parse().ok()));
        cells
            .map(|cells| {
                // top-k, density, milliseconds, speed-up, error, softmax mass
                let cells: Vec<f64> = cells.collect();
                [cells[1], cells[4], cells[5]]
            })
            .collect()
    };
    let (best, near) = (rows("top-k"), rows("nearest"));
    assert_eq!((best.len(), near.len()), (4, 4), "{text}");
    for rows in [&best, &near] {
        assert!(rows.windows(2).all(|pair| pair[0][0] < pair[1][0]), "densities: {text}");
        assert!(rows.windows(2).all(|pair| pair[0][1] > pair[1][1]), "errors: {text}");
        assert!(rows.windows(2).all(|pair| pair[0][2] < pair[1][2]), "masses: {text}");
        assert_eq!(rows[3], [100.0, 0.0, 100.0]);
    }
    for (best, near) in best.iter().zip(&near).take(3) {
        assert!(best[0] == near[0] && best[1] < near[1] && best[2] > near[2], "{text}");
    }
    fails("long_context", &format!("{small} --top-k 33"), "there are 32 blocks");
    fails("long_context", "--seqlen 512 --block 60", "multiple of 64");
}
