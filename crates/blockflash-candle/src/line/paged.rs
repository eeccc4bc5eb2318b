//! Attention to a cache in pages that candle's tensors hold, as in candle-flash-attn.

use super::blocks::to_device;
use super::candle_core::{self, Layout, Result, Storage, Tensor, bail};
use super::error::refused;
use super::flash::{scores, window};
use super::held::Reading;
use super::memory::{Operand, Place, dtype_of, tensor};
use super::{Attention, BlockGeometry, BlockMask, Mask, Packed, Scores};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, CacheAccess, DType, KvCache, PackedTokens, View,
};
use std::ops::Deref;

/// Attention of packed queries `[total_q, num_heads_q, head_dim]` to a cache in pages. Sequence `i`
/// has the queries `seqlens_q[i]..seqlens_q[i + 1]` and `seqlens_k[i + 1] - seqlens_k[i]` keys, u32
/// or i32, in the pages `block_table[i]` of k and v
/// `[pages, page_block_size, num_heads_kv, head_dim]`. `block_table` is u32 or i32
/// `[batch, max_pages]`. Returns the shape of q.
///
/// The last query of a sequence stands at its last key. On the CPU all offsets and lengths are
/// checked. A GPU counts lengths and pages that do not exist as the largest ones that do, and needs
/// pages of a multiple of 16 slots.
///
/// With `mm_prefix_ranges`, i32 `[batch, ranges, 2]`, tokens of a range, from its first position to
/// the one behind its last, see all of that range besides what the window shows; a range may be
/// empty. The host waits for lengths, table and ranges then, and keys are copied.
///
/// # Errors
/// Those of [`AttentionDecode::forward`], as text; another `page_block_size` than that of k; a
/// tensor that needs a gradient, since there is none; `mm_prefix_ranges` where no kernel has
/// partial blocks.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    flash_attn_varlen_paged_windowed_scaled(
        q,
        k,
        v,
        [None; 2],
        seqlens_q,
        seqlens_k,
        block_table,
        mm_prefix_ranges,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
        page_block_size,
        softcap,
    )
}

/// [`flash_attn_varlen_paged_windowed`] to keys and values of candle's `F8E4M3` beside q of f16,
/// bf16 or f32, which is attention to their codes times scales. `kv_scales` are those of k and of
/// v, f32 and 1 if they are not given: `[1]`, `[batch, num_heads_kv]`, or
/// `[pages, page_block_size, num_heads_kv]` for rows, where any extent may be 1.
///
/// On the CPU each call copies the codes of all pages.
///
/// # Errors
/// As there; scales of another type of keys; `mm_prefix_ranges` with such keys or scales; a GPU
/// without kernels for such caches.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_paged_windowed_scaled(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    kv_scales: [Option<&Tensor>; 2],
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    no_gradient([q, k, v])?;
    no_gradient_of_scales(kv_scales)?;
    let (_, slots, _, _) = k.dims4()?;
    if slots != page_block_size {
        bail!("page_block_size is {page_block_size}, but k has pages of {slots} slots");
    }
    let (_, max_pages) = block_table.dims2()?;
    let lengths = lengths(seqlens_k, max_seqlen_k.min(max_pages.saturating_mul(slots)))?;
    let mask = window(window_size_left, window_size_right);
    if let Some(ranges) = mm_prefix_ranges {
        let is_coded = [k, v].iter().any(|of| of.dtype() == candle_core::DType::F8E4M3);
        if is_coded || kv_scales.iter().any(Option::is_some) {
            bail!("mm_prefix_ranges is given, expected None: keys or values are f8e4m3 or scaled");
        }
        let scores = scores(softmax_scale, Mask::Full, softcap);
        let pages = Pages { table: block_table, lengths: &lengths };
        return prefixed([q, k, v], seqlens_q, &pages, (ranges, mask), scores);
    }

    let scores = scores(softmax_scale, mask, softcap);
    let (k, v, packed) = (("k", k), ("v", v), Some((seqlens_q, max_seqlen_q)));
    let (table, lengths) = (("block_table", block_table), ("seqlens_k", &lengths));
    attend([("q", q), k, v, table, lengths], kv_scales, packed, scores)
}

