//! Selects the kernel for a problem, in the same way for every operation: the [`Rule`]s that a
//! kernel must fulfil, the order of preference, and the reason why no kernel fits.

use crate::{Error, Result};
use blockflash_safe::CudaProperties;
use blockflash_sys::{DType, Kernel, Target, manifest};
use std::collections::BTreeSet;
use std::fmt::{Debug, Display};
use std::sync::LazyLock;

/// A call reduced to plain numbers, and the rules that select its kernel. It contains no tensor and
/// calls no CUDA, so tests on any machine cover selection completely.
pub trait Problem: Copy + Debug + PartialEq + 'static {
    /// Name of the operation in errors and in the support table.
    const OP: &'static str;
    /// The word for the inputs in messages.
    const INPUTS: &'static str = "tensors";
    /// What to do where no kernel takes this element type, to be appended to a message.
    fn instead(_: DType) -> Option<&'static str> {
        None
    }
    /// The conditions on a kernel besides its element type and target, from the general to the
    /// particular: the first rule that no kernel fulfils explains why there is none.
    const RULES: &'static [Rule<Self>];

    /// The parameters that describe every kernel of the operation.
    type Tile: Copy + Send + Sync + 'static;
    /// See [`rank`](Self::rank).
    type Rank: Ord;

    /// The tile of a kernel of this operation; `None` for other kernels.
    fn tile(kernel: &Kernel) -> Option<Self::Tile>;
    /// All kernels of the operation. Each implementation caches its own, since searching the whole
    /// manifest at every call would be too slow.
    fn kernels() -> &'static [Peers<'static, Self>];
    /// Preference that depends on the kernel alone: the lowest order with a fitting kernel is
    /// taken.
    fn order(kernel: &Kernel, _tile: &Self::Tile) -> [usize; 2] {
        [preference(kernel.target), 0]
    }
    /// Preference among fitting kernels of equal order: the lowest rank is taken.
    fn rank(candidate: &Candidate<'_, Self>) -> Self::Rank;
    /// The properties that must be equal in problem and kernel: element type, and block size or 0.
    fn key(&self) -> (DType, usize);
    /// Whether a kernel matters when it is said why there is none for this problem.
    fn is_explained(&self, _tile: &Self::Tile) -> bool {
        true
    }
    /// The key of a kernel.
    fn key_of(tile: &Self::Tile) -> (DType, usize);
}

/// Kernels of equal [`Problem::order`] and key.
pub struct Peers<'r, P: Problem> {
    key: (DType, usize),
    pub(crate) kernels: Vec<(&'r Kernel, P::Tile)>,
}

/// The cache of [`Problem::kernels`]: [`all`] kernels, the preferred ones first.
pub(crate) type Kernels<P> = LazyLock<Vec<Peers<'static, P>>>;

/// A kernel that might compute a problem on a GPU.
pub struct Candidate<'c, P: Problem> {
    pub(crate) kernel: &'c Kernel,
    pub(crate) tile: &'c P::Tile,
    pub(crate) problem: &'c P,
    pub(crate) gpu: &'c CudaProperties,
}

