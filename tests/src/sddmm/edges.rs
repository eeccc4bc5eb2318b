//! Sampled products at the edges of a kernel's tiles, and random ones.

use super::SddmmCase;
use crate::bsr::{Pattern, patterns};
use blockflash_ops::Major;
use blockflash_sys::DType;
use proptest::prelude::*;
use proptest::sample::select;

const PATTERNS: [Pattern; 9] = [
    Pattern::Random(0.3),
    Pattern::Full,
    Pattern::EmptyRows(0.6),
    Pattern::OneLongRow,
    Pattern::Random(0.05),
    Pattern::Banded,
    Pattern::Empty,
    Pattern::OneColumn,
    Pattern::Random(0.8),
];

/// No gaps, gaps that keep 16 bytes, and such that keep nothing.
fn gaps(which: usize) -> [(usize, usize); 2] {
    match which % 4 {
        0 => [(0, 0); 2],
        1 => [(1, 0), (8, 8)],
        2 => [(8, 16), (2, 1)],
        _ => [(3, 2), (1, 5)],
    }
}

/// Every edge of m, n and k for a kernel of this block size, with all structures, factors and types
/// of values taking turns, for A and B in these layouts.
pub fn edge_cases(dtype: DType, size: usize, majors: [Major; 2]) -> Vec<SddmmCase> {
    let edges = [1, size - 1, size, size + 1, 2 * size + size / 2 + 3, 4 * size, 9 * size - 5];
    let depths = [1, 7, 8, 63, 64, 65, 100, 128, 300, 323, 512, 513, 1000];
    let mut cases = Vec::new();
    for (i, &m) in edges.iter().enumerate() {
        for (j, &n) in edges.iter().enumerate() {
            let turn = i * edges.len() + j;
            cases.push(SddmmCase {
                seed: turn as u64,
                values_dtype: [dtype, DType::F32, DType::F16, DType::BF16][turn % 4],
                alpha: [1.0, 0.3, -1.5][turn % 3],
                beta: [0.0, 0.0, 1.0, -0.75, 0.0][turn % 5],
                majors,
                padding: [gaps(turn / 2), gaps(turn / 3)],
                nan_inside: turn % 6 == 1,
                ..SddmmCase::simple(
                    dtype,
                    size,
                    [m, n, depths[turn % depths.len()]],
                    PATTERNS[(turn + i) % 9],
                )
            });
        }
    }
    // Block rows of every length, among them more than a tile takes; all types of values, with and
    // without old ones.
    for (turn, pattern) in PATTERNS.into_iter().enumerate() {
        for beta in [0.0, 0.5] {
            let mnk = [7 * size + 1, 11 * size - 3, 136];
            let values_dtype = [DType::F32, dtype, DType::F16, DType::BF16][turn % 4];
            let simple = SddmmCase::simple(dtype, size, mnk, pattern);
            cases.push(SddmmCase {
                seed: 1000 + turn as u64,
                values_dtype,
                beta,
                majors,
                ..simple
            });
        }
    }
    cases.extend([[0, size, 5], [size, 0, 5], [size + 1, 2 * size - 1, 0]].map(|mnk| SddmmCase {
        majors,
        beta: 0.5,
        ..SddmmCase::simple(dtype, size, mnk, Pattern::Full)
    }));
    cases
}

/// How far the generated cases reach.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Types of A and B.
    pub dtypes: Vec<DType>,
    /// Block sizes.
    pub block_sizes: Vec<usize>,
    /// Largest m and n in blocks.
    pub blocks: usize,
    /// Largest k.
    pub depth: usize,
    /// Layouts of A and B.
    pub majors: Vec<[Major; 2]>,
}

/// Products within the limits, every option included.
pub fn sddmm_cases(limits: Limits) -> impl Strategy<Value = SddmmCase> {
    let (blocks, depth) = (limits.blocks, limits.depth);
    let shape = select(limits.block_sizes).prop_flat_map(move |size| {
        let extent =
            || prop_oneof![2 => 1..=blocks * size, 1 => (1..=blocks).prop_map(move |n| n * size)];
        (Just(size), extent(), extent(), 0..=depth, patterns())
    });
    let gap = || prop_oneof![3 => Just(0usize), 1 => 1..10usize, 1 => Just(8usize)];
    let padding =
        move || prop_oneof![1 => Just([(0, 0); 2]), 2 => [(gap(), gap()), (gap(), gap())]];
    let options = (
        prop_oneof![2 => Just(1.0f32), 1 => -3.0..3.0f32],
        prop_oneof![3 => Just(0.0f32), 1 => Just(1.0f32), 1 => -2.0..2.0f32],
        select(vec![DType::F16, DType::BF16, DType::F32]),
        select(limits.majors),
        prop::bool::weighted(0.2),
    );
    (any::<u32>(), select(limits.dtypes), shape, options, [padding(), padding()]).prop_map(
        |(
            seed,
            dtype,
            (size, m, n, k, pattern),
            (alpha, beta, values_dtype, majors, nan_inside),
            padding,
        )| {
            SddmmCase {
                seed: seed.into(),
                values_dtype,
                alpha,
                beta,
                majors,
                padding,
                nan_inside,
                ..SddmmCase::simple(dtype, size, [m, n, k], pattern)
            }
        },
    )
}
