//! torch's scaled dot-product attention, whose tensors are `[B, H, S, D]`, with its own options.

use crate::attention::run;
use crate::attention_backward::compute;
use crate::error::{Failure, Kind, with_memory};
use crate::foreign::{Foreign, of};
use blockflash_foreign::{AttentionNumbers, AttentionOptions, AttentionTensors};
use pyo3::prelude::*;

/// Attention of query `[B, Hq, Sq, D]` to key and value `[B, Hk, Sk, D]` into `o` in the shape of
/// query, with the head_dim of value, and `lse`, f32 `[B, Hq, Sq]`; causal at the top left or at
/// the bottom right.
///
/// Works on torch's current stream of the device of query. Does not record gradients.
///
/// # Errors
/// `Misaligned` also for rows that are not contiguous.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sdpa(
    query: &Bound<'_, PyAny>,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    causal: bool,
    top_left: bool,
    scale: Option<f64>,
) -> PyResult<()> {
    let qkv = [rows("q", query)?, rows("k", key)?, rows("v", value)?].map(Some);
    let (mut o, mut lse) = (rows("o", o)?, of("lse", lse)?);
    let AttentionOptions { tensors, numbers } = options(causal, top_left, scale);
    let compute = || run(&qkv, &tensors, &numbers, [Some(o.reborrow()), Some(lse.reborrow())]);
    Ok(query.py().detach(|| with_memory(compute))?)
}

/// Gradients of the call of [`sdpa`] with these operands and options, given its `o`, its `lse` and
/// the gradient `d_o` with respect to `o`, into `dq`, `dk` and `dv` in the shapes of query, key
/// and value.
///
/// `allocate` gets a number of bytes and returns a uint8 tensor of that size on the device of
/// query. On a GPU it is called once for the workspace.
///
/// # Errors
/// `Misaligned` also for rows that are not contiguous.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn sdpa_backward(
    d_o: &Bound<'_, PyAny>,
    query: &Bound<'_, PyAny>,
    key: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    allocate: &Bound<'_, PyAny>,
    causal: bool,
    top_left: bool,
    scale: Option<f64>,
) -> PyResult<()> {
    let [q, k, v] = [rows("q", query)?, rows("k", key)?, rows("v", value)?];
    let operands = [q, k, v, rows("o", o)?, of("lse", lse)?, rows("d_o", d_o)?];
    let [dq, dk, dv] = [rows("dq", dq)?, rows("dk", dk)?, rows("dv", dv)?].map(Some);
    let options = options(causal, top_left, scale);
    compute(query.py(), operands, options, [dq, dk, dv, None], allocate)
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
    AttentionOptions { tensors: AttentionTensors::from([const { None }; 3]), numbers }
}
