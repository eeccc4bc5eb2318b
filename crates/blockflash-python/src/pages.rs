//! The choice of the pages that queries visit, into tensors of the caller.

use crate::error::{Failure, Result};
use crate::foreign::{of, optional, scratch, views};
use blockflash_ops::{
    AttentionDecodeWorkspace, ChoosePages, KvCache, PackedTokens, SummarizePages, View,
};
use pyo3::prelude::*;

/// Writes into `summaries` `[pages, 1 or 2, Hk, D]` the mean, or the minimum and the maximum, of
/// the keys of each page that holds some of the last `tokens` keys of a sequence.
#[pyfunction]
pub(crate) fn summarize_pages(
    k_cache: &Bound<'_, PyAny>,
    summaries: &Bound<'_, PyAny>,
    block_table: &Bound<'_, PyAny>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    tokens: usize,
) -> PyResult<()> {
    let py = k_cache.py();
    let read = [
        Some(of("k_cache", k_cache)?),
        Some(of("block_table", block_table)?),
        optional("seqused_k", seqused_k)?,
    ];
    let summaries = of("summaries", summaries)?;
    let run = || -> Result<()> {
        let stream = summaries.stream()?;
        let ([k, block_table, seqused_k], [], [summaries]) =
            views((read.each_ref(), []), [Some(summaries)])?;
        let summaries = summaries.ok_or_else(needed)?;
        let cache = cache(k, block_table, seqused_k)?;
        Ok(SummarizePages { cache, tokens }.summarize_into(summaries, &stream)?)
    };
    Ok(py.detach(run)?)
}

/// Writes the chosen pages of each sequence and head of keys into `lists`, i32 `[B, Hk, room]`, and
/// how many there are into `counts`, i32 `[B]`. `allocate` gets a number of bytes and returns a
/// uint8 tensor of that size on the device of q; it is called at most once.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn choose_pages(
    q: &Bound<'_, PyAny>,
    k_cache: &Bound<'_, PyAny>,
    summaries: &Bound<'_, PyAny>,
    lists: &Bound<'_, PyAny>,
    counts: &Bound<'_, PyAny>,
    allocate: &Bound<'_, PyAny>,
    block_table: &Bound<'_, PyAny>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    max_q: usize,
) -> PyResult<()> {
    let py = q.py();
    let q = of("q", q)?;
    let stream = q.stream().map_err(Failure::from)?;
    let read = [
        Some(q),
        Some(of("k_cache", k_cache)?),
        Some(of("summaries", summaries)?),
        Some(of("block_table", block_table)?),
        optional("seqused_k", seqused_k)?,
        optional("cu_seqlens_q", cu_seqlens_q)?,
    ];
    let written = [Some(of("lists", lists)?), Some(of("counts", counts)?)];
    let bytes = py.detach(|| -> Result<usize> {
        let (read, [], []) = views((read.each_ref(), []), [])?;
        Ok(choice(read, max_q)?.workspace_bytes(stream.device())?)
    })?;
    // Held until the work is queued.
    let memory = if bytes > 0 { Some(allocate.call1((bytes,))?) } else { None };
    let memory = optional("workspace", memory.as_ref())?;
    let run = || -> Result<()> {
        let workspace = match &memory {
            Some(memory) => Some(AttentionDecodeWorkspace::from_tensor(scratch(memory, &stream)?)?),
            None => None,
        };
        let (read, [], [lists, counts]) = views((read.each_ref(), []), written)?;
        let (Some(lists), Some(counts)) = (lists, counts) else { return Err(needed()) };
        let choice = ChoosePages { workspace: workspace.as_ref(), ..choice(read, max_q)? };
        Ok(choice.choose_into(lists, counts, &stream)?)
    };
    Ok(py.detach(run)?)
}

fn needed() -> Failure {
    Failure::value("k_cache, summaries, block_table and the results are needed")
}

/// A cache of which only the keys are looked at.
fn cache<'v>(
    k: Option<View<'v>>,
    block_table: Option<View<'v>>,
    seqused_kv: Option<View<'v>>,
) -> Result<KvCache<'v>> {
    let k = k.ok_or_else(needed)?;
    Ok(KvCache { block_table, seqused_kv, ..KvCache::new(k, k) })
}

fn choice(
    [q, k, summaries, block_table, seqused_k, cu_seqlens]: [Option<View<'_>>; 6],
    max_seqlen: usize,
) -> Result<ChoosePages<'_>> {
    let (Some(q), Some(summaries)) = (q, summaries) else { return Err(needed()) };
    let cache = cache(k, block_table, seqused_k)?;
    let packed = cu_seqlens.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
    Ok(ChoosePages { packed, ..ChoosePages::new(q, cache, summaries) })
}
