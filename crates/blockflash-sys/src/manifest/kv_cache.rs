use super::family::{Family, each_dtype};
use crate::{DType, Target};

/// The kernels that go with attention over a cache, with their compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvCacheKernel {
    /// `kv_append_sm80`: new keys and values into a cache, with rotary embedding.
    Append {
        /// Element type of q, k and v.
        dtype: DType,
    },
    /// `attention_merge_sm80`: attention over all keys from attention over parts of them.
    Merge {
        /// Columns of o per thread.
        columns: u32,
    },
}

const MERGE: KvCacheKernel = KvCacheKernel::Merge { columns: 4 };

pub(super) fn tiles(target: Target) -> impl Iterator<Item = KvCacheKernel> {
    let appends = each_dtype(&[()]).map(|(dtype, ())| KvCacheKernel::Append { dtype });
    appends.chain([MERGE]).filter(move |_| target.is_portable())
}

impl Family for KvCacheKernel {
    fn source(&self) -> &'static str {
        match self {
            Self::Append { .. } => "kv_append_sm80",
            Self::Merge { .. } => "attention_merge_sm80",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Append { dtype } => dtype.to_string(),
            Self::Merge { columns } => format!("c{columns}"),
        }
    }

    fn warps(&self) -> u32 {
        match self {
            Self::Append { .. } => 8,
            Self::Merge { .. } => 4,
        }
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        match *self {
            Self::Append { dtype } => {
                define("VARIANT_DTYPE", dtype as u32);
                define("VARIANT_APPEND_THREADS", 32 * self.warps());
                define("VARIANT_MIN_BLOCKS", 4);
            }
            Self::Merge { columns } => {
                define("VARIANT_MERGE_COLUMNS", columns);
                define("VARIANT_MIN_BLOCKS", 4);
            }
        }
    }

    fn contains(&self) -> &'static [&'static str] {
        match self {
            Self::Append { .. } => &["LDG", "STG"],
            Self::Merge { .. } => &["MUFU", "STG"],
        }
    }
}
