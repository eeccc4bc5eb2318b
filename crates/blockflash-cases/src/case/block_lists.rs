//! Lists of blocks: how they are drawn, from offsets that go on from head to head, and in the form
//! of the oracle.

use super::id::{Id, pair};
use super::pattern::Pattern;
use crate::error::Result;
use crate::memory::count;
use blockflash_ops::{BlockGeometry, BlockMask, Tensor};
use blockflash_oracle::{Bits, Blocks};
use serde::Serialize;

/// Which key blocks each block of queries attends to. All batch entries share the lists.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockLists {
    /// Number of heads that have lists of their own: the number of query heads, the number of key
    /// heads (query heads that share a key head share its lists), or 1 (all heads share one set of
    /// lists).
    pub mask_heads: usize,
    /// Queries of a block.
    pub block_q: usize,
    /// Keys of a block.
    pub block_kv: usize,
    /// Fraction of the blocks that are listed; with a causal mask, fraction of the blocks that the
    /// mask leaves visible. Each block row rounds this to whole blocks, at least one.
    pub density: f64,
    /// How the listed blocks are distributed.
    pub pattern: Pattern,
}

impl BlockLists {
    pub(super) const EMPTY: Self =
        Self { mask_heads: 0, block_q: 0, block_kv: 0, density: 0.0, pattern: Pattern::Uniform };

    /// `q128kv128_d0.25_uniform`.
    pub(super) fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        let mut block = [self.block_q, self.block_kv];
        id.part(&mut block, |[q, kv]| format!("q{q}kv{kv}"), |part| pair(part, "q"))?;
        [self.block_q, self.block_kv] = block;
        id.field("d", &mut self.density)?;
        id.name(&mut self.pattern)
    }
}

/// A mask on the host in the form of the oracle.
#[derive(Debug)]
pub(super) struct OracleBlocks {
    block: [usize; 2],
    heads: usize,
    /// Where the lists of all rows begin, in the order of sequences, heads and rows.
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    /// Of masks with partial blocks: the first tile of each block, and the words of all tiles.
    bits: Option<(Vec<i32>, Vec<u32>)>,
}

impl OracleBlocks {
    pub(super) fn of(mask: &BlockMask) -> Result<Self> {
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for batch in 0..mask.batch() {
            let geometry = mask.sequences().map_or(mask.geometry(), |sequences| sequences[batch]);
            for head in 0..mask.heads() {
                for row in 0..geometry.rows() {
                    col_idx.extend(mask.row(batch, head, row)?.map(|column| column as i32));
                    row_ptr.push(col_idx.len() as i32);
                }
            }
        }
        let bits = |[first, words]: [&Tensor; 2]| -> Result<(Vec<i32>, Vec<u32>)> {
            let (first, words) = (first.view(), words.view());
            let words = words.as_slice::<i32>()?.iter().map(|&word| word as u32).collect();
            Ok((first.as_slice()?.to_vec(), words))
        };
        let bits = mask.bits().map(bits).transpose()?;
        let block = [mask.block_q(), mask.block_kv()];
        Ok(Self { block, heads: mask.heads(), row_ptr, col_idx, bits })
    }

    pub(super) fn view(&self) -> Blocks<'_> {
        let Self { block: [block_q, block_kv], heads, row_ptr, col_idx, bits } = self;
        let bits = bits.as_ref().map(|(block_bits, words)| Bits { block_bits, words });
        let (block_q, block_kv, heads) = (*block_q, *block_kv, *heads);
        Blocks { block_q, block_kv, heads, row_ptr, col_idx, bits }
    }
}

