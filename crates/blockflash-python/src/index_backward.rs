//! The gradients of attention by an index, into tensors of the caller.

use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, Operands, of, optional, views};
use crate::index::Call;
use crate::options::Given;
use blockflash_foreign::{DecodeOptions, DecodeTensors};
use blockflash_ops::attention_index::IndexAttentionBackward;
use blockflash_ops::{AttentionGradientsMut, View};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Gradients of the call of [`index_attention`](crate::index::index_attention) with these operands
/// and options, given its `o`, its `lse` and the gradient `d_o` with respect to `o`, into `dq`,
/// `dk` and `dv` in the shapes of q, k and v, and `d_sink`, f32 `[Hq]`. `allocate` gets the bytes
/// of the workspace of a GPU and returns a uint8 tensor of that size on the device of q.
#[pyfunction]
#[pyo3(signature = (q, k, v, lists, o, lse, d_o, dq, dk, dv, d_sink, allocate, granularity, max_k,
    *options))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_attention_backward(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    lists: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    d_o: &Bound<'_, PyAny>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    d_sink: Option<&Bound<'_, PyAny>>,
    allocate: &Bound<'_, PyAny>,
    granularity: i64,
    max_k: i64,
    options: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let py = q.py();
    let rows = [of("q", q)?, of("k", k)?, of("v", v)?, of("lists", lists)?];
    let given = [of("o", o)?, of("lse", lse)?, of("d_o", d_o)?].map(Some);
    let DecodeOptions { tensors, numbers } = Given::decode(options)?;
    let backward =
        Backward { call: Call::new(rows, tensors, numbers, [granularity, max_k])?, given };
    let bytes = py.detach(|| with_memory(|| backward.workspace_bytes()))?;
    let workspace = if bytes > 0 { Some(allocate.call1((bytes,))?) } else { None };
    let written = [
        Some(of("dq", dq)?),
        Some(of("dk", dk)?),
        Some(of("dv", dv)?),
        optional("d_sink", d_sink)?,
        optional("workspace", workspace.as_ref())?,
    ];
    Ok(py.detach(|| backward.run(written))?)
}

/// A call without what it writes.
struct Backward<'a> {
    call: Call<'a>,
    /// o, lse and d_o.
    given: Operands<'a, 3>,
}

/// The views of a call: q, k, v, lists, o, lse and d_o.
type Tensors<'v> = [Option<View<'v>>; 7];

impl<'a> Backward<'a> {
    fn operands(&self) -> [&Option<Foreign<'a>>; 7] {
        let ([q, k, v, lists], [o, lse, d_o]) = (self.call.rows.each_ref(), self.given.each_ref());
        [q, k, v, lists, o, lse, d_o]
    }

    fn workspace_bytes(&self) -> Result<usize> {
        let tensors = self.call.tensors.each_ref().into();
        let (operands, tensors, []) = views((self.operands(), tensors), [])?;
        let operation = self.operation(operands, &DecodeTensors::from(tensors))?;
        Ok(operation.workspace_bytes(self.call.stream.device())?)
    }

    /// Computes; queues the work on a GPU.
    fn run(&self, write: Operands<'a, 5>) -> Result<()> {
        let tensors = self.call.tensors.each_ref().into();
        let (operands, tensors, written) = views((self.operands(), tensors), write)?;
        let [Some(dq), Some(dk), Some(dv), d_sink, workspace] = written else {
            return Err(Failure::value("dq, dk and dv are needed"));
        };
        let gradients = AttentionGradientsMut { dq, dk, dv, d_sink, dbias: None };
        let operation = self.operation(operands, &DecodeTensors::from(tensors))?;
        Ok(operation.backward_into(gradients, workspace, &self.call.stream)?)
    }

    fn operation<'v>(
        &self,
        [q, k, v, lists, o, lse, d_o]: Tensors<'v>,
        tensors: &DecodeTensors<Option<View<'v>>>,
    ) -> Result<IndexAttentionBackward<'v>> {
        let (Some(o), Some(lse), Some(d_o)) = (o, lse, d_o) else {
            return Err(Failure::value("o, lse and d_o are needed"));
        };
        let (attention, cache) = self.call.operation([q, k, v, lists], tensors)?;
        Ok(IndexAttentionBackward { attention, cache, o, lse, d_o })
    }
}
