use super::super::fixtures::{blocks_where, geometries, indices};
use super::*;
use crate::{Error, Mask};

const ALIGNS: [Align; 2] = [Align::TopLeft, Align::BottomRight];
const SIDES: [Option<usize>; 5] = [None, Some(0), Some(1), Some(3), Some(usize::MAX)];

/// Distances from the columns at which a row stands, by the position of each of its queries: 0 at
/// any of them, negative before the first, positive behind the last.
fn distance(geometry: BlockGeometry, align: Align, row: usize, col: usize) -> i128 {
    let diagonal = match align {
        Align::TopLeft => 0,
        Align::BottomRight => geometry.seqlen_kv() as i128 - geometry.seqlen_q() as i128,
    };
    let column = |query| (query as i128 + diagonal).div_euclid(geometry.block_kv() as i128);
    let columns: Vec<i128> = geometry.queries(row).map(column).collect();
    let (first, last) = (columns[0], columns[columns.len() - 1]);
    let col = col as i128;
    (col - first).min(0) + (col - last).max(0)
}

fn within(distance: i128, left: Option<usize>, right: Option<usize>, step: usize) -> bool {
    let steps = |side: Option<usize>| side.map_or(i128::from(u64::MAX), |side| side as i128);
    let step = step as i128;
    distance % step == 0 && -steps(left) <= distance / step && distance / step <= steps(right)
}

#[test]
fn windows_are_the_definition() {
    for geometry in geometries() {
        for align in ALIGNS {
            for (left, right) in SIDES.iter().flat_map(|&left| SIDES.map(|right| (left, right))) {
                for step in [1, 2, 3, usize::MAX] {
                    let visited =
                        |row, col| within(distance(geometry, align, row, col), left, right, step);
                    let expected = blocks_where(geometry, visited);
                    let dilated = BlockMask::dilated(geometry, step, left, right, align).unwrap();
                    let name = format!("{geometry:?} {align:?} {left:?} {right:?} {step}");
                    assert_eq!(dilated.to_bool().unwrap(), expected, "{name}");
                    if step == 1 {
                        let window = BlockMask::window(geometry, left, right, align).unwrap();
                        assert_eq!(indices(&window), indices(&dilated), "{name}");
                    }
                }
            }
        }
    }
}

#[test]
fn strides_are_the_definition() {
    for geometry in geometries() {
        for align in ALIGNS {
            for stride in [1, 2, 3, usize::MAX] {
                for local in [0, 1, 2, 3, usize::MAX] {
                    let expected = blocks_where(geometry, |row, col| {
                        let distance = distance(geometry, align, row, col);
                        distance.unsigned_abs() <= local as u128 || distance % stride as i128 == 0
                    });
                    let strided = BlockMask::strided(geometry, stride, local, align).unwrap();
                    let found = strided.to_bool().unwrap();
                    assert_eq!(found, expected, "{geometry:?} {align:?} {stride} {local}");
                }
            }
        }
    }
}

#[test]
fn a_window_of_square_blocks() {
    let geometry = BlockGeometry::new(256, 256, 64, 64).unwrap();
    let window = BlockMask::window(geometry, Some(1), Some(0), Align::BottomRight).unwrap();
    assert_eq!(indices(&window), (vec![0, 1, 3, 5, 7], vec![0, 0, 1, 1, 2, 2, 3]));
    let strided = BlockMask::strided(geometry, 2, 0, Align::TopLeft).unwrap();
    assert_eq!(indices(&strided), (vec![0, 2, 4, 6, 8], vec![0, 2, 1, 3, 0, 2, 1, 3]));
    assert_eq!((window.batch(), window.heads()), (1, 1));
}

#[test]
fn a_causal_window_of_blocks_loses_nothing() {
    // Blocks that stand at or before a row's last query are the ones that a causal mask shows.
    for geometry in geometries() {
        let window = BlockMask::window(geometry, None, Some(0), Align::BottomRight).unwrap();
        let pairs = Mask::causal().visited_pairs(geometry.seqlen_q(), geometry.seqlen_kv());
        assert_eq!(window.visited_pairs(Mask::causal()).unwrap(), pairs);
        let full = BlockMask::full(geometry).unwrap().intersect_mask(Mask::causal()).unwrap();
        assert_eq!(indices(&window), indices(&full), "{geometry:?}");
    }
}

