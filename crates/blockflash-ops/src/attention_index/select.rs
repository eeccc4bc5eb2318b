use super::IndexAttentionProblem;
use super::tile::{IndexTile, split_tile, tile};
use super::united;
use crate::Result;
use crate::attention::{AttentionProblem, Rows, Strides};
use crate::check::is_tensor_map_stride;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::{DType, HeadDims, Kernel, Target};
use std::collections::BTreeSet;
use std::sync::LazyLock;

/// The kernel for attention by an index on a GPU. Among the usable kernels it prefers machine code
/// over PTX, then the smallest head_dim tile that fits, and among these the one that is estimated
/// to be the fastest. With `batch_invariant` it is one that computes each query alone, with the
/// fewest rows that hold the heads of a unit, else the most rows.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the head dimension, the granularity, the page size, the architecture.
pub fn select(problem: &IndexAttentionProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &IndexAttentionProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for IndexAttentionProblem {
    const OP: &'static str = "attention_index";
    const INPUTS: &'static str = "queries and the cache";
    const RULES: &'static [Rule<Self>] = &[
        CODES,
        HEAD_DIM,
        GRANULARITY,
        PAGE_SIZE,
        SLOTS,
        STRIDES,
        POSITIONS,
        MAPS,
        ENTRIES,
        INVARIANT,
        TERMS,
        Rule::shared_memory(None),
    ];

    type Tile = IndexTile;
    type Rank = (bool, u64);

    fn tile(kernel: &Kernel) -> Option<IndexTile> {
        tile(kernel)
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<IndexAttentionProblem> =
            LazyLock::new(selection::all::<IndexAttentionProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &IndexTile) -> [usize; 2] {
        // Estimates decide among the kernels of Hopper.
        let target = if kernel.target == Target::Sm90a { Target::Sm90 } else { kernel.target };
        [preference(target), tile.head_dims().max()]
    }

    fn rank(c: &Candidate<'_, Self>) -> Self::Rank {
        match c.tile {
            IndexTile::Listed(tile) if c.problem.batch_invariant => {
                let (holds, rows) = (tile.tile.rows as usize >= c.problem.group(), tile.tile.rows);
                (!holds, u64::from(if holds { rows } else { u32::MAX - rows }))
            }
            IndexTile::Listed(tile) => {
                let tile = split_tile(c.kernel, &tile.tile, c.gpu);
                (false, c.problem.fastest(&tile, c.gpu).time as u64)
            }
            IndexTile::United(tile) => (false, united::estimate(tile, c.problem, c.gpu) as u64),
            // The fewest rows that hold the heads of a unit, else the most.
            IndexTile::Latent(tile) => {
                let holds = tile.rows as usize >= c.problem.group();
                (!holds, u64::from(if holds { tile.rows } else { u32::MAX - tile.rows }))
            }
        }
    }

    fn is_explained(&self, tile: &IndexTile) -> bool {
        tile.is_latent() == self.is_latent()
    }

    fn key(&self) -> (DType, usize) {
        (self.attention.types.kv, 0)
    }

    fn key_of(tile: &IndexTile) -> (DType, usize) {
        (tile.types().kv, 0)
    }
}

type IndexRule = Rule<IndexAttentionProblem>;

/// Codes have kernels for either type of queries, and are read 16 at a time; rows of codes have one
/// type of queries.
const CODES: IndexRule = Rule {
    holds: |c| {
        let AttentionProblem { types, head_dims: HeadDims { qk, v }, .. } = c.problem.attention;
        if c.problem.cache.has_code_rows() {
            return types == c.tile.types();
        }
        let takes = [DType::F16, DType::BF16].contains(&types.q) && types.o == types.q;
        !types.kv.is_code() || takes && qk.is_multiple_of(16) && v.is_multiple_of(16)
    },
    refuses: |c| {
        let AttentionProblem { types, head_dims: HeadDims { qk, v }, .. } = c.problem.attention;
        match types.q {
            q if c.problem.cache.has_code_rows() => {
                let taken = c.tile.types().q;
                format!("q is {q}: beside latent rows of codes it takes {taken}")
            }
            DType::F16 | DType::BF16 => {
                let kv = types.kv;
                format!("head dimensions {qk} and {v} of {kv}: kernels take multiples of 16")
            }
            q => format!("q is {q}: beside {} kernels take f16 and bf16", types.kv),
        }
    },
    excludes_all: None,
};

/// The rows of a problem; beside codes in the types of a kernel, which takes others.
fn rows(c: &Candidate<'_, IndexAttentionProblem>) -> Rows {
    let rows = Rows::from(&c.problem.attention);
    if rows.types.kv.is_code() { Rows { types: c.tile.types(), ..rows } } else { rows }
}

/// Kernels for latent rows take their own head dimensions alone.
const HEAD_DIM: IndexRule = Rule {
    holds: |c| match c.tile {
        IndexTile::Latent(tile) => {
            let AttentionProblem { types, head_dims, .. } = c.problem.attention;
            c.problem.is_latent() && (types, head_dims) == (tile.types, tile.head_dims)
        }
        _ => !c.problem.is_latent() && rows(c).fit(c.tile.rows()),
    },
    refuses: |c| match (c.tile, c.problem.is_latent()) {
        (IndexTile::Latent(tile), _) => latent_refusal(c.problem, &[tile.head_dims]),
        (_, true) => "values that are columns of the keys: it reads both".into(),
        (tile, false) => rows(c).refusal(tile.rows()),
    },
    excludes_all: Some(|all| {
        let problem = all[0].problem;
        if problem.is_latent() {
            let taken: BTreeSet<_> = all.iter().map(|c| c.tile.head_dims()).collect();
            return latent_refusal(problem, &taken.into_iter().collect::<Vec<_>>());
        }
        let widest = all.iter().map(|c| c.tile.head_dims().max()).max().unwrap_or(0);
        rows(&all[0]).refusal_of_all(widest)
    }),
};

/// Why kernels for latent rows of these head dimensions do not take a problem.
fn latent_refusal(problem: &IndexAttentionProblem, taken: &[HeadDims]) -> String {
    let columns = |of: &HeadDims| format!("{} with values in the first {}", of.qk, of.v);
    let taken = taken.iter().map(columns).collect::<Vec<_>>().join(", or ");
    let found = problem.attention.head_dims;
    match problem.is_latent() {
        true => format!("keys of {} columns: kernels take {taken}", columns(&found)),
        false => format!(
            "head dimensions {} and {} of k and v: it takes keys of {taken} columns",
            found.qk, found.v
        ),
    }
}

/// Granularities that kernels take.
const GRANULARITIES: [usize; 5] = [1, 4, 16, 64, 128];

const GRANULARITY: IndexRule = Rule {
    holds: |c| {
        let granularity = c.problem.lists.granularity;
        GRANULARITIES.contains(&granularity) && granularity >= c.tile.least_granularity()
    },
    refuses: |c| {
        let (found, least) = (c.problem.lists.granularity, c.tile.least_granularity());
        let taken: Vec<_> = GRANULARITIES.into_iter().filter(|&taken| taken >= least).collect();
        format!("blocks of {found} tokens: the kernel takes {taken:?}")
    },
    excludes_all: Some(|all| {
        let found = all[0].problem.lists.granularity;
        format!("blocks of {found} tokens: kernels take {GRANULARITIES:?}")
    }),
};

/// Kernels load 16 keys at a time, which must be in one page. The only page of a sequence may be
/// of any size.
const PAGE_SIZE: IndexRule = Rule {
    holds: |c| c.problem.cache.has_whole_steps(),
    refuses: |c| format!("pages of {} slots, not of a multiple of 16", c.problem.cache.page_size),
    excludes_all: None,
};

/// Every sequence needs a page from which to read.
const SLOTS: IndexRule = Rule {
    holds: |c| c.problem.cache.capacity > 0,
    refuses: |c| c.problem.cache.no_slots(),
    excludes_all: None,
};

/// Kernels multiply the strides of slots, in bytes, in 32 bits.
const STRIDES: IndexRule = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |c| c.problem.cache.far_slots(),
    excludes_all: None,
};

