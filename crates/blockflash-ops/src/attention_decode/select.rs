use super::AttentionDecodeProblem;
use super::estimate::fastest;
use super::many;
use super::tile::{CacheTile, split_tile, tile};
use crate::Result;
use crate::attention::{Rows, Strides};
use crate::check::is_tensor_map_stride;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::{DType, ElementTypes, HeadDims, Kernel, Target};
use std::collections::BTreeSet;
use std::sync::LazyLock;

/// The kernel for attention to a cache on a GPU. Among the usable kernels it prefers machine code
/// over PTX, then the smallest head_dim tile that fits. Where a sequence can have this many queries
/// that their tiles fill a GPU, it is the kernel for many queries, which is launched together with
/// one for the sequences with few. Where all sequences have equally many queries and visit all
/// pages, it is the one of all kernels that is estimated to be the fastest for this batch, as if
/// it filled the cache where lengths are on the device. Otherwise, or with `batch_invariant`, more
/// than 8 rows (queries times heads that share keys) have the kernel for several queries: packed
/// sequences have another one, because which it is must not follow from the longest of them. Among
/// the others it has the fewest rows that hold all queries of a group of heads, else the most rows.
/// Where the values are the first columns of keys beyond head_dim 256, it is one for such rows.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the head dimension, the page size, the architecture.
pub fn select(problem: &AttentionDecodeProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for AttentionDecodeProblem {
    const OP: &'static str = "attention_decode";
    const INPUTS: &'static str = "queries and the cache";
    const RULES: &'static [Rule<Self>] = &[
        CODES,
        HEAD_DIM,
        ROTATED,
        PAGE_SIZE,
        SLOTS,
        STRIDES,
        ROWS,
        LISTS,
        MAPS,
        TERMS,
        Rule::shared_memory(None),
    ];

    type Tile = CacheTile;
    type Rank = (bool, bool, bool, u64);

    fn tile(kernel: &Kernel) -> Option<CacheTile> {
        tile(kernel)
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionDecodeProblem> =
            LazyLock::new(selection::all::<AttentionDecodeProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &CacheTile) -> [usize; 2] {
        // Whether there are many queries decides among the kernels of Hopper.
        let target = if kernel.target == Target::Sm90a { Target::Sm90 } else { kernel.target };
        [preference(target), tile.head_dims().max()]
    }

    fn rank(c: &Candidate<'_, Self>) -> Self::Rank {
        let (problem, many) = (c.problem, c.problem.has_many());
        let by_time = |time: f64| (false, false, false, time as u64);
        match c.tile {
            // The widest.
            CacheTile::Many(tile) if many => {
                (false, false, false, u64::from(u32::MAX - tile.tile.block_q()))
            }
            CacheTile::Many(tile)
                if problem.is_estimated() && problem.attention.packed.is_none() =>
            {
                by_time(many::fastest(tile, problem, c.gpu).time)
            }
            CacheTile::Few(_) | CacheTile::Several(_) if problem.is_estimated() => {
                let tile = split_tile(c.kernel, c.tile, problem, c.gpu);
                let time = tile.map_or(f64::MAX, |tile| fastest(&tile, problem, c.gpu).time);
                // Where no kernel for many queries takes them, the fastest of the others does.
                (many, false, false, time as u64)
            }
            CacheTile::Many(_) => (true, false, false, 0),
            CacheTile::Few(tile) => {
                let (misses, rows) = rank(tile.rows, problem.group_rows());
                (many, has_several(problem), misses, rows.into())
            }
            CacheTile::Several(_) => (many, !has_several(problem), false, 0),
            CacheTile::Latent(tile) => {
                let (misses, rows) = rank(tile.rows, problem.group_rows());
                (false, !tile.hopper, misses, rows.into())
            }
        }
    }

    fn is_explained(&self, tile: &CacheTile) -> bool {
        tile.is_latent() == self.is_latent()
    }

    fn key(&self) -> (DType, usize) {
        (key_of(self.attention.types), 0)
    }

    fn key_of(tile: &CacheTile) -> (DType, usize) {
        (key_of(tile.types()), 0)
    }
}

/// The type of codes decides, and otherwise that of queries.
const fn key_of(types: ElementTypes) -> DType {
    if types.kv.is_code() || matches!(types.kv, DType::U8) { types.kv } else { types.q }
}

/// The kernel for few queries, whatever the problem has.
pub(super) fn few(
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<&'static Kernel> {
    let mut problem = *problem;
    problem.attention.seqlen_q = problem.attention.seqlen_q.min(problem.fewest_queries() - 1);
    select(&problem, gpu)
}

/// More rows (queries times heads that share keys) have the kernel for several.
const FEW_ROWS: usize = 8;

fn has_several(problem: &AttentionDecodeProblem) -> bool {
    let attention = &problem.attention;
    attention.packed.is_none() && problem.group_rows() > FEW_ROWS
}

/// See [`select`].
fn rank(tile: u32, needed: usize) -> (bool, u32) {
    let holds = tile as usize >= needed;
    (!holds, if holds { tile } else { u32::MAX - tile })
}

type DecodeRule = Rule<AttentionDecodeProblem>;

/// Codes have kernels for either type of queries, and are read 16 at a time.
const CODES: DecodeRule = Rule {
    holds: |c| {
        let (types, HeadDims { qk, v }) =
            (c.problem.attention.types, c.problem.attention.head_dims);
        if c.problem.cache.has_code_rows() {
            return types == c.tile.types();
        }
        let takes = [DType::F16, DType::BF16].contains(&types.q) && types.o == types.q;
        !types.kv.is_code() || takes && qk.is_multiple_of(16) && v.is_multiple_of(16)
    },
    refuses: |c| {
        let (ElementTypes { q, kv, .. }, HeadDims { qk, v }) =
            (c.problem.attention.types, c.problem.attention.head_dims);
        match q {
            _ if c.problem.cache.has_code_rows() => {
                format!("q is {q}: beside latent rows of codes it takes {}", c.tile.types().q)
            }
            DType::F16 | DType::BF16 => {
                format!("head dimensions {qk} and {v} of {kv}: kernels take multiples of 16")
            }
            _ => format!("q is {q}: beside {kv} kernels take f16 and bf16"),
        }
    },
    excludes_all: None,
};

/// The rows of a problem; beside codes in the types of a kernel, which takes others.
fn rows(c: &Candidate<'_, AttentionDecodeProblem>) -> Rows {
    let rows = Rows::from(&c.problem.attention);
    if rows.types.kv.is_code() { Rows { types: c.tile.types(), ..rows } } else { rows }
}

/// Kernels for latent rows take their own head dimensions alone.
const HEAD_DIM: DecodeRule = Rule {
    holds: |c| match c.tile {
        CacheTile::Latent(tile) => {
            c.problem.is_latent()
                && (rows(c).types, rows(c).head_dims) == (tile.types, tile.head_dims)
        }
        _ => !c.problem.is_latent() && rows(c).fit(c.tile.rows()),
    },
    refuses: |c| match c.tile {
        CacheTile::Latent(tile) if rows(c).types == tile.types => {
            latent_refusal(c, &[tile.head_dims])
        }
        _ if rows(c).fit(c.tile.rows()) => {
            "values that are columns of the keys: it reads both".into()
        }
        _ => rows(c).refusal(c.tile.rows()),
    },
    excludes_all: Some(|all| {
        if all[0].problem.is_latent() {
            let taken: BTreeSet<_> = all.iter().map(|c| c.tile.head_dims()).collect();
            return latent_refusal(&all[0], &taken.into_iter().collect::<Vec<_>>());
        }
        let widest = all.iter().map(|c| c.tile.head_dims().max()).max().unwrap_or(0);
        let rows = Rows::from(&all[0].problem.attention);
        let kv = rows.types.kv;
        // Whatever the queries are.
        let types = if kv.is_code() { ElementTypes::all(kv) } else { rows.types };
        Rows { types, ..rows }.refusal_of_all(widest)
    }),
};

/// Why kernels for latent rows of these head dimensions do not take a problem.
fn latent_refusal(c: &Candidate<'_, AttentionDecodeProblem>, taken: &[HeadDims]) -> String {
    let columns = |of: HeadDims| format!("{} with values in the first {}", of.qk, of.v);
    let taken: Vec<_> = taken.iter().map(|&of| columns(of)).collect();
    let taken = taken.join(", or ");
    let found = c.problem.attention.head_dims;
    match c.problem.is_latent() {
        true => format!("keys of {} columns: kernels take {taken}", columns(found)),
        false => format!(
            "head dimensions {} and {} of k and v: it takes keys of {taken} columns",
            found.qk, found.v
        ),
    }
}

/// Rotated queries are stored in the output, from where the kernel reads them.
const ROTATED: DecodeRule = Rule {
    holds: |c| c.problem.rotary.is_none() || c.problem.attention.head_dims.single().is_some(),
    refuses: |c| {
        let HeadDims { qk, v } = c.problem.attention.head_dims;
        format!("a rotary embedding with head_dim {qk} of q and k, {v} of v: it takes equal ones")
    },
    excludes_all: None,
};

/// Kernels load 16 keys at a time, which must be in one page. The only page of a sequence may be
/// of any size.
const PAGE_SIZE: DecodeRule = Rule {
    holds: |c| c.problem.cache.has_whole_steps(),
    refuses: |c| format!("pages of {} slots, not of a multiple of 16", c.problem.cache.page_size),
    excludes_all: None,
};

/// Every sequence needs a page, and every list room for one, from which to read.
const SLOTS: DecodeRule = Rule {
    holds: |c| {
        c.problem.cache.capacity > 0 && c.problem.pages.is_none_or(|pages| pages.capacity > 0)
    },
    refuses: |c| match c.problem.pages {
        Some(pages) if pages.capacity == 0 => "lists of pages have room for 0, expected 1".into(),
        _ => c.problem.cache.no_slots(),
    },
    excludes_all: None,
};

/// Kernels multiply the strides of slots, in bytes, in 32 bits.
const STRIDES: DecodeRule = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |c| c.problem.cache.far_slots(),
    excludes_all: None,
};

