use super::*;
use crate::BlockGeometry;

/// The columns of each row of lists, over all groups.
fn rows(lists: &BlockLists) -> Vec<Vec<i32>> {
    let (row_ptr, col_idx) = (lists.row_ptr().view(), lists.col_idx().view());
    let (row_ptr, col_idx) = (row_ptr.as_slice::<i32>().unwrap(), col_idx.as_slice().unwrap());
    let rows = lists.row_order().shape().last().copied().unwrap();
    let of_group = |group: &[i32]| {
        let list = |ends: &[i32]| col_idx[ends[0] as usize..ends[1] as usize].to_vec();
        group.windows(2).map(list).collect::<Vec<_>>()
    };
    row_ptr.chunks(rows + 1).flat_map(of_group).collect()
}

fn mask(lengths: [usize; 2], batch: usize, heads: usize, seed: usize) -> BlockMask {
    let geometry = BlockGeometry::new(lengths[0], lengths[1], 64, 128).unwrap();
    let blocks = batch * heads * geometry.rows() * geometry.cols();
    let visited: Vec<bool> = (0..blocks).map(|at| (at * 7 + seed) % 5 < 2).collect();
    BlockMask::from_bool(geometry, batch, heads, &visited).unwrap()
}

#[test]
fn rows_of_the_transpose_are_columns_of_the_mask() {
    let mask = mask([300, 500], 2, 3, 1).with_transpose().unwrap();
    let visited = mask.to_bool().unwrap();
    let [lists, transpose] = mask.for_backward().unwrap();
    assert_eq!(transpose.row_ptr().shape(), [2, 3, 5]);
    assert_eq!(transpose.col_idx().shape(), lists.col_idx().shape());
    for (at, row) in rows(transpose).iter().enumerate() {
        let (group, col) = (at / 4, at % 4);
        let expected: Vec<i32> = (0..5)
            .filter(|row| visited[(group * 5 + row) * 4 + col])
            .map(|row| row as i32)
            .collect();
        assert_eq!(*row, expected);
    }
    let sizes = mask.transposed_sizes().unwrap();
    assert_eq!([sizes.block_q, sizes.block_kv, sizes.batch, sizes.heads], [128, 64, 2, 3]);
    assert_eq!(sizes.packed_rows, None);
}

#[test]
fn sequences_of_a_packed_mask_are_transposed_one_by_one() {
    let masks = [mask([300, 500], 1, 2, 1), mask([0, 70], 1, 2, 2), mask([65, 129], 1, 2, 3)];
    let packed = BlockMask::packed(&masks.each_ref()).unwrap().with_transpose().unwrap();
    let [_, transpose] = packed.for_backward().unwrap();
    let cu_rows = transpose.cu_rows().unwrap().view();
    assert_eq!(cu_rows.as_slice::<i32>().unwrap(), [0, 4, 5, 7]);
    assert_eq!(packed.transposed_sizes().unwrap().packed_rows, Some(7));
    let all = rows(transpose);
    let alone = masks.map(|mask| rows(&mask.transposed_lists().unwrap()));
    for head in 0..2 {
        let expected = [(0, 4), (1, 1), (2, 2)]
            .into_iter()
            .flat_map(|(mask, cols): (usize, usize)| &alone[mask][head * cols..][..cols]);
        assert!(all[head * 7..][..7].iter().eq(expected), "head {head}");
    }
}

#[test]
fn only_on_request() {
    let mask = mask([100, 100], 1, 1, 0);
    assert!(mask.for_backward().is_none() && mask.transposed_sizes().is_none());
    let stream = Device::cpu().stream().unwrap();
    let copy = mask.with_transpose().unwrap().to(&stream).unwrap();
    assert!(copy.for_backward().is_some());
}
