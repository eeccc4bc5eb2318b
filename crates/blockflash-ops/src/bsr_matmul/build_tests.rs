use super::*;
use crate::fixtures::values;
use blockflash_safe::View;

/// 5 × 7, row-major, with zeros.
const DENSE: [f32; 35] = [
    1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, //
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, //
    0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, //
    0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, //
    0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 6.0, //
];

fn dense() -> View<'static> {
    View::from_slice(&DENSE, &[5, 7]).unwrap()
}

fn indices(matrix: &BsrMatrix) -> (Vec<i32>, Vec<i32>) {
    let read = |tensor: &Tensor| tensor.view().as_slice::<i32>().unwrap().to_vec();
    (read(matrix.row_ptr()), read(matrix.col_idx()))
}

fn problem(result: Result<BsrMatrix>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn dense_and_back() {
    for block_size in [1, 2, 3, 4, 7, 16] {
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let matrix = BsrMatrix::from_dense(dense(), block_size, dtype).unwrap();
            assert_eq!(matrix.to_dense().unwrap(), DENSE, "block {block_size}");
            assert_eq!((matrix.rows(), matrix.cols(), matrix.block_size()), (5, 7, block_size));
            assert_eq!((matrix.dtype(), matrix.device()), (dtype, Device::cpu()));
        }
    }
    let matrix = BsrMatrix::from_dense(dense(), 2, DType::F32).unwrap();
    assert_eq!(indices(&matrix), (vec![0, 2, 3, 5], vec![0, 3, 1, 2, 3]));
    assert_eq!((matrix.block_rows(), matrix.block_cols(), matrix.nnz_blocks()), (3, 4, 5));
    assert_eq!((matrix.density(), matrix.longest_row()), (5.0 / 12.0, 2));
    let order = matrix.row_order().view();
    assert_eq!(order.as_slice::<i32>().unwrap(), [0, 2, 1]);
}

#[test]
fn strided_and_half_precision_sources() {
    let transposed = dense().permute(&[1, 0]).unwrap();
    let matrix = BsrMatrix::from_dense(transposed, 3, DType::F32).unwrap();
    let expected: Vec<f32> = (0..35).map(|at| DENSE[at % 5 * 7 + at / 5]).collect();
    assert_eq!(matrix.to_dense().unwrap(), expected);
    let halves = DENSE.map(f16::from_f32);
    let matrix =
        BsrMatrix::from_dense(View::from_slice(&halves, &[5, 7]).unwrap(), 2, DType::BF16).unwrap();
    assert_eq!(matrix.to_dense().unwrap(), DENSE);
}

#[test]
fn nan_is_stored_and_zero_is_not() {
    let values = [f32::NAN, -0.0, 0.0, 0.0];
    let matrix =
        BsrMatrix::from_dense(View::from_slice(&values, &[2, 2]).unwrap(), 1, DType::F16).unwrap();
    assert_eq!(indices(&matrix), (vec![0, 1, 1], vec![0]));
}

#[test]
fn coo_and_csr_are_the_same_matrix() {
    let mut triplets: Vec<(usize, usize, f32)> =
        (0..35).filter(|&at| DENSE[at] != 0.0).map(|at| (at / 7, at % 7, DENSE[at])).collect();
    triplets.reverse();
    let (row_ptr, col_idx) = ([0, 2, 2, 3, 4, 6], [6, 0, 3, 2, 6, 4]);
    let data = [2.0, 1.0, 3.0, 4.0, 6.0, 5.0];
    for block_size in [1, 2, 3, 8] {
        let expected = BsrMatrix::from_dense(dense(), block_size, DType::F16).unwrap();
        let coo = BsrMatrix::from_coo(5, 7, block_size, DType::F16, &triplets).unwrap();
        let csr =
            BsrMatrix::from_csr(5, 7, block_size, DType::F16, &row_ptr, &col_idx, &data).unwrap();
        for matrix in [coo, csr] {
            assert_eq!(indices(&matrix), indices(&expected));
            assert_eq!(matrix.to_dense().unwrap(), DENSE);
        }
    }
    // A triplet stores its block, whatever its value.
    let zero = BsrMatrix::from_coo(5, 7, 2, DType::F32, &[(4, 0, 0.0)]).unwrap();
    assert_eq!(indices(&zero), (vec![0, 0, 0, 1], vec![0]));
}

