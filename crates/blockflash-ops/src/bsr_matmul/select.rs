use super::BsrProblem;
use super::cost::{hopper_time, pays};
use crate::arch;
use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{self, BsrTile, Variant};
use blockflash_sys::{DType, Major, Row};
use std::cmp::Reverse;
use std::fmt;

/// Name of the operation in errors and in the support table.
pub(crate) const OP: &str = "bsr_matmul";

/// Sizes that kernels for Hopper take are below this: they add a tile to them in 32 bits.
const HOPPER_SIZE_LIMIT: usize = (1 << 31) - 1024;
/// Strides of a tensor map are below this, in bytes.
const TENSOR_MAP_STRIDE_LIMIT: usize = 1 << 40;

/// The kernel for a problem on a GPU: of the usable rows those of the preferred target (machine
/// code before PTX), but for small blocks those for Hopper only where they are estimated to be
/// faster, and those that take any layout only where no other is usable. Of those for Hopper the
/// one that is estimated to end first, of the others the one whose tiles compute the fewest columns
/// beyond n; of these the widest.
///
/// # Errors
/// [`Error::Unsupported`] says what no row offers: the element type, the block size, the transposed
/// A or the layouts of B and C, the architecture or its shared memory.
pub fn select(problem: &BsrProblem, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), problem, gpu)
}

pub(crate) fn select_among<'r>(
    rows: &'r [Row],
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> Result<&'r Row> {
    // Estimates take longer than everything else here: one for each row that fits.
    let rank = |(row, tile): &(&Row, BsrTile)| {
        let waits = is_hopper(row) && !pays(row, tile, problem, gpu);
        let cost = match is_hopper(row) {
            true => hopper_time(row, tile, problem, gpu).0,
            false => problem.n.div_ceil(tile.block_n as usize) as f64 * f64::from(tile.block_n),
        };
        // Bits of numbers that are not negative ascend as they do.
        (
            row.takes_any_layout(),
            waits,
            arch::preference(row.target),
            cost.to_bits(),
            Reverse(tile.block_n),
        )
    };
    rows.iter()
        .filter_map(|row| Some((row, row.bsr_tile()?)))
        .filter(|(row, tile)| fits(row, tile, problem, gpu).is_ok())
        .min_by_key(rank)
        .map(|(row, _)| row)
        .ok_or_else(|| unsupported(gpu, why_none(rows, problem, gpu)))
}

/// Whether this very row can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`] says what does not fit.
pub fn accepts(row: &Row, problem: &BsrProblem, gpu: &CudaProperties) -> Result<()> {
    let refused = |what: String| unsupported(gpu, format!("{}: {what}", row.symbol()));
    let Some(tile) = row.bsr_tile() else {
        return Err(refused("this kernel computes something else".into()));
    };
    fits(row, &tile, problem, gpu).map_err(|mismatch| refused(mismatch.to_string()))
}

/// What keeps a row from computing a problem.
enum Mismatch {
    DType { kernel: DType, matrices: DType },
    BlockSize { kernel: u32, matrix: usize },
    Transposed { kernel: bool },
    Major { what: &'static str, kernel: Major },
    Size { what: &'static str, size: usize },
    TensorMap { lines: Major, ldb: usize },
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
            Mismatch::Transposed { kernel } => {
                write!(
                    f,
                    "the kernel multiplies A {}",
                    if *kernel { "transposed" } else { "as it is" }
                )
            }
            Mismatch::Major { what, kernel } => {
                write!(f, "the kernel takes a {}-major {what}", kernel.name())
            }
            Mismatch::Size { what, size } => {
                write!(f, "{what} is {size}, not below {HOPPER_SIZE_LIMIT}")
            }
            Mismatch::TensorMap { lines, ldb } => {
                let lines = if *lines == Major::Row { "rows" } else { "columns" };
                write!(
                    f,
                    "b has no tensor map: {lines} of 16-byte aligned memory, {ldb} elements apart"
                )
            }
            Mismatch::Gpu(obstacle) => obstacle.fmt(f),
        }
    }
}

