//! Appends to caches of latent rows whose values are codes.

use super::AppendKv;
use crate::Result;
use crate::check::{Operand, aligned};
use crate::float::Float;
use crate::kv_cache::latent_codes::{HEAD_DIMS, OF_SCALE, ROW_BYTES, check_rows, encode_row};
use crate::kv_cache::{
    CacheScale, CacheSizes, CacheValues, HostCache, KvCache, KvCacheMut, PackedTokens,
    token_ranges, token_sizes,
};
use blockflash_safe::{Device, Stream, View, ViewMut};
use blockflash_sys::DType;
use half::bf16;

/// New rows for a cache of [`KvCache::latent_codes`], which counts and places them as
/// [`AppendKv`] says.
///
/// The scale of each 128 values is chosen so that their greatest magnitude is the greatest code,
/// 448; that of zeros is 1. Values are divided by it, rounded to nearest with ties to even, and
/// saturated; NaN is NaN. This is what vLLM stores, but for the scale of zeros. GPUs store the bits
/// of the CPU, by two launches of the kernels of [`AppendKv`], and allocate nothing; so a graph can
/// capture the call.
#[derive(Clone, Copy, Debug)]
pub struct AppendLatentCodes<'a> {
    /// bf16 `[batch, tokens, 1, 512]`, or packed `[total, 1, 512]`.
    pub values: View<'a>,
    /// bf16, in the shape of the values but for 64 elements, which positions have turned.
    pub rotary: View<'a>,
    /// Set when the sequences have unequal numbers of new tokens.
    pub packed: Option<PackedTokens<'a>>,
}

/// A cache of latent rows of codes that a call appends to.
#[derive(Debug)]
pub struct LatentCodesMut<'a> {
    /// See [`KvCache::latent_codes`].
    pub rows: ViewMut<'a>,
    /// See [`KvCache::block_table`].
    pub block_table: Option<View<'a>>,
    /// See [`KvCache::seqused_kv`].
    pub seqused_kv: Option<View<'a>>,
}

impl LatentCodesMut<'_> {
    /// The same cache for reading.
    ///
    /// # Errors
    /// Those of [`KvCache::latent_codes`].
    pub fn as_cache(&self) -> Result<KvCache<'_>> {
        let Self { block_table, seqused_kv, .. } = *self;
        Ok(KvCache { block_table, seqused_kv, ..KvCache::latent_codes(self.rows.as_view())? })
    }
}

impl<'a> AppendLatentCodes<'a> {
    /// Equally many tokens for every sequence.
    pub const fn new(values: View<'a>, rotary: View<'a>) -> Self {
        Self { values, rotary, packed: None }
    }

    /// Appends. On the CPU it returns when the cache is written.
    ///
    /// # Errors
    /// As [`AppendKv::append_into`].
    pub fn append_into(&self, cache: LatentCodesMut<'_>, stream: &Stream) -> Result<()> {
        let sizes = self.sizes(&cache, stream.device())?;
        if sizes.batch == 0 || sizes.capacity == 0 || self.values.layout().is_empty() {
            return Ok(());
        }
        match stream.device().is_cpu() {
            true => self.on_the_cpu(cache, sizes, stream),
            false => self.by_kernels(cache, stream),
        }
    }

    /// Every check that reads no tensor.
    fn sizes(&self, cache: &LatentCodesMut<'_>, device: &Device) -> Result<CacheSizes> {
        check_rows(&Operand::of_mut("cache.k", &cache.rows))?;
        let read = cache.as_cache()?;
        let sizes = read.sizes()?;
        let (values, rotary) =
            (Operand::new("new.v", &self.values), Operand::new("new.k", &self.rotary));
        for (part, width) in [(&values, HEAD_DIMS.v), (&rotary, HEAD_DIMS.qk - HEAD_DIMS.v)] {
            part.dtype_in(&[DType::BF16])?;
            let rows = token_sizes(part, self.packed.as_ref())?;
            let expected = [sizes.batch, 1, width];
            if [rows.batch, rows.heads, rows.head_dim] != expected {
                let [batch, heads, head_dim] = expected;
                return Err(part.wrong_shape(match rows.packed {
                    None => format!("[{batch}, tokens, {heads}, {head_dim}]"),
                    Some(_) => format!("[total, {heads}, {head_dim}] of {batch} sequences"),
                }));
            }
            part.on(device)?;
        }
        let (of_rotary, of_values) = (rotary.shape.len() - 1, values.shape.len() - 1);
        if rotary.shape[..of_rotary] != values.shape[..of_values] {
            let expected = [&values.shape[..of_values], &rotary.shape[of_rotary..]].concat();
            return Err(rotary.wrong_shape(format!("{expected:?}")));
        }
        if let Some(packed) = &self.packed {
            Operand::new("cu_seqlens.q", &packed.cu_seqlens).on(device)?;
        }
        read.on(device)?;
        Ok(sizes)
    }

