//! Text as coverage of pixels: letters of one raster, scaled.

use noto_sans_mono_bitmap::{
    FontWeight, RasterHeight, RasterizedChar, get_raster, get_raster_width,
};

const RASTER: RasterHeight = RasterHeight::Size32;
/// Rows of the raster from the top of a capital to the base line.
const CAPITAL_TOP: f64 = 8.0;
const BASE_LINE: f64 = 25.0;
/// Width of a letter in font sizes. The raster's own would be 0.6, but figures are laid out for
/// letters that are narrower.
const ADVANCE: f64 = 0.55;

/// A line of text of a font size in pixels, its origin at the left end of the base line.
pub(super) struct Letters {
    glyphs: Vec<Option<RasterizedChar>>,
    /// Pixels of a letter's width.
    advance: f64,
    /// Pixels of the raster per pixel.
    scale: f64,
}

impl Letters {
    pub(super) fn new(text: &str, size: f64, bold: bool) -> Self {
        let weight = if bold { FontWeight::Bold } else { FontWeight::Regular };
        let glyph = |letter: char| {
            // What the raster does not have: dashes, and else a box.
            let letter = if matches!(letter, '–' | '—' | '−') { '-' } else { letter };
            (!letter.is_whitespace())
                .then(|| get_raster(letter, weight, RASTER).or(get_raster('¤', weight, RASTER)))
        };
        let advance = size * ADVANCE;
        let scale = get_raster_width(weight, RASTER) as f64 / advance;
        Self {
            glyphs: text.chars().map(|letter| glyph(letter).flatten()).collect(),
            advance,
            scale,
        }
    }

    /// Left and right end, top of capitals and lowest stroke, seen from the origin; y grows
    /// downwards.
    pub(super) fn width(&self) -> f64 {
        self.glyphs.len() as f64 * self.advance
    }

    /// Height of a capital.
    pub(super) fn height(&self) -> f64 {
        (BASE_LINE - CAPITAL_TOP) / self.scale
    }

    /// Height of a whole line above and below the base line.
    pub(super) fn reach(&self) -> [f64; 2] {
        [BASE_LINE / self.scale, (RASTER.val() as f64 - BASE_LINE) / self.scale]
    }

    /// How much of the pixel at a point is ink, 0 to 1.
    pub(super) fn ink(&self, x: f64, y: f64) -> f64 {
        let at = (x / self.advance).floor();
        let glyph =
            if at >= 0.0 { self.glyphs.get(at as usize).and_then(Option::as_ref) } else { None };
        let Some(glyph) = glyph else { return 0.0 };
        // Between the four nearest pixels of the raster, whose values are those of their centres.
        let (x, y) = ((x - at * self.advance) * self.scale - 0.5, y * self.scale + BASE_LINE - 0.5);
        let pixel = |column: f64, row: f64| {
            let inside = column >= 0.0 && row >= 0.0;
            let value = inside.then(|| glyph.pixel(column as usize, row as usize)).flatten();
            f64::from(value.unwrap_or(0)) / 255.0
        };
        let (left, top) = (x.floor(), y.floor());
        let (right_part, lower_part) = (x - left, y - top);
        let row =
            |row: f64| pixel(left, row) * (1.0 - right_part) + pixel(left + 1.0, row) * right_part;
        row(top) * (1.0 - lower_part) + row(top + 1.0) * lower_part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_stand_on_the_base_line() {
        let letters = Letters::new("H x", 20.0, false);
        assert_eq!(letters.width(), 33.0);
        let ink = |x: [f64; 2], y: [f64; 2]| -> f64 {
            let points = (0..100)
                .flat_map(|i| (0..100).map(move |j| (f64::from(i) / 100.0, f64::from(j) / 100.0)));
            points
                .map(|(i, j)| letters.ink(x[0] + i * (x[1] - x[0]), y[0] + j * (y[1] - y[0])))
                .sum()
        };
        let height = letters.height();
        assert!(height > 11.0 && height < 16.0, "{height}");
        assert!(ink([0.0, 11.0], [-height, 0.0]) > 1000.0);
        // Neither below the base line nor above capitals, nor in a space, nor beyond the text.
        assert!(
            ink([0.0, 11.0], [1.0, 9.0]) < 1.0 && ink([0.0, 11.0], [-20.0, -height - 1.0]) < 1.0
        );
        assert_eq!((ink([11.0, 22.0], [-20.0, 9.0]), ink([33.0, 60.0], [-20.0, 9.0])), (0.0, 0.0));
        assert_eq!(ink([-9.0, 0.0], [-20.0, 9.0]), 0.0);
        let bold = Letters::new("H", 20.0, true);
        assert!(bold.ink(2.5, -5.0) >= letters.ink(2.5, -5.0));
    }

    #[test]
    fn every_letter_of_a_plot_is_there() {
        let letters = Letters::new("abcXYZ019·×µ–—−\u{2026}", 12.0, false);
        assert!(letters.glyphs.iter().all(Option::is_some));
    }
}
