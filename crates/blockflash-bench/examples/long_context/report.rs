//! What is left of a study: a table, files for programs, plots.

use super::results::{self, rate};
use super::study::{Point, Study, TOP_K, WINDOW};
use blockflash_bench::plot::{MAX_SHOWN, MaskPicture, Tradeoff, TradeoffPoint};
use blockflash_ops::BlockMask;
use std::fmt::Write;
use std::path::{Path, PathBuf};

// Writing into a String does not fail: results of `write!` are dropped in this file.

/// For people.
pub fn table(study: &Study) -> String {
    let mut text = format!(
        "{}: {} tokens, {} heads on {}, head_dim {}, bf16, causal; blocks of {block} x {block}, \
         sink {}, window {}\n\
         dense: {:.2} ms, {} TFLOP/s\n",
        study.device,
        study.seqlen,
        study.num_heads_q,
        study.num_heads_kv,
        study.head_dim,
        study.sink,
        study.window,
        study.dense_us * 1e-3,
        rate(study.dense_tflops),
        block = study.block,
    );
    let _ = writeln!(
        text,
        "scores of blocks: {:.3} ms; choosing is not in the times below, but beside them in % of \
         each",
        study.scores_us * 1e-3
    );
    let _ = writeln!(
        text,
        "choice  blocks  density        ms  speed-up  TFLOP/s    error  softmax mass   \
         scores     mask"
    );
    for point in &study.points {
        let [scores, mask] = choosing(study, point).map(|us| match us {
            Some(us) => format!("{:.2} %", us / point.us * 100.0),
            None => "–".to_owned(),
        });
        let _ = writeln!(
            text,
            "{:<6}  {:>6}  {:>5.1} %  {:>8.3}  {:>8.2}  {:>7}  {:>5.2} %  {:>10.2} %  {scores:>7} \
              {mask:>7}",
            point.choice,
            point.blocks,
            point.density * 100.0,
            point.us * 1e-3,
            point.speedup,
            rate(point.tflops),
            point.error * 100.0,
            point.mass * 100.0
        );
    }
    text
}

/// Microseconds of scores and mask, where a point needs them.
fn choosing(study: &Study, point: &Point) -> [Option<f64>; 2] {
    [point.mask_us.map(|_| study.scores_us), point.mask_us]
}

fn csv(study: &Study) -> String {
    let mut text =
        "choice,blocks,density,us,dense_us,speedup,tflops,error,mass,scores_us,mask_us\n"
            .to_owned();
    for point in &study.points {
        let [scores, mask] =
            choosing(study, point).map(|us| us.map_or(String::new(), |us| us.to_string()));
        let _ = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{},{scores},{mask}",
            point.choice,
            point.blocks,
            point.density,
            point.us,
            study.dense_us,
            point.speedup,
            point.tflops,
            point.error,
            point.mass
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
    mask: &BlockMask,
    folder: &Path,
) -> Result<Vec<PathBuf>, Box<dyn std::error::Error>> {
    let points = |choice: &str| -> Vec<TradeoffPoint> {
        let of_choice = study.points.iter().filter(|point| point.choice == choice);
        of_choice
            .map(|point| TradeoffPoint {
                density: point.density,
                error: point.error,
                speedup: point.speedup,
            })
            .collect()
    };
    let series = [
        ("sink, window and top-k by scores".to_owned(), points(TOP_K)),
        ("sink and as many of the nearest".to_owned(), points(WINDOW)),
    ];
    let subtitle = format!(
        "{} · {} heads on {}, head_dim {}, bf16, causal · blocks of {block} × {block} · dense \
         {:.1} ms, {} TFLOP/s",
        study.device,
        study.num_heads_q,
        study.num_heads_kv,
        study.head_dim,
        study.dense_us * 1e-3,
        rate(study.dense_tflops),
        block = study.block,
    );
    let title = format!("Attention over chosen blocks, {} tokens of a document", study.seqlen);
    let tradeoff = Tradeoff { title: &title, subtitle: &subtitle, series: &series }.draw()?;
    let shown: Vec<_> = (0..mask.heads().min(MAX_SHOWN)).map(|head| [0, head]).collect();
    let picture = MaskPicture { mask, name: "sink, window and top-k", shown: &shown }.draw()?;
    let texts = [("csv", csv(study)), ("json", serde_json::to_string_pretty(study)? + "\n")];
    let drawings = [("long_context", tradeoff), ("long_context_mask", picture)];
    results::write(folder, "long_context", &texts, &drawings)
}
