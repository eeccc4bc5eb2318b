//! Functions of mistral.rs' paged attention, for caches in FlashInfer's layout
//! `[pages, num_heads_kv, page_size, head_dim]`, of the type of the queries or of `F8E4M3`.
//!
//! An append has the signature that it has there. Attention of one new token of each sequence,
//! [`paged_decode`], reads block tables and lengths in place of FlashInfer's list of all pages,
//! which does not tell the host how many pages a sequence has at most. mistral.rs has both at hand.
//! Prompts that follow cached tokens need no gathered keys:
//! [`flash_attn_varlen_paged_windowed_scaled`](super::flash_attn_varlen_paged_windowed_scaled)
//! reads such a cache with its dimensions 1 and 2 transposed.

use super::candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};
use super::flash::{scores, window};
use super::memory::{Operand, Place, Target, address_of};
use super::paged::{attend, check_lengths, no_gradient, read_scales};
use blockflash_ops::{AppendKv, CacheScale, KvCacheMut};
use std::cell::Cell;

#[cfg(feature = "cuda")]
use super::candle_core::CudaStorage;

/// The numbers with which codes of keys and of values are multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCacheScales {
    /// Of keys, finite and positive.
    pub k: f32,
    /// Of values.
    pub v: f32,
}

/// The scales of a cache that has none.
pub const DEFAULT_FP8_KV_CACHE_SCALES: KvCacheScales = KvCacheScales { k: 1.0, v: 1.0 };

/// Whether caches have FlashInfer's layout: four dimensions, equal ones.
pub fn is_flashinfer_cache(key_cache: &Tensor, value_cache: &Tensor) -> bool {
    key_cache.rank() == 4 && key_cache.dims() == value_cache.dims()
}

/// Writes keys and values `[tokens, num_heads_kv, head_dim]`, or
/// `[batch, seqlen, num_heads_kv, head_dim]`, into caches
/// `[pages, num_heads_kv, page_size, head_dim]`: token `i` into slot `slot_mapping[i] % page_size`
/// of page `slot_mapping[i] / page_size`. A token with a negative slot is left out. `slot_mapping`
/// is i64 `[tokens]`. Rows are divided by their scale and rounded if the caches are `F8E4M3`, as in
/// [`AppendKv`].
///
/// A GPU leaves out slots beyond the cache as well, and computes pages of slots by a dozen small
/// operations of candle before the append; all of it can become part of a graph. On the CPU a slot
/// beyond the cache is an error, and each call copies caches of `F8E4M3`.
///
/// # Errors
/// Those of [`AppendKv::append_into`], as text; scales other than 1 of another type of cache;
/// tensors that share memory with a cache; a tensor that needs a gradient, since there is none.
pub fn reshape_and_cache_flashinfer(
    key: &Tensor,
    value: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    slot_mapping: &Tensor,
    scales: KvCacheScales,
) -> Result<()> {
    no_gradient([key, value, value])?;
    no_gradient([key_cache, key_cache, value_cache])?;
    let own = [("key_cache", key_cache), ("value_cache", value_cache)];
    let read = [("key", key), ("value", value), ("slot_mapping", slot_mapping)];
    // A tensor is locked while it is read or written, so this would wait for itself.
    for (at, (what, cache)) in own.iter().enumerate() {
        for (other, tensor) in own[..at].iter().chain(&read) {
            if address_of(cache) == address_of(tensor) {
                bail!("{what} and {other} share memory, expected a tensor of its own");
            }
        }
    }
    let (key, value) = (as_tokens("key", key)?, as_tokens("value", value)?);
    let (pages, lengths) = places(slot_mapping, key.dim(0)?, key_cache)?;
    let scales = tensors_of(scales, key_cache.dtype(), &key)?;
    let (k_cache, v_cache) = (key_cache.transpose(1, 2)?, value_cache.transpose(1, 2)?);

    let place = Place::of(key.device())?;
    let locked = [&key, &value, &pages, &lengths].map(|of| of.storage_and_layout());
    let read = |what, at: usize| place.read(&Operand::of(what, &locked[at])?);
    let (key, value) = (read("key", 0)?, read("value", 1)?);
    let (pages, lengths) = (read("slot_mapping", 2)?, read("slot_mapping", 3)?);
    let scales = scales.each_ref().map(|of| of.as_ref().map(Tensor::storage_and_layout));
    let [k_scale, v_scale] = read_scales(&scales, &place)?;
    // Threads lock tensors in one order.
    let swap = address_of(value_cache) < address_of(key_cache);
    let [first, second] = if swap { [&v_cache, &k_cache] } else { [&k_cache, &v_cache] };
    written(first, |first, first_layout| {
        written(second, |second, second_layout| {
            let mut both = [(first, first_layout), (second, second_layout)];
            if swap {
                both.swap(0, 1);
            }
            let [(mut k, k_layout), (mut v, v_layout)] = both;
            let mut codes = [k.codes(), v.codes()];
            let [k_codes, v_codes] = &mut codes;
            {
                let mut k = place.write_to("key_cache", &mut k, k_layout, k_codes)?;
                let mut v = place.write_to("value_cache", &mut v, v_layout, v_codes)?;
                place.run(|stream| {
                    let cache = KvCacheMut {
                        k_scale: k_scale.as_ref().map(|scale| CacheScale::Given(scale.view)),
                        v_scale: v_scale.as_ref().map(|scale| CacheScale::Given(scale.view)),
                        block_table: Some(pages.view),
                        seqused_kv: Some(lengths.view),
                        ..KvCacheMut::new(k.view.reborrow(), v.view.reborrow())
                    };
                    // A sequence for each token.
                    AppendKv::new(key.view, value.view).append_into(cache, stream)
                })?;
            }
            k.set_codes(&codes[0]);
            v.set_codes(&codes[1]);
            Ok(())
        })
    })
}

