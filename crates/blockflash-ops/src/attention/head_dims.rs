//! Which element types and head dimensions kernels take.

use blockflash_sys::{ElementTypes, HeadDims};

/// Whether a kernel for head dimensions up to `widest` takes these. So far a kernel has one head
/// dimension and one element type for all tensors: this line opens others.
pub(crate) fn fits(types: ElementTypes, head_dims: HeadDims, widest: usize) -> bool {
    let one = types.single().is_some() && head_dims.single().is_some();
    one && head_dims.qk <= widest && head_dims.qk.is_multiple_of(8)
}

/// Why a kernel does not take them.
pub(crate) fn refusal(types: ElementTypes, head_dims: HeadDims, widest: usize) -> String {
    several(types, head_dims)
        .unwrap_or_else(|| format!("head_dim {head_dims} is not a multiple of 8 up to {widest}"))
}

/// Why no kernel takes them, the widest of which takes head dimensions up to `widest`.
pub(crate) fn refusal_of_all(types: ElementTypes, head_dims: HeadDims, widest: usize) -> String {
    several(types, head_dims).unwrap_or_else(|| {
        format!("head_dim {head_dims}: kernels take multiples of 8 up to {widest}")
    })
}

/// What is wrong with several of them.
fn several(types: ElementTypes, head_dims: HeadDims) -> Option<String> {
    let HeadDims { qk, v } = head_dims;
    let ElementTypes { q, kv, o } = types;
    if types.single().is_none() {
        return Some(format!("q is {q}, k and v are {kv} and o is {o}: kernels take one type"));
    }
    let text = format!("head_dim {qk} of q and k, {v} of v: kernels take one, the CPU takes both");
    head_dims.single().is_none().then_some(text)
}
