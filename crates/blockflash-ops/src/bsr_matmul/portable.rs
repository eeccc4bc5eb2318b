//! Estimated times of the portable kernels on GPUs on which none was measured, in clocks.

use super::BsrProblem;
use crate::rates::{GpuRates, Grid, Units, Work, resident};
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::BsrMatmul;

/// How much faster a narrow tile must be estimated to be: estimates are not measurements, and it
/// fetches A more often.
const DOUBT: f64 = 1.1;
/// Columns of a narrow tile.
const NARROW: u32 = 64;
/// Columns of C that all block rows compute before the next ones, so that L2 holds their part of B.
const PANEL_N: usize = 1024;
/// Warps that keep the tensor cores of an SM busy.
const SCHEDULERS: f64 = 4.0;

/// Clocks of a kernel, from what the units of the GPU can do. Copies, reads of shared memory and
/// products of a CTA overlap, so the slowest of them bounds it.
pub(super) fn portable_time(
    tile: &BsrMatmul,
    kernel: &Kernel,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> f64 {
    let rates = GpuRates::of(gpu);
    let [rows, columns] = [tile.block_size, tile.block_n].map(f64::from);
    let size = tile.dtype.size() as f64;
    let block_rows = problem.m.div_ceil(problem.block_size) as f64;
    // Of a row of the part of B that a tile multiplies.
    let units = rates.units(&Work {
        flops: 2.0 * rows * columns,
        exponentials: 0.0,
        // Each warp along N reads all of A, each along M all of B.
        shared_bytes: size
            * (f64::from(1 + tile.warps_n) * rows + f64::from(1 + tile.warps_m) * columns),
        copied_bytes: size * (rows + columns),
    });
    let warps = f64::from(tile.warps_m * tile.warps_n);
    let of_alone = Units { multiply: units.multiply * (SCHEDULERS / warps).max(1.0), ..units };
    let c_size = problem.c_dtype.size() as f64;
    let reads = if problem.beta == 0.0 { 1.0 } else { 2.0 };
    let written = rates
        .units(&Work {
            flops: 0.0,
            exponentials: 0.0,
            shared_bytes: 2.0 * 4.0 * rows * columns,
            copied_bytes: reads * c_size * rows * columns,
        })
        .busiest();
    let depth = |blocks: f64| blocks * problem.block_size as f64;
    let mean = depth(problem.nnz_blocks as f64 / block_rows.max(1.0));
    let longest = problem.longest_row.map_or(mean, |blocks| depth(blocks as f64)).max(mean);
    let time = rates.clocks(&Grid {
        ctas: block_rows * tile.tile().tiles_n(problem.n as u64) as f64,
        resident: resident(tile.min_blocks, kernel.smem_bytes(), gpu),
        busy: mean * units.busiest() + written,
        alone: mean * of_alone.busiest() + written,
        longest: longest * of_alone.busiest() + written,
        memory_bytes: memory_bytes(problem, &rates),
    });
    // With so few columns every tile fetches A once.
    let narrow = tile.block_n <= NARROW && problem.n > NARROW as usize;
    if narrow { DOUBT * time } else { time }
}

/// Bytes of A, B and C, of which B counts as often as it is read where L2 holds no panel of it.
fn memory_bytes(problem: &BsrProblem, rates: &GpuRates) -> f64 {
    let (size, n) = (problem.dtype.size() as f64, problem.n as f64);
    let depth = problem.nnz_blocks as f64 * problem.block_size as f64;
    let panel = problem.k as f64 * problem.n.min(PANEL_N) as f64 * size;
    let once = problem.k as f64 * n * size;
    let missed = (1.0 - rates.l2_capacity / panel.max(1.0)).max(0.0);
    let b = once.max(missed * depth * n * size);
    let c = problem.m as f64 * n * problem.c_dtype.size() as f64;
    depth * problem.block_size as f64 * size + b + c
}

#[cfg(test)]
#[path = "portable_tests.rs"]
mod tests;
