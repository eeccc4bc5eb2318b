//! Content of a plot before it is drawn.

use super::style::{SHADES, Style};
use plotters::style::RGBColor;

/// Panels under a common title and legend.
#[derive(Clone, Debug, Default)]
pub(super) struct Figure {
    pub(super) title: String,
    /// Place and date of the measurement.
    pub(super) subtitle: String,
    pub(super) legend: Vec<(String, Style)>,
    pub(super) panels: Vec<Panel>,
    pub(super) columns: usize,
    /// Height of a panel in pixels, including its axes.
    pub(super) panel_height: u32,
    /// Width in pixels of the labels left of the y axis.
    pub(super) y_labels: u32,
}

/// One pair of axes.
#[derive(Clone, Debug, Default)]
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    /// Raster below the lines, as large as the axes.
    pub(super) cells: Option<Cells>,
    pub(super) lines: Vec<Line>,
    pub(super) notes: Vec<Note>,
    /// A second row of labels below the x axis.
    pub(super) x_groups: Vec<(f64, String)>,
}

/// A raster that fills its panel.
#[derive(Clone, Debug, Default)]
pub(super) struct Cells {
    pub(super) columns: usize,
    /// Row-major, the top row first: how dark each cell is, from 0 for nothing to
    /// [`SHADES`](Self::SHADES).
    pub(super) shades: Vec<u8>,
}

/// Cells of one colour, as areas of the raster.
#[derive(Clone, Debug)]
pub(super) struct Fill {
    pub(super) colour: RGBColor,
    /// Position of the first cell and size of a cell, in pixels of the figure.
    pub(super) origin: [f64; 2],
    pub(super) cell: [f64; 2],
    /// Areas in cells: column and row of the first cell, width and height.
    pub(super) areas: Vec<[usize; 4]>,
}

/// An axis is linear in its values: for a logarithmic axis the caller passes logarithms, and labels
/// with the original numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Axis {
    /// Name and unit.
    pub(super) label: String,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ticks: Vec<(f64, String)>,
}

/// Points that are joined, unless `joined` is false.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) points: Vec<(f64, f64)>,
    pub(super) style: Style,
    pub(super) joined: bool,
}

/// A text at a point.
#[derive(Clone, Debug)]
pub(super) struct Note {
    pub(super) at: (f64, f64),
    pub(super) text: String,
    pub(super) side: Side,
    pub(super) bold: bool,
}

/// Position of the text relative to its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
    /// Above, ending at the point.
    AboveLeft,
}

impl Cells {
    /// The darkest shade.
    pub(super) const SHADES: u8 = SHADES;

    /// Areas of each shade, from background to foreground. `frame` is the frame of the panel in
    /// pixels: left, top, right, bottom.
    pub(super) fn fills(
        &self,
        [left, top, right, bottom]: [f64; 4],
        colour: impl Fn(u8) -> RGBColor,
    ) -> Vec<Fill> {
        let rows = self.shades.len().checked_div(self.columns).unwrap_or(0);
        let cell =
            [(right - left) / self.columns.max(1) as f64, (bottom - top) / rows.max(1) as f64];
        let fill =
            |shade| Fill { colour: colour(shade), origin: [left, top], cell, areas: Vec::new() };
        let mut fills: Vec<_> = (0..=Self::SHADES).map(fill).collect();
        // The background covers the whole panel.
        fills[0].areas.push([0, 0, self.columns, rows]);
        for (row, shades) in self.shades.chunks_exact(self.columns.max(1)).enumerate() {
            let mut column = 0;
            for run in shades.chunk_by(|a, b| a == b) {
                if run[0] > 0 {
                    fills[usize::from(run[0].min(Self::SHADES))].areas.push([
                        column,
                        row,
                        run.len(),
                        1,
                    ]);
                }
                column += run.len();
            }
        }
        fills.retain(|fill| !fill.areas.is_empty());
        fills
    }
}

impl Axis {
    /// Axis from zero to slightly above the greatest value, with round ticks.
    pub(super) fn from_zero(label: &str, most: f64) -> Self {
        let high = if most > 0.0 { most * 1.07 } else { 1.0 };
        let step = step(high / 5.0);
        let count = (high / step).floor() as usize;
        let ticks =
            (0..=count).map(|tick| tick as f64 * step).map(|value| (value, plain(value))).collect();
        Self { label: label.to_owned(), low: 0.0, high, ticks }
    }

    /// Logarithmic to base 2, with a tick at each value.
    pub(super) fn of_values(label: &str, values: &[f64]) -> Self {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let logs: Vec<_> = values.iter().map(|value| value.log2()).collect();
        let (low, high) =
            (logs.first().copied().unwrap_or(0.0), logs.last().copied().unwrap_or(1.0));
        let margin = if high > low { (high - low) * 0.05 } else { 1.0 };
        let ticks = logs.iter().zip(&values).map(|(&log, &value)| (log, plain(value))).collect();
        Self { label: label.to_owned(), low: low - margin, high: high + margin, ticks }
    }

    /// Logarithmic to base 10 between two values, with ticks at 1, 2 and 5, and at more digits if
    /// the values are less than a decade apart.
    pub(super) fn decades(label: &str, low: f64, high: f64) -> Self {
        let exponents = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let digits: &[f64] = match high / low {
            ..10.0 => &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
            10.0..1000.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let values = exponents
            .flat_map(|exponent| digits.iter().map(move |digit| digit * 10f64.powi(exponent)));
        let inside = values.filter(|&value| value >= low && value <= high);
        let ticks = inside.map(|value| (value.log10(), plain(value))).collect();
        Self { label: label.to_owned(), low: low.log10(), high: high.log10(), ticks }
    }
}

/// The next greater round number: 1, 2, 2.5 or 5 times a power of ten.
fn step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.log10().floor());
    let digits = [1.0, 2.0, 2.5, 5.0, 10.0].map(|digit| digit * power);
    digits.into_iter().find(|&step| step >= at_least).unwrap_or(10.0 * power)
}

/// The number without trailing zeros: 0.25, 16384.
pub(super) fn plain(value: f64) -> String {
    let text = format!("{value:.5}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// `16k` for 16384.
pub(super) fn length(length: usize) -> String {
    match length % 1024 {
        0 if length > 0 => format!("{}k", length / 1024),
        _ => length.to_string(),
    }
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
        let lengths = Axis::of_values("", &[2048.0, 512.0, 2048.0]);
        assert_eq!((labels(&lengths), lengths.ticks[0].0), (vec!["512", "2048"], 9.0));
        assert!(lengths.low < 9.0 && lengths.high > 11.0);
        assert_eq!(labels(&Axis::decades("", 0.3, 11.0)), ["0.5", "1", "2", "5", "10"]);
        assert_eq!(labels(&Axis::decades("", 2.6, 11.0)), ["3", "4", "5", "6", "8", "10"]);
        assert_eq!(plain(0.03125), "0.03125");
    }
}