/// Attention of one token of each sequence, `[batch, num_heads_q, head_dim]`, to caches
/// `[pages, num_heads_kv, page_size, head_dim]`. Sequence `i` has `context_lens[i]` keys, that of
/// the token included, in the pages `block_tables[i]`; both are u32 or i32, `[batch]` and
/// `[batch, max_pages]`. With `window_left` it sees that many keys before its own. A soft cap of 0
/// is none. Returns the shape of `query`.
///
/// On the CPU lengths and pages are checked, and each call copies caches of `F8E4M3`. A GPU counts
/// those that do not exist as the largest ones that do, and needs pages of a multiple of 16 slots;
/// the call can become part of a graph.
///
/// # Errors
/// Those of [`AttentionDecode::forward`](blockflash_ops::AttentionDecode::forward), as text; scales
/// other than 1 of another type of cache; a tensor that needs a gradient, since there is none.
#[allow(clippy::too_many_arguments)]
pub fn paged_decode(
    query: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    scales: KvCacheScales,
    block_tables: &Tensor,
    context_lens: &Tensor,
    sm_scale: f32,
    window_left: Option<usize>,
    logits_soft_cap: Option<f32>,
) -> Result<Tensor> {
    no_gradient([query, key_cache, value_cache])?;
    query.dims3()?;
    if query.device().is_cpu() {
        let (pages, _, page_size, _) = key_cache.dims4()?;
        let (table, lengths) = (("block_tables", block_tables), ("context_lens", context_lens));
        check_lengths(table, lengths, [pages, page_size])?;
    }
    let scales = tensors_of(scales, key_cache.dtype(), query)?;
    let [k_scale, v_scale] = scales.each_ref().map(Option::as_ref);
    let (k, v) = (key_cache.transpose(1, 2)?, value_cache.transpose(1, 2)?);
    let mask = window(window_left, window_left.map(|_| 0));
    let operands = [
        ("query", &query.unsqueeze(1)?),
        ("key_cache", &k),
        ("value_cache", &v),
        ("block_tables", block_tables),
        ("context_lens", context_lens),
    ];
    let scores = scores(sm_scale, mask, logits_soft_cap);
    attend(operands, [k_scale, v_scale], None, scores)?.squeeze(1)
}

