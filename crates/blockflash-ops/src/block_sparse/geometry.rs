use crate::attention::MAX_SEQLEN;
use crate::{Align, Error, Mask, Result};
use std::ops::Range;

/// How queries and keys are divided into blocks. Block row `r` holds the queries
/// `r * block_q..(r + 1) * block_q`, and block column `c` the keys
/// `c * block_kv..(c + 1) * block_kv`. The last row and the last column may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockGeometry {
    seqlen_q: usize,
    seqlen_kv: usize,
    block_q: usize,
    block_kv: usize,
}

impl BlockGeometry {
    /// Block sizes are multiples of this.
    pub const BLOCK_UNIT: usize = 64;
    /// Largest block size.
    pub const MAX_BLOCK_SIZE: usize = 1024;

    /// `seqlen_q` queries in blocks of `block_q`, and `seqlen_kv` keys in blocks of `block_kv`.
    /// Lengths may be 0.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for a length beyond [`MAX_SEQLEN`]; [`Error::BlockSize`] for a
    /// block size that is not a multiple of [`BLOCK_UNIT`](Self::BLOCK_UNIT) from 64 to
    /// [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE).
    pub fn new(seqlen_q: usize, seqlen_kv: usize, block_q: usize, block_kv: usize) -> Result<Self> {
        for (what, value) in [("seqlen_q", seqlen_q), ("seqlen_kv", seqlen_kv)] {
            if value > MAX_SEQLEN {
                return Err(Error::TooLarge { what, value, limit: MAX_SEQLEN });
            }
        }
        let (unit, limit) = (Self::BLOCK_UNIT, Self::MAX_BLOCK_SIZE);
        for (what, value) in [("block_q", block_q), ("block_kv", block_kv)] {
            if !(unit..=limit).contains(&value) || value % unit != 0 {
                return Err(Error::BlockSize { what, value, unit, limit });
            }
        }
        Ok(Self { seqlen_q, seqlen_kv, block_q, block_kv })
    }

    /// Number of queries.
    pub const fn seqlen_q(&self) -> usize {
        self.seqlen_q
    }

    /// Number of keys.
    pub const fn seqlen_kv(&self) -> usize {
        self.seqlen_kv
    }

    /// Queries of a block.
    pub const fn block_q(&self) -> usize {
        self.block_q
    }

    /// Keys of a block.
    pub const fn block_kv(&self) -> usize {
        self.block_kv
    }

    /// Number of block rows, `ceil(seqlen_q / block_q)`.
    pub const fn rows(&self) -> usize {
        self.seqlen_q.div_ceil(self.block_q)
    }

    /// Number of block columns, `ceil(seqlen_kv / block_kv)`.
    pub const fn cols(&self) -> usize {
        self.seqlen_kv.div_ceil(self.block_kv)
    }

    /// The queries of a block row; empty for a row that does not exist.
    pub fn queries(&self, row: usize) -> Range<usize> {
        block(row, self.block_q, self.seqlen_q)
    }

    /// The keys of a block column; empty for a column that does not exist.
    pub fn keys(&self, col: usize) -> Range<usize> {
        block(col, self.block_kv, self.seqlen_kv)
    }

    /// The block columns that hold a key which some query of this block row sees under a token
    /// mask; empty when there is none.
    pub fn visible_cols(&self, row: usize, mask: Mask) -> Range<usize> {
        let queries = self.queries(row);
        if queries.is_empty() {
            return 0..0;
        }
        // From one query to the next both ends of the visible keys stay or advance by one, so the
        // union of the visible ranges has no gap.
        let visible = |query| mask.visible(query, self.seqlen_q, self.seqlen_kv);
        let (first, last) = (visible(queries.start), visible(queries.end - 1));
        if first.start >= last.end {
            return 0..0;
        }
        first.start / self.block_kv..last.end.div_ceil(self.block_kv)
    }

