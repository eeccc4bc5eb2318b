use super::{ChoosePagesProblem, SummarizePagesProblem, SummarySizes};
use crate::attention::{Strides, check_strides};
use crate::check::{grid_x, persistent_grid, to_i32};
use crate::selection::fits;
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, LaunchConfig, PageChoicePlan, PageSummariesPlan};
use blockflash_sys::Kernel;

/// CTAs of a choice that run on an SM.
const CTAS: usize = 2;
/// Fewest pages for which a further CTA takes part in scoring those of a sequence.
const PAGES_OF_CTA: usize = 64;

/// A launch of [`SummarizePages`](super::SummarizePages) as plain data.
#[derive(Clone, Copy, Debug)]
pub struct SummarizePagesPlan {
    /// What the tensors do not say.
    pub plan: PageSummariesPlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

/// A launch of [`ChoosePages`](super::ChoosePages) as plain data.
#[derive(Clone, Copy, Debug)]
pub struct ChoosePagesPlan {
    /// What the tensors do not say.
    pub plan: PageChoicePlan,
    /// Grid, block and shared memory.
    pub config: LaunchConfig,
}

impl SummarySizes {
    /// The most columns of the block table that hold keys of a sequence.
    fn columns(&self) -> usize {
        self.cache.capacity.div_ceil(self.cache.page_size.max(1))
    }

    /// Numbers of 32 bits, and words that count, of the workspace of a choice.
    pub(super) fn room(&self) -> Option<[usize; 2]> {
        let words = self.cache.batch.checked_mul(self.cache.num_heads_kv)?;
        Some([words.checked_mul(self.columns())?, words])
    }

    /// Checks what kernels load 16 bytes at a time.
    fn check_strides(&self) -> Result<()> {
        let (cache, [batch, seq, head]) = (&self.cache, self.strides);
        let keys = [cache.pages, cache.page_size, cache.num_heads_kv];
        let rows = [cache.pages, self.statistics, cache.num_heads_kv];
        check_strides(&[
            ("cache.k", cache.k, keys),
            ("cache.v", cache.v, keys),
            ("summaries", Strides { batch, seq, head }, rows),
        ])
    }
}

/// Plans the launch of `kernel` for summaries that it accepts
/// on this GPU.
///
/// # Errors
/// [`Error::Misaligned`] for a stride that is not a multiple of 8 elements, [`Error::TooLarge`] for
/// more pages than 32 bits count, [`Error::Unsupported`] if the kernel does not make these
/// summaries.
pub fn plan_summaries(
    kernel: &Kernel,
    problem: &SummarizePagesProblem,
    gpu: &CudaProperties,
) -> Result<SummarizePagesPlan> {
    fits(kernel, problem, gpu)?;
    let (summaries, cache) = (&problem.summaries, &problem.summaries.cache);
    summaries.check_strides()?;
    // Tokens begin anywhere in a page.
    let touched = problem.tokens.saturating_sub(1).div_ceil(cache.page_size.max(1)) + 1;
    let most_pages = touched.min(summaries.columns());
    let blocks = grid_x(&[cache.batch, most_pages, cache.num_heads_kv])?;
    let plan = PageSummariesPlan {
        tokens: to_i32("tokens", problem.tokens)?,
        most_pages: to_i32("pages", most_pages)?,
    };
    Ok(SummarizePagesPlan { plan, config: LaunchConfig::of(kernel, blocks, false) })
}

/// Plans the launch of `kernel` for a choice that it accepts
/// on this GPU.
///
/// # Errors
/// As [`plan_summaries`].
pub fn plan_choice(
    kernel: &Kernel,
    problem: &ChoosePagesProblem,
    gpu: &CudaProperties,
) -> Result<ChoosePagesPlan> {
    fits(kernel, problem, gpu)?;
    let (summaries, cache) = (&problem.summaries, &problem.summaries.cache);
    summaries.check_strides()?;
    let queries = [cache.batch, problem.seqlen_q, problem.num_heads_q];
    check_strides(&[("q", problem.q, queries)])?;
    // Each sequence and head of keys has as many CTAs as run at once, as long as there is enough
    // for each of them to do.
    let groups = cache.batch.saturating_mul(cache.num_heads_kv).max(1);
    let resident = CTAS * gpu.multiprocessors.max(1) as usize;
    let useful = summaries.columns().div_ceil(PAGES_OF_CTA).max(1);
    let parts = (resident / groups).clamp(1, useful);
    let tiles = groups.saturating_mul(parts);
    let blocks = persistent_grid(tiles, resident)?;
    let (longest, parts) = (to_i32("seqlen_q", problem.seqlen_q)?, to_i32("parts", parts)?);
    // Machine code for Hopper waits for its predecessor itself.
    let waits = kernel.target.has_programmatic_launch();
    let plan = PageChoicePlan { longest, parts };
    Ok(ChoosePagesPlan { plan, config: LaunchConfig::of(kernel, blocks, waits) })
}

/// The address of an operand that kernels read 16 bytes at a time.
pub(super) fn check_addresses(operands: &[(&'static str, bool)]) -> Result<()> {
    match operands.iter().find(|(_, aligned)| !aligned) {
        None => Ok(()),
        Some(&(what, _)) => {
            let problem = "the address is not a multiple of 16".into();
            Err(Error::Misaligned { what, problem })
        }
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
