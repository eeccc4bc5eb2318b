//! The functions of candle-flash-attn, with its names, arguments and meaning.

use super::candle_core::{Result, Tensor};
use super::{Align, Attention, Mask, Packed, Scores};

/// Attention of q `[batch, seqlen_q, num_heads_q, head_dim]` to k and v
/// `[batch, seqlen_kv, num_heads_kv, head_dim]`. A causal mask is aligned at the last query and
/// key. Returns the shape of q.
///
/// # Errors
/// As [`Attention::forward`].
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// [`flash_attn`] to a window: keys before and after the query's own; `None` does not limit a side.
///
/// # Errors
/// As [`Attention::forward`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let mask = window(window_size_left, window_size_right);
    Attention { scores: scores(softmax_scale, mask, None), ..Attention::new(q, k, v) }.forward()
}

/// [`flash_attn`] with ALiBi: `alibi_slopes` is f32 `[num_heads_q]` or `[batch, num_heads_q]`, and
/// the score of query `i` and key `j` gets `-slope * |i + seqlen_kv - seqlen_q - j|`.
///
/// # Errors
/// As [`Attention::forward`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let right = causal.then_some(0);
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, right)
}

/// [`flash_attn_windowed`] with ALiBi, as in [`flash_attn_alibi`].
///
/// # Errors
/// As [`Attention::forward`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let mask = window(window_size_left, window_size_right);
    let scores = Scores { alibi: Some(alibi_slopes), ..scores(softmax_scale, mask, None) };
    Attention { scores, ..Attention::new(q, k, v) }.forward()
}

/// [`flash_attn_windowed`] with scores `softcap * tanh(score / softcap)`; a softcap of 0 is none.
/// ALiBi, as in [`flash_attn_alibi`], is added behind that.
///
/// # Errors
/// As [`Attention::forward`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let mask = window(window_size_left, window_size_right);
    let scores = Scores { alibi: alibi_slopes, ..scores(softmax_scale, mask, Some(softcap)) };
    Attention { scores, ..Attention::new(q, k, v) }.forward()
}

/// Attention of packed sequences, q `[total_q, num_heads_q, head_dim]` and k and v
/// `[total_kv, num_heads_kv, head_dim]`. Sequence `i` has the queries
/// `seqlens_q[i]..seqlens_q[i + 1]` and the keys `seqlens_k[i]..seqlens_k[i + 1]`, u32 or i32. The
/// maxima bound the lengths. Returns the shape of q.
///
/// # Errors
/// As [`Attention::forward`].
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
) -> Result<Tensor> {
    let (seqlens, maxima) = ([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let mask = window(None, causal.then_some(0));
    varlen([q, k, v], seqlens, maxima, scores(softmax_scale, mask, None))
}

/// [`flash_attn_varlen`] to a window, as in [`flash_attn_windowed`].
///
/// # Errors
/// As [`Attention::forward`].
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
) -> Result<Tensor> {
    let (seqlens, maxima) = ([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let mask = window(window_size_left, window_size_right);
    varlen([q, k, v], seqlens, maxima, scores(softmax_scale, mask, None))
}

/// [`flash_attn_varlen`] with ALiBi, as in [`flash_attn_alibi`], with the lengths of each sequence.
///
/// # Errors
/// As [`Attention::forward`].
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
) -> Result<Tensor> {
    let (seqlens, maxima) = ([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let mask = window(None, causal.then_some(0));
    let scores = Scores { alibi: Some(alibi_slopes), ..scores(softmax_scale, mask, None) };
    varlen([q, k, v], seqlens, maxima, scores)
}

/// [`flash_attn_varlen_windowed`] with ALiBi, as in [`flash_attn_varlen_alibi`].
///
/// # Errors
/// As [`Attention::forward`].
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
) -> Result<Tensor> {
    let (seqlens, maxima) = ([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let mask = window(window_size_left, window_size_right);
    let scores = Scores { alibi: Some(alibi_slopes), ..scores(softmax_scale, mask, None) };
    varlen([q, k, v], seqlens, maxima, scores)
}

/// [`flash_attn_varlen_windowed`] with a softcap and ALiBi, as in
/// [`flash_attn_alibi_windowed_softcap`].
///
/// # Errors
/// As [`Attention::forward`].
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let (seqlens, maxima) = ([seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k]);
    let mask = window(window_size_left, window_size_right);
    let scores = Scores { alibi: alibi_slopes, ..scores(softmax_scale, mask, Some(softcap)) };
    varlen([q, k, v], seqlens, maxima, scores)
}

fn varlen(
    [q, k, v]: [&Tensor; 3],
    [seqlens_q, seqlens_k]: [&Tensor; 2],
    [max_seqlen_q, max_seqlen_kv]: [usize; 2],
    scores: Scores<&Tensor>,
) -> Result<Tensor> {
    let packed = Packed { q: seqlens_q, kv: seqlens_k, max_seqlen_q, max_seqlen_kv };
    Attention { scores, cu_seqlens: Some(packed), ..Attention::new(q, k, v) }.forward()
}

/// The scores of a call; a softcap of 0 is none.
pub(crate) fn scores<S>(softmax_scale: f32, mask: Mask, softcap: Option<f32>) -> Scores<S> {
    let softcap = softcap.filter(|&softcap| softcap != 0.0);
    Scores { softmax_scale: Some(softmax_scale), softcap, ..mask.into() }
}

/// The mask of two sides of a window.
pub(crate) fn window(left: Option<usize>, right: Option<usize>) -> Mask {
    match (left, right) {
        (None, None) => Mask::Full,
        (left, right) => Mask::Window { left, right, align: Align::BottomRight },
    }
}
