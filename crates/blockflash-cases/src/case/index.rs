//! Attention of queries to the blocks of keys that a list names for each of them.

use super::decode::{DecodeShape, Fill};
use super::id::{Fields, Id, named, number};
use super::index_lists;
use super::index_operands::{IndexData, IndexOperands};
use super::limits;
use super::operands::{Operands, normal};
use super::peer::{PeerCase, PeerCaseError};
use super::shape::{Shape, head_dim_of_all};
use super::work::{TILE_ROWS, Work};
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::{Mask, Stream};
use blockflash_sys::{DType, HeadDims};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Queries `[batch, seqlen_q, num_heads_q, head_dim]`, the last ones of their sequences of
/// `seqlen_kv` keys, each with a list of `entries` blocks up to the one that it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct IndexShape {
    /// Number of sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seqlen_q: usize,
    /// Keys of each sequence.
    pub seqlen_kv: usize,
    /// Heads of q and o.
    pub num_heads_q: usize,
    /// Heads of k and v.
    pub num_heads_kv: usize,
    /// Lists of a query: one for all heads, for those that share keys, or for each.
    pub groups: usize,
    /// Elements of a row of q and k, and of v and o. Competitors are told one.
    #[serde(rename = "head_dim", serialize_with = "head_dim_of_all")]
    pub head_dims: HeadDims,
    /// Keys of a page, whose order in memory is random; `None` is a contiguous cache.
    pub page_size: Option<usize>,
    /// Keys of a block.
    pub granularity: usize,
    /// Room of a list. A query lists as many blocks as it sees, if they are fewer.
    pub entries: usize,
    /// How the lists are drawn.
    pub lists: Listing,
    /// Whether the values are the first columns of the keys.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub latent: bool,
    /// Element type of q, the cache and o.
    pub dtype: DType,
}

/// Which blocks a query lists besides the one that it is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Listing {
    /// Some of those before, all sets equally likely.
    #[default]
    Uniform,
    /// Mostly those of the queries beside it: the largest of scores that are the sum of a random
    /// number, which 64 neighbours have in common, and a fifth of another one.
    Near,
}

named!(Listing: Uniform = "uniform", Near = "near");

impl IndexShape {
    /// Lists i32 `[groups, batch * seqlen_q, entries]`.
    ///
    /// # Errors
    /// If sizes do not fit each other, or there are too many lists.
    pub fn draw_lists(&self, seed: u64) -> Result<Array> {
        self.check().map_err(Error::Option)?;
        let sizes = [self.groups, self.batch * self.seqlen_q, self.entries];
        let lists = Array::new(&sizes, index_lists::draw(self, seed));
        lists.ok_or_else(|| Error::Option("the lists are no tensor".to_owned()))
    }

    /// The cache, as decoding has it.
    pub(super) fn cache(&self) -> DecodeShape {
        DecodeShape {
            batch: self.batch,
            seqlen_q: self.seqlen_q,
            seqlen_kv: self.seqlen_kv,
            num_heads_q: self.num_heads_q,
            num_heads_kv: self.num_heads_kv,
            head_dims: self.head_dims,
            page_size: self.page_size,
            chosen: None,
            fill: if self.page_size.is_some() { Fill::Equal } else { Fill::Full },
            window: None,
            latent: self.latent,
            dtype: self.dtype,
            kv_dtype: None,
        }
    }

    /// Position of a query in its sequence.
    pub(super) fn position(&self, query: usize) -> usize {
        self.seqlen_kv - self.seqlen_q + query
    }

    /// Blocks that a query lists.
    pub(super) fn listed(&self, query: usize) -> usize {
        self.entries.min(self.position(query) / self.granularity + 1)
    }

    /// Keys that a query sees: of its own block those up to its position.
    fn seen(&self, query: usize) -> usize {
        (self.listed(query) - 1) * self.granularity + self.position(query) % self.granularity + 1
    }

    /// Keys that the queries of a sequence see, those of all lists of one query counted once.
    fn pairs(&self) -> usize {
        (0..self.seqlen_q).map(|query| self.seen(query)).sum()
    }

    /// Bytes of a key and its value of one head.
    fn pair_bytes(&self) -> usize {
        let row = if self.latent { self.head_dims.qk } else { self.head_dims.sum() };
        row * self.dtype.size()
    }

    /// Bytes of the keys and values that a launch reads: at most all of them.
    pub(super) fn read_bytes(&self) -> usize {
        let lists = self.groups.div_ceil(self.num_heads_kv);
        let keys = (lists * self.pairs()).min(self.seqlen_kv);
        self.batch * self.num_heads_kv * keys * self.pair_bytes()
    }
}

