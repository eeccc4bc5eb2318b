use super::super::BiasKind;
use super::*;
use crate::fixtures::values;
use crate::{BsrMatrix, Device, Error, Operation, Tensor};
use blockflash_safe::Element;
use blockflash_sys::manifest;

/// A matrix with an empty block row, rows of different lengths, and tails in both directions.
pub(super) fn matrix(block_size: usize, dtype: DType) -> BsrMatrix {
    let (rows, cols) = (3 * block_size + 2, 4 * block_size + 1);
    let blocks = [(0, 0), (0, 2), (0, 4), (2, 1), (3, 0), (3, 4)];
    let inside = |block: usize, at: usize| {
        let (row, col) = (
            blocks[block].0 * block_size + at / block_size,
            blocks[block].1 * block_size + at % block_size,
        );
        row < rows && col < cols
    };
    let per_block = block_size * block_size;
    let mut data = values(blocks.len() * per_block, 1);
    for (at, value) in data.iter_mut().enumerate() {
        if !inside(at / per_block, at % per_block) {
            *value = 0.0;
        }
    }
    BsrMatrix::from_blocks(rows, cols, block_size, dtype, &blocks, &data).unwrap()
}

/// The definition in f64; `finish` gets A·B and its row and column.
pub(super) fn reference(
    a: &BsrMatrix,
    b: &[f32],
    n: usize,
    finish: impl Fn(f64, usize, usize) -> f64,
) -> Vec<f64> {
    let dense = a.to_dense().unwrap();
    let k = a.cols();
    let dot = |i: usize, j: usize| {
        (0..k).map(|l| f64::from(dense[i * k + l]) * f64::from(b[l * n + j])).sum()
    };
    (0..a.rows() * n).map(|at| finish(dot(at / n, at % n), at / n, at % n)).collect()
}

#[track_caller]
pub(super) fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let epsilon = tolerance * (1.0 + expected.abs());
        let close = approx::abs_diff_eq!(f64::from(found), expected, epsilon = epsilon);
        assert!(close, "element {at} is {found}, expected {expected}");
    }
}

pub(super) fn to_vec<T: Element>(tensor: &Tensor, widen: fn(T) -> f32) -> Vec<f32> {
    tensor.to_vec::<T>(&Device::cpu().stream().unwrap()).unwrap().into_iter().map(widen).collect()
}

#[test]
fn products_of_every_size() {
    let stream = Device::cpu().stream().unwrap();
    for block_size in [1, 3, 16, 32] {
        let a = matrix(block_size, DType::F32);
        for n in [1, 7, 530] {
            let data = values(a.cols() * n, 2);
            let b = View::from_slice(&data, &[a.cols(), n]).unwrap();
            let c = BsrMatmul::new(&a, b).matmul(DType::F32, &stream).unwrap();
            assert_close(&to_vec(&c, |x| x), &reference(&a, &data, n, |x, _, _| x), 1e-5);
        }
    }
}

fn rounded<T: Float>(widen: fn(T) -> f32, narrow: fn(f32) -> T, tolerance: f64) {
    let stream = Device::cpu().stream().unwrap();
    let a = matrix(16, T::DTYPE);
    let n = 20;
    let data: Vec<T> = values(a.cols() * n, 2).into_iter().map(narrow).collect();
    let b = View::from_slice(&data, &[a.cols(), n]).unwrap();
    let wide: Vec<f32> = data.iter().map(|&x| widen(x)).collect();
    let expected = reference(&a, &wide, n, |x, _, _| x);
    let c = BsrMatmul::new(&a, b).matmul(T::DTYPE, &stream).unwrap();
    assert_close(&to_vec(&c, widen), &expected, tolerance);
    let c = BsrMatmul::new(&a, b).matmul(DType::F32, &stream).unwrap();
    assert_close(&to_vec(&c, |x| x), &expected, 1e-5);
}

#[test]
fn half_precision() {
    rounded(f16::to_f32, f16::from_f32, 1.0 / 2048.0);
    rounded(bf16::to_f32, bf16::from_f32, 1.0 / 256.0);
}

#[test]
fn epilogues() {
    // Columns in one panel and in two.
    for n in [9, PANEL_COLUMNS + 18] {
        epilogues_of(n);
    }
}

