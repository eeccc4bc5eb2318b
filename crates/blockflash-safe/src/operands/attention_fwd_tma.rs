//! Attention forward with Hopper's own instructions: tiles are copied by the tensor memory
//! accelerator.

use super::{AttentionFwdOperands, Fit, fits_row, require};
use crate::{Error, LaunchConfig, Result, Row, Stream, Swizzle, TensorMap, TensorMapSpec, View};
use blockflash_sys::manifest::{AttentionFwdHopper, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_attention_fwd_params,
    blockflash_attention_fwd_tma_params, blockflash_tensor_map,
};

/// Columns of a box: as many elements of two bytes as the swizzle permutes.
const BOX_COLUMNS: u32 = 64;
/// Rows of a box of q: those of one warpgroup.
const BOX_ROWS_Q: u32 = 64;
/// Rows of a box of o: those of one warp.
const BOX_ROWS_O: u32 = 16;

impl Stream {
    /// Launches a kernel of [`Variant::AttentionFwdHopper`]. The tensor maps and pointers in
    /// `params` are ignored: they are made from the operands.
    ///
    /// Launches of one stream share a pair of counters, and so do those that one capture makes of
    /// it, since they run one after another.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd); [`Error::TensorMap`] for strides
    /// that a tensor map cannot have; [`Error::TileCounters`] when other streams and graphs have
    /// all counters.
    pub fn launch_attention_fwd_tma(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_attention_fwd_tma_params,
        operands: AttentionFwdOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::AttentionFwdHopper(tile) = &row.variant else {
            return Err(failed("not a Hopper kernel of attention forward".to_owned()));
        };
        let views = operands.views();
        self.expect_all(&views)?;
        fit(row, tile, config, params, &operands).map_err(failed)?;
        let params = blockflash_attention_fwd_tma_params {
            base: operands.pointers(&params.base),
            q: encode(&operands.q, BOX_ROWS_Q)?,
            k: encode(&operands.k, tile.block_kv)?,
            v: encode(&operands.v, tile.block_kv)?,
            o: encode(&operands.o.as_view(), BOX_ROWS_O)?,
            ..*params
        };
        // SAFETY:
        // 1. The row is a Hopper variant of attention forward, whose parameter struct this is.
        // 2. As in `launch_attention_fwd`. What is read through a tensor map lies inside the view
        //    that it was encoded from. The tile counter is that of `launch_counting`.
        // 3. `o` and `lse` are borrowed exclusively.
        unsafe {
            self.launch_counting(
                row,
                config,
                |tile_counter| blockflash_attention_fwd_tma_params { tile_counter, ..params },
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

fn fit(
    row: &Row,
    tile: &AttentionFwdHopper,
    config: &LaunchConfig,
    params: &blockflash_attention_fwd_tma_params,
    operands: &AttentionFwdOperands<'_>,
) -> Fit {
    let p = &params.base;
    let tiles = operands.fit(&tile.tile(), p)?;
    fits_row(config, row, 1..=tiles)?;
    // Each block looks for a tile past the last one, and counts in 32 bits.
    let past = tiles + 2 * i128::from(config.grid[0]);
    require(past <= i128::from(i32::MAX), "there are too many tiles")?;
    require(
        window_fits(p.window_left, p) && window_fits(p.window_right, p),
        "a window is out of range",
    )?;
    let group = p.num_heads_q / p.num_heads_kv;
    let heads = i64::from(p.num_heads_q)
        * if operands.cu_seqlens.is_some() { 1 } else { i64::from(p.batch) };
    let section = params.heads_per_section;
    require(
        section > 0 && section % group == 0 && i64::from(section) <= heads,
        "a section is no number of groups of heads",
    )
}

/// The kernel adds windows to positions in 32 bits.
fn window_fits(side: i32, p: &blockflash_attention_fwd_params) -> bool {
    let keys_and_queries = i64::from(p.seqlen_q) + i64::from(p.seqlen_kv);
    side == BLOCKFLASH_WINDOW_UNBOUNDED || (side >= 0 && i64::from(side) < keys_and_queries)
}

/// The map of a `[batch, sequence, head, head_dim]` tensor, or a packed `[rows, head, head_dim]`
/// one, with the dimensions (head_dim, sequence, head, batch). That of a tensor without rows is
/// never used: it stays zero.
fn encode(view: &View<'_>, box_rows: u32) -> Result<blockflash_tensor_map> {
    if view.layout().is_empty() {
        return Ok(blockflash_tensor_map { opaque: [0; 16] });
    }
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
    let bytes = view.dtype().size() as u64;
    // The innermost dimensions of a view are (head, head_dim), those of a map (sequence, head_dim).
    // The stride of a dimension of size 1 is never used, but has to be a valid one.
    let stride = |at: usize| if sizes[at] > 1 { strides[at] * bytes } else { sizes[0] * bytes };
    let spec = TensorMapSpec {
        dtype: view.dtype(),
        shape: &[sizes[0], sizes[2], sizes[1], sizes[3]],
        strides_bytes: &[stride(2), stride(1), stride(3)],
        box_shape: &[BOX_COLUMNS, box_rows, 1, 1],
        swizzle: Swizzle::B128,
    };
    Ok(blockflash_tensor_map { opaque: *TensorMap::encode_tiled(view, &spec)?.words() })
}
