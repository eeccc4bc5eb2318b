//! Parts that the figures of a run share.

use super::figure::{Figure, Line};
use super::style::{self, Style};
use crate::record::OURS;
use crate::report::day;
use crate::report::run::{Row, Run, peer_names};

/// A figure before it becomes a [`Plot`].
pub(super) struct Sketch {
    /// Suffix behind the name of the suite.
    pub(super) name: String,
    pub(super) figure: Figure,
    /// How well the figure represents the suite: the greatest weight becomes the cover, 0 never
    /// does.
    pub(super) weight: usize,
}

/// `NVIDIA H200 · 2026-11-21 · commit e49784d4dbd3`, followed by the subject of the figure.
pub(super) fn subtitle(run: &Run<'_>, about: &str) -> String {
    let first = run.first();
    format!("{} · {} · commit {} · {about}", first.gpu, day(first), run.commits())
}

pub(super) const SPEED: &str = "TFLOP/s";
pub(super) const ABOUT_SPEED: &str = "TFLOP/s by useful operations, higher is better";

/// Names and styles of all implementations that were measured in these cases. Rivals come first,
/// because later lines are drawn on top.
pub(super) fn implementations<'r>(rows: &[&Row<'r>]) -> Vec<(&'r str, Style)> {
    let peers =
        || rows.iter().flat_map(|row| row.peers.iter().copied()).filter(|peer| peer.us.is_some());
    let mut names: Vec<_> = peer_names(peers())
        .into_iter()
        .map(|name| {
            (
                name,
                style::of(name, peers().any(|peer| peer.implementation == name && peer.reference)),
            )
        })
        .collect();
    // Marks are drawn below rivals.
    names.sort_by_key(|(_, style)| !style.dashed);
    if rows.iter().any(|row| row.best().is_some()) {
        names.push((OURS, style::of(OURS, false)));
    }
    names
}

/// TFLOP/s of an implementation in a case.
pub(super) fn speed(row: &Row<'_>, name: &str) -> Option<f64> {
    let record = if name == OURS { row.best() } else { row.peer(name) };
    record.filter(|record| record.us.is_some())?.tflops
}

/// The legend of figures with a line for each implementation: ours, rivals, marks.
pub(super) fn legend(implementations: &[(&str, Style)]) -> Vec<(String, Style)> {
    let name = |&(name, style): &(&str, Style)| match style.dashed {
        // The dense product itself runs at a higher rate: it also multiplies the zeros.
        true => (format!("{name} (dense product, useful part)"), style),
        false => (name.to_owned(), style),
    };
    let ours = implementations.iter().filter(|(name, _)| *name == OURS);
    let rivals = implementations.iter().filter(|(name, style)| *name != OURS && !style.dashed);
    let marks = implementations.iter().filter(|(_, style)| style.dashed);
    ours.chain(rivals).chain(marks).map(name).collect()
}

/// One line per implementation through its speeds at the positions of the cases.
pub(super) fn lines(points: &[(f64, &Row<'_>)], implementations: &[(&str, Style)]) -> Vec<Line> {
    let line = |&(name, style): &(&str, Style)| {
        let points = points.iter().filter_map(|(x, row)| Some((*x, speed(row, name)?)));
        Line { points: points.collect(), style, joined: true }
    };
    implementations.iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

/// The greatest y value of the lines.
pub(super) fn highest<'a>(lines: impl Iterator<Item = &'a Line>) -> f64 {
    lines.flat_map(|line| &line.points).map(|&(_, y)| y).fold(0.0, f64::max)
}
