//! Figures as files.

use super::canvas::Canvas;
use super::figure::{Figure, Fill};
use super::{PlotError, render};
use crate::io::{Error, Replacement};
use plotters::prelude::{DrawingArea, IntoDrawingArea, SVGBackend};
use std::cell::RefCell;
use std::fmt::Write;
use std::io::Write as _;
use std::path::Path;
use std::rc::Rc;

/// A figure that can be written as SVG or PNG.
#[derive(Clone, Debug)]
pub struct Drawing(pub(super) Figure);

/// Kinds of picture files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureFormat {
    /// Lines and text: sharp in any size.
    Svg,
    /// Pixels, two per unit of the SVG.
    Png,
}

impl PictureFormat {
    /// From the extension, in any case; `None` for another one.
    pub fn of(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?;
        let is = |name: &str| extension.eq_ignore_ascii_case(name);
        is("svg").then_some(Self::Svg).or(is("png").then_some(Self::Png))
    }
}

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

    /// The bytes of a PNG file, 1800 pixels wide.
    ///
    /// # Errors
    /// [`PlotError::Drawing`].
    pub fn png(&self) -> Result<Vec<u8>, PlotError> {
        let canvas = Rc::new(RefCell::new(Canvas::new(render::size(&self.0))));
        let fills = render::draw(&self.0, &DrawingArea::from(&canvas))?;
        let mut canvas = canvas.borrow_mut();
        fills.iter().for_each(|fill| canvas.fill(fill));
        Ok(canvas.png())
    }

    /// Writes files, whose names say the format: all of them, or none.
    ///
    /// # Errors
    /// [`PlotError::Format`] for another extension than `.svg` and `.png`, [`PlotError::File`],
    /// [`PlotError::Drawing`].
    pub fn write(&self, paths: &[impl AsRef<Path>]) -> Result<(), PlotError> {
        let beside = |path: &Path| -> Result<Replacement, PlotError> {
            let bytes = match PictureFormat::of(path) {
                Some(PictureFormat::Svg) => self.svg()?.into_bytes(),
                Some(PictureFormat::Png) => self.png()?,
                None => return Err(PlotError::Format(path.to_owned())),
            };
            let mut file = Replacement::begin(path)?;
            file.write_all(&bytes)
                .map_err(|error| Error { path: path.to_owned(), problem: error.into() })?;
            Ok(file)
        };
        let files = paths.iter().map(|path| beside(path.as_ref())).collect::<Result<_, _>>()?;
        Ok(Replacement::commit(files)?)
    }
}

/// One element for all cells of a colour, counted in cells: an element for each would make files of
/// megabytes.
fn path(Fill { colour, origin, cell, areas }: &Fill) -> String {
    let mut path = format!(
        "<path shape-rendering=\"crispEdges\" fill=\"#{:02X}{:02X}{:02X}\" transform=\"translate({} {}) scale({} {})\" d=\"",
        colour.0, colour.1, colour.2, origin[0], origin[1], cell[0], cell[1]
    );
    for [column, row, columns, rows] in areas {
        // Writing into a String does not fail.
        let _ = write!(path, "M{column} {row}h{columns}v{rows}h-{columns}z");
    }
    path + "\"/>\n"
}
