use super::super::fixtures::{geometries, indices, random_blocks, random_mask, token_masks};
use super::*;
use crate::{Align, Error};

/// Sizes of two masks and of what comes of both: equal or broadcast.
const BROADCASTS: [([usize; 2], [usize; 2], [usize; 2]); 6] = [
    ([1, 1], [1, 1], [1, 1]),
    ([2, 3], [2, 3], [2, 3]),
    ([1, 1], [2, 3], [2, 3]),
    ([2, 3], [1, 3], [2, 3]),
    ([2, 1], [1, 3], [2, 3]),
    ([1, 3], [2, 1], [2, 3]),
];

#[test]
fn unions_and_intersections_are_those_of_booleans() {
    for geometry in geometries() {
        let per_head = geometry.rows() * geometry.cols();
        for (a_size, b_size, [batch, heads]) in BROADCASTS {
            let a = random_blocks(geometry, a_size[0], a_size[1], 1);
            let b = random_blocks(geometry, b_size[0], b_size[1], 2);
            let at = |blocks: &[bool], [b, h]: [usize; 2], index: usize| {
                let (group, block) = (index / per_head, index % per_head);
                blocks[(group / heads % b * h + group % heads % h) * per_head + block]
            };
            let combined = |both: fn(bool, bool) -> bool| -> Vec<bool> {
                (0..batch * heads * per_head)
                    .map(|i| both(at(&a, a_size, i), at(&b, b_size, i)))
                    .collect()
            };
            let a_mask = BlockMask::from_bool(geometry, a_size[0], a_size[1], &a).unwrap();
            let b_mask = BlockMask::from_bool(geometry, b_size[0], b_size[1], &b).unwrap();
            let (union, intersection) =
                (a_mask.union(&b_mask).unwrap(), a_mask.intersection(&b_mask).unwrap());
            assert_eq!([union.batch(), union.heads()], [batch, heads]);
            assert_eq!([intersection.batch(), intersection.heads()], [batch, heads]);
            assert_eq!(union.to_bool().unwrap(), combined(|a, b| a || b));
            assert_eq!(intersection.to_bool().unwrap(), combined(|a, b| a && b));
        }
    }
}

#[test]
fn masks_that_do_not_fit_are_errors() {
    let geometry = |seqlen| BlockGeometry::new(seqlen, 150, 64, 64).unwrap();
    let mask = random_mask(geometry(100), 2, 3, 1);
    for (other, expected) in [
        (random_mask(geometry(101), 2, 3, 1), "geometries differ"),
        (random_mask(geometry(100), 3, 3, 1), "batch entries differ and none is 1: 2 and 3"),
        (random_mask(geometry(100), 2, 2, 1), "heads differ and none is 1: 3 and 2"),
    ] {
        for result in [mask.union(&other), mask.intersection(&other)] {
            match result {
                Err(Error::InvalidBlockMask(problem)) => {
                    assert!(problem.contains(expected), "{problem}")
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn hidden_blocks_are_dropped() {
    for geometry in geometries() {
        let mask = random_mask(geometry, 2, 2, 4);
        let blocks = mask.to_bool().unwrap();
        for tokens in token_masks() {
            let cut = mask.intersect_mask(tokens).unwrap();
            let (rows, cols) = (geometry.rows(), geometry.cols());
            let expected: Vec<bool> = blocks
                .iter()
                .enumerate()
                .map(|(at, &visited)| {
                    visited
                        && geometry.visible_cols(at / cols % rows, tokens).contains(&(at % cols))
                })
                .collect();
            assert_eq!(cut.to_bool().unwrap(), expected, "{geometry:?} {tokens:?}");
            assert_eq!(cut.visited_pairs(tokens).unwrap(), mask.visited_pairs(tokens).unwrap());
        }
    }
}

#[test]
fn transposed_twice_is_the_same() {
    for geometry in geometries() {
        let mask = random_mask(geometry, 2, 3, 9);
        let transposed = mask.transpose().unwrap();
        let (rows, cols) = (geometry.rows(), geometry.cols());
        assert_eq!((transposed.rows(), transposed.cols()), (cols, rows));
        assert_eq!(
            (transposed.block_q(), transposed.block_kv()),
            (mask.block_kv(), mask.block_q())
        );
        assert_eq!(
            (transposed.seqlen_q(), transposed.seqlen_kv()),
            (mask.seqlen_kv(), mask.seqlen_q())
        );
        assert_eq!((transposed.batch(), transposed.heads()), (2, 3));
        let (blocks, exchanged) = (mask.to_bool().unwrap(), transposed.to_bool().unwrap());
        for (at, &visited) in blocks.iter().enumerate() {
            let (group, row, col) = (at / cols / rows, at / cols % rows, at % cols);
            assert_eq!(exchanged[(group * cols + col) * rows + row], visited);
        }
        let again = transposed.transpose().unwrap();
        assert_eq!(again.geometry(), geometry);
        assert_eq!(indices(&again), indices(&mask));
    }
}

#[test]
fn expanded_masks_visit_the_same_pairs() {
    for (seqlen_q, seqlen_kv) in [(256, 512), (300, 300), (257, 513), (64, 65), (0, 10), (10, 0)] {
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, 128, 256).unwrap();
        let mask = random_mask(geometry, 2, 2, 6);
        for (factor_q, factor_kv) in [(1, 1), (2, 1), (1, 2), (2, 4)] {
            let expanded = mask.expand(factor_q, factor_kv).unwrap();
            assert_eq!(
                (expanded.block_q(), expanded.block_kv()),
                (128 / factor_q, 256 / factor_kv)
            );
            assert_eq!((expanded.batch(), expanded.heads()), (2, 2));
            let (rows, cols) = (expanded.rows(), expanded.cols());
            let coarse = mask.to_bool().unwrap();
            for (at, visited) in expanded.to_bool().unwrap().into_iter().enumerate() {
                let (group, row, col) = (at / cols / rows, at / cols % rows, at % cols);
                let row = group * mask.rows() + row / factor_q;
                assert_eq!(visited, coarse[row * mask.cols() + col / factor_kv]);
            }
            for tokens in token_masks() {
                assert_eq!(
                    expanded.visited_pairs(tokens).unwrap(),
                    mask.visited_pairs(tokens).unwrap()
                );
            }
        }
    }
}

#[test]
fn bad_factors_are_named() {
    let geometry = BlockGeometry::new(300, 300, 128, 192).unwrap();
    let mask = BlockMask::window(geometry, Some(1), None, Align::TopLeft).unwrap();
    let problem = |factor_q, factor_kv| mask.expand(factor_q, factor_kv).unwrap_err().to_string();
    assert!(problem(0, 1).contains("block_q is 128, which 0 does not divide"));
    assert!(problem(1, 5).contains("block_kv is 192, which 5 does not divide"));
    assert!(problem(4, 1).contains("block_q is 32, not a multiple of 64"));
    assert!(problem(1, 2).contains("block_kv is 96, not a multiple of 64"));
}

#[test]
fn a_transpose_with_too_many_rows_is_an_error() {
    let geometry = BlockGeometry::new(0, 1 << 30, 64, 64).unwrap();
    let mask = BlockMask::from_bool(geometry, 1, 256, &[]).unwrap();
    assert!(matches!(
        mask.transpose(),
        Err(Error::TooLarge { what: "batch * heads * (rows + 1)", .. })
    ));
}
