use super::{AttentionProblem, Strides, block_mask, score_params};
use crate::check::{grid_of, grid_x, to_i32, to_i64};
use crate::selection::{fits, tile_of};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::params::{
    BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_attention_fwd_params,
    blockflash_attention_fwd_tma_params, blockflash_tensor_map,
};
use std::ptr::{null, null_mut};

/// Bytes of keys and values that should stay in L2 while the CTAs work on them: about two thirds of
/// the L2 of the GPUs that have tensor maps.
const L2_BYTES: f64 = 34e6;

/// The kernel argument, with null pointers and zeroed tensor maps.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "plain data, made for one launch")]
pub enum AttentionParams {
    /// For the kernels without tensor maps.
    Portable(blockflash_attention_fwd_params),
    /// For the Hopper kernels with tensor maps.
    Hopper(blockflash_attention_fwd_tma_params),
}

impl AttentionParams {
    /// The fields that both have in common.
    pub fn base(&self) -> &blockflash_attention_fwd_params {
        match self {
            AttentionParams::Portable(params) => params,
            AttentionParams::Hopper(params) => &params.base,
        }
    }
}

/// A launch as plain data, without pointers.
#[derive(Clone, Copy, Debug)]
pub struct AttentionPlan {
    /// The kernel argument.
    pub params: AttentionParams,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Fills the kernel argument and the launch configuration of `kernel` for a problem that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// a grid or size beyond 32 bits, [`Error::Unsupported`] if the kernel does not compute this
/// problem.
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
    check_strides(&[
        ("q", problem.q, queries),
        ("k", problem.k, keys),
        ("v", problem.v, keys),
        ("o", problem.o, queries),
    ])?;

    let tiles_q = match problem.block_mask {
        Some(mask) => mask.tiles_q(problem.seqlen_q, tile.block_q),
        None => problem.seqlen_q.div_ceil(tile.block_q as usize),
    };
    // Pairs of block rows count as two: a CTA that finds none ends at once.
    let tiles = grid_x(&[tiles_q, problem.num_heads_q / tile.heads as usize, problem.batch])?;
    let base = base_params(problem)?;
    let blocks = grid_of(kernel, tiles as usize, gpu)?;
    let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
    let params = match kernel.family().is_persistent() {
        true => {
            let tiles_per_head = tiles_q.div_ceil(tile.heads as usize);
            let sections =
                heads_per_section(&base, problem.packed.is_some(), blocks, tiles_per_head);
            AttentionParams::Hopper(hopper_params(base, sections))
        }
        false => AttentionParams::Portable(base),
    };
    Ok(AttentionPlan { params, config })
}

/// The sizes, strides and factors of a problem, with null pointers.
pub(crate) fn base_params(problem: &AttentionProblem) -> Result<blockflash_attention_fwd_params> {
    let stride = |value| to_i64("stride", value);
    Ok(blockflash_attention_fwd_params {
        q: null(),
        k: null(),
        v: null(),
        o: null_mut(),
        lse: null_mut(),
        cu_seqlens_q: null(),
        cu_seqlens_kv: null(),
        q_stride_batch: stride(problem.q.batch)?,
        q_stride_seq: stride(problem.q.seq)?,
        q_stride_head: stride(problem.q.head)?,
        k_stride_batch: stride(problem.k.batch)?,
        k_stride_seq: stride(problem.k.seq)?,
        k_stride_head: stride(problem.k.head)?,
        v_stride_batch: stride(problem.v.batch)?,
        v_stride_seq: stride(problem.v.seq)?,
        v_stride_head: stride(problem.v.head)?,
        o_stride_batch: stride(problem.o.batch)?,
        o_stride_seq: stride(problem.o.seq)?,
        o_stride_head: stride(problem.o.head)?,
        lse_stride_batch: stride(problem.lse.map_or(0, |lse| lse.batch))?,
        lse_stride_head: stride(problem.lse.map_or(0, |lse| lse.head))?,
        batch: to_i32("batch", problem.batch)?,
        num_heads_q: to_i32("num_heads_q", problem.num_heads_q)?,
        num_heads_kv: to_i32("num_heads_kv", problem.num_heads_kv)?,
        seqlen_q: to_i32("seqlen_q", problem.seqlen_q)?,
        seqlen_kv: to_i32("seqlen_kv", problem.seqlen_kv)?,
        total_q: to_i32("total_q", problem.packed.map_or(0, |packed| packed.total_q))?,
        total_kv: to_i32("total_kv", problem.packed.map_or(0, |packed| packed.total_kv))?,
        head_dim_qk: to_i32("head_dim", problem.head_dims.qk)?,
        head_dim_v: to_i32("head_dim", problem.head_dims.v)?,
        scores: score_params(problem),
        block_mask: block_mask::params(
            problem.block_mask.as_ref(),
            problem.seqlen_q,
            problem.num_heads_q,
        )?,
    })
}

