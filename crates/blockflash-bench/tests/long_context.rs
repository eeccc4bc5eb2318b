//! The example `long_context`, small and on the CPU.
#![allow(missing_docs, unreachable_pub)]

#[path = "../examples/long_context/data.rs"]
mod data;
#[path = "../examples/long_context/masks.rs"]
mod masks;
#[path = "../examples/long_context/report.rs"]
mod report;
#[path = "../examples/common/results.rs"]
mod results;
#[path = "../examples/long_context/study.rs"]
mod study;

use approx::assert_abs_diff_eq;
use blockflash_ops::block_sparse::block_mean_scores;
use blockflash_ops::{BlockMask, Device, Mask};
use data::Recipe;
use std::collections::BTreeSet;
use study::{Options, Point, TOP_K, WINDOW};

const RECIPE: Recipe =
    Recipe { seqlen: 2048, heads_q: 4, heads_kv: 2, head_dim: 64, segment: 256, seed: 7 };

fn options(top_k: &[usize]) -> Options {
    let top_k = top_k.to_vec();
    Options {
        recipe: RECIPE,
        block: 64,
        sink: 1,
        window: 1,
        top_k,
        window_ms: 1.0,
        device: Device::cpu(),
    }
}

#[test]
fn documents_are_reproducible_and_have_structure() {
    let [q, k, v] = RECIPE.draw().unwrap();
    assert_eq!(
        (q.shape(), k.shape(), v.shape()),
        (&[1, 2048, 4, 64][..], &[1, 2048, 2, 64][..], &[1, 2048, 2, 64][..])
    );
    assert!(RECIPE.draw().unwrap() == [q.clone(), k.clone(), v]);
    assert!(Recipe { seed: 8, ..RECIPE }.draw().unwrap()[0] != q);
    assert!(
        Recipe { heads_kv: 3, ..RECIPE }.draw().is_err()
            && Recipe { segment: 0, ..RECIPE }.draw().is_err()
    );
    // A local head looks nearby, every head at the sink.
    let row = |array: &blockflash_bench::io::Array, token: usize, head: usize, heads: usize| {
        array.to_f32((token * heads + head) * 64..(token * heads + head + 1) * 64)
    };
    let score = |query: usize, head: usize, key: usize| -> f32 {
        let (q, k) = (row(&q, query, head, 4), row(&k, key, head / 2, 2));
        q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() / 8.0
    };
    let mean = |scores: Vec<f32>| scores.iter().sum::<f32>() / scores.len() as f32;
    let places = [300, 700, 1100, 1500, 1900];
    let nearby = mean(
        places
            .iter()
            .flat_map(|&at| (1..9).map(move |back| (at, back)))
            .map(|(at, back)| score(at, 0, at - back))
            .collect(),
    );
    let far = mean(
        places
            .iter()
            .flat_map(|&at| (100..108).map(move |back| (at, back)))
            .map(|(at, back)| score(at, 0, at - back))
            .collect(),
    );
    assert!(nearby > far + 1.0, "{nearby} {far}");
    for head in 0..4 {
        let sink = mean(places.iter().map(|&at| score(at, head, 1)).collect());
        assert!(sink > 4.0, "head {head}: {sink}");
    }
}

#[test]
fn more_blocks_are_closer_to_dense_attention_and_scores_are_worth_it() {
    let (study, mask) = study::run(&options(&[2, 6, 14]), |_| ()).unwrap();
    assert_eq!((study.points.len(), mask.heads(), mask.seqlen_q()), (6, 4, 2048));
    let of = |choice| -> Vec<&Point> {
        study.points.iter().filter(|point| point.choice == choice).collect()
    };
    for choice in [TOP_K, WINDOW] {
        let points = of(choice);
        for pair in points.windows(2) {
            assert!(pair[0].density < pair[1].density && pair[0].error > pair[1].error, "{pair:?}");
            assert!(pair[0].mass < pair[1].mass && pair[1].mass <= 1.0 + 1e-3, "{pair:?}");
        }
        assert!(points.iter().all(|point| point.us > 0.0 && point.tflops > 0.0));
    }
    for (by_scores, by_place) in of(TOP_K).into_iter().zip(of(WINDOW)) {
        // Every row visits as many blocks, and all the diagonal.
        assert_eq!(by_scores.density, by_place.density, "{by_scores:?} {by_place:?}");
        assert!(by_scores.mask_us.is_some_and(|us| us > 0.0) && by_place.mask_us.is_none());
        assert!(
            by_scores.error < by_place.error && by_scores.mass > by_place.mass,
            "{by_scores:?} {by_place:?}"
        );
    }
    assert!(study.scores_us > 0.0);
    let (again, _) = study::run(&options(&[2]), |_| ()).unwrap();
    assert_eq!(
        (again.points[0].error, again.points[0].mass),
        (study.points[0].error, study.points[0].mass)
    );
}

