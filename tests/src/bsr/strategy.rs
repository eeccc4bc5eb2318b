//! Random products.

use super::{BiasKind, BsrCase, Pattern, Workspace, order};
use crate::placement::Placement;
use blockflash_ops::bsr_matmul::Activation;
use blockflash_sys::DType;
use proptest::prelude::*;
use proptest::sample::select;

/// How far the generated cases reach.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Types of A and B.
    pub dtypes: Vec<DType>,
    /// Block sizes.
    pub block_sizes: Vec<usize>,
    /// Largest m and k in blocks.
    pub blocks: usize,
    /// Largest n.
    pub columns: usize,
    /// Whether there are Aᵀ and columns of B and C, which not every kernel takes.
    pub any_layout: bool,
}

/// Structures of every kind.
pub fn patterns() -> impl Strategy<Value = Pattern> {
    prop_oneof![
        4 => (0.05..0.9f64).prop_map(Pattern::Random),
        1 => Just(Pattern::Empty),
        1 => Just(Pattern::Full),
        1 => Just(Pattern::OneLongRow),
        1 => (0.2..0.9f64).prop_map(Pattern::EmptyRows),
        1 => Just(Pattern::Banded),
        1 => Just(Pattern::OneColumn),
    ]
}

/// Rows and columns before and after, so that neither the first element nor the row stride is
/// aligned to anything.
fn gaps() -> impl Strategy<Value = Placement> {
    let gap = || prop_oneof![3 => Just(0usize), 1 => 1..10usize, 1 => Just(8usize)];
    let padded = |(a, b, c, d)| Placement { order: Vec::new(), padding: vec![(a, b), (c, d)] };
    prop_oneof![
        1 => Just(Placement::default()),
        2 => (gap(), gap(), gap(), gap()).prop_map(padded),
    ]
}

/// Sizes that are seldom a multiple of anything.
fn size(block: usize, blocks: usize) -> impl Strategy<Value = usize> {
    let full = (1..=blocks).prop_map(move |n| n * block);
    let beside = full.clone().prop_map(move |n| n + 1 - block.min(2));
    prop_oneof![2 => 1..=blocks * block, 1 => full, 1 => beside]
}

fn columns(limit: usize) -> impl Strategy<Value = usize> {
    let edges: Vec<usize> = [1, 7, 8, 9, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257]
        .into_iter()
        .filter(|n| *n <= limit)
        .collect();
    prop_oneof![1 => select(edges), 1 => 1..=limit]
}

/// Products within the limits, every option included.
pub fn bsr_cases(limits: Limits) -> impl Strategy<Value = BsrCase> {
    let shape = select(limits.block_sizes).prop_flat_map(move |block| {
        let blocks = limits.blocks;
        (Just(block), size(block, blocks), columns(limits.columns), size(block, blocks), patterns())
    });
    let factor = || prop_oneof![2 => Just(1.0f32), 1 => -3.0..3.0f32];
    let options = (
        factor(),
        prop_oneof![3 => Just(0.0f32), 1 => Just(1.0f32), 1 => -2.0..2.0f32],
        select(vec![BiasKind::None, BiasKind::PerRow, BiasKind::PerColumn]),
        select(vec![Activation::None, Activation::Relu, Activation::Gelu, Activation::Silu]),
        select(vec![DType::F16, DType::BF16, DType::F32]),
    );
    let layouts = if limits.any_layout { vec![false, true] } else { vec![false] };
    let layout = move || select(layouts.clone());
    let layouts = (layout(), layout(), layout());
    (any::<u32>(), select(limits.dtypes), shape, options, (gaps(), gaps()), layouts).prop_map(
        |(
            seed,
            dtype,
            (block_size, m, n, k, pattern),
            (alpha, beta, bias, activation, c_dtype),
            (b, c),
            (transposed, columns_of_b, columns_of_c),
        )| {
            let b = Placement { order: order(columns_of_b), ..b };
            let c = Placement { order: order(columns_of_c), ..c };
            BsrCase {
                transposed,
                seed: seed.into(),
                c_dtype,
                alpha,
                beta,
                bias,
                activation,
                placements: [b, c],
                workspace: Workspace::turn(seed as usize % 6),
                ..BsrCase::simple(dtype, block_size, [m, n, k], pattern)
            }
        },
    )
}
