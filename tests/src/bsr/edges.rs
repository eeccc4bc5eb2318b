//! Products at the edges of a kernel's tiles.

use super::{BiasKind, BsrCase, NanInB, Pattern, Workspace, order};
use crate::placement::Placement;
use blockflash_ops::bsr_matmul::Activation;
use blockflash_sys::DType;

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

/// Leading dimensions and first elements that are not multiples of 16 bytes, or of anything.
fn gaps(which: usize) -> Placement {
    let padding = match which % 4 {
        0 => vec![],
        1 => vec![(0, 1), (8, 8)],
        2 => vec![(1, 2), (3, 2)],
        _ => vec![(2, 0), (0, 5)],
    };
    Placement { order: Vec::new(), padding }
}

/// Every edge of m, n and k for a kernel of this block size and these tiles, with all structures,
/// types of C and layouts taking turns.
pub fn edge_cases(dtype: DType, size: usize, block_n: usize, block_k: usize) -> Vec<BsrCase> {
    // Kernels may take several block rows at a time, up to this many rows.
    let block_m = size.max(128);
    let columns = [1, 7, 8, 100, 255, 256, 257, block_n - 1, block_n, block_n + 1, 2 * block_n + 3];
    let rows =
        [1, size - 1, size, size + 1, block_m - 1, block_m, block_m + 1, 2 * block_m + size + 3];
    let depths = [
        1,
        size - 1,
        size,
        size + 1,
        block_k - 1,
        block_k + 1,
        3 * size + 5,
        5 * block_k + 3,
        8 * size,
    ];
    let mut cases = Vec::new();
    for (i, &n) in columns.iter().enumerate() {
        for (j, &m) in rows.iter().enumerate() {
            let turn = i * rows.len() + j;
            let k = depths[turn % depths.len()];
            cases.push(BsrCase {
                seed: turn as u64,
                c_dtype: [dtype, DType::F32, DType::F16, DType::BF16][turn % 4],
                placements: [gaps(turn / 2), gaps(turn / 3)],
                workspace: Workspace::turn(turn / 2 + i),
                ..BsrCase::simple(dtype, size, [m, n, k], PATTERNS[(turn + i) % PATTERNS.len()])
            });
        }
    }
    // One row with many blocks among empty ones, and more rows than a tile takes.
    for (turn, pattern) in PATTERNS.into_iter().enumerate() {
        let mnk = [4 * block_m + 1, block_n + 8 * turn, 12 * size.max(block_k) - 3];
        let workspace = Workspace::turn(turn);
        cases.push(BsrCase {
            seed: 1000 + turn as u64,
            workspace,
            ..BsrCase::simple(dtype, size, mnk, pattern)
        });
        cases.push(BsrCase {
            seed: 2000 + turn as u64,
            nan_in_b: NanInB::One,
            placements: [gaps(turn), gaps(turn)],
            workspace: Workspace::turn(turn + 1),
            ..BsrCase::simple(dtype, size, mnk, pattern)
        });
    }
    cases.extend([[0, 5, size], [size, 0, size], [size + 1, 9, 0]].map(|mnk| BsrCase {
        nan_in_b: NanInB::Nowhere,
        ..BsrCase::simple(dtype, size, mnk, Pattern::Full)
    }));
    cases
}

/// A column-major C at the edges of tiles of this many columns, aligned or not, and B by rows and
/// columns: whole warps of rows and what is left, every type of C, and a few epilogues.
pub fn column_cases(dtype: DType, size: usize, block_n: usize) -> Vec<BsrCase> {
    let rows = [1, 8, 15, 16, 17, size, size + 24, 2 * size - 1, 3 * size + 8];
    let columns = [1, 2, 8, 64, 100, block_n - 1, block_n, block_n + 1, 2 * block_n + 72];
    let mut cases = Vec::new();
    for (i, &m) in rows.iter().enumerate() {
        for (j, &n) in columns.iter().enumerate() {
            let turn = i * columns.len() + j;
            // Mostly what goes straight from registers where rows allow it: no gaps that unalign, C
            // of the type of A.
            let c = Placement {
                order: order(true),
                ..gaps(if turn.is_multiple_of(3) { turn / 3 } else { 0 })
            };
            cases.push(BsrCase {
                seed: 4000 + turn as u64,
                c_dtype: [dtype, dtype, dtype, DType::F32, DType::BF16][turn % 5],
                alpha: [1.0, -0.5][turn % 2],
                beta: if turn % 4 == 3 { 0.75 } else { 0.0 },
                bias: [BiasKind::None, BiasKind::None, BiasKind::PerRow, BiasKind::PerColumn]
                    [turn / 2 % 4],
                activation: [Activation::None, Activation::None, Activation::Gelu][turn / 3 % 3],
                placements: [
                    Placement { order: order(turn.is_multiple_of(2)), ..gaps(turn / 5) },
                    c,
                ],
                transposed: (turn / 2).is_multiple_of(2),
                workspace: Workspace::turn(turn / 3),
                ..BsrCase::simple(
                    dtype,
                    size,
                    [m, n, [size, 3 * size + 5, 6 * size - 8][turn % 3]],
                    PATTERNS[turn % PATTERNS.len()],
                )
            });
        }
    }
    cases
}

/// Every combination of beta, bias, activation and type of C, with and without aligned rows.
pub fn epilogue_cases(dtype: DType, block_size: usize) -> Vec<BsrCase> {
    let mut cases = Vec::new();
    for beta in [0.0f32, 1.0, -0.75] {
        for bias in [BiasKind::None, BiasKind::PerRow, BiasKind::PerColumn] {
            for activation in
                [Activation::None, Activation::Relu, Activation::Gelu, Activation::Silu]
            {
                for c_dtype in [DType::F16, DType::BF16, DType::F32] {
                    let turn = cases.len();
                    cases.push(BsrCase {
                        seed: 3000 + turn as u64,
                        c_dtype,
                        alpha: [1.0, 0.3, -1.5, 0.0][turn % 4],
                        beta,
                        bias,
                        activation,
                        placements: [Placement::default(), gaps(turn)],
                        workspace: Workspace::turn(turn / 4),
                        ..BsrCase::simple(
                            dtype,
                            block_size,
                            [block_size + 3, [24, 33, 8][turn % 3], 2 * block_size + 1],
                            Pattern::Random(0.7),
                        )
                    });
                }
            }
        }
    }
    cases
}
