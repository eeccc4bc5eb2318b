//! Appends to caches of keys and values.

use crate::error::{Failure, Result};
use crate::foreign::{of, optional, views};
use blockflash_ops::{AppendKv, CacheScale, KvCacheMut, PackedTokens};
use pyo3::prelude::*;

/// Writes new keys and values `[B, Sn, Hk, D]`, or packed with `cu_seqlens_k`, into a cache, as the
/// last ones of their sequences. Scales are those of a cache of codes.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn append_kv(
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    k_cache: &Bound<'_, PyAny>,
    v_cache: &Bound<'_, PyAny>,
    block_table: Option<&Bound<'_, PyAny>>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    cu_seqlens_k: Option<&Bound<'_, PyAny>>,
    k_scale: Option<&Bound<'_, PyAny>>,
    v_scale: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = k_cache.py();
    let read = [
        Some(of("k", k)?),
        Some(of("v", v)?),
        optional("block_table", block_table)?,
        optional("seqused_k", seqused_k)?,
        optional("cu_seqlens_k", cu_seqlens_k)?,
        optional("k_scale", k_scale)?,
        optional("v_scale", v_scale)?,
    ];
    let caches = [Some(of("k_cache", k_cache)?), Some(of("v_cache", v_cache)?)];
    let run = || -> Result<()> {
        let stream = caches.iter().flatten().next().ok_or_else(needed)?.stream()?;
        let (read, [], caches) = views((read.each_ref(), []), caches)?;
        let [k, v, block_table, seqused_kv, cu_seqlens, k_scale, v_scale] = read;
        let ([Some(k_cache), Some(v_cache)], Some(k), Some(v)) = (caches, k, v) else {
            return Err(needed());
        };
        // No sequence has more new tokens than there are.
        let max_seqlen = k.shape().first().copied().unwrap_or(0);
        let packed = cu_seqlens.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
        let cache = KvCacheMut {
            block_table,
            seqused_kv,
            k_scale: k_scale.map(CacheScale::Given),
            v_scale: v_scale.map(CacheScale::Given),
            ..KvCacheMut::new(k_cache, v_cache)
        };
        Ok(AppendKv { packed, ..AppendKv::new(k, v) }.append_into(cache, &stream)?)
    };
    Ok(py.detach(run)?)
}

fn needed() -> Failure {
    Failure::value("k, v, k_cache and v_cache are needed")
}
