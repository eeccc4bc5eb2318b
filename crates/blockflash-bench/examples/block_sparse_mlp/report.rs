//! What is left of a study: a table, files for programs, a plot.

use super::results::{self, rate};
use super::study::{ALL_BLOCKS, Point, Study};
use blockflash_bench::plot::{Speedup, SpeedupLine, SpeedupPanel};
use std::fmt::Write;
use std::path::{Path, PathBuf};

// Writing into a String does not fail: results of `write!` are dropped in this file.

/// For people.
pub fn table(study: &Study) -> String {
    let mut text = format!(
        "{}: MLP {} -> {} -> {}, bf16: down · silu(up · x), up with its activation one launch, \
         down another\n\
         speed-up: over our own product with all blocks stored, in the block size for which that \
         is fastest\n",
        study.device, study.features, study.intermediate, study.features
    );
    if study.dense.is_empty() {
        text += "no dense product of another library: there is none in this workspace, and none \
                 was measured with --peers\n";
    }
    for dense in &study.dense {
        let time = match (dense.rival.us, &dense.rival.error) {
            (Some(us), _) => format!("{:.3} ms", us * 1e-3),
            (None, error) => error.clone().unwrap_or_default(),
        };
        let _ = writeln!(
            text,
            "{}: {} {time} for both products, no activation",
            tokens_title(dense.tokens),
            dense.rival.name
        );
    }
    for of_tokens in by_tokens(study) {
        let _ = writeln!(
            text,
            "\n{}\nblock  density        ms  dense ms  speed-up  TFLOP/s     error  rounding",
            tokens_title(of_tokens[0].tokens)
        );
        for point in of_tokens {
            let _ = write!(
                text,
                "{:>5}  {:>5.1} %  {:>8.4}  {:>8.4}  {:>8.2}  {:>7}  {:>6.2} %  {:>6.2} %",
                point.block_size,
                point.density * 100.0,
                point.us * 1e-3,
                point.dense_us * 1e-3,
                point.speedup,
                rate(point.tflops),
                point.error * 100.0,
                point.rounding * 100.0
            );
            for rival in &point.rivals {
                let _ = match (rival.us, &rival.error) {
                    (Some(us), _) => write!(text, "  {} {:.4} ms", rival.name, us * 1e-3),
                    (None, error) => {
                        write!(text, "  {}: {}", rival.name, error.as_deref().unwrap_or_default())
                    }
                };
            }
            text.push('\n');
        }
    }
    text += "\nfaster up to this density, between measured ones interpolated\ntokens  block   \
             density  than\n";
    for found in &study.break_even {
        let density =
            found.density.map_or("none".to_owned(), |density| format!("{:.1} %", density * 100.0));
        let _ = writeln!(
            text,
            "{:>6}  {:>5}  {density:>8}  {}",
            found.tokens, found.block_size, found.over
        );
    }
    text
}

fn tokens_title(tokens: usize) -> String {
    if tokens == 1 { "1 token".to_owned() } else { format!("{tokens} tokens") }
}

fn by_tokens(study: &Study) -> impl Iterator<Item = &[Point]> {
    study.points.chunk_by(|a, b| a.tokens == b.tokens)
}

/// A line for each of ours and each rival.
fn csv(study: &Study) -> String {
    let mut text =
        "implementation,tokens,block_size,density,us,dense_us,speedup,tflops,error,rounding\n"
            .to_owned();
    for point in &study.points {
        let Point {
            tokens,
            block_size,
            density,
            us,
            dense_us,
            speedup,
            tflops,
            error,
            rounding,
            ..
        } = point;
        let _ = writeln!(
            text,
            "blockflash,{tokens},{block_size},{density},{us},{dense_us},{speedup},{tflops},\
             {error},{rounding}"
        );
        for (name, us) in point.rivals.iter().filter_map(|rival| Some((&rival.name, rival.us?))) {
            let (speedup, tflops) = (dense_us / us, tflops * point.us / us);
            let _ = writeln!(
                text,
                "{name},{tokens},{block_size},{density},{us},{dense_us},{speedup},{tflops},,"
            );
        }
    }
    for (dense, us) in study.dense.iter().filter_map(|dense| Some((dense, dense.rival.us?))) {
        let flops = 4.0 * (study.features * study.intermediate * dense.tokens) as f64;
        let _ = writeln!(
            text,
            "{},{},,1,{us},,,{},,",
            dense.rival.name,
            dense.tokens,
            flops / us * 1e-6
        );
    }
    text
}

/// Writes everything into a folder, which is made if it is not there. Returns the files.
///
/// # Errors
/// What cannot be drawn or written.
pub fn write(study: &Study, folder: &Path) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    let panels: Vec<_> = by_tokens(study).map(|points| panel(study, points)).collect();
    let title = format!(
        "Block-sparse MLP, {} to {} to {} features: times as fast as with all blocks",
        study.features, study.intermediate, study.features
    );
    let subtitle =
        format!("{} · bf16 · down · silu(up · x) · {ALL_BLOCKS}: our own product", study.device);
    let plot = Speedup { title: &title, subtitle: &subtitle, panels: &panels }.draw()?;
    let texts = [("csv", csv(study)), ("json", serde_json::to_string_pretty(study)? + "\n")];
    results::write(folder, "block_sparse_mlp", &texts, &[("block_sparse_mlp", plot)])
}

fn panel(study: &Study, points: &[Point]) -> SpeedupPanel {
    let tokens = points[0].tokens;
    let mut panel = SpeedupPanel { title: tokens_title(tokens), ..SpeedupPanel::default() };
    for (group, points) in points.chunk_by(|a, b| a.block_size == b.block_size).enumerate() {
        let block = points[0].block_size;
        let line = |name: String, rival, points: Vec<_>| SpeedupLine { name, group, rival, points };
        let ours = points.iter().map(|point| (point.density, point.speedup)).collect();
        panel.lines.push(line(format!("blocks of {block} × {block}"), false, ours));
        for (at, rival) in points[0].rivals.iter().enumerate() {
            let speedup =
                |point: &Point| Some((point.density, point.dense_us / point.rivals[at].us?));
            let points: Vec<_> = points.iter().filter_map(speedup).collect();
            if !points.is_empty() {
                panel.lines.push(line(format!("{}, {block} × {block}", rival.name), true, points));
            }
        }
    }
    // In the turns in which the rival was measured.
    let dense_us = points.iter().find(|point| point.density == 1.0).map(|point| point.dense_us);
    for dense in study.dense.iter().filter(|dense| dense.tokens == tokens) {
        panel.levels.extend(
            dense_us.zip(dense.rival.us).map(|(ours, us)| (dense.rival.name.clone(), ours / us)),
        );
    }
    panel
}
