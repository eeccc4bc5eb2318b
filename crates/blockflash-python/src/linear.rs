//! Products with block-sparse matrices, into tensors of the caller.

use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, of, optional, views};
use crate::pattern::{lookup, workspace};
use blockflash_ops::{Activation, Bias, BsrMatmul, BsrSddmm, BsrView};
use pyo3::prelude::*;

/// `y = activation(x·Wᵀ + bias)` of x `[tokens, cols]` and W with these values, into y
/// `[tokens, rows]`.
#[pyfunction]
#[pyo3(signature = (x, values, bias, y, pattern, activation=0))]
pub(crate) fn bsr_linear(
    x: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    y: &Bound<'_, PyAny>,
    pattern: i64,
    activation: i64,
) -> PyResult<()> {
    let activation = match activation {
        0 => Activation::None,
        1 => Activation::Relu,
        2 => Activation::Gelu,
        3 => Activation::Silu,
        _ => Err(Failure::value(format!("there is no activation of number {activation}")))?,
    };
    let bias = optional("bias", bias)?;
    product(x, values, bias, y, pattern, Some(activation))
}

/// `y = x·W` of x `[tokens, rows]` and W with these values, into y `[tokens, cols]`.
#[pyfunction]
pub(crate) fn dense_bsr(
    x: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    y: &Bound<'_, PyAny>,
    pattern: i64,
) -> PyResult<()> {
    product(x, values, None, y, pattern, None)
}

/// A product with W, if there is no activation, else with its transpose.
fn product(
    x: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    bias: Option<Foreign<'_>>,
    y: &Bound<'_, PyAny>,
    pattern: i64,
    linear: Option<Activation>,
) -> PyResult<()> {
    let py = x.py();
    let (x, values) = (of("x", x)?, of("values", values)?);
    let y = of("y", y)?;
    let run = || -> Result<()> {
        let stream = x.stream()?;
        let memory = || Ok((lookup(pattern, &stream)?, workspace(&stream)?));
        let (place, workspace) = with_memory(memory)?;
        let read = [Some(x), Some(values), bias];
        let ([Some(x), Some(values), bias], [], [Some(y)]) =
            views((read.each_ref(), []), [Some(y)])?
        else {
            return Err(Failure::value("x, values and y are needed"));
        };
        let w = BsrView::new(&place.pattern, values)?;
        let product = match linear {
            Some(activation) => BsrMatmul { activation, ..BsrMatmul::linear(x, w)? },
            None => BsrMatmul::dense_sparse(x, w, &place.transpose)?,
        };
        let bias = bias.map_or(Bias::None, Bias::PerRow);
        let product = BsrMatmul { bias, workspace: workspace.as_deref(), ..product };
        Ok(product.matmul_into(y.permute(&[1, 0])?, &stream)?)
    };
    Ok(py.detach(run)?)
}

/// `a·b` of a `[rows, k]` and b `[k, cols]` at the blocks of the pattern, into values
/// `[nnz, block_size, block_size]`.
#[pyfunction]
pub(crate) fn sddmm(
    a: &Bound<'_, PyAny>,
    b: &Bound<'_, PyAny>,
    values: &Bound<'_, PyAny>,
    pattern: i64,
) -> PyResult<()> {
    let py = a.py();
    let (a, b) = (of("a", a)?, of("b", b)?);
    let values = of("values", values)?;
    let run = || -> Result<()> {
        let stream = a.stream()?;
        let place = with_memory(|| lookup(pattern, &stream))?;
        let read = [Some(a), Some(b)];
        let ([Some(a), Some(b)], [], [Some(values)]) =
            views((read.each_ref(), []), [Some(values)])?
        else {
            return Err(Failure::value("a, b and values are needed"));
        };
        Ok(BsrSddmm::new(&place.pattern, a, b).sddmm_into(values, &stream)?)
    };
    Ok(py.detach(run)?)
}