impl Fields for IndexShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        num_heads_q: 0,
        num_heads_kv: 0,
        groups: 0,
        head_dims: HeadDims::all(0),
        page_size: None,
        granularity: 0,
        entries: 0,
        lists: Listing::Uniform,
        latent: false,
        dtype: DType::F16,
    };

    /// `index_b64_q1_kv8192_h64kv4m4_d128_page128_g128x16_uniform_bf16`,
    /// `index_b1_s8192_h64kv4m4_d128_page128_g128x16_near_bf16`,
    /// `index_b8_q1_kv32768_h16kv1m1_d576v512_page64_g1x2048_uniform_latent_bf16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("index")?;
        id.field("b", &mut self.batch)?;
        id.seqlens(&mut self.seqlen_q, &mut self.seqlen_kv)?;
        let mut heads = [self.num_heads_q, self.num_heads_kv, self.groups];
        id.heads(&mut heads)?;
        [self.num_heads_q, self.num_heads_kv, self.groups] = heads;
        id.field("d", &mut self.head_dims)?;
        let layout = |size: &Option<usize>| {
            size.map_or("contiguous".to_owned(), |size| format!("page{size}"))
        };
        id.part(&mut self.page_size, layout, |part| match part {
            "contiguous" => Some(None),
            part => number(part, "page").map(Some),
        })?;
        let mut blocks = [self.granularity, self.entries];
        id.part(&mut blocks, |[size, room]| format!("g{size}x{room}"), blocks_of)?;
        [self.granularity, self.entries] = blocks;
        id.name(&mut self.lists)?;
        self.latent = id.has("latent", self.latent);
        if self.latent {
            id.word("latent")?;
        }
        id.name(&mut self.dtype)
    }
}

/// `g128x16`.
fn blocks_of(part: &str) -> Option<[usize; 2]> {
    let (size, room) = part.strip_prefix('g')?.split_once('x')?;
    Some([size.parse().ok()?, room.parse().ok()?])
}

/// What competitors are told besides the shape.
#[derive(Serialize)]
struct ForPeers<'a> {
    #[serde(flatten)]
    shape: &'a IndexShape,
    /// Columns of a latent row that are values.
    #[serde(skip_serializing_if = "Option::is_none")]
    head_dim_v: Option<usize>,
}

impl Shape for IndexShape {
    fn check(&self) -> Result<(), String> {
        let Self { batch, seqlen_q, groups, granularity, entries, .. } = *self;
        self.cache().check()?;
        limits::size("groups", groups, self.num_heads_q)?;
        let [heads, heads_kv] = [self.num_heads_q, self.num_heads_kv];
        if ![1, heads_kv, heads].contains(&groups) {
            return Err(format!("groups is {groups}, expected 1, {heads_kv} or {heads}"));
        }
        if ![1, 4, 16, 64, 128].contains(&granularity) {
            return Err(format!("granularity is {granularity}, expected 1, 4, 16, 64 or 128"));
        }
        limits::size("entries", entries, (1 << 30) / granularity)?;
        limits::elements("the lists", &[groups, batch, seqlen_q, entries])
    }

