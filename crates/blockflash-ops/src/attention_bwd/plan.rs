use super::AttentionBackwardProblem;
use super::parts::parts;
use crate::attention::{check_strides, scalars};
use crate::check::{grid_of, grid_x};
use crate::selection::{accepts, select, tile_of};
use crate::{Error, Result};
use blockflash_safe::{
    AttentionBwdParts, AttentionBwdPlan, CudaProperties, LaunchConfig, STATISTICS_ROWS,
    attention_bwd_part_values, attention_bwd_workspace,
};
use blockflash_sys::manifest::{AttentionBwdStep as Step, AttentionBwdTile};
use blockflash_sys::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_window};
use blockflash_sys::{HeadDims, Kernel};

/// Heads of keys whose blocks start together where dq is summed and every block of keys visits all
/// queries. Blocks of one head start one step apart, so several heads share that delay; under a
/// causal mask there is none. The sums of heads that start together take a quarter of L2 at most,
/// so that they stay there: on an H100 at head_dim 128 and 16384 queries, 1 head is 4 % faster than
/// 8, and gradients of 131072 rows on two GPUs, whose calls have 32768 queries and 65536 keys, went
/// from 442 to 362 ms.
const HEADS_PER_SECTION: usize = 8;

/// Below this many keys a step is a good part of what a block takes, so sections have all heads
/// whose sums fit into that part of L2, and enough that a block starts about `STEPS_APART` steps
/// after the one before it. Measured on an H200 with 512 keys at head_dim 64: within 2 % from 1 to
/// 4.
const SHORT: usize = 1024;
const STEPS_APART: usize = 2;

/// Rounds of CTAs whose blocks of keys ascend at the end of a causal mask, at most those of half of
/// the heads. Blocks that start last are short then, so no SM is left with a long one. Measured on
/// an H200 at head_dim 128: 3 % at a length of 4096, 4 % at 16384. Where heads are shared, a block
/// takes as many times longer, and the end of the grid with it.
const ASCENDING_ROUNDS: usize = 3;

/// The kernels of a backward pass in the order of their launches.
#[derive(Clone, Debug)]
pub struct AttentionBackwardPlan<'k> {
    /// What the tensors do not say.
    pub plan: AttentionBwdPlan,
    /// Each kernel with its grid, block and shared memory.
    pub launches: Vec<(&'k Kernel, LaunchConfig)>,
}

/// Bytes of workspace that a kernel needs for a problem that it accepts: for each query of each
/// head of q two f32 numbers, where dq is summed its sums in f32, and where several CTAs of this
/// GPU share the query heads of a block of keys their parts of dk and dv in f32. In the workspace
/// each sequence starts at a multiple of 64 queries, so that a tile never has those of two
/// sequences.
///
/// # Errors
/// [`Error::TooLarge`] beyond the address space.
pub fn workspace_bytes(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<usize> {
    workspace(kernel, problem, parts(kernel, problem, gpu))
}

/// The same with these parts.
pub(super) fn workspace(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    parts: Option<AttentionBwdParts>,
) -> Result<usize> {
    let forward = &problem.forward;
    let bytes = || {
        let [groups, rows] = statistics(problem)?;
        let heads = forward.batch.checked_mul(forward.num_heads_kv)?;
        let values = match parts {
            Some(parts) => attention_bwd_part_values(parts, heads, forward.seqlen_kv)?,
            None => 0,
        };
        attention_bwd_workspace(groups.checked_mul(rows)?, sums_head_dim(kernel), values)
    };
    let limit = isize::MAX as usize;
    bytes().ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
}

/// Number of heads over all batch entries, and padded rows of each.
fn statistics(problem: &AttentionBackwardProblem) -> Option<[usize; 2]> {
    let forward = &problem.forward;
    let (entries, rows) = match forward.packed {
        None => (forward.batch, forward.seqlen_q.checked_next_multiple_of(STATISTICS_ROWS)?),
        // Sequence `i` starts at `(cu_seqlens[i] / STATISTICS_ROWS + i) · STATISTICS_ROWS`.
        Some(packed) => {
            let tiles = packed.total_q / STATISTICS_ROWS + forward.batch;
            (1, tiles.checked_mul(STATISTICS_ROWS)?)
        }
    };
    Some([entries.checked_mul(forward.num_heads_q)?, rows])
}

/// The head dimension of the sums, if the kernel belongs to a scheme that has them.
fn sums_head_dim(kernel: &Kernel) -> Option<usize> {
    let tile = kernel.attention_bwd_tile()?;
    matches!(tile.step, Step::KeysAndSums | Step::Sums).then_some(tile.head_dims.qk)
}

/// The kernels of a pass, and whether CTAs share the query heads of a block of keys.
type KernelsAndParts<'k> = (Vec<&'k Kernel>, Option<AttentionBwdParts>);

