//! What the `blockflash` command is made of: tensor files, reproducible inputs, suites and their
//! measurement, reports. Results are checked against the f64 oracle of `blockflash-oracle`.
#![forbid(unsafe_code)]

pub mod ceilings;
pub mod chart;
pub mod energy;
mod error;
pub mod machine;
pub mod order;
pub mod ours;
pub mod peers;
pub mod record;
pub mod report;
pub mod rounds;
pub mod suite;
pub mod telemetry;
pub mod timing;

pub use blockflash_cases::{block_pattern, case, document, io, memory, placement, random};
pub use error::{Error, Result};
