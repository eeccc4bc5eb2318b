//! The kernels that build and transpose block masks, and compute scores for them, on a GPU.

use super::device_transpose::TransposeSizes;
use super::scores::ScoreSizes;
use super::token_buffer::BitSizes;
use super::validate::Sizes;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use blockflash_sys::manifest::Variant;
use blockflash_sys::{BlockMaskKernel, DType, Kernel};
use std::sync::LazyLock;

/// The widest head dimension whose means a kernel computes.
const MAX_HEAD_DIM: usize = 256;

/// Builds a mask. A tile is a number of neighbouring rows of a head, which one CTA builds.
impl Problem for Sizes {
    const OP: &'static str = "block_mask";
    const RULES: &'static [Rule<Self>] = &[Rule::shared_memory(None)];

    type Tile = usize;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<usize> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Build { slab_rows }) => Some(slab_rows as usize),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<Sizes> = LazyLock::new(selection::all::<Sizes>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    /// Every kernel takes every source of blocks.
    fn key(&self) -> (DType, usize) {
        (DType::I32, 0)
    }

    fn key_of(_: &usize) -> (DType, usize) {
        (DType::I32, 0)
    }
}

/// Transposes a mask. A tile is the numbers of neighbouring rows and columns of a head that a CTA
/// reads.
impl Problem for TransposeSizes {
    const OP: &'static str = "block_mask";
    const RULES: &'static [Rule<Self>] = &[Rule::shared_memory(None)];

    type Tile = [usize; 2];
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<[usize; 2]> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Transpose { slab_rows, chunk_cols }) => {
                Some([slab_rows as usize, chunk_cols as usize])
            }
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<TransposeSizes> = LazyLock::new(selection::all::<TransposeSizes>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    /// Every kernel takes every mask.
    fn key(&self) -> (DType, usize) {
        (DType::I32, 0)
    }

    fn key_of(_: &[usize; 2]) -> (DType, usize) {
        (DType::I32, 0)
    }
}

/// Makes partial blocks. A tile is the number of 64 × 64 pairs that a block may have.
impl Problem for BitSizes {
    const OP: &'static str = "block_mask";
    const RULES: &'static [Rule<Self>] = &[TILES, Rule::shared_memory(None)];

    type Tile = usize;
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<usize> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Bits { max_tiles }) => Some(max_tiles as usize),
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<BitSizes> = LazyLock::new(selection::all::<BitSizes>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (DType::I32, 0)
    }

    fn key_of(_: &usize) -> (DType, usize) {
        (DType::I32, 0)
    }
}

const TILES: Rule<BitSizes> = Rule {
    holds: |c| c.problem.block_tiles() <= *c.tile,
    refuses: |c| {
        let geometry = c.problem.0.geometry;
        format!(
            "partial blocks of {} × {}: the kernel makes blocks of at most {} times 64 × 64 pairs",
            geometry.block_q(),
            geometry.block_kv(),
            c.tile
        )
    },
    excludes_all: None,
};

/// Computes scores of blocks. A tile is the element type and the numbers of rows and columns of
/// scores.
impl Problem for ScoreSizes {
    const OP: &'static str = "block_mask";
    const RULES: &'static [Rule<Self>] = &[HEAD_DIM, Rule::shared_memory(None)];

    type Tile = (DType, usize);
    type Rank = ();

    fn tile(kernel: &Kernel) -> Option<(DType, usize)> {
        match kernel.variant {
            Variant::BlockMask(BlockMaskKernel::Scores { dtype, tile }) => {
                Some((dtype, tile as usize))
            }
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<ScoreSizes> = LazyLock::new(selection::all::<ScoreSizes>);
        &KERNELS
    }

    fn rank(_: &Candidate<'_, Self>) {}

    fn key(&self) -> (DType, usize) {
        (self.dtype, 0)
    }

    fn key_of((dtype, _): &(DType, usize)) -> (DType, usize) {
        (*dtype, 0)
    }
}

const HEAD_DIM: Rule<ScoreSizes> = Rule {
    holds: |c| {
        let head_dim = c.problem.head_dim;
        (8..=MAX_HEAD_DIM).contains(&head_dim) && head_dim.is_multiple_of(8)
    },
    refuses: |c| {
        let head_dim = c.problem.head_dim;
        format!("scores at head_dim {head_dim}: kernels take multiples of 8 up to {MAX_HEAD_DIM}")
    },
    excludes_all: None,
};

#[cfg(test)]
mod tests {
    use super::super::BlockGeometry;
    use super::*;
    use crate::Error;
    use crate::fixtures::gpu;
    use crate::selection::select;
    use blockflash_sys::Target;

    #[test]
    fn machine_code_before_ptx() {
        let geometry = BlockGeometry::new(100, 100, 64, 64).unwrap();
        let sizes = Sizes::new(geometry, 1, 1).unwrap();
        let found = |major, minor| select(&sizes, &gpu(major, minor));
        for (gpu, target) in
            [((8, 0), Target::Sm80), ((9, 0), Target::Sm90), ((10, 0), Target::Ptx80)]
        {
            assert_eq!(found(gpu.0, gpu.1).unwrap().target, target);
        }
        assert!(matches!(found(7, 5), Err(Error::Unsupported { op: "block_mask", .. })));
        let (batch, heads_q, heads_kv, head_dim) = (1, 1, 1, 64);
        let scores = ScoreSizes { geometry, dtype: DType::F32, batch, heads_q, heads_kv, head_dim };
        assert!(select(&scores, &gpu(9, 0)).is_err());
    }
}
