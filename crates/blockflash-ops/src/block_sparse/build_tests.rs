use super::super::fixtures::{geometries, indices, random_blocks, token_masks};
use super::*;
use crate::Error;
use crate::fixtures::values;

/// 2 × 3 blocks.
fn geometry() -> BlockGeometry {
    BlockGeometry::new(100, 150, 64, 64).unwrap()
}

fn problem(result: Result<BlockMask>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn booleans_and_back() {
    for geometry in geometries() {
        for (batch, heads) in [(1, 1), (1, 3), (2, 1), (2, 3)] {
            let blocks = random_blocks(geometry, batch, heads, 3);
            let mask = BlockMask::from_bool(geometry, batch, heads, &blocks).unwrap();
            assert_eq!(mask.to_bool().unwrap(), blocks);
            assert_eq!(mask.nnz(), blocks.iter().filter(|&&visited| visited).count());
            let (row_ptr, col_idx) = indices(&mask);
            let again = BlockMask::from_parts(geometry, batch, heads, &row_ptr, &col_idx).unwrap();
            assert_eq!(again.to_bool().unwrap(), blocks);
        }
    }
}

#[test]
fn a_known_format() {
    let blocks = [[true, false, true], [false, true, false], [false; 3], [true; 3]].concat();
    let mask = BlockMask::from_bool(geometry(), 1, 2, &blocks).unwrap();
    assert_eq!(indices(&mask), (vec![0, 2, 3, 3, 3, 6], vec![0, 2, 1, 0, 1, 2]));
}

#[test]
fn lists_of_columns() {
    for geometry in geometries() {
        let (rows, cols) = (geometry.rows(), geometry.cols());
        let blocks = random_blocks(geometry, 2, 2, 5);
        let k = cols + 2;
        let mut columns = Vec::new();
        for row in 0..4 * rows {
            // Descending, with padding at both ends.
            let mut list: Vec<i32> = (0..cols)
                .rev()
                .filter(|col| blocks[row * cols + col])
                .map(|col| col as i32)
                .collect();
            list.insert(0, -1);
            list.resize(k, -1);
            columns.extend(list);
        }
        let mask = BlockMask::from_top_k(geometry, 2, 2, k, &columns).unwrap();
        assert_eq!(mask.to_bool().unwrap(), blocks);
    }
    assert_eq!(BlockMask::from_top_k(geometry(), 1, 1, 0, &[]).unwrap().nnz(), 0);
}

#[test]
fn bad_lists_are_named() {
    let from = |columns: &[i32]| problem(BlockMask::from_top_k(geometry(), 1, 2, 2, columns));
    assert!(
        from(&[0, 1, 2, 3, 0, 1, 0, 1])
            .contains("column is 3 at batch 0, head 0, row 1, position 1")
    );
    assert!(
        from(&[0, 1, 2, 1, -2, 1, 0, 1])
            .contains("column is -2 at batch 0, head 1, row 0, position 0")
    );
    assert!(
        from(&[0, 1, 2, 1, -1, -1, 1, 1])
            .contains("column 1 comes twice at batch 0, head 1, row 1, position 1")
    );
    assert!(from(&[0; 7]).contains("columns has shape [7], expected the values of [1, 2, 2, 2]"));
}

#[test]
fn top_k_is_the_head_of_a_sort() {
    for geometry in geometries() {
        let (rows, cols) = (geometry.rows(), geometry.cols());
        // Few different scores, so that there are ties; 0 and −0 are one.
        let mut scores = values(2 * rows * cols, 11);
        scores.iter_mut().for_each(|score| *score = score.round());
        for mask in token_masks() {
            for k in 0..cols + 2 {
                let found = BlockMask::top_k_from_scores(geometry, 1, 2, &scores, k, mask).unwrap();
                for (head, row) in (0..2).flat_map(|head| (0..rows).map(move |row| (head, row))) {
                    let scores = &scores[(head * rows + row) * cols..][..cols];
                    let mut expected: Vec<usize> = geometry.visible_cols(row, mask).collect();
                    expected.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap());
                    expected.truncate(k);
                    expected.sort();
                    let found: Vec<usize> = found.row(0, head, row).unwrap().collect();
                    assert_eq!(
                        found, expected,
                        "{geometry:?} {mask:?} k {k} head {head} row {row}"
                    );
                }
            }
        }
    }
}

#[test]
fn infinite_scores_are_in_order_and_nan_is_an_error() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let build = |scores: &[f32], k| {
        BlockMask::top_k_from_scores(geometry(), 1, 1, scores, k, Mask::causal())
    };
    // Query 49 stands at key 99: the last block column is visible to the second row only.
    let mask = build(&[-inf, 1.0, 9.0, 2.0, inf, -inf], 1).unwrap();
    assert_eq!(mask.row(0, 0, 0).unwrap().collect::<Vec<_>>(), [1]);
    assert_eq!(mask.row(0, 0, 1).unwrap().collect::<Vec<_>>(), [1]);
    assert_eq!(build(&[-inf; 6], 1).unwrap().nnz(), 2);
    let problem = problem(build(&[0.0, 0.0, 0.0, 0.0, 0.0, nan], 0));
    assert!(problem.contains("score is NaN at batch 0, head 0, row 1, position 2"));
}

#[test]
fn wrong_numbers_of_values_are_errors() {
    let blocks = BlockMask::from_bool(geometry(), 1, 1, &[true; 5]);
    assert!(matches!(blocks, Err(Error::Shape { what: "blocks", .. })));
    let scores = BlockMask::top_k_from_scores(geometry(), 1, 1, &[0.0; 7], 1, Mask::Full);
    assert!(matches!(scores, Err(Error::Shape { what: "scores", .. })));
    let lists = BlockMask::from_top_k(geometry(), 1, 1, usize::MAX, &[]);
    assert!(matches!(lists, Err(Error::Shape { what: "columns", .. })));
    assert!(
        problem(BlockMask::from_parts(geometry(), 1, 1, &[0, 0], &[]))
            .contains("row_ptr has 2 entries")
    );
    assert!(problem(BlockMask::from_bool(geometry(), 0, 1, &[])).contains("batch is 0"));
}
