//! The crate for one line of candle: the module that this file is a part of says for which, by its
//! `candle_core`. Nothing here names another one.

use super::candle_core;

mod attention;
mod backward;
mod blocks;
mod bsr;
mod error;
mod flash;
#[cfg(feature = "cuda")]
mod foreign;
mod held;
mod index;
mod index_choice;
mod kv_cache;
mod memory;
mod mla;
mod options;
mod paged;
pub mod paged_attn;
mod sequences;
pub mod v3;

pub use attention::{Attention, Packed, Scales};
pub use blockflash_ops::{
    Activation, Align, BlockGeometry, BlockMask, BlockReduction, BsrPattern, Mask, Scores,
};
pub use blocks::{BlockTopK, to_device, token_mask};
pub use bsr::BsrLinear;
pub use flash::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_windowed, flash_attn_windowed,
};
pub use index::IndexAttention;
pub use index_choice::{IndexScores, IndexTopK};
pub use kv_cache::KvCache;
pub use mla::mla_decode;
pub use paged::{flash_attn_varlen_paged_windowed, flash_attn_varlen_paged_windowed_scaled};
pub use sequences::{Offsets, Sequences};
