use super::family::{Family, each_dtype};
use crate::{DType, Target};

/// `kv_append_sm80`: new keys and values into a cache, and rotary embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvAppend {
    /// Element type of q, k and v.
    pub dtype: DType,
}

/// Other targets run the machine code for sm_80, or PTX.
pub(super) fn tiles(target: Target) -> impl Iterator<Item = KvAppend> {
    let compiled = target.is_baseline();
    each_dtype(&[()]).filter(move |_| compiled).map(|(dtype, ())| KvAppend { dtype })
}

impl Family for KvAppend {
    fn source(&self) -> &'static str {
        "kv_append_sm80"
    }

    fn name(&self) -> String {
        self.dtype.to_string()
    }

    fn warps(&self) -> u32 {
        8
    }

    fn waits_for_predecessor(&self) -> bool {
        true
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        define("VARIANT_DTYPE", self.dtype as u32);
        define("VARIANT_MIN_BLOCKS", 4);
    }

    fn contains(&self) -> &'static [&'static str] {
        &["LDG", "STG"]
    }
}
