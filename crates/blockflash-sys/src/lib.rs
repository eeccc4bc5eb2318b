//! Precompiled kernels of blockflash, the table that describes them, and their parameter structs.
//!
//! This crate makes no CUDA call and contains no unsafe code. [`manifest`] is the single place
//! where tile sizes are written: the kernel build, the planner, the tests and the benches all read
//! it.
#![forbid(unsafe_code)]

mod dtype;
mod expect;
mod head_dims;
pub mod image;
pub mod manifest;
#[rustfmt::skip]
#[allow(missing_docs, non_camel_case_types)]
pub mod params;
mod target;

pub use dtype::{DType, ElementTypes};
pub use expect::Expect;
pub use head_dims::HeadDims;
pub use manifest::{BlockMaskKernel, Kernel, Major, Probe};
pub use target::{ComputeCapability, Target};
