//! Attention by an index: cases, their numbers and lists, the reference, and the harness that runs
//! a case on a device and judges every output.

mod case;
mod data;
mod run;

pub use case::{IndexCase, IndexForm, KeyLayout};
pub use data::IndexData;
pub use run::run_index_case;
