//! Block masks by which keys each query sees, made on the CPU.

use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, direct};
use crate::mask::{Handle, Sizes, geometry};
use crate::window::{align, side, token_mask};
use blockflash_ops::{BlockMask, Mask};
use pyo3::prelude::*;
use std::ops::Range;

/// The sides of a token mask, -1 for unlimited, and whether it starts at the top left.
type Window = (i64, i64, bool);

/// See [`BlockMask::from_ranges`]: int32 `[batch, heads, seqlen_q, 2 * ranges]`, of each range the
/// first key and the one behind the last; what is beyond the keys does not count. Copied.
#[pyfunction]
pub(crate) fn mask_of_intervals(intervals: &Bound<'_, PyAny>, sizes: Sizes) -> PyResult<Handle> {
    let py = intervals.py();
    let intervals = direct("intervals", intervals)?;
    let build = || {
        let &[batch, heads, seqlen_q, ends_each] = intervals.layout().shape() else {
            let shape = intervals.layout().shape();
            let expected = "[batch, heads, seqlen_q, 2 * ranges]";
            return Err(Failure::value(format!("intervals have shape {shape:?}, not {expected}")));
        };
        let geometry = geometry(sizes)?;
        if seqlen_q != geometry.seqlen_q() {
            let text = format!("intervals are for {seqlen_q} queries, not {}", geometry.seqlen_q());
            return Err(Failure::value(text));
        }
        let ends = numbers(&intervals)?;
        let key = |end: i32| usize::try_from(end).unwrap_or(0);
        let keys = |batch: usize, head: usize, query: usize| {
            let start = ((batch * heads + head) * seqlen_q + query) * ends_each;
            let pairs = ends[start..][..ends_each].chunks_exact(2);
            pairs.map(move |pair| key(pair[0])..key(pair[1])).filter(|range| !range.is_empty())
        };
        Handle::host(BlockMask::from_ranges(geometry, batch, heads, keys))
    };
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::documents`]: int32 `[batch, seqlen_q]` and `[batch, seqlen_k]`. Copied.
#[pyfunction]
pub(crate) fn mask_of_documents(
    ids_q: &Bound<'_, PyAny>,
    ids_k: &Bound<'_, PyAny>,
    sizes: Sizes,
) -> PyResult<Handle> {
    let py = ids_q.py();
    let ids = [direct("ids_q", ids_q)?, direct("ids_k", ids_k)?];
    let build = || {
        let [ids_q, ids_k] = [numbers(&ids[0])?, numbers(&ids[1])?];
        Handle::host(BlockMask::documents(geometry(sizes)?, &ids_q, &ids_k))
    };
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::tree`]: int32 `[batch, seqlen_q]`. Copied.
#[pyfunction]
pub(crate) fn mask_of_tree(parents: &Bound<'_, PyAny>, sizes: Sizes) -> PyResult<Handle> {
    let py = parents.py();
    let parents = direct("parents", parents)?;
    let build = || Handle::host(BlockMask::tree(geometry(sizes)?, &numbers(&parents)?));
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::prefix`].
#[pyfunction]
pub(crate) fn mask_of_prefixes(
    py: Python<'_>,
    prefixes: Vec<usize>,
    window: Window,
    sizes: Sizes,
) -> PyResult<Handle> {
    let build = || {
        let mask = shown(window)?;
        Handle::host(BlockMask::prefix(geometry(sizes)?, &prefixes, mask))
    };
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::streaming`].
#[pyfunction]
pub(crate) fn mask_of_streaming(
    py: Python<'_>,
    count: usize,
    window: Window,
    sizes: Sizes,
) -> PyResult<Handle> {
    let build = || {
        let mask = shown(window)?;
        Handle::host(BlockMask::streaming(geometry(sizes)?, count, mask))
    };
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::key_padding`]: the first key of each entry, and the one behind the last.
#[pyfunction]
pub(crate) fn mask_of_padding(
    py: Python<'_>,
    keys: Vec<(usize, usize)>,
    sizes: Sizes,
) -> PyResult<Handle> {
    let keys: Vec<Range<usize>> = keys.into_iter().map(|(start, end)| start..end).collect();
    let build = || Handle::host(BlockMask::key_padding(geometry(sizes)?, &keys));
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::dilated_window`].
#[pyfunction]
pub(crate) fn mask_of_dilated_window(
    py: Python<'_>,
    dilation: usize,
    window: Window,
    sizes: Sizes,
) -> PyResult<Handle> {
    let build = || {
        let (left, right, top_left) = window;
        let (left, right) = (side("left", left)?, side("right", right)?);
        let (geometry, align) = (geometry(sizes)?, align(top_left));
        Handle::host(BlockMask::dilated_window(geometry, dilation, left, right, align))
    };
    Ok(py.detach(|| with_memory(build))?)
}

/// See [`BlockMask::neighborhood`].
#[pyfunction]
pub(crate) fn mask_of_neighborhood(
    py: Python<'_>,
    grid: Vec<usize>,
    window: Vec<usize>,
    dilation: Vec<usize>,
    sizes: Sizes,
) -> PyResult<Handle> {
    let build =
        || Handle::host(BlockMask::neighborhood(geometry(sizes)?, &grid, &window, &dilation));
    Ok(py.detach(|| with_memory(build))?)
}

/// The pairs that the token mask shows and this mask, on the CPU, does not.
#[pyfunction]
pub(crate) fn mask_complement(mask: &Bound<'_, Handle>, window: Window) -> PyResult<Handle> {
    let build = || Handle::host(mask.get().mask().complement(shown(window)?));
    Ok(with_memory(build)?)
}

fn shown((left, right, top_left): Window) -> Result<Mask> {
    token_mask(left, right, top_left)
}

/// The elements of an int32 tensor in their order.
fn numbers(tensor: &Foreign<'_>) -> Result<Vec<i32>> {
    Ok(tensor.view()?.to_vec(&tensor.stream()?)?)
}