/// Why none of these kernels computes the problem; there is at least one.
pub(crate) type Explanation<P> = fn(&[Candidate<'_, P>]) -> String;

/// A condition under which a kernel computes a problem, and the messages for when it fails.
pub struct Rule<P: Problem> {
    /// Evaluated for many kernels at every call, so it must not format anything.
    pub(crate) holds: fn(&Candidate<'_, P>) -> bool,
    /// Why this kernel does not fit.
    pub(crate) refuses: fn(&Candidate<'_, P>) -> String,
    /// Why no kernel fits, given the kernels that fulfil all previous rules. `None` uses the
    /// `refuses` message of the first of them.
    pub(crate) excludes_all: Option<Explanation<P>>,
}

impl<P: Problem> Rule<P> {
    const DTYPE: Self = Self {
        holds: |c| P::key_of(c.tile).0 == c.problem.key().0,
        refuses: |c| {
            let (kernel, inputs) = (P::key_of(c.tile).0, c.problem.key().0);
            format!("the kernel takes {kernel}, but the {} are {inputs}", P::INPUTS)
        },
        excludes_all: Some(|all| {
            let inputs = all[0].problem.key().0;
            let instead = P::instead(inputs).unwrap_or_default();
            format!("kernels take f16 and bf16, but the {} are {inputs}{instead}", P::INPUTS)
        }),
    };

    const TARGET: Self = Self {
        holds: |c| c.kernel.target.runs_on(c.gpu.compute_capability),
        refuses: |c| format!("the image is compiled for {}", c.kernel.target),
        excludes_all: Some(|all| {
            let portable = all.iter().any(|c| c.kernel.target.is_portable());
            if portable && !cfg!(feature = "all-gpus") {
                return "kernels for GPUs other than Hopper come with the feature `all-gpus`, \
                        without which this program was built"
                    .into();
            }
            let oldest = if portable { "8.0 or newer" } else { "9.0" };
            format!("kernels need compute capability {oldest}")
        }),
    };

    /// The kernel is for blocks of this size.
    pub(crate) const fn block_size(excludes_all: Explanation<P>) -> Self {
        Self {
            holds: |c| P::key_of(c.tile).1 == c.problem.key().1,
            refuses: |c| {
                let (kernel, blocks) = (P::key_of(c.tile).1, c.problem.key().1);
                format!("the kernel takes blocks of {kernel}, not {blocks}")
            },
            excludes_all: Some(excludes_all),
        }
    }

    /// The GPU has the shared memory that the kernel needs.
    pub(crate) const fn shared_memory(excludes_all: Option<Explanation<P>>) -> Self {
        Self {
            holds: |c| c.kernel.smem_bytes() <= c.gpu.smem_per_block,
            refuses: |c| {
                let (needed, available) = (c.kernel.smem_bytes(), c.gpu.smem_per_block);
                format!(
                    "a block needs {needed} bytes of shared memory, but the GPU has {available}"
                )
            },
            excludes_all,
        }
    }
}

/// Rank of a target, which puts machine code before PTX.
pub(crate) fn preference(target: Target) -> usize {
    Target::ALL.iter().position(|&other| other == target).unwrap_or(Target::ALL.len())
}

/// All kernels of an operation, the preferred ones first.
pub(crate) fn all<P: Problem>() -> Vec<Peers<'static, P>> {
    among::<P>(manifest::kernels())
}

fn among<P: Problem>(kernels: &[Kernel]) -> Vec<Peers<'_, P>> {
    let standing = |(kernel, tile): &(&Kernel, P::Tile)| (P::order(kernel, tile), P::key_of(tile));
    let mut all: Vec<_> =
        kernels.iter().filter_map(|kernel| Some((kernel, P::tile(kernel)?))).collect();
    all.sort_by_key(standing);
    all.chunk_by(|a, b| standing(a) == standing(b))
        .map(|peers| Peers { key: P::key_of(&peers[0].1), kernels: peers.to_vec() })
        .collect()
}

/// Sizes for which an operation has kernels, in ascending order.
pub(crate) fn sizes<P: Problem>(size: impl Fn(&P::Tile) -> u32) -> Vec<u32> {
    ascending(P::kernels().iter().flat_map(|peers| &peers.kernels).map(|(_, tile)| size(tile)))
}

pub(crate) fn ascending(sizes: impl Iterator<Item = u32>) -> Vec<u32> {
    sizes.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Selects the kernel for a problem on a GPU among all kernels.
pub(crate) fn select<P: Problem>(problem: &P, gpu: &CudaProperties) -> Result<&'static Kernel> {
    select_of(P::kernels(), problem, gpu)
}

/// Like [`select`], among these kernels.
#[cfg(test)]
pub(crate) fn select_among<'r, P: Problem>(
    kernels: &'r [Kernel],
    problem: &P,
    gpu: &CudaProperties,
) -> Result<&'r Kernel> {
    select_of(&among::<P>(kernels), problem, gpu)
}

