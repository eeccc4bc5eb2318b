//! Appends to caches of latent rows.

use crate::error::{Failure, Result};
use crate::foreign::{of, optional, views};
use blockflash_ops::{
    AppendKv, AppendLatentCodes, DType, KvCacheMut, LatentCodesMut, PackedTokens,
};
use pyo3::prelude::*;

/// Writes new rows into `cache` `[pages, page_size, 1, row]`, as the last ones of their sequences:
/// `kv_latent` `[B, Sn, 1, values]`, or packed with `cu_seqlens`, and `k_rope` with the columns
/// behind them, or `kv_latent` with all columns. A cache of u8 has rows of codes.
#[pyfunction]
pub(crate) fn mla_append(
    kv_latent: &Bound<'_, PyAny>,
    k_rope: Option<&Bound<'_, PyAny>>,
    cache: &Bound<'_, PyAny>,
    block_table: Option<&Bound<'_, PyAny>>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    cu_seqlens: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = cache.py();
    let read = [
        Some(of("kv_latent", kv_latent)?),
        optional("k_rope", k_rope)?,
        optional("block_table", block_table)?,
        optional("seqused_k", seqused_k)?,
        optional("cu_seqlens", cu_seqlens)?,
    ];
    let cache = of("cache", cache)?;
    let run = || -> Result<()> {
        let stream = cache.stream()?;
        let (read, [], [cache]) = views((read.each_ref(), []), [Some(cache)])?;
        let [values, rotary, block_table, seqused_kv, cu_seqlens] = read;
        let (Some(cache), Some(values)) = (cache, values) else {
            return Err(Failure::value("cache and kv_latent are needed"));
        };
        // No sequence has more new tokens than there are.
        let max_seqlen = values.shape().first().copied().unwrap_or(0);
        let packed = cu_seqlens.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
        if let (DType::U8, Some(rotary)) = (cache.dtype(), rotary) {
            let cache = LatentCodesMut { rows: cache, block_table, seqused_kv };
            let new = AppendLatentCodes { packed, ..AppendLatentCodes::new(values, rotary) };
            return Ok(new.append_into(cache, &stream)?);
        }
        let new = match rotary {
            Some(rotary) => AppendKv::latent_parts(values, rotary),
            None => AppendKv::latent(values),
        };
        let columns = values.shape().last().copied().unwrap_or(0);
        let cache = KvCacheMut::latent(cache, columns)?;
        let cache = KvCacheMut { block_table, seqused_kv, ..cache };
        Ok(AppendKv { packed, ..new }.append_into(cache, &stream)?)
    };
    Ok(py.detach(run)?)
}
