//! The tests for one line of candle: the module that this file is a part of says for which.

use super::{blockflash_candle, candle_core};

mod added;
mod attention;
mod cache;
mod codes;
mod errors;
mod flash_attn;
mod harness;
mod head_dims;
mod index;
mod layers;
mod mla;
mod order;
mod paged_attn;
