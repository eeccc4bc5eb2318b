//! Lists of blocks that attention visits.

use super::attention_shape::AttentionShape;
use super::block_lists::{BlockLists, from_rows};
use super::grid::{fraction, heads_kv};
use super::limits;
use super::mask_kind::MaskKind;
use super::pattern::{self as patterns, Pattern};
use super::work::{TILE_ROWS, Work};
use crate::error::Result;
use crate::random;
use blockflash_ops::{BlockGeometry, BlockMask};
use std::ops::Range;

/// A shape with its lists.
#[derive(Clone, Copy, Debug)]
pub struct BlockSparse<'a> {
    /// The shape of a dense batch; the mask is that inside the listed blocks.
    pub shape: &'a AttentionShape,
    /// Its lists.
    pub lists: BlockLists,
}

/// Key blocks that a causal mask leaves visible to a block of queries.
struct Seen {
    /// Blocks that every query sees completely.
    whole: Range<usize>,
    /// Blocks on the diagonal, which the mask cuts.
    partly: Range<usize>,
}

impl BlockSparse<'_> {
    /// Checks that the lists can be drawn and counted; the shape without them is checked already.
    pub(super) fn check(&self) -> Result<(), String> {
        let AttentionShape { seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, .. } = *self.shape;
        let BlockLists { mask_heads, block_q, block_kv, density, pattern } = self.lists;
        if let MaskKind::Window(_) = self.shape.mask {
            return Err("lists of blocks are under no window".to_owned());
        }
        for (what, seqlen, block) in
            [("seqlen_q", seqlen_q, block_q), ("seqlen_kv", seqlen_kv, block_kv)]
        {
            if block == 0 || seqlen % block != 0 {
                return Err(format!("{what} {seqlen} is not a multiple of blocks of {block}"));
            }
        }
        heads_kv(num_heads_q, Some(num_heads_kv))?;
        if ![1, num_heads_kv, num_heads_q].contains(&mask_heads) {
            return Err(format!(
                "mask_heads {mask_heads} is neither 1 nor {num_heads_kv} nor {num_heads_q}"
            ));
        }
        fraction(density)?;
        limits::blocks(self.nnz_blocks() / (num_heads_q / mask_heads))?;
        if self.shape.mask == MaskKind::Causal && pattern != Pattern::Uniform {
            return Err(format!("causal lists can only be uniform, not {pattern}"));
        }
        Ok(())
    }

    /// Number of query blocks of a head.
    pub fn block_rows(&self) -> usize {
        self.shape.seqlen_q.div_ceil(self.lists.block_q)
    }

    /// Number of key blocks.
    pub fn block_columns(&self) -> usize {
        self.shape.seqlen_kv.div_ceil(self.lists.block_kv)
    }

    /// Number of query heads that share one key head and one set of lists.
    pub fn sharing_heads(&self) -> usize {
        (self.shape.num_heads_q / self.lists.mask_heads)
            .min(self.shape.num_heads_q / self.shape.num_heads_kv)
    }

    /// Number of listed blocks, summed over all query heads.
    pub fn nnz_blocks(&self) -> usize {
        let rows = self.block_rows();
        let listed = match self.shape.mask {
            MaskKind::Full => self.lists.pattern.nnz_blocks(
                self.lists.mask_heads * rows,
                self.block_columns(),
                self.lists.density,
            ),
            MaskKind::Causal | MaskKind::Window(_) => {
                self.lists.mask_heads * (0..rows).map(|row| self.listed(row)).sum::<usize>()
            }
        };
        listed * (self.shape.num_heads_q / self.lists.mask_heads)
    }

    /// Number of query-key pairs in listed blocks that the mask leaves visible, summed over the
    /// query heads of one batch entry.
    pub fn visited_pairs(&self) -> usize {
        let of_a_block = self.lists.block_q * self.lists.block_kv;
        if self.shape.mask == MaskKind::Full {
            return self.nnz_blocks() * of_a_block;
        }
        let mask = self.shape.mask();
        let of_a_row = |row: usize| {
            let Seen { partly, .. } = self.seen(row);
            let on_the_diagonal = |query: usize| {
                let end = mask.visible(query, self.shape.seqlen_q, self.shape.seqlen_kv).end;
                end.saturating_sub(partly.start * self.lists.block_kv)
            };
            let queries = row * self.lists.block_q..(row + 1) * self.lists.block_q;
            let cut: usize = if partly.is_empty() { 0 } else { queries.map(on_the_diagonal).sum() };
            (self.listed(row) - partly.len()) * of_a_block + cut
        };
        self.shape.num_heads_q * (0..self.block_rows()).map(of_a_row).sum::<usize>()
    }

    /// `row_ptr` and `col_idx` of the heads that have lists; columns ascend within each row, and
    /// row `head * block_rows + query block` belongs to that query block. With a causal mask the
    /// blocks on the diagonal are always listed and the others are drawn from the blocks before
    /// them.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let rows = self.lists.mask_heads * self.block_rows();
        if self.shape.mask == MaskKind::Full {
            return self.lists.pattern.draw(rows, self.block_columns(), self.lists.density, seed);
        }
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for row in 0..rows {
            let of_head = row % self.block_rows();
            let Seen { whole, partly } = self.seen(of_head);
            let drawn =
                random::choose(self.listed(of_head) - partly.len(), whole.len(), seed, row as u64);
            col_idx.extend(drawn.into_iter().chain(partly).map(|column| column as i32));
            row_ptr.push(col_idx.len() as i32);
        }
        (row_ptr, col_idx)
    }

    /// [`pattern`](Self::pattern) with the lists repeated for every query head: row `query head *
    /// block_rows + query block`.
    pub fn pattern_of_query_heads(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let (rows, group) = (self.block_rows(), self.shape.num_heads_q / self.lists.mask_heads);
        let (row_ptr, col_idx) = self.pattern(seed);
        let (mut offsets, mut columns) = (vec![0], Vec::with_capacity(col_idx.len() * group));
        for row in (0..self.shape.num_heads_q)
            .flat_map(|head| (0..rows).map(move |row| head / group * rows + row))
        {
            columns.extend(&col_idx[row_ptr[row] as usize..row_ptr[row + 1] as usize]);
            offsets.push(columns.len() as i32);
        }
        (offsets, columns)
    }

    /// The lists as a mask in host memory, validated by the library.
    ///
    /// # Errors
    /// If the library does not know the sizes of the blocks.
    pub fn block_mask(&self, seed: u64) -> Result<BlockMask> {
        let (row_ptr, col_idx) = self.pattern(seed);
        let [seqlen_q, seqlen_kv] = [self.shape.seqlen_q, self.shape.seqlen_kv];
        let (block_q, block_kv) = (self.lists.block_q, self.lists.block_kv);
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?;
        Ok(from_rows(geometry, self.lists.mask_heads, &row_ptr, &col_idx)?)
    }

    /// Number of blocks that a row lists under a causal mask.
    fn listed(&self, row: usize) -> usize {
        let Seen { whole, partly } = self.seen(row);
        match whole.len() + partly.len() {
            0 => 0,
            seen => patterns::rounded(self.lists.density, seen).max(partly.len()),
        }
    }

    fn seen(&self, row: usize) -> Seen {
        let mask = self.shape.mask();
        let end = |query| mask.visible(query, self.shape.seqlen_q, self.shape.seqlen_kv).end;
        let (first, last) =
            (end(row * self.lists.block_q), end((row + 1) * self.lists.block_q - 1));
        let whole = first / self.lists.block_kv;
        Seen { whole: 0..whole, partly: whole..last.div_ceil(self.lists.block_kv) }
    }

    /// Work of the forward pass.
    pub(super) fn work(&self) -> Work {
        let (shape, BlockLists { block_q, block_kv, .. }) = (self.shape, self.lists);
        let batch = shape.batch;
        let (pairs, sharing) = ((batch * self.visited_pairs()) as f64, self.sharing_heads());
        // Tiles of the query rows, of all heads, that share a key block.
        let tiles = (sharing * block_q).div_ceil(TILE_ROWS);
        let fetches = batch as f64 * (self.nnz_blocks() / sharing) as f64 * tiles as f64;
        Work {
            flops: 2.0 * pairs * shape.head_dims.sum() as f64,
            exps: pairs,
            bytes: shape.bytes(),
            l2_bytes: fetches * (block_kv * shape.pair_bytes()) as f64 + shape.query_bytes(),
        }
    }

    /// The heading leaves out the values that most suites share.
    pub(super) fn group(&self) -> String {
        let AttentionShape { head_dims, mask, num_heads_q, .. } = self.shape;
        let BlockLists { mask_heads, block_q, block_kv, pattern, .. } = self.lists;
        let other = |name: String, usual: bool| {
            if usual { String::new() } else { format!(", {name}") }
        };
        let pattern = other(pattern.to_string(), pattern == Pattern::Uniform);
        let mask = other(mask.to_string(), *mask == MaskKind::Full);
        let heads = other("lists of several heads".into(), mask_heads == *num_heads_q);
        format!("head_dim {head_dims}, blocks of {block_q} × {block_kv}{pattern}{mask}{heads}")
    }
}