fn fits(
    row: &Row,
    tile: &BsrTile,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> std::result::Result<(), Mismatch> {
    if tile.dtype != problem.dtype {
        return Err(Mismatch::DType { kernel: tile.dtype, matrices: problem.dtype });
    }
    if tile.block_size as usize != problem.block_size {
        return Err(Mismatch::BlockSize { kernel: tile.block_size, matrix: problem.block_size });
    }
    lies_as(row, tile, problem)?;
    arch::runs(row, gpu).map_err(Mismatch::Gpu)?;
    if is_hopper(row) { fits_hopper(problem) } else { Ok(()) }
}

/// Whether the kernel reads A and B, and writes C, the way that they lie in memory.
fn lies_as(row: &Row, tile: &BsrTile, problem: &BsrProblem) -> std::result::Result<(), Mismatch> {
    if row.takes_any_layout() {
        return Ok(());
    }
    if tile.a_transposed != problem.a_transposed {
        return Err(Mismatch::Transposed { kernel: tile.a_transposed });
    }
    let b = if tile.b_column_major { Major::Column } else { Major::Row };
    if b != problem.b_major {
        return Err(Mismatch::Major { what: "b", kernel: b });
    }
    let any_c = matches!(row.variant, Variant::BsrMatmulHopper(tile) if !tile.gathers());
    if problem.c_major == Major::Column && !any_c {
        return Err(Mismatch::Major { what: "c", kernel: Major::Row });
    }
    Ok(())
}

pub(super) fn is_hopper(row: &Row) -> bool {
    matches!(row.variant, Variant::BsrMatmulHopper(_))
}

/// Whether the kernel can count the sizes, and a tensor map describe B. The map of a B without
/// elements is never used.
fn fits_hopper(problem: &BsrProblem) -> std::result::Result<(), Mismatch> {
    let sizes = [("m", problem.m), ("n", problem.n), ("k", problem.k)];
    if let Some(&(what, size)) = sizes.iter().find(|(_, size)| *size >= HOPPER_SIZE_LIMIT) {
        return Err(Mismatch::Size { what, size });
    }
    let ldb = problem.ldb;
    let steps = ldb > 0 && ldb < TENSOR_MAP_STRIDE_LIMIT / problem.dtype.size();
    if problem.k > 0 && problem.n > 0 && !(problem.b_vectorized && steps) {
        return Err(Mismatch::TensorMap { lines: problem.b_major, ldb });
    }
    Ok(())
}

/// The first reason that rules out every row, from the general to the particular.
fn why_none(rows: &[Row], problem: &BsrProblem, gpu: &CudaProperties) -> String {
    let tiles = || rows.iter().filter_map(|row| Some((row, row.bsr_tile()?)));
    if !tiles().any(|(row, _)| row.target.runs_on(gpu.compute_capability)) {
        return "kernels need compute capability 8.0 or newer".into();
    }
    if !tiles().any(|(_, tile)| tile.dtype == problem.dtype) {
        return format!("kernels take f16 and bf16, the matrices are {}", problem.dtype);
    }
    let asked = layouts(problem);
    let suited: Vec<_> =
        tiles().filter(|(row, tile)| lies_as(row, tile, problem).is_ok()).collect();
    let mut sizes: Vec<u32> = suited.iter().map(|(_, tile)| tile.block_size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if !sizes.iter().any(|&size| size as usize == problem.block_size) {
        let kernels = if sizes.is_empty() {
            "no kernel takes that".into()
        } else {
            format!("kernels take {sizes:?}")
        };
        return format!("block size {}{asked}: {kernels}", problem.block_size);
    }
    // Portable rows take whatever lies as they need it, so what is in the way of others is said.
    let mismatches = suited.iter().filter_map(|(row, tile)| fits(row, tile, problem, gpu).err());
    let closest = mismatches.max_by_key(|mismatch| match mismatch {
        Mismatch::TensorMap { .. } | Mismatch::Size { .. } => 2,
        Mismatch::Gpu(_) => 1,
        _ => 0,
    });
    match closest {
        Some(mismatch) if !asked.is_empty() => {
            format!("block size {}{asked}: {mismatch}", problem.block_size)
        }
        _ => format!(
            "block size {} in {}: no kernel for this architecture and its {} bytes of shared memory",
            problem.block_size, problem.dtype, gpu.smem_per_block
        ),
    }
}

/// What of a problem not every kernel takes, in words that follow the block size.
fn layouts(problem: &BsrProblem) -> String {
    let asked = [
        (problem.a_transposed, "a transposed A"),
        (problem.b_major == Major::Column, "a column-major b"),
        (problem.c_major == Major::Column, "a column-major c"),
    ];
    let asked: Vec<&str> = asked.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect();
    if asked.is_empty() { String::new() } else { format!(" with {}", asked.join(" and ")) }
}

fn unsupported(gpu: &CudaProperties, what: String) -> Error {
    Error::Unsupported { op: OP, arch: gpu.compute_capability.to_string(), what }
}

#[cfg(test)]
#[path = "any_layout_tests.rs"]
mod any_layout_tests;

#[cfg(test)]
#[path = "hopper_tests.rs"]
mod hopper_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
