//! Scales of queries, keys and values of 8 bits.

use super::fit::{Fit, optional};
use crate::view::Used;
use crate::{DType, View};
use blockflash_sys::params::{blockflash_attention_fwd_params, blockflash_operand_scales};

/// Scales of q, of k and of v.
pub(super) type OperandScales<'a> = [Option<View<'a>>; 3];

pub(super) fn used<'v>(scales: &'v OperandScales<'_>) -> [Option<Used<'v>>; 3] {
    scales.each_ref().map(|scale| scale.as_ref().map(View::used))
}

/// Checks the scales against sizes that were written, and writes the argument.
pub(super) fn fit(
    scales: &OperandScales<'_>,
    sizes: &blockflash_attention_fwd_params,
    params: &mut blockflash_operand_scales,
) -> Fit {
    let [q, k, v] = scales;
    let [batch, of_q, of_kv] = [sizes.batch, sizes.num_heads_q, sizes.num_heads_kv].map(i64::from);
    params.q_heads_per_scale = 1;
    if let Some(q) = q {
        let by_kv_heads = of_q != of_kv && matches!(q.shape(), [_, h] if *h as i64 == of_kv);
        let heads = if by_kv_heads { of_kv } else { of_q };
        [params.q_stride_batch, params.q_stride_head] = strides("q_scale", q, [batch, heads])?;
        if by_kv_heads {
            params.q_heads_per_scale = sizes.num_heads_q / sizes.num_heads_kv;
        }
    }
    if let Some(k) = k {
        [params.k_stride_batch, params.k_stride_head] = strides("k_scale", k, [batch, of_kv])?;
    }
    if let Some(v) = v {
        [params.v_stride_batch, params.v_stride_head] = strides("v_scale", v, [batch, of_kv])?;
    }
    [params.q, params.k, params.v] = [q, k, v].map(|scale| optional(scale.as_ref()).cast::<f32>());
    Ok(())
}

/// The strides of scales along sequences and heads, 0 where all have the same one.
fn strides(name: &str, view: &View<'_>, [batch, heads]: [i64; 2]) -> Fit<[i64; 2]> {
    let stride = |dim: usize, size: i64| match view.shape()[dim] {
        1 => Some(0),
        found => (found as i64 == size).then(|| view.strides()[dim] as i64),
    };
    let found = match view.shape().len() {
        _ if view.dtype() != DType::F32 => None,
        1 => stride(0, 1).map(|_| [0; 2]),
        2 => stride(0, batch).zip(stride(1, heads)).map(|(batch, head)| [batch, head]),
        _ => None,
    };
    found.ok_or_else(|| {
        format!(
            "{name} is {} {:?}, expected f32 [1] or [{batch} or 1, {heads} or 1]",
            view.dtype(),
            view.shape()
        )
    })
}
