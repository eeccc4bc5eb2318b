//! Dense times dense at the blocks of a sparse matrix.

use super::{Pattern, Work};
use blockflash_ops::bsr_sddmm::BsrSddmmProblem;
use blockflash_ops::{Major, bsr_sddmm_flops};
use blockflash_sys::DType;
use serde::{Serialize, Serializer};

/// `values = a[m, k]·b[k, n]` at blocks of `block_size`², values in the type of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct SddmmShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub block_size: usize,
    /// Fraction of the blocks that are stored; a row holds this rounded to whole blocks, at least
    /// one.
    pub density: f64,
    pub pattern: Pattern,
    #[serde(serialize_with = "name")]
    pub a_major: Major,
    #[serde(serialize_with = "name")]
    pub b_major: Major,
    pub dtype: DType,
}

fn name<S: Serializer>(major: &Major, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(major.name())
}

impl SddmmShape {
    /// Whether such a case can be drawn and counted.
    ///
    /// # Errors
    /// What is wrong, in one line.
    pub fn check(&self) -> Result<(), String> {
        let Self { m, n, k, block_size, density, .. } = *self;
        if [m, n, k, block_size].contains(&0) {
            return Err("a sampled product has a size of 0".to_owned());
        }
        let fraction = density > 0.0 && density <= 1.0;
        if fraction { Ok(()) } else { Err(format!("density {density} is not in (0, 1]")) }
    }

    /// Rows and columns of blocks.
    fn blocks(&self) -> [usize; 2] {
        [self.m.div_ceil(self.block_size), self.n.div_ceil(self.block_size)]
    }

    /// `row_ptr` and `col_idx`, ascending within each row.
    pub fn pattern(&self, seed: u64) -> (Vec<i32>, Vec<i32>) {
        let [rows, columns] = self.blocks();
        self.pattern.draw(rows, columns, self.density, seed)
    }

    /// The problem of operands without gaps.
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

    /// What a launch has to do. A block fetches its columns of B, and blocks of
    /// [`TILE_COLUMNS`](super::TILE_COLUMNS) columns together their rows of A.
    pub(super) fn work(&self) -> Work {
        let (Self { m, n, k, block_size, dtype, .. }, problem) = (*self, self.problem());
        let blocks = problem.nnz_blocks;
        let values = blocks * block_size * block_size * dtype.size();
        let line = block_size * k * dtype.size();
        Work {
            flops: bsr_sddmm_flops(&problem) as f64,
            exps: 0.0,
            bytes: (values + 4 * (blocks + self.blocks()[0] + 1) + (m * k + k * n) * dtype.size())
                as f64,
            l2_bytes: (blocks * line + (blocks * block_size).div_ceil(super::TILE_COLUMNS) * line)
                as f64,
        }
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
        // Two rows of nine blocks, of each of which a quarter is stored.
        let sizes = (problem.m, problem.n, problem.k, problem.block_size, problem.nnz_blocks);
        assert_eq!(sizes, (100, 520, 72, 64, 4));
        assert_eq!((problem.a.major, problem.a.ld), (Major::Column, 100));
        assert_eq!((problem.b.major, problem.b.ld), (Major::Row, 520));
        assert_eq!(shape.pattern(1).1.len(), 4);
        for (from, to) in
            [("column_row", "column"), ("row_bf16", "both_bf16"), ("b64", "b0"), ("d0.25", "d0")]
        {
            assert!(
                ID.replace(from, to).parse::<Case>().unwrap_err().contains("is no case"),
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
        // Four blocks of columns of B, and rows of A once.
        assert_eq!(work.l2_bytes, (5 * 64 * 72 * 2) as f64);
    }
}
