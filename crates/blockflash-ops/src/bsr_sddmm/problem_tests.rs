use super::*;
use crate::{BsrMatrix, Error};
use blockflash_safe::View;
use half::f16;

const DATA: [f16; 8192] = [f16::ONE; 8192];

/// 40 × 70 in blocks of 16, two blocks; its values have another type than A and B.
fn pattern() -> BsrMatrix {
    BsrMatrix::from_coo(40, 70, 16, DType::F32, &[(0, 3, 1.0), (39, 69, 2.0)]).unwrap()
}

fn view(shape: &[usize]) -> View<'static> {
    View::from_slice(&DATA[..shape.iter().product()], shape).unwrap()
}

fn strided(offset: usize, shape: [usize; 2], strides: [usize; 2]) -> View<'static> {
    let first = DATA.as_ptr().align_offset(16) + offset;
    View::from_slice_strided(&DATA[first..], &shape, &strides).unwrap()
}

fn layout(view: View<'_>) -> Result<DenseLayout> {
    DenseLayout::of(&Operand::new("a", &view), view.is_aligned(16))
}

fn check(op: &BsrSddmm<'_>, values: &[usize]) -> Result<BsrSddmmProblem, String> {
    let mut data = vec![0f32; values.iter().product()];
    op.problem(&ViewMut::from_slice(&mut data, values).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn numbers() {
    let pattern = pattern();
    let (a, b) = (view(&[40, 24]), view(&[70, 24]).permute(&[1, 0]).unwrap());
    let op = BsrSddmm { alpha: 2.0, beta: 3.0, ..BsrSddmm::new(&pattern, a, b) };
    let problem = check(&op, &[2, 16, 16]).unwrap();
    let sizes = (problem.m, problem.n, problem.k, problem.block_size, problem.nnz_blocks);
    assert_eq!(sizes, (40, 70, 24, 16, 2));
    assert_eq!((problem.dtype, problem.values_dtype), (DType::F16, DType::F32));
    assert_eq!((problem.a.major, problem.a.ld), (Major::Row, 24));
    assert_eq!((problem.b.major, problem.b.ld), (Major::Column, 24));
    assert_eq!((problem.alpha, problem.beta), (2.0, 3.0));
    assert!(!problem.is_empty());
    let nothing = BsrMatrix::from_coo(40, 70, 16, DType::F16, &[]).unwrap();
    assert!(check(&BsrSddmm { pattern: &nothing, ..op }, &[0, 16, 16]).unwrap().is_empty());
}

#[test]
fn rows_or_columns_are_contiguous() {
    let of = |shape, strides| layout(strided(0, shape, strides));
    let layout = |shape, strides| of(shape, strides).map(|found| (found.major, found.ld)).unwrap();
    assert_eq!(layout([40, 24], [32, 1]), (Major::Row, 32));
    assert_eq!(layout([40, 24], [1, 48]), (Major::Column, 48));
    // Repeated rows are rows that are no distance apart.
    assert_eq!(layout([40, 24], [0, 1]), (Major::Row, 0));
    // Of a single row or column the distance to the next does not matter, whatever the other stride
    // is.
    assert_eq!(layout([1, 24], [7, 1]), (Major::Row, 24));
    assert_eq!(layout([40, 1], [1, 7]), (Major::Column, 40));
    assert_eq!(layout([40, 1], [1, 1]), (Major::Column, 40));
    assert_eq!(layout([1, 24], [1, 16]), (Major::Column, 16));
    assert_eq!(layout([40, 1], [16, 1]), (Major::Row, 16));
    assert_eq!(layout([1, 1], [5, 9]), (Major::Row, 8));
    assert_eq!(layout([0, 24], [24, 1]), (Major::Row, 24));
    let refused = of([40, 24], [64, 2]).unwrap_err().to_string();
    assert!(refused.contains("rows or its columns must be contiguous"), "{refused}");
}

#[test]
fn lines_may_start_anywhere() {
    let aligned = |offset, ld| layout(strided(offset, [30, 20], [ld, 1])).unwrap().aligned;
    assert!(aligned(0, 24) && aligned(8, 64));
    assert!(!aligned(0, 20) && !aligned(0, 25) && !aligned(1, 24) && !aligned(4, 24));
    let columns = layout(strided(0, [20, 30], [1, 28])).unwrap();
    assert!(!columns.aligned);
    let pattern = pattern();
    let mut data = vec![0f32; 2 * 256 + 8];
    let start = data.as_ptr().align_offset(16);
    for (offset, expected) in [(0, true), (4, true), (1, false)] {
        let values = ViewMut::from_slice(&mut data[start + offset..][..512], &[2, 16, 16]).unwrap();
        let problem =
            BsrSddmm::new(&pattern, view(&[40, 8]), view(&[8, 70])).problem(&values).unwrap();
        assert_eq!(problem.values_aligned, expected);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let pattern = pattern();
    let op = BsrSddmm::new(&pattern, view(&[40, 24]), view(&[24, 70]));
    let refused = |op: BsrSddmm<'_>, values: &[usize], expected: &str| {
        let found = check(&op, values).unwrap_err();
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    };
    let blocks = [2, 16, 16];
    refused(BsrSddmm { a: view(&[40]), ..op }, &blocks, "a has shape [40]");
    refused(
        BsrSddmm { a: view(&[41, 24]), ..op },
        &blocks,
        "a has shape [41, 24], expected [40, 24]",
    );
    refused(
        BsrSddmm { b: view(&[23, 70]), ..op },
        &blocks,
        "b has shape [23, 70], expected [24, 70]",
    );
    refused(BsrSddmm { b: view(&[24, 71]), ..op }, &blocks, "b has shape");
    refused(op, &[3, 16, 16], "values has shape [3, 16, 16], expected [2, 16, 16]");
    refused(op, &[2, 256], "values has shape");
    refused(BsrSddmm { a: strided(0, [40, 24], [64, 2]), ..op }, &blocks, "a has strides [64, 2]");
    refused(
        BsrSddmm { b: strided(0, [24, 70], [3, 100]), ..op },
        &blocks,
        "b has strides [3, 100]",
    );
    refused(BsrSddmm { alpha: f32::NAN, ..op }, &blocks, "alpha is NaN");
    refused(BsrSddmm { beta: f32::INFINITY, ..op }, &blocks, "beta is inf");
    let wide = [0f32; 24 * 70];
    let wide = View::from_slice(&wide, &[24, 70]).unwrap();
    refused(BsrSddmm { b: wide, ..op }, &blocks, "b is f32, expected f16");
    let integers = [0i32; 40 * 24];
    let integers = View::from_slice(&integers, &[40, 24]).unwrap();
    refused(BsrSddmm { a: integers, ..op }, &blocks, "a is i32");

    let mut integers = [0i32; 512];
    let integers = ViewMut::from_slice(&mut integers, &blocks).unwrap();
    assert!(matches!(op.problem(&integers), Err(Error::DType { what: "values", .. })));
    let mut gaps = [0f32; 2 * 16 * 20];
    let gaps = ViewMut::from_slice_strided(&mut gaps, &blocks, &[320, 20, 1]).unwrap();
    assert!(matches!(op.problem(&gaps), Err(Error::Stride { what: "values", .. })));
}

#[test]
fn flops_count_sampled_blocks() {
    let problem = BsrSddmmProblem::new(DType::F16, [100, 30, 70], 32, 5, [Major::Row; 2]);
    assert_eq!(bsr_sddmm_flops(&problem), 2 * 5 * 1024 * 70);
}
