//! The example `block_sparse_mlp`, small and on the CPU.
#![allow(missing_docs, unreachable_pub)]

#[path = "../examples/block_sparse_mlp/layer.rs"]
mod layer;
#[path = "../examples/block_sparse_mlp/reference.rs"]
mod reference;
#[path = "../examples/block_sparse_mlp/report.rs"]
mod report;
#[path = "../examples/common/results.rs"]
mod results;
#[path = "../examples/block_sparse_mlp/rivals.rs"]
mod rivals;
#[path = "../examples/block_sparse_mlp/study.rs"]
mod study;
#[path = "../examples/block_sparse_mlp/weights.rs"]
mod weights;

use approx::assert_abs_diff_eq;
use blockflash_bench::peers::{Command, Peers, Selection};
use blockflash_ops::Device;
use layer::{Activations, Mlp};
use rivals::Rivals;
use study::{ALL_BLOCKS, Options, Point, Study};
use weights::{Kept, Weights};

fn options() -> Options {
    Options {
        features: 256,
        intermediate: 384,
        blocks: vec![16, 64],
        densities: vec![0.5, 0.25],
        tokens: vec![1, 19],
        spread: 0.7,
        seed: 7,
        rounds: 1,
        window_ms: 0.1,
        gap_ms: 0.0,
        device: Device::cpu(),
    }
}

/// A server that takes any case and always has the same time.
fn fake_rivals() -> Rivals {
    let script = r#"while read -r line; do case "$line" in
        *hello*) echo '{"references":["torch_matmul_dense"],'\
'"peers":{"bsr_matmul":["torch_matmul_dense","triton","broken"]}}';;
        *prepare*broken*) echo '{"error":"RuntimeError: no"}';;
        *prepare*) echo '{"verified":true,"rel_err":0.001}';;
        *window*) echo '{"us":2.5,"us_min":2.0,"us_max":3.0,"replays":9,"launches":4}';;
        *) echo '{}';;
    esac; done"#;
    let command = Command {
        program: "sh".into(),
        arguments: vec!["-c".into(), script.into()],
        verbose: false,
    };
    Rivals::new(Peers::start(command, Selection::Auto, 0), 0, 0)
}

fn run(options: &Options) -> blockflash_bench::Result<Study> {
    let mut rivals = Rivals::start("none", 1, 0, &options.device, |_| ()).unwrap();
    assert!(rivals.named(true).is_empty() && rivals.named(false).is_empty());
    study::run(options, &mut rivals, |_| ())
}

#[test]
fn weights_are_reproducible_and_have_unequal_blocks() {
    let draw = |spread, seed, lane| Weights::draw([256, 320], spread, seed, lane).unwrap();
    assert!(draw(0.7, 1, 0).0 == draw(0.7, 1, 0).0);
    assert!(draw(0.7, 1, 0).0 != draw(0.7, 2, 0).0 && draw(0.7, 1, 0).0 != draw(0.7, 1, 1).0);
    for spread in [0.0, 0.7] {
        let weights = draw(spread, 1, 0);
        let squares =
            |values: &[half::bf16]| values.iter().map(|value| value.to_f64().powi(2)).sum::<f64>();
        // A row keeps the variance of its input.
        let all = squares(weights.0.as_slice().unwrap());
        assert_abs_diff_eq!(all / 256.0, 1.0, epsilon = 0.2);
        // What a quarter of the blocks holds: little more than a quarter where all are alike.
        let part = |block: usize| {
            let kept = weights.rank(block).unwrap().keep(0.25);
            assert_eq!(
                (kept.col_idx.len(), kept.elements()),
                (256 * 320 / block / block / 4, 256 * 80)
            );
            let matrix = weights.bsr(&kept).unwrap();
            squares(matrix.values().view().as_slice().unwrap()) / all
        };
        let (fine, coarse) = (part(16), part(64));
        match spread {
            0.0 => assert!(fine > 0.25 && fine < 0.35, "{fine}"),
            _ => assert!(fine > coarse && coarse > 0.4, "{fine} {coarse}"),
        }
    }
    let refused = Weights::draw([48, 64], 0.7, 0, 0).unwrap().rank(64);
    assert!(refused.is_err_and(|error| error.to_string().contains("48 x 64")));
}

