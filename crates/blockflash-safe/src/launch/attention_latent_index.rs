//! Attention by an index over a cache whose values are the first columns of its keys.

use super::attention_index::{AttentionIndexOperands, AttentionIndexPlan, IndexTile};
use super::checked::Launch;
use super::fit::{Fit, require};
use crate::Kernel;
use blockflash_sys::manifest::{
    AttentionLatent, AttentionLatentHopper, AttentionLatentIndex, AttentionLatentIndexFew,
    AttentionLatentIndexHopper, Variant,
};
use blockflash_sys::params::blockflash_attention_index_params;

impl AttentionIndexOperands<'_> {
    /// Checks a launch of a kernel for latent rows, writes the argument, and returns the items.
    fn fit_latent_index(
        &self,
        tile: &IndexTile,
        plan: &AttentionIndexPlan,
        params: &mut blockflash_attention_index_params,
    ) -> Fit<i128> {
        let run_log2 = plan.run_log2;
        require(run_log2 == 0, format_args!("run_log2 is {run_log2}, expected 0"))?;
        let items = self.fit_index(tile, plan, params)?;
        self.attention.fit_latent(tile.head_dims)?;
        Ok(items)
    }
}

// SAFETY:
// 1. This is the parameter struct of these kernels.
// 2. As for `AttentionIndex`. The kernel reads as many columns of q and k as its tile has, and
//    writes as many of o: `fit_latent` has found that the tensors have exactly these; of rows of
//    codes it reads the bytes that `fit_code_rows` has found. It reads no address of v.
// 3. As for `AttentionIndex`.
unsafe impl Launch for AttentionLatentIndex {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = AttentionIndexPlan;
    type Params = blockflash_attention_index_params;
    const FAMILY: &'static str = "attention by an index over a cache of latent rows";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionLatentIndex(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (AttentionLatent { types, head_dims, .. }, rows) = (self.tile, AttentionLatent::ROWS);
        let tile = IndexTile { types, head_dims, rows, has_workspace: true };
        let items = operands.fit_latent_index(&tile, plan, params)?;
        // There is a CTA for each, and words of the workspace count CTAs in 24 bits.
        let (counts, most) = (!params.scaled.decode.arrivals.is_null(), 1 << 24);
        require(
            !counts || items < most,
            format_args!("{items} items of lists in splits, the limit is {most}"),
        )?;
        Ok(items)
    }
}

// SAFETY: as for `AttentionLatentIndex`. A CTA reads the shared memory of the others of its
// cluster, and touches no workspace: a list is divided among all CTAs of any cluster.
unsafe impl Launch for AttentionLatentIndexFew {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = AttentionIndexPlan;
    type Params = blockflash_attention_index_params;
    const FAMILY: &'static str = "attention by an index of few heads over latent rows for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::AttentionLatentIndexFew(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let Self { types, head_dims } = *self;
        let tile = IndexTile { types, head_dims, rows: Self::ROWS, has_workspace: false };
        operands.fit_latent_index(&tile, plan, params)
    }
}

// SAFETY: as for `AttentionLatentIndex`. Which items a CTA has follows from the
// argument and its number alone.
unsafe impl Launch for AttentionLatentIndexHopper {
    type Operands<'a> = AttentionIndexOperands<'a>;
    type Plan = AttentionIndexPlan;
    type Params = blockflash_attention_index_params;
    const FAMILY: &'static str = "attention by an index over latent rows for Hopper";

    fn of(kernel: &Kernel) -> Option<Self> {
        match kernel.variant {
            Variant::AttentionLatentIndexHopper(tile) => Some(tile),
            _ => None,
        }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let AttentionLatentHopper { types, head_dims } = self.tile;
        let rows = AttentionLatentHopper::ROWS;
        let tile = IndexTile { types, head_dims, rows, has_workspace: true };
        operands.fit_latent_index(&tile, plan, params)
    }
}
