//! Attention to caches of keys and values: cases, the contents of caches, the reference, and the
//! harness that runs a case on a device and judges every output and every slot of the cache.

mod case;
mod data;
mod edges;
mod reference;
mod run;
mod strategy;

pub use case::{CacheLayout, DecodeCase, RotaryCase};
pub use data::DecodeData;
pub use edges::{decode_edges, decode_lengths};
pub use reference::decode_reference;
pub use run::{DecodeInputs, DecodeOutputs, run_case};
pub use strategy::decode_cases;
