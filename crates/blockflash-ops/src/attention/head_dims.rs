//! Which element types and head dimensions kernels take.

use super::AttentionProblem;
use blockflash_sys::manifest::{AttentionBwdTile, AttentionTile};
use blockflash_sys::{ElementTypes, HeadDims};

/// The rows of attention's tensors: what elements they have, and how many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) types: ElementTypes,
    pub(crate) head_dims: HeadDims,
}

impl From<&AttentionProblem> for Rows {
    fn from(&AttentionProblem { types, head_dims, .. }: &AttentionProblem) -> Self {
        Self { types, head_dims }
    }
}

impl From<&AttentionTile> for Rows {
    fn from(&AttentionTile { types, head_dims, .. }: &AttentionTile) -> Self {
        Self { types, head_dims }
    }
}

impl From<&AttentionBwdTile> for Rows {
    fn from(&AttentionBwdTile { types, head_dims, .. }: &AttentionBwdTile) -> Self {
        Self { types, head_dims }
    }
}

impl Rows {
    /// Whether a kernel for these types takes them, which reads up to `widest` elements of a row,
    /// 16 bytes at a time.
    pub(crate) fn fit(self, kernel: Rows) -> bool {
        let fits = |found: usize, widest| found <= widest && found.is_multiple_of(8);
        let (found, widest) = (self.head_dims, kernel.head_dims);
        self.types == kernel.types && fits(found.qk, widest.qk) && fits(found.v, widest.v)
    }

    /// Why a kernel does not take them.
    pub(crate) fn refusal(self, kernel: Rows) -> String {
        let types = self.types;
        if types != kernel.types {
            return format!("the types of q, k and v, and o are {types}, not {}", kernel.types);
        }
        format!("{} up to {}", self.not_multiples(), kernel.head_dims)
    }

    /// That no kernel reads such rows.
    pub(crate) fn not_multiples(self) -> String {
        let one = self.head_dims.single().is_some();
        let verb = if one { "is not a multiple" } else { "are not multiples" };
        format!("{} {verb} of 8", named(self.head_dims))
    }

    /// Why no kernel takes them, the widest of which takes head dimensions up to `widest`.
    pub(crate) fn refusal_of_all(self, widest: usize) -> String {
        let ElementTypes { q, kv, o } = self.types;
        if self.types.single().is_none() {
            return format!("q is {q}, k and v are {kv} and o is {o}: kernels take one type");
        }
        format!("{}: kernels take multiples of 8 up to {widest}", named(self.head_dims))
    }
}

fn named(HeadDims { qk, v }: HeadDims) -> String {
    if qk == v { format!("head_dim {qk}") } else { format!("head_dim {qk} of q and k, {v} of v") }
}
