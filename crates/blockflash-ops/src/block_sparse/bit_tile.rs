/// Which of 64 queries × 64 keys are visible to each other: the unit of the bits of partial blocks.
///
/// In memory these are 128 words of 32 bits, in the order in which the lanes of a warp hold the
/// scores of a tile in registers (accumulators of `mma.sync` and WGMMA): the pair of query `row`
/// and key `col` is bit `16 · (row % 16 / 8) + 2 · (col / 8) + col % 2` of word
/// `32 · (row / 16) + 4 · (row % 8) + col % 8 / 2`. A kernel reads one word per lane and 16
/// queries.
///
/// ```
/// use blockflash_ops::block_sparse::BitTile;
///
/// let causal = BitTile::new(|row, col| col <= row);
/// // The first lane, query 0: key 0. Query 8: keys 0, 1 and 8.
/// assert_eq!(causal.words()[0], 1 | 0b111 << 16);
/// assert_eq!(BitTile::from_words(&causal.words()), causal);
/// assert!(causal.transposed().get(3, 7) && !causal.get(3, 7));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BitTile {
    /// A row per query, with a bit per key.
    rows: [u64; Self::SIDE],
}

impl BitTile {
    /// Queries and keys.
    pub const SIDE: usize = 64;
    /// Words of 32 bits in memory.
    pub const WORDS: usize = 128;
    /// No pair is visible.
    pub const NONE: Self = Self { rows: [0; Self::SIDE] };

    /// The pairs of query `row` and key `col` for which `visible(row, col)` holds.
    pub fn new(visible: impl Fn(usize, usize) -> bool) -> Self {
        let row =
            |row| (0..Self::SIDE).fold(0, |bits, col| bits | u64::from(visible(row, col)) << col);
        Self { rows: std::array::from_fn(row) }
    }

    /// From the words in memory.
    pub fn from_words(words: &[u32; Self::WORDS]) -> Self {
        let row = |row: usize| {
            (0..4).fold(0, |bits, pair| {
                let half = words[first_word(row) + pair] >> shift(row);
                (0..8).fold(bits, |bits, group| {
                    bits | u64::from(half >> (2 * group) & 3) << (8 * group + 2 * pair)
                })
            })
        };
        Self { rows: std::array::from_fn(row) }
    }

    /// The words in memory.
    pub fn words(&self) -> [u32; Self::WORDS] {
        let mut words = [0; Self::WORDS];
        for (row, &bits) in self.rows.iter().enumerate() {
            for (pair, word) in words[first_word(row)..][..4].iter_mut().enumerate() {
                let half = (0..8).fold(0, |half, group| {
                    half | (bits >> (8 * group + 2 * pair) & 3) << (2 * group)
                });
                *word |= (half as u32) << shift(row);
            }
        }
        words
    }

    /// Whether query `row` sees key `col`; false beyond 64.
    pub fn get(&self, row: usize, col: usize) -> bool {
        col < Self::SIDE && self.rows.get(row).is_some_and(|bits| bits >> col & 1 == 1)
    }

    /// Keys × queries.
    pub fn transposed(&self) -> Self {
        Self::new(|row, col| self.get(col, row))
    }

    /// A bit for each key that a query sees.
    pub(super) fn row(&self, row: usize) -> u64 {
        self.rows[row]
    }

    /// Shows further keys to a query.
    pub(super) fn show(&mut self, row: usize, keys: u64) {
        self.rows[row] |= keys;
    }

    /// Combines the bits of two tiles.
    pub(super) fn combined(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self { rows: std::array::from_fn(|row| combine(self.rows[row], other.rows[row])) }
    }
}

/// The first of the four words that hold a row.
const fn first_word(row: usize) -> usize {
    32 * (row / 16) + 4 * (row % 8)
}

/// The first bit of a row in its words.
const fn shift(row: usize) -> usize {
    16 * (row % 16 / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64) -> Vec<bool> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 63 == 1
        };
        (0..64 * 64).map(|_| next()).collect()
    }

    #[test]
    fn words_hold_bits_where_lanes_hold_scores() {
        for seed in 0..8 {
            let pairs = random(seed);
            let tile = BitTile::new(|row, col| pairs[64 * row + col]);
            let words = tile.words();
            for (at, &visible) in pairs.iter().enumerate() {
                let (row, col) = (at / 64, at % 64);
                let lane = 4 * (row % 8) + (col % 8) / 2;
                let bit = 16 * (row % 16 / 8) + 2 * (col / 8) + col % 2;
                assert_eq!(words[32 * (row / 16) + lane] >> bit & 1 == 1, visible, "{row}, {col}");
                assert_eq!(tile.get(row, col), visible);
                assert_eq!(tile.row(row) >> col & 1 == 1, visible);
                assert_eq!(tile.transposed().get(col, row), visible);
            }
            assert_eq!(BitTile::from_words(&words), tile);
            assert_eq!(tile.transposed().transposed(), tile);
        }
    }

    #[test]
    fn tiles_are_combined_pair_by_pair() {
        let [a, b] = [1, 2].map(|seed| {
            let pairs = random(seed);
            BitTile::new(move |row, col| pairs[64 * row + col])
        });
        let both = a.combined(&b, |a, b| a & b);
        let mut shown = BitTile::NONE;
        (0..64).for_each(|row| shown.show(row, a.row(row) & b.row(row)));
        assert_eq!(both, shown);
        assert_eq!(both, BitTile::new(|row, col| a.get(row, col) && b.get(row, col)));
        assert!(!a.get(64, 0) && !a.get(0, 64) && !a.get(usize::MAX, usize::MAX));
    }
}
