//! Charts that hold our speed against something: the best competitor of each case, and the roofs of
//! the machine.

use super::runs::{Row, Run, groups, mean, range};
use super::sketch::{SPEED, Sketch, chart};
use crate::case::Case;
use crate::chart::{Axis, CEILING, LIMIT, Line, Note, Panel, Side, Style, group, of as style_of};
use crate::record::OURS;
use crate::timing::median;

/// Speed-up over the best competitor, case by case. `None` if there is nothing to compare.
pub(super) fn ratios(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let ratios: Vec<_> = rows.iter().filter_map(Row::ratio).collect();
    let (least, most) = range(ratios.iter().copied())?;
    // The margin is for the numbers at the dots.
    let (least, most) = (least.min(0.9), most.max(1.1));
    let margin = (most / least).powf(0.09);
    let label = "blockflash / best competitor (logarithmic)";
    let x = Axis::log(label, (least / margin * 1.15, most * margin / 1.15));
    let mut panel = Panel { x, ..Panel::default() };
    let (mut stems, mut y) = (Vec::new(), 0.0);
    for (text, rows) in groups(rows) {
        if rows.iter().all(|row| row.ratio().is_none()) {
            continue;
        }
        // Cases run from top to bottom, so y is negative downwards from zero.
        y -= 1.0;
        panel.notes.push(Note { at: (panel.x.low, y), text, side: Side::Left, bold: true });
        for row in rows {
            let (Some(ratio), Some(best)) = (row.ratio(), row.best_competitor()) else { continue };
            y -= 1.0;
            panel.y.ticks.push((y, row.name()));
            let (at, ahead) = ((ratio, y), ratio > 1.0);
            let stem = if ahead { style_of(OURS, false) } else { LIMIT };
            let style = Style { width: 3, marker: None, dashed: false, ..stem };
            stems.push(Line { points: vec![(1.0, y), at], style, ..Line::default() });
            let name = format!("{} is the best competitor", best.implementation);
            let style = Style { width: 0, ..style_of(&best.implementation, false) };
            panel.lines.push(Line { name, points: vec![at], style, apart: true });
            let side = if ahead { Side::Right } else { Side::Left };
            panel.notes.push(Note { at, text: format!("{ratio:.2}"), side, bold: false });
        }
    }
    (panel.y.low, panel.y.high) = (y - 0.8, -0.2);
    let ends = vec![(1.0, panel.y.low), (1.0, panel.y.high)];
    let one = Style { dashed: false, ..CEILING };
    panel.lines.extend(stems);
    panel.lines.push(Line { points: ends, style: one, ..Line::default() });
    let (suite, count) = (run.key().1, ratios.len());
    let title = format!(
        "{suite}: {:.2} × the best competitor of each case (geometric mean of {count})",
        mean(&ratios)?
    );
    let height = (-y) as u32 * 15 + 60;
    let chart = chart(run, title, "right of 1: blockflash is faster", vec![panel], height);
    // A few cases are as readable in a table, so they make no cover.
    Some(("ratio".to_owned(), chart, usize::from(count > 8)))
}

/// Our speed over the operations per byte of device memory. `None` without a memory and a matmul
/// ceiling, or if none of our records has counted bytes.
pub(super) fn roofline(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let memory = run.rate("hbm_read")? * 1e-12;
    let dtypes = rows.iter().filter_map(|row| Some(row.case.as_ref()?.dtype()));
    let matmul = dtypes.filter_map(|dtype| run.matmul(dtype)).reduce(f64::max)? * 1e-12;
    // Operations per byte and TFLOP/s of our fastest kernel.
    let point = |row: &Row<'_>| {
        let ours = row.best().filter(|ours| ours.bytes > 0.0)?;
        Some((ours.flops / ours.bytes, ours.tflops?))
    };
    let points: Vec<_> = rows.iter().filter_map(point).collect();
    let (least, most) = range(points.iter().map(|point| point.0))?;
    let (slowest, _) = range(points.iter().map(|point| point.1))?;
    let ridge = matmul / memory;
    let ends = (least.min(ridge / 4.0), most.max(ridge * 4.0));
    let x = Axis::log("FLOP for each byte of device memory (logarithmic)", ends);
    let y = Axis::log(&format!("{SPEED} (logarithmic)"), (slowest / 1.3, matmul * 1.4));
    let mut panel = Panel { x, y, ..Panel::default() };
    let mut limited = Vec::new();
    for (index, (name, rows)) in groups(rows).into_iter().enumerate() {
        let points: Vec<_> = rows.iter().filter_map(|row| point(row)).collect();
        let Some((least, most)) = range(points.iter().map(|point| point.0)) else { continue };
        let style = group(index);
        // A limit above the roof has no effect.
        for limit in typical_limits(run, &rows).into_iter().filter(|limit| *limit < matmul) {
            let points = vec![((least / 1.12).max(limit / memory), limit), (most * 1.12, limit)];
            let style = Style { dashed: true, marker: None, width: 2, ..style };
            limited.push(Line { points, style, ..Line::default() });
        }
        let style = Style { width: 0, ..style };
        panel.lines.push(Line { name, points, style, apart: true });
    }
    if !limited.is_empty() {
        let name = "limit of a group by exponentials or L2".to_owned();
        panel.lines.push(Line { name, style: LIMIT, ..Line::default() });
        panel.lines.extend(limited);
    }
    // The slope is clipped at the bottom of the panel.
    let start = panel.x.low.max(panel.y.low / memory);
    let roof = vec![(start, start * memory), (ridge, matmul), (panel.x.high, matmul)];
    let style = Style { dashed: false, width: 2, ..CEILING };
    panel.lines.push(Line { points: roof, style, ..Line::default() });
    // The label of the slope is left of it, where no point can be.
    let slope = start * (ridge / start).powf(0.85);
    let labels = [
        ((panel.x.high, matmul), format!("matmul {matmul:.0} TFLOP/s"), Side::AboveLeft),
        ((slope, slope * memory), format!("device memory {memory:.2} TB/s"), Side::Left),
    ];
    panel.notes = labels.map(|(at, text, side)| Note { at, text, side, bold: true }).to_vec();
    let title = format!("{}: roofline of blockflash", run.key().1);
    let chart = chart(run, title, "roofs measured in the same run", vec![panel], 460);
    Some(("roofline".to_owned(), chart, 0))
}

/// TFLOP/s at which exponentials or L2 would limit the typical case of a group.
fn typical_limits(run: &Run<'_>, rows: &[&Row<'_>]) -> Vec<f64> {
    let typical = |count: fn(&Row<'_>) -> f64, rate: Option<f64>| {
        let counted = rows.iter().filter(|row| count(row) > 0.0);
        let rate = rate? * 1e-12;
        let mut limits: Vec<_> = counted.map(|row| rate * row.any.flops / count(row)).collect();
        // With mixed block sizes there is no typical limit.
        let (least, most) = range(limits.iter().copied())?;
        median(&mut limits).filter(|_| most < least * 1.5)
    };
    // L2 limits a sparse product. Attention rereads its keys from shared memory often enough not to
    // be limited by it.
    let sparse = rows.iter().all(|row| matches!(row.case, Some(Case::BsrMatmul(_))));
    let l2 = ["l2_read", "l2_bulk"].map(|name| run.rate(name)).into_iter().flatten();
    let l2 = if sparse { typical(|row| row.any.l2_bytes, l2.reduce(f64::max)) } else { None };
    typical(|row| row.any.exps, run.rate("exp2")).into_iter().chain(l2).collect()
}
