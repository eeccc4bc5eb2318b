//! Attention over lists of blocks.

use super::attention::AttentionShape;
use super::backward::Forward;
use super::block_lists::from_rows;
use super::grid::{GridPeers, fraction, full, heads_kv, pairs, uniform};
use super::id::{self, Fields, Id, displayed};
use super::limits;
use super::mask_kind::MaskKind;
use super::operands::Operands;
use super::pattern::{self as patterns, Pattern};
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::{TILE_ROWS, Work};
use crate::error::Result;
use crate::random;
use blockflash_ops::{BlockGeometry, BlockMask, Stream};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::Path;

/// Attention over `[batch, seqlen, num_heads, head_dim]` in which each block of queries attends to
/// a list of key blocks. All batch entries share the lists.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct BlockSparseShape {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_kv: usize,
    pub num_heads_q: usize,
    pub num_heads_kv: usize,
    /// Number of heads that have lists of their own: the number of query heads, the number of key
    /// heads (query heads that share a key head share its lists), or 1 (all heads share one set of
    /// lists).
    pub mask_heads: usize,
    pub head_dim: usize,
    pub block_q: usize,
    pub block_kv: usize,
    /// Fraction of the blocks that are listed; with a causal mask, fraction of the blocks that the
    /// mask leaves visible. Each block row rounds this to whole blocks, at least one.
    pub density: f64,
    pub pattern: Pattern,
    /// Mask inside the listed blocks.
    pub mask: MaskKind,
    pub dtype: DType,
}

/// Key blocks that a causal mask leaves visible to a block of queries.
struct Seen {
    /// Blocks that every query sees completely.
    whole: Range<usize>,
    /// Blocks on the diagonal, which the mask cuts.
    partly: Range<usize>,
}

