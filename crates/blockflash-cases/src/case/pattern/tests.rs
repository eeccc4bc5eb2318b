use super::*;
use crate::case::tests::BSR;
use crate::case::{BsrShape, Case};
use std::collections::BTreeSet;

/// The columns of each row.
fn rows(shape: &BsrShape) -> Vec<Vec<i32>> {
    let (row_ptr, col_idx) = shape.pattern(3);
    row_ptr.windows(2).map(|row| col_idx[row[0] as usize..row[1] as usize].to_vec()).collect()
}

/// Ascending.
fn lengths(shape: &BsrShape) -> Vec<usize> {
    let mut lengths: Vec<_> = rows(shape).iter().map(Vec::len).collect();
    lengths.sort_unstable();
    lengths
}

fn common(a: &[i32], b: &[i32]) -> usize {
    a.iter().filter(|column| b.contains(column)).count()
}

#[test]
fn uniform_rows_hold_the_same_number_of_ascending_columns() {
    let (row_ptr, col_idx) = BSR.pattern(7);
    assert_eq!((row_ptr.len(), row_ptr.last()), (129, Some(&(128 * 13))));
    assert_ne!(col_idx[..13], col_idx[13..26]);
    assert_eq!(BSR.pattern(7), (row_ptr, col_idx));
}

#[test]
fn every_pattern_is_valid_and_stores_what_it_says() {
    for &pattern in Pattern::ALL {
        for (density, block_size) in
            [(0.05, 128), (0.1, 64), (0.5, 16), (0.97, 64), (1.0, 128), (0.0, 32)]
        {
            // Squares, more columns than rows, the reverse, and a number of columns that is no
            // power of two.
            for [m, k] in [[8192, 8192], [4096, 8192], [8192, 2048], [4096, 11264]] {
                let shape = BsrShape { m, k, pattern, density, block_size, ..BSR };
                let (row_ptr, col_idx) = shape.pattern(3);
                assert_eq!(row_ptr.len(), shape.block_rows() + 1, "{pattern}");
                assert_eq!(*row_ptr.last().unwrap() as usize, col_idx.len(), "{pattern}");
                assert_eq!(col_idx.len(), shape.nnz_blocks(), "{shape:?}");
                for columns in rows(&shape) {
                    assert!(columns.windows(2).all(|pair| pair[0] < pair[1]), "{shape:?}");
                    assert!(
                        columns.iter().all(|&column| (column as usize) < shape.block_columns()),
                        "{shape:?}"
                    );
                }
                // Up to rounding, in each row or in all, as many as uniform rows.
                let uniform = BsrShape { pattern: Pattern::Uniform, ..shape }.nnz_blocks();
                let rounding = shape.block_rows().max(shape.block_columns());
                assert!(shape.nnz_blocks().abs_diff(uniform) <= rounding, "{shape:?}");
            }
        }
    }
}

#[test]
fn names_are_read_back() {
    for &pattern in Pattern::ALL {
        assert_eq!(serde_json::to_string(&pattern).unwrap(), format!("\"{pattern}\""));
        for id in [
            format!("m8192_n1024_k8192_b64_d0.1_{pattern}_f16"),
            format!("b1_s1024_h4m1_d128_q64kv128_d0.25_{pattern}_full_f16"),
            format!("sddmm_m4096_n4096_k1024_b64_d0.1_{pattern}_column_row_f16"),
        ] {
            assert_eq!(id.parse::<Case>().unwrap().to_string(), id);
        }
    }
    assert_eq!(Pattern::named("full"), None);
}

#[test]
fn nothing_is_drawn_for_no_rows() {
    for &pattern in Pattern::ALL {
        assert_eq!(pattern.draw(0, 8, 0.5, 3), (vec![0], vec![]), "{pattern}");
    }
}

#[test]
fn patterns_look_like_their_names() {
    let of = |pattern| lengths(&BsrShape { pattern, ..BSR });
    for pattern in [Pattern::Banded, Pattern::Clustered, Pattern::Butterfly, Pattern::Paired] {
        assert_eq!(of(pattern), of(Pattern::Uniform), "{pattern}");
    }
    let random = of(Pattern::Random);
    assert!(random[0] < 13 && random[127] > 13 && random[127] < 40, "{random:?}");
    let skewed = of(Pattern::PowerLaw);
    assert!(skewed[127] > 100 && skewed[0] < 8, "{skewed:?}");
    let (_, band) = BsrShape { pattern: Pattern::Banded, ..BSR }.pattern(3);
    assert_eq!(band[..13], (0..13).collect::<Vec<_>>());
    assert_eq!(band[64 * 13..65 * 13], (58..71).collect::<Vec<_>>());
}