#[test]
fn bad_triplets_are_named() {
    let coo = |triplets: &[(usize, usize, f32)]| {
        problem(BsrMatrix::from_coo(5, 7, 2, DType::F32, triplets))
    };
    assert!(coo(&[(0, 0, 1.0), (5, 0, 1.0)]).contains("triplet 1 is at (5, 0), beyond 5 x 7"));
    assert!(coo(&[(0, 7, 1.0)]).contains("triplet 0 is at (0, 7)"));
    assert!(coo(&[(3, 4, 1.0), (0, 0, 1.0), (3, 4, 2.0)]).contains("element (3, 4) comes twice"));
    let integers = BsrMatrix::from_coo(5, 7, 2, DType::I32, &[(0, 0, 1.0)]);
    assert!(problem(integers).contains("values is i32, expected f16, bf16 or f32"));
}

#[test]
fn bad_csr_is_named() {
    let csr = |row_ptr: &[i32], col_idx: &[i32], values: &[f32]| {
        problem(BsrMatrix::from_csr(2, 7, 2, DType::F32, row_ptr, col_idx, values))
    };
    assert!(csr(&[0, 1], &[0], &[1.0]).contains("row_ptr has 2 entries, expected 2 + 1"));
    assert!(csr(&[], &[], &[]).contains("row_ptr has 0 entries"));
    assert!(csr(&[1, 1, 1], &[0], &[1.0]).contains("row_ptr[0] is 1, not 0"));
    assert!(csr(&[0, 2, 1], &[0], &[1.0]).contains("descends from 2 to 1 at row 1"));
    assert!(csr(&[0, 1, 2], &[0], &[1.0]).contains("ends at 2, with 1 columns and 1 values"));
    assert!(csr(&[0, 1, 2], &[0], &[1.0, 1.0]).contains("with 1 columns and 2 values"));
    assert!(csr(&[0, 1, 2], &[0, -1], &[1.0, 1.0]).contains("col_idx[1] is -1, not 0 to 7 - 1"));
    assert!(csr(&[0, 1, 2], &[0, 7], &[1.0, 1.0]).contains("(1, 7), beyond 2 x 7"));
    assert!(csr(&[0, 2, 2], &[3, 3], &[1.0, 1.0]).contains("(0, 3) comes twice"));
}

#[test]
fn blocks_are_sorted() {
    let blocks = [(2, 1), (0, 3), (2, 0), (0, 0)];
    let mut data = values(16, 1);
    // Rows and columns beyond 5 x 7: the second row of block row 2, the second column of block
    // column 3.
    for at in [2, 3, 5, 7, 10, 11] {
        data[at] = 0.0;
    }
    let matrix = BsrMatrix::from_blocks(5, 7, 2, DType::F32, &blocks, &data).unwrap();
    assert_eq!(indices(&matrix), (vec![0, 2, 2, 4], vec![0, 3, 0, 1]));
    let dense = matrix.to_dense().unwrap();
    assert_eq!(dense[..2], data[12..14]);
    assert_eq!((dense[6], dense[13]), (data[4], data[6]));
    assert_eq!(dense[28..32], [data[8], data[9], data[0], data[1]]);
}

