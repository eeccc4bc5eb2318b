use super::super::fixtures::{geometries, indices, random_blocks, random_mask, token_masks};
use super::*;
use crate::Error;
use blockflash_sys::DType;

/// 200 × 150 in blocks of 128 × 64, two batch entries, two heads.
fn mask() -> BlockMask {
    let geometry = BlockGeometry::new(200, 150, 128, 64).unwrap();
    let row_ptr = [[0, 1, 4], [4, 4, 4], [4, 4, 6], [6, 7, 8]].concat();
    BlockMask::from_parts(geometry, 2, 2, &row_ptr, &[2, 0, 1, 2, 0, 1, 1, 2]).unwrap()
}

#[test]
fn accessors() {
    let mask = mask();
    assert_eq!(mask.geometry(), BlockGeometry::new(200, 150, 128, 64).unwrap());
    assert_eq!(
        [
            mask.seqlen_q(),
            mask.seqlen_kv(),
            mask.block_q(),
            mask.block_kv(),
            mask.rows(),
            mask.cols()
        ],
        [200, 150, 128, 64, 2, 3]
    );
    assert_eq!((mask.batch(), mask.heads(), mask.nnz(), mask.device()), (2, 2, 8, Device::cpu()));
    assert_eq!((mask.row_ptr().shape(), mask.col_idx().shape()), (&[2, 2, 3][..], &[8][..]));
    assert_eq!((mask.row_ptr().dtype(), mask.col_idx().dtype()), (DType::I32, DType::I32));
    assert_eq!((mask.row_order().shape(), mask.row_order().dtype()), (&[2, 2, 2][..], DType::I32));
    assert_eq!(mask.density(), 8.0 / 24.0);
    assert_eq!(mask.imbalance().unwrap(), 3.0);
}

#[test]
fn rows_list_their_columns() {
    let mask = mask();
    let row = |batch, head, row| mask.row(batch, head, row).unwrap().collect::<Vec<_>>();
    assert_eq!([row(0, 0, 0), row(0, 0, 1), row(0, 1, 1)], [vec![2], vec![0, 1, 2], vec![]]);
    assert_eq!([row(1, 0, 1), row(1, 1, 0), row(1, 1, 1)], [vec![0, 1], vec![1], vec![2]]);
    assert_eq!(mask.row(0, 0, 1).unwrap().len(), 3);
    let problem = |batch, head, row| mask.row(batch, head, row).err().unwrap().to_string();
    assert_eq!(problem(2, 0, 0), "invalid block mask: batch is 2, but there are 2");
    assert_eq!(problem(0, 2, 0), "invalid block mask: head is 2, but there are 2");
    assert_eq!(problem(0, 0, 2), "invalid block mask: row is 2, but there are 2");
}

/// Longest first; of equally long ones the last.
#[test]
fn rows_are_taken_in_the_order_of_their_length() {
    let order = |mask: &BlockMask| mask.row_order().view().as_slice::<i32>().unwrap().to_vec();
    assert_eq!(order(&mask()), [[1, 0], [1, 0], [1, 0], [1, 0]].concat());
    let geometry = BlockGeometry::new(5 * 64, 3 * 64, 64, 64).unwrap();
    let row_ptr = [[0, 1, 3, 4, 6, 6], [6, 6, 6, 6, 6, 6], [6, 9, 11, 12, 12, 12]].concat();
    let mask =
        BlockMask::from_parts(geometry, 1, 3, &row_ptr, &[2, 0, 1, 1, 0, 2, 0, 1, 2, 0, 1, 2])
            .unwrap();
    assert_eq!(order(&mask), [[3, 1, 2, 0, 4], [4, 3, 2, 1, 0], [0, 1, 2, 4, 3]].concat());
    assert_eq!(order(&mask.to(&Device::cpu().stream().unwrap()).unwrap()), order(&mask));
    for geometry in geometries() {
        let mask = random_mask(geometry, 2, 3, 5);
        let columns = |at: usize, row: i32| mask.row(at / 3, at % 3, row as usize).unwrap().len();
        for (at, order) in order(&mask).chunks_exact(geometry.rows().max(1)).enumerate() {
            let mut expected: Vec<i32> = (0..geometry.rows() as i32).collect();
            expected.sort_by_key(|&row| (usize::MAX - columns(at, row), -row));
            assert_eq!(order, expected, "{geometry:?}");
        }
    }
}

#[test]
fn copies_are_equal() {
    let stream = Device::cpu().stream().unwrap();
    for geometry in geometries() {
        let mask = random_mask(geometry, 2, 3, 1);
        let copy = mask.to(&stream).unwrap();
        assert_eq!(indices(&copy), indices(&mask));
        assert_eq!((copy.geometry(), copy.batch(), copy.heads()), (geometry, 2, 3));
        assert_eq!(copy.row_ptr().shape(), mask.row_ptr().shape());
        assert_eq!(copy.to_bool().unwrap(), random_blocks(geometry, 2, 3, 1));
    }
}

#[test]
fn pairs_are_counted_one_by_one() {
    for geometry in geometries() {
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let (block_q, block_kv) = (geometry.block_q(), geometry.block_kv());
        let mask = random_mask(geometry, 1, 2, 7);
        let blocks = mask.to_bool().unwrap();
        for tokens in token_masks() {
            let mut pairs = 0;
            for head in 0..2 {
                for i in 0..seqlen_q {
                    let row = head * geometry.rows() + i / block_q;
                    let visible = tokens.visible(i, seqlen_q, seqlen_kv);
                    let attends = |&j: &usize| blocks[row * geometry.cols() + j / block_kv];
                    pairs += visible.filter(attends).count() as u64;
                }
            }
            assert_eq!(mask.visited_pairs(tokens).unwrap(), pairs, "{geometry:?} {tokens:?}");
            let full = BlockMask::full(geometry).unwrap().visited_pairs(tokens).unwrap();
            assert_eq!(full, tokens.visited_pairs(seqlen_q, seqlen_kv), "{geometry:?} {tokens:?}");
        }
    }
}

#[test]
fn nothing_to_visit() {
    for (seqlen_q, seqlen_kv) in [(0, 100), (100, 0), (0, 0), (100, 100)] {
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, 64, 64).unwrap();
        let blocks = vec![false; 2 * geometry.rows() * geometry.cols()];
        let mask = BlockMask::from_bool(geometry, 2, 1, &blocks).unwrap();
        assert_eq!((mask.nnz(), mask.density(), mask.imbalance().unwrap()), (0, 0.0, 1.0));
        assert_eq!(mask.visited_pairs(Mask::Full).unwrap(), 0);
        assert_eq!(mask.to_bool().unwrap(), blocks);
    }
}

#[test]
fn too_many_booleans_are_out_of_memory() {
    // 2^48 blocks, none of them visited.
    let geometry = BlockGeometry::new(1 << 30, 1 << 30, 64, 64).unwrap();
    let result = BlockMask::global(geometry, &[], &[]).unwrap().to_bool();
    assert!(matches!(result, Err(Error::Safe(blockflash_safe::Error::OutOfMemory { .. }))));
}
