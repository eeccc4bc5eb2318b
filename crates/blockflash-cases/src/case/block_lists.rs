//! Lists of blocks in the forms that the library and the oracle read.

use crate::error::Result;
use blockflash_ops::{BlockGeometry, BlockMask, Stream};
use blockflash_oracle::Blocks;

/// Lists of blocks as drawn: row `head * query blocks + query block`.
#[derive(Debug)]
pub(super) struct BlockLists {
    /// Number of queries and of keys.
    pub(super) seqlens: [usize; 2],
    /// Queries and keys of one block.
    pub(super) block: [usize; 2],
    /// Number of heads that have lists.
    pub(super) heads: usize,
    pub(super) row_ptr: Vec<i32>,
    pub(super) col_idx: Vec<i32>,
}

impl BlockLists {
    /// The mask on the stream's device, validated by the library, with the transpose that a
    /// backward pass reads.
    pub(super) fn mask(&self, stream: &Stream) -> Result<BlockMask> {
        let ([seqlen_q, seqlen_kv], [block_q, block_kv]) = (self.seqlens, self.block);
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?;
        let mask = from_rows(geometry, self.heads, &self.row_ptr, &self.col_idx)?;
        Ok(mask.with_transpose()?.to(stream)?)
    }

    pub(super) fn for_oracle(&self) -> Blocks<'_> {
        let Self { block: [block_q, block_kv], heads, row_ptr, col_idx, .. } = self;
        Blocks { block_q: *block_q, block_kv: *block_kv, heads: *heads, row_ptr, col_idx }
    }
}

/// Builds a mask from lists whose offsets continue from head to head: row `head * rows + row`.
///
/// # Errors
/// As for [`BlockMask::from_parts`], and if the number of rows is wrong.
pub fn from_rows(
    geometry: BlockGeometry,
    heads: usize,
    row_ptr: &[i32],
    col_idx: &[i32],
) -> blockflash_ops::Result<BlockMask> {
    let rows = geometry.rows();
    if heads.checked_mul(rows).and_then(|rows| rows.checked_add(1)) != Some(row_ptr.len()) {
        return BlockMask::from_parts(geometry, 1, heads, row_ptr, col_idx);
    }
    // The library wants offsets for each head, with an end for each head.
    let of_head = |head: usize| &row_ptr[head * rows..=(head + 1) * rows];
    let row_ptr: Vec<i32> = (0..heads).flat_map(of_head).copied().collect();
    BlockMask::from_parts(geometry, 1, heads, &row_ptr, col_idx)
}

#[cfg(test)]
mod tests {
    use crate::case::{BlockSparseShape, Case, Pattern};
    use blockflash_ops::Device;

    fn shape(id: &str) -> BlockSparseShape {
        match id.parse().unwrap() {
            Case::BlockSparseFwd(shape) => shape,
            other => panic!("{other} is another operation"),
        }
    }

    /// The library and the case must agree on the counts for every kind of lists.
    #[test]
    fn the_mask_visits_what_is_counted() {
        let stream = Device::cpu().stream().unwrap();
        let uniform = shape("b2_q512_kv1024_h8kv4_d64_q128kv64_d0.3_uniform_full_bf16");
        let causal = shape("b1_s1024_h4_d64_q64kv128_d0.3_uniform_causal_bf16");
        let with_pattern = Pattern::ALL.map(|pattern| BlockSparseShape { pattern, ..uniform });
        let others = [
            causal,
            shape("b1_s1024_h4_d64_q128kv64_d0.01_uniform_causal_bf16"),
            // Keys before the first query, and queries without visible keys.
            shape("b1_q256_kv1024_h4kv2m2_d64_q64kv64_d0.5_uniform_causal_bf16"),
            shape("b1_q1024_kv256_h4kv2m1_d64_q64kv64_d0.5_uniform_causal_bf16"),
            shape("b1_s512_h8kv4m4_d64_q64kv64_d0.5_power_law_full_bf16"),
            shape("b1_s512_h8kv4m1_d64_q64kv64_d0.5_uniform_full_bf16"),
        ];
        for shape in with_pattern.into_iter().chain(others) {
            let mask = shape.lists(3).mask(&stream).unwrap();
            let copies = shape.num_heads_q / shape.mask_heads;
            assert_eq!(mask.heads(), shape.mask_heads);
            assert_eq!(mask.nnz() * copies, shape.nnz_blocks(), "{shape:?}");
            let pairs = mask.visited_pairs(shape.dense().mask()).unwrap() as usize;
            assert_eq!(pairs * copies, shape.visited_pairs(), "{shape:?}");
            // A block that the mask hides completely must not be listed.
            assert_eq!(mask.intersect_mask(shape.dense().mask()).unwrap().nnz(), mask.nnz());
        }
        let mask = causal.lists(3).mask(&stream).unwrap();
        for row in 0..mask.rows() {
            assert_eq!(
                mask.row(0, 2, row).unwrap().last(),
                Some(row / 2),
                "the diagonal is always listed"
            );
        }
    }

    #[test]
    fn lists_of_query_heads_repeat_those_that_are_shared() {
        let shape = shape("b1_s512_h8kv4m4_d64_q64kv64_d0.4_power_law_full_bf16");
        let shared = shape.lists(3);
        let (row_ptr, col_idx) = shape.pattern_of_query_heads(3);
        let lists = |row_ptr: &[i32], col_idx: &[i32], head: usize| -> Vec<Vec<i32>> {
            let rows = row_ptr[head * 8..=head * 8 + 8].windows(2);
            rows.map(|pair| col_idx[pair[0] as usize..pair[1] as usize].to_vec()).collect()
        };
        assert_eq!((row_ptr.len(), col_idx.len()), (8 * 8 + 1, shape.nnz_blocks()));
        for head in 0..8 {
            let own = lists(&shared.row_ptr, &shared.col_idx, head / 2);
            assert_eq!(lists(&row_ptr, &col_idx, head), own, "head {head}");
        }
        assert_eq!(
            BlockSparseShape { mask_heads: 8, ..shape }.pattern_of_query_heads(3).0.len(),
            65
        );
    }

    #[test]
    fn blocks_that_the_library_does_not_know_are_its_error() {
        let odd = shape("b1_s96_h2_d64_q32kv32_d0.5_uniform_full_bf16");
        let refused = odd.lists(3).mask(&Device::cpu().stream().unwrap()).unwrap_err();
        assert!(refused.to_string().contains("block_q is 32"), "{refused}");
    }
}
