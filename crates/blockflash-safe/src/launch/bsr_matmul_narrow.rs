//! BSR matmul with few columns.

use super::BsrMatmulOperands;
use super::bsr_matmul::writes;
use super::checked::Launch;
use super::fit::{Fit, array, ceil_div, require};
use crate::Kernel;
use blockflash_sys::manifest::{BsrMatmulNarrow, Variant};
use blockflash_sys::params::{blockflash_bsr_matmul_narrow_params, blockflash_bsr_matmul_params};

/// A product with few columns, and which strips of it clusters share.
#[derive(Clone, Copy, Debug)]
pub struct BsrMatmulNarrowPlan {
    /// Sizes, strides and factors.
    pub base: blockflash_bsr_matmul_params,
    /// CTAs of each cluster of the launch; 1: there are no clusters.
    pub ctas: u32,
    /// The first strips in the order of rows, each of which a cluster computes together.
    pub long_strips: i32,
}

impl BsrMatmulNarrowPlan {
    /// CTAs of the launch for this many strips, per tile of columns: whole clusters.
    pub fn blocks(&self, strips: i128) -> i128 {
        let (ctas, long) = (i128::from(self.ctas.max(1)), i128::from(self.long_strips));
        let clusters = long + (strips - long + ctas - 1) / ctas;
        clusters * ctas
    }
}

// SAFETY:
// 1. This is the parameter struct of the kernels of BSR matmul for few columns.
// 2. As for the portable kernels. Addresses do not depend on the size of clusters: whatever the
//    launch has, a CTA computes a strip that exists, or none.
// 3. `c` is a `ViewMut`.
unsafe impl Launch for BsrMatmulNarrow {
    type Operands<'a> = BsrMatmulOperands<'a>;
    type Plan = BsrMatmulNarrowPlan;
    type Params = blockflash_bsr_matmul_narrow_params;
    const FAMILY: &'static str = "BSR matmul for few columns";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrMatmulNarrow(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        writes(true, &plan.base)?;
        operands.fit(&self.tile(), &plan.base, &mut params.base)?;
        let strips = ceil_div(plan.base.m, self.block_size) * i128::from(self.strips());
        require(
            (0..=strips).contains(&i128::from(plan.long_strips)),
            format_args!("long_strips is {}, and there are {strips} strips", plan.long_strips),
        )?;
        let tiles_n = i128::from(self.tile().tiles_n(plan.base.n as u64));
        let blocks = plan.blocks(strips) * tiles_n;
        // The kernel counts strips and columns of tiles in 32 bits.
        let largest = blocks.max(strips).max(tiles_n);
        require(
            largest <= i128::from(i32::MAX),
            format_args!("{largest} strips or CTAs, the limit is {}", i32::MAX),
        )?;
        let [.., rows] = operands.indices.arrays();
        params.rows = array(rows).cast();
        params.values_settled = operands.values.is_settled().into();
        params.long_strips = plan.long_strips;
        Ok(blocks)
    }

    fn fewest_in_cluster(&self, plan: &Self::Plan, _: &Self::Params) -> u32 {
        plan.ctas
    }
}

#[cfg(test)]
#[path = "bsr_matmul_narrow_tests.rs"]
mod tests;
