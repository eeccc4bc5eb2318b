//! The parameters of a launch as text, without what is between the fields.

use blockflash_fake_driver::Launch;
use blockflash_sys::params::*;
use std::fmt::Debug;

/// All fields of the parameter struct of a launch of one of the cases.
pub(crate) fn fields(launch: &Launch) -> String {
    let has = |part: &str| launch.symbol.contains(part);
    let fields = match has("_sm90a_") {
        true if has("attention_index") => read::<blockflash_attention_index_tma_params>,
        _ if has("index_union") => read::<blockflash_index_union_params>,
        _ if has("index_scores") => read::<blockflash_index_scores_params>,
        _ if has("top_k") => read::<blockflash_top_k_params>,
        _ if has("latent_index") || has("_index") => read::<blockflash_attention_index_params>,
        true if has("attention_fwd_small") => read::<blockflash_attention_fwd_params>,
        true if has("attention_fwd") => read::<blockflash_attention_fwd_tma_params>,
        true if has("attention_bwd") => read::<blockflash_attention_bwd_tma_params>,
        true if has("attention_decode") => read::<blockflash_attention_decode_runs_params>,
        true if has("bsr_matmul") => read::<blockflash_bsr_matmul_tma_params>,
        true if has("bsr_sddmm") => read::<blockflash_bsr_sddmm_params>,
        false if has("attention_fwd") => read::<blockflash_attention_fwd_params>,
        false if has("attention_bwd") => read::<blockflash_attention_bwd_params>,
        false if has("attention_decode") => read::<blockflash_attention_decode_params>,
        false if has("kv_append_codes") => read::<blockflash_kv_append_codes_params>,
        false if has("kv_append") => read::<blockflash_kv_append_params>,
        false if has("quantize") => read::<blockflash_quantize_params>,
        false if has("bsr_matmul_any") => read::<blockflash_bsr_matmul_any_params>,
        false if has("bsr_matmul_narrow") => read::<blockflash_bsr_matmul_narrow_params>,
        false if has("bsr_matmul") => read::<blockflash_bsr_matmul_portable_params>,
        false if has("bsr_sddmm") => read::<blockflash_bsr_sddmm_portable_params>,
        _ => panic!("{}", launch.symbol),
    };
    fields(&launch.params)
}

fn read<T: Debug>(bytes: &[u8]) -> String {
    assert_eq!(bytes.len(), size_of::<T>());
    // SAFETY: a copy of a struct of integers, floats, pointers and their arrays, in which all bits
    // are a value.
    format!("{:?}", unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}
