//! What makes two products alike.

use super::BsrProblem;
use crate::tuning::Likeness;

impl Likeness {
    /// Of a BSR matmul.
    pub fn of_bsr_matmul(problem: &BsrProblem) -> Self {
        let blocks = |size: usize| size.div_ceil(problem.block_size.max(1)) as f64;
        let mean = problem.nnz_blocks as f64 / blocks(problem.m);
        Self::BsrMatmul {
            dtype: problem.dtype,
            block_size: problem.block_size,
            a_transposed: problem.a_transposed,
            b_major: problem.b_major,
            c_major: problem.c_major,
            m: problem.m,
            n: problem.n,
            k: problem.k,
            density: mean / blocks(problem.k),
            longest: problem.longest_row.map_or(1.0, |blocks| blocks as f64 / mean),
        }
    }
}
