//! What is left of a training: tables, files for programs, a plot.

use super::gradient_check::Check;
use super::network::Product;
use super::results::{self, rate};
use super::training::{Point, Study};
use blockflash_bench::plot::Curves;
use std::fmt::Write;
use std::path::{Path, PathBuf};

// Writing into a String does not fail: results of `write!` are dropped in this file.

/// The check for people.
pub fn check(check: &Check) -> String {
    let mut text = "gradients against differences of the loss, f32 on the CPU\n\
        layer  weight    gradient  difference    error\n"
        .to_owned();
    for one in &check.differences {
        let _ = writeln!(
            text,
            "{:>5}  {:>6}  {:>10.6}  {:>10.6}  {:>5.2} %",
            one.layer,
            one.at,
            one.gradient,
            one.difference,
            one.error * 100.0
        );
    }
    let [first, second] = check.on_device.map(|error| error * 100.0);
    let _ = writeln!(
        text,
        "all gradients where training computes, against these: {first:.2} % and {second:.2} % off"
    );
    text
}

/// The training for people.
pub fn table(study: &Study) -> String {
    let mut text =
        format!("{}\n\nproduct              GFLOP        ms  TFLOP/s  kernel\n", subtitle(study));
    for product in &study.products {
        let kernel = product.kernel.as_deref().unwrap_or("CPU");
        let Product { what, flops, us, .. } = *product;
        let (gflop, ms) = (flops as f64 * 1e-9, us * 1e-3);
        let _ = writeln!(
            text,
            "{what:<16}  {gflop:>8.3}  {ms:>8.4}  {:>7}  {kernel}",
            rate(gflop / ms)
        );
    }
    text += "\nloss by that of answering 0\nsteps  training  held out   ms/step\n";
    for Point { step, training, held_out, ms } in &study.points {
        let ms = ms.map_or(String::new(), |ms| format!("{ms:.3}"));
        let _ = writeln!(text, "{step:>5}  {training:>8.4}  {held_out:>8.4}  {ms:>8}");
    }
    let Study { left, goal, .. } = study;
    let _ = writeln!(
        text,
        "{:.1} % of the first loss is left, {:.1} % may be",
        left * 100.0,
        goal * 100.0
    );
    text
}

fn subtitle(study: &Study) -> String {
    let Study {
        device,
        dtype,
        sizes: [inputs, hidden, outputs],
        block,
        batch,
        batches,
        rate,
        momentum,
        ..
    } = study;
    let density = study.density * 100.0;
    format!(
        "{device} · {inputs} to {hidden} to {outputs}, {dtype} · {density:.1} % of the blocks of \
         {block} × {block} · \
         {batches} batches of {batch} · rate {rate}, momentum {momentum}"
    )
}

fn csv(study: &Study) -> String {
    let mut text = "step,training,held_out,ms\n".to_owned();
    for Point { step, training, held_out, ms } in &study.points {
        let _ = writeln!(
            text,
            "{step},{training},{held_out},{}",
            ms.map_or(String::new(), |ms| ms.to_string())
        );
    }
    text
}

/// Writes everything into a folder, which is made if it is not there. Returns the files.
///
/// # Errors
/// What cannot be drawn or written.
pub fn write(
    study: &Study,
    check: &Check,
    folder: &Path,
) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    let curve = |value: fn(&Point) -> f64| {
        study.points.iter().map(|point| (point.step as f64, value(point))).collect::<Vec<_>>()
    };
    let series = [
        ("training".to_owned(), curve(|point| point.training)),
        ("held out".to_owned(), curve(|point| point.held_out)),
    ];
    let plot = Curves {
        title: "Training a block-sparse network",
        subtitle: &subtitle(study),
        axes: ["steps", "loss by that of answering 0"],
        series: &series,
    };
    let json = serde_json::json!({ "check": check, "training": study });
    let texts = [("csv", csv(study)), ("json", serde_json::to_string_pretty(&json)? + "\n")];
    results::write(
        folder,
        "block_sparse_training",
        &texts,
        &[("block_sparse_training", plot.draw()?)],
    )
}
