//! Caches of latent rows whose values are codes: the rows of `fp8_ds_mla`.

use super::{CacheSizes, KvCache};
use crate::Result;
use crate::attention::Strides;
use crate::check::Operand;
use crate::codes::{chosen, encode, magnitude};
use blockflash_safe::{E4M3, View};
use blockflash_sys::manifest::AttentionLatent;
use blockflash_sys::{DType, HeadDims};
use half::bf16;

/// Codes of a row, those that share a scale, and elements behind them that positions turn.
pub(crate) const CODES: usize = 512;
pub(crate) const OF_SCALE: usize = 128;
const TURNED: usize = 64;
/// Bytes of a row.
pub(crate) const ROW_BYTES: usize = AttentionLatent::CODE_ROW_BYTES;
/// What a row stands for.
pub(crate) const HEAD_DIMS: HeadDims = HeadDims { qk: CODES + TURNED, v: CODES };

impl<'a> KvCache<'a> {
    /// A contiguous cache of latent rows of codes, whose every slot is used: u8
    /// `[batch, capacity, 1, 656]`, with a [`block_table`](Self::block_table)
    /// `[pages, page_size, 1, 656]`. The 656 bytes of a row are
    ///
    /// | bytes | what they are |
    /// |---|---|
    /// | 0 to 511 | 512 codes of e4m3, the values |
    /// | 512 to 527 | 4 scales of f32, each of 128 codes |
    /// | 528 to 655 | 64 elements of bf16, which positions turn |
    ///
    /// This is the cache that vLLM calls `fp8_ds_mla`. A row stands for a key of 576 elements, of
    /// which the first 512 are the value: codes times their scale, and the elements as they are.
    /// Codes and products with them are exact, as in other [caches of codes](Self::k_scale). The
    /// CPU multiplies codes with scales in f32 and computes in f32; kernels multiply partial scores
    /// of 128 codes with their scale, and probabilities with it before they are rounded to bf16.
    /// Scales should be finite and positive; what others make of the numbers shows in queries that
    /// see their keys alone.
    ///
    /// ```
    /// # use blockflash_ops::{
    /// #     AppendLatentCodes, AttentionDecode, DType, Device, KvCache, LatentCodesMut, Tensor,
    /// # };
    /// # let stream = Device::cpu().stream()?;
    /// let mut rows = Tensor::zeros(&stream, DType::U8, &[8, 64, 1, 656])?; // 8 pages of 64 slots
    /// let block_table = Tensor::from_slice(&stream, &[5, 2, 0, -1], &[2, 2])?;
    /// let seqused_kv = Tensor::from_slice(&stream, &[100, 7], &[2])?;
    /// let (block_table, seqused_kv) = (Some(block_table.view()), Some(seqused_kv.view()));
    /// // A new token of each sequence.
    /// let values = Tensor::zeros(&stream, DType::BF16, &[2, 1, 1, 512])?;
    /// let rotary = Tensor::zeros(&stream, DType::BF16, &[2, 1, 1, 64])?;
    /// let new = AppendLatentCodes::new(values.view(), rotary.view());
    /// let cache = LatentCodesMut { rows: rows.view_mut(), block_table, seqused_kv };
    /// new.append_into(cache, &stream)?;
    ///
    /// let q = Tensor::zeros(&stream, DType::BF16, &[2, 1, 16, 576])?;
    /// let cache =
    ///     KvCache { block_table, seqused_kv, ..KvCache::latent_codes(rows.view())? };
    /// let output = AttentionDecode::new(q.view()).forward(cache, &stream)?;
    /// assert_eq!(output.o.shape(), [2, 1, 16, 512]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DType`](crate::Error::DType) and [`Error::Shape`](crate::Error::Shape) for other
    /// rows.
    pub fn latent_codes(rows: View<'a>) -> Result<Self> {
        check_rows(&Operand::new("cache.k", &rows))?;
        Ok(Self::new(rows, rows))
    }

    /// Checks that the values are those of the same rows of codes. Returns what a row stands for.
    pub(super) fn code_rows(&self, is_shared: bool) -> Result<HeadDims> {
        let v = Operand::new("cache.v", &self.v);
        v.shape_is(self.k.shape())?;
        match is_shared {
            true => Ok(HEAD_DIMS),
            false => Err(v.wrong_shape("the rows of codes of cache.k themselves")),
        }
    }
}

/// Checks the type and the shape of rows of codes.
pub(crate) fn check_rows(rows: &Operand<'_>) -> Result<()> {
    rows.dtype_in(&[DType::U8])?;
    match *rows.shape {
        [_, _, 1, ROW_BYTES] => rows.last_dim_contiguous(),
        _ => Err(rows.wrong_shape(format!("[pages, page_size, 1, {ROW_BYTES}]"))),
    }
}

impl CacheSizes {
    /// A contiguous cache of rows of codes with a length for each sequence: the start of a plan
    /// without tensors. Not checked.
    pub fn latent_codes(sizes: [usize; 2]) -> Self {
        let strides = Strides::contiguous(sizes[1], 1, ROW_BYTES);
        Self { k: strides, v: strides, ..Self::latent(DType::U8, sizes, HEAD_DIMS) }
    }

    /// Whether this is a cache of rows of codes.
    pub(crate) fn has_code_rows(&self) -> bool {
        self.dtype == DType::U8
    }
}

/// Bytes of the scales of a row.
const SCALE_BYTES: usize = CODES / OF_SCALE * 4;

/// The first columns of what a row stands for.
pub(crate) fn decode_row(row: &[u8], columns: &mut [f32]) {
    let (codes, rest) = row.split_at(CODES);
    let (scales, turned) = rest.split_at(SCALE_BYTES);
    let (values, behind) = columns.split_at_mut(CODES.min(columns.len()));
    let groups = values.chunks_mut(OF_SCALE).zip(codes.chunks(OF_SCALE));
    for ((values, codes), scale) in groups.zip(scales.as_chunks().0) {
        let scale = f32::from_ne_bytes(*scale);
        for (x, &code) in values.iter_mut().zip(codes) {
            *x = E4M3(code).to_f32() * scale;
        }
    }
    for (x, bytes) in behind.iter_mut().zip(turned.as_chunks().0) {
        *x = bf16::from_ne_bytes(*bytes).to_f32();
    }
}

/// Writes a row: the codes of values divided by the scales that are chosen for them, and elements
/// as they are. `values` are changed.
pub(crate) fn encode_row(values: &mut [f32], turned: &[bf16], row: &mut [u8]) {
    let (codes, rest) = row.split_at_mut(CODES);
    let (scales, behind) = rest.split_at_mut(SCALE_BYTES);
    let mut found = [E4M3::default(); OF_SCALE];
    let groups = values.chunks_mut(OF_SCALE).zip(codes.chunks_mut(OF_SCALE));
    for ((values, codes), to) in groups.zip(scales.as_chunks_mut().0) {
        let scale = chosen::<E4M3>(magnitude(values));
        *to = scale.to_ne_bytes();
        encode(values, scale, &mut found);
        codes.iter_mut().zip(found).for_each(|(code, found)| *code = found.0);
    }
    for (bytes, x) in behind.as_chunks_mut().0.iter_mut().zip(turned) {
        *bytes = x.to_ne_bytes();
    }
}
