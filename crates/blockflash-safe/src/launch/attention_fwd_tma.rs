//! Attention forward for Hopper: tiles are loaded with TMA.

use super::attention_fwd::{AttentionFwdOperands, AttentionFwdPlan};
use super::checked::Launch;
use super::fit::{Fit, require, rows_aligned, steps};
use crate::map_cache::Key;
use crate::{Kernel, Result, Swizzle, TensorMapSpec, View};
use blockflash_sys::manifest::{AttentionFwdHopper, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_attention_fwd_params,
    blockflash_attention_fwd_tma_params, blockflash_attention_fwd_tma_terms_params,
    blockflash_tensor_map,
};

/// Columns of a TMA box: as many two-byte elements as one row of the swizzle holds.
pub(super) const BOX_COLUMNS: u32 = 64;
/// Rows of a box of q: one warpgroup's rows.
pub(super) const BOX_ROWS_Q: u32 = 64;
/// Rows of a box of a bias: those of a warpgroup.
const BOX_ROWS_BIAS: u32 = 64;
/// Rows of a box of o: one warp's rows.
const BOX_ROWS_O: u32 = 16;

// SAFETY:
// 1. This is the parameter struct of the Hopper kernels of attention forward with score terms;
//    those without take its first member.
// 2. As for the portable kernels. Whatever is read through a tensor map is inside the view that
//    the map was encoded from.
// 3. `o` and `lse` are `ViewMut`.
unsafe impl Launch for AttentionFwdHopper {
    type Operands<'a> = AttentionFwdOperands<'a>;
    type Plan = AttentionFwdPlan;
    type Params = blockflash_attention_fwd_tma_terms_params;
    const FAMILY: &'static str = "attention forward for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionFwdHopper(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn param_bytes(&self) -> usize {
        match self.terms {
            true => size_of::<blockflash_attention_fwd_tma_terms_params>(),
            false => size_of::<blockflash_attention_fwd_tma_params>(),
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (fwd, terms) = (&mut params.fwd, &mut params.terms);
        let tiles = operands.fit(&self.tile(), &plan.scalars, &mut fwd.base)?;
        let sequences = if operands.cu_seqlens.is_some() { 1 } else { fwd.base.batch };
        fit_sections(plan.heads_per_section, sequences, fwd)?;
        if self.terms {
            operands.fit_terms(&fwd.base, terms)?;
            if let Some(bias) = &operands.terms.bias {
                fit_bias_map(bias, self, &fwd.base)?;
            }
        }
        Ok(tiles)
    }

    fn encode(&self, operands: &Self::Operands<'_>, params: &mut Self::Params) -> Result<()> {
        let fwd = &mut params.fwd;
        fwd.q = encode(&operands.q, BOX_ROWS_Q)?;
        fwd.k = encode(&operands.k, self.block_kv)?;
        fwd.v = encode(&operands.v, self.block_kv)?;
        fwd.o = encode(&operands.o.as_view(), BOX_ROWS_O)?;
        if let Some(bias) = operands.terms.bias.filter(|_| self.terms) {
            // As if queries were a sequence of rows of keys.
            params.bias = encode(&bias.permute(&[0, 2, 1, 3])?, BOX_ROWS_BIAS)?;
        }
        Ok(())
    }

    fn set_counter(params: &mut Self::Params, counter: *mut u32) {
        params.fwd.tile_counter = counter;
    }
}

/// Checks that a bias, whose shape fits, is what the kernels read by its tensor map: boxes of
/// queries × keys of the element type of the tile, all of which the bias has.
fn fit_bias_map(
    bias: &View<'_>,
    tile: &AttentionFwdHopper,
    base: &blockflash_attention_fwd_params,
) -> Fit {
    require(
        bias.dtype() == tile.types.q,
        format_args!("bias is {}, the kernel takes {}", bias.dtype(), tile.types.q),
    )?;
    let of = |entries: &[usize]| [0, 1, 2, 3].map(|dim| entries[dim] as i64);
    let (shape, strides) = (of(bias.shape()), of(bias.strides()));
    let pairs = [base.seqlen_q, base.seqlen_kv].map(i64::from);
    require(
        shape[2..] == pairs && (shape[3] <= 1 || strides[3] == 1),
        format_args!(
            "bias has the shape {shape:?} and the strides {strides:?}, the kernel takes \
             {pairs:?} queries and contiguous keys"
        ),
    )?;
    let rows = [0, 1, 2].map(|dim| (shape[dim], strides[dim]));
    rows_aligned("bias", bias, 8, steps(&rows))
}

