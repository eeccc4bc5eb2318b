//! Estimated times of the kernels of Hopper, and of the portable ones where they compete with them.
//! The unit is the time in which an SM loads one 16-bit element into shared memory.

use super::BsrProblem;
use super::parts::MOST_PARTS;
use crate::rates::ceil;
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{BsrMatmulHopper, Variant};

/// The assumptions of the estimates about a GPU.
///
/// Each constant was set by hand. They cannot be fitted to the records, since for each commit and
/// case `benches/results/nvidia-h200/bsr_matmul.jsonl` holds the time of the selected kernel alone,
/// which does not tell whether another one is faster.
struct CostModel {
    /// Writing an element of C from registers.
    c: f64,
    /// Writing an element of C by TMA stores.
    copied_c: f64,
    /// Adding the sums of a part of K, per element of C.
    sum: f64,
    /// Fixed cost of a tile that is split along K: the latency until one SM sees the sums of the
    /// others.
    parts: f64,
    /// The same of kernels that gather small blocks.
    gathered_parts: f64,
    /// The same where long tiles are split among others, as their parts end together.
    uneven_parts: f64,
    /// There, the sums of parts, per element of C and the square of their number: they come and go
    /// through the same L2 as the operands of all other tiles.
    uneven_sum: f64,
    /// There, what the splitting of a tile costs the SMs, as a fraction of all their work, for each
    /// part of the longest one.
    uneven_work: f64,
    /// Factor on loading and multiplying of the longest tile, at whose end most SMs are idle and L2
    /// is fast.
    alone: f64,
    /// Fraction of the cost of A that is saved when the CTAs of a cluster share it, because L2
    /// delivers it once; it still has to be written to shared memory.
    saved_by_sharing: f64,
    /// A launch with clusters, whose CTAs wait for one another at both ends.
    clusters: f64,
    /// The same of kernels that gather small blocks, where no tile is split: the wait for the sums
    /// of other parts would hide most of it.
    gathering_clusters: f64,
    /// Starting the CTAs of a launch and their first copies. It is hidden where each SM has room
    /// for another CTA, since those of the next launch start beside those of this one.
    launch: f64,
    /// Factor on loading and multiplying for CTAs that share an SM: they have half as many stages.
    half: f64,
    /// A multiply-add of kernels that gather small blocks: in dense patterns the tensor cores limit
    /// them.
    product: f64,
    /// A multiply-add of warpgroups. It equals the cost of copying a whole tile of 128 × 256, where
    /// sharing A gains nothing.
    warpgroup_product: f64,
    /// Factor on loading and multiplying for kernels that fill missing blocks with zeros, block by
    /// block and one block column at a time.
    filling: f64,
    /// Loading the blocks of A when they are small, in equivalent columns of C.
    columns_of_a: usize,
    /// An element that a portable kernel for blocks of 32 loads into shared memory.
    portable: f64,
    /// The same for blocks of 16, each of which has half as many elements for its index.
    portable_16: f64,
}

/// For an H200; what concerns uneven tiles and portable kernels, for an H100.
const H200: CostModel = CostModel {
    c: 3.2,
    copied_c: 2.2,
    sum: 2.0,
    parts: 150_000.0,
    gathered_parts: 200_000.0,
    uneven_parts: 180_000.0,
    uneven_sum: 0.59,
    uneven_work: 0.025,
    alone: 0.8,
    saved_by_sharing: 0.5,
    clusters: 12_000.0,
    gathering_clusters: 28_000.0,
    launch: 30_000.0,
    half: 1.12,
    product: 0.024,
    warpgroup_product: 0.0117,
    filling: 1.3,
    columns_of_a: 16,
    portable: 1.6,
    portable_16: 1.6,
};

