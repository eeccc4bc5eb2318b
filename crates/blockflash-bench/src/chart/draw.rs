//! Draws charts with plotters.

use super::style::{FAINT, GRID, INK};
use super::{Axis, Cells, Chart, ChartError, Line, Marker, Note, Panel, Side, Style};
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::{
    Circle, DashedLineSeries, DrawingArea, IntoDrawingArea, IntoFont, LineSeries, PathElement,
    Polygon, Rectangle, SVGBackend, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, RGBColor, TextStyle};
use std::fmt::Write;
use std::ops::Range;

/// The width of a README page.
pub(super) const WIDTH: u32 = 900;
const MARGIN: i32 = 14;
const LEGEND_ROW: i32 = 20;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Result<T = ()> = std::result::Result<T, ChartError>;

impl<E: std::error::Error + Send + Sync> From<plotters::drawing::DrawingAreaErrorKind<E>>
    for ChartError
{
    fn from(error: plotters::drawing::DrawingAreaErrorKind<E>) -> Self {
        Self::Drawing(error.to_string())
    }
}

impl Chart {
    /// The text of an SVG file.
    ///
    /// # Errors
    /// [`ChartError::NoPoints`], [`ChartError::Drawing`].
    pub fn svg(&self) -> Result<String> {
        let any = |panel: &Panel| {
            panel.cells.is_some() || panel.lines.iter().any(|line| !line.points.is_empty())
        };
        if !self.panels.iter().any(any) {
            return Err(ChartError::NoPoints);
        }
        let (keys, keys_height) = self.keys();
        let (columns, top) = (self.columns.max(1), 58 + keys_height);
        let rows = self.panels.len().div_ceil(columns);
        let panels_height = rows as u32 * self.panel_height.max(200);
        let (mut svg, mut paths) = (String::new(), String::new());
        {
            let size = (WIDTH, top as u32 + panels_height + 6);
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            // The background is filled, so that text stays readable on a dark page.
            root.fill(&WHITE)?;
            root.draw_text(&self.title, &text(17, INK, true), (MARGIN, 10))?;
            root.draw_text(&self.subtitle, &text(12, FAINT, false), (MARGIN, 33))?;
            for ((name, style), (x, y)) in self.legend().into_iter().zip(keys) {
                key(&root, style, (x, y))?;
                let left = text(12, INK, false).pos(Pos::new(HPos::Left, VPos::Center));
                root.draw_text(name, &left, (x + 36, y))?;
            }
            let (_, below) = root.split_vertically(top);
            let (below, _) = below.split_vertically(panels_height as i32);
            let areas = below.split_evenly((rows, columns));
            for (area, panel) in areas.iter().zip(&self.panels) {
                paths += &self.panel(&root, area, panel)?;
            }
            root.present()?;
        }
        if let Some(end) = svg.rfind("</svg>") {
            svg.insert_str(end, &paths);
        }
        Ok(svg)
    }

    /// Positions of the entries of the legend, and the height of all. Widths of texts are
    /// estimated, since only the viewer knows its font.
    fn keys(&self) -> (Vec<(i32, i32)>, i32) {
        let (mut x, mut y) = (MARGIN, 62);
        let mut places = Vec::new();
        for (name, _) in self.legend() {
            let width = 36 + name.chars().count() as i32 * 7 + 16;
            if x > MARGIN && x + width > WIDTH as i32 {
                (x, y) = (MARGIN, y + LEGEND_ROW);
            }
            places.push((x, y));
            x += width;
        }
        let height = if places.is_empty() { 0 } else { y - 62 + LEGEND_ROW };
        (places, height)
    }

