use super::AttentionProblem;
use crate::arch;
use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{self, AttentionFwd, Variant};
use blockflash_sys::{DType, Row};
use std::fmt;

/// Name of the operation in errors and in the support table.
pub(crate) const OP: &str = "attention";

/// The kernel for a problem on a GPU: of the usable rows those of the preferred target (machine code before PTX), of these the
/// smallest head_dim tile that fits.
///
/// # Errors
/// [`Error::Unsupported`] says what no row offers: the element type, the head dimension, the architecture or its shared memory.
pub fn select(problem: &AttentionProblem, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), problem, gpu)
}

pub(crate) fn select_among<'r>(
    rows: &'r [Row],
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> Result<&'r Row> {
    rows.iter()
        .filter_map(|row| Some((row, tile(row)?)))
        .filter(|(row, tile)| fits(row, tile, problem, gpu).is_ok())
        .min_by_key(|(row, tile)| (arch::preference(row.target), tile.head_dim))
        .map(|(row, _)| row)
        .ok_or_else(|| unsupported(gpu, why_none(rows, problem, gpu)))
}

/// Whether this very row can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`] says what does not fit.
pub fn accepts(row: &Row, problem: &AttentionProblem, gpu: &CudaProperties) -> Result<()> {
    let refused = |what: String| unsupported(gpu, format!("{}: {what}", row.symbol()));
    let Some(tile) = tile(row) else { return Err(refused("this kernel computes something else".into())) };
    fits(row, &tile, problem, gpu).map_err(|mismatch| refused(mismatch.to_string()))
}

/// What keeps a row from computing a problem.
enum Mismatch {
    DType { kernel: DType, tensors: DType },
    HeadDim { kernel: u32, tensors: usize },
    Gpu(arch::Obstacle),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::DType { kernel, tensors } => {
                write!(f, "the kernel takes {kernel}, the tensors are {tensors}")
            }
            Mismatch::HeadDim { kernel, tensors } => {
                write!(f, "head_dim {tensors} is not a multiple of 8 up to {kernel}")
            }
            Mismatch::Gpu(obstacle) => obstacle.fmt(f),
        }
    }
}

fn fits(
    row: &Row,
    tile: &AttentionFwd,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> std::result::Result<(), Mismatch> {
    if tile.dtype != problem.dtype {
        return Err(Mismatch::DType { kernel: tile.dtype, tensors: problem.dtype });
    }
    if problem.head_dim > tile.head_dim as usize || !problem.head_dim.is_multiple_of(8) {
        return Err(Mismatch::HeadDim { kernel: tile.head_dim, tensors: problem.head_dim });
    }
    arch::runs(row, gpu).map_err(Mismatch::Gpu)
}

pub(crate) fn tile(row: &Row) -> Option<AttentionFwd> {
    match row.variant {
        Variant::AttentionFwd(tile) => Some(tile),
        _ => None,
    }
}

/// The first reason that rules out every row, from the general to the particular.
fn why_none(rows: &[Row], problem: &AttentionProblem, gpu: &CudaProperties) -> String {
    let head_dim = problem.head_dim;
    let tiles = || rows.iter().filter_map(|row| Some((row, tile(row)?)));
    if !tiles().any(|(row, _)| row.target.runs_on(gpu.compute_capability)) {
        return "kernels need compute capability 8.0 or newer".into();
    }
    if !tiles().any(|(_, tile)| tile.dtype == problem.dtype) {
        return format!("kernels take f16 and bf16, the tensors are {}", problem.dtype);
    }
    let widest = tiles().map(|(_, tile)| tile.head_dim).max().unwrap_or(0);
    if !head_dim.is_multiple_of(8) || head_dim > widest as usize {
        return format!("head_dim {head_dim}: kernels take multiples of 8 up to {widest}");
    }
    format!(
        "head_dim {head_dim} in {}: no kernel fits into {} bytes of shared memory",
        problem.dtype, gpu.smem_per_block
    )
}

fn unsupported(gpu: &CudaProperties, what: String) -> Error {
    Error::Unsupported { op: OP, arch: gpu.compute_capability.to_string(), what }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
