//! Arbitrary bytes and arbitrary index arrays: an error or a valid object, never a panic.

use blockflash_ops::{BsrMatmul, BsrMatrix, DType, Device, Error, Layout, Tensor, View};
use blockflash_tests::property::config;
use half::f16;
use proptest::prelude::*;

/// Index arrays between nonsense and nearly right.
fn indices() -> impl Strategy<Value = Vec<i32>> {
    let entry = prop_oneof![6 => 0..12i32, 1 => any::<i32>(), 1 => -2..0i32];
    let sorted = prop::collection::vec(0..12i32, 0..12).prop_map(|mut v| {
        v.sort_unstable();
        v
    });
    prop_oneof![
        1 => prop::collection::vec(entry, 0..12),
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
                prop_assert_eq!(row_ptr.len(), rows.div_ceil(block_size) + 1);
                prop_assert!(row_ptr.is_sorted() && row_ptr[0] == 0);
                prop_assert_eq!(row_ptr[row_ptr.len() - 1] as usize, col_idx.len());
                for pair in row_ptr.windows(2) {
                    let row = &col_idx[pair[0] as usize..pair[1] as usize];
                    prop_assert!(row.windows(2).all(|pair| pair[0] < pair[1]), "unsorted or duplicate");
                    prop_assert!(row.iter().all(|&col| col >= 0 && (col as usize) < cols.div_ceil(block_size)));
                }
                // What was accepted can be used.
                if rows.saturating_mul(cols) < 10_000 {
                    prop_assert_eq!(matrix.to_dense().unwrap().len(), rows * cols);
                    let b = vec![1f32; cols * 3];
                    let b = View::from_slice(&b, &[cols, 3]).unwrap();
                    let c = BsrMatmul::new(&matrix, b).matmul(DType::F32, &Device::cpu().stream().unwrap()).unwrap();
                    prop_assert_eq!(c.shape(), &[rows, 3]);
                }
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
        places in prop::collection::vec((0..6usize, 0..6usize), 0..8),
        missing in 0..3usize,
    ) {
        let values = vec![0f32; (places.len() * block_size * block_size).saturating_sub(missing)];
        // An empty matrix of 2³¹ block rows is valid and 8 GB of row_ptr; leave those alone.
        prop_assume!(rows.div_ceil(block_size.max(1)) < 1 << 20 || rows.div_ceil(block_size.max(1)) >= 1 << 31);
        let blocks = BsrMatrix::from_blocks(rows, cols, block_size, DType::F16, &places, &values);
        blocks.err().iter().for_each(one_line);
        let triplets: Vec<_> = places.iter().map(|&(row, col)| (row, col, 1.0)).collect();
        let coo = BsrMatrix::from_coo(rows, cols, block_size, DType::F16, &triplets);
        coo.err().iter().for_each(one_line);
    }

    #[test]
    fn layouts_from_arbitrary_numbers(
        shape in prop::collection::vec(size(), 0..6),
        strides in prop::collection::vec(size(), 0..6),
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
                prop_assert!(offsets.len() == elements || layout.overlaps_itself(), "an overlap was missed");
            }
        }
        let stream = Device::cpu().stream().unwrap();
        // A dimension of 0 does not excuse the others.
        let elements = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s.max(1)));
        // What is small must work, what exceeds any address space must be an error, and the rest is left alone.
        let small = shape.len() <= 4 && elements.is_some_and(|n| n < 1 << 20);
        if small || elements.is_none_or(|n| n >= 1 << 48) {
            match Tensor::zeros(&stream, DType::F16, &shape) {
                Ok(tensor) => prop_assert_eq!(tensor.layout().elements(), shape.iter().product::<usize>()),
                Err(error) => {
                    prop_assert!(!small, "{shape:?}: {error}");
                    prop_assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }
}
