//! Arbitrary bytes and arbitrary index arrays: an error or a valid object, never a panic.

use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Error, Layout, Tensor, View};
use blockflash_tests::bsr::{BsrData, Limits, bsr_cases};
use blockflash_tests::property::config;
use half::f16;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

fn entry() -> impl Strategy<Value = i32> {
    prop_oneof![6 => 0..12i32, 1 => any::<i32>(), 1 => -2..0i32]
}

/// What makes index arrays a BSR structure, said once more.
fn valid(row_ptr: &[i32], col_idx: &[i32], block_rows: usize, block_cols: usize) -> bool {
    let ends = row_ptr.first() == Some(&0)
        && row_ptr.last().is_some_and(|&end| end as usize == col_idx.len());
    ends && row_ptr.len() == block_rows + 1
        && row_ptr.is_sorted()
        && row_ptr.windows(2).all(|pair| {
            let row = &col_idx[pair[0] as usize..pair[1] as usize];
            row.windows(2).all(|pair| pair[0] < pair[1])
                && row.iter().all(|&col| col >= 0 && (col as usize) < block_cols)
        })
}

/// Index arrays between nonsense and nearly right.
fn indices() -> impl Strategy<Value = Vec<i32>> {
    let entry = entry();
    let sorted = vec(0..12i32, 0..12).prop_map(|mut v| {
        v.sort_unstable();
        v
    });
    prop_oneof![
        1 => vec(entry, 0..12),
        3 => sorted.clone(),
        3 => sorted.prop_map(|mut v| {
            v.insert(0, 0);
            v
        }),
    ]
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![8 => 0..70usize, 1 => any::<usize>(), 1 => Just(1usize << 31)]
}

fn one_line(error: &Error) {
    let message = error.to_string();
    assert!(!message.contains('\n') && message.len() < 300, "{message:?}");
}

