use super::BsrMatmulTile;
use super::bsr_matmul_sm80::BsrMatmul;
use super::family::{Family, Support, each_dtype};
use crate::Target;

/// Tiles of `bsr_matmul_any_sm80`, which takes A as it is or transposed, and B and C row-major or
/// column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BsrMatmulAny(pub BsrMatmul);

/// Tiles by block size: one of each, as such products are rarer.
const TILES: &[BsrMatmul] = &[
    BsrMatmul::new(16, [128, 64], [1, 4], 2, 4),
    BsrMatmul::new(32, [128, 64], [1, 4], 2, 4),
    BsrMatmul::new(64, [128, 64], [2, 2], 2, 3),
    BsrMatmul::new(128, [128, 64], [2, 2], 3, 2),
];

pub(super) fn tiles(target: Target) -> impl Iterator<Item = BsrMatmulAny> {
    each_dtype(TILES)
        .filter(move |_| target.is_portable())
        .map(|(dtype, tile)| BsrMatmulAny(BsrMatmul { dtype, ..tile }))
}

impl BsrMatmulAny {
    /// The part that all BSR kernels have, for A as it is and a row-major B.
    pub const fn tile(&self) -> BsrMatmulTile {
        self.0.tile()
    }
}

impl Family for BsrMatmulAny {
    fn source(&self) -> &'static str {
        "bsr_matmul_any_sm80"
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn warps(&self) -> u32 {
        self.0.warps()
    }

    fn smem_bytes(&self) -> u32 {
        self.0.smem_bytes()
    }

    fn macros(&self, define: &mut dyn FnMut(&'static str, u32)) {
        self.0.macros(define);
    }

    fn contains(&self) -> &'static [&'static str] {
        self.0.contains()
    }

    fn supports(&self) -> Option<Support> {
        // Row-major operands have kernels of their own.
        Some(BsrMatmulTile { a_transposed: true, ..self.tile() }.support())
    }

    fn profile_case(&self) -> Option<String> {
        self.tile().profile_case()
    }
}

#[cfg(test)]
mod tests {
    use crate::{Target, manifest};

    #[test]
    fn one_tile_of_a_block_size_takes_any_layout() {
        let kernels: Vec<_> =
            manifest::kernels().iter().filter(|kernel| kernel.takes_any_layout()).collect();
        assert_eq!(kernels.len(), 2 * 4 * 5);
        for (i, kernel) in kernels.iter().enumerate() {
            let tile = kernel.bsr_matmul_tile().unwrap();
            assert_eq!(tile.block_size, [16, 32, 64, 128][i % 4]);
            assert!(
                kernel.smem_bytes() <= 99 * 1024 && kernel.target != Target::Sm90a,
                "{kernel:?}"
            );
            assert_eq!(kernel.source(), "bsr_matmul_any_sm80");
        }
        assert_eq!(kernels[0].symbol(), "blockflash_bsr_matmul_any_sm80_f16_b16_n128_k64_w1x4_s2");
    }
}