#[test]
fn the_blocks_with_the_greatest_norms_stay() {
    let weights = Weights::draw([64, 96], 0.7, 3, 0).unwrap();
    let norm = |(row, col): (usize, usize)| -> f64 {
        let at = |at: usize| weights.0[[row * 16 + at / 16, col * 16 + at % 16]].to_f64();
        (0..256).map(|element| at(element).powi(2)).sum()
    };
    let ranking = weights.rank(16).unwrap();
    let kept = ranking.keep(0.3);
    let stay: Vec<_> = kept.blocks().collect();
    assert_eq!((stay.len(), kept.row_ptr.len()), (7, 5));
    let dropped = (0..24).map(|block| (block / 6, block % 6)).filter(|block| !stay.contains(block));
    let least = stay.iter().map(|&block| norm(block)).fold(f64::INFINITY, f64::min);
    assert!(dropped.map(norm).all(|dropped| dropped <= least));
    assert_eq!(ranking.keep(1e-9).col_idx.len(), 1);
    let all = Kept {
        block_size: 16,
        row_ptr: (0..=4).map(|row| row * 6).collect(),
        col_idx: (0..24).map(|block| block % 6).collect(),
    };
    assert_eq!(ranking.keep(1.0), all);
}

/// Also where rows of activations are not whole multiples of 16 bytes, and for copies in turns.
#[test]
fn the_layer_is_what_the_host_computes() {
    let stream = Device::cpu().stream().unwrap();
    let up = Weights::draw([384, 256], 0.7, 1, 0).unwrap();
    let down = Weights::draw([256, 384], 0.7, 1, 1).unwrap();
    let rankings = [up.rank(32).unwrap(), down.rank(32).unwrap()];
    let mlp = Mlp::new([&up, &down], &rankings, 0.3, 300_000, &stream).unwrap();
    assert_abs_diff_eq!(mlp.density(), 0.3, epsilon = 0.01);
    assert_eq!(mlp.block_size(), 32);
    assert_eq!(mlp.flops(), 2.0 * 2.0 * (0.3f64 * 96.0).round() * 1024.0);
    for (tokens, sampled) in
        [(1, vec![0]), (3, vec![0, 1, 2]), (16, vec![0, 2, 4, 6, 8, 10, 12, 15])]
    {
        let mut activations = Activations::new([256, 384], tokens, 5, &stream).unwrap();
        assert_eq!((activations.sampled(), activations.tokens()), (sampled, tokens));
        let input = activations.input(&stream).unwrap();
        let expected = reference::mlp([&up, &down], mlp.kept.each_ref(), &input);
        for _ in 0..4 {
            let found = activations.output(&mlp, &stream).unwrap();
            let error = reference::relative_error(&found, &expected, tokens.min(8));
            assert!(error > 0.0 && error < 5e-3, "{tokens}: {error}");
        }
    }
}

#[test]
fn more_blocks_are_closer_to_all_of_them() {
    let study = run(&options()).unwrap();
    assert_eq!((study.points.len(), study.break_even.len(), study.dense.len()), (12, 4, 0));
    for points in study.points.chunk_by(|a, b| (a.tokens, a.block_size) == (b.tokens, b.block_size))
    {
        let [first, second, all] = points else { panic!("{points:?}") };
        assert!(first.density < second.density && all.density == 1.0);
        assert!(first.error > second.error && second.error > 10.0 * all.error, "{points:?}");
        assert_eq!(all.error, all.rounding);
        let of = |point: &Point| point.us > 0.0 && point.tflops > 0.0 && point.rounding > 0.0;
        assert!(points.iter().all(|point| of(point) && point.speedup == point.dense_us / point.us));
    }
    let again = run(&options()).unwrap();
    let errors = |study: &Study| study.points.iter().map(|point| point.error).collect::<Vec<_>>();
    assert_eq!(errors(&study), errors(&again));
}

