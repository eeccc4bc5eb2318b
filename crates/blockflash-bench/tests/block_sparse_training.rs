//! The example `block_sparse_training`, small and on the CPU.
#![allow(missing_docs, unreachable_pub)]

#[path = "../examples/block_sparse_training/data.rs"]
mod data;
#[path = "../examples/block_sparse_training/gradient_check.rs"]
mod gradient_check;
#[path = "../examples/common/layer.rs"]
mod layer;
#[path = "../examples/block_sparse_training/momentum.rs"]
mod momentum;
#[path = "../examples/block_sparse_training/network.rs"]
mod network;
#[path = "../examples/block_sparse_training/report.rs"]
mod report;
#[path = "../examples/common/results.rs"]
mod results;
#[path = "../examples/common/sparsity.rs"]
mod sparsity;
#[path = "../examples/block_sparse_training/training.rs"]
mod training;

use approx::{abs_diff_eq, assert_abs_diff_eq};
use blockflash_ops::{DType, Device, Stream};
use gradient_check::Check;
use layer::Layer;
use momentum::Momentum;
use sparsity::Sparsity;
use training::{Options, Study};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Sizes that are multiples of blocks, but for the outputs.
fn options() -> Options {
    Options {
        inputs: 64,
        hidden: 128,
        outputs: 40,
        block: 16,
        density: 0.5,
        batch: 64,
        batches: 8,
        steps: 60,
        rate: 2.0,
        momentum: 0.9,
        goal: 0.5,
        seed: 3,
        dtype: DType::F32,
        device: Device::cpu(),
    }
}

fn run(options: &Options) -> blockflash_bench::Result<Study> {
    training::run(options, &cpu(), |_| ())
}

fn check(options: &Options) -> Check {
    gradient_check::run(options, &cpu()).unwrap()
}

#[test]
fn blocks_are_drawn_evenly_and_values_stay_inside() {
    let draw = |seed| Sparsity::draw([40, 72], 16, 0.4, seed).unwrap();
    let sparsity = draw(1);
    assert_eq!((sparsity.blocks.len(), sparsity.fan_in()), (3 * 2, 32));
    assert!((0..3).all(|row| sparsity.blocks.iter().filter(|block| block.0 == row).count() == 2));
    assert!(sparsity.blocks.is_sorted() && sparsity == draw(1) && sparsity != draw(2));
    let values = sparsity.values(2.0, 7);
    let inside = (0..values.len()).filter(|&at| sparsity.is_inside(at));
    let squares: f32 = inside.clone().map(|at| values[at].powi(2)).sum();
    let mean = squares / inside.count() as f32;
    assert_abs_diff_eq!(mean * 16.0, 1.0, epsilon = 0.1);
    let beyond = |&at: &usize| !sparsity.is_inside(at);
    assert!((0..values.len()).filter(beyond).all(|at| values[at] == 0.0));
    assert_eq!(Sparsity::draw([16, 64], 16, 1e-9, 0).unwrap().blocks.len(), 1);
}

/// The same where blocks extend beyond both matrices.
#[test]
fn gradients_are_those_of_the_loss() {
    for options in
        [options(), Options { inputs: 59, hidden: 99, density: 0.3, seed: 4, ..options() }]
    {
        let check = check(&options);
        assert!(check.passed() && check.differences.len() == 16, "{check:?}");
        assert_eq!(check.on_device, [0.0; 2]);
        assert!(
            check.differences.iter().filter(|one| one.gradient.abs() > 1e-3).count() > 8,
            "{check:?}"
        );
    }
    for dtype in [DType::F16, DType::BF16] {
        let check = check(&Options { dtype, ..options() });
        assert!(check.passed() && check.on_device.iter().all(|&error| error > 0.0), "{check:?}");
    }
}

#[test]
fn a_wrong_gradient_does_not_pass() {
    let right = check(&options());
    let with = |change: fn(&mut Check)| {
        let mut check = right.clone();
        change(&mut check);
        check.passed()
    };
    assert!(with(|_| ()));
    assert!(!with(|check| check.differences[5].error = 0.02));
    assert!(!with(|check| check.differences[5].error = f64::NAN));
    assert!(!with(|check| check.on_device[1] = 0.1));
    assert!(!with(|check| check.on_device[0] = f64::NAN));
    assert!(!with(|check| check.differences.clear()));
}

