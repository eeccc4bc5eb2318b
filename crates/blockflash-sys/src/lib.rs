//! Precompiled kernels of blockflash, the table that describes them, and their parameter structs.
//!
//! This crate makes no CUDA call and contains no unsafe code. [`manifest`] is the single place
//! where tile sizes are written: the kernel build, the planner, the tests and the benches all read
//! it.
#![forbid(unsafe_code)]

mod block_mask;
mod bsr_matmul_hopper;
mod bsr_sddmm;
mod dtype;
mod expect;
pub mod image;
pub mod manifest;
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types)]
pub mod params;
mod probe;
mod rows;
mod target;
mod tile;

pub use block_mask::BlockMaskKernel;
pub use bsr_sddmm::Major;
pub use dtype::DType;
pub use expect::Expect;
pub use manifest::Row;
pub use probe::Probe;
pub use target::{ComputeCapability, Target};