/// Attention to pages. Operands have the names that errors say: q, k, v, the table of pages and the
/// lengths. Queries are packed, with their offsets and the most of a sequence, or
/// `[batch, seqlen_q, num_heads_q, head_dim]`.
pub(crate) fn attend(
    operands: [(&'static str, &Tensor); 5],
    kv_scales: [Option<&Tensor>; 2],
    packed: Option<(&Tensor, usize)>,
    scores: Scores<View<'_>>,
) -> Result<Tensor> {
    let [(of_q, q), _, (_, v), ..] = operands;
    let place = Place::of(q.device())?;
    let o_shape = with_width_of(q, v);
    // Rows of no sequence are 0.
    let mut o = place.allocate(dtype_of(of_q, q.dtype())?, &o_shape, packed.is_some())?;
    let locked = operands.map(|(what, of)| (what, of.storage_and_layout()));
    let [q, k, v, table, lengths] =
        locked.each_ref().map(|(what, locked)| Operand::of(what, locked));
    let mut codes = [Vec::new(), Vec::new()];
    let [k_codes, v_codes] = &mut codes;
    let q = place.read(&q?)?;
    let (k, v) = (place.read_cached(&k?, k_codes)?, place.read_cached(&v?, v_codes)?);
    let (table, lengths) = (place.read(&table?)?, place.read(&lengths?)?);
    let offsets = packed.map(|(offsets, _)| offsets.storage_and_layout());
    let offsets = offsets.as_ref().map(|of| place.read(&Operand::of("seqlens_q", of)?));
    let offsets = offsets.transpose()?;
    let scales = kv_scales.map(|scale| scale.map(Tensor::storage_and_layout));
    let [k_scale, v_scale] = read_scales(&scales, &place)?;
    let cache = KvCache {
        block_table: Some(table.view),
        seqused_kv: Some(lengths.view),
        k_scale: k_scale.as_ref().map(|scale| scale.view),
        v_scale: v_scale.as_ref().map(|scale| scale.view),
        // Latent rows of codes are keys and values at once.
        ..KvCache::new(k.view, if k.view.dtype() == DType::U8 { k.view } else { v.view })
    };
    let packed = offsets
        .as_ref()
        .zip(packed)
        .map(|(offsets, (_, max_seqlen))| PackedTokens { cu_seqlens: offsets.view, max_seqlen });
    let decode = AttentionDecode { packed, scores, ..AttentionDecode::new(q.view) };
    {
        let mut o = place.write(&mut o, &o_shape)?;
        let bytes = decode.workspace_bytes(&cache, &place.device()).map_err(refused)?;
        place.run_with_workspace(bytes, |stream, workspace| {
            let decode = AttentionDecode { workspace, ..decode };
            let (cache, o) = (CacheAccess::Read(cache), o.view.reborrow());
            decode.forward_into(AttentionDecodeOperands { cache, o, lse: None }, stream)
        })?;
    }
    Ok(tensor(o, &o_shape))
}

/// Where the keys of sequences are.
struct Pages<'a> {
    /// `[batch, max_pages]`
    table: &'a Tensor,
    /// `[batch]`
    lengths: &'a Tensor,
}

/// Attention to a copy of the keys, with ranges of tokens that see each other besides a mask.
fn prefixed(
    [q, k, v]: [&Tensor; 3],
    seqlens_q: &Tensor,
    pages: &Pages<'_>,
    (ranges, mask): (&Tensor, Mask),
    scores: Scores<&Tensor>,
) -> Result<Tensor> {
    let (starts, lengths) = (numbers(seqlens_q)?, numbers(pages.lengths)?);
    let (batch, max_pages) = pages.table.dims2()?;
    let (entries, each, two) = ranges.dims3()?;
    if [starts.len(), lengths.len(), entries] != [batch + 1, batch, batch] || two != 2 {
        let shape = ranges.dims();
        bail!("mm_prefix_ranges has shape {shape:?}, expected [{batch}, ranges, 2] as block_table");
    }
    let (table, ranges) = (numbers(pages.table)?, numbers(ranges)?);
    let slots = k.dim(1)?;
    let (mut keys, mut ends, mut masks) = (Vec::new(), vec![0u32], Vec::new());
    let mut longest = [0; 2];
    for sequence in 0..batch {
        let (queries, length) =
            (starts[sequence + 1].saturating_sub(starts[sequence]), lengths[sequence]);
        if length > max_pages * slots {
            bail!(
                "seqlens_k: sequence {sequence} has {length} keys in {max_pages} pages of {slots}"
            );
        }
        longest = [longest[0].max(queries), longest[1].max(length)];
        let pages = &table[sequence * max_pages..];
        keys.extend((0..length).map(|key| (pages[key / slots] * slots + key % slots) as u32));
        ends.push(keys.len() as u32);
        let of_sequence = &ranges[sequence * each * 2..][..each * 2];
        let seen = |_, _, query: usize| {
            let position = query + length.saturating_sub(queries);
            let ranges = of_sequence.chunks_exact(2).map(|range| range[0]..range[1]);
            let inside = ranges.filter(move |range| range.contains(&position));
            std::iter::once(mask.visible(query, queries, length)).chain(inside)
        };
        let made = BlockGeometry::new(queries, length, 64, 64);
        let made = made.and_then(|geometry| BlockMask::from_ranges(geometry, 1, 1, seen));
        masks.push(made.map_err(refused)?);
    }
    let blocks = BlockMask::packed(&masks.iter().collect::<Vec<_>>()).map_err(refused)?;
    let blocks = to_device(&blocks, q.device())?;
    let count = keys.len();
    let keys = Tensor::from_vec(keys, count, q.device())?;
    let [k, v] = [k, v].map(|cache| cache.flatten(0, 1)?.index_select(&keys, 0));
    let (k, v) = (k?, v?);
    let ends = Tensor::from_vec(ends, batch + 1, q.device())?;
    let [max_seqlen_q, max_seqlen_kv] = longest;
    let packed = Packed { q: seqlens_q, kv: &ends, max_seqlen_q, max_seqlen_kv };
    let attention = Attention { scores, cu_seqlens: Some(packed), ..Attention::new(q, &k, &v) };
    Attention { block_mask: Some(&blocks), ..attention }.forward()
}

/// The elements of a tensor of indices, on the host; negative ones are 0.
fn numbers(tensor: &Tensor) -> Result<Vec<usize>> {
    let numbers = tensor.flatten_all()?.to_dtype(candle_core::DType::I64)?.to_vec1::<i64>()?;
    Ok(numbers.into_iter().map(|number| usize::try_from(number).unwrap_or(0)).collect())
}

/// The shape of the output: that of q with the last size of v.
pub(crate) fn with_width_of(q: &Tensor, v: &Tensor) -> Vec<usize> {
    let mut shape = q.dims().to_vec();
    if let (Some(last), Some(&width)) = (shape.last_mut(), v.dims().last()) {
        *last = width;
    }
    shape
}

/// Refuses tensors whose gradient would be lost.
pub(crate) fn no_gradient(tensors: [&Tensor; 3]) -> Result<()> {
    if tensors.iter().any(|tensor| tensor.track_op()) {
        bail!("attention to a cache has no gradient: detach q, k and v");
    }
    Ok(())
}

/// The same for scales of keys and values.
pub(crate) fn no_gradient_of_scales(scales: [Option<&Tensor>; 2]) -> Result<()> {
    if scales.into_iter().flatten().any(Tensor::track_op) {
        bail!("attention to a cache has no gradient: detach the scales of keys and values");
    }
    Ok(())
}

/// The scales of keys and of values.
pub(crate) fn read_scales<'a>(
    [k, v]: &'a [Option<(impl Deref<Target = Storage>, &Layout)>; 2],
    place: &'a Place,
) -> Result<[Option<Reading<'a>>; 2]> {
    let read = |what, scale: &'a Option<_>| {
        scale.as_ref().map(|scale| place.read(&Operand::of(what, scale)?)).transpose()
    };
    Ok([read("k_scale", k)?, read("v_scale", v)?])
}

