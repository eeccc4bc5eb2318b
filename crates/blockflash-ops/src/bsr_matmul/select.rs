use super::BsrProblem;
use crate::arch;
use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{self, BsrMatmul, Variant};
use blockflash_sys::{DType, Row};
use std::cmp::Reverse;
use std::fmt;

/// Name of the operation in errors and in the support table.
pub(crate) const OP: &str = "bsr_matmul";

/// The kernel for a problem on a GPU: of the usable rows those of the preferred target (machine code before PTX), of these the
/// one whose tiles compute the fewest columns beyond n, of these the widest.
///
/// # Errors
/// [`Error::Unsupported`] says what no row offers: the element type, the block size, the architecture or its shared memory.
pub fn select(problem: &BsrProblem, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), problem, gpu)
}

pub(crate) fn select_among<'r>(
    rows: &'r [Row],
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> Result<&'r Row> {
    rows.iter()
        .filter_map(|row| Some((row, tile(row)?)))
        .filter(|(row, tile)| fits(row, tile, problem, gpu).is_ok())
        .min_by_key(|(row, tile)| {
            let columns = problem.n.div_ceil(tile.block_n as usize).saturating_mul(tile.block_n as usize);
            (arch::preference(row.target), columns, Reverse(tile.block_n))
        })
        .map(|(row, _)| row)
        .ok_or_else(|| unsupported(gpu, why_none(rows, problem, gpu)))
}

/// Whether this very row can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`] says what does not fit.
pub fn accepts(row: &Row, problem: &BsrProblem, gpu: &CudaProperties) -> Result<()> {
    let refused = |what: String| unsupported(gpu, format!("{}: {what}", row.symbol()));
    let Some(tile) = tile(row) else { return Err(refused("this kernel computes something else".into())) };
    fits(row, &tile, problem, gpu).map_err(|mismatch| refused(mismatch.to_string()))
}

/// What keeps a row from computing a problem.
enum Mismatch {
    DType { kernel: DType, matrices: DType },
    BlockSize { kernel: u32, matrix: usize },
    Gpu(arch::Obstacle),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::DType { kernel, matrices } => {
                write!(f, "the kernel takes {kernel}, the matrices are {matrices}")
            }
            Mismatch::BlockSize { kernel, matrix } => {
                write!(f, "the kernel takes blocks of {kernel}, not {matrix}")
            }
            Mismatch::Gpu(obstacle) => obstacle.fmt(f),
        }
    }
}

fn fits(
    row: &Row,
    tile: &BsrMatmul,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> std::result::Result<(), Mismatch> {
    if tile.dtype != problem.dtype {
        return Err(Mismatch::DType { kernel: tile.dtype, matrices: problem.dtype });
    }
    if tile.block_size as usize != problem.block_size {
        return Err(Mismatch::BlockSize { kernel: tile.block_size, matrix: problem.block_size });
    }
    arch::runs(row, gpu).map_err(Mismatch::Gpu)
}

pub(crate) fn tile(row: &Row) -> Option<BsrMatmul> {
    match row.variant {
        Variant::BsrMatmul(tile) => Some(tile),
        _ => None,
    }
}

/// The first reason that rules out every row, from the general to the particular.
fn why_none(rows: &[Row], problem: &BsrProblem, gpu: &CudaProperties) -> String {
    let tiles = || rows.iter().filter_map(|row| Some((row, tile(row)?)));
    if !tiles().any(|(row, _)| row.target.runs_on(gpu.compute_capability)) {
        return "kernels need compute capability 8.0 or newer".into();
    }
    if !tiles().any(|(_, tile)| tile.dtype == problem.dtype) {
        return format!("kernels take f16 and bf16, the matrices are {}", problem.dtype);
    }
    let mut sizes: Vec<u32> = tiles().map(|(_, tile)| tile.block_size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if !sizes.iter().any(|&size| size as usize == problem.block_size) {
        return format!("block size {}: kernels take {sizes:?}", problem.block_size);
    }
    format!(
        "block size {} in {}: no kernel for this architecture and its {} bytes of shared memory",
        problem.block_size, problem.dtype, gpu.smem_per_block
    )
}

fn unsupported(gpu: &CudaProperties, what: String) -> Error {
    Error::Unsupported { op: OP, arch: gpu.compute_capability.to_string(), what }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
