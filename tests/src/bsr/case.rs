//! Description of one BSR product and its data.

use crate::host::array;
use crate::number::{normal_rounded, rng};
use crate::placement::Placement;
use blockflash_cases::case as cases;
use blockflash_ops::bsr_matmul::{Activation, BiasKind};
use blockflash_sys::manifest::{BsrMatmulTile, Variant};
use blockflash_sys::{DType, Kernel};
use rand::Rng;

/// One product `C = activation(alpha·A·B + beta·C + bias)`: shape, structure, options, memory
/// layout.
#[derive(Clone, Debug)]
pub struct BsrCase {
    /// Seed of the structure and of the data.
    pub seed: u64,
    /// Type of A, B and the bias.
    pub dtype: DType,
    /// Type of C.
    pub c_dtype: DType,
    /// Rows of A and C, columns of B and C, columns of A.
    pub mnk: [usize; 3],
    /// Rows and columns of a block.
    pub block_size: usize,
    /// Which blocks are stored.
    pub pattern: Pattern,
    /// Whether A is stored as its transpose and multiplied transposed, by an index. Structure and
    /// data describe A in either case.
    pub transposed: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the previous C; with 0, the previous C holds NaN.
    pub beta: f32,
    /// Bias vector.
    pub bias: BiasKind,
    /// Activation of the result.
    pub activation: Activation,
    /// Memory layout of B and of C.
    pub placements: [Placement; 2],
    /// Where B holds NaN.
    pub nan_in_b: NanInB,
    /// Whether there is a workspace with which long tiles may be computed in parts.
    pub workspace: Workspace,
}

/// Memory for the partial sums of tiles that are computed in parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workspace {
    /// None: tiles are whole.
    None,
    /// The library decides what is split.
    Estimate,
    /// The longest tile has this many parts.
    Parts(usize),
}

impl Workspace {
    /// Every kind in turn.
    pub fn turn(turn: usize) -> Self {
        [Self::None, Self::Parts(2), Self::Estimate, Self::Parts(3), Self::None, Self::Parts(8)]
            [turn % 6]
    }
}

/// The tiles of a BSR kernel, one for each layout of A and B that it takes: none for other kernels,
/// one for most.
pub fn tiles(kernel: &Kernel) -> Vec<BsrMatmulTile> {
    let Some(tile) = kernel.bsr_matmul_tile() else { return Vec::new() };
    if !kernel.takes_any_layout() {
        return vec![tile];
    }
    let layouts = [[false, false], [false, true], [true, false], [true, true]];
    layouts
        .map(|[a_transposed, b_column_major]| BsrMatmulTile {
            a_transposed,
            b_column_major,
            ..tile
        })
        .into()
}

/// Order of the dimensions of a row-major or a column-major matrix in memory.
pub fn order(column_major: bool) -> Vec<usize> {
    if column_major { vec![1, 0] } else { Vec::new() }
}

/// Where B holds NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NanInB {
    /// Nowhere.
    Nowhere,
    /// In the rows that no stored block reads.
    Unread,
    /// Also in one element that some block rows read and others do not.
    One,
}

/// Which blocks of A are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Each with this probability.
    Random(f64),
    /// None.
    Empty,
    /// All.
    Full,
    /// One full block row in the middle, the others are empty.
    OneLongRow,
    /// Every second block row is empty, the others are random with this probability.
    EmptyRows(f64),
    /// Blocks on the diagonal and beside it.
    Banded,
    /// One block column.
    OneColumn,
}

/// Structure and numbers of a case. All numbers are rounded to their type and held as f32.
#[derive(Clone, Debug)]
pub struct BsrData {
    /// `[block rows + 1]`.
    pub row_ptr: Vec<i32>,
    /// `[nnz blocks]`.
    pub col_idx: Vec<i32>,
    /// `[nnz blocks, block, block]`; zero beyond the matrix.
    pub values: Vec<f32>,
    /// `[k, n]`.
    pub b: Vec<f32>,
    /// `[m, n]`, the previous contents of C: NaN when beta is 0.
    pub c: Vec<f32>,
    /// `[m]`, `[n]` or empty.
    pub bias: Vec<f32>,
}

impl BsrCase {
    /// A case with beta 0, alpha 1, no bias, no activation and no gaps, to be varied by struct
    /// update.
    pub fn simple(dtype: DType, block_size: usize, mnk: [usize; 3], pattern: Pattern) -> Self {
        Self {
            seed: 1,
            dtype,
            c_dtype: dtype,
            mnk,
            block_size,
            pattern,
            transposed: false,
            alpha: 1.0,
            beta: 0.0,
            bias: BiasKind::None,
            activation: Activation::None,
            placements: Default::default(),
            nan_in_b: NanInB::Unread,
            workspace: Workspace::None,
        }
    }

    /// The case for a kernel, by [`in_layouts_of`](Self::in_layouts_of). Hopper kernels copy B by
    /// tensor maps, so for them its rows or columns start at multiples of 16 bytes, with gaps
    /// between them.
    pub fn for_kernel(self, kernel: &Kernel, tile: &BsrMatmulTile) -> Self {
        let case = self.in_layouts_of(kernel, tile);
        if !matches!(kernel.variant, Variant::BsrMatmulHopper(_)) {
            return case;
        }
        let [mut b, c] = case.placements;
        let (along, [_, n, k]) = (usize::from(b.order.is_empty()), case.mnk);
        let length = [k, n][along];
        b.padding.resize(2, (0, 0));
        b.padding[along] = (8, length.next_multiple_of(8) - length + 8);
        Self { placements: [b, c], ..case }
    }