/// Refuses keys beyond the table of pages, and pages beyond the cache, of which errors say the
/// names.
pub(crate) fn check_lengths(
    (of_table, table): (&str, &Tensor),
    (of_lengths, lengths): (&str, &Tensor),
    [pages, page_size]: [usize; 2],
) -> Result<()> {
    let (_, max_pages) = table.dims2()?;
    let table = table.to_dtype(candle_core::DType::I64)?.to_vec2::<i64>()?;
    let lengths = lengths.to_dtype(candle_core::DType::I64)?.to_vec1::<i64>()?;
    let most = max_pages.saturating_mul(page_size);
    for (sequence, (table, length)) in table.iter().zip(lengths).enumerate() {
        let keys = usize::try_from(length).ok().filter(|&keys| keys <= most);
        let Some(keys) = keys else {
            bail!("{of_lengths} has {length} keys of sequence {sequence}, expected 0 to {most}");
        };
        let used = &table[..keys.div_ceil(page_size.max(1)).min(max_pages)];
        if let Some(page) = used.iter().find(|page| !(0..pages as i64).contains(page)) {
            bail!("{of_table} has page {page} of sequence {sequence}, expected less than {pages}");
        }
    }
    Ok(())
}

/// The lengths of sequences with these offsets; on the CPU they are checked.
fn lengths(offsets: &Tensor, most: usize) -> Result<Tensor> {
    let batch = match offsets.dims1()? {
        0 => bail!("seqlens_k has shape [0], expected [batch + 1]"),
        entries => entries - 1,
    };
    if !offsets.device().is_cpu() {
        return offsets.narrow(0, 1, batch)? - offsets.narrow(0, 0, batch)?;
    }
    let offsets = offsets.to_dtype(candle_core::DType::I64)?.to_vec1::<i64>()?;
    let mut lengths = Vec::with_capacity(batch);
    for (sequence, pair) in offsets.windows(2).enumerate() {
        match u32::try_from(pair[1] - pair[0]) {
            Ok(length) if length as usize <= most => lengths.push(length),
            _ => bail!(
                "seqlens_k: offsets of sequence {sequence} are {pair:?}, expected 0 to {most} keys"
            ),
        }
    }
    Tensor::from_vec(lengths, batch, &candle_core::Device::Cpu)
}
