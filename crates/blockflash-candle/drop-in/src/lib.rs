//! The models of candle-transformers, with blockflash-candle under the name of candle-flash-attn,
//! and the functions of candle-flash-attn-v3.

macro_rules! line {
    ($name:ident, $transformers:ident, $v3:ident) => {
        pub mod $name {
            pub use $transformers::models;
            pub use $v3::{
                flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_varlen,
                flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
                flash_attn_varlen_windowed, flash_attn_windowed,
            };
        }
    };
}

#[cfg(feature = "candle-0-10")]
line!(candle_0_10, candle_transformers_0_10, candle_flash_attn_v3_0_10);
#[cfg(feature = "candle-0-11")]
line!(candle_0_11, candle_transformers_0_11, candle_flash_attn_v3_0_11);
#[cfg(feature = "candle-0-9")]
line!(candle_0_9, candle_transformers_0_9, candle_flash_attn_v3_0_9);
