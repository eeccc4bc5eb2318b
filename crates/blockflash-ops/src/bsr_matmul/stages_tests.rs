use super::*;
use blockflash_safe::{BsrIndexArrays, BsrIndices, Device};

fn plan(
    block_size: usize,
    row_ptr: &[i32],
    col_idx: &[i32],
    order: &[i32],
) -> (Vec<i32>, Vec<i32>) {
    let plan = Stages::new(block_size, row_ptr, col_idx, order).unwrap();
    // The safe layer takes every plan that is made.
    let arrays = BsrIndexArrays {
        block_cols: col_idx.iter().max().map_or(0, |&col| col as usize + 1),
        row_ptr,
        col_idx,
        row_order: order,
        block_idx: None,
        stages: Some(plan.arrays()),
    };
    BsrIndices::new(&arrays, &Device::cpu().stream().unwrap()).unwrap();
    (plan.stages, plan.group_stages)
}

/// The blocks `(block row, block column, index among all blocks)` that a kernel would multiply, in
/// its order.
fn walked(block_size: u32, plan: &(Vec<i32>, Vec<i32>), order: &[i32]) -> Vec<(i32, i32, i32)> {
    let (stages, group_stages) = plan;
    let rows = BsrMatmulHopper::group_rows(block_size) as usize;
    let mut blocks = Vec::new();
    for (group, bounds) in group_stages.windows(2).enumerate() {
        let mut last_column = -1;
        for stage in stages[bounds[0] as usize * 64..bounds[1] as usize * 64].chunks_exact(64) {
            let (columns, count) = (stage[48], stage[49]);
            assert!((1..=BsrMatmulHopper::stage_columns(block_size) as i32).contains(&columns));
            assert!((1..=BsrMatmulHopper::stage_blocks(block_size) as i32).contains(&count));
            let mut place = 0;
            for lane in 0..16 {
                let (first, bits, at) =
                    (stage[2 * lane], stage[2 * lane + 1] & 0xFF, stage[2 * lane + 1] >> 8);
                if bits == 0 {
                    continue;
                }
                assert!(lane < rows && at == place && bits < 1 << columns);
                let own = (0..columns).filter(|column| bits >> column & 1 == 1);
                for (i, column) in own.enumerate() {
                    let column = stage[2 * (16 + column as usize)];
                    blocks.push((order[group * rows + lane], column, first + i as i32));
                }
                place += bits.count_ones() as i32;
            }
            assert_eq!(place, count);
            for i in 0..columns as usize {
                assert!(stage[2 * (16 + i)] > last_column, "columns of a group ascend");
                last_column = stage[2 * (16 + i)];
            }
        }
    }
    blocks
}

#[test]
fn two_rows_that_share_a_column() {
    // Row 1 comes first. Columns 2 | 2, 5.
    let plan = plan(32, &[0, 1, 3], &[2, 2, 5], &[1, 0]);
    let stage = &plan.0;
    assert_eq!(plan.1, [0, 1]);
    assert_eq!(stage[..6], [1, 0b11, 0, 0b01 | 2 << 8, 0, 0]);
    assert_eq!(stage[32..38], [2, 0, 5, 0, 0, 0]);
    assert_eq!(stage[48..50], [2, 3]);
    assert_eq!(walked(32, &plan, &[1, 0]), [(1, 2, 1), (1, 5, 2), (0, 2, 0)]);
}

#[test]
fn rows_without_blocks_have_no_stages() {
    assert_eq!(plan(16, &[0; 34], &[], &(0..33).collect::<Vec<_>>()), (vec![], vec![0, 0, 0, 0]));
    assert_eq!(plan(16, &[0], &[], &[]), (vec![], vec![0]));
}

#[test]
fn other_blocks_have_no_plan() {
    for block_size in [1, 8, 24, 64, 128] {
        assert!(Stages::new(block_size, &[0, 1], &[0], &[0]).is_none());
    }
}

#[test]
fn full_columns_fit() {
    for (block, rows) in [(16, 16), (32, 8)] {
        let row_ptr: Vec<i32> = (0..=rows).map(|row| row * 9).collect();
        let col_idx: Vec<i32> = (0..rows).flat_map(|_| 0..9).collect();
        let order: Vec<i32> = (0..rows).collect();
        let plan = plan(block as usize, &row_ptr, &col_idx, &order);
        assert_eq!(walked(block, &plan, &order).len(), 9 * rows as usize);
    }
}

/// Every stored block is multiplied once, with its own column, and nothing else.
#[test]
fn every_block_once() {
    // Numbers without a pattern.
    let random = |a: usize, b: usize, c: usize| {
        (a * 7919 + b * 104_729 + c * 1_299_709 + 17).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40
    };
    for case in 0..60 {
        let block = [16, 32][case % 2];
        let (rows, cols, density) =
            (1 + random(case, 0, 1) % 50, 1 + random(case, 0, 2) % 70, case / 2 % 11);
        let mut row_ptr = vec![0];
        let mut expected = Vec::new();
        for row in 0..rows {
            for col in (0..cols).filter(|col| random(case, row, *col) % 10 < density) {
                expected.push((row as i32, col as i32, expected.len() as i32));
            }
            row_ptr.push(expected.len() as i32);
        }
        let col_idx: Vec<i32> = expected.iter().map(|&(_, col, _)| col).collect();
        let mut order: Vec<i32> = (0..rows as i32).collect();
        order.sort_by_key(|&row| random(case, row as usize, 3));
        let mut blocks = walked(block, &plan(block as usize, &row_ptr, &col_idx, &order), &order);
        blocks.sort_unstable();
        assert_eq!(blocks, expected, "case {case}");
    }
}
