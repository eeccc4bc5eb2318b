use super::AttentionDecodeProblem;
use crate::Result;
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{AttentionDecode as AttentionDecodeTile, Variant};
use blockflash_sys::{DType, Kernel};
use std::sync::LazyLock;

/// The tile of a kernel of attention to a cache; `None` for other kernels.
pub fn tile(kernel: &Kernel) -> Option<AttentionDecodeTile> {
    if let Variant::AttentionDecode(tile) = kernel.variant { Some(tile) } else { None }
}

/// The kernel for attention to a cache on a GPU. Among the usable kernels it prefers machine code
/// over PTX, then the smallest head_dim tile that fits, then the fewest rows that hold all queries
/// of a group of heads, else the most rows.
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
    const RULES: &'static [Rule<Self>] =
        &[HEAD_DIM, PAGE_SIZE, SLOTS, STRIDES, ROWS, Rule::shared_memory(None)];

    type Tile = AttentionDecodeTile;
    type Rank = (bool, u32);

    fn tile(kernel: &Kernel) -> Option<AttentionDecodeTile> {
        tile(kernel)
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<AttentionDecodeProblem> =
            LazyLock::new(selection::all::<AttentionDecodeProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, tile: &AttentionDecodeTile) -> [usize; 2] {
        [preference(kernel.target), tile.head_dim as usize]
    }

    fn rank(c: &Candidate<'_, Self>) -> Self::Rank {
        rank(c.tile.rows, c.problem.group_rows())
    }

    fn key(&self) -> (DType, usize) {
        (self.attention.dtype, 0)
    }

    fn key_of(tile: &AttentionDecodeTile) -> (DType, usize) {
        (tile.dtype, 0)
    }
}

/// Lines of the support table: each tile's range of head dimensions, and one that no kernel takes.
pub(crate) fn support(dtype: DType) -> Vec<(String, AttentionDecodeProblem)> {
    let problem = |head_dim| {
        let cache = CacheSizes::contiguous(dtype, [1, 16], 1, head_dim);
        AttentionDecodeProblem::of(cache, 1, 1)
    };
    let mut lines = Vec::new();
    let mut start = 8;
    for widest in selection::sizes::<AttentionDecodeProblem>(|tile| tile.head_dim) {
        lines.push((format!("head_dim {start}..={widest} by 8"), problem(widest as usize)));
        start = widest + 8;
    }
    lines.push(("other head_dim (59)".into(), problem(59)));
    lines
}

/// See [`select`].
fn rank(tile: u32, needed: usize) -> (bool, u32) {
    let holds = tile as usize >= needed;
    (!holds, if holds { tile } else { u32::MAX - tile })
}

type DecodeRule = Rule<AttentionDecodeProblem>;

const HEAD_DIM: DecodeRule = Rule {
    holds: |c| {
        let head_dim = c.problem.attention.head_dim;
        head_dim <= c.tile.head_dim as usize && head_dim.is_multiple_of(8)
    },
    refuses: |c| {
        let (head_dim, widest) = (c.problem.attention.head_dim, c.tile.head_dim);
        format!("head_dim {head_dim} is not a multiple of 8 up to {widest}")
    },
    excludes_all: Some(|all| {
        let head_dim = all[0].problem.attention.head_dim;
        let widest = all.iter().map(|c| c.tile.head_dim).max().unwrap_or(0);
        format!("head_dim {head_dim}: kernels take multiples of 8 up to {widest}")
    }),
};

/// Kernels load 16 keys at a time, which must lie in one page. The only page of a sequence may be
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
    refuses: |_| "the cache has no slot, or lists of pages have no room".into(),
    excludes_all: None,
};

/// Kernels multiply the strides of slots, in bytes, in 32 bits.
const STRIDES: DecodeRule = Rule {
    holds: |c| c.problem.cache.has_near_slots(),
    refuses: |_| "the slots of the cache lie 2^30 elements and more apart".into(),
    excludes_all: None,
};

/// Kernels divide numbers of rows by reciprocals.
const ROWS: DecodeRule = Rule {
    holds: |c| c.problem.group_rows() < 1 << 20,
    refuses: |c| format!("{} rows for a head of keys, not below 2^20", c.problem.group_rows()),
    excludes_all: None,
};

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
