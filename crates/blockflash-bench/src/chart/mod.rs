//! Charts: panels of lines, marks and cells under one title and legend, as SVG files.

mod draw;
mod mask;
mod style;

pub(crate) use mask::length;
pub use mask::{MAX_SHOWN, MaskPicture};
pub use style::{CEILING, DENSE, LIMIT, Marker, Style, group, of};

use crate::io::write_texts;
use std::path::{Path, PathBuf};

/// Panels of equal size, row by row. It is 900 units wide, as a page of a README.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Heading.
    pub title: String,
    /// Place, date and method of the measurement.
    pub subtitle: String,
    /// At least one.
    pub panels: Vec<Panel>,
    /// Panels in a row.
    pub columns: usize,
    /// Height of a panel in pixels, including its axes.
    pub panel_height: u32,
}

/// One pair of axes.
#[derive(Clone, Debug, Default)]
pub struct Panel {
    /// What is special about it; may be empty.
    pub title: String,
    /// The axis below.
    pub x: Axis,
    /// The axis at the left.
    pub y: Axis,
    /// The first one is drawn last, on top.
    pub lines: Vec<Line>,
    /// Texts at points.
    pub notes: Vec<Note>,
    /// A second row of labels below the x axis.
    pub x_groups: Vec<(f64, String)>,
    /// A raster below the lines that fills the panel.
    pub cells: Option<Cells>,
}

/// A range of values with labelled ticks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// Name and unit.
    pub label: String,
    /// The value at the left, or below.
    pub low: f64,
    /// The value at the right, or above.
    pub high: f64,
    /// Logarithmic; both ends are above 0 then.
    pub log: bool,
    /// Values and their labels.
    pub ticks: Vec<(f64, String)>,
}

/// Points, and their entry in the legend.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Name in the legend, in which it stands once, in the style of its first line; may be empty.
    pub name: String,
    /// x and y in units of the axes.
    pub points: Vec<(f64, f64)>,
    /// Colour, width and mark.
    pub style: Style,
    /// Only the marks are drawn, no line.
    pub apart: bool,
}

/// A text at a point.
#[derive(Clone, Debug)]
pub struct Note {
    /// The point.
    pub at: (f64, f64),
    /// One line.
    pub text: String,
    /// Where the text is, seen from the point.
    pub side: Side,
    /// Bold.
    pub bold: bool,
}

/// Position of a text relative to its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It ends at the point.
    Left,
    /// It begins at the point.
    Right,
    /// It ends at the point, above it.
    AboveLeft,
}

/// A raster: how dark each cell is, from 0 for nothing to [`SHADES`](Self::SHADES).
#[derive(Clone, Debug, Default)]
pub struct Cells {
    /// Cells in a row.
    pub columns: usize,
    /// Row-major, the top row first.
    pub shades: Vec<u8>,
}

/// Why a chart cannot be drawn or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChartError {
    /// The drawing library fails.
    #[error("drawing failed: {0}")]
    Drawing(String),
    /// A file name without the extension .svg.
    #[error("{}: the name of a picture must end in .svg", .0.display())]
    Format(PathBuf),
    /// Nothing to draw.
    #[error("the chart has no points")]
    NoPoints,
    /// Too many heads for a picture of a mask, or none.
    #[error("a picture shows 1 to {MAX_SHOWN} heads, not {0}")]
    Heads(usize),
    /// A head that the mask does not have.
    #[error(
        "the mask has {} batch entries of {} heads, no head {head} of batch entry {batch}",
        has[0], has[1]
    )]
    NoHead {
        /// Batch entry.
        batch: usize,
        /// Head.
        head: usize,
        /// Batch entries and heads of the mask.
        has: [usize; 2],
    },
    /// The mask cannot be read.
    #[error(transparent)]
    Mask(#[from] blockflash_ops::Error),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] crate::io::Error),
}

impl Chart {
    /// Whether this is the name of an SVG file.
    pub fn accepts(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("svg"))
    }

    /// Writes the chart to these files: to all of them, or to none.
    ///
    /// # Errors
    /// [`ChartError::Format`] for another extension than `.svg`, [`ChartError::NoPoints`] if
    /// nothing would be drawn, [`ChartError::File`], [`ChartError::Drawing`].
    pub fn write(&self, paths: &[impl AsRef<Path>]) -> Result<(), ChartError> {
        let svg = self.svg()?;
        let paths = paths.iter().map(AsRef::as_ref);
        if let Some(other) = paths.clone().find(|path| !Self::accepts(path)) {
            return Err(ChartError::Format(other.to_owned()));
        }
        Ok(write_texts(&paths.map(|path| (path, svg.as_str())).collect::<Vec<_>>())?)
    }

    /// Names and styles of the legend.
    fn legend(&self) -> Vec<(&str, Style)> {
        let mut legend: Vec<(&str, Style)> = Vec::new();
        for line in self.panels.iter().flat_map(|panel| &panel.lines) {
            if !line.name.is_empty() && !legend.iter().any(|(name, _)| *name == line.name) {
                legend.push((&line.name, line.style));
            }
        }
        legend
    }
}

