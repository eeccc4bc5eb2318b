//! Speed-up over the best rival, case by case.

use super::figure::{Axis, Figure, Line, Note, Panel, Side, plain};
use super::series::{Sketch, subtitle};
use super::style::{self, FAINT, Style};
use crate::record::OURS;
use crate::report::run::{Row, Run, geometric_mean, groups, peer_names, range};

/// Height of a case in pixels.
const ROW: u32 = 15;

/// `None` if there is nothing to compare.
pub(super) fn sketch(run: &Run<'_>, rows: &[Row<'_>]) -> Option<Sketch> {
    let ratios: Vec<_> = rows.iter().filter_map(Row::ratio).collect();
    let (least, most) = range(ratios.iter().copied())?;
    let mean = geometric_mean(&ratios)?;
    let x = axis(least.min(0.9), most.max(1.1));
    let mut panel = Panel { x, ..Panel::default() };
    // Cases run from top to bottom, so y is negative downwards from zero.
    let mut y = 0.0;
    for (label, rows) in groups(rows) {
        if rows.iter().all(|row| row.ratio().is_none()) {
            continue;
        }
        y -= 1.0;
        panel.notes.push(Note { at: (panel.x.low, y), text: label, side: Side::Left, bold: true });
        for row in rows {
            let (Some(ratio), Some(rival)) = (row.ratio(), row.best_rival()) else { continue };
            y -= 1.0;
            panel.y.ticks.push((y, row.name()));
            let stem = style::of(OURS, false);
            let stem = Style {
                width: 3,
                marker: None,
                colour: if ratio > 1.0 { stem.colour } else { FAINT },
                ..stem
            };
            let at = (ratio.log2(), y);
            panel.lines.push(Line { points: vec![(0.0, y), at], style: stem, joined: true });
            let dot = style::of(&rival.implementation, false);
            panel.lines.push(Line { points: vec![at], style: dot, joined: false });
            let side = if ratio > 1.0 { Side::Right } else { Side::Left };
            panel.notes.push(Note { at, text: format!("{ratio:.2}"), side, bold: false });
        }
    }
    let one = Style { dashed: false, ..style::CEILING };
    (panel.y.low, panel.y.high) = (y - 0.8, -0.2);
    panel.lines.insert(
        0,
        Line { points: vec![(0.0, panel.y.low), (0.0, panel.y.high)], style: one, joined: true },
    );
    panel.x.label = "blockflash / best rival (logarithmic)".to_owned();
    let best = rows.iter().filter(|row| row.ratio().is_some()).filter_map(|row| row.best_rival());
    let legend = peer_names(best).into_iter().map(|name| {
        let look = style::of(name, false);
        (format!("{name} is the best rival"), Style { width: 0, ..look })
    });
    let names = panel.y.ticks.iter().map(|(_, label)| label);
    let headings = panel.notes.iter().filter(|note| note.bold).map(|note| &note.text);
    let longest = names.chain(headings).map(|text| text.chars().count()).max().unwrap_or(0);
    let figure = Figure {
        title: format!(
            "{}: {mean:.2} × the best rival of each case (geometric mean of {})",
            run.key().1,
            ratios.len()
        ),
        subtitle: subtitle(run, "right of 1: blockflash is faster"),
        legend: legend.collect(),
        columns: 1,
        panel_height: (-y) as u32 * ROW + 60,
        panels: vec![panel],
        y_labels: longest as u32 * 7 + 14,
    };
    // A few cases are as readable in a table, so they make no cover.
    Some(Sketch { name: "ratio".to_owned(), figure, weight: usize::from(ratios.len() > 8) })
}

/// Logarithmic to base 2, with a margin for the numbers at the dots.
fn axis(least: f64, most: f64) -> Axis {
    let (low, high) = (least.log2(), most.log2());
    let margin = (high - low) * 0.09;
    let (low, high) = (low - margin, high + margin);
    let candidates = match high - low {
        ..1.5 => &[0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5][..],
        1.5..4.0 => &[0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
        _ => &[0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0],
    };
    let inside = candidates.iter().map(|&ratio| (f64::log2(ratio), plain(ratio)));
    let ticks = inside.filter(|(at, _)| (low..=high).contains(at)).collect();
    Axis { label: String::new(), low, high, ticks }
}
