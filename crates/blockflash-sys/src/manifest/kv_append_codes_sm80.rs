use super::family::Family;
use crate::Target;

/// `kv_append_codes_sm80`: new keys and values as codes into a cache of 8-bit elements, and rotary
/// embeddings. Element types are chosen at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvAppendCodes;

impl KvAppendCodes {
    /// Lanes of a warp that have a row of this many pieces of 8 elements.
    pub const fn lanes(pieces: usize) -> usize {
        if pieces > 16 { 32 } else { pieces.next_power_of_two() }
    }
}

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = KvAppendCodes> {
    let compiled = target.is_baseline();
    [KvAppendCodes].into_iter().filter(move |_| compiled)
}

impl Family for KvAppendCodes {
    fn source(&self) -> &'static str {
        "kv_append_codes_sm80"
    }

    fn name(&self) -> String {
        "b8".to_owned()
    }

    fn warps(&self) -> u32 {
        8
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_MIN_BLOCKS", 4);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["LDG", "STG"]
    }
}
