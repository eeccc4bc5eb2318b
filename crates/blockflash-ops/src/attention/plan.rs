use super::{AttentionProblem, Rows, Strides, score_params};
use crate::check::{grid_of, grid_x, to_i32};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{AttentionFwdPlan, AttentionScalars, CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_window};

/// Bytes of keys and values that should stay in L2 while the CTAs work on them: about two thirds of
/// the L2 of the GPUs that have tensor maps.
const L2_BYTES: f64 = 34e6;

/// A launch as plain data. Sizes, strides and pointers come from the tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlan {
    /// What the tensors do not say.
    pub plan: AttentionFwdPlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Plans the launch of `kernel` for a problem that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, or of 16 codes of 8
/// bits, [`Error::TooLarge`] for a grid or size beyond 32 bits, [`Error::Unsupported`] if the
/// kernel does not compute this problem.
pub fn plan(
    kernel: &Kernel,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> Result<AttentionPlan> {
    fits(kernel, problem, gpu)?;
    planned(kernel, problem, gpu)
}

/// Like `plan`, for a kernel that is known to accept the problem.
pub(super) fn planned(
    kernel: &Kernel,
    problem: &AttentionProblem,
    gpu: &CudaProperties,
) -> Result<AttentionPlan> {
    let tile = &tile_of::<AttentionProblem>(kernel, &gpu.compute_capability)?;
    let queries = [problem.batch, problem.seqlen_q, problem.num_heads_q];
    let keys = [problem.batch, problem.seqlen_kv, problem.num_heads_kv];
    let inputs = [("q", problem.q, queries), ("k", problem.k, keys), ("v", problem.v, keys)];
    check_strides_by(Rows::from(tile).multiple(), &inputs)?;
    check_strides(&[("o", problem.o, queries)])?;

    let tiles_q = match problem.block_mask {
        Some(mask) => mask.tiles_q(problem.seqlen_q, tile.block_q),
        None => problem.seqlen_q.div_ceil(tile.block_q as usize),
    };
    // Pairs of block rows count as two: a CTA that finds none ends at once.
    let tiles = grid_x(&[tiles_q, problem.num_heads_q / tile.heads as usize, problem.batch])?;
    let scalars = scalars(problem)?;
    let blocks = grid_of(kernel, tiles as usize, gpu)?;
    let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
    let tiles_per_head = tiles_q.div_ceil(tile.heads as usize);
    let (window, packed) = (&scalars.scores.window, problem.packed.is_some());
    // CTAs at the same time: persistent ones, or one for each SM.
    let at_once = match kernel.family().is_persistent() {
        true => blocks,
        false => blocks.min(gpu.multiprocessors.max(1)),
    };
    let heads_per_section = match tile.tensor_maps {
        true => heads_per_section(problem, window, packed, at_once, tiles_per_head),
        false => 0,
    };
    let heads_per_section = to_i32("num_heads_q", heads_per_section)?;
    Ok(AttentionPlan { plan: AttentionFwdPlan { scalars, heads_per_section }, config })
}

/// What the tensors of a problem do not say, after checks of what kernels count in 32 bits.
pub(crate) fn scalars(problem: &AttentionProblem) -> Result<AttentionScalars> {
    for (what, size) in [
        ("batch", problem.batch),
        ("num_heads_q", problem.num_heads_q),
        ("num_heads_kv", problem.num_heads_kv),
        ("head_dim", problem.head_dims.max()),
        ("total_q", problem.packed.map_or(0, |packed| packed.total_q)),
        ("total_kv", problem.packed.map_or(0, |packed| packed.total_kv)),
        ("block_mask", problem.block_mask.map_or(0, |mask| mask.rows(problem.seqlen_q))),
    ] {
        to_i32(what, size)?;
    }
    let size = |size: u32| to_i32("block_mask", size as usize);
    let blocks = problem.block_mask.map_or([0; 2], |mask| [mask.block_q, mask.block_kv]);
    Ok(AttentionScalars {
        scores: score_params(problem),
        longest: [to_i32("seqlen_q", problem.seqlen_q)?, to_i32("seqlen_kv", problem.seqlen_kv)?],
        blocks: [size(blocks[0])?, size(blocks[1])?],
    })
}

/// Number of heads that are computed together. Under a window or a block mask tiles take unequal
/// time. Many heads at once balance the load, but their keys and values should fit into L2.
/// Otherwise the heads that share keys are enough. `packed`: sections are within a sequence.
///
/// Under a window two tiles for each CTA balance enough. The first tiles of each head read its keys
/// from device memory and the others from L2, so with more heads memory would have too much to do
/// in turn with too little: short causal sequences were 12 % slower.
///
/// Heads that read the same bias are taken together, since it is larger than their keys.
pub(crate) fn heads_per_section(
    problem: &AttentionProblem,
    window: &blockflash_window,
    packed: bool,
    ctas: u32,
    tiles_per_head: usize,
) -> usize {
    let group = (problem.num_heads_q / problem.num_heads_kv.max(1)).max(1);
    let windowless = [window.left, window.right] == [BLOCKFLASH_WINDOW_UNBOUNDED; 2];
    let masked = problem.block_mask.is_some();
    // Groups of heads whose tiles read the same bias. Of a bias that serves all batch entries,
    // kernels take a head in all of them before the next one.
    let readers = match problem.scores.bias.map(|bias| bias.broadcast) {
        Some([true, ..]) => problem.batch,
        Some([_, true, ..]) => problem.num_heads_kv,
        _ => 1,
    };
    if windowless && !masked && readers <= 1 {
        return group;
    }
    let row_bytes = (problem.types.kv.size() * problem.head_dims.sum()) as f64;
    let bytes_per_group = problem.seqlen_kv as f64 * row_bytes;
    // CTAs on arbitrary blocks do not read them at the same time. Sections of half the size were
    // measured to be faster.
    let bytes = if masked { L2_BYTES / 2.0 } else { L2_BYTES };
    let mut groups = (bytes / bytes_per_group.max(1.0)).max(1.0) as usize;
    if windowless && !masked {
        groups = groups.min(readers);
    } else if !masked {
        let tiles_per_group = tiles_per_head.max(1).saturating_mul(group);
        groups = groups.min((2 * ctas as usize / tiles_per_group).max(1));
    }
    let heads = problem.num_heads_q.saturating_mul(if packed { 1 } else { problem.batch });
    // Equal sections: a smaller last one would leave SMs without tiles.
    let all = (heads / group).max(1);
    all.div_ceil(all.div_ceil(groups)) * group
}

/// Checks the strides of tensors with these numbers of batch entries, rows of a sequence and heads.
/// The kernels read and write 16 bytes at a time, so rows must start at multiples of 8 elements.
/// The stride of a dimension with one entry is never used.
pub(crate) fn check_strides(operands: &[(&'static str, Strides, [usize; 3])]) -> Result<()> {
    check_strides_by(8, operands)
}

/// The same for multiples of another number of elements.
pub(crate) fn check_strides_by(
    multiple: usize,
    operands: &[(&'static str, Strides, [usize; 3])],
) -> Result<()> {
    for &(what, strides, [batch, seqlen, heads]) in operands {
        let dims = [
            ("batch", strides.batch, batch),
            ("sequence", strides.seq, seqlen),
            ("head", strides.head, heads),
        ];
        for (dim, stride, extent) in dims {
            if extent > 1 && stride % multiple != 0 {
                let problem =
                    format!("the {dim} stride is {stride} elements, not a multiple of {multiple}");
                return Err(Error::Misaligned { what, problem });
            }
        }
    }
    Ok(())
}
