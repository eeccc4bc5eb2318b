//! Scores of blocks of keys for each query, and the choice of the largest: an index for attention.

use super::Case;
use super::choice_operands::ChoiceOperands;
use super::decode::{DecodeShape, Fill};
use super::grid::{GridPeers, each};
use super::id::{Fields, Id, number};
use super::limits;
use super::operands::Operands;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::Work;
use crate::error::Result;
use blockflash_ops::Stream;
use blockflash_sys::{DType, HeadDims};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Queries of an index `[batch, seqlen_q, heads, head_dim]`, the last ones of their sequences under
/// a causal mask, and one head of `seqlen_kv` keys for each sequence. The score of a block is that
/// of its best key: for each head, or, if they are weighted, the weighted sum of the positive
/// scores of all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct ChoiceShape {
    /// Number of sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seqlen_q: usize,
    /// Keys of each sequence.
    pub seqlen_kv: usize,
    /// Heads of the index.
    pub heads: usize,
    /// Elements of a row of a head.
    pub head_dim: usize,
    /// Keys of a page, whose order in memory is random.
    pub page_size: usize,
    /// Keys of a block.
    pub granularity: usize,
    /// Blocks that are chosen.
    pub entries: usize,
    /// Whether heads have weights, and one score in all.
    pub weighted: bool,
    /// Element type of the queries and keys.
    pub dtype: DType,
}

impl ChoiceShape {
    /// Scores of a query for each block.
    pub(super) fn groups(&self) -> usize {
        if self.weighted { 1 } else { self.heads }
    }

    /// Blocks up to that of its own position that are chosen whatever their scores are: that one,
    /// where blocks have several keys.
    pub(super) fn last(&self) -> usize {
        usize::from(self.granularity > 1)
    }

    /// The keys, as a cache has them.
    pub(super) fn cache(&self) -> DecodeShape {
        DecodeShape {
            batch: self.batch,
            seqlen_q: self.seqlen_q,
            seqlen_kv: self.seqlen_kv,
            num_heads_q: self.heads,
            num_heads_kv: 1,
            head_dims: HeadDims::all(self.head_dim),
            page_size: Some(self.page_size),
            chosen: None,
            fill: Fill::Equal,
            window: None,
            latent: true,
            dtype: self.dtype,
            kv_dtype: None,
        }
    }
}

impl Fields for ChoiceShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        heads: 0,
        head_dim: 0,
        page_size: 0,
        granularity: 0,
        entries: 0,
        weighted: false,
        dtype: DType::F16,
    };

    /// `choice_b1_q64_kv65536_h4_d128_page128_g128top16_bf16`,
    /// `choice_b64_q1_kv65536_h64_d128_page64_g1top2048_weighted_bf16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("choice")?;
        id.field("b", &mut self.batch)?;
        id.seqlens(&mut self.seqlen_q, &mut self.seqlen_kv)?;
        id.field("h", &mut self.heads)?;
        id.field("d", &mut self.head_dim)?;
        id.field("page", &mut self.page_size)?;
        let mut blocks = [self.granularity, self.entries];
        id.part(&mut blocks, |[size, room]| format!("g{size}top{room}"), blocks_of)?;
        [self.granularity, self.entries] = blocks;
        self.weighted = id.has("weighted", self.weighted);
        if self.weighted {
            id.word("weighted")?;
        }
        id.name(&mut self.dtype)
    }
}

/// `g128top16`.
fn blocks_of(part: &str) -> Option<[usize; 2]> {
    let (size, room) = part.split_once("top")?;
    Some([number(size, "g")?, room.parse().ok()?])
}

impl Shape for ChoiceShape {
    fn check(&self) -> Result<(), String> {
        let Self { batch, seqlen_q, seqlen_kv, granularity, entries, .. } = *self;
        self.cache().check()?;
        if ![1, 4, 16, 64, 128].contains(&granularity) {
            return Err(format!("blocks of {granularity} keys, expected 1, 4, 16, 64 or 128"));
        }
        limits::size("entries", entries, seqlen_kv)?;
        let blocks = seqlen_kv.div_ceil(granularity);
        limits::elements("the scores", &[self.groups(), batch, seqlen_q, blocks])
    }