/// Rows as sequences of one token, `[tokens, 1, num_heads_kv, head_dim]`.
fn as_tokens(what: &str, rows: &Tensor) -> Result<Tensor> {
    match rows.rank() {
        3 => rows.unsqueeze(1),
        4 => rows.flatten(0, 1)?.unsqueeze(1),
        rank => bail!("{what} has {rank} dimensions, expected 3 or 4"),
    }
}

/// Of each token the page `[tokens, 1]`, and the length `[tokens]` of a sequence of that page alone
/// whose last token it is: 0 for a token that goes nowhere.
fn places(slot_mapping: &Tensor, tokens: usize, cache: &Tensor) -> Result<(Tensor, Tensor)> {
    let (pages, _, page_size, _) = cache.dims4()?;
    if slot_mapping.dims() != [tokens] || slot_mapping.dtype() != DType::I64 {
        let (found, dtype) = (slot_mapping.dims(), slot_mapping.dtype().as_str());
        bail!("slot_mapping is {dtype} {found:?}, expected i64 [{tokens}]");
    }
    let slots = pages.saturating_mul(page_size);
    if slots == 0 || slots > i32::MAX as usize {
        bail!("key_cache has {pages} pages of {page_size} slots, expected 1 to 2^31 - 1 slots");
    }
    if slot_mapping.device().is_cpu() {
        let beyond = |&slot: &i64| slot >= slots as i64;
        if let Some((at, slot)) =
            slot_mapping.to_vec1::<i64>()?.into_iter().enumerate().find(|(_, slot)| beyond(slot))
        {
            bail!("slot_mapping has slot {slot} for token {at}, expected less than {slots}");
        }
    }
    // Numbers in f64 are exact here, and the half keeps quotients away from whole numbers. No
    // operation has an operand that comes from the host: a graph can hold them.
    let size = page_size as f64;
    let slot = slot_mapping.to_dtype(DType::F64)?;
    let page = slot.affine(1.0 / size, 0.5 / size)?.floor()?.relu()?;
    let beyond = slot.affine(1.0, 1.0 - slots as f64)?.relu()?;
    let before = ((&page + beyond)? * size)?;
    let lengths = ((slot + 1.0)? - before)?.relu()?;
    Ok((page.to_dtype(DType::U32)?.unsqueeze(1)?, lengths.to_dtype(DType::U32)?))
}

/// Scales as tensors beside another one; those of 1 need none.
fn tensors_of(
    KvCacheScales { k, v }: KvCacheScales,
    cache: DType,
    beside: &Tensor,
) -> Result<[Option<Tensor>; 2]> {
    let made = |what: &str, scale: f32| {
        if !(scale.is_finite() && scale > 0.0) {
            bail!("scales.{what} is {scale}, expected a finite positive number");
        }
        if scale == 1.0 {
            return Ok(None);
        }
        if cache != DType::F8E4M3 {
            bail!("scales.{what} is {scale}, expected 1: the cache is {}", cache.as_str());
        }
        (Tensor::ones(1, DType::F32, beside.device())? * f64::from(scale)).map(Some)
    };
    Ok([made("k", k)?, made("v", v)?])
}

/// Does some work while the memory of a tensor is locked for writing.
fn written(tensor: &Tensor, work: impl FnOnce(Target<'_>, &Layout) -> Result<()>) -> Result<()> {
    tensor.inplace_op1(&Written(Cell::new(Some(work))))
}

struct Written<F>(Cell<Option<F>>);

impl<F: FnOnce(Target<'_>, &Layout) -> Result<()>> Written<F> {
    fn run(&self, target: Target<'_>, layout: &Layout) -> Result<()> {
        self.0.take().map_or(Ok(()), |work| work(target, layout))
    }
}

impl<F: FnOnce(Target<'_>, &Layout) -> Result<()>> InplaceOp1 for Written<F> {
    fn name(&self) -> &'static str {
        "blockflash-append"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.run(Target::Cpu(storage), layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.run(Target::Cuda(storage), layout)
    }
}
