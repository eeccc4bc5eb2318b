//! Decoding of multi-head latent attention over a cache in pages that a tensor of candle holds.

use super::Mask;
use super::candle_core::{DType, Result, Tensor, bail};
use super::flash::scores;
use super::paged::{attend, check_lengths, no_gradient};

/// Attention of the last tokens of each sequence to a cache of latent rows (MLA with absorbed
/// projections), `[pages, page_size, row]` or `[pages, page_size, 1, row]`: a row is a key that all
/// heads share, and its first `head_dim_v` elements are the value. Queries
/// `[batch, seqlen_q, num_heads_q, row]` end with the elements that are turned by their position;
/// in DeepSeek's models a row has 576 elements, of which 512 are the value. Returns
/// `[batch, seqlen_q, num_heads_q, head_dim_v]`.
///
/// A cache of u8 has rows of codes of 656 bytes: 512 of e4m3, which are the value, 4 scales of f32,
/// each of 128 codes, and 64 elements of bf16 (`fp8_ds_mla` in vLLM). They stand for 576 elements.
///
/// Sequence `i` has `lengths[i]` keys, those of its queries included, in the pages
/// `block_table[i]`; both are u32 or i32, `[batch]` and `[batch, max_pages]`. The last query stands
/// at the last key. `softmax_scale` is that of the model, such as `1 / sqrt(128 + 64)`.
///
/// On the CPU lengths and pages are checked. A GPU counts those that do not exist as the largest
/// ones that do, takes f16 and bf16, rows of 576 and 512 elements with 512 values, and pages of a
/// multiple of 16 slots, beside codes bf16; the call can become part of a graph.
///
/// # Errors
/// Those of [`AttentionDecode::forward`](blockflash_ops::AttentionDecode::forward), as text; a
/// tensor that needs a gradient, since there is none.
pub fn mla_decode(
    q: &Tensor,
    cache: &Tensor,
    block_table: &Tensor,
    lengths: &Tensor,
    head_dim_v: usize,
    softmax_scale: f32,
    mask: Mask,
) -> Result<Tensor> {
    no_gradient([q, cache, cache])?;
    q.dims4()?;
    let rows = if cache.rank() == 3 { cache.unsqueeze(2)? } else { cache.clone() };
    let (pages, page_size, heads, row) = rows.dims4()?;
    if heads != 1 {
        let shape = cache.dims();
        bail!("cache has shape {shape:?}, expected [pages, page_size, 1, row]");
    }
    if cache.dtype() == DType::U8 && (row, head_dim_v) != (656, 512) {
        bail!("rows of u8 have {row} bytes and {head_dim_v} values, expected 656 and 512");
    }
    if head_dim_v == 0 || head_dim_v > row {
        bail!("head_dim_v is {head_dim_v}, expected 1 to {row}, the elements of a row");
    }
    for (name, of) in [("block_table", block_table), ("lengths", lengths)] {
        // Indices of 32 bits, which the lines of candle have one or two types for.
        if of.dtype().size_in_bytes() != 4 || of.dtype().is_float() {
            bail!("{name} is {:?}, expected u32 or i32", of.dtype());
        }
    }
    let (batch, _) = block_table.dims2()?;
    if lengths.dims() != [batch] {
        bail!("lengths has shape {:?}, expected [{batch}], as block_table", lengths.dims());
    }
    if q.device().is_cpu() {
        check_lengths(("block_table", block_table), ("lengths", lengths), [pages, page_size])?;
    }
    let values = rows.narrow(3, 0, head_dim_v)?;
    let operands = [
        ("q", q),
        ("cache", &rows),
        ("the values of cache", &values),
        ("block_table", block_table),
        ("lengths", lengths),
    ];
    attend(operands, [None; 2], None, scores(softmax_scale, mask, None))
}