fn epilogues_of(n: usize) {
    let stream = Device::cpu().stream().unwrap();
    let a = matrix(16, DType::F32);
    let (b, old) = (values(a.cols() * n, 2), values(a.rows() * n, 3));
    let (per_row, per_column) = (values(a.rows(), 4), values(n, 5));
    let view = View::from_slice(&b, &[a.cols(), n]).unwrap();
    let functions = [
        (Activation::None, (|x| x) as fn(f64) -> f64),
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Gelu, |x| 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt()))),
        (Activation::Silu, |x| x / (1.0 + (-x).exp())),
    ];
    for (activation, function) in functions {
        for bias in [BiasKind::None, BiasKind::PerRow, BiasKind::PerColumn] {
            for (alpha, beta) in [(1.0, 0.0), (-0.5, 0.0), (2.0, 0.25), (0.0, 1.0)] {
                let matmul = BsrMatmul {
                    alpha,
                    beta,
                    activation,
                    bias: match bias {
                        BiasKind::None => Bias::None,
                        BiasKind::PerRow => {
                            Bias::PerRow(View::from_slice(&per_row, &[a.rows()]).unwrap())
                        }
                        BiasKind::PerColumn => {
                            Bias::PerColumn(View::from_slice(&per_column, &[n]).unwrap())
                        }
                    },
                    ..BsrMatmul::new(&a, view)
                };
                let mut c = Tensor::from_slice(&stream, &old, &[a.rows(), n]).unwrap();
                matmul.matmul_into(c.view_mut(), &stream).unwrap();
                let expected = reference(&a, &b, n, |x, i, j| {
                    let bias = match bias {
                        BiasKind::None => 0.0,
                        BiasKind::PerRow => per_row[i],
                        BiasKind::PerColumn => per_column[j],
                    };
                    function(
                        f64::from(alpha) * x
                            + f64::from(beta) * f64::from(old[i * n + j])
                            + f64::from(bias),
                    )
                });
                assert_close(&to_vec(&c, |x| x), &expected, 1e-5);
            }
        }
    }
}

#[test]
fn strides_are_followed_and_gaps_left_alone() {
    let stream = Device::cpu().stream().unwrap();
    let (a, n) = (matrix(3, DType::F32), 5);
    let b = values(a.cols() * 8, 2);
    let view = View::from_slice_strided(&b, &[a.cols(), n], &[8, 1]).unwrap();
    let mut c = vec![f32::NAN; a.rows() * 7];
    let target = ViewMut::from_slice_strided(&mut c, &[a.rows(), n], &[7, 1]).unwrap();
    BsrMatmul::new(&a, view).matmul_into(target, &stream).unwrap();
    let packed: Vec<f32> = b.chunks(8).flat_map(|row| &row[..n]).copied().collect();
    let found: Vec<f32> = c.chunks(7).flat_map(|row| &row[..n]).copied().collect();
    assert_close(&found, &reference(&a, &packed, n, |x, _, _| x), 1e-5);
    assert!(
        c.chunks(7).flat_map(|row| &row[n..]).all(|x| x.is_nan()),
        "gaps are left alone, and beta = 0 reads no NaN"
    );
}

#[test]
fn nothing_stored_or_nothing_to_do() {
    let stream = Device::cpu().stream().unwrap();
    for (rows, cols, n) in [(5, 0, 3), (5, 7, 3), (0, 7, 3), (5, 7, 0)] {
        let a = BsrMatrix::from_coo(rows, cols, 4, DType::F16, &[]).unwrap();
        let b = vec![f16::ONE; cols * n];
        let b = View::from_slice(&b, &[cols, n]).unwrap();
        let c = BsrMatmul::new(&a, b).matmul(DType::F16, &stream).unwrap();
        assert_eq!(to_vec(&c, f16::to_f32), vec![0.0; rows * n]);
    }
}

#[test]
fn kernels_do_not_run_here() {
    let stream = Device::cpu().stream().unwrap();
    let a = matrix(16, DType::F16);
    let b = vec![f16::ONE; a.cols() * 8];
    let b = View::from_slice(&b, &[a.cols(), 8]).unwrap();
    let mut c = Tensor::empty(&stream, DType::F16, &[a.rows(), 8]).unwrap();
    let row = &manifest::kernels()[0];
    let error = BsrMatmul::new(&a, b).run_with(row, c.view_mut(), &stream).unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "bsr_matmul", .. }), "{error}");
    assert!(error.to_string().contains("not supported on cpu"));
}

#[test]
fn without_an_old_c_there_is_no_beta() {
    let stream = Device::cpu().stream().unwrap();
    let a = matrix(16, DType::F32);
    let b = vec![1f32; a.cols() * 8];
    let b = View::from_slice(&b, &[a.cols(), 8]).unwrap();
    let error =
        BsrMatmul { beta: 1.0, ..BsrMatmul::new(&a, b) }.matmul(DType::F32, &stream).unwrap_err();
    assert!(matches!(error, Error::InvalidScale { what: "beta", .. }), "{error}");
}
