use super::plan::is_aligned;
use super::{IndexRows, IndexScoresProblem, TopKProblem};
use crate::attention::{Mask, Strides};
use crate::attention_decode::AttentionDecodeWorkspace;
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule};
use crate::{Error, Result};
use blockflash_safe::Device;
use blockflash_sys::manifest::{IndexColumns, IndexKernel, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The widest head of an index that kernels take.
const WIDEST: usize = 256;
/// Longest list that kernels choose.
const MOST: usize = 2048;
/// Most blocks that kernels choose among.
const MOST_COLUMNS: usize = 1 << 20;
/// Tokens of a block that kernels take.
const GRANULARITIES: [usize; 5] = [1, 4, 16, 64, 128];

/// The problems about blocks of keys that queries see.
pub trait OfRows {
    /// Queries and what they see.
    fn rows(&self) -> &IndexRows;
}

impl OfRows for IndexScoresProblem {
    fn rows(&self) -> &IndexRows {
        &self.rows
    }
}

impl OfRows for TopKProblem {
    fn rows(&self) -> &IndexRows {
        &self.rows
    }
}

impl<P: Problem + OfRows> Rule<P> {
    const GRANULARITY: Self = Self {
        holds: |c| GRANULARITIES.contains(&c.problem.rows().granularity),
        refuses: |c| {
            let granularity = c.problem.rows().granularity;
            format!("blocks of {granularity} tokens, expected one of {GRANULARITIES:?}")
        },
        excludes_all: None,
    };

    const ALIGN: Self = Self {
        holds: |c| is_aligned(c.problem.rows()),
        refuses: |_| "a mask that is aligned top-left".into(),
        excludes_all: None,
    };
}

const HEAD_DIM: Rule<IndexScoresProblem> = Rule {
    holds: |c| {
        let head_dim = c.problem.cache.head_dims.qk;
        head_dim <= c.tile.head_dim as usize && head_dim.is_multiple_of(8)
    },
    refuses: |c| {
        let head_dim = c.problem.cache.head_dims.qk;
        format!("head_dim {head_dim} is not a multiple of 8 up to {}", c.tile.head_dim)
    },
    excludes_all: Some(|all| {
        let head_dim = all[0].problem.cache.head_dims.qk;
        let widest = all.iter().map(|c| c.tile.head_dim).max().unwrap_or(0);
        format!("head_dim {head_dim} is not a multiple of 8 up to {widest}")
    }),
};

const PAGE_SIZE: Rule<IndexScoresProblem> = Rule {
    holds: |c| c.problem.cache.has_whole_steps(),
    refuses: |c| {
        let slots = c.problem.cache.page_size;
        format!("pages of {slots} slots, not of a multiple of 16")
    },
    excludes_all: None,
};

const STRIDES: Rule<IndexScoresProblem> = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |c| c.problem.cache.far_slots(),
    excludes_all: None,
};

const LIST: Rule<TopKProblem> = Rule {
    holds: |c| c.problem.k <= MOST,
    refuses: |c| format!("lists of {} blocks, the limit is {MOST}", c.problem.k),
    excludes_all: None,
};

const COLUMNS: Rule<TopKProblem> = Rule {
    holds: |c| c.problem.rows.blocks() <= c.tile.columns(),
    refuses: |c| format!("{} blocks, the limit is {}", c.problem.rows.blocks(), c.tile.columns()),
    excludes_all: Some(|all| {
        let most = all.iter().map(|c| c.tile.columns()).max().unwrap_or(0);
        format!("{} blocks, the limit is {most}", all[0].problem.rows.blocks())
    }),
};

/// A kernel that scores blocks.
#[derive(Clone, Copy, Debug)]
pub struct ScoresTile {
    dtype: DType,
    head_dim: u32,
    columns: IndexColumns,
}

impl Problem for IndexScoresProblem {
    const OP: &'static str = "index_scores";
    const INPUTS: &'static str = "queries and the cache";
    const RULES: &'static [Rule<Self>] =
        &[HEAD_DIM, Rule::GRANULARITY, Rule::ALIGN, PAGE_SIZE, STRIDES, Rule::shared_memory(None)];

    type Tile = ScoresTile;
    type Rank = (u32, u64, bool);

