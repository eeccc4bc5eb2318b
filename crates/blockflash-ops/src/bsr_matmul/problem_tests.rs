use super::*;
use crate::{BsrMatrix, BsrTranspose, Device, Error, View};
use half::f16;

const DATA: [f16; 2048] = [f16::ONE; 2048];

/// 40 × 70 in blocks of 16, two blocks.
fn matrix() -> BsrMatrix {
    BsrMatrix::from_coo(40, 70, 16, DType::F16, &[(0, 3, 1.0), (39, 69, 2.0)]).unwrap()
}

fn view(shape: &[usize]) -> View<'static> {
    View::from_slice(&DATA[..shape.iter().product()], shape).unwrap()
}

fn check(matmul: &BsrMatmul<'_>, c: &[usize]) -> Result<BsrProblem, String> {
    let mut data = vec![0f32; c.iter().product()];
    matmul.problem(&ViewMut::from_slice(&mut data, c).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn numbers() {
    let a = matrix();
    let bias = Bias::PerRow(view(&[40]));
    let matmul = BsrMatmul {
        alpha: 2.0,
        beta: 3.0,
        bias,
        activation: Activation::Silu,
        ..BsrMatmul::new(&a, view(&[70, 24]))
    };
    let problem = check(&matmul, &[40, 24]).unwrap();
    assert_eq!(
        (problem.m, problem.n, problem.k, problem.block_size, problem.nnz_blocks),
        (40, 24, 70, 16, 2)
    );
    assert_eq!(problem.longest_row, Some(1));
    assert_eq!(
        (problem.dtype, problem.c_dtype, problem.ldb, problem.ldc),
        (DType::F16, DType::F32, 24, 24)
    );
    assert_eq!(
        (problem.alpha, problem.beta, problem.bias, problem.activation),
        (2.0, 3.0, BiasKind::PerRow, Activation::Silu)
    );
    assert!(!problem.is_empty());
    assert!(check(&BsrMatmul::new(&a, view(&[70, 0])), &[40, 0]).unwrap().is_empty());
}

#[test]
fn vector_access_needs_aligned_rows() {
    let a = matrix();
    let mut c = vec![0f32; 40 * 24 + 64];
    let start = c.as_ptr().align_offset(16);
    let mut flags = |b_offset: usize, ldb: usize, c_offset: usize, ldc: usize| {
        let first = DATA.as_ptr().align_offset(16) + b_offset;
        let b = View::from_slice_strided(&DATA[first..], &[70, 20], &[ldb, 1]).unwrap();
        let c = &mut c[start + c_offset..];
        let problem = BsrMatmul::new(&a, b)
            .problem(&ViewMut::from_slice_strided(c, &[40, 20], &[ldc, 1]).unwrap())
            .unwrap();
        assert_eq!((problem.ldb, problem.ldc), (ldb, ldc));
        (problem.b_vectorized, problem.c_vectorized)
    };
    assert_eq!(flags(0, 24, 0, 20), (true, true));
    assert_eq!(flags(0, 20, 0, 22), (false, false));
    assert_eq!(flags(4, 24, 1, 20), (false, false));
    assert_eq!(flags(8, 24, 4, 24), (true, true));
}

#[test]
fn rows_or_columns_are_contiguous() {
    let a = matrix();
    let index = BsrTranspose::new(&a, &Device::cpu().stream().unwrap()).unwrap();
    let first = DATA.as_ptr().align_offset(16);
    let of = |b: View<'_>, transposed: bool| {
        let [m, n] = [if transposed { 70 } else { 40 }, b.shape()[1]];
        let op =
            if transposed { BsrMatmul::transposed(&a, &index, b) } else { BsrMatmul::new(&a, b) };
        let problem = check(&op, &[m, n]).unwrap();
        assert_eq!((problem.a_transposed, problem.m, problem.c_major), (transposed, m, Major::Row));
        (problem.b_major, problem.ldb, problem.b_vectorized)
    };
    let strided = |shape: [usize; 2], strides: [usize; 2]| {
        View::from_slice_strided(&DATA[first..], &shape, &strides).unwrap()
    };
    assert_eq!(of(strided([70, 8], [1, 72]), false), (Major::Column, 72, true));
    assert_eq!(of(strided([70, 8], [1, 71]), false), (Major::Column, 71, false));
    assert_eq!(of(strided([40, 8], [1, 40]), true), (Major::Column, 40, true));
    assert_eq!(of(strided([40, 8], [8, 1]), true), (Major::Row, 8, true));
    // A single column is one of either: of rows, but of aligned columns where only these have a
    // kernel.
    assert_eq!(of(strided([70, 1], [1, 1]), false), (Major::Row, 1, false));
    assert_eq!(of(strided([40, 1], [1, 1]), true), (Major::Column, 40, true));
    assert_eq!(of(strided([40, 1], [16, 1]), true), (Major::Row, 16, true));
    // A single row of elements that are not neighbours is columns of one element.
    let b = BsrMatrix::from_coo(1, 1, 16, DType::F16, &[]).unwrap();
    let problem = check(&BsrMatmul::new(&b, strided([1, 5], [3, 3])), &[1, 5]).unwrap();
    assert_eq!((problem.b_major, problem.ldb), (Major::Column, 3));

    let mut data = vec![0f32; 8 * 44];
    let c = ViewMut::from_slice_strided(&mut data, &[40, 8], &[1, 44]).unwrap();
    let problem = BsrMatmul::new(&a, view(&[70, 8])).problem(&c).unwrap();
    assert_eq!((problem.c_major, problem.ldc), (Major::Column, 44));
}

#[test]
fn a_transposed_problem_has_the_other_sizes() {
    let a =
        BsrMatrix::from_coo(40, 70, 16, DType::F16, &[(0, 3, 1.0), (39, 5, 2.0), (20, 15, 1.0)])
            .unwrap();
    let index = BsrTranspose::new(&a, &Device::cpu().stream().unwrap()).unwrap();
    let bias = Bias::PerRow(view(&[70]));
    let problem =
        check(&BsrMatmul { bias, ..BsrMatmul::transposed(&a, &index, view(&[40, 8])) }, &[70, 8])
            .unwrap();
    assert_eq!((problem.m, problem.n, problem.k, problem.nnz_blocks), (70, 8, 40, 3));
    assert_eq!((problem.longest_row, a.longest_row()), (Some(3), 1));
    let error = check(&BsrMatmul::transposed(&a, &index, view(&[70, 8])), &[70, 8]).unwrap_err();
    assert!(error.contains("b has shape [70, 8], expected [40, 8]"), "{error}");
    let other = matrix();
    let error =
        check(&BsrMatmul::transposed(&other, &index, view(&[40, 8])), &[70, 8]).unwrap_err();
    assert!(
        error.contains("another pattern, 40 x 70 with 3 blocks of 16; A is 40 x 70 with 2 blocks"),
        "{error}"
    );
}

#[test]
fn operands_are_checked() {
    let a = matrix();
    let with = |b, c: &[usize]| check(&BsrMatmul::new(&a, b), c).unwrap_err();
    assert!(with(view(&[70]), &[40, 1]).contains("b has shape [70], expected [70, n]"));
    assert!(with(view(&[64, 8]), &[40, 8]).contains("b has shape [64, 8], expected [70, 8]"));
    assert!(with(view(&[70, 8]), &[8, 40]).contains("c has shape [8, 40], expected [40, 8]"));
    assert!(with(view(&[70, 8]), &[320]).contains("c has shape [320], expected [40, 8]"));
    let spread = View::from_slice_strided(&DATA, &[70, 8], &[16, 2]).unwrap();
    assert!(
        with(spread, &[40, 8])
            .contains("b has strides [16, 2], but its rows or its columns must be contiguous")
    );
    let floats = [0f32; 560];
    assert_eq!(
        with(View::from_slice(&floats, &[70, 8]).unwrap(), &[40, 8]),
        "b is f32, expected f16"
    );

    let mut ints = vec![0i32; 320];
    let error = BsrMatmul::new(&a, view(&[70, 8]))
        .problem(&ViewMut::from_slice(&mut ints, &[40, 8]).unwrap());
    assert_eq!(error.unwrap_err().to_string(), "c is i32, expected f16 or bf16 or f32");
    let mut spread = vec![0f32; 40 * 17];
    let c = ViewMut::from_slice_strided(&mut spread, &[40, 8], &[17, 2]).unwrap();
    let error = BsrMatmul::new(&a, view(&[70, 8])).problem(&c).unwrap_err();
    assert!(matches!(error, Error::Stride { what: "c", .. }), "{error}");
}

#[test]
fn bias_and_factors_are_checked() {
    let a = matrix();
    let plain = || BsrMatmul::new(&a, view(&[70, 8]));
    let with = |bias| check(&BsrMatmul { bias, ..plain() }, &[40, 8]).unwrap_err();
    assert!(with(Bias::PerRow(view(&[8]))).contains("bias has shape [8], expected [40]"));
    assert!(with(Bias::PerColumn(view(&[40]))).contains("bias has shape [40], expected [8]"));
    let floats = [0f32; 40];
    assert!(
        with(Bias::PerRow(View::from_slice(&floats, &[40]).unwrap()))
            .contains("bias is f32, expected f16")
    );
    let strided = View::from_slice_strided(&DATA, &[8], &[2]).unwrap();
    assert!(with(Bias::PerColumn(strided)).contains("bias has strides [2]"));
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(
            check(&BsrMatmul { alpha: bad, ..plain() }, &[40, 8]).unwrap_err().contains("alpha is")
        );
        assert!(
            check(&BsrMatmul { beta: bad, ..plain() }, &[40, 8]).unwrap_err().contains("beta is")
        );
    }
}

#[test]
fn flops_count_stored_blocks() {
    let problem = BsrProblem::new(DType::F16, [100, 30, 70], 32, 5);
    assert_eq!(bsr_flops(&problem), 2 * 5 * 1024 * 30);
}
