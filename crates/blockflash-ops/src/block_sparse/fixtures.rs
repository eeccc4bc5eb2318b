//! Small geometries with tails, token masks and random block masks for the tests of this module.

use super::{BitTile, BlockGeometry, BlockMask};
use crate::fixtures::values;
use crate::{Align, Mask};

/// Equal and different lengths and blocks, with and without tails, with nothing at all.
pub(super) fn geometries() -> Vec<BlockGeometry> {
    [
        (64, 64, 64, 64),
        (300, 300, 64, 64),
        (300, 300, 128, 64),
        (200, 333, 64, 128),
        (333, 70, 128, 64),
        (1, 500, 64, 64),
        (500, 1, 64, 128),
        (0, 100, 64, 64),
        (100, 0, 64, 64),
    ]
    .map(|(seqlen_q, seqlen_kv, block_q, block_kv)| {
        BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv).unwrap()
    })
    .into()
}

/// Token masks of every kind.
pub(super) fn token_masks() -> Vec<Mask> {
    let mut masks = vec![Mask::Full];
    for align in [Align::TopLeft, Align::BottomRight] {
        masks.push(Mask::Causal { align });
        for (left, right) in [
            (Some(0), Some(0)),
            (Some(70), Some(0)),
            (Some(3), Some(100)),
            (None, Some(40)),
            (Some(0), None),
        ] {
            masks.push(Mask::Window { left, right, align });
        }
    }
    masks
}

/// Which blocks a random mask visits, about a third of them.
pub(super) fn random_blocks(
    geometry: BlockGeometry,
    batch: usize,
    heads: usize,
    seed: u64,
) -> Vec<bool> {
    let blocks = batch * heads * geometry.rows() * geometry.cols();
    values(blocks, seed).into_iter().map(|value| value > 0.25).collect()
}

/// The mask of [`random_blocks`].
pub(super) fn random_mask(
    geometry: BlockGeometry,
    batch: usize,
    heads: usize,
    seed: u64,
) -> BlockMask {
    BlockMask::from_bool(geometry, batch, heads, &random_blocks(geometry, batch, heads, seed))
        .unwrap()
}

/// The index arrays.
pub(super) fn indices(mask: &BlockMask) -> (Vec<i32>, Vec<i32>) {
    let (row_ptr, col_idx) = (mask.row_ptr().view(), mask.col_idx().view());
    (row_ptr.as_slice().unwrap().to_vec(), col_idx.as_slice().unwrap().to_vec())
}

/// A mask of one batch entry and one head by its definition, block by block.
pub(super) fn blocks_where(
    geometry: BlockGeometry,
    visited: impl Fn(usize, usize) -> bool,
) -> Vec<bool> {
    let visited = &visited;
    (0..geometry.rows())
        .flat_map(|row| (0..geometry.cols()).map(move |col| visited(row, col)))
        .collect()
}

/// A random mask of which two of three visited blocks are partial, and which pairs it shows,
/// `[batch, heads, seqlen_q, seqlen_kv]`. Of partial blocks some show nothing, some everything.
pub(crate) fn random_partial(
    geometry: BlockGeometry,
    batch: usize,
    heads: usize,
    seed: u64,
) -> (BlockMask, Vec<bool>) {
    let (block_q, block_kv) = (geometry.block_q(), geometry.block_kv());
    let mask = random_mask(geometry, batch, heads, seed);
    let (mut block_bits, mut words, mut tiles) = (Vec::new(), Vec::<u32>::new(), 0);
    let mut pairs = vec![false; batch * heads * geometry.seqlen_q() * geometry.seqlen_kv()];
    let visible = |at: usize, query: usize, key: usize| match at % 7 {
        0 | 3 | 6 => true,
        1 => false,
        _ => (query * 31 + key * 17 + query * key + at + seed as usize) % 5 < 2,
    };
    let mut at = 0;
    for (group, row) in (0..batch * heads).flat_map(|g| (0..geometry.rows()).map(move |r| (g, r))) {
        for col in mask.row(group / heads, group % heads, row).unwrap() {
            for query in geometry.queries(row) {
                let start = (group * geometry.seqlen_q() + query) * geometry.seqlen_kv();
                geometry.keys(col).for_each(|key| pairs[start + key] = visible(at, query, key));
            }
            // One of the blocks that show everything has bits for that.
            block_bits.push(if [0, 3].contains(&(at % 7)) { -1 } else { tiles });
            if block_bits.last() != Some(&-1) {
                for (down, across) in (0..block_q / 64)
                    .flat_map(|down| (0..block_kv / 64).map(move |across| (down, across)))
                {
                    let first = [row * block_q + down * 64, col * block_kv + across * 64];
                    let tile = BitTile::new(|i, j| visible(at, first[0] + i, first[1] + j));
                    words.extend(tile.words());
                    tiles += 1;
                }
            }
            at += 1;
        }
    }
    (mask.with_bits(&block_bits, &words).unwrap(), pairs)
}
