//! Dense times dense at the blocks of a BSR matrix: cases, their data, the oracle, and the harness
//! that runs a case on a device.

mod case;
mod edges;
mod oracle;
mod run;

pub use case::{SddmmCase, SddmmData};
pub use edges::{Limits, edge_cases, sddmm_cases};
pub use oracle::SddmmReference;
pub use run::{check_values, run_and_check, run_case, run_on_kernel};
