//! Sampled dense-dense product: dense times dense at the stored blocks of a sparse matrix.

use super::Case;
use super::bsr_matmul::{BsrShape, Stored};
use super::bsr_sddmm_operands::{SddmmCall, SddmmData, SddmmOperands};
use super::grid::{each, uniform};
use super::id::{Fields, Id};
use super::operands::{Operands, normal};
use super::pattern::Pattern;
use super::shape::Shape;
use super::work::{TILE_COLUMNS, Work};
use crate::error::Result;
use blockflash_ops::bsr_sddmm::BsrSddmmProblem;
use blockflash_ops::{Major, Stream, bsr_sddmm_flops};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};

/// `values = a[m, k]·b[k, n]` at stored blocks of `block_size`²; values have the type of the
/// inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SddmmShape {
    /// Sizes, types and the stored blocks, here those of the product, `[m, n]`.
    #[serde(flatten)]
    pub sizes: BsrShape,
    /// Whether rows or columns of a are contiguous.
    pub a_major: Major,
    /// Whether rows or columns of b are contiguous.
    pub b_major: Major,
}

impl SddmmShape {
    fn stored(&self) -> Stored {
        self.sizes.stored_in([self.sizes.m, self.sizes.n])
    }

    /// `row_ptr` and `col_idx`; columns ascend within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        self.stored().draw(seed)
    }

    /// The problem for contiguous operands.
    pub fn problem(&self) -> BsrSddmmProblem {
        let (stored, majors) = (self.stored(), [self.a_major, self.b_major]);
        BsrSddmmProblem::new(
            self.sizes.dtype,
            stored.mnk,
            stored.block_size,
            stored.count(),
            majors,
        )
    }
}

impl Fields for SddmmShape {
    const EMPTY: Self = Self { sizes: BsrShape::EMPTY, a_major: Major::Row, b_major: Major::Row };

    /// `sddmm_m4096_n4096_k1024_b64_d0.1_uniform_column_row_f16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("sddmm")?;
        self.sizes.sizes(id)?;
        for major in [&mut self.a_major, &mut self.b_major] {
            let named = |part: &str| Major::ALL.into_iter().find(|major| major.name() == part);
            id.part(major, |major| major.name().to_owned(), named)?;
        }
        id.name(&mut self.sizes.dtype)
    }
}

impl Shape for SddmmShape {
    fn check(&self) -> Result<(), String> {
        self.stored().check()
    }

    fn op(&self) -> &'static str {
        "bsr_sddmm"
    }

    fn dtype(&self) -> DType {
        self.sizes.dtype
    }

    /// Work of a launch. Every stored block fetches its columns of B. Stored blocks that share
    /// [`TILE_COLUMNS`] columns fetch their rows of A together.
    fn work(&self) -> Work {
        let (BsrShape { m, n, k, block_size, dtype, .. }, problem) = (self.sizes, self.problem());
        let blocks = problem.nnz_blocks;
        let values = blocks * block_size * block_size * dtype.size();
        let line = block_size * k * dtype.size();
        let indices = 4 * (blocks + self.stored().blocks()[0] + 1);
        let rows_of_a = (blocks * block_size).div_ceil(TILE_COLUMNS);
        Work {
            flops: bsr_sddmm_flops(&problem) as f64,
            exps: 0.0,
            bytes: (values + indices + (m * k + k * n) * dtype.size()) as f64,
            l2_bytes: (blocks + rows_of_a) as f64 * line as f64,
        }
    }

    fn group(&self) -> String {
        let (size, a, b) = (self.sizes.block_size, self.a_major.name(), self.b_major.name());
        format!("blocks of {size} × {size}, A by {a}s, B by {b}s")
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let (majors, BsrShape { dtype, block_size, .. }) =
            ([self.a_major, self.b_major], self.sizes);
        let draw = |_: &str, shape: &[usize], lane| normal(shape, dtype, seed, lane);
        let (sizes, pattern) = (self.stored().mnk, self.pattern(seed));
        let data = SddmmData::drawn(sizes, block_size, pattern, majors, draw)?;
        Ok(Box::new(SddmmOperands::new(SddmmCall::new(dtype, majors), data, stream)?))
    }
}

/// Grid of a suite file: every combination of the lists is a case, and m equals n.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SddmmGrid {
    /// m and n.
    size: Vec<usize>,
    k: Vec<usize>,
    block_size: Vec<usize>,
    density: Vec<f64>,
    #[serde(default = "uniform")]
    pattern: Vec<Pattern>,
    /// Layouts of A and of B.
    layout: Vec<[Major; 2]>,
    dtype: Vec<DType>,
}

impl SddmmGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let mut cases = Vec::new();
        each!(dtype in self.dtype, [a_major, b_major] in self.layout, size in self.size,
            k in self.k, block_size in self.block_size, density in self.density,
            pattern in self.pattern => {
            let (m, n) = (size, size);
            let sizes = BsrShape { m, n, k, block_size, density, pattern, dtype };
            let shape = SddmmShape { sizes, a_major, b_major };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Case;

    const ID: &str = "sddmm_m100_n520_k72_b64_d0.25_uniform_column_row_bf16";

    #[test]
    fn ids_are_read_back() {
        let case: Case = ID.parse().unwrap();
        assert_eq!(
            (case.op(), case.dtype(), case.to_string().as_str()),
            ("bsr_sddmm", DType::BF16, ID)
        );
        let Case::BsrSddmm(shape) = case else { panic!("{case:?} is another operation") };
        let problem = shape.problem();
        // Two block rows of nine blocks; a quarter of each is stored.
        let sizes = (problem.m, problem.n, problem.k, problem.block_size, problem.nnz_blocks);
        assert_eq!(sizes, (100, 520, 72, 64, 4));
        assert_eq!((problem.a.major, problem.a.ld), (Major::Column, 100));
        assert_eq!((problem.b.major, problem.b.ld), (Major::Row, 520));
        assert_eq!(shape.pattern(1).1.len(), 4);
        for (from, to) in
            [("column_row", "column"), ("row_bf16", "both_bf16"), ("b64", "b0"), ("d0.25", "d0")]
        {
            assert!(
                ID.replace(from, to).parse::<Case>().unwrap_err().contains("is not a case"),
                "{to}"
            );
        }
    }

    #[test]
    fn work_is_that_of_stored_blocks() {
        let work = ID.parse::<Case>().unwrap().work();
        let values = 4 * 64 * 64;
        assert_eq!((work.flops, work.exps), ((2 * values * 72) as f64, 0.0));
        assert_eq!(work.bytes, (2 * values + 4 * (4 + 3) + 2 * 72 * (100 + 520)) as f64);
        // Four block columns of B, and the rows of A once.
        assert_eq!(work.l2_bytes, (5 * 64 * 72 * 2) as f64);
    }
}
