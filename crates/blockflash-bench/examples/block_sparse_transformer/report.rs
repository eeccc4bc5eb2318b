//! What is left of a training: tables, files for programs, plots.

use super::gradient_check::{Check, Row};
use super::lengths::Length;
use super::results;
use super::training::{Curve, Study};
use blockflash_bench::plot::Curves;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

// Writing into a String does not fail: results of `write!` are dropped in this file.

/// Name of the files.
const NAME: &str = "block_sparse_transformer";
/// The two patterns in all tables and plots.
const PATTERNS: [&str; 2] = ["dense", "block-sparse"];

/// Everything that was found.
#[derive(Debug, Serialize)]
pub struct Results {
    /// Device, network and settings in one line.
    pub title: String,
    pub check: Check,
    pub training: Study,
    /// For each window length dense and block-sparse attention.
    pub lengths: Vec<[Length; 2]>,
}

/// The check for people.
pub fn check(check: &Check) -> String {
    let mut text = "error of the gradients, dense / block-sparse: a tiny network against \
                    differences of an f64 loss,\nand the trained network against the CPU in f32\n"
        .to_owned();
    for Row { name, errors, on_device } in &check.rows {
        let [tiny, device] = [errors, on_device]
            .map(|pair| pair.map(|error| format!("{:.4} %", error * 100.0)).join(" / "));
        let _ = writeln!(text, "{name:<20}  {tiny:>21}  {device:>21}");
    }
    text
}

/// The results for people.
pub fn table(results: &Results) -> String {
    let Results { title, training: Study { dense, sparse, entropies, goal }, lengths, .. } =
        results;
    let mut text = format!("{title}\n\nbits per byte, dense and block-sparse\n");
    text += "steps  training           held out\n";
    for (dense, sparse) in dense.points.iter().zip(&sparse.points) {
        let _ = writeln!(
            text,
            "{:>5}  {:>6.3}  {:>6.3}   {:>6.3}  {:>6.3}",
            dense.step, dense.training, sparse.training, dense.held_out, sparse.held_out
        );
    }
    let _ = writeln!(
        text,
        "entropy of a byte {:.3} bits, after a known byte {:.3}; at most {goal:.3} may be left\n\
         {} parameters; a step takes {:.1} ms and {:.1} ms\n\n\
         one layer of attention, dense and block-sparse\n\
         tokens   pairs  forward, us        backward, us       kept, MB    workspace, MB  \
         probabilities, MB",
        entropies[0], entropies[1], dense.parameters, dense.ms, sparse.ms
    );
    let mb = |bytes: usize| bytes as f64 * 1e-6;
    for [dense, sparse] in lengths {
        let _ = writeln!(
            text,
            "{:>6}  {:>4.1} %  {:>7.1}  {:>8.1}  {:>8.1}  {:>8.1}  {:>8.2}  {:>6.2}  {:>6.2}  \
             {:>8.1}  {:>7.1}",
            dense.seqlen,
            sparse.density * 100.0,
            dense.us[0],
            sparse.us[0],
            dense.us[1],
            sparse.us[1],
            mb(dense.kept),
            mb(dense.workspace),
            mb(sparse.workspace),
            mb(dense.probabilities),
            mb(sparse.probabilities)
        );
    }
    text
}

/// The curves alone: the same bits in every run.
fn csv(study: &Study) -> String {
    let mut text =
        "step,dense_training,dense_held_out,sparse_training,sparse_held_out\n".to_owned();
    for (dense, sparse) in study.dense.points.iter().zip(&study.sparse.points) {
        let _ = writeln!(
            text,
            "{},{},{},{},{}",
            dense.step, dense.training, dense.held_out, sparse.training, sparse.held_out
        );
    }
    text
}

/// Writes everything into a folder, which is made if it is not there. Returns the files.
///
/// # Errors
/// What cannot be drawn or written.
pub fn write(results: &Results, folder: &Path) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    let Results { title, training, lengths, .. } = results;
    let drawings = [
        (NAME.to_owned(), draw("A transformer learns bytes", title, LOSS_AXES, &losses(training))?),
        (format!("{NAME}_time"), draw("Time of attention", title, TIME_AXES, &times(lengths))?),
        (
            format!("{NAME}_memory"),
            draw("Memory of attention in training", title, MEMORY_AXES, &memory(lengths))?,
        ),
    ];
    let drawings: Vec<_> =
        drawings.iter().map(|(name, drawing)| (name.as_str(), drawing.clone())).collect();
    let json = serde_json::to_string_pretty(results)? + "\n";
    results::write(folder, NAME, &[("csv", csv(training)), ("json", json)], &drawings)
}

const LOSS_AXES: [&str; 2] = ["steps", "bits per byte"];
const TIME_AXES: [&str; 2] = ["tokens of a window", "µs"];
const MEMORY_AXES: [&str; 2] = ["tokens of a window", "MB in a layer"];

type Series = Vec<(String, Vec<(f64, f64)>)>;

fn draw(
    title: &str,
    subtitle: &str,
    axes: [&str; 2],
    series: &Series,
) -> Result<blockflash_bench::plot::Drawing, blockflash_bench::plot::PlotError> {
    Curves { title, subtitle, axes, series }.draw()
}

fn losses(study: &Study) -> Series {
    let held_out = |curve: &Curve| -> Vec<_> {
        curve.points.iter().map(|point| (point.step as f64, point.held_out)).collect()
    };
    let last = study.dense.points.last().map_or(0, |point| point.step) as f64;
    let level = |bits: f64| vec![(0.0, bits), (last, bits)];
    vec![
        (format!("{}, held out", PATTERNS[0]), held_out(&study.dense)),
        (format!("{}, held out", PATTERNS[1]), held_out(&study.sparse)),
        ("entropy of a byte".to_owned(), level(study.entropies[0])),
        ("after a known byte".to_owned(), level(study.entropies[1])),
    ]
}

/// A line for each pattern of something that depends on the length.
fn lines(lengths: &[[Length; 2]], what: &str, value: impl Fn(&Length) -> f64) -> Series {
    let line = |at: usize| {
        let points =
            lengths.iter().map(|pair| (pair[at].seqlen as f64, value(&pair[at]))).collect();
        (format!("{}, {what}", PATTERNS[at]), points)
    };
    vec![line(0), line(1)]
}

fn times(lengths: &[[Length; 2]]) -> Series {
    let mut series = lines(lengths, "forward", |length| length.us[0]);
    series.extend(lines(lengths, "backward", |length| length.us[1]));
    series
}

fn memory(lengths: &[[Length; 2]]) -> Series {
    let bytes = |length: &Length| (length.kept + length.workspace) as f64 * 1e-6;
    let mut series = lines(lengths, "kept and workspace", bytes);
    series.extend(lines(lengths, "probabilities", |length| length.probabilities as f64 * 1e-6));
    series
}