fn select_of<'r, P: Problem>(
    kernels: &[Peers<'r, P>],
    problem: &P,
    gpu: &CudaProperties,
) -> Result<&'r Kernel> {
    let key = problem.key();
    for peers in kernels.iter().filter(|peers| peers.key == key) {
        // `min_by_key` would move every candidate several times, which takes a quarter of a call's
        // time.
        let mut best: Option<(P::Rank, &Kernel)> = None;
        for (kernel, tile) in &peers.kernels {
            let c = Candidate { kernel, tile, problem, gpu };
            if (Rule::TARGET.holds)(&c) && P::RULES.iter().all(|rule| (rule.holds)(&c)) {
                let rank = P::rank(&c);
                if best.as_ref().is_none_or(|(least, _)| rank < *least) {
                    best = Some((rank, kernel));
                }
            }
        }
        if let Some((_, kernel)) = best {
            return Ok(kernel);
        }
    }
    let all = kernels.iter().flat_map(|peers| &peers.kernels);
    let all = all.filter(|(_, tile)| problem.is_explained(tile));
    let all = all.map(|(kernel, tile)| Candidate { kernel, tile, problem, gpu }).collect();
    Err(unsupported::<P>(&gpu.compute_capability, why_none(all)))
}

/// The first reason that rules out every kernel, from the general to the particular.
fn why_none<P: Problem>(mut left: Vec<Candidate<'_, P>>) -> String {
    for rule in [&Rule::TARGET, &Rule::DTYPE].into_iter().chain(P::RULES) {
        let (fit, others): (Vec<_>, Vec<_>) = left.into_iter().partition(|c| (rule.holds)(c));
        if let ([], [first, ..]) = (&fit[..], &others[..]) {
            return rule.excludes_all.map_or_else(|| (rule.refuses)(first), |all| all(&others));
        }
        left = fit;
    }
    "there is no kernel".into()
}

/// Checks that this kernel computes the problem on this GPU.
pub(crate) fn accepts<P: Problem>(
    kernel: &Kernel,
    problem: &P,
    gpu: &CudaProperties,
) -> Result<()> {
    obeys(&[&[Rule::DTYPE], P::RULES, &[Rule::TARGET]], kernel, problem, gpu)
}

/// Like [`accepts`], without the element type and the target, on which plans do not depend.
pub(crate) fn fits<P: Problem>(kernel: &Kernel, problem: &P, gpu: &CudaProperties) -> Result<()> {
    obeys(&[P::RULES], kernel, problem, gpu)
}

fn obeys<P: Problem>(
    rules: &[&[Rule<P>]],
    kernel: &Kernel,
    problem: &P,
    gpu: &CudaProperties,
) -> Result<()> {
    let tile = &tile_of::<P>(kernel, &gpu.compute_capability)?;
    let candidate = Candidate { kernel, tile, problem, gpu };
    let mut rules = rules.iter().copied().flatten();
    let Some(broken) = rules.find(|rule| !(rule.holds)(&candidate)) else { return Ok(()) };
    let what = format!("{}: {}", kernel.symbol(), (broken.refuses)(&candidate));
    Err(unsupported::<P>(&gpu.compute_capability, what))
}

/// The tile of a kernel of this operation.
pub(crate) fn tile_of<P: Problem>(kernel: &Kernel, arch: &dyn Display) -> Result<P::Tile> {
    P::tile(kernel).ok_or_else(|| {
        unsupported::<P>(arch, format!("{}: this kernel computes something else", kernel.symbol()))
    })
}

pub(crate) fn unsupported<P: Problem>(arch: &dyn Display, what: String) -> Error {
    Error::Unsupported { op: P::OP, arch: arch.to_string(), what }
}
