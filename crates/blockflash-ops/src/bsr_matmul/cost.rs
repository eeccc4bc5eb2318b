//! How long kernels are estimated to take, in elements that a multiprocessor brings into shared
//! memory: what selection compares.

use super::BsrProblem;
use super::parts::MOST_PARTS;
use blockflash_safe::CudaProperties;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{BsrMatmulHopper, Variant};

/// What the estimates assume about a GPU. The unit of costs is the time in which a multiprocessor
/// brings one 16-bit element into shared memory.
///
/// Each constant was set by hand. They cannot be fitted to the records, since for each commit and
/// case `benches/results/nvidia-h200/bsr_matmul.jsonl` holds the time of the selected kernel alone,
/// which does not tell whether another one is faster.
struct CostModel {
    /// Writing an element of C from registers.
    c: f64,
    /// Writing an element of C by tensor copies.
    copied_c: f64,
    /// Adding the sums of a part, per element of C.
    sum: f64,
    /// A tile of several parts, beside its sums: until one multiprocessor sees what others left.
    parts: f64,
    /// Part of the cost of A that is saved where L2 need not deliver it; it still has to be written
    /// to shared memory.
    saved_by_sharing: f64,
    /// A launch in clusters, whose blocks wait for one another at both ends.
    clusters: f64,
    /// A multiply-add of kernels that gather small blocks: dense patterns keep their tensor cores
    /// busy.
    product: f64,
    /// A multiply-add of warpgroups: as much as copying a whole tile of 128 × 256, where nothing is
    /// gained by sharing A.
    warpgroup_product: f64,
    /// Factor on all of this where blocks are filled with zeros, one by one and a block column at a
    /// time.
    filling: f64,
    /// Fetching the blocks of A for small ones, in columns of C.
    columns_of_a: usize,
    /// An element that a portable kernel brings into shared memory.
    portable: f64,
}

/// For an H200.
const H200: CostModel = CostModel {
    c: 3.2,
    copied_c: 2.2,
    sum: 2.0,
    parts: 150_000.0,
    saved_by_sharing: 0.5,
    clusters: 20_000.0,
    product: 0.024,
    warpgroup_product: 0.0117,
    filling: 1.3,
    columns_of_a: 16,
    portable: 1.4,
};

/// Columns of C that are computed before the next ones: `bsr/tile_order.cuh`.
const PANEL_N: usize = 1024;
/// Rows that a warpgroup multiplies, those without a block filled with zeros.
const WARPGROUP_ROWS: usize = 64;
/// Columns of a wide portable tile for small blocks.
const PORTABLE_BLOCK_N: usize = 256;

