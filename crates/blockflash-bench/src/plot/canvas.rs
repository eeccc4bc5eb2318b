//! Pixels to draw a figure on. Everything is drawn several times as large and averaged, which makes
//! its edges smooth.

use super::figure::Fill;
use super::letters::Letters;
use super::png;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendStyle, BackendTextStyle, DrawingBackend, DrawingErrorKind,
    FontStyle, FontTransform,
};
use std::convert::Infallible;

/// Pixels of the picture per unit of a figure: sharp on a dense screen.
const SCALE: usize = 2;
/// Points whose mean is a pixel, in each direction.
const SAMPLES: usize = 2;
/// Points per unit.
const POINTS: f64 = (SCALE * SAMPLES) as f64;

type Result = std::result::Result<(), DrawingErrorKind<Infallible>>;

/// A white canvas in units of a figure.
pub(super) struct Canvas {
    size: (u32, u32),
    /// Points of a row.
    width: usize,
    points: Vec<[u8; 3]>,
}

/// In points: left, top, right, bottom.
type Bounds = [f64; 4];

impl Canvas {
    pub(super) fn new(size: (u32, u32)) -> Self {
        let [width, height] = [size.0, size.1].map(|units| units as usize * SCALE * SAMPLES);
        Self { size, width, points: vec![[255; 3]; width * height] }
    }

    /// The picture so far.
    pub(super) fn png(&self) -> Vec<u8> {
        let rows = self.points.chunks_exact(self.width * SAMPLES);
        let pixels = rows.flat_map(|rows| {
            (0..self.width / SAMPLES).map(move |column| {
                let mut sums = [0usize; 3];
                for row in 0..SAMPLES {
                    for point in &rows[row * self.width + column * SAMPLES..][..SAMPLES] {
                        sums.iter_mut()
                            .zip(point)
                            .for_each(|(sum, &value)| *sum += usize::from(value));
                    }
                }
                sums.map(|sum| ((sum + SAMPLES * SAMPLES / 2) / (SAMPLES * SAMPLES)) as u8)
            })
        });
        png::encode((self.width / SAMPLES) as u32, &pixels.collect::<Vec<_>>())
    }

    pub(super) fn fill(&mut self, fill: &Fill) {
        let colour =
            BackendColor { alpha: 1.0, rgb: (fill.colour.0, fill.colour.1, fill.colour.2) };
        let at = |axis: usize, cells: usize| {
            (fill.origin[axis] + fill.cell[axis] * cells as f64) * POINTS
        };
        for &[column, row, columns, rows] in &fill.areas {
            let bounds = [at(0, column), at(1, row), at(0, column + columns), at(1, row + rows)];
            self.paint(bounds, colour, |_, _| 1.0);
        }
    }

    /// Mixes a colour into the points of an area, each as far as it is covered.
    fn paint(
        &mut self,
        [left, top, right, bottom]: Bounds,
        colour: BackendColor,
        covered: impl Fn(f64, f64) -> f64,
    ) {
        let height = self.points.len() / self.width.max(1);
        // Points whose centres lie inside.
        let range = |from: f64, to: f64, count: usize| {
            let bound = |at: f64| (at - 0.5).ceil().clamp(0.0, count as f64) as usize;
            bound(from)..bound(to)
        };
        let ink = [colour.rgb.0, colour.rgb.1, colour.rgb.2];
        for row in range(top, bottom, height) {
            for column in range(left, right, self.width) {
                let part = colour.alpha * covered(column as f64 + 0.5, row as f64 + 0.5);
                let point = &mut self.points[row * self.width + column];
                for (value, ink) in point.iter_mut().zip(ink) {
                    *value =
                        (f64::from(*value) * (1.0 - part) + f64::from(ink) * part).round() as u8;
                }
            }
        }
    }

    /// A line with round ends.
    fn segment(&mut self, from: BackendCoord, to: BackendCoord, colour: BackendColor, width: u32) {
        let ([ax, ay], [bx, by]) = (centre(from), centre(to));
        let (dx, dy, r) = (bx - ax, by - ay, f64::from(width) * POINTS / 2.0);
        let squared = dx * dx + dy * dy;
        let bounds = [ax.min(bx) - r, ay.min(by) - r, ax.max(bx) + r, ay.max(by) + r];
        self.paint(bounds, colour, |x, y| {
            let along = if squared > 0.0 { ((x - ax) * dx + (y - ay) * dy) / squared } else { 0.0 };
            let along = along.clamp(0.0, 1.0);
            flag((x - ax - along * dx).hypot(y - ay - along * dy) <= r)
        });
    }
}