impl Panel {
    /// The greatest y value of the lines, at least 0.
    pub fn highest(&self) -> f64 {
        self.lines.iter().flat_map(|line| &line.points).map(|&(_, y)| y).fold(0.0, f64::max)
    }

    /// A line through the panel at one y value, below the others.
    pub fn level(&mut self, name: impl Into<String>, y: f64, style: Style) {
        let points = vec![(self.x.low, y), (self.x.high, y)];
        self.lines.push(Line { name: name.into(), points, style, apart: false });
    }

    /// A text above the right end of a level.
    pub fn note(&mut self, y: f64, text: String) {
        let side = Side::AboveLeft;
        self.notes.push(Note { at: (self.x.high, y), text, side, bold: false });
    }
}

impl Axis {
    /// From zero to slightly above the greatest value, with round ticks.
    pub fn from_zero(label: &str, most: f64) -> Self {
        let high = if most > 0.0 { most * 1.07 } else { 1.0 };
        Self { label: label.to_owned(), high, ..Self::default() }.with_round_ticks(5.0)
    }

    /// Logarithmic between two positive values, which may be equal, with a margin.
    pub fn log(label: &str, (least, most): (f64, f64)) -> Self {
        let (low, high) = (least / 1.15, most * 1.15);
        let axis = Self { label: label.to_owned(), low, high, log: true, ticks: Vec::new() };
        let digits: &[f64] = match high / low {
            ..3.0 => return axis.with_round_ticks(6.0),
            ..10.0 => &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
            ..1000.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let exponents = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let values = exponents.flat_map(|e| digits.iter().map(move |digit| digit * 10f64.powi(e)));
        let inside = values.filter(|value| (low..=high).contains(value));
        Self { ticks: inside.map(|value| (value, plain(value))).collect(), ..axis }
    }

    /// Logarithmic, with a tick at each of some positive values.
    pub fn log_at(label: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (low, high) =
            (values.first().copied().unwrap_or(1.0), values.last().copied().unwrap_or(1.0));
        let margin = if high > low { (high / low).powf(0.05) } else { 2.0 };
        let ticks = values.iter().map(|&value| (value, plain(value))).collect();
        let (low, high) = (low / margin, high * margin);
        Self { label: label.to_owned(), low, high, log: true, ticks }
    }

    /// About `count` ticks at multiples of 1, 2, 2.5 or 5 times a power of ten.
    fn with_round_ticks(mut self, count: f64) -> Self {
        let least = (self.high - self.low) / count;
        let power = 10f64.powf(least.log10().floor());
        let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|digit| digit * power);
        let step = steps.into_iter().find(|&step| step >= least).unwrap_or(10.0 * power);
        let numbers = (self.low / step).ceil() as i64..=(self.high / step).floor() as i64;
        self.ticks = numbers.map(|n| n as f64 * step).map(|at| (at, plain(at))).collect();
        self
    }
}

/// The number without trailing zeros: 0.25, 16384.
pub(crate) fn plain(value: f64) -> String {
    let text = format!("{value:.5}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_or_at_the_values() {
        assert_eq!(labels(&Axis::from_zero("", 832.0)), ["0", "200", "400", "600", "800"]);
        assert_eq!(labels(&Axis::from_zero("", 0.0)), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        let lengths = Axis::log_at("", [2048.0, 512.0, 2048.0]);
        assert_eq!(labels(&lengths), ["512", "2048"]);
        assert!(lengths.low < 512.0 && lengths.high > 2048.0);
        assert_eq!(labels(&Axis::log("", (0.3, 11.0))), ["0.5", "1", "2", "5", "10"]);
        assert_eq!(labels(&Axis::log("", (3.0, 9.0))), ["3", "4", "5", "6", "8", "10"]);
        let near = Axis::log("", (0.9, 1.4));
        assert_eq!(labels(&near), ["0.8", "1", "1.2", "1.4", "1.6"]);
        assert_eq!(plain(0.03125), "0.03125");
    }

    #[test]
    fn a_chart_has_its_texts_and_refuses_what_it_cannot_show() {
        let line = Line { name: "ours".into(), points: vec![(1.0, 2.0)], ..Line::default() };
        let x = Axis::from_zero("steps", 2.0);
        let panel = Panel { y: x.clone(), x, lines: vec![line], ..Panel::default() };
        let chart = Chart { title: "t < u".into(), panels: vec![panel], ..Chart::default() };
        let svg = chart.svg().unwrap();
        assert!(["t &lt; u", "ours", "steps"].iter().all(|text| svg.contains(text)), "{svg}");
        assert!(matches!(chart.write(&["a.png"]), Err(ChartError::Format(_))));
        assert!(matches!(Chart::default().svg(), Err(ChartError::NoPoints)));
    }
}