    fn op(&self) -> &'static str {
        "attention_index"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn peer_op(&self) -> &'static str {
        match (self.latent, self.groups) {
            (true, _) => "attention_index_latent",
            (false, 1) if self.num_heads_kv > 1 => "attention_index_shared",
            _ => self.op(),
        }
    }

    /// Of the keys those of one sequence are read once, at most; a tile of rows has the query heads
    /// that share a list and keys, of one query.
    fn work(&self) -> Work {
        let Self { batch, seqlen_q, num_heads_q, num_heads_kv, groups, head_dims, .. } = *self;
        let pairs = (batch * num_heads_q * self.pairs()) as f64;
        let row = batch * seqlen_q * num_heads_q * self.dtype.size();
        let lists = (0..seqlen_q).map(|query| self.listed(query)).sum::<usize>();
        let lists = 4 * batch * groups * lists;
        let units = groups.max(num_heads_kv);
        let tiles = units * (num_heads_q / units.max(1)).div_ceil(TILE_ROWS);
        let fetched = batch * tiles * self.pairs() * self.pair_bytes();
        Work {
            flops: 2.0 * pairs * head_dims.sum() as f64,
            exps: pairs,
            bytes: (self.read_bytes() + row * head_dims.sum() + lists) as f64,
            l2_bytes: (fetched + row * head_dims.qk + lists) as f64,
        }
    }

    fn group(&self) -> String {
        let queries = match self.seqlen_q {
            1 => "one query".to_owned(),
            queries if queries == self.seqlen_kv => format!("prompts, {} lists", self.lists),
            queries if queries > 16 => format!("parts of prompts, {} lists", self.lists),
            queries => format!("{queries} queries"),
        };
        let heads = format!("{} heads on {}", self.num_heads_q, self.num_heads_kv);
        let lists = match self.groups {
            1 => "one list".to_owned(),
            groups => format!("{groups} lists"),
        };
        let rows = if self.latent { "latent rows, " } else { "" };
        let Self { head_dims, granularity, entries, .. } = self;
        format!(
            "{rows}head_dim {head_dims}, {heads}, {lists} of {entries} blocks of {granularity}, \
             {queries}"
        )
    }

    fn peer_case(&self, seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        if self.head_dims.single().is_none() && !self.latent {
            return Err(PeerCaseError::OneHeadDim);
        }
        let head_dim_v = self.latent.then_some(self.head_dims.v);
        PeerCase::new(self.peer_op(), &ForPeers { shape: self, head_dim_v }, seed)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let draw = |_: &str, shape: &[usize], dtype, lane| normal(shape, dtype, seed, lane);
        let decode = self.cache().data(seed, draw)?;
        let lists = self.draw_lists(seed)?;
        let data = IndexData { decode, lists, granularity: self.granularity };
        let operands = IndexOperands::new(Mask::causal().into(), data, false, stream)?;
        Ok(Box::new(operands.of_shape(*self)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    const SHAPE: IndexShape = IndexShape {
        batch: 2,
        seqlen_q: 2,
        seqlen_kv: 700,
        num_heads_q: 8,
        num_heads_kv: 2,
        groups: 2,
        head_dims: HeadDims::all(64),
        page_size: None,
        granularity: 64,
        entries: 3,
        lists: Listing::Uniform,
        latent: false,
        dtype: DType::BF16,
    };

    #[test]
    fn work_counts_what_lists_show() {
        // Positions 698 and 699 are the last but one and the last of block 10, of which 59 and 60
        // keys are seen, beside two whole blocks.
        let work = SHAPE.work();
        let pairs = 2 * (2 * 128 + 59 + 60);
        assert_eq!(work.exps, f64::from(8 * pairs));
        assert_eq!(work.flops, f64::from(8 * pairs * 4 * 64));
        let rows = 2 * 2 * 8 * 64 * 2 * 2;
        let lists = 4 * 2 * 2 * 6;
        assert_eq!(work.bytes, f64::from(pairs * 2 * 2 * 64 * 2 + rows + lists));
        let whole = IndexShape { seqlen_q: 700, ..SHAPE };
        assert_eq!(whole.read_bytes(), 2 * 2 * 700 * 2 * 64 * 2);
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        assert_eq!(SHAPE.check(), Ok(()));
        let problem = |shape: IndexShape| shape.check().unwrap_err();
        assert!(problem(IndexShape { groups: 4, ..SHAPE }).contains("groups is 4"));
        assert!(problem(IndexShape { granularity: 8, ..SHAPE }).contains("granularity is 8"));
        assert!(problem(IndexShape { entries: 0, ..SHAPE }).contains("entries"));
        assert!(problem(IndexShape { seqlen_q: 701, ..SHAPE }).contains("fewer keys"));
    }

    #[test]
    fn ids_name_lists_and_layouts() {
        for id in [
            "index_b64_q1_kv8192_h64kv4m4_d128_page128_g128x16_uniform_bf16",
            "index_b1_s8192_h16_d128_contiguous_g128x8_near_bf16",
            "index_b8_q1_kv32768_h16kv1m1_d576v512_page64_g1x2048_uniform_latent_bf16",
        ] {
            assert_eq!(id.parse::<Case>().unwrap().to_string(), id);
        }
        assert_eq!(
            SHAPE.to_string(),
            "index_b2_q2_kv700_h8kv2m2_d64_contiguous_g64x3_uniform_bf16"
        );
        assert!("index_b1_s8192_h16_d128_contiguous_g128_near_bf16".parse::<Case>().is_err());
    }

    #[test]
    fn all_kinds_of_lists_are_verified() {
        let stream = blockflash_ops::Device::cpu().stream().unwrap();
        let paged = IndexShape { seqlen_kv: 704, page_size: Some(32), ..SHAPE };
        let head_dims = HeadDims { qk: 72, v: 64 };
        for shape in [
            SHAPE,
            IndexShape { groups: 1, lists: Listing::Near, ..paged },
            IndexShape { groups: 8, granularity: 1, entries: 40, ..paged },
            IndexShape { groups: 1, num_heads_kv: 1, latent: true, head_dims, ..paged },
        ] {
            let mut operands = shape.operands(&stream, 5).unwrap();
            let (passed, error) = operands.verify(None, &stream, 5).unwrap();
            assert!(passed && error < 0.01, "{shape}: {error}");
            let (_, o) = operands.outputs(None).remove(0);
            o.fill_bytes(&stream, 0x3F).unwrap();
            let results = [crate::io::Array::download(o, &stream).unwrap()];
            let found = operands.compare(&results, 5, &|_| ()).unwrap();
            assert!(found.iter().all(|found| !found.passed()), "{shape}");
        }
    }
}
