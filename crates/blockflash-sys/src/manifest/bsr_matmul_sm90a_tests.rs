use super::*;
use crate::manifest::{self, Variant};
use crate::{Expect, Kernel};

fn rows(source: &str) -> Vec<(&'static Kernel, BsrMatmulHopper)> {
    let rows = manifest::kernels().iter().filter_map(|row| match row.variant {
        Variant::BsrMatmulHopper(tile) if row.source() == source => Some((row, tile)),
        _ => None,
    });
    rows.inspect(|(row, tile)| {
        assert_eq!((row.target, row.bsr_tile()), (Target::Sm90a, Some(tile.tile())));
        assert!(
            row.smem_bytes() <= row.target.smem_limit(),
            "{}: {}",
            row.symbol(),
            row.smem_bytes()
        );
        // Three stages at least: one is multiplied, one read to the end, one on its way.
        assert!(tile.stages >= 3, "{}", row.symbol());
    })
    .collect()
}

#[test]
fn hopper_rows() {
    let rows = rows("bsr_matmul_sm90a");
    assert_eq!(rows.len(), 2 * (8 + 3 * 5));
    for (row, tile) in &rows {
        assert_eq!(row.threads(), 384);
        assert!(row.expects().contains(&Expect::Contains("HGMMA")));
        assert!(
            matches!((tile.block_size, tile.block_rows), (64, 1 | 2) | (128, 1)),
            "{}",
            row.symbol()
        );
    }
    let (row, _) = rows[0];
    assert_eq!(row.symbol(), "blockflash_bsr_matmul_sm90a_f16_b64_r2_n256_s4");
    assert_eq!(row.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
    assert!(row.macros().contains(&("VARIANT_CONSUMER_WARPGROUPS", "2".to_owned())));
    for (row, tile) in &rows {
        let suffix = ["", "_tb", "_ta", "_ta_tb"]
            [usize::from(tile.a_transposed) * 2 + usize::from(tile.b_column_major)];
        let cluster = if tile.cluster > 1 { "_c2" } else { "" };
        assert!(
            row.symbol().ends_with(&format!("_s{}{cluster}{suffix}", tile.stages)),
            "{}",
            row.symbol()
        );
        assert_eq!(row.cluster(), (tile.cluster > 1).then_some([2, 1, 1]), "{}", row.symbol());
        let flags = [
            ("VARIANT_A_TRANSPOSED", tile.a_transposed),
            ("VARIANT_B_COLUMN_MAJOR", tile.b_column_major),
        ];
        for (name, flag) in flags {
            assert!(row.macros().contains(&(name, u32::from(flag).to_string())), "{name}");
        }
        // One box holds all columns of a column-major B.
        assert!(!tile.b_column_major || tile.block_n <= 256, "{}", row.symbol());
    }
    let widest =
        rows.iter().find(|(_, tile)| (tile.block_size, tile.block_n) == (128, 256)).unwrap().0;
    assert_eq!(widest.smem_bytes(), 4 * 48 * 1024 + 1024 + 8 * 2 * 16 * 64 * 2);
}

#[test]
fn rows_that_gather() {
    let rows = rows("bsr_matmul_gather_sm90a");
    assert_eq!(rows.len(), 2 * 7);
    for (row, tile) in &rows {
        assert!(!tile.a_transposed && !tile.b_column_major, "{}", row.symbol());
        assert!(row.expects().contains(&Expect::Contains("HMMA")));
        // A warp per block row, but eight at least.
        let warps = tile.block_rows.max(8);
        assert!(
            warps % tile.block_rows == 0 && row.threads() == 128 + 32 * warps,
            "{}",
            row.symbol()
        );
        assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
        assert!(
            BsrMatmulHopper::stage_blocks(tile.block_size) >= tile.block_rows,
            "{}",
            row.symbol()
        );
    }
    let (row, _) = rows[0];
    assert_eq!(row.symbol(), "blockflash_bsr_matmul_gather_sm90a_f16_b16_r16_n128_s4");
    assert_eq!(row.smem_bytes(), 4 * 48 * 1024 + 1024 + 16 * 16 * 20 * 4);
    for (name, value) in [("VARIANT_CONSUMER_WARPGROUPS", "4"), ("VARIANT_BLOCK_K", "16")] {
        assert!(row.macros().contains(&(name, value.to_owned())), "{name}");
    }
}

#[test]
fn rows_filled_with_zeros() {
    let rows = rows("bsr_matmul_filled_sm90a");
    assert_eq!(rows.len(), 2);
    for (row, tile) in &rows {
        assert!(tile.gathers() && tile.filled && tile.splits(), "{}", row.symbol());
        // Two warpgroups in each of two blocks multiply 64 rows each: the group of the plan.
        assert_eq!((row.threads(), row.cluster()), (384, Some([2, 1, 1])), "{}", row.symbol());
        assert_eq!(tile.block_rows, BsrMatmulHopper::group_rows(tile.block_size));
        assert!(row.expects().contains(&Expect::Contains("HGMMA")));
        assert!(row.macros().contains(&("VARIANT_FILLED", "1".to_owned())));
    }
    let (row, _) = rows[0];
    assert_eq!(row.symbol(), "blockflash_bsr_matmul_filled_sm90a_f16_b32_r8_n128_s8_c2");
    // Half of 256 rows and all of 256 columns, 32 deep.
    assert_eq!(row.smem_bytes(), 8 * (128 + 256) * 32 * 2 + 1024 + 8 * 2 * 16 * 64 * 2);
}
