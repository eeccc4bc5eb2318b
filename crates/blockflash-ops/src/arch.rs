//! What a GPU can run, independent of the operation.

use blockflash_safe::CudaProperties;
use blockflash_sys::{Row, Target};
use std::fmt;

/// Rank of a target: machine code before PTX, as [`Target::ALL`] has them.
pub(crate) fn preference(target: Target) -> usize {
    Target::ALL.iter().position(|&other| other == target).unwrap_or(Target::ALL.len())
}

/// Why a GPU cannot run a row. Selection asks every row at every call, so nothing is formatted
/// until somebody reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    Target(Target),
    SharedMemory { needed: u32, available: u32 },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Target(target) => write!(f, "the image is compiled for {target}"),
            Obstacle::SharedMemory { needed, available } => {
                write!(f, "a block needs {needed} bytes of shared memory, the GPU has {available}")
            }
        }
    }
}

/// Whether the GPU can load the row's image and has the shared memory it needs.
pub(crate) fn runs(row: &Row, gpu: &CudaProperties) -> Result<(), Obstacle> {
    if !row.target.runs_on(gpu.compute_capability) {
        return Err(Obstacle::Target(row.target));
    }
    let (needed, available) = (row.smem_bytes(), gpu.smem_per_block);
    if needed > available { Err(Obstacle::SharedMemory { needed, available }) } else { Ok(()) }
}
