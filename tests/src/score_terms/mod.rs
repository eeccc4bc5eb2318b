//! Score terms: cases with a bias, ALiBi and partial blocks, their references, and runs on a
//! device.

mod case;
mod data;
mod run;

pub use case::{BiasCase, SlopesOf, TermCase, term_cases};
pub use data::TermData;
pub use run::{run_backward, run_forward};
