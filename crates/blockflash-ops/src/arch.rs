//! What a GPU can run, independent of the operation.

use blockflash_safe::CudaProperties;
use blockflash_sys::{Row, Target};

/// Rank of a target: machine code before PTX, as [`Target::ALL`] has them.
pub(crate) fn preference(target: Target) -> usize {
    Target::ALL.iter().position(|&other| other == target).unwrap_or(Target::ALL.len())
}

/// Whether the GPU can load the row's image and has the shared memory it needs; the error says what is in the way.
pub(crate) fn runs(row: &Row, gpu: &CudaProperties) -> Result<(), String> {
    if !row.target.runs_on(gpu.compute_capability) {
        return Err(format!("the image is compiled for {}", row.target));
    }
    if row.smem_bytes() > gpu.smem_per_block {
        return Err(format!(
            "a block needs {} bytes of shared memory, the GPU has {}",
            row.smem_bytes(),
            gpu.smem_per_block
        ));
    }
    Ok(())
}
