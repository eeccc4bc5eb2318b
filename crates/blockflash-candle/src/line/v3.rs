//! The functions of candle-flash-attn-v3: those of this crate with a last argument
//! `use_gqa_packing`. There it chooses among kernels; here either value gives the same result in
//! the same time.

use super::candle_core::{Result, Tensor};

/// [`super::flash_attn`].
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward).
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn(q, k, v, softmax_scale, causal)
}

/// [`super::flash_attn_windowed`].
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward).
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_windowed(q, k, v, softmax_scale, window_size_left, window_size_right)
}

/// [`super::flash_attn_alibi`].
///
/// # Errors
/// Always, because there is no ALiBi.
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_alibi(q, k, v, alibi_slopes, softmax_scale, causal)
}

/// [`super::flash_attn_alibi_windowed`].
///
/// # Errors
/// Always, because there is no ALiBi.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}

/// [`super::flash_attn_varlen`].
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward).
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_varlen(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    )
}

/// [`super::flash_attn_varlen_windowed`].
///
/// # Errors
/// As [`Attention::forward`](super::Attention::forward).
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}

/// [`super::flash_attn_varlen_alibi`].
///
/// # Errors
/// Always, because there is no ALiBi.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_varlen_alibi(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    )
}

/// [`super::flash_attn_varlen_alibi_windowed`].
///
/// # Errors
/// Always, because there is no ALiBi.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    super::flash_attn_varlen_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}