    fn on_the_cpu(
        &self,
        mut cache: LatentCodesMut<'_>,
        sizes: CacheSizes,
        stream: &Stream,
    ) -> Result<()> {
        let host = HostCache::new(&cache.as_cache()?, sizes, stream)?;
        let parts = [&self.values, &self.rotary];
        let [values, rotary] = parts.map(|part| part.as_slice::<bf16>());
        let (values, rotary) = (values?, rotary?);
        let rows = token_sizes(&Operand::new("new.v", &self.values), self.packed.as_ref())?;
        let turned = token_sizes(&Operand::new("new.k", &self.rotary), self.packed.as_ref())?;
        let lengths = [sizes.batch, rows.tokens];
        let ranges = token_ranges(self.packed.as_ref(), lengths, rows.packed, stream)?;
        let bytes = cache.rows.as_mut_slice::<u8>()?;
        let mut wide = vec![0.0; HEAD_DIMS.v];
        for (entry, tokens) in ranges.into_iter().enumerate() {
            let first = host.stored_length(entry) - tokens.len() as i64;
            for (position, token) in (first..).zip(tokens) {
                let Some(key) = usize::try_from(position).ok().filter(|&key| key < sizes.capacity)
                else {
                    continue;
                };
                let [from, of_turned] = [rows.strides, turned.strides]
                    .map(|strides| entry * strides.batch + token * strides.seq);
                bf16::widen(&values[from..][..HEAD_DIMS.v], &mut wide);
                let to = host.row(sizes.k, [entry, key, 0]);
                let turned = &rotary[of_turned..][..HEAD_DIMS.qk - HEAD_DIMS.v];
                encode_row(&mut wide, turned, &mut bytes[to..][..ROW_BYTES]);
            }
        }
        Ok(())
    }

    /// The codes, whose groups are heads with a scale for each token, and the elements behind them.
    /// Kernels write two tensors, so each is two halves.
    fn by_kernels(&self, cache: LatentCodesMut<'_>, stream: &Stream) -> Result<()> {
        const HALF: usize = HEAD_DIMS.v / 2;
        const TURNED: usize = (HEAD_DIMS.qk - HEAD_DIMS.v) / 2;
        let LatentCodesMut { rows, block_table, seqused_kv } = cache;
        aligned("cache.k", &rows.as_view())?;
        let (codes, scales) = ((DType::E4M3, HALF), (DType::F32, HALF / OF_SCALE));
        let turned = (DType::BF16, TURNED);
        let [k, v, k_scale, v_scale, first, second] =
            rows.split_bytes([codes, codes, scales, scales, turned, turned])?;
        let last = self.values.shape().len() - 1;
        let half = |of: &View<'a>, at: usize, width: usize| of.slice(last, at..at + width);
        let of_values = |at| -> Result<_> {
            Ok(half(&self.values, at, HALF)?
                .flatten(last - 1..last + 1)?
                .unflatten(last - 1, OF_SCALE)?)
        };
        let new = AppendKv::new(of_values(0)?, of_values(HALF)?);
        let cache = KvCacheMut {
            k: groups(k)?,
            v: CacheValues::Own(groups(v)?),
            k_scale: chosen(k_scale)?,
            v_scale: chosen(v_scale)?,
            block_table,
            seqused_kv,
        };
        AppendKv { packed: self.packed, ..new }.append_into(cache, stream)?;
        let new =
            AppendKv::new(half(&self.rotary, 0, TURNED)?, half(&self.rotary, TURNED, TURNED)?);
        let cache = KvCacheMut { block_table, seqused_kv, ..KvCacheMut::new(first, second) };
        AppendKv { packed: self.packed, ..new }.append_into(cache, stream)
    }
}

/// A part of the rows without the dimension of their one head.
fn heads(part: ViewMut<'_>) -> Result<ViewMut<'_>> {
    Ok(part.flatten(2..4)?)
}

/// Codes whose groups are heads.
fn groups(codes: ViewMut<'_>) -> Result<ViewMut<'_>> {
    Ok(heads(codes)?.unflatten(2, OF_SCALE)?)
}

/// Scales that an append chooses for these groups.
fn chosen(scales: ViewMut<'_>) -> Result<Option<CacheScale<'_>>> {
    Ok(Some(CacheScale::PerToken(heads(scales)?)))
}
