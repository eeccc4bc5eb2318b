//! The gradients of attention, into tensors of the caller.

use crate::attention::call;
use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, Operands, of, optional, views};
use crate::mask::{self, Kept};
use crate::options::Given;
use crate::table::Entry;
use blockflash_foreign::{AttentionNumbers, AttentionOptions, AttentionTensors};
use blockflash_ops::{AttentionBackward, AttentionGradientsMut, Stream, View};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// Gradients of the call of [`attention`](crate::attention::attention) with these operands and
/// options, given its `o`, its `lse` and the gradient `d_o` with respect to `o`, into `dq`, `dk`
/// and `dv` in the shapes of q, k and v, `d_sink`, f32 `[Hq]`, and `d_bias` like the bias.
///
/// `allocate` gets a number of bytes and returns a uint8 tensor of that size on the device of q. On
/// a GPU it is called once for the workspace.
#[pyfunction]
#[pyo3(signature = (q, k, v, o, lse, d_o, dq, dk, dv, d_sink, d_bias, allocate, *options))]
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
    d_bias: Option<&Bound<'_, PyAny>>,
    allocate: &Bound<'_, PyAny>,
    options: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let py = q.py();
    let operands =
        [of("q", q)?, of("k", k)?, of("v", v)?, of("o", o)?, of("lse", lse)?, of("d_o", d_o)?];
    let options = Given::attention(options)?;
    let [dq, dk, dv] = [of("dq", dq)?, of("dk", dk)?, of("dv", dv)?].map(Some);
    let write = [dq, dk, dv, optional("d_sink", d_sink)?, optional("d_bias", d_bias)?];
    compute(py, operands, options, write, |bytes| allocate.call1((bytes,)))
}

/// Computes from q, k, v, o, lse and d_o into dq, dk, dv, d_sink and d_bias, with a workspace of
/// this many bytes.
pub(crate) fn compute<'a, 'py>(
    py: Python<'py>,
    operands: [Foreign<'a>; 6],
    options: AttentionOptions<Foreign<'a>>,
    [dq, dk, dv, d_sink, d_bias]: Operands<'_, 5>,
    allocate: impl FnOnce(usize) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let (backward, bytes) = py.detach(|| {
        let backward = Backward::new(operands, options)?;
        let bytes = with_memory(|| backward.workspace_bytes())?;
        Ok::<_, Failure>((backward, bytes))
    })?;
    let workspace = match bytes {
        0 => None,
        bytes => Some(allocate(bytes)?),
    };
    let workspace = optional("workspace", workspace.as_ref())?;
    Ok(py.detach(|| backward.run([dq, dk, dv, d_sink, d_bias, workspace]))?)
}

/// A call without what it writes.
struct Backward<'a> {
    /// q, k, v, o, lse and d_o.
    operands: Operands<'a, 6>,
    tensors: AttentionTensors<Option<Foreign<'a>>>,
    numbers: AttentionNumbers,
    block_mask: Option<Arc<Entry<Kept>>>,
    stream: Stream,
}

impl<'a> Backward<'a> {
    fn new(operands: [Foreign<'a>; 6], options: AttentionOptions<Foreign<'a>>) -> Result<Self> {
        let AttentionOptions { tensors, numbers } = options;
        let stream = operands[0].stream()?;
        let block_mask = mask::lookup(numbers.block_mask, &stream)?;
        let operands = operands.map(Some);
        Ok(Self { operands, tensors, numbers, block_mask, stream })
    }

    fn workspace_bytes(&self) -> Result<usize> {
        let (operands, tensors, []) =
            views((self.operands.each_ref(), self.tensors.each_ref().into()), [])?;
        let backward = self.operation(operands, tensors.into())?;
        Ok(backward.workspace_bytes(self.stream.device())?)
    }

    /// Computes; queues the work on a GPU.
    fn run(self, write: Operands<'a, 6>) -> Result<()> {
        let (operands, tensors, written) =
            views((self.operands.each_ref(), self.tensors.each_ref().into()), write)?;
        let [Some(dq), Some(dk), Some(dv), d_sink, dbias, workspace] = written else {
            return Err(Failure::value("dq, dk and dv are needed"));
        };
        let gradients = AttentionGradientsMut { dq, dk, dv, d_sink, dbias };
        let backward = self.operation(operands, tensors.into())?;
        Ok(backward.backward_into(gradients, workspace, &self.stream)?)
    }

    fn operation<'v>(
        &'v self,
        [q, k, v, o, lse, d_o]: [Option<View<'v>>; 6],
        tensors: AttentionTensors<Option<View<'v>>>,
    ) -> Result<AttentionBackward<'v>> {
        let (Some(o), Some(lse), Some(d_o)) = (o, lse, d_o) else {
            return Err(Failure::value("o, lse and d_o are needed"));
        };
        let mask = self.block_mask.as_deref();
        let mask = mask.map(|entry| entry.for_backward(&self.stream)).transpose()?;
        let attention = call([q, k, v], tensors, &self.numbers, mask)?;
        Ok(AttentionBackward { attention, o, lse, d_o })
    }
}