/// Kernels count the keys of a list in 32 bits.
const MOST_POSITIONS: usize = 1 << 30;

const POSITIONS: IndexRule = Rule {
    holds: |c| c.problem.positions() < MOST_POSITIONS,
    refuses: |c| {
        let (keys, limit) = (c.problem.positions(), MOST_POSITIONS);
        format!("lists name up to {keys} keys, not below {limit}")
    },
    excludes_all: None,
};

/// Some kernels find queries, keys and values by tensor maps.
const MAPS: IndexRule = Rule {
    holds: |c| {
        let (attention, cache) = (&c.problem.attention, &c.problem.cache);
        let fits = |strides: &Strides, [batch, rows]: [usize; 2], heads| {
            [(strides.batch, batch), (strides.seq, rows), (strides.head, heads)]
                .iter()
                .all(|&(stride, size)| size <= 1 || is_tensor_map_stride(stride, attention.types.q))
        };
        let pages = [cache.pages, cache.page_size];
        let rows = match attention.packed {
            Some(packed) => [1, packed.total_q],
            None => [attention.batch, attention.seqlen_q],
        };
        match c.tile {
            IndexTile::Listed(_) | IndexTile::Latent(_) => true,
            IndexTile::United(_) => {
                fits(&attention.q, rows, attention.num_heads_q)
                    && [cache.k, cache.v].iter().all(|k| fits(k, pages, cache.num_heads_kv))
            }
        }
    },
    refuses: |_| {
        "it finds keys by tensor maps, which cannot have a stride of 0 or of 2^40 bytes".into()
    },
    excludes_all: None,
};

/// Kernels that unite lists have so much shared memory.
const ENTRIES: IndexRule = Rule {
    holds: |c| match c.tile {
        IndexTile::United(_) => united::union(c.gpu)
            .is_some_and(|(_, union)| c.problem.united_entries() <= union.most_entries() as usize),
        IndexTile::Listed(_) | IndexTile::Latent(_) => true,
    },
    refuses: |c| {
        let entries = c.problem.united_entries();
        format!("the lists of a tile have {entries} entries, more than it unites")
    },
    excludes_all: None,
};

/// Which lists are united decides in which steps a query sees its keys.
const INVARIANT: IndexRule = Rule {
    holds: |c| !matches!(c.tile, IndexTile::United(_)) || !c.problem.batch_invariant,
    refuses: |_| "batch_invariant is given, and it unites the lists of neighbouring queries".into(),
    excludes_all: None,
};

const TERMS: IndexRule = Rule {
    holds: |c| c.problem.attention.scores.added().is_none(),
    refuses: |c| {
        let term = c.problem.attention.scores.added().unwrap_or_default();
        format!("{term} is given, and kernels of attention by an index take none")
    },
    excludes_all: None,
};
