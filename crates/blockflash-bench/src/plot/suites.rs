//! Plots of suites.

use super::drawing::Drawing;
use super::error::PlotError;
use super::series::Sketch;
use super::{density, lengths, ratio, roofline};
use crate::record::Record;
use crate::report::run::newest;

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

#[cfg(test)]
mod tests;
