//! The order in which kernels take the block rows of a pattern. The longest come first, since a
//! tile that starts late ends late. Where neighbours share B, rows that need the same parts of it
//! are adjacent, if that saves enough.

use super::stages;
use std::cmp::Reverse;

/// Upper limit on the words of bits that are compared; with more block rows only length counts.
const MOST_COMPARED: usize = 1 << 27;
/// A row of a group has at least this fraction of the blocks of its longest row, because the rows
/// of a group are computed side by side.
const LEAST_LENGTH: f64 = 0.75;
/// Rows are grouped by their need of B where that saves at least this fraction of its traffic.
const LEAST_GAIN: f64 = 0.05;

/// The block rows in the order in which kernels take them.
pub(super) fn row_order(
    block_size: usize,
    block_cols: usize,
    row_ptr: &[i32],
    col_idx: &[i32],
) -> Vec<i32> {
    let by_length = longest_first(row_ptr);
    let (rows, group) = (by_length.len(), rows_that_share(block_size));
    let words = block_cols.div_ceil(64);
    // Without block columns there is nothing to share, and nothing limits the comparison.
    if words == 0
        || group < 2
        || rows <= group
        || rows.saturating_mul(rows).saturating_mul(words) > MOST_COMPARED
    {
        return by_length;
    }
    let columns = Columns::new(words, row_ptr, col_idx);
    let by_columns = columns.grouped(&by_length, group);
    let [before, after] =
        [&by_length, &by_columns].map(|order| columns.shared(order, group) as f64);
    if after <= before * (1.0 - LEAST_GAIN) { by_columns } else { by_length }
}

/// How many neighbours in the order may share B.
fn rows_that_share(block_size: usize) -> usize {
    match block_size {
        64 => 2,
        _ => stages::group_rows(block_size).unwrap_or(1),
    }
}

/// Block rows by descending number of blocks; their natural order when all are equal.
fn longest_first(row_ptr: &[i32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..row_ptr.len() as i32 - 1).collect();
    order.sort_by_key(|&row| Reverse(row_ptr[row as usize + 1] - row_ptr[row as usize]));
    order
}

/// The block columns of each block row as bits, and their number.
struct Columns {
    words: usize,
    bits: Vec<u64>,
    counts: Vec<i32>,
}

impl Columns {
    fn new(words: usize, row_ptr: &[i32], col_idx: &[i32]) -> Self {
        let mut bits = vec![0; (row_ptr.len() - 1) * words];
        for (row, pair) in row_ptr.windows(2).enumerate() {
            for &column in &col_idx[pair[0] as usize..pair[1] as usize] {
                bits[row * words + column as usize / 64] |= 1 << (column % 64);
            }
        }
        Self { words, bits, counts: row_ptr.windows(2).map(|pair| pair[1] - pair[0]).collect() }
    }

    fn of(&self, row: i32) -> &[u64] {
        &self.bits[row as usize * self.words..][..self.words]
    }

    fn count(&self, row: i32) -> f64 {
        f64::from(self.counts[row as usize])
    }

    /// The total number of block columns that the groups of an order need.
    fn shared(&self, order: &[i32], group: usize) -> usize {
        let of_group = |rows: &[i32]| {
            let word = |at: usize| rows.iter().fold(0, |all, &row| all | self.of(row)[at]);
            (0..self.words).map(|at| word(at).count_ones() as usize).sum::<usize>()
        };
        order.chunks(group).map(of_group).sum()
    }

