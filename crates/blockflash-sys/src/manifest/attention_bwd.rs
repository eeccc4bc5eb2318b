//! What all kernels of the attention backward have in common.

use super::attention::support;
use super::family::Support;
use super::{Kernel, Variant};
use crate::{ElementTypes, HeadDims};

/// The part of the backward pass that a kernel computes. A pass is one launch of each of several
/// steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionBwdStep {
    /// Zeros in the rows of dq, dk and dv that belong to no sequence.
    Zeros,
    /// -lse·log2(e) and delta = rowsum(d_o∘o) of every query, which all other steps read.
    Statistics,
    /// The gradient of the sinks.
    Sinks,
    /// dk and dv.
    Keys,
    /// dq.
    Queries,
    /// dk and dv, and sums of dq in f32, which blocks of keys add to in a fixed order.
    KeysAndSums,
    /// The gradient of the bias.
    Bias,
    /// dq from these sums, and dk and dv from their parts where CTAs share the query heads of a
    /// group.
    Sums,
}

impl AttentionBwdStep {
    /// Whether it reads tiles of q, k, v and d_o, and with them the mask.
    pub const fn visits(self) -> bool {
        matches!(self, Self::Keys | Self::Queries | Self::KeysAndSums | Self::Bias)
    }
}

/// A CTA of a kernel of the attention backward has `block_kv` keys of a head and visits queries
/// `block_q` at a time, or the other way round. Steps over rows have `block_q` rows and no keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBwdTile {
    /// What it computes.
    pub step: AttentionBwdStep,
    /// Element types of q, of k and v, and of o, and of their gradients.
    pub types: ElementTypes,
    /// Largest head dimensions.
    pub head_dims: HeadDims,
    /// Queries of a CTA or of a step of its main loop.
    pub block_q: u32,
    /// Keys of a CTA or of a step of its main loop; 0 for steps over rows.
    pub block_kv: u32,
    /// Whether tensor maps describe q, k, v and d_o, which have limits on strides.
    pub tensor_maps: bool,
    /// Whether several CTAs can share the query heads of a block of keys, each of which leaves its
    /// part of dk and dv in the workspace.
    pub splits_heads: bool,
    /// Whether it computes score terms: a bias, ALiBi, or bits of partial blocks; if so, it takes
    /// nothing else.
    pub terms: bool,
}

impl AttentionBwdTile {
    pub(super) fn support(&self) -> Option<Support> {
        let Self { step, head_dims, types, .. } = *self;
        let support = || support("attention backward", types, head_dims);
        (step == AttentionBwdStep::Keys).then(support)
    }

    /// Whether it computes problems with a softcap. Where 128 queries pass at a time beside sums of
    /// dq, no registers are left for it; beyond a head_dim of 128 the warpgroup that differentiates
    /// the scores knows only the probabilities.
    pub const fn takes_softcap(&self) -> bool {
        match self.step {
            AttentionBwdStep::KeysAndSums => self.block_q <= 64 && self.head_dims.max() <= 128,
            _ => true,
        }
    }

    /// Whether its score terms include a bias. The kernels of Hopper have no registers left for it.
    pub const fn takes_bias(&self) -> bool {
        self.terms && !self.tensor_maps
    }

    /// A case for the steps that multiply.
    pub(super) fn profile_case(&self) -> Option<String> {
        let Self { head_dims, types, block_kv, .. } = *self;
        let case = || format!("bwd_b4_s4096_h{}_d{head_dims}_full_{types}", 2048 / head_dims.max());
        (block_kv > 0).then(case)
    }
}

impl Kernel {
    /// The part that all kernels of the attention backward have; `None` for other kernels.
    pub const fn attention_bwd_tile(&self) -> Option<AttentionBwdTile> {
        match self.variant {
            Variant::AttentionBwd(tile) => Some(tile.tile()),
            Variant::AttentionBwdHopper(tile) => Some(tile.tile()),
            _ => None,
        }
    }
}