/// Width of a panel of C, which is finished before the next one starts: `bsr/tile_order.cuh`.
const PANEL_N: usize = 1024;
/// Rows that a warpgroup multiplies. It skips a block column in which none of them has a block.
const WARPGROUP_ROWS: usize = 64;
/// Columns of a wide portable tile for small blocks.
const PORTABLE_BLOCK_N: usize = 256;

/// Estimated time of a Hopper kernel, and the number of parts along K in which its longest tile is
/// computed. The traffic into shared memory bounds it: the blocks of A, and the rows of B that they
/// meet, which the block rows of a tile share where several have a block. The CTAs of a cluster
/// share A. When tiles are few, the SMs that get the most tiles determine the time. Many tiles
/// spread evenly, apart from half a wave at the end. A tile much longer than the others determines
/// the time alone, and comes late in the last panel of columns. With a workspace long tiles may be
/// computed in parts.
pub(super) fn hopper_time(
    kernel: &BsrMatmulHopper,
    problem: &BsrProblem,
    gpu: &CudaProperties,
) -> (f64, usize) {
    let (tile, filled) = (kernel.tile(), kernel.filled);
    let [block_size, block_rows, block_n] =
        [tile.block_size, tile.block_rows, tile.block_n].map(|size| size as usize);
    let (rows, cols) = (problem.m.div_ceil(block_size), problem.k.div_ceil(block_size));
    let density = (problem.nnz_blocks as f64 / (rows as f64 * cols as f64).max(1.0)).min(1.0);
    let of_longest_row = problem
        .longest_row
        .map_or(density, |blocks| (blocks as f64 / cols.max(1) as f64).clamp(density, 1.0));
    // Kernels that fill with zeros share B in their clusters instead; `filling` includes the gain.
    let sharers =
        if filled { 1 } else { problem.n.div_ceil(block_n).clamp(1, tile.cluster as usize) };
    let saved = H200.saved_by_sharing * (1.0 - 1.0 / sharers as f64);
    // Probability that this many block rows of mean density have no block in a given block column.
    let without_block = |rows: usize| (1.0 - density).powi(rows as i32);
    let others_without = without_block(block_rows - 1);
    let warpgroup_has_some = 1.0 - without_block(WARPGROUP_ROWS / block_size);
    // Cost along K of a tile with one block row of this density and others of mean density.
    let depth = |of_first: f64| {
        let shared = 1.0 - (1.0 - of_first) * others_without;
        let a = (of_first + density * (block_rows - 1) as f64) * block_size as f64;
        let copied = (a * (1.0 - saved) + shared * block_n as f64) * block_size as f64;
        // The cost of a multiply-add, the rows of the tile that are multiplied per block column,
        // and the columns that count.
        let (cost, multiplied, columns) = match block_size {
            _ if filled => {
                let rows = warpgroup_has_some * (block_rows * block_size) as f64;
                (H200.warpgroup_product, rows, block_n)
            }
            ..64 => (H200.product, a, block_n + H200.columns_of_a),
            _ => (H200.warpgroup_product, a, block_n),
        };
        let multiplied = cost * multiplied * (block_size * columns) as f64;
        let filling = if filled { H200.filling } else { 1.0 };
        let half = if kernel.blocks_per_multiprocessor > 1 { H200.half } else { 1.0 };
        cols as f64 * copied.max(multiplied) * filling * half
    };
    let mean = depth(density);
    let longest = match problem.longest_group {
        Some(group) if block_size < 64 => mean * group.max(1.0),
        _ => depth(of_longest_row),
    };
    let copies_c = (block_size >= 64 || filled) && problem.has_plain_output();
    let elements = (block_rows * block_size * block_n) as f64;
    let written = elements * if copies_c { H200.copied_c } else { H200.c };
    let fixed = if block_size < 64 { H200.gathered_parts } else { H200.parts };
    let in_parts = |depth: f64, parts: f64| {
        let added = if parts > 1.0 { fixed + (parts - 1.0) * H200.sum * elements } else { 0.0 };
        depth / parts + written + added
    };
    // Whether the longest tile has more parts than a mean one. Not measured for small blocks.
    let uneven = |parts: f64, of_mean: f64| block_size >= 64 && of_mean < parts;
    let longest_in_parts = |parts: f64, of_mean: f64| {
        if uneven(parts, of_mean) {
            let sums = H200.uneven_sum * elements * (parts - 1.0).powi(2);
            return H200.alone * longest / parts + written + H200.uneven_parts + sums;
        }
        let alone = if block_size >= 64 && parts == 1.0 { H200.alone } else { 1.0 };
        in_parts(alone * longest, parts)
    };
    let tiles = rows.div_ceil(block_rows) as f64 * tile.tiles_n(problem.n as u64) as f64;
    let before_last_panel = 1.0 - 1.0 / problem.n.div_ceil(PANEL_N).max(1) as f64;
    let clusters = |parts: f64| match tile.cluster {
        ..=1 => 0.0,
        _ if block_size < 64 && parts == 1.0 => H200.gathering_clusters,
        _ => H200.clusters,
    };
    let multiprocessors = f64::from(gpu.multiprocessors.max(1));
    // No CTA of a pair may be without columns: only full ones were measured.
    let leaves_room = kernel.blocks_per_multiprocessor > 1 && sharers == tile.cluster as usize;
    // The longest tile has this many parts; a mean tile has proportionally fewer.
    let time = |parts: f64| {
        let of_mean = if parts == 1.0 { 1.0 } else { ceil(parts * mean / longest) };
        let rounds = tiles * of_mean / multiprocessors;
        let rounds = if rounds <= 4.0 { ceil(rounds) } else { rounds + 0.5 };
        let more_work = if uneven(parts, of_mean) { 1.0 + H200.uneven_work * parts } else { 1.0 };
        let all = rounds * in_parts(mean, of_mean) * more_work;
        let launch = if leaves_room && rounds <= 1.0 { 0.0 } else { H200.launch };
        let of_longest = before_last_panel * all + longest_in_parts(parts, of_mean);
        launch + clusters(parts) + all.max(of_longest)
    };
    if !(kernel.splits() && problem.workspace && longest > 0.0) {
        return (time(1.0), 1);
    }
    let times: [f64; MOST_PARTS] = std::array::from_fn(|i| time((i + 1) as f64));
    times.into_iter().zip(1..).fold((times[0], 1), |a, b| if b.0 < a.0 { b } else { a })
}

