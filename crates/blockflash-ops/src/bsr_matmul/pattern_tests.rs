use super::*;
use crate::fixtures::values;
use crate::{Bias, BsrMatmul, BsrMatrix, BsrSddmm, BsrTranspose, BsrView, DType, ViewMut};
use std::sync::Arc;

/// Stored blocks, and the same in ascending order.
const BLOCKS: [(usize, usize); 4] = [(1, 0), (0, 2), (2, 1), (0, 0)];
const SORTED: [(usize, usize); 4] = [(0, 0), (0, 2), (1, 0), (2, 1)];

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn entries(tensor: &Tensor) -> Vec<i32> {
    tensor.to_vec(&cpu()).unwrap()
}

#[test]
fn every_constructor_makes_the_same_pattern() {
    for (rows, cols) in [(24, 24), (23, 20)] {
        let blocks = BsrPattern::from_blocks(rows, cols, 8, &BLOCKS).unwrap();
        assert_eq!(
            (entries(blocks.row_ptr()), entries(blocks.col_idx())),
            (vec![0, 2, 3, 4], vec![0, 2, 0, 1])
        );
        assert_eq!((blocks.values_shape(), blocks.density()), ([4, 8, 8], 4.0 / 9.0));
        assert_eq!((blocks.longest_row(), blocks.has_edge_blocks()), (2, rows == 23));
        let arrays = [&[0, 2, 3, 4][..], &[0, 2, 0, 1]];
        let [row_ptr, col_idx] =
            arrays.map(|array| Tensor::from_slice(&cpu(), array, &[4]).unwrap());
        let zeros = vec![0.0; 4 * 64];
        for other in [
            &BsrPattern::from_parts(rows, cols, 8, arrays[0], arrays[1]).unwrap(),
            &BsrPattern::from_tensors(rows, cols, 8, &row_ptr, &col_idx, &cpu()).unwrap(),
            &blocks.to(&cpu()).unwrap(),
            BsrMatrix::from_blocks(rows, cols, 8, DType::F16, &SORTED, &zeros).unwrap().pattern(),
        ] {
            blocks.has_pattern_of(other).unwrap();
            assert_eq!(entries(blocks.row_order()), entries(other.row_order()));
            assert_eq!(blocks.edge_blocks(), other.edge_blocks());
        }
    }
    let refused = |blocks: &[_]| BsrPattern::from_blocks(24, 24, 8, blocks).unwrap_err();
    assert!(refused(&[(0, 0), (3, 0)]).to_string().contains("block 1 is at (3, 0), beyond 3 x 3"));
    assert!(refused(&[(1, 2), (1, 2)]).to_string().contains("block (1, 2) comes twice"));
    let error = BsrPattern::from_parts(24, 24, 8, &[0, 1, 1, 1], &[3]).unwrap_err();
    assert!(error.to_string().contains("col_idx[0] is 3 in block row 0"), "{error}");
}

/// Two layers share a pattern; their values are parts of one buffer of the caller.
#[test]
fn values_of_the_caller_are_multiplied_and_written() {
    let stream = cpu();
    let pattern = BsrPattern::from_blocks(24, 24, 8, &BLOCKS).unwrap();
    let index = BsrTranspose::new(&pattern, &stream).unwrap();
    let pattern = Arc::new(pattern);
    let mut parameters = values(2 * 256, 1);
    let (x, dy) = (values(5 * 24, 2), values(5 * 24, 3));
    let x = View::from_slice(&x, &[5, 24]).unwrap();
    let dy = View::from_slice(&dy, &[5, 24]).unwrap();
    let bias = values(24, 4);
    let bias = Bias::PerRow(View::from_slice(&bias, &[24]).unwrap());
    for own in parameters.chunks_exact_mut(256) {
        let owned = Tensor::from_slice(&stream, own, &pattern.values_shape()).unwrap();
        let mut matrix = BsrMatrix::new(Arc::clone(&pattern), owned).unwrap();
        assert!(Arc::ptr_eq(matrix.pattern(), &pattern));

        let lent = View::from_slice(own, &pattern.values_shape()).unwrap();
        let lent = BsrView::new(&pattern, lent).unwrap();
        let products = |w: BsrView<'_>| {
            let y = BsrMatmul { bias, ..BsrMatmul::linear(x, w).unwrap() };
            let dx = BsrMatmul::dense_sparse(dy, w, &index).unwrap();
            [y, dx].map(|product| {
                let result = product.matmul_transposed(DType::F32, &stream).unwrap();
                result.to_vec::<f32>(&stream).unwrap()
            })
        };
        assert_eq!(products(lent), products(matrix.view()));

        // A step of gradient descent into both.
        let step = BsrSddmm::new(&pattern, dy.permute(&[1, 0]).unwrap(), x);
        let step = BsrSddmm { alpha: -0.1, beta: 1.0, ..step };
        let target = ViewMut::from_slice(own, &pattern.values_shape()).unwrap();
        step.sddmm_into(target, &stream).unwrap();
        step.sddmm_into_matrix(&mut matrix, &stream).unwrap();
        assert_eq!(own, matrix.values().to_vec::<f32>(&stream).unwrap());
    }
}