pub(crate) fn hopper_params(
    base: blockflash_attention_fwd_params,
    heads_per_section: i32,
) -> blockflash_attention_fwd_tma_params {
    let unused = blockflash_tensor_map { opaque: [0; 16] };
    blockflash_attention_fwd_tma_params {
        q: unused,
        k: unused,
        v: unused,
        o: unused,
        base,
        tile_counter: null_mut(),
        heads_per_section,
    }
}

/// Number of heads that are computed together. Under a window or a block mask tiles take unequal
/// time. Many heads at once balance the load, but their keys and values should fit into L2.
/// Otherwise the heads that share keys are enough. `packed`: sections are within a sequence.
///
/// Under a window two tiles for each CTA balance enough. The first tiles of each head read its keys
/// from device memory and the others from L2, so with more heads memory would have too much to do
/// in turn with too little: short causal sequences were 12 % slower.
pub(crate) fn heads_per_section(
    base: &blockflash_attention_fwd_params,
    packed: bool,
    ctas: u32,
    tiles_per_head: usize,
) -> i32 {
    let group = (base.num_heads_q / base.num_heads_kv.max(1)).max(1);
    let window = &base.scores.window;
    let windowless = [window.left, window.right] == [BLOCKFLASH_WINDOW_UNBOUNDED; 2];
    if windowless && base.block_mask.rows == 0 {
        return group;
    }
    let row_bytes = 2.0 * (f64::from(base.head_dim_qk) + f64::from(base.head_dim_v));
    let bytes_per_group = f64::from(base.seqlen_kv) * row_bytes;
    // CTAs on arbitrary blocks do not read them at the same time. Sections of half the size were
    // measured to be faster.
    let bytes = if base.block_mask.rows > 0 { L2_BYTES / 2.0 } else { L2_BYTES };
    let mut groups = (bytes / bytes_per_group.max(1.0)).max(1.0) as i32;
    if base.block_mask.rows == 0 {
        let tiles_per_group = tiles_per_head.max(1).saturating_mul(group as usize);
        groups = groups.min((2 * ctas as usize / tiles_per_group).max(1) as i32);
    }
    let heads = base.num_heads_q.saturating_mul(if packed { 1 } else { base.batch });
    // Equal sections: a smaller last one would leave SMs without tiles.
    let all = (heads / group).max(1);
    let sections = all / groups + i32::from(all % groups != 0);
    (all / sections + i32::from(all % sections != 0)) * group
}

/// Checks the strides of tensors with these numbers of batch entries, rows of a sequence and heads.
/// The kernels read and write 16 bytes at a time, so rows must start at multiples of 8 elements.
/// The stride of a dimension with one entry is never used.
pub(crate) fn check_strides(operands: &[(&'static str, Strides, [usize; 3])]) -> Result<()> {
    for &(what, strides, [batch, seqlen, heads]) in operands {
        let dims = [
            ("batch", strides.batch, batch),
            ("sequence", strides.seq, seqlen),
            ("head", strides.head, heads),
        ];
        for (dim, stride, extent) in dims {
            if extent > 1 && stride % 8 != 0 {
                let problem = format!("the {dim} stride is {stride} elements, not a multiple of 8");
                return Err(Error::Misaligned { what, problem });
            }
        }
    }
    Ok(())
}
