//! torch's scaled dot-product attention, whose tensors are `[B, H, S, D]`, with its own options.

use crate::attention::run;
use crate::attention_backward::compute;
use crate::error::{Failure, Kind, with_memory};
use crate::foreign::{Foreign, of};
use blockflash_foreign::{AttentionNumbers, AttentionOptions, AttentionTensors};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Attention of query `[B, Hq, Sq, D]` to key and value `[B, Hk, Sk, D]`, causal at the top left or
/// at the bottom right: `(o, lse)`, new tensors in the shape of query with the head_dim of value,
/// and f32 `[B, Hq, Sq]`. `like` is an f32 tensor on the device of query.
///
/// Works on torch's current stream of that device. Does not record gradients.
///
/// # Errors
/// `Misaligned` also for rows that are not contiguous.
#[pyfunction]
pub(crate) fn sdpa<'py>(
    query: &Bound<'py, PyAny>,
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
    like: &Bound<'py, PyAny>,
    causal: bool,
    top_left: bool,
    scale: Option<f64>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = query.py();
    let qkv = [rows("q", query)?, rows("k", key)?, rows("v", value)?];
    let [q, _, v] = qkv.each_ref().map(|tensor| tensor.layout().shape());
    let [batch, seqlen, heads, width] = [0, 1, 2, 3].map(|dim| q[dim]);
    let made = if v[3] == width {
        empty_like(py)?.call1((query,))?
    } else {
        new_empty(query, (batch, heads, seqlen, v[3]))?
    };
    let logs = new_empty(like, (batch, heads, seqlen))?;
    {
        let (mut o, mut lse) = (rows("o", &made)?, of("lse", &logs)?);
        let (qkv, AttentionOptions { tensors, numbers }) =
            (qkv.map(Some), options(causal, top_left, scale));
        let compute = || run(&qkv, &tensors, &numbers, [Some(o.reborrow()), Some(lse.reborrow())]);
        py.detach(|| with_memory(compute))?;
    }
    Ok((made, logs))
}

/// Gradients of the call of [`sdpa`] with these operands and options, given its `o`, its `lse` and
/// the gradient `d_o` with respect to `o`: `(dq, dk, dv)`, which `make` makes of query, key and
/// value. `bytes` is a uint8 tensor on their device.
///
/// # Errors
/// `Misaligned` also for rows that are not contiguous.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sdpa_backward<'py>(
    d_o: &Bound<'py, PyAny>,
    query: &Bound<'py, PyAny>,
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
    o: &Bound<'py, PyAny>,
    lse: &Bound<'py, PyAny>,
    make: &Bound<'py, PyAny>,
    bytes: &Bound<'py, PyAny>,
    causal: bool,
    top_left: bool,
    scale: Option<f64>,
) -> PyResult<[Bound<'py, PyAny>; 3]> {
    let py = query.py();
    let [q, k, v] = [rows("q", query)?, rows("k", key)?, rows("v", value)?];
    let operands = [q, k, v, rows("o", o)?, of("lse", lse)?, rows("d_o", d_o)?];
    let made = [make.call1((query,))?, make.call1((key,))?, make.call1((value,))?];
    let write = [rows("dq", &made[0])?, rows("dk", &made[1])?, rows("dv", &made[2])?];
    let [dq, dk, dv] = write.map(Some);
    let options = options(causal, top_left, scale);
    let allocate = |count: usize| new_empty(bytes, (count,));
    compute(py, operands, options, [dq, dk, dv, None, None], allocate)?;
    Ok(made)
}

/// `torch.empty_like`
fn empty_like<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyAny>> {
    static FUNCTION: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    FUNCTION.import(py, "torch", "empty_like")
}

/// A new tensor of this size, with the type and the device of another one.
fn new_empty<'py>(
    like: &Bound<'py, PyAny>,
    size: impl IntoPyObject<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    like.call_method1(intern!(like.py(), "new_empty"), (size,))
}

/// A tensor `[B, H, S, D]` as the operations take it, `[B, S, H, D]`.
fn rows<'a>(what: &'static str, object: &'a Bound<'_, PyAny>) -> PyResult<Foreign<'a>> {
    let tensor = of(what, object)?;
    let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
    if matches!((shape, strides), ([.., size], [.., stride]) if *size > 1 && *stride != 1) {
        let text = format!("the rows of {what} are not contiguous");
        return Err(Failure { kind: Kind::Misaligned, text }.into());
    }
    Ok(tensor.permute(&[0, 2, 1, 3]).map_err(Failure::from)?)
}

fn options<T>(causal: bool, top_left: bool, scale: Option<f64>) -> AttentionOptions<T> {
    let right = if causal { 0 } else { -1 };
    let numbers = AttentionNumbers { right, top_left, scale, ..AttentionNumbers::default() };
    let tensors = AttentionTensors::from([const { None }; AttentionTensors::COUNT]);
    AttentionOptions { tensors, numbers }
}