    /// The case with A (transposed or not) and B (row-major or column-major) as this tile of the
    /// kernel takes them, and with a row-major C if the kernel writes no other.
    pub fn in_layouts_of(self, kernel: &Kernel, tile: &BsrMatmulTile) -> Self {
        let hopper = matches!(kernel.variant, Variant::BsrMatmulHopper(tile) if !tile.gathers());
        let any_c = hopper || kernel.takes_any_layout();
        let [b, c] = self.placements;
        let b = Placement { order: order(tile.b_column_major), ..b };
        let c = if any_c { c } else { Placement { order: Vec::new(), ..c } };
        Self { transposed: tile.a_transposed, placements: [b, c], ..self }
    }

    /// The call.
    pub(super) fn call(&self) -> cases::BsrCall {
        cases::BsrCall {
            transposed: self.transposed,
            alpha: self.alpha,
            beta: self.beta,
            bias: self.bias,
            activation: self.activation,
            c_dtype: self.c_dtype,
            placements: self.placements.clone(),
        }
    }

    /// Block rows and block columns.
    pub fn blocks(&self) -> [usize; 2] {
        [self.mnk[0].div_ceil(self.block_size), self.mnk[2].div_ceil(self.block_size)]
    }

    fn stores(&self, row: usize, col: usize, random: &mut impl Rng) -> bool {
        let [rows, cols] = self.blocks();
        match self.pattern {
            Pattern::Empty => false,
            Pattern::Full => true,
            Pattern::Random(density) => random.random_bool(density),
            Pattern::OneLongRow => row == rows / 2,
            Pattern::EmptyRows(density) => row % 2 == 1 && random.random_bool(density),
            Pattern::Banded => row.abs_diff(col) <= 1,
            Pattern::OneColumn => col == cols / 2,
        }
    }
}

impl BsrData {
    /// The numbers in their types. A case that multiplies with the transpose of a stored matrix has
    /// the transpose of A.
    pub fn stored(&self, case: &BsrCase) -> cases::BsrData {
        let ([m, n, k], size) = (case.mnk, case.block_size);
        let data = cases::BsrData {
            shape: [m, k],
            row_ptr: self.row_ptr.clone(),
            col_idx: self.col_idx.clone(),
            values: array(case.dtype, &[self.col_idx.len(), size, size], &self.values),
            b: array(case.dtype, &[k, n], &self.b),
            c: (case.beta != 0.0).then(|| array(case.c_dtype, &[m, n], &self.c)),
            bias: (case.bias != BiasKind::None)
                .then(|| array(case.dtype, &[self.bias.len()], &self.bias)),
        };
        if !case.transposed {
            return data;
        }
        let (row_ptr, col_idx, values) = data.transposed().expect("blocks");
        cases::BsrData { shape: [k, m], row_ptr, col_idx, values, ..data }
    }

    /// Structure and numbers of a case.
    pub fn generate(case: &BsrCase) -> Self {
        let [m, n, k] = case.mnk;
        let [block_rows, block_cols] = case.blocks();
        let size = case.block_size;
        let mut random = rng(case.seed);
        let (mut row_ptr, mut col_idx) = (vec![0], Vec::new());
        for row in 0..block_rows {
            col_idx.extend(
                (0..block_cols)
                    .filter(|&col| case.stores(row, col, &mut random))
                    .map(|col| col as i32),
            );
            row_ptr.push(col_idx.len() as i32);
        }
        let numbers =
            |salt, n, dtype| normal_rounded(case.seed.wrapping_mul(4).wrapping_add(salt), n, dtype);
        let mut values = numbers(0, col_idx.len() * size * size, case.dtype);
        for row in 0..block_rows {
            for at in row_ptr[row] as usize..row_ptr[row + 1] as usize {
                let col = col_idx[at] as usize;
                for (i, x) in values[at * size * size..][..size * size].iter_mut().enumerate() {
                    if row * size + i / size >= m || col * size + i % size >= k {
                        *x = 0.0;
                    }
                }
            }
        }
        let mut b = numbers(1, k * n, case.dtype);
        if let (NanInB::One, Some(&col)) = (case.nan_in_b, col_idx.get(col_idx.len() / 2)) {
            b[(col as usize * size) * n + random.random_range(0..n)] = f32::NAN;
        }
        if case.nan_in_b != NanInB::Nowhere {
            let mut read = vec![false; block_cols];
            col_idx.iter().for_each(|&col| read[col as usize] = true);
            for row in (0..k).filter(|row| !read[row / size]) {
                b[row * n..][..n].fill(f32::NAN);
            }
        }
        let c =
            if case.beta == 0.0 { vec![f32::NAN; m * n] } else { numbers(2, m * n, case.c_dtype) };
        let bias_len = match case.bias {
            BiasKind::None => 0,
            BiasKind::PerRow => m,
            BiasKind::PerColumn => n,
        };
        Self { row_ptr, col_idx, values, b, c, bias: numbers(3, bias_len, case.dtype) }
    }
}
