//! BSR matrix times dense matrix: cases, their data, the oracle, and the harness that runs a case
//! on a device.

mod case;
mod edges;
mod oracle;
mod run;
mod strategy;

pub use crate::attention::Choice;
pub use blockflash_ops::bsr_matmul::BiasKind;
pub use case::{BsrCase, BsrData, NanInB, Pattern, Workspace, order, tiles};
pub use edges::{column_cases, edge_cases, epilogue_cases};
pub use oracle::{BsrReference, activate};
pub use run::{check_output, run_and_check, run_case, run_on_kernel};
pub use strategy::{Limits, bsr_cases, patterns};