#[test]
fn values_that_do_not_fit_are_refused() {
    let pattern = Arc::new(BsrPattern::from_blocks(24, 24, 8, &BLOCKS).unwrap());
    let data = vec![1f32; 1024];
    let lent = |shape: &[usize], strides: &[usize]| {
        let values = View::from_slice_strided(&data, shape, strides).unwrap();
        BsrView::new(&pattern, values).map(|_| ())
    };
    lent(&[4, 8, 8], &[64, 8, 1]).unwrap();
    assert!(matches!(lent(&[3, 8, 8], &[64, 8, 1]), Err(Error::Shape { what: "values", .. })));
    assert!(matches!(lent(&[32, 8], &[8, 1]), Err(Error::Shape { what: "values", .. })));
    assert!(matches!(lent(&[4, 8, 8], &[64, 1, 8]), Err(Error::Stride { what: "values", .. })));
    assert!(matches!(lent(&[4, 8, 8], &[128, 8, 1]), Err(Error::Stride { what: "values", .. })));
    let integers = Tensor::zeros(&cpu(), DType::I32, &[4, 8, 8]).unwrap();
    let error = BsrView::new(&pattern, integers.view()).unwrap_err();
    assert!(matches!(error, Error::DType { what: "values", found: DType::I32, .. }), "{error}");
    for wrong in [integers, Tensor::zeros(&cpu(), DType::F16, &[4, 64]).unwrap()] {
        let error = BsrMatrix::new(Arc::clone(&pattern), wrong).unwrap_err();
        assert!(matches!(error, Error::DType { .. } | Error::Shape { .. }), "{error}");
    }
}

/// NaN beyond the matrix would reach results, and memory of the caller cannot be trusted to stay
/// zero there. A matrix owns its values, so it checks them once.
#[test]
fn blocks_at_the_edge_need_values_that_a_matrix_owns() {
    for (rows, cols, edge) in [(24, 24, false), (23, 24, true), (24, 17, true)] {
        let pattern = BsrPattern::from_blocks(rows, cols, 8, &BLOCKS).unwrap();
        let zeros = Tensor::zeros(&cpu(), DType::F32, &[4, 8, 8]).unwrap();
        match BsrView::new(&pattern, zeros.view()) {
            Ok(_) => assert!(!edge),
            Err(Error::UncheckedPadding { rows: r, cols: c, .. }) => {
                assert_eq!((r, c, edge), (rows, cols, true));
            }
            Err(error) => panic!("{error}"),
        }
        let pattern = Arc::new(pattern);
        BsrMatrix::new(Arc::clone(&pattern), zeros).unwrap();
        let ones = Tensor::from_slice(&cpu(), &[1f32; 256], &[4, 8, 8]).unwrap();
        match BsrMatrix::new(pattern, ones) {
            Ok(_) => assert!(!edge),
            Err(error) => assert!(edge && matches!(error, Error::NonzeroPadding { .. }), "{error}"),
        }
    }
}

#[test]
fn threads_share_a_pattern() {
    fn shared<T: Send + Sync>() {}
    shared::<BsrPattern>();
    shared::<BsrView<'_>>();
    shared::<BsrTranspose>();
}

#[test]
fn planning_is_linear_in_block_rows_without_columns() {
    let start = std::time::Instant::now();
    for (rows, cols) in [(1 << 20, 0), (1 << 20, 1), (0, 1 << 20)] {
        let pattern = BsrPattern::from_blocks(rows, cols, 16, &[]).unwrap();
        assert_eq!((pattern.block_rows(), pattern.nnz_blocks()), (rows.div_ceil(16), 0));
        BsrTranspose::new(&pattern, &cpu()).unwrap();
    }
    // It was quadratic: 44 seconds for twice as many block rows.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
