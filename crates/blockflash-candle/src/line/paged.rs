//! Attention to a cache in pages that candle's tensors hold, as in candle-flash-attn.

use super::candle_core::{self, Result, Tensor, bail};
use super::error::refused;
use super::flash::{scores, window};
use super::memory::{Operand, Place, dtype_of, tensor};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess, DType,
    KvCache, PackedTokens,
};

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
/// # Errors
/// Those of [`AttentionDecode::forward`], as text; `mm_prefix_ranges`, which have no counterpart
/// here; another `page_block_size` than that of k; a tensor that needs a gradient, since there is
/// none.
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
    if mm_prefix_ranges.is_some() {
        bail!("mm_prefix_ranges is given, expected None: blockflash has no mask of prefix ranges");
    }
    no_gradient([q, k, v])?;
    let (_, slots, _, _) = k.dims4()?;
    if slots != page_block_size {
        bail!("page_block_size is {page_block_size}, but k has pages of {slots} slots");
    }
    let (_, max_pages) = block_table.dims2()?;
    let lengths = lengths(seqlens_k, max_seqlen_k.min(max_pages.saturating_mul(slots)))?;

    let place = Place::of(q.device())?;
    let dtype = dtype_of("q", q.dtype())?;
    let o_shape = with_width_of(q, v);
    let mut o = place.allocate(dtype, &o_shape, true)?;
    let locked = [q, k, v, seqlens_q, block_table, &lengths].map(|of| of.storage_and_layout());
    let read = |what, at: usize| place.read(&Operand::of(what, &locked[at])?);
    let (q_read, k_read, v_read) = (read("q", 0)?, read("k", 1)?, read("v", 2)?);
    let (offsets, table) = (read("seqlens_q", 3)?, read("block_table", 4)?);
    let lengths = read("seqlens_k", 5)?;
    {
        let mut o = place.write(&mut o, &o_shape)?;
        let cache = KvCache {
            block_table: Some(table.view),
            seqused_kv: Some(lengths.view),
            ..KvCache::new(k_read.view, v_read.view)
        };
        let packed = PackedTokens { cu_seqlens: offsets.view, max_seqlen: max_seqlen_q };
        let decode = AttentionDecode {
            packed: Some(packed),
            scores: scores(softmax_scale, window(window_size_left, window_size_right), softcap),
            ..AttentionDecode::new(q_read.view)
        };
        let bytes = decode.workspace_bytes(&cache, &place.device()).map_err(refused)?;
        let mut workspace =
            (bytes > 0).then(|| place.allocate(DType::U8, &[bytes], false)).transpose()?;
        let workspace = workspace.as_mut().map(|of| place.scratch(of)).transpose()?;
        // The tensor goes with the work, the hold on candle's memory after it.
        let (tensor, _in_use) = workspace.map(|of| (of.tensor, of._in_use)).unzip();
        place.run(|stream| {
            let workspace = tensor.map(AttentionDecodeWorkspace::from_tensor).transpose()?;
            let decode = AttentionDecode { workspace: workspace.as_ref(), ..decode };
            let (cache, o) = (CacheAccess::Read(cache), o.view.reborrow());
            decode.forward_into(AttentionDecodeOperands { cache, o, lse: None }, stream)
        })?;
    }
    Ok(tensor(o, &o_shape))
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
