//! The example `block_sparse_transformer`, small and on the CPU.
#![allow(missing_docs, unreachable_pub)]

#[path = "../examples/block_sparse_transformer/adam.rs"]
mod adam;
#[path = "../examples/block_sparse_transformer/attention.rs"]
mod attention;
#[path = "../examples/block_sparse_transformer/gradient_check.rs"]
mod gradient_check;
#[path = "../examples/block_sparse_transformer/host.rs"]
mod host;
#[path = "../examples/common/layer.rs"]
mod layer;
#[path = "../examples/block_sparse_transformer/lengths.rs"]
mod lengths;
#[path = "../examples/block_sparse_transformer/model.rs"]
mod model;
#[path = "../examples/block_sparse_transformer/reference.rs"]
mod reference;
#[path = "../examples/block_sparse_transformer/report.rs"]
mod report;
#[path = "../examples/common/results.rs"]
mod results;
#[path = "../examples/common/sparsity.rs"]
mod sparsity;
#[path = "../examples/block_sparse_transformer/text.rs"]
mod text;
#[path = "../examples/block_sparse_transformer/training.rs"]
mod training;

use adam::Adam;
use approx::assert_abs_diff_eq;
use attention::Pattern;
use blockflash_ops::{DType, Device};
use gradient_check::Check;
use text::{BYTES, Text};
use training::Options;

/// Three blocks of tokens, the last one short.
fn options(dtype: DType) -> Options {
    let quick = Options::quick(dtype, Device::cpu());
    let pattern = Pattern::Blocks { block: 64, local: 0, stride: 2 };
    let sizes =
        model::Sizes { layers: 1, head_dim: 16, hidden: 64, block: 16, pattern, ..quick.sizes };
    Options { sizes, windows: [2, 150], steps: 30, goal: 0.99, ..quick }
}

#[test]
fn gradients_are_those_of_the_loss() {
    for dtype in [DType::F32, DType::BF16] {
        let check = gradient_check::run(&options(dtype), &Text::new()).unwrap();
        assert!(check.passed(), "{check:?}");
        let exact = |row: &gradient_check::Row| row.on_device == [0.0; 2];
        assert_eq!(check.rows.iter().filter(|row| exact(row)).count() > 0, dtype == DType::F32);
    }
}

#[test]
fn a_wrong_gradient_does_not_pass() {
    let right = gradient_check::run(&options(DType::F32), &Text::new()).unwrap();
    let with = |change: fn(&mut Check)| {
        let mut check = right.clone();
        change(&mut check);
        check.passed()
    };
    assert!(with(|_| ()));
    assert!(!with(|check| check.rows[3].errors[1] = 0.01));
    assert!(!with(|check| check.rows[3].errors[0] = f64::NAN));
    assert!(!with(|check| check.rows[5].on_device[0] = 0.2));
    assert!(!with(|check| check.rows[5].on_device[1] = f64::NAN));
    assert!(!with(|check| check.rows.clear()));
}

#[test]
fn windows_are_shifted_by_a_byte() {
    let text = Text::new();
    let (entropy, after) = (text.entropy(), text.entropy_after_a_byte());
    assert!(after < entropy - 1.0 && entropy < 6.0 && after > 2.0, "{entropy} {after}");
    for batch in [text.draw([3, 100], 1, 2).unwrap(), text.held_out([3, 100]).unwrap()] {
        assert_eq!(batch.bytes.len(), 300);
        for at in (0..3).map(|window| 100 * window) {
            assert_eq!(batch.before[at + 1..at + 100], batch.bytes[at..at + 99]);
            assert_eq!(batch.bytes[at + 1..at + 100], batch.targets[at..at + 99]);
        }
        assert_ne!(batch.bytes[..100], batch.bytes[100..200]);
    }
    assert_ne!(text.draw([1, 50], 1, 2).unwrap().bytes, text.draw([1, 50], 1, 3).unwrap().bytes);
    let error = text.held_out([1, 1 << 30]).unwrap_err().to_string();
    assert!(error.contains("no window"), "{error}");
}

/// The first step of Adam has the size of the rate, whatever the size of the gradient is.
#[test]
fn a_first_step_has_the_size_of_the_rate() {
    let mut values = [1.0, 2.0, 3.0];
    Adam::default().descend((1, 0.1), "x", &mut values, &[1e-3, -50.0, 0.0]);
    assert_abs_diff_eq!(values[..], [0.9, 2.1, 3.0], epsilon = 1e-5);
}

