use super::*;
use crate::fixtures::values;
use crate::{BsrTranspose, Device};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Index arrays of about a third of 9 × 7 blocks.
fn indices(seed: u64) -> [Vec<i32>; 2] {
    let noise = values(9 * 7, seed);
    let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
    for row in noise.chunks(7) {
        col_idx.extend((0..7).filter(|&col| row[col as usize] > 0.3));
        row_ptr.push(col_idx.len() as i32);
    }
    [row_ptr, col_idx]
}

fn tensors(row_ptr: &[i32], col_idx: &[i32], block_size: usize) -> [Tensor; 3] {
    let blocks = values(col_idx.len() * block_size * block_size, 3);
    [
        Tensor::from_slice(&cpu(), row_ptr, &[row_ptr.len()]).unwrap(),
        Tensor::from_slice(&cpu(), col_idx, &[col_idx.len()]).unwrap(),
        Tensor::from_slice(&cpu(), &blocks, &[col_idx.len(), block_size, block_size]).unwrap(),
    ]
}

fn build([rows, cols, block_size]: [usize; 3], arrays: [Tensor; 3]) -> Result<BsrMatrix> {
    let [row_ptr, col_idx, values] = arrays;
    BsrMatrix::from_tensors(rows, cols, block_size, &row_ptr, &col_idx, values, &cpu())
}

#[test]
fn it_is_the_matrix_of_these_arrays() {
    for block_size in [1, 8, 16, 32, 64] {
        let [row_ptr, col_idx] = indices(block_size as u64);
        let (rows, cols) = (9 * block_size, 7 * block_size);
        let arrays = tensors(&row_ptr, &col_idx, block_size);
        let parts =
            BsrMatrix::from_parts(rows, cols, block_size, &row_ptr, &col_idx, arrays[2].view())
                .unwrap();
        let matrix = build([rows, cols, block_size], arrays).unwrap();
        assert_eq!(matrix.to_dense().unwrap(), parts.to_dense().unwrap());
        matrix.has_pattern_of(&parts).unwrap();
        let [found, expected] =
            [&matrix, &parts].map(|of| of.row_order().to_vec::<i32>(&cpu()).unwrap());
        assert_eq!(found, expected);
        BsrTranspose::new(&parts, &cpu()).unwrap().is_of(&matrix).unwrap();
    }
    let nothing = build([64, 0, 16], tensors(&[0; 5], &[], 16)).unwrap();
    assert_eq!((nothing.nnz_blocks(), nothing.longest_row()), (0, 0));
}

#[test]
fn the_indices_are_copies() {
    let [row_ptr, col_idx] = indices(5);
    let [mut rows, mut columns, values] = tensors(&row_ptr, &col_idx, 16);
    let matrix =
        BsrMatrix::from_tensors(9 * 16, 7 * 16, 16, &rows, &columns, values, &cpu()).unwrap();
    let dense = matrix.to_dense().unwrap();
    rows.fill_bytes(&cpu(), 0x7F).unwrap();
    columns.fill_bytes(&cpu(), 0x7F).unwrap();
    assert_eq!(matrix.row_ptr().to_vec::<i32>(&cpu()).unwrap(), row_ptr);
    assert_eq!(matrix.col_idx().to_vec::<i32>(&cpu()).unwrap(), col_idx);
    assert_eq!(matrix.to_dense().unwrap(), dense);
}

#[test]
fn values_beyond_the_matrix_are_checked() {
    // Rows 0..15 and columns 0..14 in blocks of 8: both edges hang over.
    let arrays = || tensors(&[0, 1, 2], &[0, 1], 8);
    let error = build([15, 14, 8], arrays()).unwrap_err();
    assert!(matches!(
        error,
        Error::NonzeroPadding { block: 1, block_row: 1, block_col: 1, row: 0, col: 6 }
    ));
    let mut padded = arrays();
    let mut blocks = padded[2].to_vec::<f32>(&cpu()).unwrap();
    for (at, value) in blocks[64..].iter_mut().enumerate() {
        if at / 8 == 7 || at % 8 >= 6 {
            *value = 0.0;
        }
    }
    padded[2].copy_from_slice(&cpu(), &blocks).unwrap();
    assert!(build([15, 14, 8], padded).unwrap().has_edge_blocks());
}

#[test]
fn wrong_arrays_are_named() {
    let said = |sizes, arrays| build(sizes, arrays).unwrap_err().to_string();
    let sizes = [16, 16, 8];
    let of_indices = |row_ptr: &[i32], col_idx: &[i32]| said(sizes, tensors(row_ptr, col_idx, 8));
    assert!(of_indices(&[0, 1], &[0]).contains("row_ptr has 2 entries, expected 3"));
    assert!(of_indices(&[1, 1, 1], &[0]).contains("row_ptr[0] is 1"));
    assert!(of_indices(&[0, 2, 1], &[0, 1]).contains("descends from 2 to 1 at block row 1"));
    assert!(of_indices(&[0, 1, 1], &[2]).contains("col_idx[0] is 2 in block row 0"));
    assert!(of_indices(&[0, 0, 2], &[1, 0]).contains("block column 0 is unsorted in block row 1"));
    let good = || tensors(&[0, 1, 2], &[0, 1], 8);
    assert!(said([16, 16, 0], good()).contains("block_size is 0"));
    let with = |at: usize, tensor: Tensor| {
        let mut arrays = good();
        arrays[at] = tensor;
        build(sizes, arrays).unwrap_err()
    };
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
    for (at, name) in [(0, "row_ptr"), (1, "col_idx")] {
        let error = with(at, zeros(DType::F32, &[3 - at]));
        assert!(matches!(error, Error::DType { what, .. } if what == name));
        let error = with(at, zeros(DType::I32, &[1, 3 - at]));
        assert!(matches!(error, Error::Shape { what, .. } if what == name));
    }
    assert!(matches!(with(2, zeros(DType::I32, &[2, 8, 8])), Error::DType { what: "values", .. }));
    assert!(matches!(with(2, zeros(DType::F16, &[3, 8, 8])), Error::Shape { what: "values", .. }));
}