    fn op(&self) -> &'static str {
        "index_choice"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn peer_op(&self) -> &'static str {
        if self.weighted { "index_choice_weighted" } else { self.op() }
    }

    /// Queries, weights and keys once, and the lists; scores between the launches are not counted.
    fn work(&self) -> Work {
        let Self { batch, seqlen_q, seqlen_kv, heads, head_dim, entries, .. } = *self;
        let rows = batch * seqlen_q;
        let pairs: usize = (0..seqlen_q).map(|query| seqlen_kv - seqlen_q + query + 1).sum();
        let weights = if self.weighted { 4 * rows * heads } else { 0 };
        let read = (rows * heads + batch * seqlen_kv) * head_dim * self.dtype.size() + weights;
        let bytes = (read + 4 * self.groups() * rows * entries) as f64;
        let flops = 2.0 * (batch * pairs * heads) as f64 * head_dim as f64;
        Work { flops, exps: 0.0, bytes, l2_bytes: bytes }
    }

    fn group(&self) -> String {
        let queries = match self.seqlen_q {
            1 => "one query".to_owned(),
            queries => format!("{queries} queries"),
        };
        let Self { heads, head_dim, granularity, entries, .. } = self;
        let heads = if self.weighted { format!("{heads} weighted") } else { heads.to_string() };
        format!("{heads} heads of {head_dim}, {entries} blocks of {granularity}, {queries}")
    }

    fn peer_case(&self, seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        PeerCase::new(self.peer_op(), self, seed)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(ChoiceOperands::new(*self, stream, seed)?))
    }
}

/// Every combination of the lists is a case.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChoiceGrid {
    batch: Vec<usize>,
    seqlen_q: Vec<usize>,
    seqlen_kv: Vec<usize>,
    heads: usize,
    head_dim: usize,
    page_size: usize,
    granularity: usize,
    entries: usize,
    #[serde(default)]
    weighted: bool,
    dtype: Vec<DType>,
    /// Which competitors the cases are measured with.
    #[serde(default)]
    pub peers: GridPeers,
}

impl ChoiceGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let Self { heads, head_dim, page_size, granularity, entries, weighted, .. } = *self;
        let mut cases = Vec::new();
        each!(dtype in self.dtype, seqlen_kv in self.seqlen_kv, batch in self.batch,
            seqlen_q in self.seqlen_q => {
            let shape = ChoiceShape { batch, seqlen_q, seqlen_kv, heads, head_dim, page_size,
                granularity, entries, weighted, dtype };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Array;

    const SHAPE: ChoiceShape = ChoiceShape {
        batch: 2,
        seqlen_q: 3,
        seqlen_kv: 512,
        heads: 2,
        head_dim: 32,
        page_size: 64,
        granularity: 16,
        entries: 8,
        weighted: false,
        dtype: DType::BF16,
    };

    #[test]
    fn ids_name_blocks_and_weights() {
        for id in [
            "choice_b1_q64_kv65536_h4_d128_page128_g128top16_bf16",
            "choice_b1_s8192_h4_d128_page128_g128top16_bf16",
            "choice_b64_q1_kv65536_h64_d128_page64_g1top2048_weighted_bf16",
        ] {
            assert_eq!(id.parse::<Case>().unwrap().to_string(), id);
        }
        assert!(ChoiceShape { entries: 0, ..SHAPE }.check().unwrap_err().contains("entries"));
        assert!(ChoiceShape { granularity: 8, ..SHAPE }.check().unwrap_err().contains("of 8"));
    }

    #[test]
    fn scores_and_choices_are_verified() {
        let stream = blockflash_ops::Device::cpu().stream().unwrap();
        let weighted = ChoiceShape { weighted: true, granularity: 1, entries: 100, ..SHAPE };
        for shape in [SHAPE, weighted] {
            let mut operands = shape.operands(&stream, 5).unwrap();
            let (passed, error) = operands.verify(None, &stream, 5).unwrap();
            assert!(passed && error < 1e-5, "{shape}: {error}");
            let mut results: Vec<_> =
                operands.results(None, &stream).unwrap().into_iter().map(|(_, of)| of).collect();
            let lists = results[1].as_i32().unwrap().to_vec();
            let moved = lists.iter().map(|&block| block - 1).collect();
            results[1] = Array::new(results[1].shape(), moved).unwrap_or_else(|| panic!());
            let found = operands.compare(&results, 5, &|_| ()).unwrap();
            assert!(!found.iter().all(|found| found.passed()), "{shape}");
        }
    }
}
