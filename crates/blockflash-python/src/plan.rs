//! The planner of attention over several ranks, for `blockflash.distributed.plan`.

use blockflash_dist::{Density, Machine, Pass, Workload};
use blockflash_ops::{Align, Mask};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// It bounds the time of a call: what a rank does in each step is counted.
const MAX_RANKS: usize = 1 << 14;

/// A scheme as `(heads, keys)`, bytes that a rank sends, and seconds of computing, of exchanges, of
/// their exposed part, and of the share of one device.
type Row = ((usize, usize), f64, f64, f64, f64, f64);

/// Every scheme that fits, the fastest one first.
///
/// `window` is how many keys before and after its own a query sees, where there is a limit. `sizes`
/// are batch entries, rows, heads of q, heads of k, head_dim and bytes of an element;
/// `ranks` are all, and those of a host; `rates` are FLOPs, bytes copied, sent inside of a host and
/// to another one per second, and seconds of latency; `cu_seqlens` are the sequences of a packed
/// batch, `density` has the pairs and keys that a block mask leaves.
#[pyfunction]
pub(crate) fn forecasts(
    sizes: [usize; 6],
    window: [Option<usize>; 2],
    backward: bool,
    ranks: [usize; 2],
    rates: [f64; 5],
    cu_seqlens: Option<Vec<i32>>,
    density: Option<[f64; 2]>,
) -> PyResult<Vec<Row>> {
    let [batch, seqlen, num_heads_q, num_heads_kv, head_dim, element_bytes] = sizes;
    let ([ranks, ranks_per_host], [left, right]) = (ranks, window);
    let [flops, copies, link, network, latency] = rates;
    let refuse = |text: String| Err(PyValueError::new_err(text));
    if sizes.contains(&0) || sizes.iter().any(|&size| size > u32::MAX as usize) {
        return refuse(format!("sizes are {sizes:?}: each is at least 1 and less than 2^32"));
    }
    if batch.checked_mul(seqlen).is_none()
        || num_heads_q.checked_mul(head_dim).and_then(|n| n.checked_mul(element_bytes)).is_none()
        || batch.checked_mul(num_heads_q).and_then(|n| n.checked_mul(head_dim)).is_none()
    {
        return refuse(format!("sizes are {sizes:?}, whose product is too large"));
    }
    if !num_heads_q.is_multiple_of(num_heads_kv) {
        return refuse(format!("{num_heads_q} heads of q do not go with {num_heads_kv} of k"));
    }
    if ranks == 0 || ranks > MAX_RANKS || ranks_per_host == 0 {
        return refuse(format!("there are {ranks} ranks, {ranks_per_host} of a host"));
    }
    let is_rate = |rate: &f64| rate.is_finite() && *rate > 0.0;
    if !rates[..4].iter().all(is_rate) || !latency.is_finite() || latency < 0.0 {
        return refuse(format!(
            "rates are {rates:?}: they are positive, and so is the latency or 0"
        ));
    }
    let is_density = |part: &f64| (0.0..=1.0).contains(part);
    if density.is_some_and(|parts| cu_seqlens.is_some() || !parts.iter().all(is_density)) {
        return refuse(format!("density is {density:?}: parts of a whole, without cu_seqlens"));
    }
    let workload = Workload {
        batch,
        seqlen,
        num_heads_q,
        num_heads_kv,
        head_dim,
        element_bytes,
        mask: Mask::Window { left, right, align: Align::BottomRight },
        density: density.map(|[pairs, keys]| Density { pairs, keys }),
        cu_seqlens: cu_seqlens.as_deref(),
        pass: if backward { Pass::Backward } else { Pass::Forward },
    };
    let machine = Machine { ranks, ranks_per_host, flops, copies, link, network, latency };
    let rows = workload.forecasts(&machine).into_iter().map(|row| {
        let scheme = (row.scheme.heads, row.scheme.keys);
        (scheme, row.sent_bytes, row.compute, row.exchange, row.exposed, row.ideal)
    });
    Ok(rows.collect())
}
