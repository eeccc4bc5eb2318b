use super::*;
use crate::fixtures::values;
use crate::{BsrMatrix, Device, Error, Operation, Stream, Tensor};
use blockflash_sys::manifest;

const LAYOUTS: [[Major; 2]; 4] = [
    [Major::Row, Major::Row],
    [Major::Row, Major::Column],
    [Major::Column, Major::Row],
    [Major::Column, Major::Column],
];

/// Stored blocks: an empty block row, rows of different lengths, and the last row and column.
const BLOCKS: [(usize, usize); 6] = [(0, 0), (0, 2), (0, 4), (2, 1), (3, 0), (3, 4)];

/// A pattern with tails in both directions.
fn pattern(block_size: usize) -> BsrMatrix {
    let triplets = BLOCKS.map(|(row, col)| (row * block_size, col * block_size, 1.0));
    BsrMatrix::from_coo(3 * block_size + 2, 4 * block_size + 1, block_size, DType::F32, &triplets)
        .unwrap()
}

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// A row-major matrix in memory of this layout, lines `gap` elements more apart than they are long.
fn stored(matrix: &[f32], [rows, cols]: [usize; 2], major: Major, gap: usize) -> Vec<f32> {
    let [lines, length] = if major == Major::Row { [rows, cols] } else { [cols, rows] };
    let mut memory = vec![f32::NAN; lines * (length + gap)];
    for (at, &value) in matrix.iter().enumerate() {
        let (line, inside) =
            if major == Major::Row { (at / cols, at % cols) } else { (at % cols, at / cols) };
        memory[line * (length + gap) + inside] = value;
    }
    memory
}

fn view<T: Float>(memory: &[T], [rows, cols]: [usize; 2], major: Major, gap: usize) -> View<'_> {
    let strides = if major == Major::Row { [cols + gap, 1] } else { [1, rows + gap] };
    View::from_slice_strided(memory, &[rows, cols], &strides).unwrap()
}

/// The definition in f64, zero beyond the matrix; `finish` gets A·B and the index of the value.
fn reference(
    pattern: &BsrMatrix,
    a: &[f32],
    b: &[f32],
    k: usize,
    finish: impl Fn(f64, usize) -> f64,
) -> Vec<f64> {
    let (size, n) = (pattern.block_size(), pattern.cols());
    let element = |at: usize| {
        let (block_row, block_col) = BLOCKS[at / (size * size)];
        let (row, col) = (block_row * size + at / size % size, block_col * size + at % size);
        if row >= pattern.rows() || col >= n {
            return 0.0;
        }
        finish((0..k).map(|l| f64::from(a[row * k + l]) * f64::from(b[l * n + col])).sum(), at)
    };
    (0..BLOCKS.len() * size * size).map(element).collect()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let epsilon = tolerance * (1.0 + expected.abs());
        let close = approx::abs_diff_eq!(f64::from(found), expected, epsilon = epsilon);
        assert!(close, "value {at} is {found}, expected {expected}");
    }
}

#[test]
fn every_layout_and_size() {
    let stream = cpu();
    for block_size in [1, 3, 16, 33] {
        let pattern = pattern(block_size);
        let (m, n) = (pattern.rows(), pattern.cols());
        for k in [1, 7, DEPTH - 1, 2 * DEPTH + 5] {
            let (a, b) = (values(m * k, 1), values(k * n, 2));
            let expected = reference(&pattern, &a, &b, k, |sum, _| sum);
            for [a_major, b_major] in LAYOUTS {
                for gap in [0, 3] {
                    let a = stored(&a, [m, k], a_major, gap);
                    let b = stored(&b, [k, n], b_major, 2 * gap);
                    let (a, b) =
                        (view(&a, [m, k], a_major, gap), view(&b, [k, n], b_major, 2 * gap));
                    let found = BsrSddmm::new(&pattern, a, b).sddmm(DType::F32, &stream).unwrap();
                    assert_close(
                        &found.to_vec(&stream).unwrap(),
                        &expected,
                        1e-5 * (k as f64).sqrt(),
                    );
                }
            }
        }
    }
}

fn rounded<T: Float>(widen: fn(T) -> f32, narrow: fn(f32) -> T, tolerance: f64) {
    let (stream, pattern, k) = (cpu(), pattern(16), 20);
    let [a, b] = [(pattern.rows(), 1), (pattern.cols(), 2)]
        .map(|(size, seed)| values(size * k, seed).into_iter().map(narrow).collect::<Vec<T>>());
    let wide = |data: &[T]| data.iter().map(|&x| widen(x)).collect::<Vec<f32>>();
    let expected = reference(&pattern, &wide(&a), &wide(&b), k, |sum, _| sum);
    let (a, b) = (
        View::from_slice(&a, &[pattern.rows(), k]).unwrap(),
        View::from_slice(&b, &[k, pattern.cols()]).unwrap(),
    );
    let op = BsrSddmm::new(&pattern, a, b);
    let narrow = op.sddmm(T::DTYPE, &stream).unwrap().to_vec::<T>(&stream).unwrap();
    assert_close(&wide(&narrow), &expected, tolerance);
    assert_close(&op.sddmm(DType::F32, &stream).unwrap().to_vec(&stream).unwrap(), &expected, 1e-5);
}

