//! Everything against the f64 oracle, on the CPU and with the feature `cuda` on a GPU, too; and
//! what is refused.

mod attention;
mod cache;
mod errors;
mod flash_attn;
mod harness;
mod layers;
mod order;
