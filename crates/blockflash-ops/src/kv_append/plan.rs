use super::AppendKvProblem;
use crate::Result;
use crate::attention::{AttentionProblem, Strides, check_strides};
use crate::check::{grid_x, to_i32, to_i64};
use crate::kv_cache::{RotaryPairs, RotarySizes};
use crate::selection::fits;
use blockflash_safe::{CudaProperties, LaunchConfig};
use blockflash_sys::params::{
    BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED, blockflash_kv_append_params,
    blockflash_rotary,
};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};

/// Elements that a thread writes.
const PIECE: usize = 8;

/// A launch as plain data, without pointers.
#[derive(Clone, Copy, Debug)]
pub struct AppendKvPlan {
    /// The kernel argument.
    pub params: blockflash_kv_append_params,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Fills the kernel argument and the launch configuration of `kernel` for an append that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::Misaligned`](crate::Error::Misaligned) for a stride that is not a multiple of 8
/// elements, [`Error::TooLarge`](crate::Error::TooLarge) for more rows than 32 bits count,
/// [`Error::Unsupported`](crate::Error::Unsupported) if the kernel does not do this append.
pub fn plan(
    kernel: &Kernel,
    problem: &AppendKvProblem,
    gpu: &CudaProperties,
) -> Result<AppendKvPlan> {
    plan_with(kernel, problem, None, gpu)
}

/// The same, and these queries are turned into the output of their attention.
pub(crate) fn plan_with(
    kernel: &Kernel,
    problem: &AppendKvProblem,
    queries: Option<(&AttentionProblem, RotarySizes)>,
    gpu: &CudaProperties,
) -> Result<AppendKvPlan> {
    fits(kernel, problem, gpu)?;
    let cache = &problem.cache;
    let mut rows = 0usize;
    if !problem.is_empty() {
        let new = Tokens { tokens: problem.tokens, packed: problem.packed };
        let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
        check_strides(&[("cache.k", cache.k, keys), ("cache.v", cache.v, keys)])?;
        let tensors = [("new.k", problem.k), ("new.v", problem.v)];
        rows = new.rows(cache.batch, cache.num_heads_kv, tensors)?;
    }
    if let Some((attention, _)) = queries {
        let tensors = [("q", attention.q), ("o", attention.o)];
        let rows_q = Tokens::of(attention).rows(cache.batch, attention.num_heads_q, tensors)?;
        rows = rows.saturating_add(rows_q);
    }
    // Rows are counted in 32 bits.
    to_i32("rows", rows)?;
    let threads = rows.saturating_mul(cache.head_dims.max() / PIECE);
    let blocks = grid_x(&[threads.div_ceil(kernel.threads() as usize)])?;
    let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
    Ok(AppendKvPlan { params: params(problem, queries)?, config })
}

/// How many tokens sequences have.
struct Tokens {
    tokens: usize,
    packed: Option<usize>,
}

impl Tokens {
    fn of(attention: &AttentionProblem) -> Self {
        let packed = attention.packed.map(|packed| packed.total_q);
        Self { tokens: attention.seqlen_q, packed }
    }

    /// Rows, one for each head of each token.
    fn rows(
        &self,
        batch: usize,
        heads: usize,
        tensors: [(&'static str, Strides); 2],
    ) -> Result<usize> {
        let dims = self.packed.map_or([batch, self.tokens], |total| [1, total]);
        for (what, strides) in tensors {
            check_strides(&[(what, strides, [dims[0], dims[1], heads])])?;
        }
        Ok(dims.into_iter().fold(heads, usize::saturating_mul))
    }

    /// The tokens of a sequence, and the rows of a packed tensor.
    fn sizes(&self) -> Result<[i32; 2]> {
        Ok([to_i32("tokens", self.tokens)?, to_i32("tokens", self.packed.unwrap_or(0))?])
    }
}

/// The sizes and strides of a problem, with null pointers.
fn params(
    problem: &AppendKvProblem,
    queries: Option<(&AttentionProblem, RotarySizes)>,
) -> Result<blockflash_kv_append_params> {
    let stride = |value| to_i64("stride", value);
    let cache = &problem.cache;
    let new = Tokens { tokens: problem.tokens, packed: problem.packed };
    let [seqlen_new, total_new] = new.sizes()?;
    let attention = queries.map(|(attention, _)| attention);
    let of_queries = attention.map_or(Tokens { tokens: 0, packed: None }, Tokens::of);
    let [seqlen_q, total_q] = of_queries.sizes()?;
    let none = Strides { batch: 0, seq: 0, head: 0 };
    let (q, o) = attention.map_or((none, none), |attention| (attention.q, attention.o));
    Ok(blockflash_kv_append_params {
        cache: cache.params()?,
        k_new: null(),
        v_new: null(),
        cu_seqlens_new: null(),
        q: null(),
        q_turned: null_mut(),
        cu_seqlens_q: null(),
        rotary_new: rotary(problem.rotary)?,
        rotary_q: rotary(queries.map(|(_, rotary)| rotary))?,
        k_new_stride_batch: stride(problem.k.batch)?,
        k_new_stride_seq: stride(problem.k.seq)?,
        k_new_stride_head: stride(problem.k.head)?,
        v_new_stride_batch: stride(problem.v.batch)?,
        v_new_stride_seq: stride(problem.v.seq)?,
        v_new_stride_head: stride(problem.v.head)?,
        q_stride_batch: stride(q.batch)?,
        q_stride_seq: stride(q.seq)?,
        q_stride_head: stride(q.head)?,
        q_turned_stride_batch: stride(o.batch)?,
        q_turned_stride_seq: stride(o.seq)?,
        q_turned_stride_head: stride(o.head)?,
        batch: to_i32("batch", cache.batch)?,
        num_heads_q: to_i32("num_heads_q", attention.map_or(0, |a| a.num_heads_q))?,
        num_heads_kv: to_i32("num_heads_kv", cache.num_heads_kv)?,
        head_dim_qk: to_i32("head_dim", cache.head_dims.qk)?,
        head_dim_v: to_i32("head_dim", cache.head_dims.v)?,
        seqlen_new,
        total_new,
        seqlen_q,
        total_q,
    })
}

/// A rotary embedding with null pointers.
fn rotary(sizes: Option<RotarySizes>) -> Result<blockflash_rotary> {
    let (mut positions, mut dim, mut strides) = (0, 0, [0; 2]);
    let (mut pairs, mut dtype) = (RotaryPairs::Halves, DType::F32);
    if let Some(sizes) = sizes {
        (positions, dim, strides) = (sizes.positions, sizes.rotary_dim, sizes.strides);
        (pairs, dtype) = (sizes.pairs, sizes.dtype);
    }
    Ok(blockflash_rotary {
        cos: null(),
        sin: null(),
        cos_stride: to_i64("stride", strides[0])?,
        sin_stride: to_i64("stride", strides[1])?,
        positions: to_i32("rotary.cos", positions)?,
        dim: to_i32("rotary.cos", dim)?,
        pairs: match pairs {
            RotaryPairs::Halves => BLOCKFLASH_ROTARY_HALVES,
            RotaryPairs::Interleaved => BLOCKFLASH_ROTARY_INTERLEAVED,
        },
        dtype: dtype as i32,
    })
}
