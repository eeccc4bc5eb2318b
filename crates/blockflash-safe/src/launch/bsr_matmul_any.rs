//! BSR matmul with operands in any layout.

use super::BsrMatmulOperands;
use super::checked::Launch;
use super::fit::{Fit, array};
use crate::Kernel;
use blockflash_sys::manifest::{BsrMatmulAny, BsrMatmulTile, Variant};
use blockflash_sys::params::blockflash_bsr_matmul_any_params;

// SAFETY:
// 1. This is the parameter struct of the kernels of BSR matmul for any layout.
// 2. As for the portable kernels, including `block_idx`, which is present if and only if
//    `a_transposed` is set (`fit`).
// 3. `c` is a `ViewMut`.
unsafe impl Launch for BsrMatmulAny {
    type Operands<'a> = BsrMatmulOperands<'a>;
    type Plan = blockflash_bsr_matmul_any_params;
    type Params = blockflash_bsr_matmul_any_params;
    const FAMILY: &'static str = "BSR matmul for any layout";

    fn of(kernel: &Kernel) -> Option<Self> {
        if let Variant::BsrMatmulAny(tile) = kernel.variant { Some(tile) } else { None }
    }

    fn fit(
        &self,
        plan: &Self::Plan,
        operands: &Self::Operands<'_>,
        params: &mut Self::Params,
    ) -> Fit<i128> {
        let (a_transposed, b_column_major) = (plan.a_transposed != 0, plan.b_column_major != 0);
        let tile = BsrMatmulTile { a_transposed, b_column_major, ..self.0.tile() };
        let [_, _, _, block_idx, ..] = operands.indices.arrays();
        params.block_idx = array(block_idx).cast();
        (params.a_transposed, params.b_column_major) = (plan.a_transposed, plan.b_column_major);
        operands.fit(&tile, &plan.base, &mut params.base)
    }
}

#[cfg(test)]
#[path = "bsr_matmul_any_tests.rs"]
mod tests;
