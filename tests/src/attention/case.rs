//! Description of one attention problem; everything else follows from it and its seed.

use super::{BlockCase, Codes, Terms};
use crate::placement::Placement;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_sys::DType;
use blockflash_sys::Kernel;
use blockflash_sys::manifest::AttentionTile;

/// One attention problem: shape, options, memory layout and kind of data.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    /// Seed of the data.
    pub seed: u64,
    /// Type of o, and of q, k and v unless they are codes.
    pub dtype: DType,
    /// Set where q, k and v are codes.
    pub codes: Option<Codes>,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Batch and sequence lengths.
    pub lengths: Lengths,
    /// What happens to a score: which keys a query sees, and whether each head has a sink logit.
    /// What is added stands in `terms`.
    pub scores: Scores<()>,
    /// What is added to the scores.
    pub terms: Terms,
    /// Which blocks of queries and keys are visited; `None`: all.
    pub block_mask: Option<BlockCase>,
    /// Whether the log-sum-exp is asked for.
    pub lse: bool,
    /// Memory layout of q, k, v and o.
    pub placements: [Placement; 4],
    /// Memory layout of the log-sum-exp.
    pub lse_placement: Placement,
    /// All batch entries share the keys and values of the first: k and v have a batch stride of 0.
    /// Dense cases only.
    pub broadcast_kv: bool,
    /// What the tensors hold.
    pub content: Content,
}

/// Batch and sequence lengths of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// Tensors `[batch, seqlen, heads, head_dim]`.
    Dense {
        /// Batch entries.
        batch: usize,
        /// Queries of each.
        seqlen_q: usize,
        /// Keys of each.
        seqlen_kv: usize,
    },
    /// Tensors `[total, heads, head_dim]` with `cu_seqlens`.
    Packed {
        /// Queries and keys of each sequence.
        lengths: Vec<(usize, usize)>,
        /// Rows of the tensors past the last sequence: queries, keys. They are NaN, and no output
        /// row there may be written.
        slack: (usize, usize),
    },
}

/// What the tensors hold. Numbers are N(0,1) unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// N(0,1).
    Normal,
    /// Queries so large that scores reach ±100 and more.
    LargeScores,
    /// Keys that point along the queries and grow with their position: the running maximum rises in
    /// every tile.
    GrowingMaxima,
    /// Every query has one key that points along it: one probability is 1, the rest vanish.
    OneHugeLogit,
    /// Scores up to 1e8 and more in f16 and 1e12 in bf16, exact in f32, of either sign, all of a
    /// query different; values are integers. So one probability is 1, the rest vanish, and the
    /// gradients of queries and keys are exactly 0.
    HugeScores,
    /// NaN and infinities in keys and values that no query sees.
    UnseenNan,
    /// NaN in some keys, seen by some queries and hidden from others.
    NanInKeys,
    /// NaN in one column of some values, seen by some queries and hidden from others.
    NanInValues,
}

/// One sequence of a case: where its queries and keys start in the packed tensors, and how many
/// they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// First query row.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First key row.
    pub kv_start: usize,
    /// Number of keys.
    pub kv_len: usize,
}

impl AttentionCase {
    /// A case of batch 1 with no option set, to be varied by struct update.
    pub fn simple(
        dtype: DType,
        heads: (usize, usize),
        head_dim: usize,
        seqlen: (usize, usize),
    ) -> Self {
        Self {
            seed: 1,
            dtype,
            codes: None,
            heads_q: heads.0,
            heads_kv: heads.1,
            head_dim,
            lengths: Lengths::Dense { batch: 1, seqlen_q: seqlen.0, seqlen_kv: seqlen.1 },
            scores: Scores::default(),
            terms: Terms::default(),
            block_mask: None,
            lse: true,
            placements: Default::default(),
            lse_placement: Placement::default(),
            broadcast_kv: false,
            content: Content::Normal,
        }
    }