    /// Pixels left of the y axis: the longest label of a tick, or text that ends at the axis.
    fn y_labels(&self) -> u32 {
        let at_axis = |panel: &Panel, note: &Note| note.at.0 <= panel.x.low;
        let longest = self.panels.iter().flat_map(|panel| {
            let notes = panel.notes.iter().filter(move |note| at_axis(panel, note));
            let ticks = panel.y.ticks.iter().map(|(_, label)| label.chars().count());
            ticks.chain(notes.map(|note| note.text.chars().count()))
        });
        let named = self.panels.iter().any(|panel| !panel.y.label.is_empty());
        longest.max().unwrap_or(0) as u32 * 7 + if named { 30 } else { 14 }
    }

    /// Draws a panel; returns its cells, for which the backend has no compact form.
    fn panel(&self, root: &Area<'_>, area: &Area<'_>, panel: &Panel) -> Result<String> {
        let mut builder = ChartBuilder::on(area);
        builder.margin_top(4).margin_right(18).margin_left(6).margin_bottom(4);
        builder.x_label_area_size(36 + if panel.x_groups.is_empty() { 0 } else { 16 });
        builder.y_label_area_size(self.y_labels());
        if !panel.title.is_empty() {
            // A bold letter is about 0.62 of its height wide.
            let letters = 0.62 * panel.title.chars().count() as f64;
            let pixels = (f64::from(area.dim_in_pixel().0) / letters) as u32;
            builder.caption(&panel.title, text(pixels.clamp(9, 13), INK, true));
        }
        let mut chart = builder.build_cartesian_2d(panel.x.clone(), panel.y.clone())?;
        chart
            .configure_mesh()
            .bold_line_style(GRID)
            .light_line_style(WHITE)
            .axis_style(FAINT)
            .label_style(text(11, INK, false))
            .axis_desc_style(text(12, INK, false))
            .x_desc(&panel.x.label)
            .y_desc(&panel.y.label)
            .draw()?;
        for line in panel.lines.iter().rev() {
            series(root, &mut chart, line)?;
        }
        for Note { at, text: words, side, bold } in &panel.notes {
            let (x, y) = chart.backend_coord(at);
            let (dx, dy, pos) = match side {
                Side::Left => (-6, 0, Pos::new(HPos::Right, VPos::Center)),
                Side::Right => (6, 0, Pos::new(HPos::Left, VPos::Center)),
                Side::AboveLeft => (0, -2, Pos::new(HPos::Right, VPos::Bottom)),
            };
            let style = text(11, if *bold { INK } else { FAINT }, *bold).pos(pos);
            root.draw_text(words, &style, (x + dx, y + dy))?;
        }
        for (x, words) in &panel.x_groups {
            let (x, y) = chart.backend_coord(&(*x, panel.y.low));
            let style = text(11, FAINT, false).pos(Pos::new(HPos::Center, VPos::Top));
            root.draw_text(words, &style, (x, y + 23))?;
        }
        let corners = [(panel.x.low, panel.y.high), (panel.x.high, panel.y.low)];
        let corners = corners.map(|at| chart.backend_coord(&at));
        Ok(panel.cells.as_ref().map_or(String::new(), |cells| cells.paths(corners)))
    }
}

/// Ticks are placed exactly where the axis says.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (begin, end): (i32, i32)) -> i32 {
        let part = match self.log {
            true => (value / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        begin + (part * f64::from(end - begin)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.iter().map(|&(at, _)| at).collect(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|(at, _)| at == value);
        tick.map_or(String::new(), |(_, label)| label.clone())
    }
}

/// A sample of a line in the legend.
fn key(root: &Area<'_>, style: Style, (x, y): (i32, i32)) -> Result {
    let dashes: &[(i32, i32)] =
        if style.dashed { &[(0, 6), (10, 16), (20, 26)] } else { &[(0, 28)] };
    for (from, to) in dashes.iter().filter(|_| style.width > 0) {
        let ends = [(x + from, y), (x + to, y)];
        root.draw(&PathElement::new(ends, style.colour.stroke_width(style.width.min(6))))?;
    }
    mark(root, (x + 14, y), style)
}

fn series<'a>(
    root: &Area<'_>,
    chart: &mut ChartContext<'a, SVGBackend<'_>, Cartesian2d<Axis, Axis>>,
    line: &Line,
) -> Result {
    let stroke = line.style.colour.stroke_width(line.style.width);
    let points = line.points.iter().copied();
    if !line.apart && line.style.dashed {
        chart.draw_series(DashedLineSeries::new(points.clone(), 9, 6, stroke))?;
    } else if !line.apart {
        chart.draw_series(LineSeries::new(points.clone(), stroke))?;
    }
    points.map(|point| chart.backend_coord(&point)).try_for_each(|at| mark(root, at, line.style))
}