/// The kernels of all steps: the given one for its own step, and for the others the selected ones.
/// With them the parts of heads.
fn kernels<'k>(
    given: &'k Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<KernelsAndParts<'k>> {
    let own = tile_of::<AttentionBackwardProblem>(given, &gpu.compute_capability)?.step;
    let kernel = |step| if step == own { Ok(given) } else { select(&problem.at(step), gpu) };
    let sums = match own {
        Step::KeysAndSums => true,
        Step::Keys | Step::Queries => false,
        // At some widths there are only sums of dk and dv.
        Step::Sums => kernel(Step::KeysAndSums).is_ok(),
        Step::Zeros | Step::Statistics | Step::Sinks | Step::Bias => {
            problem.step == Step::KeysAndSums
        }
    };
    let keys = kernel(if sums { Step::KeysAndSums } else { Step::Keys })?;
    let parts = parts(keys, problem, gpu);
    let mut kernels = Vec::with_capacity(7);
    if problem.forward.packed.is_some() {
        kernels.push(kernel(Step::Zeros)?);
    }
    kernels.extend([kernel(Step::Statistics)?, keys]);
    if !sums {
        kernels.push(kernel(Step::Queries)?);
    }
    if sums || parts.is_some() {
        let width = |kernel| {
            let tile = tile_of::<AttentionBackwardProblem>(kernel, &gpu.compute_capability);
            tile.map(|tile| tile.head_dims.max())
        };
        let fits = own == Step::Sums && width(given)? == width(keys)?;
        kernels.push(if fits { given } else { rounds(problem, width(keys)?, gpu)? });
    }
    if problem.dbias.is_some() {
        kernels.push(kernel(Step::Bias)?);
    }
    if problem.d_sink {
        kernels.push(kernel(Step::Sinks)?);
    }
    Ok((kernels, parts))
}

/// The kernel that rounds what a kernel of this width leaves in the workspace, which has room.
fn rounds<'k>(
    problem: &AttentionBackwardProblem,
    width: usize,
    gpu: &CudaProperties,
) -> Result<&'k Kernel> {
    let mut problem = problem.at(Step::Sums).with_workspace(usize::MAX);
    problem.forward.head_dims = HeadDims::all(width);
    select(&problem, gpu)
}

/// Plans all launches of the scheme of a kernel, for a problem that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// a grid or size beyond 32 bits, [`Error::Unsupported`] if the kernel, or every kernel of another
/// step, does not compute this problem.
pub fn plan<'k>(
    kernel: &'k Kernel,
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<AttentionBackwardPlan<'k>> {
    accepts(kernel, problem, gpu)?;
    let forward = &problem.forward;
    check_all_strides(problem)?;
    let (kernels, parts) = kernels(kernel, problem, gpu)?;
    let scalars = scalars(forward)?;
    let summing = kernels
        .iter()
        .filter_map(|kernel| kernel.attention_bwd_tile())
        .find(|tile| tile.step == Step::KeysAndSums);
    let heads = forward.batch * forward.num_heads_kv * parts_of_each(parts);
    let section = |tile: AttentionBwdTile| {
        heads_per_section(&tile, problem, heads, &scalars.scores.window, gpu)
    };
    let plan = AttentionBwdPlan {
        scalars,
        sums_head_dim: summing.map(|tile| tile.head_dims.qk),
        heads_per_section: summing.map_or(1, section) as i32,
        parts,
    };
    let mut launches = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        let blocks = blocks(kernel, problem, &plan, gpu)?;
        // Without queries there are no statistics, and without keys no tiles of keys.
        if blocks > 0 {
            let before = launches.last().map(|&(before, _)| before);
            let early = starts_early(kernel, before);
            launches.push((kernel, LaunchConfig::of(kernel, blocks, early)));
        }
    }
    Ok(AttentionBackwardPlan { plan, launches })
}

