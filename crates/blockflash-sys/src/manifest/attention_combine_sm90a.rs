use super::family::Family;
use crate::Target;

/// `attention_combine_sm90a`: attention over a cache from the splits that kernels with many rows
/// left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionCombine;

impl AttentionCombine {
    /// The most splits.
    pub const MOST_SPLITS: u32 = 32;
    /// The most rows of a head that a CTA has.
    pub const MOST_LINES: u32 = 8;
    /// Columns of a row that a thread has.
    pub const COLUMNS: u32 = 4;
    /// Threads per CTA.
    pub const THREADS: u32 = 128;
}

pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionCombine> {
    [AttentionCombine].into_iter().filter(move |_| target == Target::Sm90a)
}

impl Family for AttentionCombine {
    fn source(&self) -> &'static str {
        "attention_combine_sm90a"
    }

    fn name(&self) -> String {
        format!("c{}", Self::COLUMNS)
    }

    fn warps(&self) -> u32 {
        Self::THREADS / 32
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_MIN_BLOCKS", 8);
        define("VARIANT_MOST_SPLITS", Self::MOST_SPLITS);
        define("VARIANT_MOST_LINES", Self::MOST_LINES);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["MUFU", "STG"]
    }
}
