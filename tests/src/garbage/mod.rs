//! Random garbage in every device array that decides about addresses or loops: sequence offsets,
//! index arrays, lists, scores; and in the log-sum-exp. Whatever the arrays hold, no kernel reads
//! or writes outside of the tensors, and every launch ends.
//!
//! A case follows from its number alone, on a CPU as on a GPU. Tensors are in larger allocations
//! whose margins are NaN, so a write to a margin is noticed, and a read of a margin makes an output
//! NaN.

mod attention;
mod attention_bwd;
mod attention_decode;
mod built_masks;
mod guarded;
mod operands;
mod products;
mod values;

use crate::attention::takes_packed;
use crate::gpu::{Gpu, say, wait};
use crate::number::rng;
use blockflash_ops::attention_decode::{CacheTile, tile};
use blockflash_ops::{CudaProperties, Stream};
use blockflash_sys::manifest::{
    self, AttentionBwdTile, AttentionTile, BsrMatmulTile, BsrSddmmTile, Variant,
};
use blockflash_sys::{BlockMaskKernel, Kernel};
use rand::rngs::StdRng;
use std::collections::BTreeMap;
use std::ops::Range;

type Checked<T> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The computation of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Attention with garbage in `cu_seqlens`.
    Packed,
    /// Attention with garbage in `cu_seqlens`, under a packed block mask.
    PackedMasked,
    /// The same with bits of partial blocks.
    PackedPartial,
    /// Gradients of attention with garbage in the log-sum-exp.
    Gradients,
    /// The same with garbage in `cu_seqlens`.
    PackedGradients,
    /// The same under a packed block mask.
    MaskedGradients,
    /// The same with bits of partial blocks.
    PartialGradients,
    /// Attention over a cache with garbage in lengths, block table, lists of pages and
    /// `cu_seqlens`, which may also append and turn queries.
    Cached,
    /// A block mask built from garbage, and attention under it.
    BuiltMask,
    /// A matrix made of garbage index arrays; if they are valid, a product with it or with its
    /// transpose.
    Product,
    /// A matrix made of garbage index arrays; if they are valid, a sampled product.
    Sampled,
}

impl Kind {
    /// Kinds of consecutive case numbers.
    const TURNS: [Self; 20] = [
        Self::Packed,
        Self::PackedMasked,
        Self::BuiltMask,
        Self::Packed,
        Self::Product,
        Self::Packed,
        Self::BuiltMask,
        Self::PackedMasked,
        Self::Packed,
        Self::Sampled,
        Self::Gradients,
        Self::PackedGradients,
        Self::MaskedGradients,
        Self::PackedGradients,
        Self::Cached,
        Self::Cached,
        Self::PackedPartial,
        Self::PartialGradients,
        Self::PackedPartial,
        Self::PartialGradients,
    ];

    /// The kind of a case, and the number of earlier cases of this kind.
    fn of(number: usize) -> (Self, usize) {
        let (round, at) = (number / Self::TURNS.len(), number % Self::TURNS.len());
        let kind = Self::TURNS[at];
        let count = |kinds: &[Self]| kinds.iter().filter(|other| **other == kind).count();
        (kind, round * count(&Self::TURNS) + count(&Self::TURNS[..at]))
    }
}

/// How a case ended, unless it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ended {
    /// Something was computed.
    Computed,
    /// The garbage was refused with the error that is meant for it.
    Refused,
}

