use super::family::Family;
use crate::Target;

/// `quantize_sm80`: rows of attention as codes of 8 bits. Element types, and which step of a call
/// it is, are chosen at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize;

impl Quantize {
    /// The widest head.
    pub const MOST_HEAD_DIM: usize = 256;

    /// Rows that a CTA has at once, at least 16: lanes with up to 16 elements have one together, as
    /// many as the next power of two. No head is wider than [`MOST_HEAD_DIM`](Self::MOST_HEAD_DIM).
    pub const fn rows(head_dim: usize) -> usize {
        let most = Self::MOST_HEAD_DIM;
        let head_dim = if head_dim < most { head_dim } else { most };
        let lanes = head_dim.div_ceil(16).next_power_of_two();
        32 * WARPS as usize / lanes
    }

    /// Heads that a CTA has at once where it adds up tokens.
    pub const fn heads_of_sums(head_dim: usize) -> usize {
        Self::rows(head_dim) / CLASSES
    }
}

const WARPS: u32 = 8;

/// Classes of tokens that a CTA adds up apart.
const CLASSES: usize = 16;

/// Machine code for Ada and Hopper converts to e4m3 and e5m2 by instructions; other targets run the
/// machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = Quantize> {
    let compiled = target.is_baseline() || target == Target::Sm89;
    [Quantize].into_iter().filter(move |_| compiled)
}

impl Family for Quantize {
    fn source(&self) -> &'static str {
        "quantize_sm80"
    }

    fn name(&self) -> String {
        "b8".to_owned()
    }

    fn warps(&self) -> u32 {
        WARPS
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_MIN_BLOCKS", 2);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["LDG", "STG", "SHFL"]
    }
}
