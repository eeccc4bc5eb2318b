use super::{BsrSddmmProblem, DenseLayout};
use crate::arch;
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, Major};
use blockflash_sys::manifest::{self, BsrSddmmTile};
use blockflash_sys::{DType, Row, Target};
use std::fmt;

/// Name of the operation in errors and in the support table.
pub(crate) const OP: &str = "bsr_sddmm";

/// Sizes that the kernels take are below this: they add a tile to them in 32 bits.
const SIZE_LIMIT: usize = (1 << 31) - 1024;
/// Strides of a tensor map are below this, in bytes.
const TENSOR_MAP_STRIDE_LIMIT: usize = 1 << 40;

/// The kernel for a problem on a GPU. On Hopper there is one for each element type, larger block
/// size and pair of layouts that tensor maps describe; the portable one of an element type and
/// block size takes every layout, and is taken where there is no other.
///
/// # Errors
/// [`Error::Unsupported`] says what no row offers: the architecture, the element type, the block
/// size, or a memory layout that tensor maps cannot describe where there is no portable kernel.
pub fn select(problem: &BsrSddmmProblem, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), problem, gpu)
}

pub(crate) fn select_among<'r>(
    rows: &'r [Row],
    problem: &BsrSddmmProblem,
    gpu: &CudaProperties,
) -> Result<&'r Row> {
    rows.iter()
        .find(|row| row.bsr_sddmm_tile().is_some_and(|tile| fits(row, &tile, problem, gpu).is_ok()))
        .ok_or_else(|| unsupported(gpu, why_none(rows, problem, gpu)))
}

/// Whether this very row can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`] says what does not fit.
pub fn accepts(row: &Row, problem: &BsrSddmmProblem, gpu: &CudaProperties) -> Result<()> {
    let refused = |what: String| unsupported(gpu, format!("{}: {what}", row.symbol()));
    let Some(tile) = row.bsr_sddmm_tile() else {
        return Err(refused("this kernel computes something else".into()));
    };
    fits(row, &tile, problem, gpu).map_err(|mismatch| refused(mismatch.to_string()))
}

/// What keeps a row from computing a problem.
enum Mismatch {
    DType { kernel: DType, matrices: DType },
    BlockSize { kernel: u32, pattern: usize },
    Layout { what: &'static str, kernel: Major },
    Size { what: &'static str, size: usize },
    TensorMap { what: &'static str, ld: usize },
    Values,
    Gpu(arch::Obstacle),
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::DType { kernel, matrices } => {
                write!(f, "the kernel takes {kernel}, the matrices are {matrices}")
            }
            Mismatch::BlockSize { kernel, pattern } => {
                write!(f, "the kernel takes blocks of {kernel}, not {pattern}")
            }
            Mismatch::Layout { what, kernel } => {
                write!(f, "the kernel takes a {}-major {what}", kernel.name())
            }
            Mismatch::Size { what, size } => write!(f, "{what} is {size}, not below {SIZE_LIMIT}"),
            Mismatch::TensorMap { what, ld } => {
                write!(
                    f,
                    "{what} has no tensor map: lines of 16-byte aligned memory, {ld} elements apart"
                )
            }
            Mismatch::Values => write!(f, "values do not start at a multiple of 16 bytes"),
            Mismatch::Gpu(obstacle) => obstacle.fmt(f),
        }
    }
}

fn fits(
    row: &Row,
    tile: &BsrSddmmTile,
    problem: &BsrSddmmProblem,
    gpu: &CudaProperties,
) -> std::result::Result<(), Mismatch> {
    if tile.dtype != problem.dtype {
        return Err(Mismatch::DType { kernel: tile.dtype, matrices: problem.dtype });
    }
    if tile.block_size as usize != problem.block_size {
        return Err(Mismatch::BlockSize { kernel: tile.block_size, pattern: problem.block_size });
    }
    if let Some([a, b]) = tile.majors {
        for (what, kernel, layout) in [("a", a, problem.a), ("b", b, problem.b)] {
            if kernel != layout.major {
                return Err(Mismatch::Layout { what, kernel });
            }
        }
    }
    arch::runs(row, gpu).map_err(Mismatch::Gpu)?;
    let sizes = [("m", problem.m), ("n", problem.n), ("k", problem.k)];
    if let Some(&(what, size)) = sizes.iter().find(|(_, size)| *size >= SIZE_LIMIT) {
        return Err(Mismatch::Size { what, size });
    }
    tile.majors.map_or(Ok(()), |_| can_be_described(problem))
}

/// Whether tensor maps describe A and B. Those of matrices without elements are never used.
fn can_be_described(problem: &BsrSddmmProblem) -> std::result::Result<(), Mismatch> {
    for (what, DenseLayout { ld, aligned, .. }) in [("a", problem.a), ("b", problem.b)] {
        let steps = ld > 0 && ld < TENSOR_MAP_STRIDE_LIMIT / problem.dtype.size();
        if problem.k > 0 && !(aligned && steps) {
            return Err(Mismatch::TensorMap { what, ld });
        }
    }
    if problem.values_aligned { Ok(()) } else { Err(Mismatch::Values) }
}

/// The first reason that rules out every row, from the general to the particular.
fn why_none(rows: &[Row], problem: &BsrSddmmProblem, gpu: &CudaProperties) -> String {
    let tiles = || rows.iter().filter_map(|row| Some((row, row.bsr_sddmm_tile()?)));
    if !tiles().any(|(row, _)| row.target.runs_on(gpu.compute_capability)) {
        let portable = tiles().any(|(row, _)| row.target != Target::Sm90a);
        let oldest = if portable { "8.0 or newer" } else { "9.0" };
        return format!("kernels need compute capability {oldest}");
    }
    if !tiles().any(|(_, tile)| tile.dtype == problem.dtype) {
        return format!("kernels take f16 and bf16, the matrices are {}", problem.dtype);
    }
    let sizes = block_sizes(rows);
    if !sizes.iter().any(|&size| size as usize == problem.block_size) {
        return format!("block size {}: kernels take {sizes:?}", problem.block_size);
    }
    // The row that comes closest: but for sizes, layout in memory and alignment it takes the
    // problem.
    let closest = tiles().find_map(|(row, tile)| match fits(row, &tile, problem, gpu) {
        Err(mismatch @ (Mismatch::Size { .. } | Mismatch::TensorMap { .. } | Mismatch::Values)) => {
            Some(mismatch)
        }
        _ => None,
    });
    if let Some(mismatch) = closest {
        return mismatch.to_string();
    }
    let (a, b) = (problem.a.major.name(), problem.b.major.name());
    format!(
        "block size {} in {}, a {a}-major, b {b}-major: no kernel for this architecture and its {} bytes of shared memory",
        problem.block_size, problem.dtype, gpu.smem_per_block
    )
}

/// The block sizes that any of these rows takes, ascending.
pub(crate) fn block_sizes(rows: &[Row]) -> Vec<u32> {
    let mut sizes: Vec<u32> =
        rows.iter().filter_map(Row::bsr_sddmm_tile).map(|tile| tile.block_size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn unsupported(gpu: &CudaProperties, what: String) -> Error {
    Error::Unsupported { op: OP, arch: gpu.compute_capability.to_string(), what }
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
