//! What the `blockflash` command is made of: tensor files, reproducible inputs, and an f64
//! reference to check results against.
#![forbid(unsafe_code)]

pub mod block_pattern;
pub mod case;
pub mod ceilings;
pub mod check;
mod error;
pub mod io;
pub mod machine;
pub mod ours;
pub mod peers;
pub mod plot;
pub mod random;
pub mod record;
pub mod report;
pub mod rounds;
pub mod suite;
pub mod telemetry;
pub mod timing;
pub mod turns;

pub use error::{Error, Result};
