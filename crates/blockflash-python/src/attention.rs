//! Attention into tensors of the caller.

use crate::error::{Failure, Result};
use crate::foreign::{Foreign, Operands, of, optional, views};
use crate::mask;
use crate::options::Given;
use crate::window::token_mask;
use blockflash_foreign::{
    AttentionNumbers, AttentionOptions, AttentionTensors, ScoreNumbers, ScoreTensors,
};
use blockflash_ops::{Attention, BlockMask, CuSeqlens, DType, OperandScales, Scores, View};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Attention of q `[B, Sq, Hq, D]` to k, v `[B, Sk, Hk, D]`, or packed with `cu_seqlens_q` and
/// `cu_seqlens_k`, into `o` in the shape of q and `lse`, f32 `[B, Hq, Sq]` or `[Hq, Tq]`.
///
/// Works on torch's current stream of q's device. Does not record gradients.
#[pyfunction]
#[pyo3(signature = (q, k, v, o, lse=None, *options))]
pub(crate) fn attention(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    options: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let qkv = [Some(of("q", q)?), Some(of("k", k)?), Some(of("v", v)?)];
    let AttentionOptions { tensors, numbers } = Given::attention(options)?;
    let write = [Some(of("o", o)?), optional("lse", lse)?];
    Ok(q.py().detach(|| run(&qkv, &tensors, &numbers, write))?)
}

/// Computes from q, k, v and the tensors of the options into o and lse; queues the work on a GPU.
pub(crate) fn run<'a>(
    qkv: &Operands<'a, 3>,
    tensors: &AttentionTensors<Option<Foreign<'a>>>,
    numbers: &AttentionNumbers,
    write: Operands<'a, 2>,
) -> Result<()> {
    let stream = qkv[0].as_ref().ok_or_else(|| Failure::value("q is needed"))?.stream()?;
    let (qkv, tensors, [o, lse]) = views((qkv.each_ref(), tensors.each_ref().into()), write)?;
    let block_mask = mask::lookup(numbers.block_mask, &stream)?;
    let block_mask = block_mask.as_deref().map(|entry| entry.mask());
    let o = o.ok_or_else(|| Failure::value("o is needed"))?;
    Ok(call(qkv, tensors.into(), numbers, block_mask)?.forward_into(o, lse, &stream)?)
}

/// The call of q, k and v with these options.
pub(crate) fn call<'a>(
    qkv: [Option<View<'a>>; 3],
    tensors: AttentionTensors<Option<View<'a>>>,
    numbers: &AttentionNumbers,
    block_mask: Option<&'a BlockMask>,
) -> Result<Attention<'a>> {
    let [Some(q), Some(k), Some(v)] = qkv else {
        return Err(Failure::value("q, k and v are needed"));
    };
    let cu_seqlens = match (tensors.cu_seqlens_q, tensors.cu_seqlens_k) {
        (Some(q), Some(kv)) => Some(CuSeqlens {
            q,
            kv,
            max_seqlen_q: size("max_seqlen_q", numbers.max_q)?,
            max_seqlen_kv: size("max_seqlen_k", numbers.max_k)?,
        }),
        (None, None) => None,
        _ => return Err(Failure::value("cu_seqlens_q and cu_seqlens_k come together")),
    };
    Ok(Attention {
        scores: scores(numbers.into(), tensors.into())?,
        cu_seqlens,
        block_mask,
        scales: OperandScales { q: tensors.q_scale, k: tensors.k_scale, v: tensors.v_scale },
        o_dtype: out_dtype(numbers)?,
        ..Attention::new(q, k, v)
    })
}

/// The element type that is asked for the output.
pub(crate) fn out_dtype(numbers: &AttentionNumbers) -> Result<Option<DType>> {
    match numbers.out_dtype {
        0 => Ok(None),
        1 => Ok(Some(DType::F16)),
        2 => Ok(Some(DType::BF16)),
        3 => Ok(Some(DType::F32)),
        other => Err(Failure::value(format!("out_dtype is {other}, but must be 0, 1, 2 or 3"))),
    }
}

/// What happens to a score under these options.
pub(crate) fn scores<'a>(
    numbers: ScoreNumbers,
    tensors: ScoreTensors<Option<View<'a>>>,
) -> Result<Scores<View<'a>>> {
    let ScoreTensors { sink, bias, alibi } = tensors;
    let ScoreNumbers { left, right, top_left, scale, softcap } = numbers;
    Ok(Scores {
        mask: token_mask(left, right, top_left)?,
        softmax_scale: scale.map(|scale| scale as f32),
        softcap: (softcap != 0.0).then_some(softcap as f32),
        sink,
        bias,
        alibi,
    })
}

fn size(what: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Failure::value(format!("{what} is {value}")))
}
