//! Sampled dense-dense product: dense times dense at the stored blocks of a sparse matrix.

use super::bsr_sddmm_operands::{SddmmCall, SddmmData, SddmmOperands};
use super::grid::{fraction, pairs, uniform};
use super::id::{dtype, number, pattern};
use super::limits;
use super::operands::{Operands, normal};
use super::pattern::Pattern;
use super::peer::{PeerCase, PeerCaseError};
use super::shape::Shape;
use super::work::{TILE_COLUMNS, Work};
use crate::error::Result;
use blockflash_ops::bsr_sddmm::BsrSddmmProblem;
use blockflash_ops::{BsrPattern, Major, Stream, bsr_sddmm_flops};
use blockflash_sys::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// `values = a[m, k]·b[k, n]` at stored blocks of `block_size`²; values have the type of the
/// inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct SddmmShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub block_size: usize,
    /// Fraction of the blocks that are stored. Each block row rounds this to whole blocks, at least
    /// one.
    pub density: f64,
    pub pattern: Pattern,
    pub a_major: Major,
    pub b_major: Major,
    pub dtype: DType,
}

impl SddmmShape {
    /// Checks that the case can be drawn and counted.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn check(&self) -> Result<(), String> {
        let Self { m, n, k, block_size, density, .. } = *self;
        limits::matmul(m, n, k)?;
        limits::size("block_size", block_size, BsrPattern::MAX_BLOCK_SIZE)?;
        fraction(density)?;
        let [rows, columns] = self.blocks();
        limits::stored(self.pattern.nnz_blocks(rows, columns, density), block_size)
    }

    /// Number of block rows and of block columns.
    fn blocks(&self) -> [usize; 2] {
        [self.m.div_ceil(self.block_size), self.n.div_ceil(self.block_size)]
    }

    /// `row_ptr` and `col_idx`; columns ascend within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let [rows, columns] = self.blocks();
        self.pattern.draw(rows, columns, self.density, seed)
    }

    /// The problem for contiguous operands.
    pub fn problem(&self) -> BsrSddmmProblem {
        let [rows, columns] = self.blocks();
        let nnz_blocks = self.pattern.nnz_blocks(rows, columns, self.density);
        let majors = [self.a_major, self.b_major];
        BsrSddmmProblem::new(
            self.dtype,
            [self.m, self.n, self.k],
            self.block_size,
            nnz_blocks,
            majors,
        )
    }
}

impl fmt::Display for SddmmShape {
    /// `sddmm_m4096_n4096_k1024_b64_d0.1_uniform_column_row_f16`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, block_size, density, pattern, a_major, b_major, dtype } = self;
        let (a, b) = (a_major.name(), b_major.name());
        write!(f, "sddmm_m{m}_n{n}_k{k}_b{block_size}_d{density}_{pattern}_{a}_{b}_{dtype}")
    }
}

impl Shape for SddmmShape {
    fn parse(parts: &[&str]) -> Option<Self> {
        let &["sddmm", m, n, k, block, density, pattern_name, a, b, dtype_name] = parts else {
            return None;
        };
        let major = |part: &str| Major::ALL.into_iter().find(|major| major.name() == part);
        let shape = Self {
            m: number(m, "m")?,
            n: number(n, "n")?,
            k: number(k, "k")?,
            block_size: number(block, "b")?,
            density: number(density, "d")?,
            pattern: pattern(pattern_name)?,
            a_major: major(a)?,
            b_major: major(b)?,
            dtype: dtype(dtype_name)?,
        };
        shape.check().is_ok().then_some(shape)
    }

    fn check(&self) -> Result<(), String> {
        self.check()
    }

    fn op(&self) -> &'static str {
        "bsr_sddmm"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    /// Work of a launch. Every stored block fetches its columns of B. Stored blocks that share
    /// [`TILE_COLUMNS`] columns fetch their rows of A together.
    fn work(&self) -> Work {
        let (Self { m, n, k, block_size, dtype, .. }, problem) = (*self, self.problem());
        let blocks = problem.nnz_blocks;
        let values = blocks * block_size * block_size * dtype.size();
        let line = block_size * k * dtype.size();
        let indices = 4 * (blocks + self.blocks()[0] + 1);
        let rows_of_a = (blocks * block_size).div_ceil(TILE_COLUMNS);
        Work {
            flops: bsr_sddmm_flops(&problem) as f64,
            exps: 0.0,
            bytes: (values + indices + (m * k + k * n) * dtype.size()) as f64,
            l2_bytes: (blocks + rows_of_a) as f64 * line as f64,
        }
    }

    fn group(&self) -> String {
        let (size, a, b) = (self.block_size, self.a_major.name(), self.b_major.name());
        format!("blocks of {size} × {size}, A by {a}s, B by {b}s")
    }

    fn peer_case(&self, _seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        Err(PeerCaseError::OursOnly)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let (majors, sizes) = ([self.a_major, self.b_major], [self.m, self.n, self.k]);
        let draw = |_: &str, shape: &[usize], lane| normal(shape, self.dtype, seed, lane);
        let data = SddmmData::drawn(sizes, self.block_size, self.pattern(seed), majors, draw)?;
        Ok(Box::new(SddmmOperands::new(SddmmCall::new(self.dtype, majors), data, stream)?))
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
    pub fn expand<C: From<SddmmShape>>(&self, cases: &mut Vec<C>) -> Result<(), String> {
        for (dtype, [a_major, b_major]) in pairs(&self.dtype, &self.layout)? {
            for ((size, k), block_size) in pairs(&pairs(&self.size, &self.k)?, &self.block_size)? {
                let (m, n) = (size, size);
                for (density, pattern) in pairs(&self.density, &self.pattern)? {
                    let shape = SddmmShape {
                        m,
                        n,
                        k,
                        block_size,
                        density,
                        pattern,
                        a_major,
                        b_major,
                        dtype,
                    };
                    shape.check()?;
                    cases.push(shape.into());
                }
            }
        }
        Ok(())
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
