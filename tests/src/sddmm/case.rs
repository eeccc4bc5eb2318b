//! Description of one sampled product and its data.

use crate::bsr::{BsrCase, BsrData, Pattern};
use crate::host::array;
use crate::number::{normal_rounded, rng};
use crate::placement::Placement;
use blockflash_cases::case::{self as cases, SddmmCall};
use blockflash_cases::io::Array;
use blockflash_ops::Major;
use blockflash_sys::DType;
use rand::Rng;

/// One product `values = alpha·A·B + beta·values` at stored blocks: shape, structure, factors,
/// memory layout.
#[derive(Clone, Debug)]
pub struct SddmmCase {
    /// Seed of the structure and of the data.
    pub seed: u64,
    /// Type of A and B.
    pub dtype: DType,
    /// Type of the values.
    pub values_dtype: DType,
    /// Rows of A, columns of B, columns of A.
    pub mnk: [usize; 3],
    /// Rows and columns of a block.
    pub block_size: usize,
    /// Which blocks are stored.
    pub pattern: Pattern,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the values that were there; 0: they are NaN.
    pub beta: f32,
    /// Whether rows or columns of A and of B are contiguous.
    pub majors: [Major; 2],
    /// Elements before and after A and B along rows and columns.
    pub padding: [[(usize, usize); 2]; 2],
    /// Whether one row of A and one column of B have a NaN that stored blocks read.
    pub nan_inside: bool,
}

/// Structure and numbers of a case. All numbers are rounded to their type and held as f32.
#[derive(Clone, Debug)]
pub struct SddmmData {
    /// The structure, with values that do not count.
    pub structure: BsrData,
    /// `[m, k]`; NaN in block rows without a block.
    pub a: Vec<f32>,
    /// `[k, n]`; NaN in block columns without a block.
    pub b: Vec<f32>,
    /// `[nnz blocks, block, block]`, what is there before: NaN when beta is 0, and beyond the
    /// matrix.
    pub old: Vec<f32>,
}

impl SddmmCase {
    /// A case with beta 0, alpha 1 and no gaps, to be varied by struct update.
    pub fn simple(dtype: DType, block_size: usize, mnk: [usize; 3], pattern: Pattern) -> Self {
        Self {
            seed: 1,
            dtype,
            values_dtype: dtype,
            mnk,
            block_size,
            pattern,
            alpha: 1.0,
            beta: 0.0,
            majors: [Major::Row, Major::Row],
            padding: [[(0, 0); 2]; 2],
            nan_inside: false,
        }
    }

    /// The case with lines of A and B that start at multiples of 16 bytes, as kernels need them,
    /// with gaps between them.
    pub fn aligned(self) -> Self {
        let [m, n, k] = self.mnk;
        let padded =
            |major, [rows, cols]: [usize; 2], [mut before, mut beside]: [(usize, usize); 2]| {
                let gap = |length: usize| (8, length.next_multiple_of(8) - length + 8);
                if major == Major::Row {
                    beside = gap(cols);
                } else {
                    before = gap(rows);
                }
                [before, beside]
            };
        let ([a_major, b_major], [a, b]) = (self.majors, self.padding);
        Self { padding: [padded(a_major, [m, k], a), padded(b_major, [k, n], b)], ..self }
    }

    /// Where A and B are.
    pub fn placements(&self) -> [Placement; 2] {
        [0, 1].map(|at| Placement {
            order: if self.majors[at] == Major::Row { vec![0, 1] } else { vec![1, 0] },
            padding: self.padding[at].to_vec(),
        })
    }

    /// The call. One block before the values and one behind them must not be touched.
    pub(super) fn call(&self) -> SddmmCall {
        SddmmCall {
            alpha: self.alpha,
            beta: self.beta,
            values_dtype: self.values_dtype,
            placements: self.placements(),
            values: Placement { order: Vec::new(), padding: vec![(1, 1)] },
        }
    }

    /// A product with a matrix of this structure.
    pub fn structure(&self) -> BsrCase {
        let [m, n, _] = self.mnk;
        BsrCase {
            seed: self.seed,
            ..BsrCase::simple(self.dtype, self.block_size, [m, 1, n], self.pattern)
        }
    }
}

impl SddmmData {
    /// Structure and numbers of a case.
    pub fn generate(case: &SddmmCase) -> Self {
        let ([m, n, k], size) = (case.mnk, case.block_size);
        let structure = BsrData::generate(&case.structure());
        let numbers =
            |salt, n, dtype| normal_rounded(case.seed.wrapping_mul(8).wrapping_add(salt), n, dtype);
        let (mut a, mut b) = (numbers(4, m * k, case.dtype), numbers(5, k * n, case.dtype));
        for row in
            (0..m).filter(|row| structure.row_ptr[row / size] == structure.row_ptr[row / size + 1])
        {
            a[row * k..][..k].fill(f32::NAN);
        }
        let mut read = vec![false; n.div_ceil(size)];
        structure.col_idx.iter().for_each(|&col| read[col as usize] = true);
        for col in (0..n).filter(|col| !read[col / size]) {
            b.iter_mut().skip(col).step_by(n).for_each(|x| *x = f32::NAN);
        }
        if case.nan_inside && m * n * k > 0 {
            let mut random = rng(case.seed);
            a[random.random_range(0..m) * k + k / 2] = f32::NAN;
            b[(k - 1) * n + random.random_range(0..n)] = f32::NAN;
        }
        let mut data = Self { structure, a, b, old: Vec::new() };
        let values = data.structure.col_idx.len() * size * size;
        data.old = if case.beta == 0.0 {
            vec![f32::NAN; values]
        } else {
            numbers(6, values, case.values_dtype)
        };
        for at in 0..values {
            if data.position(case, at).is_none() {
                data.old[at] = f32::NAN;
            }
        }
        data
    }

    /// A and B in the type of the case.
    pub fn inputs(&self, case: &SddmmCase) -> [Array; 2] {
        let [m, n, k] = case.mnk;
        [array(case.dtype, &[m, k], &self.a), array(case.dtype, &[k, n], &self.b)]
    }

    /// All numbers in their types.
    pub(super) fn stored(&self, case: &SddmmCase) -> cases::SddmmData {
        let ([a, b], block) = (self.inputs(case), case.block_size);
        let blocks = [self.structure.col_idx.len(), block, block];
        cases::SddmmData {
            row_ptr: self.structure.row_ptr.clone(),
            col_idx: self.structure.col_idx.clone(),
            block,
            a,
            b,
            old: (case.beta != 0.0).then(|| array(case.values_dtype, &blocks, &self.old)),
        }
    }

    /// Row and column of a value in the matrix; none beyond it.
    pub fn position(&self, case: &SddmmCase, at: usize) -> Option<(usize, usize)> {
        let ([m, n, _], size) = (case.mnk, case.block_size);
        let block = at / (size * size);
        let block_row =
            self.structure.row_ptr.partition_point(|&first| first as usize <= block) - 1;
        let row = block_row * size + at / size % size;
        let col = self.structure.col_idx[block] as usize * size + at % size;
        (row < m && col < n).then_some((row, col))
    }
}
