//! The functions of candle-flash-attn-v3: those of this crate with a last argument
//! `use_gqa_packing`. There it chooses among kernels; here either value gives the same result in
//! the same time.

use super::candle_core::{Result, Tensor};

/// Functions by their names, tensors, and other arguments, as in `super::flash`.
macro_rules! with_gqa_packing {
    ($($name:ident [$($tensor:ident),*] ($($argument:ident: $kind:ty),*);)*) => {$(
        #[doc = concat!("[`super::", stringify!($name), "`].")]
        ///
        /// # Errors
        #[doc = concat!("As [`super::", stringify!($name), "`].")]
        #[allow(clippy::too_many_arguments)]
        pub fn $name(
            $($tensor: &Tensor,)*
            $($argument: $kind,)*
            _use_gqa_packing: bool,
        ) -> Result<Tensor> {
            super::$name($($tensor,)* $($argument),*)
        }
    )*};
}

type Side = Option<usize>;

with_gqa_packing! {
    flash_attn [q, k, v] (softmax_scale: f32, causal: bool);
    flash_attn_windowed [q, k, v] (
        softmax_scale: f32, window_size_left: Side, window_size_right: Side
    );
    flash_attn_alibi [q, k, v, alibi_slopes] (softmax_scale: f32, causal: bool);
    flash_attn_alibi_windowed [q, k, v, alibi_slopes] (
        softmax_scale: f32, window_size_left: Side, window_size_right: Side
    );
    flash_attn_varlen [q, k, v, seqlens_q, seqlens_k] (
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, causal: bool
    );
    flash_attn_varlen_windowed [q, k, v, seqlens_q, seqlens_k] (
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, window_size_left: Side,
        window_size_right: Side
    );
    flash_attn_varlen_alibi [q, k, v, alibi_slopes, seqlens_q, seqlens_k] (
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, causal: bool
    );
    flash_attn_varlen_alibi_windowed [q, k, v, alibi_slopes, seqlens_q, seqlens_k] (
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, window_size_left: Side,
        window_size_right: Side
    );
}
