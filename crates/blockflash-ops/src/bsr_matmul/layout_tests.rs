//! Aᵀ, and B and C by rows and by columns.

use super::super::BiasKind;
use super::tests::{assert_close, matrix, reference, to_vec};
use super::*;
use crate::fixtures::values;
use crate::{BsrMatrix, BsrTranspose, DType, Device, Tensor};

/// A matrix with gaps between its rows or columns, which hold NaN.
struct Spread {
    shape: [usize; 2],
    strides: [usize; 2],
    memory: Vec<f32>,
}

impl Spread {
    fn new(shape: [usize; 2], major: Major, gap: usize, elements: &[f32]) -> Self {
        let [rows, cols] = shape;
        let strides = if major == Major::Row { [cols + gap, 1] } else { [1, rows + gap] };
        let mut memory = vec![f32::NAN; (rows - 1) * strides[0] + (cols - 1) * strides[1] + 1];
        for (at, &element) in elements.iter().enumerate() {
            memory[at / cols * strides[0] + at % cols * strides[1]] = element;
        }
        Self { shape, strides, memory }
    }

    fn view(&self) -> View<'_> {
        View::from_slice_strided(&self.memory, &self.shape, &self.strides).unwrap()
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut::from_slice_strided(&mut self.memory, &self.shape, &self.strides).unwrap()
    }

    /// The elements; the gaps still hold NaN.
    fn elements(&self) -> Vec<f32> {
        let [rows, cols] = self.shape;
        let offset = |at: usize| at / cols * self.strides[0] + at % cols * self.strides[1];
        let numbers = self.memory.iter().filter(|x| !x.is_nan()).count();
        assert_eq!(numbers, rows * cols, "every element is a number, and every gap was left alone");
        (0..rows * cols).map(|at| self.memory[offset(at)]).collect()
    }
}

/// The dense transpose, as a block-sparse matrix with the blocks of that pattern.
fn explicitly_transposed(a: &BsrMatrix) -> BsrMatrix {
    let dense = a.to_dense().unwrap();
    let view = View::from_slice(&dense, &[a.rows(), a.cols()]).unwrap();
    BsrMatrix::from_dense(view.permute(&[1, 0]).unwrap(), a.block_size(), a.dtype()).unwrap()
}

/// Calls `check` with every layout of B and C, and gaps of their lines.
fn layouts(mut check: impl FnMut(Major, Major, usize)) {
    for (b, c) in Major::ALL.into_iter().flat_map(|b| Major::ALL.map(|c| (b, c))) {
        [0, 3].into_iter().for_each(|gap| check(b, c, gap));
    }
}

#[test]
fn products_of_every_layout() {
    let stream = Device::cpu().stream().unwrap();
    for block_size in [1, 3, 16] {
        let stored = matrix(block_size, DType::F32);
        let (index, explicit) =
            (BsrTranspose::new(&stored, &stream).unwrap(), explicitly_transposed(&stored));
        assert_eq!(explicit.nnz_blocks(), stored.nnz_blocks());
        for (transposed, a) in [(false, &stored), (true, &explicit)] {
            for n in [1, 7, 530] {
                let b = values(a.cols() * n, 2);
                let expected = reference(a, &b, n, |x, _, _| x);
                layouts(|b_major, c_major, gap| {
                    let b = Spread::new([a.cols(), n], b_major, gap, &b);
                    let mut c = Spread::new([a.rows(), n], c_major, gap, &[]);
                    let product = match transposed {
                        false => BsrMatmul::new(a, b.view()),
                        true => BsrMatmul::transposed(&stored, &index, b.view()),
                    };
                    product.matmul_into(c.view_mut(), &stream).unwrap();
                    assert_close(&c.elements(), &expected, 1e-5);
                });
            }
        }
    }
}