impl BlockSparseShape {
    /// Checks that the case can be drawn and counted.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn check(&self) -> Result<(), String> {
        Shape::check(&self.dense())?;
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, mask_heads, .. } = *self;
        let Self { head_dim, block_q, block_kv, density, pattern, .. } = *self;
        if [batch, seqlen_q, seqlen_kv, head_dim, block_q, block_kv].contains(&0) {
            return Err("a block-sparse case has a size of 0".to_owned());
        }
        for (what, seqlen, block) in
            [("seqlen_q", seqlen_q, block_q), ("seqlen_kv", seqlen_kv, block_kv)]
        {
            if seqlen % block != 0 {
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
        if self.mask == MaskKind::Causal && pattern != Pattern::Uniform {
            return Err(format!("causal lists can only be uniform, not {pattern}"));
        }
        Ok(())
    }

    /// The same attention without a block mask.
    pub fn dense(&self) -> AttentionShape {
        AttentionShape {
            batch: self.batch,
            seqlen_q: self.seqlen_q,
            seqlen_kv: self.seqlen_kv,
            num_heads_q: self.num_heads_q,
            num_heads_kv: self.num_heads_kv,
            head_dim: self.head_dim,
            mask: self.mask,
            dtype: self.dtype,
        }
    }

    /// Number of query blocks of a head.
    pub fn block_rows(&self) -> usize {
        self.seqlen_q.div_ceil(self.block_q)
    }

    /// Number of key blocks.
    pub fn block_columns(&self) -> usize {
        self.seqlen_kv.div_ceil(self.block_kv)
    }

    /// Number of query heads that share one key head and one set of lists.
    pub fn sharing_heads(&self) -> usize {
        (self.num_heads_q / self.mask_heads).min(self.num_heads_q / self.num_heads_kv)
    }

    /// Number of listed blocks, summed over all query heads.
    pub fn nnz_blocks(&self) -> usize {
        let rows = self.block_rows();
        let listed = match self.mask {
            MaskKind::Full => {
                self.pattern.nnz_blocks(self.mask_heads * rows, self.block_columns(), self.density)
            }
            MaskKind::Causal => {
                self.mask_heads * (0..rows).map(|row| self.listed(row)).sum::<usize>()
            }
        };
        listed * (self.num_heads_q / self.mask_heads)
    }

    /// Number of query-key pairs in listed blocks that the mask leaves visible, summed over the
    /// query heads of one batch entry.
    pub fn visited_pairs(&self) -> usize {
        let of_a_block = self.block_q * self.block_kv;
        if self.mask == MaskKind::Full {
            return self.nnz_blocks() * of_a_block;
        }
        let mask = self.dense().mask();
        let of_a_row = |row: usize| {
            let Seen { partly, .. } = self.seen(row);
            let on_the_diagonal = |query: usize| {
                let end = mask.visible(query, self.seqlen_q, self.seqlen_kv).end;
                end.saturating_sub(partly.start * self.block_kv)
            };
            let queries = row * self.block_q..(row + 1) * self.block_q;
            let cut: usize = if partly.is_empty() { 0 } else { queries.map(on_the_diagonal).sum() };
            (self.listed(row) - partly.len()) * of_a_block + cut
        };
        self.num_heads_q * (0..self.block_rows()).map(of_a_row).sum::<usize>()
    }

    /// `row_ptr` and `col_idx` of the heads that have lists; columns ascend within each row, and
    /// row `head * block_rows + query block` belongs to that query block. With a causal mask the
    /// blocks on the diagonal are always listed and the others are drawn from the blocks before
    /// them.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let rows = self.mask_heads * self.block_rows();
        if self.mask == MaskKind::Full {
            return self.pattern.draw(rows, self.block_columns(), self.density, seed);
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
        let (rows, group) = (self.block_rows(), self.num_heads_q / self.mask_heads);
        let (row_ptr, col_idx) = self.pattern(seed);
        let (mut offsets, mut columns) = (vec![0], Vec::with_capacity(col_idx.len() * group));
        for row in (0..self.num_heads_q)
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
        let Self { seqlen_q, seqlen_kv, block_q, block_kv, .. } = *self;
        let (row_ptr, col_idx) = self.pattern(seed);
        let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?;
        Ok(from_rows(geometry, self.mask_heads, &row_ptr, &col_idx)?)
    }

    /// Number of blocks that a row lists under a causal mask.
    fn listed(&self, row: usize) -> usize {
        let Seen { whole, partly } = self.seen(row);
        match whole.len() + partly.len() {
            0 => 0,
            seen => patterns::rounded(self.density, seen).max(partly.len()),
        }
    }

    fn seen(&self, row: usize) -> Seen {
        let mask = self.dense().mask();
        let end = |query| mask.visible(query, self.seqlen_q, self.seqlen_kv).end;
        let (first, last) = (end(row * self.block_q), end((row + 1) * self.block_q - 1));
        let whole = first / self.block_kv;
        Seen { whole: 0..whole, partly: whole..last.div_ceil(self.block_kv) }
    }
}

impl Fields for BlockSparseShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        num_heads_q: 0,
        num_heads_kv: 0,
        mask_heads: 0,
        head_dim: 0,
        block_q: 0,
        block_kv: 0,
        density: 0.0,
        pattern: Pattern::Uniform,
        mask: MaskKind::Full,
        dtype: DType::F16,
    };

    /// `b1_s16384_h16_d128_q128kv128_d0.25_uniform_full_bf16`; after the heads, `m1` says that one
    /// of them has lists of its own.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.field("b", &mut self.batch)?;
        id.seqlens(&mut self.seqlen_q, &mut self.seqlen_kv)?;
        let mut heads = [self.num_heads_q, self.num_heads_kv, self.mask_heads];
        id.part(&mut heads, heads_text, heads_of)?;
        [self.num_heads_q, self.num_heads_kv, self.mask_heads] = heads;
        id.field("d", &mut self.head_dim)?;
        let mut block = [self.block_q, self.block_kv];
        id.part(&mut block, |[q, kv]| format!("q{q}kv{kv}"), |part| id::pair(part, "q"))?;
        [self.block_q, self.block_kv] = block;
        id.field("d", &mut self.density)?;
        id.name(&mut self.pattern)?;
        id.name(&mut self.mask)?;
        id.name(&mut self.dtype)
    }
}

displayed!(BlockSparseShape);