/// The mark of a style at a pixel; thick lines have larger marks.
fn mark(root: &Area<'_>, (x, y): (i32, i32), style: Style) -> Result {
    let r = if style.width > 2 { 5 } else { 4 };
    let fill = style.colour.filled();
    match style.marker {
        None => {}
        Some(Marker::Circle) => root.draw(&Circle::new((x, y), r, fill))?,
        Some(Marker::Square) => {
            root.draw(&Rectangle::new([(x - r + 1, y - r + 1), (x + r - 1, y + r - 1)], fill))?;
        }
        Some(Marker::Triangle) => {
            root.draw(&Polygon::new([(x, y - r), (x + r, y + r - 1), (x - r, y + r - 1)], fill))?;
        }
        Some(Marker::Diamond) => {
            let points = [(x, y - r - 1), (x + r, y), (x, y + r + 1), (x - r, y)];
            root.draw(&Polygon::new(points, fill))?;
        }
        Some(Marker::Cross) => {
            let (r, stroke) = (r - 1, style.colour.stroke_width(2));
            root.draw(&PathElement::new([(x - r, y - r), (x + r, y + r)], stroke))?;
            root.draw(&PathElement::new([(x - r, y + r), (x + r, y - r)], stroke))?;
        }
    }
    Ok(())
}

impl Cells {
    /// One element for all cells of a shade, counted in cells: an element for each cell would make
    /// files of megabytes. `corners` are pixels: left and top, right and bottom.
    fn paths(&self, [(left, top), (right, bottom)]: [(i32, i32); 2]) -> String {
        let columns = self.columns.max(1);
        let rows = (self.shades.len() / columns).max(1);
        let [width, height] = [right - left, bottom - top].map(f64::from);
        let [width, height] = [width / columns as f64, height / rows as f64];
        let mut areas = vec![String::new(); usize::from(Self::SHADES) + 1];
        // The background covers the whole panel.
        areas[0] = format!("M0 0h{columns}v{rows}h-{columns}z");
        for (row, shades) in self.shades.chunks_exact(columns).enumerate() {
            let mut column = 0;
            for run in shades.chunk_by(|a, b| a == b) {
                let (shade, wide) = (run[0].min(Self::SHADES), run.len());
                if shade > 0 {
                    // Writing into a String does not fail.
                    let area = &mut areas[usize::from(shade)];
                    let _ = write!(area, "M{column} {row}h{wide}v1h-{wide}z");
                }
                column += wide;
            }
        }
        let path = |(shade, area): (u8, &String)| {
            let RGBColor(r, g, b) = Self::colour(shade);
            format!(
                "<path shape-rendering=\"crispEdges\" fill=\"#{r:02X}{g:02X}{b:02X}\" \
                 transform=\"translate({left} {top}) scale({width} {height})\" d=\"{area}\"/>\n"
            )
        };
        (0..).zip(&areas).filter(|(_, area)| !area.is_empty()).map(path).collect()
    }
}

/// The backend divides sizes by 1.24, which is undone here; viewers use the font of the page.
fn text(pixels: u32, colour: RGBColor, bold: bool) -> TextStyle<'static> {
    let font = ("sans-serif", f64::from(pixels) * 1.24).into_font();
    font.style(if bold { FontStyle::Bold } else { FontStyle::Normal }).color(&colour)
}
