//! Attention to caches of keys and values: cases, the contents of caches, the reference, and the
//! harness that runs a case on a device and judges every output and every slot of the cache.

mod case;
pub(crate) mod codes;
mod data;
mod edges;
mod garbage;
mod kernels;
mod merge;
mod outputs;
mod reference;
mod replays;
mod run;
mod strategy;

pub use case::{CacheLayout, DecodeCase, RotaryCase, TailCase};
pub use codes::{CodeCase, CodeScales};
pub use data::DecodeData;
pub use edges::{decode_edges, decode_lengths, decode_prefills, decode_splits, decode_terms};
pub use garbage::survives_garbage;
pub use kernels::{
    DecodeGroup, alone_as_in_a_batch, append_or_refuse, decode_groups, decode_groups_with_terms,
    run_or_refuse, same_bits,
};
pub use merge::{MergeCase, merge_cases, run_merge, run_sum};
pub use outputs::{DecodeOutputs, run_case};
pub use reference::decode_reference;
pub use replays::{Captured, replays};
pub use run::DecodeInputs;
pub(crate) use run::largest_workspace;
pub use strategy::{decode_cases, decode_cases_of_codes, decode_cases_with_terms};
