use super::narrow::MOST_COLUMNS;
use super::portable::portable_time;
use super::{BsrProblem, cost};
use crate::Result;
use crate::check::{is_tensor_map_stride, size_refusal, too_large};
use crate::rates::was_tuned;
use crate::selection::{self, Candidate, Kernels, Peers, Problem, Rule, preference};
use blockflash_safe::CudaProperties;
use blockflash_sys::manifest::{BsrMatmulTile, Variant};
use blockflash_sys::{DType, Kernel, Major};
use std::cmp::Reverse;
use std::sync::LazyLock;

/// Columns from which on Hopper takes the widest portable tile: narrower ones have fewer CTAs on an
/// SM and more rounds of them, which costs more than columns beyond n.
const WIDE: usize = 1024;

/// The kernel for a problem on a GPU. Usable kernels of the preferred target (machine code before
/// PTX) win, with three exceptions: up to 32 columns have kernels of their own on Hopper, for small
/// blocks other Hopper kernels are taken only where they are estimated to be faster, and kernels
/// that take any layout only where no other is usable. Among Hopper kernels the one that is
/// estimated to finish first is taken. Of the portable ones on Hopper it is the one whose tiles
/// compute the fewest columns beyond n, and of these, or of all from 1024 columns on, the widest;
/// elsewhere the one that is estimated to finish first, too.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) names what no kernel offers: the element type,
/// the block size, the transposed A or the layouts of B and C, the architecture or its shared
/// memory.
pub fn select(problem: &BsrProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
    selection::select(problem, gpu)
}

/// Whether this kernel can compute the problem on this GPU.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) says what does not fit.
pub fn accepts(kernel: &Kernel, problem: &BsrProblem, gpu: &CudaProperties) -> Result<()> {
    selection::accepts(kernel, problem, gpu)
}

impl Problem for BsrProblem {
    const OP: &'static str = "bsr_matmul";
    const INPUTS: &'static str = "matrices";
    const RULES: &'static [Rule<Self>] =
        &[TRANSPOSED, MAJOR_OF_B, MAJOR_OF_C, BLOCK_SIZE, SHARED_MEMORY, SIZES, TENSOR_MAP];

    type Tile = BsrMatmulTile;
    type Rank = (bool, usize, u64, Reverse<u32>);

    fn tile(kernel: &Kernel) -> Option<BsrMatmulTile> {
        kernel.bsr_matmul_tile()
    }

    fn kernels() -> &'static [Peers<'static, Self>] {
        static KERNELS: Kernels<BsrProblem> = LazyLock::new(selection::all::<BsrProblem>);
        &KERNELS
    }

    fn order(kernel: &Kernel, _: &BsrMatmulTile) -> [usize; 2] {
        [kernel.takes_any_layout().into(), 0]
    }

    fn rank(c: &Candidate<'_, Self>) -> Self::Rank {
        let Candidate { kernel, tile, problem, gpu } = c;
        let (waits, cost) = match &kernel.variant {
            Variant::BsrMatmulHopper(hopper) => {
                let (time, _) = cost::hopper_time(hopper, problem, gpu);
                (!cost::pays(time, problem, gpu), time)
            }
            Variant::BsrMatmul(tile) if !was_tuned(gpu) => {
                (false, portable_time(tile, kernel, problem, gpu))
            }
            // Nothing reads A as fast, best once for all columns.
            Variant::BsrMatmulNarrow(narrow) if (1..=MOST_COLUMNS).contains(&problem.n) => {
                let cost = f64::from(narrow.block_n) + 1e3 * tile.tiles_n(problem.n as u64) as f64;
                return (false, 0, cost.to_bits(), Reverse(tile.block_n));
            }
            Variant::BsrMatmulNarrow(_) => (true, f64::INFINITY),
            _ if problem.n >= WIDE => (false, 0.0),
            _ => (false, problem.n.next_multiple_of(tile.block_n as usize) as f64),
        };
        // The bit patterns of non-negative floats are ordered like their values.
        (waits, preference(kernel.target), cost.to_bits(), Reverse(tile.block_n))
    }

    fn key(&self) -> (DType, usize) {
        (self.dtype, self.block_size)
    }

    fn key_of(tile: &BsrMatmulTile) -> (DType, usize) {
        (tile.dtype, tile.block_size as usize)
    }
}

