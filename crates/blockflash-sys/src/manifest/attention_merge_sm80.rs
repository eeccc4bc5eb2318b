use super::family::Family;
use crate::Target;

/// `attention_merge_sm80`: attention over all keys from attention over parts of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionMerge {
    /// Columns of o per thread.
    pub columns: u32,
}

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = AttentionMerge> {
    let compiled = target.is_baseline();
    [AttentionMerge { columns: 8 }].into_iter().filter(move |_| compiled)
}

impl Family for AttentionMerge {
    fn source(&self) -> &'static str {
        "attention_merge_sm80"
    }

    fn name(&self) -> String {
        format!("c{}", self.columns)
    }

    fn warps(&self) -> u32 {
        4
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_MERGE_COLUMNS", self.columns);
        define("VARIANT_MIN_BLOCKS", 10);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["MUFU", "STG"]
    }
}