/// All strides are those that kernels take.
fn check_all_strides(problem: &AttentionBackwardProblem) -> Result<()> {
    let forward = &problem.forward;
    let queries = [forward.batch, forward.seqlen_q, forward.num_heads_q];
    let keys = [forward.batch, forward.seqlen_kv, forward.num_heads_kv];
    check_strides(&[
        ("q", forward.q, queries),
        ("k", forward.k, keys),
        ("v", forward.v, keys),
        ("o", forward.o, queries),
        ("d_o", problem.d_o, queries),
        ("dq", problem.dq, queries),
        ("dk", problem.dk, keys),
        ("dv", problem.dv, keys),
    ])
}

/// Bytes of the row statistics; `None` beyond the address space.
pub(crate) fn statistics_bytes(problem: &AttentionBackwardProblem) -> Option<usize> {
    let [groups, rows] = statistics(problem)?;
    attention_bwd_workspace(groups.checked_mul(rows)?, None, 0)
}

/// Plans what other kernels for the gradients of q, k and v need before them: zeros in packed rows
/// of no sequence, and row statistics. Where it is asked for, the gradient of logits comes, too.
///
/// # Errors
/// As [`plan`].
pub(crate) fn statistics_alone(
    problem: &AttentionBackwardProblem,
    gpu: &CudaProperties,
) -> Result<AttentionBackwardPlan<'static>> {
    check_all_strides(problem)?;
    let scalars = scalars(&problem.forward)?;
    let plan = AttentionBwdPlan { scalars, sums_head_dim: None, heads_per_section: 1, parts: None };
    let steps = [
        (Step::Zeros, problem.forward.packed.is_some()),
        (Step::Statistics, true),
        (Step::Sinks, problem.d_sink),
    ];
    let mut launches = Vec::with_capacity(steps.len());
    for (step, _) in steps.into_iter().filter(|(_, wanted)| *wanted) {
        let kernel = select(&problem.at(step), gpu)?;
        let blocks = blocks(kernel, problem, &plan, gpu)?;
        if blocks > 0 {
            launches.push((kernel, LaunchConfig::of(kernel, blocks, false)));
        }
    }
    Ok(AttentionBackwardPlan { plan, launches })
}

/// Whether a kernel starts before the launch before it in the plan ends: what it does until it
/// waits needs nothing of that launch. What comes before the plan has ended when the first launch
/// starts. The kernel for dq reads statistics without waiting, since the one for dk and dv has
/// waited, if it is one that does.
fn starts_early(kernel: &Kernel, before: Option<&Kernel>) -> bool {
    let of_queries = kernel.attention_bwd_tile().is_some_and(|tile| tile.step == Step::Queries);
    let waited = |before: &Kernel| before.waits_for_predecessor();
    kernel.waits_for_predecessor() && before.is_some_and(|before| !of_queries || waited(before))
}

/// CTAs for each block of keys.
fn parts_of_each(parts: Option<AttentionBwdParts>) -> usize {
    parts.map_or(1, |parts| parts.count as usize)
}

