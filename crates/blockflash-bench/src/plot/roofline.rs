//! The roofline of a run: our speed over the operations per byte of device memory.

use super::figure::{Axis, Figure, Line, Note, Panel, Side};
use super::series::{SPEED, Sketch, subtitle};
use super::style::{self, Style};
use crate::case::Case;
use crate::report::run::{Row, Run, groups, range};
use crate::timing::median;

/// `None` without a memory and a matmul ceiling, or if none of our records has counted bytes.
pub(super) fn sketch(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let memory = run.rates.rate("hbm_read")?;
    let dtypes: Vec<_> = rows.iter().filter_map(|row| Some(row.case()?.dtype())).collect();
    let matmul = dtypes.iter().filter_map(|dtype| run.rates.matmul(*dtype)).reduce(f64::max)?;
    let points: Vec<_> = rows.iter().filter_map(point).collect();
    let (least_x, most_x) = range(points.iter().map(|&(x, _)| x))?;
    let (least_y, _) = range(points.iter().map(|&(_, y)| y))?;
    let ridge = matmul / memory;
    let x = Axis::decades(
        "FLOP for each byte of device memory (logarithmic)",
        least_x.min(ridge / 4.0) / 1.3,
        most_x.max(ridge * 4.0) * 1.3,
    );
    let y = Axis::decades(&format!("{SPEED} (logarithmic)"), least_y / 1.5, matmul * 1e-12 * 1.6);
    let mut panel = Panel { x, y, ..Panel::default() };
    roof(&mut panel, memory, matmul);
    let (mut legend, mut limited) = (Vec::new(), false);
    for (index, (label, rows)) in groups(rows).into_iter().enumerate() {
        let look = style::group(index);
        let points: Vec<_> = rows.iter().filter_map(|row| point(row)).map(log).collect();
        let Some((least, most)) = range(points.iter().map(|&(x, _)| x)) else { continue };
        // A limit above the roof has no effect.
        for limit in limits(run, &rows).into_iter().filter(|&limit| limit < matmul) {
            let y = (limit * 1e-12).log10();
            let points = vec![((least - 0.05).max((limit / memory).log10()), y), (most + 0.05, y)];
            let style = Style { dashed: true, marker: None, width: 2, ..look };
            panel.lines.push(Line { points, style, joined: true });
            limited = true;
        }
        panel.lines.push(Line { points, style: look, joined: false });
        legend.push((label, Style { width: 0, ..look }));
    }
    if limited {
        let dashes = Style { width: 2, ..style::CEILING };
        legend.push(("limit of a group by exponentials or L2".to_owned(), dashes));
    }
    let figure = Figure {
        title: format!("{}: roofline of blockflash", run.key().1),
        subtitle: subtitle(run, "roofs measured in the same run"),
        legend,
        columns: 1,
        panels: vec![panel],
        panel_height: 460,
        y_labels: 60,
    };
    Some(Sketch { name: "roofline".to_owned(), figure, weight: 0 })
}

/// Operations per byte and TFLOP/s of our fastest kernel.
fn point(row: &Row<'_>) -> Option<(f64, f64)> {
    let ours = row.best().filter(|ours| ours.bytes > 0.0)?;
    Some((ours.flops / ours.bytes, ours.tflops?))
}

fn log((x, y): (f64, f64)) -> (f64, f64) {
    (x.log10(), y.log10())
}

fn roof(panel: &mut Panel, memory: f64, matmul: f64) {
    let Axis { low, high, .. } = panel.x;
    let top = (matmul * 1e-12).log10();
    let ridge = (matmul / memory).log10();
    // The slope is clipped at the bottom of the panel.
    let start = low.max(panel.y.low - (memory * 1e-12).log10());
    let slope = |x: f64| (x, x + (memory * 1e-12).log10());
    let style = Style { dashed: false, width: 2, ..style::CEILING };
    panel.lines.push(Line {
        points: vec![slope(start), (ridge, top), (high, top)],
        style,
        joined: true,
    });
    let text = format!("matmul {:.0} TFLOP/s", matmul * 1e-12);
    panel.notes.push(Note { at: (high, top), text, side: Side::AboveLeft, bold: true });
    let text = format!("device memory {:.2} TB/s", memory * 1e-12);
    // The label stands left of the slope, where no point can lie.
    let at = slope(start + (ridge - start) * 0.85);
    panel.notes.push(Note { at, text, side: Side::Left, bold: true });
}

/// FLOP/s at which exponentials or L2 would limit the typical case of a group.
fn limits(run: &Run<'_>, rows: &[&Row<'_>]) -> Vec<f64> {
    let typical = |count: fn(&Row<'_>) -> f64, rate: Option<f64>| {
        let rate = rate?;
        let counted = rows.iter().filter(|row| count(row) > 0.0);
        let mut limits: Vec<_> = counted.map(|row| rate * row.any.flops / count(row)).collect();
        // With mixed block sizes there is no typical limit.
        let (least, most) = range(limits.iter().copied())?;
        median(&mut limits).filter(|_| most < least * 1.5)
    };
    // L2 limits a sparse product. Attention rereads its keys from shared memory often enough not to
    // be limited by it.
    let sparse = rows.iter().all(|row| matches!(row.case(), Some(Case::BsrMatmul(_))));
    let l2 = if sparse { typical(|row| row.any.l2_bytes, run.rates.l2()) } else { None };
    typical(|row| row.any.exps, run.rates.rate("exp2")).into_iter().chain(l2).collect()
}