    /// The same of the type and width of a tile, with or without the log-sum-exp as its kernel
    /// computes it.
    pub fn of_tile(tile: &AttentionTile, heads: (usize, usize), seqlen: (usize, usize)) -> Self {
        Self {
            lse: tile.lse.suits(true),
            codes: tile.types.q.is_code().then(|| Codes::plain(tile.block_kv as usize)),
            ..Self::simple(tile.types.o, heads, tile.head_dims.min(), seqlen)
        }
    }

    /// The same with or without the log-sum-exp, where the kernel always computes it or
    /// never.
    pub fn as_asked(&self, kernel: &Kernel) -> Self {
        let suits = kernel.attention_tile().is_none_or(|tile| tile.lse.suits(self.lse));
        Self { lse: self.lse == suits, ..self.clone() }
    }

    /// The sequences in the order of the batch.
    pub fn sequences(&self) -> Vec<Sequence> {
        let lengths = match &self.lengths {
            Lengths::Dense { batch, seqlen_q, seqlen_kv } => vec![(*seqlen_q, *seqlen_kv); *batch],
            Lengths::Packed { lengths, .. } => lengths.clone(),
        };
        let (mut q_start, mut kv_start) = (0, 0);
        let advance = |(q_len, kv_len)| {
            let sequence = Sequence { q_start, q_len, kv_start, kv_len };
            q_start += q_len;
            kv_start += kv_len;
            sequence
        };
        lengths.into_iter().map(advance).collect()
    }

    /// Rows of all sequences, and rows of the tensors: queries, then keys.
    pub fn rows(&self) -> ([usize; 2], [usize; 2]) {
        let last = self.sequences().last().copied();
        let used = last.map_or([0, 0], |s| [s.q_start + s.q_len, s.kv_start + s.kv_len]);
        let slack = match self.lengths {
            Lengths::Dense { .. } => (0, 0),
            Lengths::Packed { slack, .. } => slack,
        };
        (used, [used[0] + slack.0, used[1] + slack.1])
    }

    /// Shapes of q (and o), k (and v), and the log-sum-exp.
    pub fn shapes(&self) -> [Vec<usize>; 3] {
        let (heads_q, heads_kv, d) = (self.heads_q, self.heads_kv, self.head_dim);
        match self.lengths {
            Lengths::Dense { batch, seqlen_q, seqlen_kv } => [
                vec![batch, seqlen_q, heads_q, d],
                vec![batch, seqlen_kv, heads_kv, d],
                vec![batch, heads_q, seqlen_q],
            ],
            Lengths::Packed { .. } => {
                let (_, [q, kv]) = self.rows();
                [vec![q, heads_q, d], vec![kv, heads_kv, d], vec![heads_q, q]]
            }
        }
    }

    /// The factor of the scores.
    pub fn scale(&self) -> f32 {
        self.scores.softmax_scale.unwrap_or((1.0 / (self.head_dim as f64).sqrt()) as f32)
    }

    /// What happens to the scores of a query head, for the oracle; `sinks` has a logit per head.
    pub fn scores_of(&self, head: usize, sinks: &[f32]) -> blockflash_oracle::Scores {
        let Scores { softcap, sink, .. } = self.scores;
        let sink = sink.map(|()| sinks[head]);
        blockflash_oracle::Scores { scale: self.scale(), softcap, sink }
    }

    /// Position in the logical log-sum-exp of a query of a sequence.
    pub fn lse_index(&self, sequence: usize, head: usize, query: usize) -> usize {
        match self.lengths {
            Lengths::Dense { seqlen_q, .. } => (sequence * self.heads_q + head) * seqlen_q + query,
            Lengths::Packed { .. } => {
                head * self.rows().1[0] + self.sequences()[sequence].q_start + query
            }
        }
    }

    /// How far the diagonal is shifted for a sequence: 0, or keys minus queries with bottom-right
    /// alignment.
    pub fn diagonal(&self, sequence: &Sequence) -> i64 {
        match self.scores.mask {
            Mask::Causal { align: Align::BottomRight }
            | Mask::Window { align: Align::BottomRight, .. } => {
                sequence.kv_len as i64 - sequence.q_len as i64
            }
            _ => 0,
        }
    }
}
