//! The gradients of attention, into tensors of the caller.

use crate::attention::{Options, call};
use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, views};
use crate::mask::{self, Kept};
use crate::table::Entry;
use blockflash_ops::{AttentionBackward, AttentionGradientsMut, Stream, View};
use pyo3::prelude::*;
use std::sync::Arc;

/// Gradients of the call of [`attention`](crate::attention::attention) with these operands and
/// options, given its `o`, its `lse` and the gradient `d_o` with respect to `o`, into `dq`, `dk`
/// and `dv` in the shapes of q, k and v, and `d_sink`, f32 `[Hq]`.
///
/// `allocate` gets a number of bytes and returns a uint8 tensor of that size on the device of q. On
/// a GPU it is called once for the workspace.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, o, lse, d_o, dq, dk, dv, d_sink, allocate, sink=None, cu_seqlens_q=None,
    cu_seqlens_k=None, max_q=0, max_k=0, left=-1, right=-1, top_left=false, scale=None,
    softcap=0.0, block_mask=0
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attention_backward(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    d_o: &Bound<'_, PyAny>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    d_sink: Option<&Bound<'_, PyAny>>,
    allocate: &Bound<'_, PyAny>,
    sink: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    cu_seqlens_k: Option<&Bound<'_, PyAny>>,
    max_q: i64,
    max_k: i64,
    left: i64,
    right: i64,
    top_left: bool,
    scale: Option<f64>,
    softcap: f64,
    block_mask: i64,
) -> PyResult<()> {
    let py = q.py();
    let optional = |what, tensor: Option<_>| tensor.map(|at| Foreign::of(what, at)).transpose();
    let needed = |what, tensor| Foreign::of(what, tensor).map(Some);
    let operands = [
        needed("q", q)?,
        needed("k", k)?,
        needed("v", v)?,
        optional("sink", sink)?,
        optional("cu_seqlens_q", cu_seqlens_q)?,
        optional("cu_seqlens_k", cu_seqlens_k)?,
    ];
    let results = [needed("o", o)?, needed("lse", lse)?, needed("d_o", d_o)?];
    let [dq, dk, dv] = [needed("dq", dq)?, needed("dk", dk)?, needed("dv", dv)?];
    let d_sink = optional("d_sink", d_sink)?;
    let options = Options { max_q, max_k, left, right, top_left, scale, softcap, block_mask };
    let (backward, bytes) = py.detach(|| {
        let backward = Backward::new(operands, results, options)?;
        let bytes = with_memory(|| backward.workspace_bytes())?;
        Ok::<_, Failure>((backward, bytes))
    })?;
    let workspace = match bytes {
        0 => None,
        bytes => Some(allocate.call1((bytes,))?),
    };
    let workspace = optional("workspace", workspace.as_ref())?;
    Ok(py.detach(|| backward.run([dq, dk, dv, d_sink, workspace]))?)
}

/// A call without what it writes.
struct Backward<'a> {
    /// The operands of [`call`] in its order, then `o`, `lse` and `d_o`.
    read: [Option<Foreign<'a>>; 9],
    options: Options,
    block_mask: Option<Arc<Entry<Kept>>>,
    stream: Stream,
}

impl<'a> Backward<'a> {
    fn new(
        [q, k, v, sink, cu_seqlens_q, cu_seqlens_k]: [Option<Foreign<'a>>; 6],
        [o, lse, d_o]: [Option<Foreign<'a>>; 3],
        options: Options,
    ) -> Result<Self> {
        let stream = q.as_ref().ok_or_else(|| Failure::value("q is needed"))?.stream()?;
        let block_mask = mask::lookup(options.block_mask, &stream)?;
        let read = [q, k, v, sink, cu_seqlens_q, cu_seqlens_k, o, lse, d_o];
        Ok(Self { read, options, block_mask, stream })
    }

    fn workspace_bytes(&self) -> Result<usize> {
        let (read, []) = views(&self.read, [])?;
        Ok(self.operation(read)?.workspace_bytes(self.stream.device())?)
    }

    /// Computes; queues the work on a GPU.
    fn run(self, write: [Option<Foreign<'a>>; 5]) -> Result<()> {
        let (read, [dq, dk, dv, d_sink, workspace]) = views(&self.read, write)?;
        let (Some(dq), Some(dk), Some(dv)) = (dq, dk, dv) else {
            return Err(Failure::value("dq, dk and dv are needed"));
        };
        let gradients = AttentionGradientsMut { dq, dk, dv, d_sink };
        Ok(self.operation(read)?.backward_into(gradients, workspace, &self.stream)?)
    }

    fn operation<'v>(&'v self, read: [Option<View<'v>>; 9]) -> Result<AttentionBackward<'v>> {
        let [q, k, v, sink, cu_seqlens_q, cu_seqlens_k, o, lse, d_o] = read;
        let (Some(o), Some(lse), Some(d_o)) = (o, lse, d_o) else {
            return Err(Failure::value("o, lse and d_o are needed"));
        };
        let mask = self.block_mask.as_deref();
        let mask = mask.map(|entry| entry.for_backward(&self.stream)).transpose()?;
        let attention = call([q, k, v, sink, cu_seqlens_q, cu_seqlens_k], &self.options, mask)?;
        Ok(AttentionBackward { attention, o, lse, d_o })
    }
}
