//! Draws figures with plotters.

use super::error::PlotError;
use super::figure::{Axis, Figure, Fill, Line, Note, Panel, Side};
use super::style::{FAINT, GRID, INK, Marker, Style, shade};
use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::{
    Circle, DashedLineSeries, DrawingArea, IntoFont, LineSeries, PathElement, Polygon, Rectangle,
    SVGBackend, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, RGBColor, TextStyle};
use std::ops::Range;

/// The width of a README page.
const WIDTH: u32 = 900;
const MARGIN: i32 = 14;
const LEGEND_ROW: i32 = 20;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'c, 'a> = ChartContext<'c, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;
type Result<T = ()> = std::result::Result<T, PlotError>;

/// Size of the whole image in pixels.
pub(super) fn size(figure: &Figure) -> (u32, u32) {
    let rows = figure.panels.len().div_ceil(figure.columns.max(1)) as u32;
    (WIDTH, top(figure) as u32 + rows * figure.panel_height + 6)
}

/// Height of title and legend in pixels.
fn top(figure: &Figure) -> i32 {
    52 + legend_places(figure).1 * LEGEND_ROW + 6
}

/// Draws everything except the cells of panels, which are returned: each colour becomes one SVG
/// path.
pub(super) fn draw(figure: &Figure, root: &Area<'_>) -> Result<Vec<Fill>> {
    let (legend, _) = legend_places(figure);
    let columns = figure.columns.max(1);
    let rows = figure.panels.len().div_ceil(columns);
    // The background is filled, so that text stays readable on a dark page.
    root.fill(&WHITE)?;
    root.draw_text(&figure.title, &bold(17, INK), (MARGIN, 10))?;
    root.draw_text(&figure.subtitle, &text(12, FAINT), (MARGIN, 33))?;
    for ((name, style), (x, y)) in figure.legend.iter().zip(legend) {
        key(root, *style, (x, y))?;
        root.draw_text(name, &text(12, INK).pos(Pos::new(HPos::Left, VPos::Center)), (x + 36, y))?;
    }
    let (_, below) = root.split_vertically(top(figure));
    let (below, _) = below.split_vertically((rows as u32 * figure.panel_height) as i32);
    let mut fills = Vec::new();
    for (area, panel) in below.split_evenly((rows.max(1), columns)).iter().zip(&figure.panels) {
        fills.extend(draw_panel(root, area, panel, figure.y_labels)?);
    }
    root.present()?;
    Ok(fills)
}

/// Positions of the legend entries, in as many rows as they need. Text widths are estimated, since
/// only the viewer knows its font.
fn legend_places(figure: &Figure) -> (Vec<(i32, i32)>, i32) {
    let (mut x, mut row) = (MARGIN, 0);
    let mut places = Vec::new();
    for (name, _) in &figure.legend {
        let width = 36 + name.chars().count() as i32 * 7 + 16;
        if x > MARGIN && x + width > WIDTH as i32 {
            (x, row) = (MARGIN, row + 1);
        }
        places.push((x, 62 + row * LEGEND_ROW));
        x += width;
    }
    (places, if figure.legend.is_empty() { 0 } else { row + 1 })
}

/// A sample of a line in the legend.
fn key(root: &Area<'_>, style: Style, (x, y): (i32, i32)) -> Result {
    if style.width > 0 {
        match style.dashed {
            false => root.draw(&PathElement::new(
                [(x, y), (x + 28, y)],
                style.colour.stroke_width(style.width),
            ))?,
            true => {
                for dash in [0, 10, 20] {
                    let ends = [(x + dash, y), (x + dash + 6, y)];
                    root.draw(&PathElement::new(ends, style.colour.stroke_width(style.width)))?;
                }
            }
        }
    }
    mark(root, (x + 14, y), style)
}

