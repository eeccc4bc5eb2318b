//! Bad block-sparse matrices and products.

use super::{cpu, f16s, f32s, i32s};
use blockflash_ops::{
    Bias, BsrMatmul, BsrMatrix, BsrTranspose, DType, Error, Tensor, View, ViewMut,
};
use half::f16;

#[test]
fn bsr_products() {
    let stream = cpu();
    let a = BsrMatrix::from_coo(40, 70, 16, DType::F16, &[(3, 5, 1.0), (39, 69, 2.0)]).unwrap();
    let b = f16s(&[70, 9]);
    let base = BsrMatmul::new(&a, b.view());
    let run = |call: BsrMatmul<'_>, c: &[usize]| call.matmul_into(f32s(c).view_mut(), &stream);
    run(base, &[40, 9]).unwrap();
    assert_error!(run(base, &[40, 8]), Error::Shape { what: "c", .. }, "c", "[40, 8]");
    assert_error!(run(base, &[9, 40]), Error::Shape { what: "c", .. }, "c");
    assert_error!(run(base, &[360]), Error::Shape { what: "c", .. }, "c");
    let other = f16s(&[71, 9]);
    assert_error!(
        run(BsrMatmul { b: other.view(), ..base }, &[40, 9]),
        Error::Shape { what: "b", .. },
        "b",
        "70"
    );
    let other = f16s(&[630]);
    assert_error!(
        run(BsrMatmul { b: other.view(), ..base }, &[40, 9]),
        Error::Shape { what: "b", .. },
        "b"
    );
    let other = f32s(&[70, 9]);
    assert_error!(
        run(BsrMatmul { b: other.view(), ..base }, &[40, 9]),
        Error::DType { what: "b", .. },
        "b",
        "f32"
    );
    let columns = f16s(&[9, 70]);
    run(BsrMatmul { b: columns.view().permute(&[1, 0]).unwrap(), ..base }, &[40, 9]).unwrap();
    let spread = vec![f16::ONE; 70 * 18];
    let spread = View::from_slice_strided(&spread, &[70, 9], &[18, 2]).unwrap();
    let spread = BsrMatmul { b: spread, ..base };
    assert_error!(
        run(spread, &[40, 9]),
        Error::Stride { what: "b", .. },
        "b",
        "rows",
        "columns",
        "contiguous"
    );
    let mut c = vec![0f32; 40 * 18];
    let c = ViewMut::from_slice_strided(&mut c, &[40, 9], &[18, 2]).unwrap();
    assert_error!(
        base.matmul_into(c, &stream),
        Error::Stride { what: "c", .. },
        "c",
        "rows",
        "columns"
    );
    let ints = base.matmul_into(i32s(&[0; 360]).view_mut(), &stream);
    assert_error!(ints, Error::Shape { .. } | Error::DType { .. }, "c");
    for bad in [f32::NAN, f32::INFINITY] {
        assert_error!(
            run(BsrMatmul { alpha: bad, ..base }, &[40, 9]),
            Error::InvalidScale { what: "alpha", .. },
            "alpha"
        );
        assert_error!(
            run(BsrMatmul { beta: bad, ..base }, &[40, 9]),
            Error::InvalidScale { what: "beta", .. },
            "beta"
        );
    }
    let bias = |bias: &Tensor, per_row| {
        let bias = if per_row { Bias::PerRow(bias.view()) } else { Bias::PerColumn(bias.view()) };
        run(BsrMatmul { bias, ..base }, &[40, 9])
    };
    bias(&f16s(&[40]), true).unwrap();
    bias(&f16s(&[9]), false).unwrap();
    assert_error!(bias(&f16s(&[9]), true), Error::Shape { what: "bias", .. }, "bias", "[9]");
    assert_error!(bias(&f16s(&[40]), false), Error::Shape { what: "bias", .. }, "bias");
    assert_error!(bias(&f32s(&[40]), true), Error::DType { what: "bias", .. }, "bias", "f32");
    assert_error!(
        BsrMatmul { beta: 1.0, ..base }.matmul(DType::F32, &stream),
        Error::InvalidScale { .. },
        "beta"
    );
    assert_error!(base.matmul(DType::I32, &stream), Error::DType { what: "c", .. }, "c", "i32");
}

