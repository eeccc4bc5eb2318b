//! Figures as SVG files.

use super::error::PlotError;
use super::figure::{Figure, Fill};
use super::render;
use crate::io::write_texts;
use plotters::prelude::{IntoDrawingArea, SVGBackend};
use std::fmt::Write;
use std::path::Path;

/// A figure that can be written as SVG.
#[derive(Clone, Debug)]
pub struct Drawing(pub(super) Figure);

impl Drawing {
    /// The text of an SVG file, 900 units wide.
    ///
    /// # Errors
    /// [`PlotError::Drawing`].
    pub fn svg(&self) -> Result<String, PlotError> {
        let mut svg = String::new();
        let fills = {
            let root = SVGBackend::with_string(&mut svg, render::size(&self.0)).into_drawing_area();
            render::draw(&self.0, &root)?
        };
        if let Some(end) = svg.rfind("</svg>") {
            let paths: String = fills.iter().map(path).collect();
            svg.insert_str(end, &paths);
        }
        Ok(svg)
    }

    /// Whether this is the name of an SVG file.
    pub fn accepts(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"))
    }

    /// Writes the drawing to these files: to all of them, or to none.
    ///
    /// # Errors
    /// [`PlotError::Format`] for another extension than `.svg`, [`PlotError::File`],
    /// [`PlotError::Drawing`].
    pub fn write(&self, paths: &[impl AsRef<Path>]) -> Result<(), PlotError> {
        let svg = self.svg()?;
        let paths = paths.iter().map(AsRef::as_ref);
        if let Some(other) = paths.clone().find(|path| !Self::accepts(path)) {
            return Err(PlotError::Format(other.to_owned()));
        }
        Ok(write_texts(&paths.map(|path| (path, svg.as_str())).collect::<Vec<_>>())?)
    }
}

/// One element for all cells of a colour, counted in cells: an element for each would make files of
/// megabytes.
fn path(Fill { colour, origin, cell, areas }: &Fill) -> String {
    let mut path = format!(
        "<path shape-rendering=\"crispEdges\" fill=\"#{:02X}{:02X}{:02X}\" \
         transform=\"translate({} {}) scale({} {})\" d=\"",
        colour.0, colour.1, colour.2, origin[0], origin[1], cell[0], cell[1]
    );
    for [column, row, columns, rows] in areas {
        // Writing into a String does not fail.
        let _ = write!(path, "M{column} {row}h{columns}v{rows}h-{columns}z");
    }
    path + "\"/>\n"
}