/// Estimated time of a kernel for Hopper. What flows into shared memory binds them: the blocks of
/// A, and the rows of B that they meet, which block rows of one tile share where both have a block.
/// Tiles of a cluster share A. While tiles are few, the multiprocessors with most of them decide;
/// many tiles spread evenly, but for half a round at the end. A tile much longer than the others
/// decides alone, and comes late in the last panel of columns. With a workspace long tiles may be
/// computed in parts: how many the longest should have is the second number.
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
    // Blocks are filled with zeros by clusters that share B instead, which is in what that costs.
    let sharers =
        if filled { 1 } else { problem.n.div_ceil(block_n).clamp(1, tile.cluster as usize) };
    let saved = H200.saved_by_sharing * (1.0 - 1.0 / sharers as f64);
    // How likely so many block rows of the mean density have no block in a block column.
    let without_block = |rows: usize| (1.0 - density).powi(rows as i32);
    let others_without = without_block(block_rows - 1);
    let warpgroup_has_some = 1.0 - without_block(WARPGROUP_ROWS / block_size);
    // Of a tile with a block row of this density, and others of the mean.
    let depth = |of_first: f64| {
        let shared = 1.0 - (1.0 - of_first) * others_without;
        let a = (of_first + density * (block_rows - 1) as f64) * block_size as f64;
        let copied = (a * (1.0 - saved) + shared * block_n as f64) * block_size as f64;
        // Rows of the tile that a column of blocks is multiplied with, at which cost, and how many
        // columns count.
        let (cost, multiplied, columns) = match block_size {
            _ if filled => {
                let rows = warpgroup_has_some * (block_rows * block_size) as f64;
                (H200.warpgroup_product, rows, block_n)
            }
            ..64 => (H200.product, a, block_n + H200.columns_of_a),
            _ => (H200.warpgroup_product, a, block_n),
        };
        let multiplied = cost * multiplied * (block_size * columns) as f64;
        cols as f64 * copied.max(multiplied) * if filled { H200.filling } else { 1.0 }
    };
    let mean = depth(density);
    let longest = match problem.longest_group {
        Some(group) if block_size < 64 => mean * group.max(1.0),
        _ => depth(of_longest_row),
    };
    let copies_c = (block_size >= 64 || filled) && problem.has_plain_output();
    let elements = (block_rows * block_size * block_n) as f64;
    let written = elements * if copies_c { H200.copied_c } else { H200.c };
    let in_parts = |depth: f64, parts: f64| {
        let added =
            if parts > 1.0 { H200.parts + (parts - 1.0) * H200.sum * elements } else { 0.0 };
        depth / parts + written + added
    };
    let tiles = rows.div_ceil(block_rows) as f64 * tile.tiles_n(problem.n as u64) as f64;
    let before_last_panel = 1.0 - 1.0 / problem.n.div_ceil(PANEL_N).max(1) as f64;
    let clusters = if tile.cluster > 1 { H200.clusters } else { 0.0 };
    let multiprocessors = f64::from(gpu.multiprocessors.max(1));
    // The longest tile in so many parts, of which a tile of the mean has fewer.
    let time = |parts: f64| {
        let of_mean = if parts == 1.0 { 1.0 } else { ceil(parts * mean / longest) };
        let rounds = tiles * of_mean / multiprocessors;
        let rounds = if rounds <= 4.0 { ceil(rounds) } else { rounds + 0.5 };
        let all = rounds * in_parts(mean, of_mean);
        clusters + all.max(before_last_panel * all + in_parts(longest, parts))
    };
    if !(kernel.splits() && problem.workspace && longest > 0.0) {
        return (time(1.0), 1);
    }
    let times: [f64; MOST_PARTS] = std::array::from_fn(|i| time((i + 1) as f64));
    times.into_iter().zip(1..).fold((times[0], 1), |a, b| if b.0 < a.0 { b } else { a })
}

/// `x.ceil()` for 0 ≤ x < 2^51 without a call into the C library, which that is on x86-64 before
/// SSE 4.1: adding 2^52 leaves no bits for a fraction.
fn ceil(x: f64) -> f64 {
    const NO_FRACTION: f64 = (1u64 << 52) as f64;
    let nearest = (x + NO_FRACTION) - NO_FRACTION;
    if nearest < x { nearest + 1.0 } else { nearest }
}

/// Parts in which a kernel computes its longest tile if there is memory for their sums.
pub(super) fn parts(kernel: &Kernel, problem: &BsrProblem, gpu: &CudaProperties) -> usize {
    match &kernel.variant {
        Variant::BsrMatmulHopper(kernel) => hopper_time(kernel, problem, gpu).1,
        _ => 1,
    }
}

/// Whether a kernel for Hopper of this estimated time is worth its large tiles. For small blocks
/// few of them may leave most multiprocessors idle, where one block row per tile, each with its own
/// rows of B, keeps all of them busy.
pub(super) fn pays(time: f64, problem: &BsrProblem, gpu: &CudaProperties) -> bool {
    problem.block_size >= 64 || time <= portable_time(problem, gpu)
}

/// Estimated time of a portable kernel for small blocks, in the same unit.
fn portable_time(problem: &BsrProblem, gpu: &CudaProperties) -> f64 {
    let block = problem.block_size as f64;
    let copied = |blocks: usize, columns: usize| blocks as f64 * block * (block + columns as f64);
    let written = problem.m as f64 * problem.n as f64;
    let all = H200.portable * copied(problem.nnz_blocks, problem.n) + H200.c * written;
    let longest = copied(problem.longest_row.unwrap_or(0), problem.n.min(PORTABLE_BLOCK_N));
    (all / f64::from(gpu.multiprocessors.max(1))).max(H200.portable * longest)
}
