//! What several devices did when.

use super::drawing::Drawing;
use super::error::PlotError;
use super::figure::{Axis, Figure, Line, Panel};
use super::style::{self, Style};

/// Bars over time in lanes, one lane above the other.
#[derive(Clone, Debug)]
pub struct Timeline<'a> {
    /// Heading.
    pub title: &'a str,
    /// Place and method of the measurement.
    pub subtitle: &'a str,
    /// Label of the time axis.
    pub axis: &'a str,
    /// From top to bottom.
    pub lanes: &'a [Lane],
}

/// One line of a timeline.
#[derive(Clone, Debug, Default)]
pub struct Lane {
    /// Stands before the bars.
    pub name: String,
    /// Lanes of one kind have one colour and one entry in the legend.
    pub kind: usize,
    /// That entry.
    pub kind_name: String,
    /// Beginnings and ends.
    pub bars: Vec<(f64, f64)>,
}

/// Height of a lane in pixels.
const LANE: u32 = 34;

impl Timeline<'_> {
    /// Draws one panel.
    ///
    /// # Errors
    /// [`PlotError::NoPoints`] without a bar.
    pub fn draw(&self) -> Result<Drawing, PlotError> {
        let ends = self.lanes.iter().flat_map(|lane| &lane.bars).map(|&(_, end)| end);
        let last = ends.fold(0.0, f64::max);
        if last <= 0.0 {
            return Err(PlotError::NoPoints);
        }
        let count = self.lanes.len();
        let height = |lane: usize| (count - lane) as f64 - 0.5;
        let style = |lane: &Lane| Style { width: LANE / 2, ..style::group(lane.kind) };
        let mut legend: Vec<(String, Style)> = Vec::new();
        let mut lines = Vec::new();
        for (at, lane) in self.lanes.iter().enumerate() {
            if !legend.iter().any(|(name, _)| *name == lane.kind_name) {
                let style = Style { width: 6, marker: None, ..style(lane) };
                legend.push((lane.kind_name.clone(), style));
            }
            // A hair of space keeps bars apart that follow each other.
            let gap = last * 1e-3;
            for &(start, end) in &lane.bars {
                let end = (end - gap).max(start);
                let points = vec![(start, height(at)), (end, height(at))];
                let style = Style { marker: None, ..style(lane) };
                lines.push(Line { points, style, joined: true });
            }
        }
        let names = self.lanes.iter().enumerate();
        let ticks = names.map(|(at, lane)| (height(at), lane.name.clone())).collect();
        Ok(Drawing(Figure {
            title: self.title.to_owned(),
            subtitle: self.subtitle.to_owned(),
            legend,
            columns: 1,
            panels: vec![Panel {
                x: Axis::from_zero(self.axis, last),
                y: Axis { label: String::new(), low: 0.0, high: count as f64, ticks },
                lines,
                ..Panel::default()
            }],
            panel_height: 80 + LANE * count as u32,
            y_labels: 130,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_lie_below_each_other() {
        let lane = |name: &str, kind, bars: &[(f64, f64)]| Lane {
            name: name.to_owned(),
            kind,
            kind_name: ["attention", "exchange"][kind].to_owned(),
            bars: bars.to_vec(),
        };
        let lanes = [
            lane("rank 0", 0, &[(0.0, 4.0), (4.0, 10.0)]),
            lane("", 1, &[(1.0, 3.0)]),
            lane("rank 1", 0, &[(0.0, 9.0)]),
        ];
        let timeline = Timeline { title: "t", subtitle: "s", axis: "ms", lanes: &lanes };
        let figure = timeline.draw().unwrap().0;
        assert_eq!(figure.legend.len(), 2);
        let panel = &figure.panels[0];
        assert_eq!(panel.lines.len(), 4);
        assert_eq!(panel.y.ticks[2], (0.5, "rank 1".to_owned()));
        assert!(panel.lines[0].points[0].1 > panel.lines[2].points[0].1);
        assert!(Drawing(figure).svg().unwrap().contains("rank 1"));
        let none = Timeline { lanes: &[], ..timeline };
        assert!(matches!(none.draw(), Err(PlotError::NoPoints)));
    }
}
