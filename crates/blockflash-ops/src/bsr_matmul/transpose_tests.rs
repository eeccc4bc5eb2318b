use super::*;
use crate::bsr_matmul::pattern::hash;
use crate::{BsrMatmul, BsrMatrix, DType, Error, View};

/// 7 × 10 in blocks of 2: an empty block row, an empty block column, and tails in one direction.
const BLOCKS: [(usize, usize); 6] = [(0, 1), (0, 4), (1, 0), (1, 1), (3, 1), (3, 2)];

fn matrix(blocks: &[(usize, usize)]) -> BsrMatrix {
    let mut values: Vec<f32> = (0..4 * blocks.len()).map(|value| value as f32 + 1.0).collect();
    for (at, _) in blocks.iter().enumerate().filter(|(_, block)| block.0 == 3) {
        values[4 * at + 2..4 * at + 4].fill(0.0); // beyond the matrix
    }
    BsrMatrix::from_blocks(7, 10, 2, DType::F32, blocks, &values).unwrap()
}

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn entries(tensor: &Tensor) -> Vec<i32> {
    tensor.to_vec(&cpu()).unwrap()
}

#[test]
fn block_columns_are_listed() {
    let index = BsrTranspose::new(&matrix(&BLOCKS), &cpu()).unwrap();
    assert_eq!(entries(index.row_ptr()), [0, 1, 4, 5, 5, 6]);
    assert_eq!(entries(index.col_idx()), [1, 0, 1, 3, 3, 0]);
    assert_eq!(entries(index.indices().block_idx().unwrap()), [2, 0, 3, 4, 5, 1]);
    assert_eq!((entries(index.row_order()), index.longest_row()), (vec![1, 0, 2, 4, 3], 3));
    assert_eq!(index.device(), Device::cpu());
    let copy = index.to(&cpu()).unwrap();
    assert_eq!(
        (copy.of, entries(copy.indices().block_idx().unwrap())),
        (index.of, entries(index.indices().block_idx().unwrap()))
    );
}

#[test]
fn empty_matrices_have_an_index() {
    for (rows, cols) in [(0, 0), (0, 5), (5, 0), (5, 5)] {
        let a = BsrMatrix::from_coo(rows, cols, 2, DType::F32, &[]).unwrap();
        let index = BsrTranspose::new(&a, &cpu()).unwrap();
        assert_eq!(entries(index.row_ptr()), vec![0; cols.div_ceil(2) + 1]);
        assert_eq!(
            (entries(index.indices().block_idx().unwrap()).len(), index.longest_row()),
            (0, 0)
        );
        index.is_of(&a).unwrap();
    }
}

/// The index of an index is the pattern itself.
#[test]
fn twice_is_the_same() {
    let a = matrix(&BLOCKS);
    let index = BsrTranspose::new(&a, &cpu()).unwrap();
    let (row_ptr, col_idx) = (entries(index.row_ptr()), entries(index.col_idx()));
    let values = vec![0f32; 4 * col_idx.len()];
    let values = View::from_slice(&values, &[col_idx.len(), 2, 2]).unwrap();
    let transposed = BsrMatrix::from_parts(10, 7, 2, &row_ptr, &col_idx, values).unwrap();
    let back = BsrTranspose::new(&transposed, &cpu()).unwrap();
    assert_eq!(entries(back.row_ptr()), entries(a.row_ptr()));
    assert_eq!(entries(back.col_idx()), entries(a.col_idx()));
    let there: Vec<i32> = entries(back.indices().block_idx().unwrap())
        .iter()
        .map(|&at| entries(index.indices().block_idx().unwrap())[at as usize])
        .collect();
    assert_eq!(there, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn one_index_serves_all_values_of_a_pattern_and_no_other_pattern() {
    let (a, stream) = (matrix(&BLOCKS), cpu());
    let index = BsrTranspose::new(&a, &stream).unwrap();
    let zeros = BsrMatrix::from_blocks(7, 10, 2, DType::F16, &BLOCKS, &[0.0; 24]).unwrap();
    for same in [&a, &a.to(&stream).unwrap(), &zeros] {
        index.is_of(same).unwrap();
    }
    let moved = [(0, 1), (0, 4), (1, 0), (1, 2), (3, 1), (3, 2)];
    let others = [
        (matrix(&BLOCKS[..5]), "7 x 10 with 5 blocks of 2"),
        // Of the same size.
        (matrix(&moved), "7 x 10 with 6 blocks of 2"),
        (BsrMatrix::from_blocks(8, 10, 2, DType::F32, &BLOCKS, &[0.0; 24]).unwrap(), "8 x 10 with"),
        (BsrMatrix::from_blocks(7, 9, 2, DType::F32, &BLOCKS, &[0.0; 24]).unwrap(), "7 x 9 with"),
        (BsrMatrix::from_coo(7, 10, 1, DType::F32, &[]).unwrap(), "with 0 blocks of 1"),
    ];
    for (other, found) in &others {
        let b = vec![0f32; other.rows()];
        let b = View::from_slice(&b, &[other.rows(), 1]).unwrap();
        match BsrMatmul::transposed(other, &index, b).matmul(DType::F32, &stream).unwrap_err() {
            Error::InvalidBsr(what) => {
                assert!(what.contains("another pattern, 7 x 10 with 6 blocks of 2"), "{what}");
                assert!(what.contains(found), "{what}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn hashes_tell_patterns_apart() {
    // All patterns of 3 × 3 blocks.
    let patterns = (0..1u32 << 9).map(|stored| {
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for row in 0..3 {
            col_idx.extend((0..3).filter(|col| stored >> (row * 3 + col) & 1 != 0));
            row_ptr.push(col_idx.len() as i32);
        }
        hash(&row_ptr, &col_idx)
    });
    let mut hashes: Vec<u64> = patterns.collect();
    let bits: u32 = hashes.iter().map(|hash| hash.count_ones()).sum();
    assert!((bits as f64 / hashes.len() as f64 - 32.0).abs() < 1.0, "{bits} bits");
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 1 << 9);
}
