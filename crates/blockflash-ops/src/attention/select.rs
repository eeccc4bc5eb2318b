use super::{AttentionProblem, BlockMaskSizes};
use crate::arch;
use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{self, AttentionTile, Lse, Variant};
use blockflash_sys::{DType, Row};
use std::cmp::Reverse;
use std::fmt;

/// Name of the operation in errors and in the support table.
pub(crate) const OP: &str = "attention";

/// Strides of a tensor map are below this, in bytes.
const TENSOR_MAP_STRIDE_LIMIT: usize = 1 << 40;

/// The kernel for a problem on a GPU: of the usable rows those of the preferred target (machine
/// code before PTX), of these the smallest head_dim tile that fits, of these the one whose grid is
/// estimated to end first. Under a block mask tiles must divide its blocks, and the largest ones
/// that do are taken.
///
/// # Errors
/// [`Error::Unsupported`] says what no row offers: the element type, the head dimension, the blocks
/// of the mask, the architecture or its shared memory.
pub fn select(problem: &AttentionProblem, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), problem, gpu)
}

pub(crate) fn select_among<'r>(
    rows: &'r [Row],
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> Result<&'r Row> {
    rows.iter()
        .filter_map(|row| Some((row, row.attention_tile()?)))
        .filter(|(row, tile)| fits(row, tile, problem, gpu).is_ok())
        .min_by(|a, b| {
            let sparse = problem.block_mask.is_some();
            let preference = |(row, tile): &(&Row, AttentionTile)| {
                let largest = sparse.then_some(Reverse((tile.block_q, tile.block_kv)));
                (arch::preference(row.target), tile.head_dim, largest)
            };
            let time = |(row, tile): &(&Row, AttentionTile)| relative_time(row, tile, problem, gpu);
            preference(a).cmp(&preference(b)).then_with(|| time(a).total_cmp(&time(b)))
        })
        .map(|(row, _)| row)
        .ok_or_else(|| unsupported(gpu, why_none(rows, problem, gpu)))
}

/// Whether this very row can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`] says what does not fit.
pub fn accepts(row: &Row, problem: &AttentionProblem, gpu: &CudaProperties) -> Result<()> {
    let refused = |what: String| unsupported(gpu, format!("{}: {what}", row.symbol()));
    let Some(tile) = row.attention_tile() else {
        return Err(refused("this kernel computes something else".into()));
    };
    fits(row, &tile, problem, gpu).map_err(|mismatch| refused(mismatch.to_string()))
}

/// What keeps a row from computing a problem.
enum Mismatch {
    DType { kernel: DType, tensors: DType },
    HeadDim { kernel: u32, tensors: usize },
    Blocks { tile: AttentionTile, mask: BlockMaskSizes },
    Heads { tile: u32 },
    LogSumExp { tile: Lse },
    TensorMap { what: &'static str, dim: &'static str, stride: usize },
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
            Mismatch::Blocks { tile, mask } => write!(
                f,
                "tiles of {} × {} do not divide the blocks of the mask, {} × {}",
                tile.block_q, tile.block_kv, mask.block_q, mask.block_kv
            ),
            Mismatch::Heads { tile } => {
                write!(f, "{tile} heads of q share a tile, but not keys and a block mask")
            }
            Mismatch::LogSumExp { tile } => f.write_str(log_sum_exp(*tile)),
            Mismatch::TensorMap { what, dim, stride } => {
                write!(
                    f,
                    "the {dim} stride of {what} is {stride} elements, which a tensor map cannot have"
                )
            }
            Mismatch::Gpu(obstacle) => obstacle.fmt(f),
        }
    }
}

fn fits(
    row: &Row,
    tile: &AttentionTile,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> std::result::Result<(), Mismatch> {
    if tile.dtype != problem.dtype {
        return Err(Mismatch::DType { kernel: tile.dtype, tensors: problem.dtype });
    }
    if problem.head_dim > tile.head_dim as usize || !problem.head_dim.is_multiple_of(8) {
        return Err(Mismatch::HeadDim { kernel: tile.head_dim, tensors: problem.head_dim });
    }
    if !tile.lse.suits(problem.lse.is_some()) {
        return Err(Mismatch::LogSumExp { tile: tile.lse });
    }
    match problem.block_mask {
        Some(mask) if !mask.divides_into(tile) => {
            return Err(Mismatch::Blocks { tile: *tile, mask });
        }
        _ => {}
    }
    if !shares_heads(tile, problem) {
        return Err(Mismatch::Heads { tile: tile.heads });
    }
    arch::runs(row, gpu).map_err(Mismatch::Gpu)?;
    if let Variant::AttentionFwdHopper(_) = row.variant { tensor_maps(problem) } else { Ok(()) }
}

/// What a kernel says that does not suit a call with or without `lse`.
pub(super) const fn log_sum_exp(kernel: Lse) -> &'static str {
    match kernel {
        Lse::Never => "it computes no lse",
        Lse::Always | Lse::AsAsked => "it always computes lse, which is not asked for",
    }
}

/// Whether the heads of q that would share a tile share keys, and the block mask.
pub(super) fn shares_heads(tile: &AttentionTile, problem: &AttentionProblem) -> bool {
    let shared = |groups: usize| {
        groups > 0 && (problem.num_heads_q / groups).is_multiple_of(tile.heads as usize)
    };
    shared(problem.num_heads_kv)
        && problem.block_mask.is_none_or(|mask| shared(mask.heads as usize))
}