/// Number of parts of the longest tile, if there is memory for their sums.
pub(super) fn parts(kernel: &Kernel, problem: &BsrProblem, gpu: &CudaProperties) -> usize {
    match &kernel.variant {
        Variant::BsrMatmulHopper(kernel) => hopper_time(kernel, problem, gpu).1,
        _ => 1,
    }
}

/// Whether a Hopper kernel of this estimated time beats the portable one. With small blocks its few
/// large tiles may leave most SMs idle, where one block row per tile, each with its own rows of B,
/// keeps all of them busy.
pub(super) fn pays(time: f64, problem: &BsrProblem, gpu: &CudaProperties) -> bool {
    problem.block_size >= 64 || time <= portable_time(problem, gpu)
}

/// Estimated time of a portable kernel for small blocks, in the same unit.
fn portable_time(problem: &BsrProblem, gpu: &CudaProperties) -> f64 {
    let block = problem.block_size as f64;
    let element = if problem.block_size < 32 { H200.portable_16 } else { H200.portable };
    let copied = |blocks: usize, columns: usize| blocks as f64 * block * (block + columns as f64);
    let written = problem.m as f64 * problem.n as f64;
    let all = element * copied(problem.nnz_blocks, problem.n) + H200.c * written;
    let longest = copied(problem.longest_row.unwrap_or(0), problem.n.min(PORTABLE_BLOCK_N));
    let shared = all / f64::from(gpu.multiprocessors.max(1));
    H200.launch + shared.max(element * longest)
}