/// Momentum repeats a step: without a gradient in the second step, its size is the first step's
/// size times the momentum.
#[test]
fn a_step_changes_the_weights_that_are_multiplied() {
    let (stream, sparsity) = (cpu(), Sparsity::draw([20, 36], 16, 0.5, 5).unwrap());
    let mut layer = Layer::new(&sparsity, 1.0, 6, DType::F32, &stream).unwrap();
    let mut momentum = Momentum::new(&sparsity);
    let (dy, x) = (vec![1.0f32; 4 * 20], vec![0.5f32; 4 * 36]);
    let [dy, x] =
        [layer::rounded(&dy, &[4, 20], DType::F32), layer::rounded(&x, &[4, 36], DType::F32)];
    let (dy, x) = (dy.unwrap(), x.unwrap());
    layer.find_gradient(dy.view().unwrap(), x.view().unwrap(), &stream).unwrap();
    // y at weights that have all moved by the same amount.
    let sums = |layer: &Layer| {
        let y = layer.forward(x.view().unwrap(), blockflash_ops::Activation::None).unwrap();
        y.matmul_transposed(DType::F32, &stream).unwrap().to_vec::<f32>(&stream).unwrap()
    };
    let before = sums(&layer);
    let inputs = |output: usize| {
        (0..sparsity.blocks.len() * 256)
            .filter(|&at| {
                sparsity.is_inside(at) && sparsity.blocks[at / 256].0 * 16 + at / 16 % 16 == output
            })
            .count() as f32
    };
    let mut moved = 0.0;
    for step in [0.5, 0.5 + 0.9 * 0.5] {
        momentum.descend(&mut layer, 0.1, 0.9, &stream).unwrap();
        moved += 0.1 / sparsity.fan_in() as f32 * step;
        let expected = before.iter().enumerate();
        let expected = expected.map(|(at, before)| before - 0.5 * moved * inputs(at % 20));
        let expected: Vec<f32> = expected.collect();
        assert_abs_diff_eq!(sums(&layer)[..], expected[..], epsilon = 1e-5);
    }
}

#[test]
fn the_student_learns() {
    for options in [options(), Options { inputs: 59, hidden: 99, dtype: DType::BF16, ..options() }]
    {
        let study = run(&options).unwrap();
        assert!(study.learned() && study.left > 0.0, "{study:?}");
        assert_eq!((study.points.len(), study.points[20].step, study.products.len()), (21, 60, 5));
        assert!(study.products.iter().all(|product| product.kernel.is_none() && product.us > 0.0));
        // At the start student and teacher are independent, so the relative loss is about 2.
        assert!(abs_diff_eq!(study.points[0].held_out, 2.0, epsilon = 0.6), "{study:?}");
        let losses =
            |study: &Study| study.points.iter().map(|point| point.held_out).collect::<Vec<_>>();
        assert_eq!(losses(&study), losses(&run(&options).unwrap()));
    }
    assert!(!run(&Options { goal: 0.01, steps: 2, ..options() }).unwrap().learned());
    // Steps that are far too large end in NaN or infinity.
    assert!(!run(&Options { rate: 1e6, ..options() }).unwrap().learned());
}

#[test]
fn senseless_options_are_refused() {
    let refused = |options: Options| run(&options).unwrap_err().to_string();
    assert!(refused(Options { density: 1.5, ..options() }).contains("at most 1"));
    assert!(refused(Options { density: f64::NAN, ..options() }).contains("at most 1"));
    assert!(refused(Options { hidden: 0, ..options() }).contains("positive"));
    assert!(refused(Options { batch: 0, ..options() }).contains("positive"));
    assert!(refused(Options { rate: f32::NAN, ..options() }).contains("rate"));
    assert!(refused(Options { momentum: 1.0, ..options() }).contains("momentum"));
    assert!(refused(Options { goal: 1.0, ..options() }).contains("goal"));
    assert!(refused(Options { block: 4096, ..options() }).contains("block_size is 4096"));
    assert!(refused(Options { dtype: DType::I32, ..options() }).contains("i32"));
}

#[test]
fn results_are_written() {
    let folder =
        std::env::temp_dir().join(format!("blockflash-training-results-{}", std::process::id()));
    let (study, check) = (run(&options()).unwrap(), check(&options()));
    let files = report::write(&study, &check, &folder).unwrap();
    let names: Vec<_> =
        files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let expected =
        ["csv", "json", "svg"].map(|extension| format!("block_sparse_training.{extension}"));
    assert_eq!(names, expected);
    let text = |at: usize| std::fs::read_to_string(&files[at]).unwrap();
    let csv = text(0);
    assert!(csv.starts_with("step,training,held_out,ms\n0,") && csv.lines().count() == 22, "{csv}");
    let json: serde_json::Value = serde_json::from_str(&text(1)).unwrap();
    assert_eq!(json["training"]["points"].as_array().unwrap().len(), 21);
    assert_eq!(json["check"]["differences"].as_array().unwrap().len(), 16);
    let svg = text(2);
    assert!(["held out", "64 to 128 to 40", "steps"].iter().all(|word| svg.contains(word)));
    let table = report::table(&study);
    for word in ["dW1 = dhᵀ·x", "of the first loss is left", "ms/step", "50.0 % may be"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    assert!(report::check(&check).lines().count() == 19);
    std::fs::remove_dir_all(&folder).unwrap();
}
