//! Curves over time, such as the loss in training.

use super::drawing::Drawing;
use super::error::PlotError;
use super::figure::{Axis, Figure, Line, Panel};
use super::style::{self, Style};
use crate::report::run::range;

/// A plot of positive values on a logarithmic axis over a count from 0.
#[derive(Clone, Debug)]
pub struct Curves<'a> {
    /// Heading.
    pub title: &'a str,
    /// Place and method of the measurement.
    pub subtitle: &'a str,
    /// Labels of the x axis (the count) and the y axis (the values).
    pub axes: [&'a str; 2],
    /// Names in the order of the legend, with points.
    pub series: &'a [(String, Vec<(f64, f64)>)],
}

impl Curves<'_> {
    /// Draws one panel.
    ///
    /// # Errors
    /// [`PlotError::NoPoints`] without a finite value above 0; other values are not drawn.
    pub fn draw(&self) -> Result<Drawing, PlotError> {
        let drawn = |&&(_, value): &&(f64, f64)| value.is_finite() && value > 0.0;
        let points = || self.series.iter().flat_map(|(_, points)| points).filter(drawn);
        let (least, most) = range(points().map(|&(_, value)| value)).ok_or(PlotError::NoPoints)?;
        let last = points().map(|&(at, _)| at).fold(0.0, f64::max);
        let [x, y] = self.axes;
        let y = Axis::decades(&format!("{y} (logarithmic)"), least / 1.25, most * 1.25);
        let style = |index| Style { width: 2, ..style::group(index) };
        let lines = self.series.iter().enumerate().map(|(index, (_, points))| {
            let points =
                points.iter().filter(drawn).map(|&(at, value)| (at, value.log10())).collect();
            Line { points, style: style(index), joined: true }
        });
        let names = self.series.iter().enumerate();
        Ok(Drawing(Figure {
            title: self.title.to_owned(),
            subtitle: self.subtitle.to_owned(),
            legend: names.map(|(index, (name, _))| (name.clone(), style(index))).collect(),
            columns: 1,
            panels: vec![Panel {
                x: Axis::from_zero(x, last),
                y,
                lines: lines.collect(),
                ..Panel::default()
            }],
            panel_height: 380,
            y_labels: 62,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_over_the_count() {
        let series = [
            ("seen".to_owned(), vec![(0.0, 1.0), (10.0, 0.1), (20.0, 0.0)]),
            ("new".to_owned(), vec![(0.0, 2.0), (20.0, f64::NAN)]),
        ];
        let curves = Curves { title: "t", subtitle: "s", axes: ["step", "loss"], series: &series };
        let figure = curves.draw().unwrap().0;
        let panel = &figure.panels[0];
        // Neither 0 nor NaN has a position on a logarithmic axis.
        assert_eq!(panel.lines[0].points, [(0.0, 0.0), (10.0, -1.0)]);
        assert_eq!(panel.lines[1].points.len(), 1);
        assert_eq!((panel.x.low, panel.y.label.as_str()), (0.0, "loss (logarithmic)"));
        assert!(panel.x.high > 10.0 && panel.y.low < -1.0 && panel.y.high > 2f64.log10());
        let names: Vec<_> = figure.legend.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["seen", "new"]);
        assert!(Drawing(figure).svg().unwrap().contains("step"));
        let none = Curves { series: &[("a".to_owned(), vec![(1.0, -1.0)])], ..curves };
        assert!(matches!(none.draw(), Err(PlotError::NoPoints)));
    }
}
