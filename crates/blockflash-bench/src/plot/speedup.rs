//! How many times as fast sparse weights are as dense ones.

use super::drawing::Drawing;
use super::error::PlotError;
use super::figure::{Axis, Figure, Line, Panel};
use super::style::{self, Style};
use super::tradeoff::percent_axis;
use crate::report::run::range;

/// A picture of speed-ups over densities, both logarithmic, with equal axes for all panels.
#[derive(Clone, Debug)]
pub struct Speedup<'a> {
    /// Heading.
    pub title: &'a str,
    /// Where and how it was measured.
    pub subtitle: &'a str,
    /// Two in a row.
    pub panels: &'a [SpeedupPanel],
}

/// One problem.
#[derive(Clone, Debug, Default)]
pub struct SpeedupPanel {
    /// What is special about it.
    pub title: String,
    /// Over the density.
    pub lines: Vec<SpeedupLine>,
    /// What does not depend on the density: name and speed-up.
    pub levels: Vec<(String, f64)>,
}

/// What differs in its density only.
#[derive(Clone, Debug, Default)]
pub struct SpeedupLine {
    /// Name in the legend; lines of one name look alike in all panels.
    pub name: String,
    /// Lines of one group have one colour.
    pub group: usize,
    /// Of someone else: dashed.
    pub rival: bool,
    /// Densities and speed-ups, all above 0.
    pub points: Vec<(f64, f64)>,
}

impl SpeedupLine {
    fn style(&self) -> Style {
        let style = style::group(self.group);
        match self.rival {
            false => Style { width: 3, ..style },
            true => Style { width: 2, dashed: true, ..style },
        }
    }
}

impl Speedup<'_> {
    /// A panel for each problem.
    ///
    /// # Errors
    /// [`PlotError::NoPoints`] without points.
    pub fn draw(&self) -> Result<Drawing, PlotError> {
        let points =
            || self.panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
        let levels = || self.panels.iter().flat_map(|panel| &panel.levels);
        let densities = range(points().map(|&(density, _)| density)).ok_or(PlotError::NoPoints)?;
        let speedups =
            points().map(|&(_, speedup)| speedup).chain(levels().map(|&(_, speedup)| speedup));
        let (least, most) = range(speedups.chain([1.0])).ok_or(PlotError::NoPoints)?;
        let x = percent_axis("stored blocks (logarithmic)", densities);
        let y = Axis::decades("speed-up (logarithmic)", least.min(0.8) / 1.1, most.max(1.25) * 1.2);
        let across = |speedup: f64| vec![(x.low, speedup.log10()), (x.high, speedup.log10())];
        // If time were proportional to the stored blocks, as far as the panel reaches.
        let corner = x.low.max(-y.high);
        let proportional = vec![(corner, -corner), (x.high, -x.high)];
        let one = Style { dashed: false, ..style::CEILING };
        let mut legend: Vec<(String, Style)> = Vec::new();
        let mut panels = Vec::new();
        for SpeedupPanel { title, lines, levels } in self.panels {
            let mut drawn = vec![
                ("1 / density".to_owned(), style::CEILING, proportional.clone()),
                ("all blocks".to_owned(), one, across(1.0)),
            ];
            drawn.extend(
                levels
                    .iter()
                    .map(|(name, speedup)| (name.clone(), style::of(name, true), across(*speedup))),
            );
            drawn.extend(lines.iter().map(|line| {
                let points = line
                    .points
                    .iter()
                    .map(|&(density, speedup)| (density.log10(), speedup.log10()));
                (line.name.clone(), line.style(), points.collect())
            }));
            let mut panel =
                Panel { title: title.clone(), x: x.clone(), y: y.clone(), ..Panel::default() };
            for (name, style, points) in drawn {
                if !legend.iter().any(|(known, _)| *known == name) {
                    legend.push((name, style));
                }
                panel.lines.push(Line { points, style, joined: true });
            }
            panels.push(panel);
        }
        Ok(Drawing(Figure {
            title: self.title.to_owned(),
            subtitle: self.subtitle.to_owned(),
            legend,
            columns: panels.len().min(2),
            panels,
            panel_height: 300,
            y_labels: 54,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_share_axes_and_legend() {
        let line = |name: &str, group, rival, points: &[(f64, f64)]| SpeedupLine {
            name: name.to_owned(),
            group,
            rival,
            points: points.to_vec(),
        };
        let ours = line("64", 0, false, &[(0.1, 8.0), (1.0, 1.0)]);
        let panels = [
            SpeedupPanel {
                title: "1".to_owned(),
                lines: vec![ours.clone(), line("t, 64", 0, true, &[(0.1, 4.0)])],
                levels: vec![("cublas".to_owned(), 1.6)],
            },
            SpeedupPanel { title: "16".to_owned(), lines: vec![ours], levels: Vec::new() },
        ];
        let drawing = Speedup { title: "t", subtitle: "s", panels: &panels }.draw().unwrap();
        let names: Vec<_> = drawing.0.legend.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["1 / density", "all blocks", "cublas", "64", "t, 64"]);
        let [first, second] = &drawing.0.panels[..] else { panic!("{drawing:?}") };
        assert_eq!((first.x.low, first.y.high), (second.x.low, second.y.high));
        assert_eq!(first.lines[2].points[0], (first.x.low, 1.6f64.log10()));
        assert_eq!(second.lines[2].points, [(-1.0, 8f64.log10()), (0.0, 0.0)]);
        assert!(
            first.lines[4].style.dashed
                && first.lines[4].style.colour == first.lines[3].style.colour
        );
        // Nothing leaves the panel.
        let points =
            drawing.0.panels.iter().flat_map(|panel| &panel.lines).flat_map(|line| &line.points);
        let inside = |axis: &Axis, at: f64| at >= axis.low - 1e-9 && at <= axis.high + 1e-9;
        assert!(points.into_iter().all(|&(x, y)| inside(&first.x, x) && inside(&first.y, y)));
        assert!(drawing.svg().unwrap().contains("speed-up"));
        let nothing = Speedup { title: "t", subtitle: "s", panels: &[] }.draw().unwrap_err();
        assert!(matches!(nothing, PlotError::NoPoints));
    }
}