/// `58 of 256 blocks of 64 x 64, density 0.2266, lists of 2 heads`.
pub(super) fn describe(mask: &BlockMask) -> String {
    let (visited, density) = (mask.nnz(), mask.density());
    let all = if density > 0.0 { (visited as f64 / density).round() as u64 } else { 0 };
    let of = if all > 0 { format!(" of {}", count(all)) } else { String::new() };
    let heads = match mask.heads() {
        1 => "one list for all heads".into(),
        heads => format!("lists of {heads} heads"),
    };
    let (visited, block_q, block_kv) = (count(visited as u64), mask.block_q(), mask.block_kv());
    format!("{visited}{of} blocks of {block_q} x {block_kv}, density {density:.4}, {heads}")
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
    use crate::case::{AttentionShape, BlockLists, Case, Pattern};

    fn shape(id: &str) -> AttentionShape {
        id.parse::<Case>().unwrap().attention().unwrap().clone()
    }

    fn with(shape: &AttentionShape, lists: impl FnOnce(&mut BlockLists)) -> AttentionShape {
        let mut shape = shape.clone();
        lists(shape.lists.as_mut().unwrap());
        shape
    }

    /// The library and the case must agree on the counts for every kind of lists.
    #[test]
    fn the_mask_visits_what_is_counted() {
        let uniform = shape("b2_q512_kv1024_h8kv4_d64_q128kv64_d0.3_uniform_full_bf16");
        let causal = shape("b1_s1024_h4_d64_q64kv128_d0.3_uniform_causal_bf16");
        let with_pattern = |&pattern: &Pattern| with(&uniform, |lists| lists.pattern = pattern);
        let others = [
            causal.clone(),
            shape("b1_s1024_h4_d64_q128kv64_d0.01_uniform_causal_bf16"),
            // Keys before the first query, and queries without visible keys.
            shape("b1_q256_kv1024_h4kv2m2_d64_q64kv64_d0.5_uniform_causal_bf16"),
            shape("b1_q1024_kv256_h4kv2m1_d64_q64kv64_d0.5_uniform_causal_bf16"),
            shape("b1_s512_h8kv4m4_d64_q64kv64_d0.5_power_law_full_bf16"),
            shape("b1_s512_h8kv4m1_d64_q64kv64_d0.5_uniform_full_bf16"),
        ];
        for shape in Pattern::ALL.iter().map(with_pattern).chain(others) {
            let sparse = shape.block_sparse().unwrap();
            let mask = sparse.block_mask(3).unwrap();
            let copies = shape.num_heads_q / sparse.lists.mask_heads;
            assert_eq!(mask.heads(), sparse.lists.mask_heads);
            assert_eq!(mask.nnz() * copies, sparse.nnz_blocks(), "{shape:?}");
            let pairs = mask.visited_pairs(shape.mask()).unwrap() as usize;
            assert_eq!(pairs * copies, sparse.visited_pairs(), "{shape:?}");
            // A block that the mask hides completely must not be listed.
            assert_eq!(mask.intersect_mask(shape.mask()).unwrap().nnz(), mask.nnz());
        }
        let mask = causal.block_sparse().unwrap().block_mask(3).unwrap();
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
        let sparse = shape.block_sparse().unwrap();
        let (of_shared, shared) = sparse.pattern(3);
        let (row_ptr, col_idx) = sparse.pattern_of_query_heads(3);
        let lists = |row_ptr: &[i32], col_idx: &[i32], head: usize| -> Vec<Vec<i32>> {
            let rows = row_ptr[head * 8..=head * 8 + 8].windows(2);
            rows.map(|pair| col_idx[pair[0] as usize..pair[1] as usize].to_vec()).collect()
        };
        assert_eq!((row_ptr.len(), col_idx.len()), (8 * 8 + 1, sparse.nnz_blocks()));
        for head in 0..8 {
            let own = lists(&of_shared, &shared, head / 2);
            assert_eq!(lists(&row_ptr, &col_idx, head), own, "head {head}");
        }
        let of_all = with(&shape, |lists| lists.mask_heads = 8);
        assert_eq!(of_all.block_sparse().unwrap().pattern_of_query_heads(3).0.len(), 65);
    }

    #[test]
    fn blocks_that_the_library_does_not_know_are_its_error() {
        let odd = shape("b1_s96_h2_d64_q32kv32_d0.5_uniform_full_bf16");
        let refused = odd.block_sparse().unwrap().block_mask(3).unwrap_err();
        assert!(refused.to_string().contains("block_q is 32"), "{refused}");
    }
}