    /// Number of (query, key) pairs of an existing block that are visible under the token mask.
    pub(super) fn pairs(&self, row: usize, col: usize, mask: Mask) -> u64 {
        mask.pairs_in(self.queries(row), self.keys(col), [self.seqlen_q, self.seqlen_kv])
    }

    /// The geometry with queries and keys exchanged.
    pub(super) fn transposed(&self) -> Self {
        let Self { seqlen_q, seqlen_kv, block_q, block_kv } = *self;
        Self { seqlen_q: seqlen_kv, seqlen_kv: seqlen_q, block_q: block_kv, block_kv: block_q }
    }

    /// The first and the last block column that hold the positions of the queries of an existing
    /// row. They may be before the first column or after the last one.
    pub(super) fn stands_at(&self, row: usize, align: Align) -> (i64, i64) {
        let diagonal = match align {
            Align::TopLeft => 0,
            Align::BottomRight => self.seqlen_kv as i64 - self.seqlen_q as i64,
        };
        let queries = self.queries(row);
        let column = |query: usize| (query as i64 + diagonal).div_euclid(self.block_kv as i64);
        (column(queries.start), column(queries.end - 1))
    }
}

fn block(index: usize, size: usize, length: usize) -> Range<usize> {
    let start = index.saturating_mul(size).min(length);
    start..start.saturating_add(size).min(length)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{geometries, token_masks};
    use super::*;

    #[test]
    fn sizes_have_limits() {
        for (block_q, block_kv) in
            [(0, 64), (64, 0), (32, 64), (64, 96), (1088, 64), (64, usize::MAX)]
        {
            let result = BlockGeometry::new(100, 100, block_q, block_kv);
            assert!(matches!(result, Err(Error::BlockSize { .. })), "{block_q} x {block_kv}");
        }
        let problem = BlockGeometry::new(1, 1, 64, 96).unwrap_err().to_string();
        assert!(problem.contains("block_kv is 96, not a multiple of 64 from 64 to 1024"));
        let long = BlockGeometry::new(MAX_SEQLEN + 1, 1, 64, 64);
        assert!(matches!(long, Err(Error::TooLarge { what: "seqlen_q", .. })));
        let long = BlockGeometry::new(1, MAX_SEQLEN + 1, 64, 64);
        assert!(matches!(long, Err(Error::TooLarge { what: "seqlen_kv", .. })));
        assert_eq!(BlockGeometry::new(MAX_SEQLEN, 0, 1024, 64).unwrap().rows(), MAX_SEQLEN / 1024);
    }

    #[test]
    fn blocks_cover_the_sequences() {
        let geometry = BlockGeometry::new(300, 129, 128, 64).unwrap();
        assert_eq!((geometry.rows(), geometry.cols()), (3, 3));
        assert_eq!(
            [0, 1, 2, 3].map(|row| geometry.queries(row)),
            [0..128, 128..256, 256..300, 300..300]
        );
        assert_eq!(
            [0, 1, 2, 3].map(|col| geometry.keys(col)),
            [0..64, 64..128, 128..129, 129..129]
        );
        assert!(geometry.queries(usize::MAX).is_empty() && geometry.keys(usize::MAX).is_empty());
    }

    #[test]
    fn visible_columns_are_the_definition() {
        for geometry in geometries() {
            let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
            for mask in token_masks() {
                for row in 0..geometry.rows() {
                    let found = geometry.visible_cols(row, mask);
                    for col in 0..geometry.cols() {
                        let keys = geometry.keys(col);
                        let seen = geometry.queries(row).any(|query| {
                            let visible = mask.visible(query, seqlen_q, seqlen_kv);
                            visible.start.max(keys.start) < visible.end.min(keys.end)
                        });
                        assert_eq!(
                            found.contains(&col),
                            seen,
                            "{geometry:?} {mask:?} ({row}, {col})"
                        );
                    }
                }
                assert!(geometry.visible_cols(geometry.rows(), mask).is_empty());
            }
        }
    }
}
