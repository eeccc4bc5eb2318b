//! Plots of suites.

use super::drawing::Drawing;
use super::error::PlotError;
use super::series::Sketch;
use super::{bandwidth, density, lengths, ratio, roofline};
use crate::record::Record;
use crate::report::run::newest;

/// A plot and its file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plot {
    /// File name: the suite and the content of the plot.
    pub file: String,
    /// The suite.
    pub suite: String,
    /// Alternative text for readers who do not see the image.
    pub alt: String,
    /// Whether the plot represents its suite where only one is shown.
    pub cover: bool,
    /// The image.
    pub svg: String,
}

/// Plots of the newest run of each suite. File names do not contain the GPU, so pass the records of
/// one GPU only.
///
/// # Errors
/// [`PlotError`].
pub fn plots(records: &[Record]) -> Result<Vec<Plot>, PlotError> {
    let mut plots = Vec::new();
    for run in newest(records) {
        let rows = run.rows();
        let mut sketches = lengths::sketches(&run, &rows);
        sketches.extend(bandwidth::sketch(&run, &rows));
        sketches.extend(density::sketches(&run, &rows));
        sketches.extend(ratio::sketch(&run, &rows));
        sketches.extend(roofline::sketch(&run, &rows));
        let cover = sketches.iter().map(|sketch| sketch.weight).max().unwrap_or(0);
        let cover = sketches.iter().position(|sketch| cover > 0 && sketch.weight == cover);
        for (index, Sketch { name, figure, .. }) in sketches.into_iter().enumerate() {
            let mut file = format!("{}_{name}.svg", run.key().1);
            // Two operations of a suite may have the same head dimension, and so the same file
            // name.
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