/// Kernels divide numbers of rows by reciprocals.
const ROWS: DecodeRule = Rule {
    holds: |c| c.problem.group_rows() < 1 << 20,
    refuses: |c| format!("{} rows for a head of keys, not below 2^20", c.problem.group_rows()),
    excludes_all: None,
};

/// Lists of pages have kernels for few queries.
const LISTS: DecodeRule = Rule {
    holds: |c| c.problem.pages.is_none() || matches!(c.tile, CacheTile::Few(_)),
    refuses: |_| "pages is given, and it visits all pages".into(),
    excludes_all: None,
};

/// Some kernels find keys by tensor maps.
const MAPS: DecodeRule = Rule {
    holds: |c| {
        let (attention, cache) = (&c.problem.attention, &c.problem.cache);
        let fits = |strides: Strides, [batch, rows]: [usize; 2], heads| {
            [(strides.batch, batch), (strides.seq, rows), (strides.head, heads)]
                .iter()
                .all(|&(stride, size)| size <= 1 || is_tensor_map_stride(stride, attention.types.q))
        };
        let pages = [cache.pages, cache.page_size];
        let rows = match attention.packed {
            Some(packed) => [1, packed.total_q],
            None => [attention.batch, attention.seqlen_q],
        };
        let of_keys = |strides: &Strides| fits(*strides, pages, cache.num_heads_kv);
        match c.tile {
            CacheTile::Few(_) | CacheTile::Several(_) => true,
            CacheTile::Latent(tile) => !tile.hopper || of_keys(&cache.k),
            CacheTile::Many(_) => {
                let of_rows = |strides: &Strides| fits(*strides, rows, attention.num_heads_q);
                [attention.q, attention.o].iter().all(of_rows)
                    && [cache.k, cache.v].iter().all(of_keys)
            }
        }
    },
    refuses: |_| {
        "it finds keys by tensor maps, which cannot have a stride of 0 or of 2^40 bytes".into()
    },
    excludes_all: None,
};

