//! What all attention kernels have in common.

use super::family::{Size, Support};
use super::{Kernel, Variant};
use crate::DType;

/// A CTA of an attention kernel computes `block_q` queries of `heads` heads, `block_kv` keys at a
/// time, or several neighbours of such tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Largest head dimension.
    pub head_dim: u32,
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
}

impl AttentionTile {
    pub(super) fn support(&self) -> Support {
        let Self { head_dim, dtype, .. } = *self;
        Support { operation: "attention forward", size: Size::HeadDim(head_dim), dtype }
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
        let Self { head_dim, dtype, .. } = self;
        format!("b4_s4096_h{}_d{head_dim}_full_{dtype}", 2048 / head_dim)
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
            _ => None,
        }
    }
}