proptest! {
    #![proptest_config(config(4000))]

    #[test]
    fn bsr_from_arbitrary_parts(
        rows in size(),
        cols in size(),
        block_size in prop_oneof![5 => 1..20usize, 1 => any::<usize>(), 1 => Just(0usize)],
        row_ptr in indices(),
        col_idx in indices(),
        blocks in prop_oneof![3 => Just(None), 1 => (0..12usize).prop_map(Some)],
        value in prop_oneof![3 => Just(0f32), 1 => Just(1f32), 1 => Just(f32::NAN)],
    ) {
        // Usually as many values as there are indices.
        let blocks = blocks.unwrap_or(col_idx.len());
        let side = block_size.min(20);
        let values = vec![value; blocks * side * side];
        let view = View::from_slice(&values, &[blocks, side, side]).unwrap();
        match BsrMatrix::from_parts(rows, cols, block_size, &row_ptr, &col_idx, view) {
            Err(error) => one_line(&error),
            Ok(matrix) => {
                let [block_rows, block_cols] = [rows, cols].map(|size| size.div_ceil(block_size));
                prop_assert!(valid(&row_ptr, &col_idx, block_rows, block_cols));
                // What was accepted can be used.
                if rows.saturating_mul(cols) < 10_000 {
                    prop_assert_eq!(matrix.to_dense().unwrap().len(), rows * cols);
                    let b = vec![1f32; cols * 3];
                    let b = View::from_slice(&b, &[cols, 3]).unwrap();
                    let stream = Device::cpu().stream().unwrap();
                    let c = BsrMatmul::new(&matrix, b).matmul(DType::F32, &stream).unwrap();
                    prop_assert_eq!(c.shape(), &[rows, 3]);
                }
            }
        }
    }

    /// Valid arrays with a few entries damaged: nearly right is the hard kind of wrong.
    #[test]
    fn bsr_from_damaged_parts(
        case in bsr_cases(Limits {
            dtypes: vec![DType::F16],
            block_sizes: vec![1, 2, 3, 8],
            blocks: 6,
            columns: 1,
            any_layout: false,
        }),
        damage in vec((any::<Index>(), any::<bool>(), entry()), 0..3),
        cut in prop::option::weighted(0.2, 1..3usize),
    ) {
        let data = BsrData::generate(&case);
        let (mut row_ptr, mut col_idx) = (data.row_ptr.clone(), data.col_idx.clone());
        for (at, in_rows, value) in damage {
            let array = if in_rows { &mut row_ptr } else { &mut col_idx };
            if !array.is_empty() {
                let at = at.index(array.len());
                array[at] = value;
            }
        }
        if let Some(cut) = cut {
            let array = if case.seed % 2 == 0 { &mut row_ptr } else { &mut col_idx };
            array.truncate(array.len().saturating_sub(cut));
        }
        let [m, _, k] = case.mnk;
        let size = case.block_size;
        let values: Vec<f16> = data.values.iter().map(|&x| f16::from_f32(x)).collect();
        let view = View::from_slice(&values, &[data.col_idx.len(), size, size]).unwrap();
        match BsrMatrix::from_parts(m, k, size, &row_ptr, &col_idx, view) {
            Err(error) => {
                one_line(&error);
                let damaged = row_ptr != data.row_ptr || col_idx != data.col_idx;
                prop_assert!(damaged, "undamaged, but {error}");
            }
            Ok(matrix) => {
                prop_assert!(valid(&row_ptr, &col_idx, m.div_ceil(size), k.div_ceil(size)));
                prop_assert_eq!(matrix.to_dense().unwrap().len(), m * k);
            }
        }
    }

    #[test]
    fn bsr_from_arbitrary_csr(
        rows in 0..12usize,
        cols in 0..12usize,
        block_size in 0..6usize,
        row_ptr in indices(),
        col_idx in indices(),
        short in any::<bool>(),
    ) {
        let values = vec![1f32; col_idx.len().saturating_sub(usize::from(short))];
        match BsrMatrix::from_csr(rows, cols, block_size, DType::F32, &row_ptr, &col_idx, &values) {
            Err(error) => one_line(&error),
            Ok(matrix) => {
                let sum: f32 = matrix.to_dense().unwrap().iter().sum();
                prop_assert_eq!(sum, col_idx.len() as f32);
            }
        }
    }

    #[test]
    fn bsr_from_arbitrary_blocks_and_triplets(
        rows in size(),
        cols in size(),
        block_size in 0..6usize,
        places in vec((0..6usize, 0..6usize), 0..8),
        missing in 0..3usize,
    ) {
        let values = vec![0f32; (places.len() * block_size * block_size).saturating_sub(missing)];
        // An empty matrix of 2³¹ block rows is valid and 8 GB of row_ptr; leave those alone.
        let block_rows = rows.div_ceil(block_size.max(1));
        prop_assume!(!(1 << 20..1 << 31).contains(&block_rows));
        let blocks = BsrMatrix::from_blocks(rows, cols, block_size, DType::F16, &places, &values);
        blocks.err().iter().for_each(one_line);
        let triplets: Vec<_> = places.iter().map(|&(row, col)| (row, col, 1.0)).collect();
        let coo = BsrMatrix::from_coo(rows, cols, block_size, DType::F16, &triplets);
        coo.err().iter().for_each(one_line);
    }

    #[test]
    fn layouts_from_arbitrary_numbers(
        shape in vec(size(), 0..6),
        strides in vec(size(), 0..6),
        length in 0..100usize,
    ) {
        let data = vec![f16::ZERO; length];
        if let Ok(layout) = Layout::strided(&shape, &strides) {
            let (span, empty) = (layout.span(), shape.contains(&0));
            prop_assert_eq!(span == 0, empty);
            let view = View::from_slice_strided(&data, &shape, &strides);
            prop_assert_eq!(view.is_ok(), span <= length);
            let mut data = data.clone();
            let view = blockflash_ops::ViewMut::from_slice_strided(&mut data, &shape, &strides);
            prop_assert!(view.is_err() || !layout.overlaps_itself());
            if layout.elements() < 1000 {
                let mut offsets: Vec<usize> = layout.offsets().collect();
                prop_assert!(offsets.iter().all(|&offset| offset < span));
                let elements = offsets.len();
                offsets.sort_unstable();
                offsets.dedup();
                let distinct = offsets.len() == elements;
                prop_assert!(distinct || layout.overlaps_itself(), "an overlap was missed");
            }
        }
        let stream = Device::cpu().stream().unwrap();
        // A dimension of 0 does not excuse the others.
        let elements = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s.max(1)));
        // What is small must work, what exceeds any address space must be an error, and the rest is
        // left alone.
        let small = shape.len() <= 4 && elements.is_some_and(|n| n < 1 << 20);
        if small || elements.is_none_or(|n| n >= 1 << 48) {
            match Tensor::zeros(&stream, DType::F16, &shape) {
                Ok(tensor) => {
                    let elements = shape.iter().product::<usize>();
                    prop_assert_eq!(tensor.layout().elements(), elements);
                }
                Err(error) => {
                    prop_assert!(!small, "{shape:?}: {error}");
                    prop_assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }
}
