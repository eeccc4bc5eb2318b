//! Which element types and head dimensions kernels take.

use super::AttentionProblem;
use blockflash_sys::manifest::{AttentionBwdTile, AttentionTile};
use blockflash_sys::{DType, ElementTypes, HeadDims};

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
    /// What head dimensions and strides are multiples of, since kernels read 16 bytes at a time: 8
    /// elements of 16 bits, or 16 codes.
    pub(crate) const fn multiple(self) -> usize {
        if self.types.kv.is_code() { 16 } else { 8 }
    }

    /// Whether a kernel for these types takes them, which reads up to `widest` elements of a row.
    pub(crate) fn fit(self, kernel: Rows) -> bool {
        let multiple = self.multiple();
        let fits = |found: usize, widest| found <= widest && found.is_multiple_of(multiple);
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
        format!("{} {verb} of {}", named(self.head_dims), self.multiple())
    }

    /// Why no kernel takes them, the widest of which takes head dimensions up to `widest`.
    pub(crate) fn refusal_of_all(self, widest: usize) -> String {
        let ElementTypes { q, kv, o } = self.types;
        if q.is_code() && o == DType::F32 {
            return format!("o is {o}: beside {q} kernels write f16 and bf16");
        }
        if !q.is_code() && self.types.single().is_none() {
            return format!("q is {q}, k and v are {kv} and o is {o}: kernels take one type");
        }
        let multiple = self.multiple();
        format!("{}: kernels take multiples of {multiple} up to {widest}", named(self.head_dims))
    }
}

fn named(HeadDims { qk, v }: HeadDims) -> String {
    if qk == v { format!("head_dim {qk}") } else { format!("head_dim {qk} of q and k, {v} of v") }
}
