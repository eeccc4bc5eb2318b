use super::super::fixtures::{geometries, indices, random_blocks};
use super::*;
use crate::Error;

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn tensor(data: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), data, shape).unwrap()
}

/// 2 × 3 blocks.
fn geometry() -> BlockGeometry {
    BlockGeometry::new(100, 150, 64, 64).unwrap()
}

#[test]
fn it_is_the_mask_of_these_arrays() {
    for geometry in geometries() {
        for (batch, heads) in [(1, 1), (2, 3)] {
            let blocks = random_blocks(geometry, batch, heads, 7);
            let mask = BlockMask::from_bool(geometry, batch, heads, &blocks).unwrap();
            let (row_ptr, col_idx) = indices(&mask);
            let mut row_ptr = tensor(&row_ptr, &[batch, heads, geometry.rows() + 1]);
            let mut col_idx = tensor(&col_idx, &[col_idx.len()]);
            let found = BlockMask::from_tensors(geometry, &row_ptr, &col_idx, &cpu()).unwrap();
            assert_eq!((found.batch(), found.heads()), (batch, heads));
            // The mask has copies.
            row_ptr.fill_bytes(&cpu(), 0x7F).unwrap();
            col_idx.fill_bytes(&cpu(), 0x7F).unwrap();
            assert_eq!(found.to_bool().unwrap(), blocks);
            assert_eq!(
                found.row_order().to_vec::<i32>(&cpu()).unwrap(),
                mask.row_order().to_vec::<i32>(&cpu()).unwrap()
            );
        }
    }
}

/// Columns go to two lists by turns, in descending order.
#[test]
fn it_is_the_mask_of_these_lists() {
    for geometry in geometries() {
        let cols = geometry.cols();
        let blocks = random_blocks(geometry, 2, 2, 9);
        let lists = [0, 1].map(|parity| {
            let (mut counts, mut columns) = (Vec::new(), Vec::new());
            for row in 0..4 * geometry.rows() {
                let of_list = (0..cols).rev().filter(|col| col % 2 == parity);
                let start = columns.len();
                columns
                    .extend(of_list.filter(|col| blocks[row * cols + col]).map(|col| col as i32));
                counts.push((columns.len() - start) as i32);
                columns.resize(start + cols, i32::MIN);
            }
            let shape = [2, 2, geometry.rows(), cols];
            (tensor(&counts, &shape[..3]), tensor(&columns, &shape))
        });
        let lists = lists.each_ref().map(|(counts, columns)| BlockColumns { counts, columns });
        let mask = BlockMask::from_columns(geometry, &lists, &cpu()).unwrap();
        assert_eq!(mask.to_bool().unwrap(), blocks);
    }
}

#[test]
fn wrong_arrays_are_named() {
    let from = |row_ptr: &Tensor, col_idx: &Tensor| {
        BlockMask::from_tensors(geometry(), row_ptr, col_idx, &cpu()).unwrap_err()
    };
    let (good, columns) = (tensor(&[0, 1, 2], &[1, 1, 3]), tensor(&[0, 2], &[2]));
    for wrong in [tensor(&[0, 1, 2], &[3]), tensor(&[0, 1], &[1, 1, 2])] {
        assert!(matches!(from(&wrong, &columns), Error::Shape { what: "row_ptr", .. }));
    }
    for wrong in [tensor(&[7], &[]), tensor(&[0, 2], &[2, 1])] {
        assert!(matches!(from(&good, &wrong), Error::Shape { what: "col_idx", .. }));
    }
    let floats = |shape: &[usize]| Tensor::zeros(&cpu(), DType::F32, shape).unwrap();
    assert!(matches!(from(&floats(&[1, 1, 3]), &columns), Error::DType { what: "row_ptr", .. }));
    assert!(matches!(from(&good, &floats(&[2])), Error::DType { what: "col_idx", .. }));
    let none = tensor(&[], &[1, 0, 3]);
    assert!(from(&none, &columns).to_string().contains("heads is 0"));
    let said = |row_ptr: &[i32], col_idx: &[i32]| {
        from(&tensor(row_ptr, &[1, 1, 3]), &tensor(col_idx, &[col_idx.len()])).to_string()
    };
    assert!(said(&[0, 2, 1], &[0]).contains("descends from 2 to 1 at batch 0, head 0, row 1"));
    assert!(said(&[0, 0, 3], &[0]).contains("row_ptr ends at 3, but col_idx has 1 entries"));
    assert!(said(&[0, 1, 1], &[3]).contains("column is 3 at batch 0, head 0, row 0, position 0"));
    assert!(said(&[0, 2, 2], &[1, 0]).contains("column 0 is unsorted"));
}

#[test]
fn wrong_lists_are_named() {
    let from = |lists: &[(&Tensor, &Tensor)]| {
        let lists: Vec<_> =
            lists.iter().map(|&(counts, columns)| BlockColumns { counts, columns }).collect();
        BlockMask::from_columns(geometry(), &lists, &cpu()).unwrap_err()
    };
    assert!(from(&[]).to_string().contains("there are 0 lists of columns, expected at least 1"));
    let (counts, columns) = (tensor(&[1, 2], &[1, 1, 2]), tensor(&[2, 9, 0, 1], &[1, 1, 2, 2]));
    assert!(matches!(from(&[(&columns, &columns)]), Error::Shape { what: "counts", .. }));
    assert!(matches!(from(&[(&counts, &counts)]), Error::Shape { what: "columns", .. }));
    let twice = tensor(&[2, 0], &[1, 2, 1]);
    assert!(matches!(from(&[(&twice, &columns)]), Error::Shape { what: "counts", .. }));
    let said = |counts: &[i32], columns: &[i32]| {
        let (counts, columns) = (tensor(counts, &[1, 1, 2]), tensor(columns, &[1, 1, 2, 2]));
        from(&[(&counts, &columns)]).to_string()
    };
    for count in [-1, 3, i32::MIN] {
        let error = said(&[0, count], &[0; 4]);
        assert!(error.contains(&format!("count is {count} at batch 0, head 0, row 1")), "{error}");
    }
    assert!(said(&[0, 2], &[0, 0, 1, -1]).contains("column is -1 at batch 0, head 0, row 1"));
    assert!(said(&[1, 0], &[3, 0, 0, 0]).contains("there are 3 columns"));
    assert!(said(&[2, 0], &[1, 1, 0, 0]).contains("column 1 comes twice"));
    // Once in each list.
    let both = from(&[(&counts, &columns), (&counts, &columns)]).to_string();
    assert!(both.contains("column 2 comes twice at batch 0, head 0, row 0, position 0"), "{both}");
}
