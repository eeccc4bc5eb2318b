//! What all attention kernels have in common.

use super::family::{Size, Support};
use super::{Kernel, Variant};
use crate::{ElementTypes, HeadDims, Target};

/// Of prefills of multi-head latent attention, whose queries and keys have a part that is rotated.
pub(super) const MLA: HeadDims = HeadDims { qk: 192, v: 128 };

/// A cell of the support table for a tile of attention.
pub(super) fn support(
    operation: &'static str,
    types: ElementTypes,
    head_dims: HeadDims,
) -> Support {
    Support { operation, size: Size::HeadDim(head_dims.max() as u32), dtype: types.q }
}

/// Bytes of a row of q, of k and of v in a tile.
pub(super) fn row_bytes(types: ElementTypes, head_dims: HeadDims) -> [u32; 3] {
    [(types.q, head_dims.qk), (types.kv, head_dims.qk), (types.kv, head_dims.v)]
        .map(|(dtype, columns)| (dtype.size() * columns) as u32)
}

/// The preprocessor definitions of the element types.
pub(super) fn define_types(define: &mut dyn FnMut(&'static str, u32), types: ElementTypes) {
    define("VARIANT_TYPE_Q", types.q as u32);
    define("VARIANT_TYPE_KV", types.kv as u32);
    define("VARIANT_TYPE_O", types.o as u32);
}

/// The preprocessor definitions that every kernel with tiles of attention has.
pub(super) fn define_tile(
    define: &mut dyn FnMut(&'static str, u32),
    types: ElementTypes,
    head_dims: HeadDims,
) {
    define_types(define, types);
    define_head_dims(define, head_dims);
}

/// Those of the head dimensions.
pub(super) fn define_head_dims(define: &mut dyn FnMut(&'static str, u32), head_dims: HeadDims) {
    define("VARIANT_HEAD_DIM_QK", head_dims.qk as u32);
    define("VARIANT_HEAD_DIM_V", head_dims.v as u32);
}

/// The targets of portable kernels with score terms, whose images are large. Hopper runs what its
/// own kernels with terms do not take as PTX, as GPUs without machine code do.
pub(super) fn compiles_terms(target: Target) -> bool {
    target.is_baseline() && target != Target::Sm90
}

/// A CTA of an attention kernel computes `block_q` queries of `heads` heads, `block_kv` keys at a
/// time, or several neighbours of such tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// Element types of q, of k and v, and of o.
    pub types: ElementTypes,
    /// Largest head dimensions.
    pub head_dims: HeadDims,
    /// Queries that visit the same keys.
    pub block_q: u32,
    /// Neighbouring tiles of `block_q` queries per CTA, each with a list of its own under a block
    /// mask.
    pub block_rows: u32,
    /// Keys per step of the main loop.
    pub block_kv: u32,
    /// Heads of q per CTA; they share keys and the block mask.
    pub heads: u32,
    /// When it computes the log-sum-exp.
    pub lse: Lse,
    /// Whether it takes neither packed sequences nor block masks.
    pub dense_only: bool,
    /// Whether it takes block masks at all.
    pub block_masks: bool,
    /// Whether tensor maps describe q, k and v, which have limits on strides.
    pub tensor_maps: bool,
    /// Whether it computes score terms: a bias, ALiBi, or bits of partial blocks; if so, it takes
    /// nothing else.
    pub terms: bool,
    /// Whether bits of partial blocks are the only ones of them.
    pub bits_only: bool,
}

impl AttentionTile {
    pub(super) fn support(&self) -> Support {
        let Self { head_dims, types, .. } = *self;
        support("attention forward", types, head_dims)
    }

    /// Whether it takes block masks. The widest tiles with score terms divide no blocks that have
    /// bits.
    pub const fn takes_block_masks(&self) -> bool {
        self.block_masks && !(self.terms && self.block_q > 128)
    }

    /// Queries per CTA.
    pub const fn queries(&self) -> u32 {
        self.block_q * self.block_rows
    }

    /// Keys of the longest sequence. A CTA of two block rows has a bit per key tile and row.
    pub const fn most_keys(&self) -> u32 {
        if self.block_rows > 1 { 2048 * self.block_kv } else { u32::MAX }
    }

    pub(super) fn profile_case(&self) -> String {
        let Self { head_dims, types, .. } = *self;
        format!("b4_s4096_h{}_d{head_dims}_full_{types}", 2048 / head_dims.max())
    }
}

/// When an attention kernel computes the log-sum-exp of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lse {
    /// Where the launch asks for it.
    AsAsked,
    /// In every launch, which has to ask for it.
    Always,
    /// In no launch.
    Never,
}

impl Lse {
    /// Whether such a kernel suits a launch that asks for the log-sum-exp or does not.
    pub const fn suits(self, asked: bool) -> bool {
        match self {
            Lse::AsAsked => true,
            Lse::Always => asked,
            Lse::Never => !asked,
        }
    }
}

impl Kernel {
    /// The part that all attention kernels have; `None` for other kernels.
    pub const fn attention_tile(&self) -> Option<AttentionTile> {
        match self.variant {
            Variant::AttentionFwd(tile) => Some(tile.tile()),
            Variant::AttentionFwdHopper(tile) => Some(tile.tile()),
            Variant::AttentionFwdSmall(tile) => Some(tile.tile()),
            Variant::AttentionFwdWide(tile) => Some(tile.tile()),
            Variant::AttentionFwdE4m3(tile) => Some(tile.tile()),
            _ => None,
        }
    }
}