/// Whether q, k and v can be described by tensor maps: those step on in every dimension, and not
/// too far.
fn tensor_maps(problem: &AttentionProblem) -> std::result::Result<(), Mismatch> {
    let [rows_q, rows_kv] = match problem.packed {
        Some(packed) => [packed.total_q, packed.total_kv],
        None => [problem.seqlen_q, problem.seqlen_kv],
    };
    let batch = if problem.packed.is_some() { 1 } else { problem.batch };
    let operands = [
        ("q", problem.q, rows_q, problem.num_heads_q),
        ("k", problem.k, rows_kv, problem.num_heads_kv),
        ("v", problem.v, rows_kv, problem.num_heads_kv),
    ];
    // The map of a tensor without rows is never used.
    for (what, strides, rows, heads) in operands.into_iter().filter(|(_, _, rows, _)| *rows > 0) {
        let dims = [
            ("batch", strides.batch, batch),
            ("sequence", strides.seq, rows),
            ("head", strides.head, heads),
        ];
        for (dim, stride, extent) in dims {
            let possible = stride > 0 && stride < TENSOR_MAP_STRIDE_LIMIT / problem.dtype.size();
            if extent > 1 && !possible {
                return Err(Mismatch::TensorMap { what, dim, stride });
            }
        }
    }
    Ok(())
}

/// Estimated nanoseconds of a row for Hopper. While tiles are few, the multiprocessors with most of
/// them decide; many tiles spread evenly, but for half a round at the end. Under a causal mask or a
/// window tiles are unequal: the longest start first, and the others fill the gaps.
fn relative_time(
    row: &Row,
    tile: &AttentionTile,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> f64 {
    let Variant::AttentionFwdHopper(hopper) = row.variant else { return 0.0 };
    let tiles = problem.batch as f64
        * (problem.num_heads_q / tile.heads as usize) as f64
        * problem.seqlen_q.div_ceil(tile.block_q as usize) as f64;
    let rounds = tiles / f64::from(gpu.multiprocessors.max(1) * hopper.blocks_per_multiprocessor);
    let [step, change] = hopper.cost_ns.map(f64::from);
    let [mean, most] = key_tiles(tile, problem).map(|key_tiles| key_tiles * step + change);
    if rounds <= 4.0 && mean == most {
        rounds.ceil() * most
    } else {
        most.max((rounds + 0.5) * mean)
    }
}

/// Key tiles that tiles of queries visit: the mean of some of them, and the most.
fn key_tiles(tile: &AttentionTile, problem: &AttentionProblem) -> [f64; 2] {
    const SAMPLES: usize = 8;
    let (block_q, block_kv) = (tile.block_q as usize, tile.block_kv as usize);
    let tiles = problem.seqlen_q.div_ceil(block_q);
    if problem.mask.limits(problem.seqlen_q, problem.seqlen_kv).is_unbounded() || tiles == 0 {
        return [problem.seqlen_kv.div_ceil(block_kv) as f64; 2];
    }
    let samples = tiles.min(SAMPLES);
    let visited = (0..samples).map(|i| {
        let first = i * (tiles - 1) / (samples - 1).max(1) * block_q;
        let last = (first + block_q).min(problem.seqlen_q) - 1;
        let keys = |row| problem.mask.visible(row, problem.seqlen_q, problem.seqlen_kv);
        let end = keys(last).end.div_ceil(block_kv);
        (end - (keys(first).start / block_kv).min(end)) as f64
    });
    let (sum, most) = visited.fold((0.0, 0.0), |(sum, most): (f64, f64), n| (sum + n, most.max(n)));
    [sum / samples as f64, most]
}

/// The first reason that rules out every row, from the general to the particular.
fn why_none(rows: &[Row], problem: &AttentionProblem, gpu: &CudaProperties) -> String {
    let head_dim = problem.head_dim;
    let tiles = || rows.iter().filter_map(|row| Some((row, row.attention_tile()?)));
    if !tiles().any(|(row, _)| row.target.runs_on(gpu.compute_capability)) {
        return "kernels need compute capability 8.0 or newer".into();
    }
    if !tiles().any(|(_, tile)| tile.dtype == problem.dtype) {
        return format!("kernels take f16 and bf16, the tensors are {}", problem.dtype);
    }
    let widest = tiles().map(|(_, tile)| tile.head_dim).max().unwrap_or(0);
    if head_dim > widest as usize {
        return format!("head_dim {head_dim}: kernels take multiples of 8 up to {widest}");
    }
    if !head_dim.is_multiple_of(8) {
        let padded = head_dim.next_multiple_of(8);
        return format!(
            "head_dim {head_dim}: kernels take multiples of 8 up to {widest}; it runs with q, k and v zero-padded to \
             {padded} and the softmax_scale of {head_dim}"
        );
    }
    let dense = AttentionProblem { block_mask: None, ..*problem };
    if let (Some(mask), true) =
        (problem.block_mask, tiles().any(|(row, tile)| fits(row, &tile, &dense, gpu).is_ok()))
    {
        let (block_q, block_kv) = (mask.block_q, mask.block_kv);
        return format!(
            "head_dim {head_dim}: no kernel has tiles that divide blocks of {block_q} × {block_kv}"
        );
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
#[path = "hopper_tests.rs"]
mod hopper_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