/// Lines of the support table: each block size in the layouts that most kernels take and in other
/// layouts, and a block size that no kernel supports.
pub(crate) fn support(dtype: DType) -> Vec<(String, BsrProblem)> {
    // As many columns as the widest tile has, so that no kernel computes columns beyond n.
    let problem = |block| BsrProblem::new(dtype, [block, 1 << 20, block], block, 1);
    let mut lines = Vec::new();
    for size in selection::sizes::<BsrProblem>(|tile| tile.block_size) {
        let (plain, line) = (problem(size as usize), format!("block {size}"));
        lines.push((line.clone(), plain));
        // Features that only some kernels have: Aᵀ, and column-major B and C, as dense times sparse
        // uses.
        for (layout, a_transposed, major) in [
            ("transposed A", true, Major::Row),
            ("column-major B and C", false, Major::Column),
            ("transposed A, column-major B and C", true, Major::Column),
        ] {
            let problem = plain.with_layouts(a_transposed, major, major);
            lines.push((format!("{line}, {layout}"), problem));
        }
    }
    lines.push(("other block (24)".into(), problem(24)));
    lines
}

type MatmulRule = Rule<BsrProblem>;
type BsrCandidate<'c> = Candidate<'c, BsrProblem>;

const TRANSPOSED: MatmulRule = Rule {
    holds: |c| c.kernel.takes_any_layout() || c.tile.a_transposed == c.problem.a_transposed,
    refuses: |c| {
        let how = if c.tile.a_transposed { "transposed" } else { "as it is" };
        format!("the kernel multiplies A {how}")
    },
    excludes_all: Some(no_layout),
};

const MAJOR_OF_B: MatmulRule = Rule {
    holds: |c| c.kernel.takes_any_layout() || major_of_b(c) == c.problem.b_major,
    refuses: |c| format!("the kernel takes a {}-major b", major_of_b(c).name()),
    excludes_all: Some(no_layout),
};

fn major_of_b(c: &BsrCandidate<'_>) -> Major {
    if c.tile.b_column_major { Major::Column } else { Major::Row }
}

const MAJOR_OF_C: MatmulRule = Rule {
    holds: |c| c.problem.c_major == Major::Row || c.kernel.writes_any_layout(),
    refuses: |_| "the kernel takes a row-major c".into(),
    excludes_all: Some(no_layout),
};

fn no_layout(all: &[BsrCandidate<'_>]) -> String {
    format!("{}: no kernel takes that", asked(all[0].problem))
}

const BLOCK_SIZE: MatmulRule = Rule::block_size(|all| {
    let sizes = selection::ascending(all.iter().map(|c| c.tile.block_size));
    format!("{}: kernels take {sizes:?}", asked(all[0].problem))
});

const SHARED_MEMORY: MatmulRule = Rule::shared_memory(Some(|all| {
    format!(
        "{} in {}: no kernel for this architecture and its {} bytes of shared memory",
        asked(all[0].problem),
        all[0].problem.dtype,
        all[0].gpu.smem_per_block
    )
}));

/// Kernels with tensor maps count sizes in 32 bits.
const SIZES: MatmulRule = Rule {
    holds: |c| !c.tile.tensor_maps || too_large(sizes(c)).is_none(),
    refuses: |c| size_refusal(sizes(c)),
    excludes_all: Some(|all| {
        format!("{}: {}", asked(all[0].problem), size_refusal(sizes(&all[0])))
    }),
};

fn sizes(c: &BsrCandidate<'_>) -> [usize; 3] {
    [c.problem.m, c.problem.n, c.problem.k]
}

/// B is read through a tensor map. The map of a B without elements is never used.
const TENSOR_MAP: MatmulRule = Rule {
    holds: |c| {
        let p = c.problem;
        !c.tile.tensor_maps
            || p.k == 0
            || p.n == 0
            || p.b_vectorized && is_tensor_map_stride(p.ldb, p.dtype)
    },
    refuses: |c| map_refusal(c.problem),
    excludes_all: Some(|all| format!("{}: {}", asked(all[0].problem), map_refusal(all[0].problem))),
};

fn map_refusal(problem: &BsrProblem) -> String {
    let lines = if problem.b_major == Major::Row { "rows" } else { "columns" };
    let ldb = problem.ldb;
    format!("b has no tensor map: {lines} of 16-byte aligned memory, {ldb} elements apart")
}

/// Describes the block size and the features of a problem that only some kernels have.
fn asked(problem: &BsrProblem) -> String {
    let layouts = [
        (problem.a_transposed, "a transposed A"),
        (problem.b_major == Major::Column, "a column-major b"),
        (problem.c_major == Major::Column, "a column-major c"),
    ];
    let layouts = layouts.into_iter().filter(|(is, _)| *is).map(|(_, what)| what);
    let layouts = layouts.collect::<Vec<_>>().join(" and ");
    let with = if layouts.is_empty() { "" } else { " with " };
    format!("block size {}{with}{layouts}", problem.block_size)
}

#[cfg(test)]
#[path = "any_layout_tests.rs"]
mod any_layout_tests;

#[cfg(test)]
#[path = "hopper_tests.rs"]
mod hopper_tests;

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
