//! Cost and gain of visiting fewer blocks.

use super::drawing::Drawing;
use super::error::PlotError;
use super::figure::{Axis, Figure, Line, Panel, plain};
use super::style;
use crate::report::run::range;

/// One choice of blocks, compared with dense attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TradeoffPoint {
    /// Fraction of the pairs that are visited, above 0.
    pub density: f64,
    /// ‖output − dense output‖ / ‖dense output‖.
    pub error: f64,
    /// Speed-up over dense attention.
    pub speedup: f64,
}

/// A plot of error and speed-up over the density, with a line for each way to choose blocks.
#[derive(Clone, Debug)]
pub struct Tradeoff<'a> {
    /// Heading.
    pub title: &'a str,
    /// Place and method of the measurement.
    pub subtitle: &'a str,
    /// Ways to choose, in the order of the legend.
    pub series: &'a [(String, Vec<TradeoffPoint>)],
}

impl Tradeoff<'_> {
    /// Draws two panels side by side.
    ///
    /// # Errors
    /// [`PlotError::NoPoints`] without a point of positive density. Errors of 0 are not drawn.
    pub fn draw(&self) -> Result<Drawing, PlotError> {
        let points = || {
            self.series.iter().flat_map(|(_, points)| points).filter(|point| point.density > 0.0)
        };
        let densities = range(points().map(|point| point.density)).ok_or(PlotError::NoPoints)?;
        let x = percent_axis("visited pairs (logarithmic)", densities);
        let errors = range(points().map(|point| point.error).filter(|&error| error > 0.0));
        let (least, most) = errors.unwrap_or((0.01, 1.0));
        let y = percent_axis("relative error (logarithmic)", (least, most));
        let fastest = points().map(|point| point.speedup).fold(1.0, f64::max);
        let speed = Axis::from_zero("times as fast as dense", fastest * 1.15);
        let lines = |value: fn(&TradeoffPoint) -> Option<f64>| -> Vec<Line> {
            let line = |(index, (_, points)): (usize, &(String, Vec<TradeoffPoint>))| {
                let points = points.iter().filter(|point| point.density > 0.0);
                let mut points: Vec<_> = points
                    .filter_map(|point| Some((point.density.log10(), value(point)?)))
                    .collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                Line { points, style: style::choice(index), joined: true }
            };
            self.series.iter().enumerate().map(line).collect()
        };
        let errors = lines(|point| (point.error > 0.0).then(|| point.error.log10()));
        let mut speeds = vec![proportional(&x, speed.high)];
        let one = vec![(x.low, 1.0), (x.high, 1.0)];
        speeds.push(Line { points: one, style: style::CEILING_OF_EXP, joined: true });
        speeds.extend(lines(|point| Some(point.speedup)));
        let mut legend: Vec<_> = self
            .series
            .iter()
            .enumerate()
            .map(|(index, (name, _))| (name.clone(), style::choice(index)))
            .collect();
        legend.push(("1 / density".to_owned(), style::CEILING));
        legend.push(("dense".to_owned(), style::CEILING_OF_EXP));
        let panel = |title: &str, y, lines| Panel {
            title: title.to_owned(),
            x: x.clone(),
            y,
            lines,
            ..Panel::default()
        };
        Ok(Drawing(Figure {
            title: self.title.to_owned(),
            subtitle: self.subtitle.to_owned(),
            legend,
            columns: 2,
            panels: vec![
                panel("error against dense attention", y, errors),
                panel("speed-up", speed, speeds),
            ],
            panel_height: 320,
            y_labels: 62,
        }))
    }
}

/// A logarithmic axis from slightly below to slightly above two positive values.
pub(super) fn percent_axis(label: &str, (least, most): (f64, f64)) -> Axis {
    let axis = Axis::decades(label, least / 1.25, most * 1.25);
    let percent = |(at, _): (f64, String)| (at, format!("{} %", plain(100.0 * 10f64.powf(at))));
    Axis { ticks: axis.ticks.into_iter().map(percent).collect(), ..axis }
}

/// The speed-up if time were proportional to the visited pairs, within the range of the panel.
fn proportional(x: &Axis, most: f64) -> Line {
    let low = x.low.max(-most.log10());
    let places = (0..=64).map(|step| low + (x.high - low) * f64::from(step) / 64.0);
    let points = places.map(|at| (at, 10f64.powf(-at).min(most)));
    Line {
        points: if low < x.high { points.collect() } else { Vec::new() },
        style: style::CEILING,
        joined: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(density: f64, error: f64, speedup: f64) -> TradeoffPoint {
        TradeoffPoint { density, error, speedup }
    }

    #[test]
    fn error_and_speed_stand_over_the_density() {
        let series = [
            ("top-k".to_owned(), vec![point(0.1, 0.02, 7.0), point(0.02, 0.1, 20.0)]),
            ("window".to_owned(), vec![point(0.1, 0.5, 7.5), point(1.0, 0.0, 1.0)]),
        ];
        let figure = Tradeoff { title: "t", subtitle: "s", series: &series }.draw().unwrap().0;
        let [errors, speeds] = &figure.panels[..] else { panic!("{} panels", figure.panels.len()) };
        assert_eq!(errors.lines[0].points, [(0.02f64.log10(), -1.0), (-1.0, 0.02f64.log10())]);
        // An error of 0 has no logarithm.
        assert_eq!((errors.lines[1].points.len(), speeds.lines[3].points.len()), (1, 2));
        let ticks: Vec<_> = errors.x.ticks.iter().map(|(_, label)| label.as_str()).collect();
        assert_eq!(ticks, ["2 %", "5 %", "10 %", "20 %", "50 %", "100 %"]);
        // Proportional, and within the panel.
        let ideal = &speeds.lines[0].points;
        for &(x, y) in ideal {
            approx::assert_abs_diff_eq!(y, 10f64.powf(-x), epsilon = 1e-9);
            assert!(y <= speeds.y.high);
        }
        let names: Vec<_> = figure.legend.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["top-k", "window", "1 / density", "dense"]);
        let drawing = Drawing(figure);
        assert!(drawing.svg().unwrap().contains("speed-up"));
    }

    #[test]
    fn nothing_is_no_picture() {
        let series = [("a".to_owned(), vec![point(0.0, 0.0, 1.0)])];
        let error = Tradeoff { title: "t", subtitle: "s", series: &series }.draw().unwrap_err();
        assert!(matches!(error, PlotError::NoPoints));
    }
}