/// Sink, window, the best scores of all that the causal mask shows, and nothing else.
#[test]
fn the_mask_is_what_the_host_would_choose() {
    let options = options(&[3]);
    let stream = Device::cpu().stream().unwrap();
    let [q, k, _] = RECIPE.draw().unwrap();
    let (q, k) = (q.upload(&stream).unwrap(), k.upload(&stream).unwrap());
    let choices = masks::Choices::new(&options, &q, &k, &stream).unwrap();
    let (buffer, us) = choices.best(3, 1.0, &stream).unwrap();
    assert!(us > 0.0);
    let found = buffer.to_host(&stream).unwrap();

    let geometry = options.geometry().unwrap();
    let scores = block_mean_scores(geometry, q.view(), k.view()).unwrap();
    let best = BlockMask::top_k_from_scores(geometry, 1, 4, &scores, 3, Mask::causal()).unwrap();
    for (head, row) in (0..4).flat_map(|head| (0..32).map(move |row| (head, row))) {
        let always = (0..=row).filter(|&col| col < 1 || col + 1 >= row);
        let expected: BTreeSet<usize> = always.chain(best.row(0, head, row).unwrap()).collect();
        assert_eq!(
            found.row(0, head, row).unwrap().collect::<BTreeSet<_>>(),
            expected,
            "{head} {row}"
        );
    }
    let near = masks::nearest(&found, 1).unwrap();
    for (head, row) in (0..4).flat_map(|head| (0..32).map(move |row| (head, row))) {
        let columns: Vec<usize> = near.row(0, head, row).unwrap().collect();
        assert_eq!(columns.len(), found.row(0, head, row).unwrap().len());
        let first = row + 2 - columns.len();
        assert!(
            columns[0] == 0 && columns[1..].iter().copied().eq(first..=row),
            "{head} {row} {columns:?}"
        );
    }
}

#[test]
fn everything_is_exact() {
    let (study, _) = study::run(&options(&[32]), |_| ()).unwrap();
    let point = &study.points[0];
    assert_eq!((point.density, point.error), (1.0, 0.0));
    assert_abs_diff_eq!(point.mass, 1.0, epsilon = 1e-6);
    let refused = study::run(&options(&[33]), |_| ()).unwrap_err().to_string();
    assert!(refused.contains("up to 32"), "{refused}");
    assert!(study::run(&options(&[]), |_| ()).is_err());
    let odd = Options { block: 60, ..options(&[1]) };
    assert!(study::run(&odd, |_| ()).unwrap_err().to_string().contains("multiple of 64"));
}

#[test]
fn results_are_written() {
    let folder =
        std::env::temp_dir().join(format!("blockflash-long-context-{}", std::process::id()));
    let small = Options { recipe: Recipe { seqlen: 512, ..RECIPE }, ..options(&[1, 3]) };
    let (study, mask) = study::run(&small, |_| ()).unwrap();
    let files = report::write(&study, &mask, &folder).unwrap();
    let names: Vec<_> =
        files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let expected =
        ["long_context.csv", "long_context.json", "long_context.svg", "long_context_mask.svg"];
    assert_eq!(names, expected);
    let text = |at: usize| std::fs::read_to_string(&files[at]).unwrap();
    let csv = text(0);
    assert!(csv.starts_with("choice,blocks,density,us,") && csv.lines().count() == 5, "{csv}");
    assert!(
        csv.lines().all(|line| line.matches(',').count() == 10) && csv.ends_with(",,\n"),
        "{csv}"
    );
    let json: serde_json::Value = serde_json::from_str(&text(1)).unwrap();
    assert_eq!((&json["seqlen"], json["points"].as_array().unwrap().len()), (&512.into(), 4));
    assert!(text(2).contains("512 tokens of a document") && text(3).contains("head 1: "));
    let table = report::table(&study);
    assert!(
        table.contains("top-k        3")
            && table.contains("scores of blocks: ")
            && table.contains("dense: "),
        "{table}"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
