//! Quantising into tensors of the caller.

use crate::error::{Failure, Result};
use crate::foreign::{of, optional, views};
use blockflash_ops::{PackedTokens, Quantize, QuantizeOutputMut, QuantizeScale};
use pyo3::prelude::*;

/// Writes the codes of x `[B, S, H, D]`, or packed `[T, H, D]` with `cu_seqlens`, into `codes` in
/// its shape. The scales are `given`, or chosen for the whole tensor, each sequence and head
/// (`head`) or each token and head (`token`) and written into `scale`; what is subtracted goes into
/// `mean`, f32 `[B, H, D]`, if it is there.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn quantize(
    x: &Bound<'_, PyAny>,
    codes: &Bound<'_, PyAny>,
    given: Option<&Bound<'_, PyAny>>,
    scale: Option<&Bound<'_, PyAny>>,
    mean: Option<&Bound<'_, PyAny>>,
    cu_seqlens: Option<&Bound<'_, PyAny>>,
    max_seqlen: usize,
    per: &str,
    rotate: bool,
) -> PyResult<()> {
    let read = [Some(of("x", x)?), optional("scale", given)?, optional("cu_seqlens", cu_seqlens)?];
    let write = [Some(of("codes", codes)?), optional("scale", scale)?, optional("mean", mean)?];
    let subtract_mean = mean.is_some();
    let run = || -> Result<()> {
        let needed = || Failure::value("x and codes are needed");
        let stream = read[0].as_ref().ok_or_else(needed)?.stream()?;
        let ([x, given, cu_seqlens], [], [codes, scale, mean]) =
            views((read.each_ref(), []), write)?;
        let (Some(x), Some(codes)) = (x, codes) else { return Err(needed()) };
        let scale_of = match (given, per) {
            (Some(given), _) => QuantizeScale::Given(given),
            (None, "tensor") => QuantizeScale::Tensor,
            (None, "head") => QuantizeScale::Head,
            (None, "token") => QuantizeScale::Token,
            (None, other) => {
                let text = format!("per is {other:?}, but must be 'tensor', 'head' or 'token'");
                return Err(Failure::value(text));
            }
        };
        let packed = cu_seqlens.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
        let call = Quantize { packed, scale: scale_of, subtract_mean, rotate, ..Quantize::new(x) };
        Ok(call.quantize_into(QuantizeOutputMut { codes, scale, mean }, &stream)?)
    };
    Ok(x.py().detach(run)?)
}