#[test]
fn epilogues_of_every_layout() {
    let stream = Device::cpu().stream().unwrap();
    let stored = matrix(16, DType::F32);
    let index = BsrTranspose::new(&stored, &stream).unwrap();
    let a = explicitly_transposed(&stored);
    // Columns in one panel and in two.
    for n in [9, PANEL_COLUMNS + 18] {
        let (b, old) = (values(a.cols() * n, 2), values(a.rows() * n, 3));
        let (per_row, per_column) = (values(a.rows(), 4), values(n, 5));
        for bias in [BiasKind::None, BiasKind::PerRow, BiasKind::PerColumn] {
            let expected = reference(&a, &b, n, |x, i, j| {
                let bias = match bias {
                    BiasKind::None => 0.0,
                    BiasKind::PerRow => per_row[i],
                    BiasKind::PerColumn => per_column[j],
                };
                (2.0 * x + 0.25 * f64::from(old[i * n + j]) + f64::from(bias)).max(0.0)
            });
            layouts(|b_major, c_major, gap| {
                let b = Spread::new([a.cols(), n], b_major, gap, &b);
                let mut c = Spread::new([a.rows(), n], c_major, gap, &old);
                let product = BsrMatmul {
                    alpha: 2.0,
                    beta: 0.25,
                    activation: Activation::Relu,
                    bias: match bias {
                        BiasKind::None => Bias::None,
                        BiasKind::PerRow => {
                            Bias::PerRow(View::from_slice(&per_row, &[a.rows()]).unwrap())
                        }
                        BiasKind::PerColumn => {
                            Bias::PerColumn(View::from_slice(&per_column, &[n]).unwrap())
                        }
                    },
                    ..BsrMatmul::transposed(&stored, &index, b.view())
                };
                product.matmul_into(c.view_mut(), &stream).unwrap();
                assert_close(&c.elements(), &expected, 1e-5);
            });
        }
    }
}

#[test]
fn nothing_stored_and_nothing_to_do() {
    let stream = Device::cpu().stream().unwrap();
    for (rows, cols, n) in [(0, 5, 3), (7, 5, 3), (7, 0, 3), (7, 5, 0)] {
        let a = BsrMatrix::from_coo(rows, cols, 4, DType::F32, &[]).unwrap();
        let index = BsrTranspose::new(&a, &stream).unwrap();
        let x = vec![1f32; n * rows];
        let x = View::from_slice(&x, &[n, rows]).unwrap();
        let y = BsrMatmul::dense_sparse(x, &a, &index)
            .unwrap()
            .matmul_transposed(DType::F32, &stream)
            .unwrap();
        assert_eq!((y.shape(), to_vec(&y, |x: f32| x)), (&[n, cols][..], vec![0.0; n * cols]));
    }
}

/// X·Wᵀ and X·W against the definition, as a layer and its gradient have them.
#[test]
fn dense_times_sparse() {
    let stream = Device::cpu().stream().unwrap();
    let w = matrix(16, DType::F32);
    let index = BsrTranspose::new(&w, &stream).unwrap();
    let (dense, tokens) = (w.to_dense().unwrap(), 5);
    let (outputs, inputs) = (w.rows(), w.cols());
    let (x, dy, bias) =
        (values(tokens * inputs, 6), values(tokens * outputs, 7), values(outputs, 8));
    let matrix_of = |data, columns| View::from_slice(data, &[tokens, columns]).unwrap();
    let layer = BsrMatmul {
        bias: Bias::PerRow(View::from_slice(&bias, &[outputs]).unwrap()),
        ..BsrMatmul::linear(matrix_of(&x, inputs), &w).unwrap()
    };
    let y = layer.matmul_transposed(DType::F32, &stream).unwrap();
    let expected =
        |rows: usize, columns: usize, element: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..rows * columns).map(|at| element(at / columns, at % columns)).collect()
        };
    let product = |x: f32, w: f32| f64::from(x) * f64::from(w);
    let y_of = expected(tokens, outputs, &|t, o| {
        f64::from(bias[o])
            + (0..inputs).map(|i| product(x[t * inputs + i], dense[o * inputs + i])).sum::<f64>()
    });
    assert_close(&to_vec(&y, |x: f32| x), &y_of, 1e-5);
    let dx = BsrMatmul::dense_sparse(matrix_of(&dy, outputs), &w, &index).unwrap();
    let dx: Tensor = dx.matmul_transposed(DType::F32, &stream).unwrap();
    let dx_of = expected(tokens, inputs, &|t, i| {
        (0..outputs).map(|o| product(dy[t * outputs + o], dense[o * inputs + i])).sum()
    });
    assert_close(&to_vec(&dx, |x: f32| x), &dx_of, 1e-5);
    let vector = View::from_slice(&x, &[x.len()]).unwrap();
    assert!(BsrMatmul::linear(vector, &w).unwrap_err().to_string().contains("x has shape"));
}
