use super::*;
use crate::fixtures::values;
use crate::{BsrTranspose, Device, Error, Stream};
use blockflash_safe::Error as SafeError;

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// About half of the blocks of a matrix, others for each seed.
fn matrix([rows, cols]: [usize; 2], block_size: usize, dtype: DType, seed: u64) -> BsrMatrix {
    let (noise, chosen) = (values(rows * cols, seed), values(rows * cols, seed + 100));
    let triplets: Vec<(usize, usize, f32)> = (0..rows)
        .flat_map(|row| (0..cols).map(move |col| (row, col)))
        .filter(|(row, col)| chosen[row / block_size * cols + col / block_size] > 0.0)
        .map(|(row, col)| (row, col, noise[row * cols + col]))
        .collect();
    BsrMatrix::from_coo(rows, cols, block_size, dtype, &triplets).unwrap()
}

#[test]
fn matrices_lie_along_the_diagonal() {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        // Different sizes, one without rows, one without blocks, and the last one with tails.
        let empty = BsrMatrix::from_coo(8, 4, 4, dtype, &[]).unwrap();
        let parts = [
            matrix([12, 8], 4, dtype, 1),
            matrix([0, 4], 4, dtype, 2),
            empty,
            matrix([8, 20], 4, dtype, 3),
            matrix([7, 9], 4, dtype, 4),
        ];
        let found = BsrMatrix::block_diagonal(&parts.each_ref()).unwrap();
        assert_eq!(
            (found.rows(), found.cols(), found.block_size(), found.dtype()),
            (35, 45, 4, dtype)
        );
        assert_eq!(found.nnz_blocks(), parts.iter().map(|part| part.nnz_blocks()).sum::<usize>());
        let mut expected = vec![0.0; 35 * 45];
        let (mut first_row, mut first_col) = (0, 0);
        for part in &parts {
            for (at, row) in part.to_dense().unwrap().chunks(part.cols()).enumerate() {
                expected[(first_row + at) * 45 + first_col..][..row.len()].copy_from_slice(row);
            }
            (first_row, first_col) = (first_row + part.rows(), first_col + part.cols());
        }
        assert_eq!(found.to_dense().unwrap(), expected);
    }
}

#[test]
fn one_product_is_a_batch_of_products() {
    let (stream, [m, k, n]) = (cpu(), [24, 16, 5]);
    let parts = [1, 2, 3].map(|seed| matrix([m, k], 8, DType::F32, seed));
    let a = BsrMatrix::block_diagonal(&parts.each_ref()).unwrap();
    let data = values(3 * k * n, 9);
    let b = View::from_slice(&data, &[3, k, n]).unwrap();
    let found = BsrMatmul::batched(&a, b).unwrap().matmul(DType::F32, &stream).unwrap();
    assert_eq!(found.shape(), [3 * m, n]);
    let separate = parts.iter().enumerate().flat_map(|(at, part)| {
        let b = b.slice(0, at..at + 1).unwrap().flatten(0..2).unwrap();
        BsrMatmul::new(part, b).matmul(DType::F32, &stream).unwrap().to_vec::<f32>(&stream).unwrap()
    });
    assert_eq!(found.to_vec::<f32>(&stream).unwrap(), separate.collect::<Vec<_>>());

    // The transposed matrices are along the diagonal, too.
    let index = BsrTranspose::new(&a, &stream).unwrap();
    let data = values(3 * m * n, 10);
    let b = View::from_slice(&data, &[3, m, n]).unwrap();
    let product = BsrMatmul { transpose: Some(&index), ..BsrMatmul::batched(&a, b).unwrap() };
    let found = product.matmul(DType::F32, &stream).unwrap().to_vec::<f32>(&stream).unwrap();
    let separate = parts.iter().enumerate().flat_map(|(at, part)| {
        let b = b.slice(0, at..at + 1).unwrap().flatten(0..2).unwrap();
        let index = BsrTranspose::new(part, &stream).unwrap();
        let c = BsrMatmul::transposed(part, &index, b).matmul(DType::F32, &stream).unwrap();
        c.to_vec::<f32>(&stream).unwrap()
    });
    assert_eq!(found, separate.collect::<Vec<_>>());
}

#[test]
fn matrices_that_do_not_fit_are_named() {
    let refused = |matrices: &[&BsrMatrix]| BsrMatrix::block_diagonal(matrices).unwrap_err();
    let whole = matrix([8, 8], 4, DType::F32, 1);
    let cases = [
        (refused(&[]), "0 matrices, expected at least 1"),
        (
            refused(&[&whole, &matrix([8, 8], 2, DType::F32, 1)]),
            "matrix 1 of the block diagonal has blocks of 2, not 4",
        ),
        (
            refused(&[&matrix([7, 8], 4, DType::F32, 1), &whole]),
            "matrix 0 of the block diagonal is 7 x 8",
        ),
        (
            refused(&[&whole, &matrix([8, 9], 4, DType::F32, 1), &whole]),
            "matrix 1 of the block diagonal is 8 x 9",
        ),
    ];
    for (error, expected) in cases {
        assert!(
            matches!(error, Error::InvalidBsr(_)) && error.to_string().contains(expected),
            "{error}"
        );
    }
    let error = refused(&[&whole, &matrix([8, 8], 4, DType::F16, 1)]);
    assert!(matches!(error, Error::DType { found: DType::F16, .. }), "{error}");
    // 2 · 2³⁰ block columns.
    let wide = BsrMatrix::from_coo(0, 4 << 30, 4, DType::F32, &[]).unwrap();
    let error = refused(&[&wide, &wide]);
    assert!(matches!(error, Error::TooLarge { what: "block columns", .. }), "{error}");
}

#[test]
fn batches_that_do_not_fit_are_refused() {
    let a = BsrMatrix::block_diagonal(&[
        &matrix([8, 8], 4, DType::F32, 1),
        &matrix([8, 8], 4, DType::F32, 2),
    ]);
    let (a, data) = (a.unwrap(), vec![0f32; 1000]);
    let batched = |shape: &[usize], strides: &[usize]| {
        let b = View::from_slice_strided(&data, shape, strides).unwrap();
        BsrMatmul::batched(&a, b).and_then(|product| product.matmul(DType::F32, &cpu()))
    };
    assert_eq!(batched(&[2, 8, 3], &[32, 4, 1]).unwrap().shape(), [16, 3]);
    assert!(matches!(batched(&[16, 3], &[3, 1]), Err(Error::Shape { what: "b", .. })));
    assert!(matches!(batched(&[3, 8, 3], &[24, 3, 1]), Err(Error::Shape { what: "b", .. })));
    for strides in [[25, 3, 1], [0, 3, 1], [24, 1, 8]] {
        let error = batched(&[2, 8, 3], &strides).unwrap_err();
        assert!(matches!(error, Error::Safe(SafeError::Flatten { .. })), "{error}");
    }
}