fn flag(inside: bool) -> f64 {
    f64::from(u8::from(inside))
}

/// Lines run along the units' upper left corners, as in an SVG.
fn centre((x, y): BackendCoord) -> [f64; 2] {
    [f64::from(x) * POINTS, f64::from(y) * POINTS]
}

impl DrawingBackend for Canvas {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Result {
        Ok(())
    }

    fn present(&mut self) -> Result {
        Ok(())
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Result {
        let [x, y] = centre(point);
        self.paint([x, y, x + POINTS, y + POINTS], color, |_, _| 1.0);
        Ok(())
    }

    fn draw_line<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
    ) -> Result {
        self.segment(from, to, style.color(), style.stroke_width());
        Ok(())
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        from: BackendCoord,
        to: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Result {
        if !fill {
            return self.draw_path([from, (to.0, from.1), to, (from.0, to.1), from], style);
        }
        let ([left, top], [right, bottom]) = (centre(from), centre(to));
        self.paint([left, top, right, bottom], style.color(), |_, _| 1.0);
        Ok(())
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> Result {
        let path: Vec<_> = path.into_iter().collect();
        for ends in path.windows(2) {
            self.segment(ends[0], ends[1], style.color(), style.stroke_width());
        }
        Ok(())
    }

    fn draw_circle<S: BackendStyle>(
        &mut self,
        at: BackendCoord,
        radius: u32,
        style: &S,
        fill: bool,
    ) -> Result {
        let ([cx, cy], r) = (centre(at), f64::from(radius) * POINTS);
        let half = f64::from(style.stroke_width()) * POINTS / 2.0;
        let outer = if fill { r } else { r + half };
        self.paint([cx - outer, cy - outer, cx + outer, cy + outer], style.color(), |x, y| {
            let distance = (x - cx).hypot(y - cy);
            flag(distance <= outer && (fill || distance >= r - half))
        });
        Ok(())
    }

    fn fill_polygon<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        corners: I,
        style: &S,
    ) -> Result {
        let corners: Vec<_> = corners.into_iter().map(centre).collect();
        let range = |axis: usize| {
            let values = corners.iter().map(|corner| corner[axis]);
            values.fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], at| {
                [low.min(at), high.max(at)]
            })
        };
        let ([left, right], [top, bottom]) = (range(0), range(1));
        self.paint([left, top, right, bottom], style.color(), |x, y| {
            // Inside is where a ray to the left crosses an odd number of edges.
            let edges = corners.iter().zip(corners.iter().cycle().skip(1));
            let crosses = |&([ax, ay], [bx, by]): &(&[f64; 2], &[f64; 2])| {
                (*ay > y) != (*by > y) && x > ax + (y - ay) / (by - ay) * (bx - ax)
            };
            flag(edges.filter(crosses).count() % 2 == 1)
        });
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        at: BackendCoord,
    ) -> Result {
        // Sizes mean what the SVG backend makes of them.
        let size = style.size() / 1.24 * POINTS;
        let letters = Letters::new(text, size, matches!(style.style(), FontStyle::Bold));
        let [x, y] = centre(at);
        let dx = match style.anchor().h_pos {
            HPos::Left => 0.0,
            HPos::Center => letters.width() / 2.0,
            HPos::Right => letters.width(),
        };
        let dy = match style.anchor().v_pos {
            VPos::Top => size * 0.76,
            VPos::Center => letters.height() / 2.0,
            VPos::Bottom => -size * 0.2,
        };
        // From a point of the canvas back to the line of text.
        let turned = |x: f64, y: f64| match style.transform() {
            FontTransform::None => (x, y),
            FontTransform::Rotate90 => (y, -x),
            FontTransform::Rotate180 => (-x, -y),
            FontTransform::Rotate270 => (-y, x),
        };
        let [above, below] = letters.reach();
        let reach = letters.width() + above + below + size;
        let bounds = match style.transform() {
            FontTransform::None => {
                [x - dx, y + dy - above, x - dx + letters.width(), y + dy + below]
            }
            _ => [x - reach, y - reach, x + reach, y + reach],
        };
        self.paint(bounds, style.color(), |px, py| {
            let (tx, ty) = turned(px - x, py - y);
            letters.ink(tx + dx, ty - dy)
        });
        Ok(())
    }
}