/// Where cases run, and the kernels that take turns.
pub struct Place {
    stream: Stream,
    /// On a GPU, a second stream, which writes to offsets while kernels read them.
    other: Option<Stream>,
    /// Kernels of a GPU that is not there: the CPU computes, and the kernels must accept the
    /// problem.
    imagined: Option<CudaProperties>,
    attention: Vec<(&'static Kernel, AttentionTile)>,
    /// Those of them that take block masks.
    attention_masked: Vec<(&'static Kernel, AttentionTile)>,
    gradients: Vec<(&'static Kernel, AttentionBwdTile)>,
    /// The same with score terms, which take partial blocks.
    attention_terms: Vec<(&'static Kernel, AttentionTile)>,
    gradients_terms: Vec<(&'static Kernel, AttentionBwdTile)>,
    caches: Vec<(&'static Kernel, CacheTile)>,
    masks: Vec<&'static Kernel>,
    transposes: Vec<&'static Kernel>,
    products: Vec<(&'static Kernel, BsrMatmulTile)>,
    sampled: Vec<(&'static Kernel, BsrSddmmTile)>,
}

impl Place {
    /// A GPU with all kernels that it runs.
    pub fn on(gpu: &Gpu) -> Self {
        let other = gpu.device.stream().expect("a second stream");
        Self::of_kernels(gpu.stream.clone(), Some(other), None, gpu.kernels())
    }

    /// The CPU in the place of a GPU.
    pub fn instead_of(gpu: CudaProperties, cpu: Stream) -> Self {
        let runs = |kernel: &&Kernel| {
            kernel.target.runs_on(gpu.compute_capability)
                && kernel.smem_bytes() <= gpu.smem_per_block
        };
        let kernels: Vec<&Kernel> = manifest::kernels().iter().filter(runs).collect();
        Self::of_kernels(cpu, None, Some(gpu), kernels.into_iter())
    }

    fn of_kernels(
        stream: Stream,
        other: Option<Stream>,
        imagined: Option<CudaProperties>,
        kernels: impl Iterator<Item = &'static Kernel>,
    ) -> Self {
        let builds = |kernel: &&Kernel| {
            matches!(kernel.variant, Variant::BlockMask(BlockMaskKernel::Build { .. }))
        };
        let transposes = |kernel: &&Kernel| {
            matches!(kernel.variant, Variant::BlockMask(BlockMaskKernel::Transpose { .. }))
        };
        let kernels: Vec<&'static Kernel> = kernels.collect();
        let with_layouts = |&kernel: &&'static Kernel| {
            crate::bsr::tiles(kernel).into_iter().map(move |tile| (kernel, tile))
        };
        let (attention_terms, attention): (Vec<_>, Vec<_>) = kernels
            .iter()
            .filter(|kernel| takes_packed(kernel))
            .filter_map(|kernel| Some((*kernel, kernel.attention_tile()?)))
            .filter(|(_, tile)| !tile.terms || tile.takes_block_masks())
            .partition(|(_, tile)| tile.terms);
        let (gradients_terms, gradients) = kernels
            .iter()
            .filter_map(|kernel| Some((*kernel, kernel.attention_bwd_tile()?)))
            .partition(|(_, tile)| tile.terms);
        let place = Self {
            stream,
            other,
            imagined,
            attention_masked: attention
                .iter()
                .copied()
                .filter(|(_, tile)| tile.block_masks)
                .collect(),
            attention,
            gradients,
            attention_terms,
            gradients_terms,
            caches: kernels
                .iter()
                .filter_map(|kernel| Some((*kernel, tile(kernel)?)))
                // Those with score terms, and for latent rows, have suites of their own.
                .filter(|(_, tile)| match tile {
                    CacheTile::Few(few) => !few.terms,
                    CacheTile::Several(_) | CacheTile::Many(_) => true,
                    CacheTile::Latent(_) => false,
                })
                .collect(),
            masks: kernels.iter().copied().filter(builds).collect(),
            transposes: kernels.iter().copied().filter(transposes).collect(),
            products: kernels.iter().flat_map(with_layouts).collect(),
            sampled: kernels
                .iter()
                .filter_map(|kernel| Some((*kernel, kernel.bsr_sddmm_tile()?)))
                .collect(),
        };
        let counts = place.counts();
        assert!(!counts.contains(&0), "an operation has no kernel here: {counts:?}");
        place
    }

    /// Number of kernels of attention, its gradients, both with score terms, attention over caches,
    /// masks, their transposes, products and sampled products.
    fn counts(&self) -> [usize; 9] {
        let Self { attention, gradients, caches, masks, transposes, products, sampled, .. } = self;
        [
            attention.len(),
            gradients.len(),
            self.attention_terms.len(),
            self.gradients_terms.len(),
            caches.len(),
            masks.len(),
            transposes.len(),
            products.len(),
            sampled.len(),
        ]
    }
}

/// The block mask of a packed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    None,
    Full,
    Partial,
}

/// A case that runs.
struct Turn<'a> {
    place: &'a Place,
    number: usize,
    /// Number of earlier cases of this kind.
    turn: usize,
    random: StdRng,
}

impl Turn<'_> {
    /// The element whose turn it is.
    fn pick<T: Copy>(&self, kernels: &[T]) -> T {
        kernels[self.turn % kernels.len()]
    }

    /// Waits until the device is done. A hanging launch ends the process with this description.
    fn wait(&self, case: &dyn std::fmt::Debug) -> Checked<()> {
        let what = || self.story("hangs", case);
        self.place.other.iter().try_for_each(|other| wait(other, &what))?;
        wait(&self.place.stream, &what)
    }

    fn story(&self, what: &str, case: &dyn std::fmt::Debug) -> String {
        let number = self.number;
        format!(
            "case {number}: {what}; alone: BLOCKFLASH_FUZZ_CASES={number}..{}\n    {case:?}",
            number + 1
        )
    }
}

fn run(number: usize, place: &Place) -> Checked<(Kind, Ended)> {
    let (kind, turn) = Kind::of(number);
    let mut turn = Turn { place, number, turn, random: rng(number as u64) };
    let ended = match kind {
        Kind::Packed => attention::packed(&mut turn, Blocks::None),
        Kind::PackedMasked => attention::packed(&mut turn, Blocks::Full),
        Kind::PackedPartial => attention::packed(&mut turn, Blocks::Partial),
        Kind::Gradients => attention_bwd::dense(&mut turn),
        Kind::PackedGradients => attention_bwd::packed(&mut turn, Blocks::None),
        Kind::MaskedGradients => attention_bwd::packed(&mut turn, Blocks::Full),
        Kind::PartialGradients => attention_bwd::packed(&mut turn, Blocks::Partial),
        Kind::Cached => attention_decode::cached(&mut turn),
        Kind::BuiltMask => built_masks::built(&mut turn),
        Kind::Product => products::product(&mut turn),
        Kind::Sampled => products::sampled(&mut turn),
    }?;
    Ok((kind, ended))
}

/// `BLOCKFLASH_FUZZ_CASES`, or the first `usual` cases.
fn numbers(usual: usize) -> Range<usize> {
    let Ok(cases) = std::env::var("BLOCKFLASH_FUZZ_CASES") else { return 0..usual };
    let number = |text: &str| text.parse().expect("BLOCKFLASH_FUZZ_CASES is a number or two, a..b");
    match cases.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => 0..number(&cases),
    }
}

/// Runs the cases, counts how they ended, and reports failures on stderr.
///
/// # Panics
/// After the last case if some of them failed, or after the fourth one that did.
pub fn fuzz(name: &str, usual: usize, place: &Place) -> BTreeMap<(Kind, Ended), usize> {
    let (mut ended, mut failures) = (BTreeMap::new(), Vec::new());
    say(&format!(
        "{name}: kernels of attention, gradients, both with terms, caches, masks, transposes, \
         products, samples: {:?}",
        place.counts()
    ));
    let mut count = 0;
    for number in numbers(usual) {
        count += 1;
        match run(number, place) {
            Ok(of) => *ended.entry(of).or_default() += 1,
            Err(failure) => failures.push(failure),
        }
        // An error of the device is sticky and would be reported for all other cases, too.
        if failures.len() == 4 {
            break;
        }
    }
    for ((kind, ended), count) in &ended {
        say(&format!("{name}: {kind:?}: {count} {ended:?}"));
    }
    // A hanging case does not come here: the watchdog ends the process.
    say(&format!("{name}: {count} cases, {} outside, 0 hangs", failures.len()));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_take_turns() {
        let mut next = BTreeMap::<Kind, usize>::new();
        for number in 0..122 {
            let (kind, turn) = Kind::of(number);
            let next = next.entry(kind).or_default();
            assert_eq!(turn, *next);
            *next += 1;
        }
        assert_eq!(next.len(), 11);
    }
}
