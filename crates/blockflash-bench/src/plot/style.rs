//! Colours and marks. An implementation looks the same in every plot.

use crate::record::OURS;
use plotters::style::RGBColor;

/// How a line or a point is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Style {
    pub(super) colour: RGBColor,
    pub(super) width: u32,
    pub(super) dashed: bool,
    pub(super) marker: Option<Marker>,
}

/// Shape of a mark, which distinguishes lines besides the colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    Circle,
    Square,
    Triangle,
    Diamond,
    Cross,
}

const MARKERS: [Marker; 5] =
    [Marker::Circle, Marker::Square, Marker::Triangle, Marker::Diamond, Marker::Cross];

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

/// The first entry that a name contains decides. Rivals of one operation differ in colour and mark.
const KNOWN: [(&str, RGBColor, Marker); 21] = [
    ("flash_attention_3", BLUE, Marker::Square),
    ("flash_attention_4", SKY, Marker::Triangle),
    ("fa3_deterministic", BLUE, Marker::Cross),
    ("fa3", BLUE, Marker::Square),
    ("fa4_deterministic", SKY, Marker::Diamond),
    ("fa4", SKY, Marker::Triangle),
    ("fa2_deterministic", PURPLE, Marker::Square),
    ("fa2", PURPLE, Marker::Circle),
    ("cudnn", GREEN, Marker::Diamond),
    ("sdpa_flash", PURPLE, Marker::Circle),
    ("sdpa_efficient", ORANGE, Marker::Cross),
    ("triton_flash", BLACK, Marker::Triangle),
    ("flex_attention_tuned", BLUE, Marker::Square),
    ("flex", ORANGE, Marker::Cross),
    ("flashinfer_vsa", BLACK, Marker::Square),
    ("flashinfer_bsr", PURPLE, Marker::Circle),
    ("flashinfer", ORANGE, Marker::Triangle),
    ("triton_bsr_tuned", BLUE, Marker::Square),
    ("triton_bsr", SKY, Marker::Triangle),
    ("blocked_ell", GREEN, Marker::Diamond),
    ("cusparse_bsr", PURPLE, Marker::Circle),
];

/// Families with several members, which differ in their marks.
const FAMILIES: [(&str, RGBColor); 3] =
    [("cutlass", FAINT), ("triton", ORANGE), ("cusparse", ORANGE)];

const OTHERS: [(RGBColor, Marker); 6] = [
    (BLACK, Marker::Cross),
    (ORANGE, Marker::Diamond),
    (PURPLE, Marker::Square),
    (GREEN, Marker::Cross),
    (SKY, Marker::Diamond),
    (BLUE, Marker::Triangle),
];

/// Our lines are thick; marks that are no rivals are dashed.
pub(super) fn of(implementation: &str, reference: bool) -> Style {
    if implementation == OURS {
        return Style { colour: VERMILLION, width: 4, dashed: false, marker: Some(Marker::Circle) };
    }
    if reference {
        // The same product with other values.
        let colour = if implementation.contains("random") { GREEN } else { FAINT };
        return Style { colour, width: 2, dashed: true, marker: None };
    }
    let known = KNOWN.iter().find(|(part, ..)| implementation.contains(part));
    let (colour, marker) = match known {
        Some(&(_, colour, marker)) => (colour, marker),
        None => other(implementation),
    };
    Style { colour, width: 2, dashed: false, marker: Some(marker) }
}

