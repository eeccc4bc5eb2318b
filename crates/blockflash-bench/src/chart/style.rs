//! Colours and marks. An implementation looks the same in every chart.

use crate::record::OURS;
use plotters::style::RGBColor;

/// How a line and its points are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Style {
    pub(crate) colour: RGBColor,
    /// Width of the line in pixels; 0 for none.
    pub width: u32,
    /// Dashed.
    pub dashed: bool,
    /// The mark at each point.
    pub marker: Option<Marker>,
}

/// Shape of a mark, which distinguishes lines besides the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
    Cross,
}
use Marker::{Circle, Cross, Diamond, Square, Triangle};

/// Text and axes.
pub(super) const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);
/// Secondary text.
pub(super) const FAINT: RGBColor = RGBColor(0x66, 0x66, 0x66);
/// Grid lines.
pub(super) const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);

// The palette of Okabe and Ito, which colour-blind readers can tell apart. Its yellow is invisible
// on white and left out.
const VERMILLION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
const BLACK: RGBColor = RGBColor(0x00, 0x00, 0x00);

/// The first entry that a name contains decides. Competitors of one operation differ in colour.
const KNOWN: [(&str, RGBColor, Marker); 21] = [
    ("flash_attention_3", BLUE, Square),
    ("flash_attention_4", SKY, Triangle),
    ("fa3_deterministic", BLUE, Cross),
    ("fa3", BLUE, Square),
    ("fa4_deterministic", SKY, Diamond),
    ("fa4", SKY, Triangle),
    ("fa2_deterministic", PURPLE, Square),
    ("fa2", PURPLE, Circle),
    ("cudnn", GREEN, Diamond),
    ("sdpa_flash", PURPLE, Circle),
    ("sdpa_efficient", ORANGE, Cross),
    ("triton_flash", BLACK, Triangle),
    ("flex_attention_tuned", BLUE, Square),
    ("flex", ORANGE, Cross),
    ("flashinfer_vsa", BLACK, Square),
    ("flashinfer_bsr", PURPLE, Circle),
    ("flashinfer", ORANGE, Triangle),
    ("triton_bsr_tuned", BLUE, Square),
    ("triton_bsr", SKY, Triangle),
    ("blocked_ell", GREEN, Diamond),
    ("cusparse_bsr", PURPLE, Circle),
];

/// Groups of cases, and competitors that are not known.
const GROUPS: [(RGBColor, Marker); 8] = [
    (VERMILLION, Circle),
    (BLUE, Square),
    (GREEN, Diamond),
    (PURPLE, Triangle),
    (SKY, Circle),
    (ORANGE, Square),
    (BLACK, Diamond),
    (FAINT, Triangle),
];

const fn dashed(colour: RGBColor, width: u32) -> Style {
    Style { colour, width, dashed: true, marker: None }
}

/// A ceiling of the machine.
pub const CEILING: Style = dashed(BLACK, 1);
/// A second ceiling in the same panel.
pub const LIMIT: Style = dashed(FAINT, 2);
/// Our attention without a block mask.
pub const DENSE: Style = dashed(VERMILLION, 2);

/// The style of an implementation: our lines are thick; references, which compute something else
/// and are no competitors, are dashed.
pub fn of(implementation: &str, reference: bool) -> Style {
    if implementation == OURS {
        return Style { colour: VERMILLION, width: 4, dashed: false, marker: Some(Circle) };
    }
    if reference {
        // The same product with other values.
        return dashed(if implementation.contains("random") { GREEN } else { FAINT }, 2);
    }
    let known = KNOWN.iter().find(|(part, ..)| implementation.contains(part));
    let (colour, marker) = known.map_or_else(
        || {
            // By the letters of the name, so that it looks the same in every chart.
            let add = |sum: usize, byte: u8| sum.wrapping_mul(31).wrapping_add(byte.into());
            let other = 1 + implementation.bytes().fold(0, add) % (GROUPS.len() - 1);
            (GROUPS[other].0, [Cross, Diamond, Square][other % 3])
        },
        |&(_, colour, marker)| (colour, marker),
    );
    Style { colour, width: 2, dashed: false, marker: Some(marker) }
}

/// Groups of our own cases, in charts without competitors. A colour that repeats comes with another
/// mark.
pub fn group(index: usize) -> Style {
    let (colour, marker) = GROUPS[index % GROUPS.len()];
    let marks = [Circle, Square, Triangle, Diamond, Cross];
    let at = marks.iter().position(|&mark| mark == marker).unwrap_or(0) + index / GROUPS.len();
    Style { colour, width: 1, dashed: false, marker: Some(marks[at % marks.len()]) }
}

impl super::Cells {
    /// The darkest shade.
    pub const SHADES: u8 = 6;

    /// Colour of a cell, from never visited to completely visited.
    pub(super) fn colour(shade: u8) -> RGBColor {
        const LIGHTEST: RGBColor = RGBColor(0xa6, 0xcf, 0xe8);
        if shade == 0 {
            return RGBColor(0xf3, 0xf3, 0xf3);
        }
        let part = f64::from(shade - 1) / f64::from(Self::SHADES - 1);
        let mix = |light: u8, dark: u8| {
            (f64::from(light) * (1.0 - part) + f64::from(dark) * part).round() as u8
        };
        RGBColor(mix(LIGHTEST.0, BLUE.0), mix(LIGHTEST.1, BLUE.1), mix(LIGHTEST.2, BLUE.2))
    }

    /// The entry of a shade in the legend.
    pub(super) fn key(shade: u8) -> Style {
        Style { colour: Self::colour(shade), marker: Some(Square), ..Style::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn competitors_of_an_operation_can_be_told_apart() {
        for names in [
            &[
                OURS,
                "flash_attention_3",
                "flash_attention_4",
                "torch_sdpa_cudnn",
                "torch_sdpa_flash",
                "torch_sdpa_efficient",
                "triton_flash",
            ][..],
            &[OURS, "torch_triton_bsr_tuned", "torch_triton_bsr", "cusparse_blocked_ell"],
            &[OURS, "flash_attention_4", "flashinfer_bsr", "flashinfer_vsa", "flex_attention"],
            &[OURS, "fa3", "fa4", "cudnn", "fa2", "flex"],
            &[OURS, "fa3", "cudnn", "fa2", "flashinfer"],
        ] {
            for (index, name) in names.iter().enumerate() {
                let same = |other: &&str| of(other, false).colour == of(name, false).colour;
                assert_eq!(names.iter().position(same), Some(index), "{name}");
            }
        }
        for name in ["fa2", "fa3", "fa4"] {
            let [default, repeats] = [name, &format!("{name}_deterministic")].map(|n| of(n, false));
            assert!(default.colour == repeats.colour && default.marker != repeats.marker);
        }
        assert_eq!(of("never heard of", false), of("never heard of", false));
        assert!(of("torch_matmul_dense", true).dashed);
        assert!((0..24).all(|index| (0..index).all(|other| group(other) != group(index))));
    }
}
