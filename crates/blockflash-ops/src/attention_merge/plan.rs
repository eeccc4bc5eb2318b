use super::AttentionMergeProblem;
use crate::check::{grid_x, to_i32};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;

/// Plans the launch of `kernel` for a problem that it accepts on this GPU; everything else comes
/// from the tensors.
///
/// # Errors
/// [`Error::Misaligned`] for a stride of the output that is not a multiple of 4 elements,
/// [`Error::TooLarge`] for a size beyond 32 bits, [`Error::Unsupported`] if the kernel does not
/// compute this problem.
pub fn plan(
    kernel: &Kernel,
    problem: &AttentionMergeProblem,
    gpu: &CudaProperties,
) -> Result<LaunchConfig> {
    fits(kernel, problem, gpu)?;
    let columns = tile_of::<AttentionMergeProblem>(kernel, &gpu.compute_capability)?.max(1);
    if let Some(stride) = problem.o.iter().find(|&stride| stride % 4 != 0) {
        let problem = format!("a stride is {stride} elements, not a multiple of 4");
        return Err(Error::Misaligned { what: "o", problem });
    }
    let threads = problem.head_dim.div_ceil(columns as usize);
    let threads = problem.rows.saturating_mul(problem.num_heads).saturating_mul(threads);
    let blocks = grid_x(&[threads.div_ceil(kernel.threads() as usize)])?;
    for (what, size) in [
        ("parts", problem.parts),
        ("rows", problem.rows),
        ("num_heads", problem.num_heads),
        ("head_dim", problem.head_dim),
    ] {
        to_i32(what, size)?;
    }
    Ok(LaunchConfig::of(kernel, blocks, false))
}