/// An unlisted name gets a style by its letters, so that it looks the same in every plot.
fn other(name: &str) -> (RGBColor, Marker) {
    let sum = name.bytes().fold(0usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let (colour, marker) = OTHERS[sum % OTHERS.len()];
    let family = FAMILIES.iter().find(|(part, _)| name.contains(part));
    (family.map_or(colour, |&(_, colour)| colour), marker)
}

/// A ceiling of the machine.
pub(super) const CEILING: Style = Style { colour: BLACK, width: 1, dashed: true, marker: None };
/// A second ceiling in the same panel.
pub(super) const CEILING_OF_EXP: Style =
    Style { colour: FAINT, width: 2, dashed: true, marker: None };

/// Our attention without a block mask.
pub(super) const DENSE: Style = Style { colour: VERMILLION, width: 2, dashed: true, marker: None };
/// Row lengths.
pub(super) const LENGTHS: Style = Style { colour: BLUE, width: 2, dashed: false, marker: None };

/// Ways to choose blocks; the first is the subject of the plot.
pub(super) fn choice(index: usize) -> Style {
    Style { width: if index == 0 { 4 } else { 2 }, ..group(index) }
}

/// Groups of our own cases, in plots without rivals.
pub(super) fn group(index: usize) -> Style {
    const GROUPS: [(RGBColor, Marker); 8] = [
        (VERMILLION, Marker::Circle),
        (BLUE, Marker::Square),
        (GREEN, Marker::Diamond),
        (PURPLE, Marker::Triangle),
        (SKY, Marker::Circle),
        (ORANGE, Marker::Square),
        (BLACK, Marker::Diamond),
        (FAINT, Marker::Triangle),
    ];
    let (colour, marker) = GROUPS[index % GROUPS.len()];
    // A colour that repeats comes with another mark.
    let again =
        MARKERS.iter().position(|&other| other == marker).unwrap_or(0) + index / GROUPS.len();
    Style { colour, width: 1, dashed: false, marker: Some(MARKERS[again % MARKERS.len()]) }
}

/// Shades of cells; the last is the darkest.
pub(super) const SHADES: u8 = 6;

/// Colour of a cell, from never visited to completely visited.
pub(super) fn shade(shade: u8) -> RGBColor {
    const NOTHING: RGBColor = RGBColor(0xf3, 0xf3, 0xf3);
    const LIGHTEST: RGBColor = RGBColor(0xa6, 0xcf, 0xe8);
    if shade == 0 {
        return NOTHING;
    }
    let part = f64::from(shade - 1) / f64::from(SHADES - 1);
    let between = |light: u8, dark: u8| {
        (f64::from(light) * (1.0 - part) + f64::from(dark) * part).round() as u8
    };
    RGBColor(between(LIGHTEST.0, BLUE.0), between(LIGHTEST.1, BLUE.1), between(LIGHTEST.2, BLUE.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rivals_of_an_operation_can_be_told_apart() {
        let attention = [
            OURS,
            "flash_attention_3",
            "flash_attention_4",
            "torch_sdpa_cudnn",
            "torch_sdpa_flash",
            "torch_sdpa_efficient",
            "triton_flash",
            "cutlass_fmha_sm90",
        ];
        let bsr = [
            OURS,
            "torch_triton_bsr_tuned",
            "torch_triton_bsr",
            "cusparse_blocked_ell",
            "cusparse_bsr",
        ];
        let sparse = [
            OURS,
            "flash_attention_4",
            "flashinfer_bsr",
            "flashinfer_vsa",
            "flex_attention",
            "flex_attention_tuned",
        ];
        let backward = [OURS, "fa3", "fa4", "cudnn", "fa2", "flex"];
        let decode = [OURS, "fa3", "cudnn", "fa2", "flashinfer"];
        for names in [&attention[..], &bsr, &sparse, &backward, &decode] {
            for (index, name) in names.iter().enumerate() {
                let same = |other: &&str| of(other, false).colour == of(name, false).colour;
                assert_eq!(names.iter().position(same), Some(index), "{name}");
            }
        }
        // The deterministic mode of a rival differs in the mark.
        for name in ["fa2", "fa3", "fa4"] {
            let [default, repeats] = [name, &format!("{name}_deterministic")].map(|n| of(n, false));
            assert_eq!(default.colour, repeats.colour);
            assert_ne!(default.marker, repeats.marker);
        }
        assert_ne!(of("cutlass_fmha_sm80", false), of("cutlass_fmha_sm90", false));
        assert_eq!(of("never heard of", false), of("never heard of", false));
        assert!(of("torch_matmul_dense", true).dashed);
        assert!((0..24).all(|index| (0..index).all(|other| group(other) != group(index))));
    }
}
