//! What all attention kernels have in common.

use super::family::{Size, Support};
use super::{Kernel, Variant};
use crate::DType;

/// A CTA of an attention kernel computes `block_q` queries of `heads` heads, `block_kv` keys at a
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionTile {
    /// Element type of q, k, v and o.
    pub dtype: DType,
    /// Largest head dimension.
    pub head_dim: u32,
    /// Queries per CTA.
    pub block_q: u32,
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