#[test]
fn half_precision() {
    rounded(f16::to_f32, f16::from_f32, 1.0 / 2048.0);
    rounded(bf16::to_f32, bf16::from_f32, 1.0 / 256.0);
}

#[test]
fn old_values_count_only_with_beta() {
    let (stream, pattern, k) = (cpu(), pattern(16), 9);
    let (a, b) = (values(pattern.rows() * k, 1), values(k * pattern.cols(), 2));
    let shape = [BLOCKS.len(), 16, 16];
    let (a_view, b_view) = (
        View::from_slice(&a, &[pattern.rows(), k]).unwrap(),
        View::from_slice(&b, &[k, pattern.cols()]).unwrap(),
    );
    let op = BsrSddmm { alpha: -0.5, ..BsrSddmm::new(&pattern, a_view, b_view) };
    // Without beta NaN does not matter.
    let mut data = vec![f32::NAN; shape.iter().product()];
    op.sddmm_into(ViewMut::from_slice(&mut data, &shape).unwrap(), &stream).unwrap();
    assert_close(&data, &reference(&pattern, &a, &b, k, |sum, _| -0.5 * sum), 1e-5);
    // With beta it does, but not beyond the matrix, where values become zero whatever was there.
    let old = values(data.len(), 3);
    let expected = reference(&pattern, &a, &b, k, |sum, at| -0.5 * sum + 2.0 * f64::from(old[at]));
    let mut data = old.clone();
    let op = BsrSddmm { beta: 2.0, ..op };
    op.sddmm_into(ViewMut::from_slice(&mut data, &shape).unwrap(), &stream).unwrap();
    assert_close(&data, &expected, 1e-5);
    assert_eq!(data[5 * 256 + 255].to_bits(), 0);
    assert!(matches!(op.sddmm(DType::F32, &stream), Err(Error::InvalidScale { what: "beta", .. })));
}

#[test]
fn what_is_not_sampled_does_not_leak() {
    let (stream, pattern, k) = (cpu(), pattern(16), 5);
    let (mut a, mut b) = (vec![1f32; pattern.rows() * k], vec![1f32; k * pattern.cols()]);
    // Block row 1 has no block; block column 3 neither.
    a[16 * k..32 * k].fill(f32::NAN);
    for row in b.chunks_mut(pattern.cols()) {
        row[48..64].fill(f32::INFINITY);
    }
    let a = View::from_slice(&a, &[pattern.rows(), k]).unwrap();
    let b = View::from_slice(&b, &[k, pattern.cols()]).unwrap();
    let found = BsrSddmm::new(&pattern, a, b).sddmm(DType::F32, &stream).unwrap();
    let found: Vec<f32> = found.to_vec(&stream).unwrap();
    assert!(found.iter().all(|&value| value == 5.0 || value == 0.0));
    // Nothing to sum up is zero.
    let nothing = Tensor::empty(&stream, DType::F32, &[pattern.rows(), 0]).unwrap();
    let none = Tensor::empty(&stream, DType::F32, &[0, pattern.cols()]).unwrap();
    let found =
        BsrSddmm::new(&pattern, nothing.view(), none.view()).sddmm(DType::F32, &stream).unwrap();
    assert!(found.to_vec::<f32>(&stream).unwrap().iter().all(|&value| value == 0.0));
}

#[test]
fn a_pattern_without_blocks() {
    let stream = cpu();
    for (rows, cols) in [(40, 24), (0, 24), (40, 0)] {
        let pattern = BsrMatrix::from_coo(rows, cols, 16, DType::F16, &[]).unwrap();
        let (a, b) = (
            Tensor::zeros(&stream, DType::F16, &[rows, 8]).unwrap(),
            Tensor::zeros(&stream, DType::F16, &[8, cols]).unwrap(),
        );
        let found = BsrSddmm::new(&pattern, a.view(), b.view()).sddmm(DType::F16, &stream).unwrap();
        assert_eq!(found.shape(), [0, 16, 16]);
    }
}

#[test]
fn prepared_calls_and_named_kernels() {
    let (stream, pattern) = (cpu(), pattern(16));
    let (a, b) = (vec![1f32; pattern.rows() * 8], vec![2f32; 8 * pattern.cols()]);
    let (a, b) = (
        View::from_slice(&a, &[pattern.rows(), 8]).unwrap(),
        View::from_slice(&b, &[8, pattern.cols()]).unwrap(),
    );
    let op = BsrSddmm::new(&pattern, a, b);
    let mut values = Tensor::empty(&stream, DType::F32, &[BLOCKS.len(), 16, 16]).unwrap();
    let prepared = op.prepare(&values.view_mut(), &stream).unwrap();
    assert!(prepared.kernel().is_none());
    op.run_prepared(&prepared, values.view_mut(), &stream).unwrap();
    assert_eq!(values.to_vec::<f32>(&stream).unwrap()[0], 16.0);
    let other = BsrSddmm { alpha: 2.0, ..op };
    let refused = other.run_prepared(&prepared, values.view_mut(), &stream);
    assert!(matches!(refused, Err(Error::NotPrepared { op: "bsr_sddmm" })));
    let row = manifest::kernels().iter().find(|row| row.bsr_sddmm_tile().is_some()).unwrap();
    let refused = op.run_with(row, values.view_mut(), &stream);
    assert!(matches!(refused, Err(Error::Unsupported { op: "bsr_sddmm", .. })));
}