    /// Each group begins with the longest remaining row and takes the rows that add the fewest
    /// columns to it. Groups that need the most of B come first, except that the last group, which
    /// may not be full, stays last.
    fn grouped(&self, by_length: &[i32], group: usize) -> Vec<i32> {
        let mut left = by_length.to_vec();
        let mut groups = Vec::with_capacity(left.len().div_ceil(group));
        while !left.is_empty() {
            let first = left.remove(0);
            let least = LEAST_LENGTH * self.count(first);
            let mut all = self.of(first).to_vec();
            let mut rows = vec![first];
            for _ in 1..group.min(left.len() + 1) {
                let added = |row: i32| -> u32 {
                    self.of(row)
                        .iter()
                        .zip(&all)
                        .map(|(word, all)| (word & !all).count_ones())
                        .sum()
                };
                // Lengths descend, so the first row always qualifies and groups are full.
                let may = left.iter().take_while(|&&row| self.count(row) >= least).count().max(1);
                let best = (0..may).min_by_key(|&at| added(left[at])).unwrap_or(0);
                let row = left.remove(best);
                all.iter_mut().zip(self.of(row)).for_each(|(all, word)| *all |= word);
                rows.push(row);
            }
            groups.push((all.iter().map(|word| word.count_ones()).sum::<u32>(), rows));
        }
        groups.sort_by_key(|(columns, rows)| (rows.len() < group, Reverse(*columns)));
        groups.into_iter().flat_map(|(_, rows)| rows).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::values;

    /// Index arrays of rows of columns.
    fn arrays(rows: &[Vec<i32>]) -> (Vec<i32>, Vec<i32>) {
        let mut row_ptr = vec![0];
        for row in rows {
            row_ptr.push(row_ptr[row_ptr.len() - 1] + row.len() as i32);
        }
        (row_ptr, rows.concat())
    }

    fn order_of(block_size: usize, cols: usize, rows: &[Vec<i32>]) -> Vec<i32> {
        let (row_ptr, col_idx) = arrays(rows);
        row_order(block_size, cols, &row_ptr, &col_idx)
    }

    fn shared(block_size: usize, cols: usize, rows: &[Vec<i32>], order: &[i32]) -> usize {
        let (row_ptr, col_idx) = arrays(rows);
        Columns::new(cols.div_ceil(64), &row_ptr, &col_idx)
            .shared(order, rows_that_share(block_size))
    }

    /// Rows of four clusters in turns, each with columns of its own.
    fn clusters(rows: usize) -> Vec<Vec<i32>> {
        (0..rows as i32).map(|row| (0..20).map(|i| row % 4 * 20 + i).collect()).collect()
    }

    #[test]
    fn clusters_are_put_together() {
        for (block_size, rows) in [(16, 128), (32, 64), (64, 16)] {
            let rows = clusters(rows);
            let natural: Vec<i32> = (0..rows.len() as i32).collect();
            let order = order_of(block_size, 80, &rows);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, natural, "every row once");
            let group = rows_that_share(block_size);
            assert!(order.chunks(group).all(|rows| rows.iter().all(|row| row % 4 == rows[0] % 4)));
            let [before, after] =
                [&natural, &order].map(|order| shared(block_size, 80, &rows, order));
            assert_eq!(before, after * group.min(4), "blocks of {block_size}");
        }
    }

    #[test]
    fn rows_without_anything_in_common_stay_in_the_order_of_their_lengths() {
        let rows: Vec<Vec<i32>> =
            (0..60).map(|row| (0..row % 5).map(|i| row * 5 + i).collect()).collect();
        let (row_ptr, _) = arrays(&rows);
        for block_size in [16, 32, 64] {
            assert_eq!(order_of(block_size, 300, &rows), longest_first(&row_ptr));
        }
        // Each block row has rows of B of its own there.
        assert_eq!(order_of(128, 80, &clusters(64)), (0..64).collect::<Vec<_>>());
    }

    /// Columns of random rows, about a tenth of them stored.
    fn random(rows: usize, cols: usize) -> Vec<Vec<i32>> {
        let noise = values(rows * cols, 7);
        let stored =
            |row: &[f32]| (0..cols as i32).filter(|&column| row[column as usize] > 0.74).collect();
        noise.chunks(cols).map(stored).collect()
    }

    #[test]
    fn random_rows_find_company() {
        // 8192 × 8192.
        for (block_size, expected) in [(16, 0.9), (32, 0.88), (64, 0.92)] {
            let rows = random(8192 / block_size, 8192 / block_size);
            let (row_ptr, _) = arrays(&rows);
            let [after, before] =
                [order_of(block_size, rows.len(), &rows), longest_first(&row_ptr)]
                    .map(|order| shared(block_size, rows.len(), &rows, &order) as f64);
            assert!(
                approx::abs_diff_eq!(after / before, expected, epsilon = 0.02),
                "blocks of {block_size}: {after} of {before}"
            );
        }
    }

    #[test]
    fn the_groups_that_need_the_most_come_first() {
        let rows = random(101, 128);
        let (row_ptr, col_idx) = arrays(&rows);
        let order = order_of(64, 128, &rows);
        let columns = Columns::new(2, &row_ptr, &col_idx);
        let of_pairs: Vec<usize> = order.chunks(2).map(|pair| columns.shared(pair, 2)).collect();
        assert!(of_pairs[..50].is_sorted_by(|a, b| a >= b), "{of_pairs:?}");
        assert_eq!((of_pairs.len(), order.len()), (51, 101));
    }

    #[test]
    fn rows_of_a_group_have_similar_lengths() {
        // Short rows are contained in long ones, which would make them cheap company.
        let mut rows = clusters(64);
        rows.extend((0..64).map(|row| vec![row % 4 * 20]));
        let order = order_of(16, 80, &rows);
        assert!(
            order[..64].iter().all(|&row| row < 64) && order[64..].iter().all(|&row| row >= 64)
        );
    }

    #[test]
    fn large_patterns_and_small_ones_are_ordered_by_length() {
        assert_eq!(longest_first(&[0, 1, 4, 4, 7, 8]), [1, 3, 0, 4, 2]);
        assert_eq!(longest_first(&[0, 2, 4, 6]), [0, 1, 2]);
        assert_eq!(row_order(16, 8, &[0], &[]), [0i32; 0]);
        assert_eq!(order_of(16, 80, &clusters(16)), (0..16).collect::<Vec<_>>());
        let many = 1 << 14;
        let row_ptr: Vec<i32> = (0..=many).collect();
        let col_idx: Vec<i32> = (0..many).map(|row| row % 2).collect();
        assert_eq!(row_order(16, 64, &row_ptr, &col_idx), (0..many).collect::<Vec<_>>());
    }
}