#[test]
fn equal_logits_lose_eight_bits() {
    let mut logits = vec![3.0; 2 * BYTES];
    let loss = host::cross_entropy(&mut logits, &[7, 200]);
    assert_abs_diff_eq!(loss, 2.0 * 256f64.ln(), epsilon = 1e-5);
    assert_abs_diff_eq!(logits[7], 1.0 / 256.0 - 1.0, epsilon = 1e-6);
    assert_abs_diff_eq!(logits[8], 1.0 / 256.0, epsilon = 1e-6);
}

#[test]
fn both_networks_learn_and_repeat_their_bits() {
    let run = |options: &Options| training::run(options, &Text::new(), |_| ()).unwrap();
    for options in [options(DType::F32), options(DType::BF16)] {
        let study = run(&options);
        for curve in [&study.dense, &study.sparse] {
            assert_eq!((curve.points.len(), curve.points[20].step), (21, 30));
            // At the start all bytes are about equally likely.
            assert_abs_diff_eq!(curve.points[0].held_out, 8.0, epsilon = 0.1);
            assert!(curve.held_out() < 5.5, "{curve:?}");
        }
        assert_ne!(study.dense.points, study.sparse.points);
        let again = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let again = again.install(|| run(&options));
        assert_eq!(again.dense.points, study.dense.points);
        assert_eq!(again.sparse.points, study.sparse.points);
    }
}

#[test]
fn senseless_options_are_refused() {
    let refused =
        |options: Options| training::run(&options, &Text::new(), |_| ()).unwrap_err().to_string();
    let usual = || options(DType::F32);
    assert!(refused(Options { steps: 0, ..usual() }).contains("positive"));
    assert!(refused(Options { windows: [0, 64], ..usual() }).contains("positive"));
    assert!(refused(Options { windows: [1, 1 << 20], ..usual() }).contains("no window"));
    assert!(refused(Options { windows: [1 << 40, 1 << 40], ..usual() }).contains("at most"));
    assert!(refused(Options { rate: f32::NAN, ..usual() }).contains("rate"));
    assert!(refused(Options { goal: 1.0, ..usual() }).contains("goal"));
    assert!(refused(Options { dtype: DType::I32, ..usual() }).contains("i32"));
    let with = |pattern| {
        let usual = usual();
        refused(Options { sizes: model::Sizes { pattern, ..usual.sizes }, ..usual })
    };
    assert!(with(Pattern::Blocks { block: 64, local: 0, stride: 0 }).contains("stride"));
    assert!(with(Pattern::Blocks { block: 60, local: 0, stride: 1 }).contains("60"));
}

#[test]
fn results_are_written() {
    let folder =
        std::env::temp_dir().join(format!("blockflash-transformer-{}", std::process::id()));
    let options = Options { steps: 3, ..options(DType::F32) };
    let text = Text::new();
    let results = report::Results {
        title: options.title(),
        check: gradient_check::run(&options, &text).unwrap(),
        training: training::run(&options, &text, |_| ()).unwrap(),
        lengths: lengths::run(&options).unwrap(),
    };
    assert!(!results.training.learned());
    assert_eq!(results.lengths.len(), 4);
    assert!(results.lengths[3][1].density < 0.9 && results.lengths[3][0].density == 1.0);
    let files = report::write(&results, &folder).unwrap();
    let names: Vec<_> =
        files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let expected = [".csv", ".json", ".svg", "_time.svg", "_memory.svg"]
        .map(|end| format!("block_sparse_transformer{end}"));
    assert_eq!(names, expected);
    let text = |at: usize| std::fs::read_to_string(&files[at]).unwrap();
    assert!(text(0).starts_with("step,dense_training,") && text(0).lines().count() == 5);
    let json: serde_json::Value = serde_json::from_str(&text(1)).unwrap();
    assert_eq!(json["training"]["dense"]["points"].as_array().unwrap().len(), 4);
    assert_eq!(json["lengths"][3][0]["seqlen"], 150);
    for (at, word) in
        [(2, "entropy of a byte"), (3, "block-sparse, backward"), (4, "probabilities")]
    {
        assert!(text(at).contains(word), "{word}");
    }
    let table = report::table(&results);
    for word in ["2 × 150 bytes", "ms and", "probabilities, MB", "entropy of a byte"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    assert_eq!(report::check(&results.check).lines().count(), 2 + results.check.rows.len());
    std::fs::remove_dir_all(&folder).unwrap();
}
