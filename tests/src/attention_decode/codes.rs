//! Caches of codes of 8 bits: their scales, and what keys and values are after rounding.

use super::DecodeCase;
use crate::number::rng;
use blockflash_ops::{E4M3, E5M2};
use blockflash_sys::DType;
use rand::Rng;

/// A cache of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeCase {
    /// Type of the codes.
    pub dtype: DType,
    /// Scales of keys, and of values.
    pub scales: [CodeScales; 2],
}

/// What has a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeScales {
    /// Nothing: none is given.
    Absent,
    /// The cache.
    Cache,
    /// Each sequence.
    Sequences,
    /// Each sequence and head.
    Heads,
    /// Each page and head.
    Pages,
    /// Each row.
    Rows,
}

impl CodeScales {
    /// Every one of them.
    pub const ALL: [Self; 6] =
        [Self::Absent, Self::Cache, Self::Sequences, Self::Heads, Self::Pages, Self::Rows];

    /// Whether a row that two sequences share may have a scale of each.
    pub(super) fn differ_by_sequence(self) -> bool {
        matches!(self, Self::Sequences | Self::Heads)
    }

    fn shape(self, case: &DecodeCase) -> Vec<usize> {
        let ([page_size, _, pages], call) = (case.pages(), &case.attention);
        let (batch, heads) = (call.sequences().len(), call.heads_kv);
        match self {
            Self::Absent => Vec::new(),
            Self::Cache => vec![1],
            Self::Sequences => vec![batch, 1],
            Self::Heads => vec![batch, heads],
            Self::Pages => vec![pages, 1, heads],
            Self::Rows => vec![pages, page_size, heads],
        }
    }
}

/// The scales of keys or values.
pub(super) struct Scales {
    of: CodeScales,
    /// Empty if none is given.
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl Scales {
    /// Those of keys (0) or values (1) of a case.
    pub(super) fn new(case: &DecodeCase, codes: CodeCase, which: usize) -> Self {
        let of = codes.scales[which];
        let shape = of.shape(case);
        let count = if shape.is_empty() { 0 } else { shape.iter().product() };
        let mut random = rng(case.attention.seed ^ 0x5CA1E ^ which as u64);
        // Numbers of N(0, 1) take up most of the codes of i8, and saturate at times.
        let unit = if codes.dtype == DType::I8 { 0.03 } else { 1.0 };
        let values = (0..count).map(|_| unit * random.random_range(0.5..2.0f32)).collect();
        Self { of, shape, values }
    }

    /// The scale of a row in this page and slot.
    pub(super) fn get(&self, b: usize, [page, slot]: [usize; 2], head: usize) -> f32 {
        let at = |dim: usize| self.shape[dim];
        match self.of {
            CodeScales::Absent => 1.0,
            CodeScales::Cache => self.values[0],
            CodeScales::Sequences => self.values[b],
            CodeScales::Heads => self.values[b * at(1) + head],
            CodeScales::Pages => self.values[page * at(2) + head],
            CodeScales::Rows => self.values[(page * at(1) + slot) * at(2) + head],
        }
    }
}

/// The bits of the nearest code.
pub(crate) fn code(dtype: DType, x: f32) -> u32 {
    match dtype {
        DType::E4M3 => E4M3::saturated(x).0.into(),
        DType::E5M2 => E5M2::saturated(x).0.into(),
        DType::I8 => u32::from(x.round_ties_even().clamp(-127.0, 127.0) as i8 as u8),
        other => panic!("{other} is no code"),
    }
}

/// The number of a code.
pub(crate) fn number(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::E4M3 => E4M3(bits as u8).to_f32(),
        DType::E5M2 => E5M2(bits as u8).to_f32(),
        DType::I8 => f32::from(bits as u8 as i8),
        other => panic!("{other} is no code"),
    }
}