/// All times are known: of the layers from the study, of the dense product from the rival that
/// always takes 5 µs.
#[test]
fn break_even_is_found_for_each_block_size_and_dense_product() {
    let study = study::run(&options(), &mut fake_rivals(), |_| ()).unwrap();
    let found: Vec<_> = study
        .break_even
        .iter()
        .map(|found| (found.tokens, found.block_size, found.over.as_str()))
        .collect();
    let of_tokens = |tokens| {
        [16, 64].into_iter().flat_map(move |block| {
            [(tokens, block, ALL_BLOCKS), (tokens, block, "torch_matmul_dense")]
        })
    };
    assert_eq!(found, of_tokens(1).chain(of_tokens(19)).collect::<Vec<_>>());
    for found in &study.break_even {
        let same =
            |point: &&Point| (point.tokens, point.block_size) == (found.tokens, found.block_size);
        let faster =
            |point: &&Point| point.us < if found.over == ALL_BLOCKS { point.dense_us } else { 5.0 };
        let points: Vec<_> = study.points.iter().filter(same).collect();
        let slower = points.iter().position(|point| !faster(point));
        match (found.density, slower) {
            (None, Some(0)) => {}
            (Some(density), Some(slower)) if slower > 0 => {
                assert!(
                    (points[slower - 1].density..=points[slower].density).contains(&density),
                    "{points:?}"
                );
            }
            (Some(density), None) => assert_eq!(density, 1.0),
            other => panic!("{other:?}: {points:?}"),
        }
    }
}

#[test]
fn senseless_options_are_refused() {
    let refused = |options: Options| run(&options).unwrap_err().to_string();
    assert!(refused(Options { densities: vec![1.5], ..options() }).contains("at most 1"));
    assert!(refused(Options { densities: vec![f64::NAN], ..options() }).contains("at most 1"));
    assert!(refused(Options { tokens: vec![0], ..options() }).contains("positive"));
    assert!(refused(Options { rounds: 0, ..options() }).contains("positive"));
    assert!(refused(Options { blocks: vec![], ..options() }).contains("needed"));
    assert!(refused(Options { blocks: vec![48], ..options() }).contains("blocks of 48"));
    assert!(refused(Options { window_ms: f64::NAN, ..options() }).contains("milliseconds"));
}

#[test]
fn results_are_written() {
    let folder =
        std::env::temp_dir().join(format!("blockflash-mlp-results-{}", std::process::id()));
    let options = Options { tokens: vec![1], ..options() };
    let mut study = study::run(&options, &mut fake_rivals(), |_| ()).unwrap();
    let files = report::write(&study, &folder).unwrap();
    let names: Vec<_> =
        files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let expected = ["csv", "json", "svg"].map(|extension| format!("block_sparse_mlp.{extension}"));
    assert_eq!(names, expected);
    let text = |at: usize| std::fs::read_to_string(&files[at]).unwrap();
    let csv = text(0);
    assert!(
        csv.starts_with("implementation,tokens,block_size,density,us,")
            && csv.lines().count() == 14,
        "{csv}"
    );
    assert!(csv.lines().all(|line| line.matches(',').count() == 9), "{csv}");
    // Two products of 2.5 µs.
    assert!(csv.ends_with("\ntorch_matmul_dense,1,,1,5,,,0.0786432,,\n"), "{csv}");
    assert_eq!(csv.matches("\ntriton,1,16,").count(), 3);
    let json: serde_json::Value = serde_json::from_str(&text(1)).unwrap();
    assert_eq!((&json["features"], json["points"].as_array().unwrap().len()), (&256.into(), 6));
    assert_eq!(
        (&json["break_even"][0]["over"], &json["dense"][0]["us"]),
        (&ALL_BLOCKS.into(), &5.0.into())
    );
    assert_eq!(json["break_even"][1]["over"], "torch_matmul_dense");
    assert_eq!(json["points"][0]["rivals"][1]["error"], "RuntimeError: no");
    let svg = text(2);
    for word in
        ["1 token", "triton, 16 × 16", "blocks of 64 × 64", "torch_matmul_dense", "1 / density"]
    {
        assert!(svg.contains(word), "{word}");
    }
    let table = report::table(&study);
    for word in [
        "MLP 256 -> 384 -> 256",
        "1 token\nblock",
        "broken: RuntimeError: no",
        "torch_matmul_dense",
        "tokens  block   density  than",
    ] {
        assert!(table.contains(word), "{word}: {table}");
    }
    study.dense.clear();
    assert!(report::table(&study).contains("no dense product of another library"));
    std::fs::remove_dir_all(&folder).unwrap();
}