fn draw_panel(root: &Area<'_>, area: &Area<'_>, panel: &Panel, y_labels: u32) -> Result<Vec<Fill>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(4).margin_right(18).margin_left(6).margin_bottom(4);
    let x_labels = 36 + if panel.x_groups.is_empty() { 0 } else { 16 };
    builder.x_label_area_size(x_labels).y_label_area_size(y_labels);
    if !panel.title.is_empty() {
        // A bold letter is about 0.62 of its height wide.
        let widest = f64::from(area.dim_in_pixel().0) / (0.62 * panel.title.chars().count() as f64);
        builder.caption(&panel.title, bold((widest as u32).clamp(9, 13), INK));
    }
    let mut chart = builder.build_cartesian_2d(panel.x.clone(), panel.y.clone())?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(WHITE)
        .axis_style(FAINT)
        .label_style(text(11, INK))
        .axis_desc_style(text(12, INK))
        .x_desc(&panel.x.label)
        .y_desc(&panel.y.label)
        .draw()?;
    for line in &panel.lines {
        series(root, &mut chart, line)?;
    }
    for note in &panel.notes {
        annotate(root, &chart, note)?;
    }
    for (x, text_of_group) in &panel.x_groups {
        let (x, y) = chart.backend_coord(&(*x, panel.y.low));
        let style = text(11, FAINT).pos(Pos::new(HPos::Center, VPos::Top));
        root.draw_text(text_of_group, &style, (x, y + 23))?;
    }
    let Some(cells) = &panel.cells else { return Ok(Vec::new()) };
    let [first, last] = [(panel.x.low, panel.y.high), (panel.x.high, panel.y.low)]
        .map(|at| chart.backend_coord(&at));
    Ok(cells.fills([first.0, first.1, last.0, last.1].map(f64::from), shade))
}

/// Ticks are placed exactly where the axis says.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (begin, end): (i32, i32)) -> i32 {
        let part = (value - self.low) / (self.high - self.low);
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
        self.ticks
            .iter()
            .find(|(at, _)| at == value)
            .map_or(String::new(), |(_, label)| label.clone())
    }
}

fn series(root: &Area<'_>, chart: &mut Chart<'_, '_>, line: &Line) -> Result {
    let Style { colour, width, dashed, .. } = line.style;
    let stroke = colour.stroke_width(width);
    if line.joined && dashed {
        chart.draw_series(DashedLineSeries::new(line.points.iter().copied(), 9, 6, stroke))?;
    } else if line.joined {
        chart.draw_series(LineSeries::new(line.points.iter().copied(), stroke))?;
    }
    for point in &line.points {
        mark(root, chart.backend_coord(point), line.style)?;
    }
    Ok(())
}

/// The mark of a style at a pixel; thick lines have larger marks.
fn mark(root: &Area<'_>, (x, y): (i32, i32), style: Style) -> Result {
    let r = if style.width > 2 { 5 } else { 4 };
    let fill = style.colour.filled();
    match style.marker {
        None => {}
        Some(Marker::Circle) => root.draw(&Circle::new((x, y), r, fill))?,
        Some(Marker::Square) => {
            let r = r - 1;
            root.draw(&Rectangle::new([(x - r, y - r), (x + r, y + r)], fill))?;
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

fn annotate(root: &Area<'_>, chart: &Chart<'_, '_>, note: &Note) -> Result {
    let (x, y) = chart.backend_coord(&note.at);
    let (dx, dy, pos) = match note.side {
        Side::Left => (-6, 0, Pos::new(HPos::Right, VPos::Center)),
        Side::Right => (6, 0, Pos::new(HPos::Left, VPos::Center)),
        Side::AboveLeft => (0, -2, Pos::new(HPos::Right, VPos::Bottom)),
    };
    let style = if note.bold { bold(11, INK) } else { text(11, FAINT) };
    root.draw_text(&note.text, &style.pos(pos), (x + dx, y + dy))?;
    Ok(())
}

/// The backend divides sizes by 1.24, which is undone here; viewers use the font of the page.
fn text(pixels: u32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font().color(&colour)
}

fn bold(pixels: u32, colour: RGBColor) -> TextStyle<'static> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font().style(FontStyle::Bold).color(&colour)
}
