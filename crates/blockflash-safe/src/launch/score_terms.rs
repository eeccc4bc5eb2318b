//! Score terms of attention: what is added to scores, and the bits of partial blocks.

use super::fit::{Fit, absent, all_strides, narrow, pointer, require};
use crate::view::Used;
use crate::{BlockLists, DType, View};
use blockflash_sys::params::{
    blockflash_attention_fwd_params, blockflash_block_mask, blockflash_score_terms,
};
use std::ptr::null;

/// Queries and keys of a tile of bits.
const BIT_TILE: i32 = 64;

/// What is added to the scores of attention.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreTerms<'a> {
    /// f16, bf16 or f32 `[batch, num_heads_q, seqlen_q, seqlen_kv]`, where any extent may be 1
    /// instead and then serves all, with any strides. Not with packed sequences.
    pub bias: Option<View<'a>>,
    /// f32 `[num_heads_q]` or `[batch, num_heads_q]`, with any strides: slopes of ALiBi.
    pub alibi: Option<View<'a>>,
}

/// The bits of a block mask, as kernels take them.
#[derive(Clone, Copy)]
pub(super) struct BitArrays {
    pub block_bits: *const i32,
    pub bits: *const u32,
    pub tiles: i32,
}

impl BitArrays {
    /// All blocks are full.
    pub(super) const NONE: Self = Self { block_bits: null(), bits: null(), tiles: 0 };

    /// Those of lists that a launch reads as `mask`; `None` where all blocks are full.
    pub(super) fn of(
        lists: Option<&BlockLists>,
        mask: &blockflash_block_mask,
    ) -> Fit<Option<Self>> {
        let bits = lists.and_then(|lists| Some((lists.bits()?, lists.tiles_of_block()?)));
        let Some(([block_bits, words], tiles_of_block)) = bits else { return Ok(None) };
        let (block_q, block_kv) = (mask.block_q, mask.block_kv);
        let tiles = |size: i32| (size % BIT_TILE == 0).then_some(i64::from(size / BIT_TILE));
        require(
            tiles(block_q).zip(tiles(block_kv)).map(|(q, kv)| q * kv) == Some(tiles_of_block),
            format_args!(
                "partial blocks of the mask have {tiles_of_block} tiles of {BIT_TILE} × \
                 {BIT_TILE} bits, expected those of {block_q} × {block_kv} pairs"
            ),
        )?;
        let tiles = words.shape().first().map_or(0, |&tiles| tiles as i64);
        // Kernels clamp tiles to those that there are. Without any, all blocks are full.
        Ok((tiles > 0).then_some(Self {
            block_bits: pointer(&block_bits.view()).cast(),
            bits: pointer(&words.view()).cast(),
            tiles: narrow("tiles of bits", tiles)?,
        }))
    }
}

impl ScoreTerms<'_> {
    /// Checks the tensors against the sizes of a launch, which `base` has, and writes them and the
    /// bits of the block mask.
    pub(super) fn fit(
        &self,
        base: &blockflash_attention_fwd_params,
        block_mask: Option<&BlockLists>,
        p: &mut blockflash_score_terms,
    ) -> Fit {
        let packed = !base.cu_seqlens_q.is_null();
        let sizes = [base.batch, base.num_heads_q, base.seqlen_q, base.seqlen_kv].map(i64::from);
        self.fit_added(packed, sizes, p)?;
        if let Some(arrays) = BitArrays::of(block_mask, &base.block_mask)? {
            (p.block_bits, p.bits) = (arrays.block_bits, arrays.bits);
            p.bit_tiles = arrays.tiles;
        }
        Ok(())
    }

    /// Checks what is added to scores against the batch, the heads of q, and the rows and keys of a
    /// launch, and writes it.
    pub(super) fn fit_added(
        &self,
        packed: bool,
        sizes: [i64; 4],
        p: &mut blockflash_score_terms,
    ) -> Fit {
        let [batch, heads, ..] = sizes;
        if let Some(bias) = &self.bias {
            absent("bias", packed, "sequences are packed")?;
            [p.bias_stride_batch, p.bias_stride_head, p.bias_stride_q, p.bias_stride_kv] =
                broadcast("bias", bias, sizes)?.1;
            (p.bias, p.bias_type) = (pointer(bias), bias.dtype() as i32);
        }
        if let Some(alibi) = &self.alibi {
            (p.alibi_stride_batch, p.alibi_stride_head) = match alibi.shape().len() {
                1 => (0, all_strides("alibi", alibi, DType::F32, [heads])?[0]),
                _ => all_strides("alibi", alibi, DType::F32, [batch, heads])?.into(),
            };
            p.alibi = pointer(alibi).cast();
        }
        Ok(())
    }

    /// Checks that there are none, for a kernel that reads none.
    pub(super) fn refuse(&self, block_mask: Option<&BlockLists>) -> Fit {
        let reason = "the kernel has no score terms";
        self.refuse_sums(reason)?;
        let has_bits = block_mask.is_some_and(|lists| lists.bits().is_some());
        absent("block_bits", has_bits, reason)
    }

    /// Checks that nothing is added to scores, for a kernel that reads bits alone.
    pub(super) fn refuse_sums(&self, reason: &str) -> Fit {
        absent("bias", self.bias.is_some(), reason)?;
        absent("alibi", self.alibi.is_some(), reason)
    }

    /// The memory of the tensors.
    pub(super) fn used(&self) -> [Option<Used<'_>>; 2] {
        [&self.bias, &self.alibi].map(|view| view.as_ref().map(View::used))
    }
}

/// Extents and strides of a tensor in the shape of scores, of which each extent is the full one or
/// 1. The stride of such a one is 0.
pub(super) fn broadcast(name: &str, view: &View<'_>, sizes: [i64; 4]) -> Fit<([i64; 4], [i64; 4])> {
    let floats = [DType::F16, DType::BF16, DType::F32];
    require(
        floats.contains(&view.dtype()),
        format_args!("{name} is {}, expected one of {floats:?}", view.dtype()),
    )?;
    let of = |entries: &[usize]| <[usize; 4]>::try_from(entries).map(|all| all.map(|x| x as i64));
    let (Ok(shape), Ok(strides)) = (of(view.shape()), of(view.strides())) else {
        return Err(format!("{name} has {} dimensions, expected 4", view.shape().len()));
    };
    require(
        (0..4).all(|dim| shape[dim] == sizes[dim] || shape[dim] == 1),
        format_args!("{name} has the shape {shape:?}, expected {sizes:?} or 1 in places"),
    )?;
    Ok((shape, std::array::from_fn(|dim| if shape[dim] == 1 { 0 } else { strides[dim] })))
}

#[cfg(test)]
#[path = "score_terms_tests.rs"]
mod tests;