#[test]
fn pairs_of_rows_have_half_of_their_columns_in_common() {
    let rows = rows(&BsrShape { pattern: Pattern::Paired, ..BSR });
    assert!(rows.chunks(2).all(|pair| common(&pair[0], &pair[1]) == 7));
    assert!(rows.chunks(2).skip(1).any(|pair| common(&pair[0], &rows[1]) < 5));
}

#[test]
fn full_rows_are_spread_among_empty_ones() {
    let full = |density, m| -> Vec<usize> {
        let rows = rows(&BsrShape { pattern: Pattern::FullRows, density, m, ..BSR });
        assert!(rows.iter().all(|row| [0, 128].contains(&row.len())));
        (0..rows.len()).filter(|&row| !rows[row].is_empty()).collect()
    };
    assert_eq!(full(1.0 / 128.0, 8192), [64]);
    assert_eq!(full(0.25, 1024), [2, 6, 10, 14]);
    assert_eq!(full(1.0, 320), [0, 1, 2, 3, 4]);
}

#[test]
fn rows_of_a_cluster_are_alike_and_lie_apart() {
    let rows = rows(&BsrShape { pattern: Pattern::Clustered, block_size: 16, ..BSR });
    let (clusters, each) = (rows.len() / CLUSTER, rows[0].len());
    assert_eq!((clusters, each), (32, 51));
    let mut most = 0;
    for row in 0..rows.len() - clusters {
        // Of 51 columns 46 are from the list, so that two rows share at least 41.
        assert!(common(&rows[row], &rows[row + clusters]) >= 41, "{row}");
        most = most.max(common(&rows[row], &rows[row + 1]));
    }
    assert!(most < 20, "{most}: by chance neighbours share a tenth");
    let cluster: BTreeSet<_> = rows.iter().step_by(clusters).flatten().collect();
    assert!(cluster.len() > each + 10, "{}: each row has its own rest", cluster.len());
}

#[test]
fn a_butterfly_differs_in_single_bits() {
    let butterfly =
        |density, m, k| rows(&BsrShape { pattern: Pattern::Butterfly, density, m, k, ..BSR });
    // Eight places of 128 columns.
    let single = butterfly(8.0 / 128.0, 8192, 8192);
    assert_eq!(single[5], [1, 4, 5, 7, 13, 21, 37, 69]);
    assert!(single.iter().enumerate().all(|(row, columns)| columns.contains(&(row as i32))));
    for (row, columns) in single.iter().enumerate() {
        for &column in columns {
            assert!(single[column as usize].contains(&(row as i32)), "symmetric: {row} {column}");
        }
    }
    // Fewer: the nearest. More: pairs at seven places, of which the farthest is cut to one of 13.
    assert_eq!(butterfly(3.0 / 128.0, 8192, 8192)[5], [4, 5, 7]);
    assert_eq!(butterfly(0.1, 8192, 8192)[5], [0, 1, 4, 5, 6, 7, 12, 13, 20, 21, 36, 37, 69]);
    // Stretched to 16 columns where there are four rows.
    assert_eq!(butterfly(5.0 / 16.0, 256, 1024)[1], [0, 4, 5, 6, 12]);
    // Of six columns, 5 has 4 and 1, and lacks 7, which is outside: 0 comes in, two bits away.
    let odd = butterfly(4.0 / 6.0, 384, 384);
    assert_eq!((&odd[0][..], &odd[5][..]), (&[0, 1, 2, 4][..], &[0, 1, 4, 5][..]));
}

#[test]
fn rows_of_a_cluster_take_the_rest_from_outside_of_its_list() {
    // 32 rows are two clusters: 9 columns of 10 are of the list, which 16 rows have in common.
    let (row_ptr, col_idx) = Pattern::Clustered.draw(32, 64, 10.0 / 64.0, 5);
    for cluster in 0..2 {
        let mut counts = [0; 64];
        for row in (0..32).filter(|row| row % 2 == cluster) {
            let columns = &col_idx[row_ptr[row] as usize..row_ptr[row + 1] as usize];
            assert!(columns.is_sorted_by(|a, b| a < b) && columns.len() == 10, "{columns:?}");
            columns.iter().for_each(|&column| counts[column as usize] += 1);
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(counts[..10].iter().sum::<i32>(), 16 * 9, "{counts:?}");
    }
    // A matrix whose rows times columns are beyond any time.
    let (rows, columns) = Pattern::Clustered.draw(1 << 14, 1 << 24, 1.0 / f64::from(1 << 22), 5);
    assert_eq!((rows.len(), columns.len()), ((1 << 14) + 1, 4 << 14));
}
