use super::*;
use crate::manifest::{self, Variant};
use crate::{Expect, Kernel};

fn kernels_of(source: &str) -> Vec<(&'static Kernel, BsrMatmulHopper)> {
    let kernels = manifest::kernels().iter().filter_map(|kernel| match kernel.variant {
        Variant::BsrMatmulHopper(tile) if kernel.source() == source => Some((kernel, tile)),
        _ => None,
    });
    kernels
        .inspect(|(kernel, tile)| {
            assert_eq!(
                (kernel.target, kernel.bsr_matmul_tile()),
                (Target::Sm90a, Some(tile.tile()))
            );
            assert!(
                kernel.smem_bytes() <= kernel.target.smem_limit(),
                "{}: {}",
                kernel.symbol(),
                kernel.smem_bytes()
            );
            // Three stages at least: one is multiplied, one read to the end, one on its way.
            assert!(tile.stages >= 3, "{}", kernel.symbol());
        })
        .collect()
}

#[test]
fn tensor_map_kernels() {
    let kernels = kernels_of("bsr_matmul_sm90a");
    assert_eq!(kernels.len(), 2 * (10 + 3 * 5));
    for (kernel, tile) in &kernels {
        assert_eq!(kernel.threads(), 384);
        assert!(kernel.expects().contains(&Expect::Contains("HGMMA")));
        assert!(
            matches!((tile.block_size, tile.block_rows), (64, 1 | 2) | (128, 1)),
            "{}",
            kernel.symbol()
        );
    }
    let (kernel, _) = kernels[0];
    assert_eq!(kernel.symbol(), "blockflash_bsr_matmul_sm90a_f16_b64_r2_n256_s4");
    assert_eq!(kernel.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
    assert!(kernel.macros().contains(&("VARIANT_CONSUMER_WARPGROUPS", "2".to_owned())));
    for (kernel, tile) in &kernels {
        let suffix = ["", "_tb", "_ta", "_ta_tb"]
            [usize::from(tile.a_transposed) * 2 + usize::from(tile.b_column_major)];
        let cluster = if tile.cluster > 1 { "_c2" } else { "" };
        assert!(
            kernel.symbol().ends_with(&format!("_s{}{cluster}{suffix}", tile.stages)),
            "{}",
            kernel.symbol()
        );
        assert_eq!(
            kernel.cluster(),
            (tile.cluster > 1).then_some([2, 1, 1]),
            "{}",
            kernel.symbol()
        );
        let flags = [
            ("VARIANT_A_TRANSPOSED", tile.a_transposed),
            ("VARIANT_B_COLUMN_MAJOR", tile.b_column_major),
        ];
        for (name, flag) in flags {
            assert!(kernel.macros().contains(&(name, u32::from(flag).to_string())), "{name}");
        }
        // As many as share an SM, with a kilobyte each for the system.
        let all = tile.blocks_per_multiprocessor * (kernel.smem_bytes() + 1024);
        assert!(all <= 228 * 1024, "{}", kernel.symbol());
        // One box holds all columns of a column-major B.
        assert!(!tile.b_column_major || tile.block_n <= 256, "{}", kernel.symbol());
    }
    let widest =
        kernels.iter().find(|(_, tile)| (tile.block_size, tile.block_n) == (128, 256)).unwrap().0;
    assert_eq!(widest.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
}

#[test]
fn rows_that_gather() {
    let kernels = kernels_of("bsr_matmul_gather_sm90a");
    assert_eq!(kernels.len(), 2 * 7);
    for (kernel, tile) in &kernels {
        assert!(!tile.a_transposed && !tile.b_column_major, "{}", kernel.symbol());
        assert!(kernel.expects().contains(&Expect::Contains("HMMA")));
        // A warp per block row, but eight at least.
        let warps = tile.block_rows.max(8);
        assert!(
            warps % tile.block_rows == 0 && kernel.threads() == 128 + 32 * warps,
            "{}",
            kernel.symbol()
        );
        assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
        assert!(
            BsrMatmulHopper::stage_blocks(tile.block_size) >= tile.block_rows,
            "{}",
            kernel.symbol()
        );
    }
    let (kernel, _) = kernels[0];
    assert_eq!(kernel.symbol(), "blockflash_bsr_matmul_gather_sm90a_f16_b16_r16_n128_s4");
    assert_eq!(kernel.smem_bytes(), 4 * 48 * 1024 + 1024 + 16 * 16 * 20 * 4);
    for (name, value) in [("VARIANT_CONSUMER_WARPGROUPS", "4"), ("VARIANT_BLOCK_K", "16")] {
        assert!(kernel.macros().contains(&(name, value.to_owned())), "{name}");
    }
}

#[test]
fn rows_filled_with_zeros() {
    let kernels = kernels_of("bsr_matmul_filled_sm90a");
    assert_eq!(kernels.len(), 2);
    for (kernel, tile) in &kernels {
        assert!(tile.gathers() && tile.filled && tile.splits(), "{}", kernel.symbol());
        // Two warpgroups in each of two blocks multiply 64 rows each: the group of the plan.
        assert_eq!(
            (kernel.threads(), kernel.cluster()),
            (384, Some([2, 1, 1])),
            "{}",
            kernel.symbol()
        );
        assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
        assert!(kernel.expects().contains(&Expect::Contains("HGMMA")));
        assert!(kernel.macros().contains(&("VARIANT_FILLED", "1".to_owned())));
    }
    let (kernel, _) = kernels[0];
    assert_eq!(kernel.symbol(), "blockflash_bsr_matmul_filled_sm90a_f16_b32_r8_n128_s8_c2");
    // Half of 256 rows and all of 256 columns, 32 deep.
    assert_eq!(kernel.smem_bytes(), 8 * (128 + 256) * 32 * 2 + 1024 + 8 * 2 * 16 * 64 * 2);
}
