//! Which blocks a layer stores, and the values that it starts with.

use blockflash_bench::{Error, Result, random};

/// The stored blocks of weights `[outputs, inputs]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sparsity {
    pub outputs: usize,
    pub inputs: usize,
    pub block_size: usize,
    /// Block row and block column of each, ascending.
    pub blocks: Vec<(usize, usize)>,
    /// In each block row.
    per_row: usize,
}

impl Sparsity {
    /// Draws this part of the blocks: equally many in each block row, so that every output has
    /// inputs.
    ///
    /// # Errors
    /// Sizes that are 0, a density that is not above 0 and at most 1.
    pub fn draw(
        [outputs, inputs]: [usize; 2],
        block_size: usize,
        density: f64,
        seed: u64,
    ) -> Result<Self> {
        if outputs == 0 || inputs == 0 || block_size == 0 {
            return Err(Error::Option("sizes and blocks must be positive".to_owned()));
        }
        if !(density > 0.0 && density <= 1.0) {
            return Err(Error::Option(format!(
                "a density is above 0 and at most 1, not {density}"
            )));
        }
        let (block_rows, block_cols) = (outputs.div_ceil(block_size), inputs.div_ceil(block_size));
        let per_row = ((density * block_cols as f64).round() as usize).max(1);
        let of_row = |row: usize| {
            let columns = random::choose(per_row, block_cols, seed, row as u64);
            columns.into_iter().map(move |col| (row, col))
        };
        Ok(Self {
            outputs,
            inputs,
            block_size,
            blocks: (0..block_rows).flat_map(of_row).collect(),
            per_row,
        })
    }

    /// Inputs of an output; fewer where a block reaches beyond the matrix.
    pub fn fan_in(&self) -> usize {
        self.per_row * self.block_size
    }

    /// Values `[blocks, block_size, block_size]` ~ N(0, gain / inputs of an output), zeros beyond
    /// the matrix.
    pub fn values(&self, gain: f32, seed: u64) -> Vec<f32> {
        let per_block = self.block_size * self.block_size;
        let mut values = random::normals(self.blocks.len() * per_block, seed);
        let deviation = (gain / self.fan_in() as f32).sqrt();
        for (at, value) in values.iter_mut().enumerate() {
            *value = if self.is_inside(at) { *value * deviation } else { 0.0 };
        }
        values
    }

    /// Whether a position of the values lies in the matrix.
    pub fn is_inside(&self, at: usize) -> bool {
        let size = self.block_size;
        let (block_row, block_col) = self.blocks[at / (size * size)];
        block_row * size + at / size % size < self.outputs
            && block_col * size + at % size < self.inputs
    }
}