/// Writes the heads that are computed together, of this many sequences. Checks them, and the
/// window, which the kernel adds to positions in 32 bits.
pub(super) fn fit_sections(
    heads_per_section: i32,
    sequences: i32,
    params: &mut blockflash_attention_fwd_tma_params,
) -> Fit {
    let base = &params.base;
    let keys_and_queries = i64::from(base.seqlen_q) + i64::from(base.seqlen_kv);
    let window = &base.scores.window;
    for (name, side) in [("window.left", window.left), ("window.right", window.right)] {
        let bounded = side >= 0 && i64::from(side) < keys_and_queries;
        require(
            side == BLOCKFLASH_WINDOW_UNBOUNDED || bounded,
            format_args!(
                "{name} is {side}, expected from 0 to less than {keys_and_queries}, the number of \
                 queries and keys, or {BLOCKFLASH_WINDOW_UNBOUNDED} for no bound"
            ),
        )?;
    }
    let group = base.num_heads_q / base.num_heads_kv;
    let heads = i64::from(base.num_heads_q) * i64::from(sequences);
    require(
        heads_per_section > 0
            && heads_per_section % group == 0
            && i64::from(heads_per_section) <= heads,
        format_args!(
            "heads_per_section is {heads_per_section}, expected a multiple of {group} up to {heads}"
        ),
    )?;
    params.heads_per_section = heads_per_section;
    Ok(())
}

/// Checks the rows of an output that is stored from registers, 16 bytes at a time.
pub(super) fn fit_output(
    operands: &AttentionFwdOperands<'_>,
    base: &blockflash_attention_fwd_params,
) -> Fit {
    let rows = if operands.cu_seqlens.is_some() { base.total_q } else { base.seqlen_q };
    let dims = [
        (base.batch.into(), base.o_stride_batch),
        (rows.into(), base.o_stride_seq),
        (base.num_heads_q.into(), base.o_stride_head),
    ];
    rows_aligned("o", &operands.o.as_view(), 8, steps(&dims))
}

/// The map of a `[batch, sequence, head, head_dim]` tensor, or a packed `[rows, head, head_dim]`
/// one, with the dimensions (head_dim, sequence, head, batch).
pub(super) fn encode(view: &View<'_>, box_rows: u32) -> Result<blockflash_tensor_map> {
    encode_boxes(view, [BOX_COLUMNS, box_rows, 1])
}

/// The same with boxes of this many columns, whose bytes a swizzle spans, rows of the sequence, and
/// heads.
pub(super) fn encode_boxes(view: &View<'_>, boxes: [u32; 3]) -> Result<blockflash_tensor_map> {
    let key = Key::of_view(view, boxes);
    if let Some(opaque) = key.as_ref().and_then(Key::find) {
        return Ok(blockflash_tensor_map { opaque });
    }
    let map = encode_new(view, boxes)?;
    if let Some(key) = key {
        key.keep(map.opaque);
    }
    Ok(map)
}

fn encode_new(view: &View<'_>, boxes: [u32; 3]) -> Result<blockflash_tensor_map> {
    let dims = view
        .shape()
        .iter()
        .zip(view.strides())
        .rev()
        .map(|(&size, &stride)| (size as u64, stride as u64));
    let mut sizes = [1; 4];
    let mut strides = [0; 4];
    for (at, (size, stride)) in dims.enumerate().take(4) {
        (sizes[at], strides[at]) = (size, stride);
    }
    let [columns, rows, heads] = boxes;
    let bytes = view.dtype().size() as u64;
    // The innermost dimensions of a view are (head, head_dim); a map needs (sequence, head_dim)
    // there. The stride of a dimension of size 1 is never used but has to be a valid one.
    let unused = (sizes[0] * bytes).next_multiple_of(16);
    let stride = |at: usize| if sizes[at] > 1 { strides[at] * bytes } else { unused };
    let spec = TensorMapSpec {
        dtype: view.dtype(),
        shape: &[sizes[0], sizes[2], sizes[1], sizes[3]],
        strides_bytes: &[stride(2), stride(1), stride(3)],
        box_shape: &[columns, rows, heads, 1],
        swizzle: if u64::from(columns) * bytes == 64 { Swizzle::B64 } else { Swizzle::B128 },
    };
    spec.encode(view)
}
