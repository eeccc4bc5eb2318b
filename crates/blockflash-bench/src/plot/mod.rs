//! Plots: from records speed over lengths and densities, the ratio to the best rival, and
//! rooflines; block masks; what sparsity costs and gains; curves of training.

mod curves;
mod density;
mod drawing;
mod figure;
mod lengths;
mod mask;
mod ratio;
mod render;
mod roofline;
mod speedup;
mod style;
mod tradeoff;

use crate::record::{OURS, Record};
use crate::report::day;
use crate::report::run::{Row, Run, newest, peer_names};
pub use curves::Curves;
pub use drawing::Drawing;
use figure::{Figure, Line};
pub use mask::{MAX_SHOWN, MaskPicture};
pub use speedup::{Speedup, SpeedupLine, SpeedupPanel};
use std::path::PathBuf;
use style::Style;
pub use tradeoff::{Tradeoff, TradeoffPoint};

/// A plot and what it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plot {
    /// Name of a file: suite and what it shows.
    pub file: String,
    /// The suite.
    pub suite: String,
    /// The title, for those who do not see it.
    pub alt: String,
    /// The one to show where there is room for one.
    pub cover: bool,
    /// The picture.
    pub svg: String,
}

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The library that draws has failed.
    #[error("drawing failed: {0}")]
    Drawing(String),
    /// A name that does not say what to write.
    #[error("{}: a picture's name ends in .svg", .0.display())]
    Format(PathBuf),
    /// Nothing to draw.
    #[error("a plot without points")]
    NoPoints,
    /// Too many heads for a picture, or none.
    #[error("a picture shows 1 to {MAX_SHOWN} heads, not {0}")]
    Heads(usize),
    /// A head that the mask does not have.
    #[error("the mask has no head {head} of batch entry {batch}")]
    NoHead {
        /// Batch entry.
        batch: usize,
        /// Head.
        head: usize,
    },
    /// The mask cannot be read.
    #[error(transparent)]
    Mask(#[from] blockflash_ops::Error),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] crate::io::Error),
}

impl<E: std::error::Error + Send + Sync> From<plotters::drawing::DrawingAreaErrorKind<E>>
    for PlotError
{
    fn from(error: plotters::drawing::DrawingAreaErrorKind<E>) -> Self {
        Self::Drawing(error.to_string())
    }
}

/// A figure on its way to a [`Plot`].
struct Sketch {
    /// Behind the name of the suite.
    name: String,
    figure: Figure,
    /// How well it stands for the suite; the greatest is the cover, unless it is 0.
    weight: usize,
}

/// Plots of the newest run of each suite. Names do not say the GPU: give records of one.
///
/// # Errors
/// [`PlotError`].
pub fn plots(records: &[Record]) -> Result<Vec<Plot>, PlotError> {
    let mut plots = Vec::new();
    for run in newest(records) {
        let rows = run.rows();
        let mut sketches = lengths::sketches(&run, &rows);
        sketches.extend(density::sketches(&run, &rows));
        sketches.extend(ratio::sketch(&run, &rows));
        sketches.extend(roofline::sketch(&run, &rows));
        let cover = sketches.iter().map(|sketch| sketch.weight).max().unwrap_or(0);
        let cover = sketches.iter().position(|sketch| cover > 0 && sketch.weight == cover);
        for (index, Sketch { name, figure, .. }) in sketches.into_iter().enumerate() {
            let mut file = format!("{}_{name}.svg", run.key().1);
            // Two operations of a suite may share a head dimension.
            if plots.iter().any(|plot: &Plot| plot.file == file) {
                file = format!("{}_{name}_{index}.svg", run.key().1);
            }
            plots.push(Plot {
                file,
                suite: run.key().1.to_owned(),
                alt: figure.title.clone(),
                cover: cover == Some(index),
                svg: Drawing(figure).svg()?,
            });
        }
    }
    Ok(plots)
}

/// `NVIDIA H200 · 2026-11-21 · commit e49784d4dbd3`, and what it is about.
fn subtitle(run: &Run<'_>, about: &str) -> String {
    let first = run.first();
    format!("{} · {} · commit {} · {about}", first.gpu, day(first), run.commits())
}

const SPEED: &str = "TFLOP/s";
const ABOUT_SPEED: &str = "TFLOP/s by useful operations, higher is better";

/// Names and looks of all that were measured in these cases, rivals first: who comes last is drawn
/// on top.
fn implementations<'r>(rows: &[&Row<'r>]) -> Vec<(&'r str, Style)> {
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
    // Marks below rivals.
    names.sort_by_key(|(_, style)| !style.dashed);
    if rows.iter().any(|row| row.best().is_some()) {
        names.push((OURS, style::of(OURS, false)));
    }
    names
}

/// TFLOP/s of an implementation in a case.
fn speed(row: &Row<'_>, name: &str) -> Option<f64> {
    let record = if name == OURS { row.best() } else { row.peer(name) };
    record.filter(|record| record.us.is_some())?.tflops
}

/// The legend of figures with a line for each implementation: ours, rivals, marks.
fn legend(implementations: &[(&str, Style)]) -> Vec<(String, Style)> {
    let name = |&(name, style): &(&str, Style)| match style.dashed {
        // Its own rate is higher: zeros are multiplied as well.
        true => (format!("{name} (dense product, useful part)"), style),
        false => (name.to_owned(), style),
    };
    let ours = implementations.iter().filter(|(name, _)| *name == OURS);
    let rivals = implementations.iter().filter(|(name, style)| *name != OURS && !style.dashed);
    let marks = implementations.iter().filter(|(_, style)| style.dashed);
    ours.chain(rivals).chain(marks).map(name).collect()
}

/// One line per implementation through cases at their places.
fn lines(points: &[(f64, &Row<'_>)], implementations: &[(&str, Style)]) -> Vec<Line> {
    let line = |&(name, style): &(&str, Style)| {
        let points = points.iter().filter_map(|(x, row)| Some((*x, speed(row, name)?)));
        Line { points: points.collect(), style, joined: true }
    };
    implementations.iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

/// The greatest y of some lines.
fn highest<'a>(lines: impl Iterator<Item = &'a Line>) -> f64 {
    lines.flat_map(|line| &line.points).map(|&(_, y)| y).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests;