/// Heads of keys, of `all`, whose blocks start together. Under a mask with a right limit these are
/// the last ones, where the first block of a head is the longest: in dense batches without a left
/// limit. Where all blocks start at once, none is the last to start.
fn heads_per_section(
    tile: &AttentionBwdTile,
    problem: &AttentionBackwardProblem,
    all: usize,
    window: &blockflash_window,
    gpu: &CudaProperties,
) -> usize {
    let forward = &problem.forward;
    if window.right == BLOCKFLASH_WINDOW_UNBOUNDED {
        let tiles = forward.seqlen_q.div_ceil(tile.block_q as usize).max(1);
        let apart = STEPS_APART * gpu.multiprocessors as usize / tiles;
        let short = forward.seqlen_kv < SHORT;
        let sums = forward.seqlen_q.saturating_mul(tile.head_dims.qk * 4).max(1);
        let in_l2 = gpu.l2_bytes as usize / 4 / sums;
        let together = match short {
            true => apart.max(in_l2).max(HEADS_PER_SECTION),
            false => in_l2.clamp(1, HEADS_PER_SECTION),
        };
        return together.min(all);
    }
    let triangle = window.left == BLOCKFLASH_WINDOW_UNBOUNDED && forward.packed.is_none();
    let tiles = forward.seqlen_kv.div_ceil(tile.block_kv as usize).max(1);
    let multiprocessors = gpu.multiprocessors as usize;
    let rounds = ASCENDING_ROUNDS * multiprocessors / tiles;
    let at_once = all.saturating_mul(tiles) <= multiprocessors;
    if triangle && !at_once { rounds.min(all / 2).max(1) } else { 1 }
}

/// Number of CTAs of a kernel.
fn blocks(
    kernel: &Kernel,
    problem: &AttentionBackwardProblem,
    plan: &AttentionBwdPlan,
    gpu: &CudaProperties,
) -> Result<u32> {
    let tile = tile_of::<AttentionBackwardProblem>(kernel, &gpu.compute_capability)?;
    let forward = &problem.forward;
    let [block_q, block_kv] = [tile.block_q, tile.block_kv];
    let tiles_q = || match forward.block_mask {
        Some(mask) => mask.tiles_q(forward.seqlen_q, block_q),
        None => forward.seqlen_q.div_ceil(block_q as usize),
    };
    let tiles_kv = || match problem.transpose {
        Some(mask) => mask.tiles_q(forward.seqlen_kv, block_kv),
        None => forward.seqlen_kv.div_ceil(block_kv as usize),
    };
    let row_tiles = forward.seqlen_q.div_ceil(STATISTICS_ROWS);
    match tile.step {
        Step::Zeros => {
            let rows = forward.packed.map_or(0, |packed| packed.total_q + packed.total_kv);
            grid_x(&[rows.div_ceil(STATISTICS_ROWS)])
        }
        Step::Statistics => grid_x(&[row_tiles, forward.num_heads_q, forward.batch]),
        Step::Sums => {
            let of_queries = grid_x(&[row_tiles, forward.num_heads_q, forward.batch])?;
            let of_queries = if plan.sums_head_dim.is_some() { of_queries } else { 0 };
            // dk and dv of 64 keys each, of an even number of them.
            let tiles =
                if plan.parts.is_some() { forward.seqlen_kv.div_ceil(128) * 2 * 2 } else { 0 };
            let of_keys = grid_x(&[tiles, forward.num_heads_kv, forward.batch])?;
            grid_x(&[of_queries as usize + of_keys as usize])
        }
        Step::Sinks => grid_x(&[forward.num_heads_q]),
        Step::Keys | Step::KeysAndSums => {
            let parts = parts_of_each(plan.parts);
            let tiles = grid_x(&[tiles_kv(), forward.num_heads_kv, forward.batch, parts])?;
            grid_of(kernel, tiles as usize, gpu)
        }
        Step::Queries => grid_x(&[tiles_q(), forward.num_heads_q, forward.batch]),
        Step::Bias => {
            let tiles = |(size, tile): (usize, u32)| size.div_ceil(tile as usize);
            let shape = problem.dbias_shape().into_iter();
            grid_x(&shape.zip([1, 1, block_q, block_kv]).map(tiles).collect::<Vec<_>>())
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
