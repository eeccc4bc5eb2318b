use super::SummarySizes;
use crate::Result;
use crate::check::{Operand, to_i32};
use crate::kv_cache::KvCache;
use crate::operation::Operation;
use blockflash_safe::{Stream, ViewMut};

/// Writes the summaries of the pages that hold the last keys of each sequence: what
/// [`ChoosePages`](super::ChoosePages) scores pages by.
///
/// Summaries are `[pages, 1, num_heads_kv, head_dim]` for the mean of the keys of each page and
/// head, or `[pages, 2, num_heads_kv, head_dim]` for their minimum and their maximum, element by
/// element, in the element type of the cache. They are computed from the keys that the page holds
/// now, in f32 and rounded once, so it does not matter how the keys came, nor which keys the page
/// held before. Minimum and maximum pass over NaN. Sequences that share a page must have equally
/// many keys in it: otherwise its summary is that of either.
#[derive(Clone, Copy, Debug)]
pub struct SummarizePages<'a> {
    /// The cache, with a block table.
    pub cache: KvCache<'a>,
    /// At least as many tokens as were appended to any sequence since the last call.
    pub tokens: usize,
}

/// A call of [`SummarizePages`] reduced to plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummarizePagesProblem {
    /// The cache and the summaries.
    pub summaries: SummarySizes,
    /// The last tokens of each sequence.
    pub tokens: usize,
}

impl SummarizePages<'_> {
    /// Writes the summaries. On a GPU nothing is allocated and the stream is not synchronised, so a
    /// graph can capture the call. On the CPU it returns when the result is there.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem);
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if an operand is not on the stream's
    /// device; on a GPU [`Error::Unsupported`](crate::Error::Unsupported) for what no kernel takes,
    /// and [`Error::Misaligned`](crate::Error::Misaligned).
    pub fn summarize_into(&self, summaries: ViewMut<'_>, stream: &Stream) -> Result<()> {
        self.run(summaries, stream)
    }

    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`](crate::Error::DType),
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Stride`](crate::Error::Stride) for
    /// summaries that do not fit, and for a cache without pages.
    pub fn problem(&self, summaries: &ViewMut<'_>) -> Result<SummarizePagesProblem> {
        to_i32("tokens", self.tokens)?;
        let summaries = SummarySizes::of(&self.cache, &Operand::of_mut("summaries", summaries))?;
        Ok(SummarizePagesProblem { summaries, tokens: self.tokens })
    }
}
