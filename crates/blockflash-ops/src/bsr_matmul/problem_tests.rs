use super::*;
use crate::{BsrMatrix, Error, View};
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
    assert_eq!((problem.dtype, problem.c_dtype, problem.ldb, problem.ldc), (DType::F16, DType::F32, 24, 24));
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
fn operands_are_checked() {
    let a = matrix();
    let with = |b, c: &[usize]| check(&BsrMatmul::new(&a, b), c).unwrap_err();
    assert!(with(view(&[70]), &[40, 1]).contains("b has shape [70], expected [70, n]"));
    assert!(with(view(&[64, 8]), &[40, 8]).contains("b has shape [64, 8], expected [70, 8]"));
    assert!(with(view(&[70, 8]), &[8, 40]).contains("c has shape [8, 40], expected [40, 8]"));
    assert!(with(view(&[70, 8]), &[320]).contains("c has shape [320], expected [40, 8]"));
    let transposed = view(&[8, 70]).permute(&[1, 0]).unwrap();
    assert!(with(transposed, &[40, 8]).contains("b has strides [1, 70]"));
    let floats = [0f32; 560];
    assert_eq!(with(View::from_slice(&floats, &[70, 8]).unwrap(), &[40, 8]), "b is f32, expected f16");

    let mut ints = vec![0i32; 320];
    let error =
        BsrMatmul::new(&a, view(&[70, 8])).problem(&ViewMut::from_slice(&mut ints, &[40, 8]).unwrap());
    assert_eq!(error.unwrap_err().to_string(), "c is i32, expected f16 or bf16 or f32");
    let mut columns = vec![0f32; 320];
    let c = ViewMut::from_slice(&mut columns, &[8, 40]).unwrap().permute(&[1, 0]).unwrap();
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
        with(Bias::PerRow(View::from_slice(&floats, &[40]).unwrap())).contains("bias is f32, expected f16")
    );
    let strided = View::from_slice_strided(&DATA, &[8], &[2]).unwrap();
    assert!(with(Bias::PerColumn(strided)).contains("bias has strides [2]"));
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(check(&BsrMatmul { alpha: bad, ..plain() }, &[40, 8]).unwrap_err().contains("alpha is"));
        assert!(check(&BsrMatmul { beta: bad, ..plain() }, &[40, 8]).unwrap_err().contains("beta is"));
    }
}
