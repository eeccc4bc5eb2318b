use super::*;
use crate::fixtures::values;
use crate::{BsrMatmul, BsrSddmm, BsrTranspose, Device, Error, View};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Blocks (0, 1), (1, 0) and (1, 1) of 4 × 4, in a matrix of these sizes.
fn matrix(rows: usize, cols: usize, dtype: DType) -> BsrMatrix {
    BsrMatrix::from_coo(rows, cols, 4, dtype, &[(0, 4, 1.0), (4, 0, 1.0), (4, 4, 1.0)]).unwrap()
}

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_slice(&cpu(), values, &[values.len() / 16, 4, 4]).unwrap()
}

#[test]
fn values_change_and_the_pattern_stays() {
    let (stream, mut a) = (cpu(), matrix(8, 8, DType::F32));
    let index = BsrTranspose::new(&a, &stream).unwrap();
    let address = a.values().view().as_slice::<f32>().unwrap().as_ptr();
    let new = values(48, 1);
    a.set_values(&tensor(&new), &stream).unwrap();
    assert_eq!(a.values().view().as_slice::<f32>().unwrap().as_ptr(), address);
    let blocks =
        BsrMatrix::from_blocks(8, 8, 4, DType::F32, &[(0, 1), (1, 0), (1, 1)], &new).unwrap();
    assert_eq!(a.to_dense().unwrap(), blocks.to_dense().unwrap());
    // An index and copies that were made before or after know the matrix still.
    let b = values(8 * 3, 2);
    let b = View::from_slice(&b, &[8, 3]).unwrap();
    let product = |a: &BsrMatrix| {
        let c = BsrMatmul::transposed(a, &index, b).matmul(DType::F32, &stream).unwrap();
        c.to_vec::<f32>(&stream).unwrap()
    };
    assert_eq!(product(&a), product(&blocks));
    assert_eq!(product(&a.to(&stream).unwrap()), product(&blocks));

    a.values_mut().unwrap().as_mut_slice::<f32>().unwrap().fill(2.0);
    assert_eq!(a.to_dense().unwrap().iter().sum::<f32>(), 96.0);
}

#[test]
fn every_type_of_values() {
    let stream = cpu();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let source =
            BsrMatrix::from_coo(7, 5, 4, dtype, &[(0, 4, 2.0), (5, 1, -0.5), (6, 4, 3.0)]).unwrap();
        let mut a = matrix(7, 5, dtype);
        a.set_values(source.values(), &stream).unwrap();
        assert_eq!(a.to_dense().unwrap(), source.to_dense().unwrap(), "{dtype}");
    }
}

#[test]
fn what_does_not_fit_changes_nothing() {
    let (stream, mut a) = (cpu(), matrix(8, 8, DType::F32));
    let before = a.to_dense().unwrap();
    let refused = |a: &mut BsrMatrix, values: &Tensor| a.set_values(values, &stream).unwrap_err();
    assert!(matches!(refused(&mut a, &tensor(&[1.0; 32])), Error::Shape { what: "values", .. }));
    let flat = Tensor::from_slice(&stream, &[1.0f32; 48], &[48]).unwrap();
    assert!(matches!(refused(&mut a, &flat), Error::Shape { .. }));
    let halves = Tensor::zeros(&stream, DType::BF16, &[3, 4, 4]).unwrap();
    assert!(matches!(refused(&mut a, &halves), Error::DType { found: DType::BF16, .. }));
    assert_eq!(a.to_dense().unwrap(), before);
}

#[test]
fn nothing_but_zeros_gets_beyond_the_matrix() {
    let stream = cpu();
    for (rows, cols, edge) in [(8, 8, false), (7, 8, true), (8, 7, true), (5, 5, true)] {
        let mut a = matrix(rows, cols, DType::F32);
        assert_eq!(a.has_edge_blocks(), edge);
        let before = a.to_dense().unwrap();
        let result = a.set_values(&tensor(&[1.0; 48]), &stream);
        match (edge, result) {
            (false, result) => result.unwrap(),
            (true, Err(Error::NonzeroPadding { .. })) => assert_eq!(a.to_dense().unwrap(), before),
            (true, other) => panic!("{rows} x {cols}: {other:?}"),
        }
        match a.values_mut() {
            Ok(view) => assert!(!edge && view.shape() == [3, 4, 4]),
            Err(Error::UncheckedPadding { rows: r, cols: c, .. }) => {
                assert_eq!((r, c, edge), (rows, cols, true))
            }
            Err(other) => panic!("{other}"),
        }
    }
    // Only stored blocks count: none of these is at the edge.
    let mut inside = BsrMatrix::from_coo(7, 7, 4, DType::F32, &[(0, 0, 1.0)]).unwrap();
    assert!(!inside.has_edge_blocks() && inside.values_mut().is_ok());
}

#[test]
fn sampled_products_write_into_a_matrix() {
    let stream = cpu();
    let (pattern, mut weights) = (matrix(7, 5, DType::F32), matrix(7, 5, DType::F32));
    let (a, b) = (values(7 * 3, 3), values(3 * 5, 4));
    let (a, b) = (View::from_slice(&a, &[7, 3]).unwrap(), View::from_slice(&b, &[3, 5]).unwrap());
    let product = BsrSddmm { alpha: -0.5, beta: 1.0, ..BsrSddmm::new(&pattern, a, b) };
    let mut expected = Tensor::zeros(&stream, DType::F32, &[3, 4, 4]).unwrap();
    expected.copy_from(&stream, weights.values()).unwrap();
    product.sddmm_into(expected.view_mut(), &stream).unwrap();
    product.sddmm_into_matrix(&mut weights, &stream).unwrap();
    let read = |tensor: &Tensor| tensor.to_vec::<f32>(&stream).unwrap();
    assert_eq!(read(weights.values()), read(&expected));
    assert_ne!(read(weights.values()), read(pattern.values()));
    // What it wrote beyond the matrix are zeros: the check of values in host memory takes them.
    weights.set_values(&expected, &stream).unwrap();

    for mut other in [
        matrix(7, 6, DType::F32),
        BsrMatrix::from_coo(7, 5, 4, DType::F32, &[(0, 0, 1.0), (4, 0, 1.0), (4, 4, 1.0)]).unwrap(),
    ] {
        let refused = product.sddmm_into_matrix(&mut other, &stream).unwrap_err();
        assert!(refused.to_string().contains("another pattern, 7 x"), "{refused}");
    }
}
