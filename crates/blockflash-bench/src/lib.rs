//! What the `blockflash` command is made of: tensor files, reproducible inputs, and an f64 reference to check results against.
#![forbid(unsafe_code)]

pub mod check;
pub mod io;
pub mod random;
