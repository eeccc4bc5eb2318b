use super::AppendKvProblem;
use crate::Result;
use crate::attention::{AttentionProblem, Strides, check_strides, check_strides_by};
use crate::check::{grid_x, to_i32};
use crate::kv_cache::{RotaryPairs, RotarySizes};
use crate::selection::fits;
use blockflash_safe::{CudaProperties, KvAppendPlan, LaunchConfig};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{KvAppendCodes, Variant};
use blockflash_sys::params::{BLOCKFLASH_ROTARY_HALVES, BLOCKFLASH_ROTARY_INTERLEAVED};

/// Elements that a thread writes.
const PIECE: usize = 8;

/// A launch as plain data. Sizes, strides and pointers come from the tensors.
#[derive(Clone, Copy, Debug)]
pub struct AppendKvPlan {
    /// What the tensors do not say.
    pub plan: KvAppendPlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// Plans the launch of `kernel` for an append that it accepts on this GPU.
///
/// # Errors
/// [`Error::Misaligned`](crate::Error::Misaligned) for a stride that is not a multiple of
/// 16 bytes, [`Error::TooLarge`](crate::Error::TooLarge) for more rows than 32 bits count,
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
        let of_chunk = 16 / cache.dtype.size();
        check_strides_by(of_chunk, &[("cache.k", cache.k, keys), ("cache.v", cache.v, keys)])?;
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
    // Only new values have columns of their own.
    let columns = if problem.is_empty() { cache.head_dims.qk } else { problem.head_dims.max() };
    let pieces = columns / PIECE;
    let lanes = match kernel.variant {
        Variant::KvAppendCodes(_) => KvAppendCodes::lanes(pieces),
        _ => pieces,
    };
    let threads = rows.saturating_mul(lanes);
    let blocks = grid_x(&[threads.div_ceil(kernel.threads() as usize)])?;
    let config = LaunchConfig::of(kernel, blocks, kernel.waits_for_predecessor());
    Ok(AppendKvPlan { plan: plan_of(problem, queries)?, config })
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
}

/// What the tensors do not say.
fn plan_of(
    problem: &AppendKvProblem,
    queries: Option<(&AttentionProblem, RotarySizes)>,
) -> Result<KvAppendPlan> {
    let seqlen_q = queries.map_or(0, |(attention, _)| attention.seqlen_q);
    let pairs = |rotary: Option<RotarySizes>| match rotary.map(|rotary| rotary.pairs) {
        Some(RotaryPairs::Interleaved) => BLOCKFLASH_ROTARY_INTERLEAVED,
        Some(RotaryPairs::Halves) | None => BLOCKFLASH_ROTARY_HALVES,
    };
    Ok(KvAppendPlan {
        longest: [to_i32("tokens", problem.tokens)?, to_i32("tokens", seqlen_q)?],
        pairs: [pairs(problem.rotary), pairs(queries.map(|(_, rotary)| rotary))],
        capacity: to_i32("capacity", problem.cache.capacity)?,
    })
}