#[test]
fn global_rows_and_columns() {
    for geometry in geometries() {
        let rows: Vec<usize> = (0..geometry.rows()).rev().step_by(2).collect();
        let cols: Vec<usize> = (0..geometry.cols()).rev().step_by(3).collect();
        let expected =
            blocks_where(geometry, |row, col| rows.contains(&row) || cols.contains(&col));
        let global = BlockMask::global(geometry, &rows, &cols).unwrap();
        assert_eq!(global.to_bool().unwrap(), expected);
        for count in 0..=geometry.cols() {
            let sink = BlockMask::sink(geometry, count).unwrap();
            assert_eq!(sink.to_bool().unwrap(), blocks_where(geometry, |_, col| col < count));
        }
        assert_eq!(BlockMask::full(geometry).unwrap().nnz(), geometry.rows() * geometry.cols());
    }
}

#[test]
fn bad_patterns_are_named() {
    let geometry = BlockGeometry::new(100, 150, 64, 64).unwrap();
    let problem = |result: Result<BlockMask>| match result {
        Err(Error::InvalidBlockMask(problem)) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(problem(BlockMask::sink(geometry, 4)), "4 sink columns, but there are 3 columns");
    assert_eq!(
        problem(BlockMask::global(geometry, &[0, 2], &[])),
        "global row 1 is 2, but there are 2"
    );
    assert_eq!(
        problem(BlockMask::global(geometry, &[], &[3])),
        "global column 0 is 3, but there are 3"
    );
    let twice = problem(BlockMask::global(geometry, &[], &[1, 0, 1]));
    assert_eq!(twice, "global column 2 is 1, which comes twice");
    let strided = problem(BlockMask::strided(geometry, 0, 1, Align::TopLeft));
    assert_eq!(strided, "stride is 0, but must be at least 1");
    let dilated = problem(BlockMask::dilated(geometry, 0, None, None, Align::TopLeft));
    assert_eq!(dilated, "dilation is 0, but must be at least 1");
}

#[test]
fn too_many_blocks_are_an_error() {
    let geometry = BlockGeometry::new(MAX_SEQLEN, MAX_SEQLEN, 64, 1024).unwrap();
    assert!(matches!(BlockMask::full(geometry), Err(Error::TooLarge { what: "nnz", .. })));
    assert!(matches!(BlockMask::sink(geometry, 128), Err(Error::TooLarge { what: "nnz", .. })));
}

#[test]
fn masks_beyond_32_bits_are_refused_before_their_first_row() {
    let start = std::time::Instant::now();
    let geometry = BlockGeometry::new(1 << 22, 1 << 22, 64, 64).unwrap();
    let align = Align::BottomRight;
    let near = BlockMask::window(geometry, Some(1), Some(1), align).unwrap();
    assert_eq!(near.nnz(), 3 * (1 << 16) - 2);
    // 2^20 blocks, for a batch of 2048 or as one of many sequences.
    let wide = BlockMask::full(BlockGeometry::new(1 << 12, 1 << 20, 64, 64).unwrap()).unwrap();
    let nothing = vec![0; 2048 * 65];
    let batch = BlockMask::from_parts(wide.geometry(), 2048, 1, &nothing, &[]).unwrap();
    assert_eq!(batch.intersection(&wide).unwrap().nnz(), 0);
    for mask in [
        BlockMask::window(geometry, None, Some(0), align),
        BlockMask::window(geometry, None, None, align),
        BlockMask::strided(geometry, 2, 40_000, align),
        BlockMask::dilated(geometry, 1, Some(40_000), Some(40_000), align),
        BlockMask::full(geometry),
        BlockMask::sink(geometry, 1 << 15),
        BlockMask::global(geometry, &[], &(0..1 << 15).collect::<Vec<_>>()),
        batch.union(&wide),
        BlockMask::packed(&[&wide; 2048]),
    ] {
        let error = mask.map(|mask| mask.nnz()).unwrap_err();
        assert!(
            matches!(error, Error::TooLarge { what: "nnz", limit: 0x7FFF_FFFF, .. }),
            "{error}"
        );
    }
    // Each of them took up to 20 seconds and 8.6 GB.
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
