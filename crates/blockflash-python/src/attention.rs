//! Attention into tensors of the caller.

use crate::error::{Failure, Result};
use crate::foreign::{Foreign, views};
use crate::mask;
use blockflash_ops::{Align, Attention, BlockMask, CuSeqlens, Mask, View};
use pyo3::prelude::*;

/// The tensors of a call.
pub(crate) struct Tensors<'a> {
    pub(crate) q: Foreign<'a>,
    pub(crate) k: Foreign<'a>,
    pub(crate) v: Foreign<'a>,
    pub(crate) sink: Option<Foreign<'a>>,
    pub(crate) cu_seqlens_q: Option<Foreign<'a>>,
    pub(crate) cu_seqlens_k: Option<Foreign<'a>>,
    pub(crate) o: Foreign<'a>,
    pub(crate) lse: Option<Foreign<'a>>,
}

/// Everything else, as the operators of torch have it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) max_q: i64,
    pub(crate) max_k: i64,
    /// Keys before a query's own; -1 does not limit them.
    pub(crate) left: i64,
    /// Keys after a query's own; -1 does not limit them.
    pub(crate) right: i64,
    pub(crate) top_left: bool,
    /// `None` is `1 / sqrt(head_dim)`.
    pub(crate) scale: Option<f64>,
    /// 0 is none.
    pub(crate) softcap: f64,
    /// The number of a block mask; 0 is none.
    pub(crate) block_mask: i64,
}

/// Attention of q `[B, Sq, Hq, D]` to k, v `[B, Sk, Hk, D]`, or packed with `cu_seqlens_q` and
/// `cu_seqlens_k`, into `o` in the shape of q and `lse`, f32 `[B, Hq, Sq]` or `[Hq, Tq]`.
///
/// Works on torch's current stream of q's device. Gradients are none of its concern.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, o, lse=None, sink=None, cu_seqlens_q=None, cu_seqlens_k=None, max_q=0, max_k=0,
    left=-1, right=-1, top_left=false, scale=None, softcap=0.0, block_mask=0
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attention(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
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
    let optional = |what, tensor: Option<_>| tensor.map(|at| Foreign::of(what, at)).transpose();
    let tensors = Tensors {
        q: Foreign::of("q", q)?,
        k: Foreign::of("k", k)?,
        v: Foreign::of("v", v)?,
        sink: optional("sink", sink)?,
        cu_seqlens_q: optional("cu_seqlens_q", cu_seqlens_q)?,
        cu_seqlens_k: optional("cu_seqlens_k", cu_seqlens_k)?,
        o: Foreign::of("o", o)?,
        lse: optional("lse", lse)?,
    };
    let options = Options { max_q, max_k, left, right, top_left, scale, softcap, block_mask };
    Ok(q.py().detach(|| run(tensors, &options))?)
}

/// Computes; queues the work on a GPU.
pub(crate) fn run(tensors: Tensors<'_>, options: &Options) -> Result<()> {
    let Tensors { q, k, v, sink, cu_seqlens_q, cu_seqlens_k, o, lse } = tensors;
    let stream = q.stream()?;
    let read = [Some(q), Some(k), Some(v), sink, cu_seqlens_q, cu_seqlens_k];
    let (read, [o, lse]) = views(&read, [Some(o), lse])?;
    let block_mask = mask::lookup(options.block_mask, &stream)?;
    let block_mask = block_mask.as_deref().map(|entry| entry.mask());
    let o = o.ok_or_else(|| Failure::value("o is needed"))?;
    Ok(call(read, options, block_mask)?.forward_into(o, lse, &stream)?)
}

/// The call of q, k, v, sink, cu_seqlens_q and cu_seqlens_k.
pub(crate) fn call<'a>(
    [q, k, v, sink, cu_seqlens_q, cu_seqlens_k]: [Option<View<'a>>; 6],
    options: &Options,
    block_mask: Option<&'a BlockMask>,
) -> Result<Attention<'a>> {
    let (Some(q), Some(k), Some(v)) = (q, k, v) else {
        return Err(Failure::value("q, k and v are needed"));
    };
    let cu_seqlens = match (cu_seqlens_q, cu_seqlens_k) {
        (Some(q), Some(kv)) => Some(CuSeqlens {
            q,
            kv,
            max_seqlen_q: size("max_seqlen_q", options.max_q)?,
            max_seqlen_kv: size("max_seqlen_k", options.max_k)?,
        }),
        (None, None) => None,
        _ => return Err(Failure::value("cu_seqlens_q and cu_seqlens_k come together")),
    };
    Ok(Attention {
        mask: token_mask(options.left, options.right, options.top_left)?,
        softmax_scale: options.scale.map(|scale| scale as f32),
        softcap: (options.softcap != 0.0).then_some(options.softcap as f32),
        sink,
        cu_seqlens,
        block_mask,
        ..Attention::new(q, k, v)
    })
}

/// The mask of a window.
pub(crate) fn token_mask(left: i64, right: i64, top_left: bool) -> Result<Mask> {
    Ok(Mask::Window {
        left: side("left", left)?,
        right: side("right", right)?,
        align: align(top_left),
    })
}

pub(crate) fn align(top_left: bool) -> Align {
    if top_left { Align::TopLeft } else { Align::BottomRight }
}

/// A side of the window; -1 is unlimited.
pub(crate) fn side(which: &str, keys: i64) -> Result<Option<usize>> {
    let wrong = || Failure::value(format!("the {which} side of the window is {keys} keys"));
    if keys == -1 { Ok(None) } else { usize::try_from(keys).map(Some).map_err(|_| wrong()) }
}

fn size(what: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Failure::value(format!("{what} is {value}")))
}