#[test]
fn bad_blocks_are_named() {
    let blocks = |blocks: &[(usize, usize)], values: &[f32]| {
        problem(BsrMatrix::from_blocks(5, 7, 2, DType::F32, blocks, values))
    };
    assert!(blocks(&[(3, 0)], &[0.0; 4]).contains("block 0 is at (3, 0), beyond 3 x 4 blocks"));
    assert!(blocks(&[(0, 0), (0, 4)], &[0.0; 8]).contains("block 1 is at (0, 4)"));
    assert!(blocks(&[(1, 1), (0, 0), (1, 1)], &[0.0; 12]).contains("block (1, 1) comes twice"));
    assert!(blocks(&[(0, 0)], &[0.0; 5]).contains("5 values, expected 1 blocks of 4"));
    assert!(blocks(&[(2, 0)], &[1.0; 4]).contains("not zero at (1, 0), beyond the matrix"));
    let size = problem(BsrMatrix::from_blocks(5, 7, 0, DType::F32, &[], &[]));
    assert!(size.contains("block_size is 0"));
}

#[test]
fn parts_are_checked() {
    let data = [1f32; 8];
    let parts = |row_ptr: &[i32], col_idx: &[i32], shape: &[usize]| {
        let values = View::from_slice(&data[..shape.iter().product()], shape).unwrap();
        BsrMatrix::from_parts(4, 4, 2, row_ptr, col_idx, values)
    };
    let good = parts(&[0, 0, 2], &[0, 1], &[2, 2, 2]).unwrap();
    assert_eq!(good.to_dense().unwrap()[8..], [1.0; 8]);
    let order = good.row_order().view();
    assert_eq!(order.as_slice::<i32>().unwrap(), [1, 0]);
    let copy = good.to(&Device::cpu().stream().unwrap()).unwrap();
    assert_eq!([good.longest_row(), copy.longest_row()], [2; 2]);
    assert!(problem(parts(&[0, 0, 2], &[1, 0], &[2, 2, 2])).contains("unsorted in block row 1"));
    assert!(problem(parts(&[0, 2, 1], &[0, 1], &[2, 2, 2])).contains("descends"));
    assert!(
        problem(parts(&[0, 0, 2], &[0, 1], &[1, 2, 2]))
            .contains("values has shape [1, 2, 2], expected [2, 2, 2]")
    );
    assert!(problem(parts(&[0, 0, 2], &[0, 1], &[2, 4])).contains("values has shape"));
    let gaps = View::from_slice_strided(&data, &[1, 2, 2], &[4, 3, 1]).unwrap();
    let error = BsrMatrix::from_parts(4, 4, 2, &[0, 0, 1], &[0], gaps);
    assert!(problem(error).contains("without gaps"));
    let ints = [0i32; 4];
    let ints = View::from_slice(&ints, &[1, 2, 2]).unwrap();
    assert!(
        problem(BsrMatrix::from_parts(4, 4, 2, &[0, 0, 1], &[0], ints)).contains("values is i32")
    );
    let values = View::from_slice(&data[..4], &[1, 2, 2]).unwrap();
    let padding = BsrMatrix::from_parts(4, 3, 2, &[0, 1, 1], &[1], values);
    assert!(matches!(
        padding,
        Err(Error::NonzeroPadding { block_row: 0, block_col: 1, row: 0, col: 1, .. })
    ));
}

#[test]
fn empty_matrices() {
    for (rows, cols) in [(0, 0), (0, 5), (5, 0), (5, 7)] {
        let matrix = BsrMatrix::from_coo(rows, cols, 4, DType::F16, &[]).unwrap();
        assert_eq!((matrix.nnz_blocks(), matrix.density()), (0, 0.0));
        assert_eq!(matrix.to_dense().unwrap(), vec![0.0; rows * cols]);
        let copy = matrix.to(&Device::cpu().stream().unwrap()).unwrap();
        assert_eq!(indices(&copy), indices(&matrix));
    }
    assert!(
        problem(BsrMatrix::from_dense(View::from_slice(&DENSE, &[35]).unwrap(), 2, DType::F16))
            .contains("[rows, cols]")
    );
    let wide = BsrMatrix::from_coo(1 << 31, 1 << 31, 1024, DType::F16, &[]).unwrap();
    let error = wide.to_dense().unwrap_err();
    assert!(matches!(error, Error::Safe(blockflash_safe::Error::OutOfMemory { .. })), "{error}");
}