#[test]
fn bsr_transposes() {
    let stream = cpu();
    let coo = |block, triplets: &[(usize, usize, f32)]| {
        BsrMatrix::from_coo(40, 70, block, DType::F16, triplets).unwrap()
    };
    let a = coo(16, &[(3, 5, 1.0), (39, 69, 2.0)]);
    let index = BsrTranspose::new(&a, &stream).unwrap();
    let (b, x) = (f16s(&[40, 9]), f16s(&[9, 40]));
    let run = |a: &BsrMatrix, c: &[usize]| {
        BsrMatmul::transposed(a, &index, b.view()).matmul_into(f32s(c).view_mut(), &stream)
    };
    run(&a, &[70, 9]).unwrap();
    assert_error!(run(&a, &[40, 9]), Error::Shape { what: "c", .. }, "c", "[70, 9]");
    let wide = f16s(&[70, 9]);
    let wide = BsrMatmul { b: wide.view(), ..BsrMatmul::transposed(&a, &index, b.view()) };
    assert_error!(wide.matmul(DType::F32, &stream), Error::Shape { what: "b", .. }, "b", "[40, 9]");
    // Fewer blocks, other blocks, another block size, another shape.
    for other in [
        coo(16, &[(3, 5, 1.0)]),
        coo(16, &[(3, 5, 1.0), (39, 0, 2.0)]),
        coo(8, &[(3, 5, 1.0), (39, 69, 2.0)]),
    ] {
        assert_error!(run(&other, &[70, 9]), Error::InvalidBsr(_), "another pattern", "40 x 70");
    }
    let other = BsrMatrix::from_coo(40, 71, 16, DType::F16, &[(3, 5, 1.0), (39, 69, 2.0)]).unwrap();
    assert_error!(run(&other, &[71, 9]), Error::InvalidBsr(_), "another pattern", "40 x 71");
    let y = BsrMatmul::dense_sparse(x.view(), &a, &index).unwrap();
    assert_eq!(y.matmul_transposed(DType::F16, &stream).unwrap().shape(), [9, 70]);
    let beta = BsrMatmul { beta: 1.0, ..y };
    assert_error!(beta.matmul_transposed(DType::F16, &stream), Error::InvalidScale { .. }, "beta");
    assert_error!(
        BsrMatmul::linear(f16s(&[70]).view(), &a),
        Error::Shape { what: "x", .. },
        "x",
        "[70]"
    );
}

#[test]
fn bsr_constructors() {
    let coo =
        |triplets: &[(usize, usize, f32)]| BsrMatrix::from_coo(40, 70, 16, DType::F16, triplets);
    assert_error!(coo(&[(40, 0, 1.0)]), Error::InvalidBsr(_), "triplet 0", "(40, 0)");
    assert_error!(coo(&[(0, 0, 1.0), (0, 70, 1.0)]), Error::InvalidBsr(_), "triplet 1");
    assert_error!(
        coo(&[(1, 2, 1.0), (5, 5, 1.0), (1, 2, 3.0)]),
        Error::InvalidBsr(_),
        "(1, 2)",
        "twice"
    );
    let blocks = |blocks: &[(usize, usize)]| {
        BsrMatrix::from_blocks(40, 70, 16, DType::F16, blocks, &vec![0.0; 256 * blocks.len()])
    };
    assert_error!(blocks(&[(3, 0)]), Error::InvalidBsr(_), "(3, 0)");
    assert_error!(blocks(&[(0, 5)]), Error::InvalidBsr(_), "(0, 5)");
    assert_error!(blocks(&[(1, 1), (0, 0), (1, 1)]), Error::InvalidBsr(_), "(1, 1)", "twice");
    let short = BsrMatrix::from_blocks(40, 70, 16, DType::F16, &[(0, 0)], &[0.0; 255]);
    assert_error!(short, Error::InvalidBsr(_), "255");
    let padding = BsrMatrix::from_blocks(40, 70, 16, DType::F16, &[(2, 4)], &[1.0; 256]);
    assert_error!(padding, Error::NonzeroPadding { .. }, "beyond");
    let csr = |row_ptr: &[i32], col_idx: &[i32]| {
        BsrMatrix::from_csr(2, 3, 16, DType::F16, row_ptr, col_idx, &vec![1.0; col_idx.len()])
    };
    csr(&[0, 1, 3], &[2, 0, 1]).unwrap();
    assert_error!(csr(&[0, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[1, 1, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 2, 1], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 1, 2], &[2]), Error::InvalidBsr(_), "row_ptr");
    assert_error!(csr(&[0, 1, 1], &[-1]), Error::InvalidBsr(_), "-1");
    assert_error!(csr(&[0, 1, 1], &[3]), Error::InvalidBsr(_), "3");
    assert_error!(csr(&[0, 2, 2], &[1, 1]), Error::InvalidBsr(_), "twice");
    for block_size in [0, 1025, usize::MAX] {
        let matrix = BsrMatrix::from_coo(4, 4, block_size, DType::F16, &[]);
        assert_error!(matrix, Error::InvalidBsr(_), "block_size");
    }
    // Sizes that nobody has memory for are errors, not attempts.
    let huge = BsrMatrix::from_coo(usize::MAX, usize::MAX, 1, DType::F16, &[]);
    assert_error!(huge, Error::TooLarge { .. }, "block rows");
    let ints = BsrMatrix::from_coo(4, 4, 16, DType::I32, &[]);
    assert_error!(ints, Error::DType { .. }, "i32");
}