/// `h32`, `h32kv8m8`.
fn heads_text(&[q, kv, mask]: &[usize; 3]) -> String {
    let kv = if kv == q { String::new() } else { format!("kv{kv}") };
    let mask = if mask == q { String::new() } else { format!("m{mask}") };
    format!("h{q}{kv}{mask}")
}

fn heads_of(part: &str) -> Option<[usize; 3]> {
    let (heads, mask) = part.split_once('m').map_or((part, None), |(left, m)| (left, Some(m)));
    let [q, kv] = id::heads(heads)?;
    Some([q, kv, mask.map_or(Some(q), |mask| mask.parse().ok())?])
}

impl Shape for BlockSparseShape {
    fn parse(parts: &[&str]) -> Option<Self> {
        id::read(parts)
    }

    fn check(&self) -> Result<(), String> {
        self.check()
    }

    fn op(&self) -> &'static str {
        "block_sparse_fwd"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn work(&self) -> Work {
        let Self { batch, head_dim, block_q, block_kv, .. } = *self;
        let (pairs, sharing) = ((batch * self.visited_pairs()) as f64, self.sharing_heads());
        // Tiles of the query rows, of all heads, that share a key block.
        let tiles = (sharing * block_q).div_ceil(TILE_ROWS);
        let fetches = batch as f64 * (self.nnz_blocks() / sharing) as f64 * tiles as f64;
        let dense = self.dense();
        Work {
            flops: 4.0 * pairs * head_dim as f64,
            exps: pairs,
            bytes: dense.bytes(),
            l2_bytes: fetches * (block_kv * 2 * dense.row_bytes()) as f64 + dense.query_bytes(),
        }
    }

    /// The heading leaves out the values that most suites share.
    fn group(&self) -> String {
        let Self { head_dim, block_q, block_kv, pattern, mask, .. } = self;
        let other = |name: String, usual: bool| {
            if usual { String::new() } else { format!(", {name}") }
        };
        let pattern = other(pattern.to_string(), *pattern == Pattern::Uniform);
        let mask = other(mask.to_string(), *mask == MaskKind::Full);
        let heads = other("lists of several heads".into(), self.mask_heads == self.num_heads_q);
        format!("head_dim {head_dim}, blocks of {block_q} × {block_kv}{pattern}{mask}{heads}")
    }

    fn peer_case(&self, seed: u64, folder: &Path) -> Result<PeerCase, PeerCaseError> {
        // The protocol of the competitors wants lists for every query head.
        let lists = self.pattern_of_query_heads(seed);
        PeerCase::new(self.op(), self, seed)?.with_pattern(folder, &format!("{self}_"), lists)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(self.forward(stream, seed)?))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockSparseGrid {
    batch: usize,
    seqlen: Vec<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    mask_heads: Option<usize>,
    head_dim: usize,
    /// Queries and keys of a block.
    block: Vec<[usize; 2]>,
    density: Vec<f64>,
    #[serde(default = "uniform")]
    pattern: Vec<Pattern>,
    #[serde(default = "full")]
    mask: Vec<MaskKind>,
    dtype: Vec<DType>,
    #[serde(default)]
    pub peers: GridPeers,
}

impl BlockSparseGrid {
    pub fn expand<C>(&self, cases: &mut Vec<C>) -> Result<(), String>
    where
        C: From<BlockSparseShape>,
    {
        let Self { batch, num_heads_q, head_dim, .. } = *self;
        let num_heads_kv = self.num_heads_kv.unwrap_or(num_heads_q);
        for ((dtype, mask), [block_q, block_kv]) in
            pairs(&pairs(&self.dtype, &self.mask)?, &self.block)?
        {
            for ((seqlen, density), pattern) in
                pairs(&pairs(&self.seqlen, &self.density)?, &self.pattern)?
            {
                let shape = BlockSparseShape {
                    batch,
                    seqlen_q: seqlen,
                    seqlen_kv: seqlen,
                    num_heads_q,
                    num_heads_kv,
                    mask_heads: self.mask_heads.unwrap_or(num_heads_q),
                    head_dim,
                    block_q,
                    block_kv,
                    density,
                    pattern,
                    mask,
                    dtype,
                };
                shape.check()?;
                cases.push(shape.into());
            }
        }
        Ok(())
    }
}