    fn tile(kernel: &Kernel) -> Option<ScoresTile> {
        match kernel.variant {
            Variant::Index(IndexKernel::Scores { dtype, head_dim, columns }) => {
                Some(ScoresTile { dtype, head_dim, columns })
            }
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<IndexScoresProblem> =
            LazyLock::new(selection::all::<IndexScoresProblem>);
        &KERNELS
    }

    /// The narrowest tile, and then the one with fewer products; of equally many, columns that are
    /// queries are quicker.
    fn rank(c: &Candidate<'_, Self>) -> (u32, u64, bool) {
        let problem = c.problem;
        // Queries of the tiles that follow from them hardly matter: a few, or many.
        let queries = problem.rows.seqlen_q.clamp(1, 64);
        let outputs = queries * problem.groups / problem.cache.num_heads_kv.max(1);
        let heads = problem.num_heads / problem.groups.max(1);
        let [outputs, heads] = [outputs, heads].map(|x| u32::try_from(x).unwrap_or(u32::MAX >> 8));
        let tile = c.tile;
        let products = tile.columns.products(outputs, heads).into();
        (tile.head_dim, products, tile.columns == IndexColumns::Heads)
    }

    fn key(&self) -> (DType, usize) {
        (self.cache.dtype, 0)
    }

    fn key_of(tile: &ScoresTile) -> (DType, usize) {
        (tile.dtype, 0)
    }
}

/// A kernel that chooses scores.
#[derive(Clone, Copy, Debug)]
pub struct TopKTile(IndexKernel);

impl TopKTile {
    /// The most columns of a row.
    fn columns(self) -> usize {
        match self.0 {
            IndexKernel::TopKWarps { columns } => columns as usize,
            _ => MOST_COLUMNS,
        }
    }
}

impl Problem for TopKProblem {
    const OP: &'static str = "top_k";
    const INPUTS: &'static str = "scores";
    const RULES: &'static [Rule<Self>] =
        &[LIST, COLUMNS, Rule::GRANULARITY, Rule::ALIGN, Rule::shared_memory(None)];

    type Tile = TopKTile;
    type Rank = (bool, usize);

    fn tile(kernel: &Kernel) -> Option<TopKTile> {
        match kernel.variant {
            Variant::Index(kernel @ (IndexKernel::TopKWarps { .. } | IndexKernel::TopK { .. })) => {
                Some(TopKTile(kernel))
            }
            _ => None,
        }
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<TopKProblem> = LazyLock::new(selection::all::<TopKProblem>);
        &KERNELS
    }

    /// The shortest rows that fit. Few rows have a CTA each, which is quicker than a warp.
    fn rank(c: &Candidate<'_, Self>) -> (bool, usize) {
        let has_warps = matches!(c.tile.0, IndexKernel::TopKWarps { .. });
        let few = c.problem.lists() <= c.gpu.multiprocessors as usize;
        (has_warps == few, c.tile.columns())
    }

    fn key(&self) -> (DType, usize) {
        (DType::F32, 0)
    }

    fn key_of(_: &TopKTile) -> (DType, usize) {
        (DType::F32, 0)
    }
}

impl TopKProblem {
    /// Bytes of workspace on a device.
    pub(super) fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        let Some(gpu) = device.cuda_properties().filter(|_| !self.is_empty()) else {
            return Ok(0);
        };
        self.select(gpu)?;
        let bytes = self.room(gpu).and_then(|[sums, words]| {
            AttentionDecodeWorkspace::bytes_for(sums, words)
                .filter(|&bytes| isize::try_from(bytes).is_ok())
        });
        let limit = isize::MAX as usize;
        bytes.ok_or(Error::TooLarge { what: "workspace", value: usize::MAX, limit })
    }
}

/// A query of one sequence that sees all keys.
fn rows(capacity: usize, granularity: usize) -> IndexRows {
    IndexRows {
        batch: 1,
        seqlen_q: 1,
        total_q: None,
        capacity,
        packed_kv: false,
        seqused_kv: true,
        mask: Mask::causal(),
        granularity,
    }
}

/// Lines of the support table: the head dimensions that kernels take, and one that none takes.
pub(crate) fn support_of_scores(dtype: DType) -> Vec<(String, IndexScoresProblem)> {
    let of = |head_dim| IndexScoresProblem {
        rows: rows(64, 16),
        cache: CacheSizes::contiguous(dtype, [1, 64], 1, head_dim),
        num_heads: 1,
        groups: 1,
        q: Strides::contiguous(1, 1, head_dim),
        weights: None,
        scores: [4, 4],
        reduction: super::BlockReduction::Max,
        relu: false,
        scale: 1.0,
        leaves_hidden: false,
    };
    vec![
        (format!("head_dim 8..={WIDEST} by 8"), of(WIDEST)),
        ("other head_dim (59)".into(), of(59)),
    ]
}

/// Lines of the support table: the lists that kernels choose, and one that none chooses.
pub(crate) fn support_of_top_k() -> Vec<(String, TopKProblem)> {
    let of = |k| TopKProblem {
        rows: rows(64, 1),
        groups: 1,
        scores: [64, 64],
        k,
        chosen: [k, k],
        forced: [0, 0],
    };
    vec![
        (format!("lists of 1..={MOST}"), of(MOST)),
        (format!("other lists ({})", MOST + 1), of(MOST + 1)),
    ]
}