/// What is added to scores has kernels of its own, which take nothing else: those of other problems
/// are faster. They take a mask of the last keys as well, as do those for several queries.
const TERMS: DecodeRule = Rule {
    holds: |c| match c.tile {
        CacheTile::Few(tile) => tile.terms == c.problem.terms().is_some(),
        CacheTile::Several(_) => c.problem.attention.scores.added().is_none(),
        CacheTile::Many(_) | CacheTile::Latent(_) => c.problem.terms().is_none(),
    },
    refuses: |c| match c.problem.terms() {
        Some(term) => format!("{term} is given, and it takes none"),
        None => "it is for scores with a bias, alibi or tail_mask".into(),
    },
    excludes_all: None,
};

/// Tiles of queries, times heads, from which on their own kernel is the faster one. It does not
/// split keys, so with fewer too many SMs would have nothing to do. A property of the sequence
/// alone: its bits do not depend on the batch.
const FEWEST_TILES: usize = 64;
/// Queries of the tiles that this is counted in.
const TILE_QUERIES: usize = 128;
impl AttentionDecodeProblem {
    /// The fewest queries for which a sequence has a kernel of its own.
    pub(super) fn fewest_queries(&self) -> usize {
        FEWEST_TILES.div_ceil(self.attention.num_heads_q.max(1)) * TILE_QUERIES
    }

    /// Whether a sequence can have this many, for kernels that take nothing else.
    pub(super) fn has_many(&self) -> bool {
        self.attention.seqlen_q >= self.fewest_queries() && self.terms().is_none()
    }
}

/// Whether a kernel is one for many queries.
pub(super) fn is_many(kernel: &Kernel) -> bool {
    matches!(tile(kernel), Some(CacheTile::Many(_)))
}

/// The kernel for the sequences that `kernel` leaves, and the most queries of one. Only packed
/// sequences have unequal numbers of queries.
pub(super) fn others(
    kernel: &Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Option<(&'static Kernel, usize)>> {
    if !is_many(kernel) || problem.attention.packed.is_none() || !problem.has_many() {
        return Ok(None);
    }
    Ok(Some((few(problem, gpu)?, problem.fewest_queries() - 1)))
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn the_fewest_rows_that_suffice_else_the_most() {
        let taken = |needed| [8, 16, 32].into_iter().min_by_key(|&rows| rank(rows, needed));
        for (needed, rows) in [(1, 8), (8, 8), (9, 16), (17, 32), (32, 32), (33, 32), (4096, 32)] {
            assert_eq!(taken(needed), Some(rows), "{needed}");
        }
    }
}
