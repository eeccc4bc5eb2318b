use super::family::Family;
use crate::Target;

/// `row_copy_sm80`: rows of a few tensors, copied by few CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowCopy;

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = RowCopy> {
    let compiled = target.is_baseline();
    [RowCopy].into_iter().filter(move |_| compiled)
}

impl Family for RowCopy {
    fn source(&self) -> &'static str {
        "row_copy_sm80"
    }

    fn name(&self) -> String {
        "b16".to_owned()
    }

    fn warps(&self) -> u32 {
        32
    }

    fn is_persistent(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_MIN_BLOCKS", 1);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["LDG", "STG"]
    }
}
