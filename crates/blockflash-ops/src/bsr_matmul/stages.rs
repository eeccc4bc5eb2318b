//! Plans how the block rows of a pattern with small blocks share B. A plan is made once per pattern
//! and does not depend on the values.
//!
//! Kernels for blocks of 16 and 32 multiply a group of block rows at a time. The rows of a group
//! are neighbours in the row order, and each row of B that any of them needs is loaded once. A
//! pipeline stage holds some block columns and the group's blocks in them. `stages` in `params.h`
//! defines the format; its lanes are the lanes of the warp that copies a stage.

use super::parts::Lengths;
use crate::threads::parallel;
use blockflash_safe::BsrStageArrays;
use blockflash_sys::manifest::BsrMatmulHopper;
use rayon::prelude::*;

/// Lanes of a stage, and how many numbers each lane holds.
const LANES: usize = 32;
const NUMBERS: usize = 2;
/// The lane that holds the first column, and the lane that holds the counts.
const FIRST_COLUMN: usize = 16;
const COUNTS: usize = 24;
/// The lowest bit of the position of a row's blocks, above the bits of its columns.
const PLACE_SHIFT: i32 = 8;

/// The plan of a pattern, ready for upload.
#[derive(Debug)]
pub(super) struct Stages {
    block_size: u32,
    /// `[stages, 32, 2]`.
    stages: Vec<i32>,
    /// `[groups + 1]`: the stages of group `i` are `group_stages[i]..group_stages[i + 1]`.
    group_stages: Vec<i32>,
}

/// The part of a plan that the host keeps.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    /// Stages of each group.
    pub(super) lengths: Lengths,
    /// Length of the longest group relative to the mean group.
    pub(super) skew: f64,
}

impl Stages {
    /// The plan for a pattern whose indices have passed validation; `None` for block sizes whose
    /// kernels need no plan. `order` is the order of the block rows.
    pub(super) fn new(
        block_size: usize,
        row_ptr: &[i32],
        col_idx: &[i32],
        order: &[i32],
    ) -> Option<Self> {
        let limits = Limits::of(block_size)?;
        let groups: Vec<Vec<i32>> = parallel(|| {
            let groups = order.par_chunks(limits.rows);
            groups.map(|rows| limits.stages(row_ptr, col_idx, rows)).collect()
        });
        let mut group_stages = vec![0];
        let mut count = 0;
        for group in &groups {
            count += (group.len() / (LANES * NUMBERS)) as i32;
            group_stages.push(count);
        }
        Some(Self { block_size: block_size as u32, stages: groups.concat(), group_stages })
    }

    pub(super) fn arrays(&self) -> BsrStageArrays<'_> {
        let Self { block_size, stages, group_stages } = self;
        BsrStageArrays { block_size: *block_size, stages, group_stages }
    }

    pub(super) fn groups(&self) -> Groups {
        let lengths: Vec<i32> =
            self.group_stages.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = (self.stages.len() / (LANES * NUMBERS)) as f64 / lengths.len().max(1) as f64;
        let lengths = Lengths::new(lengths);
        let skew = if mean > 0.0 { lengths.longest() as f64 / mean } else { 1.0 };
        Groups { lengths, skew }
    }
}

/// Block rows per group, for block sizes whose kernels gather.
pub(super) fn group_rows(block_size: usize) -> Option<usize> {
    Limits::of(block_size).map(|limits| limits.rows)
}

/// The capacity of a group and of a stage.
struct Limits {
    rows: usize,
    columns: usize,
    blocks: usize,
}

impl Limits {
    fn of(block_size: usize) -> Option<Self> {
        let block = [16, 32].into_iter().find(|&block| block as usize == block_size)?;
        Some(Self {
            rows: BsrMatmulHopper::group_rows(block) as usize,
            columns: BsrMatmulHopper::stage_columns(block) as usize,
            blocks: BsrMatmulHopper::stage_blocks(block) as usize,
        })
    }

    /// The stages of a group of block rows. Columns ascend, so a row's blocks of one stage are
    /// adjacent in its list. Each stage takes as many columns as fit.
    fn stages(&self, row_ptr: &[i32], col_idx: &[i32], rows: &[i32]) -> Vec<i32> {
        let bounds =
            |&row: &i32| row_ptr[row as usize] as usize..row_ptr[row as usize + 1] as usize;
        let mut blocks: Vec<(i32, usize)> = rows
            .iter()
            .enumerate()
            .flat_map(|(lane, row)| col_idx[bounds(row)].iter().map(move |&column| (column, lane)))
            .collect();
        blocks.sort_unstable();
        let mut next: Vec<i32> = rows.iter().map(|&row| row_ptr[row as usize]).collect();
        let mut stages = Vec::new();
        let mut stage: Vec<&[(i32, usize)]> = Vec::new();
        let mut count = 0;
        for column in blocks.chunk_by(|a, b| a.0 == b.0) {
            if stage.len() == self.columns || count + column.len() > self.blocks {
                push(&mut stages, &stage, count, &mut next);
                stage.clear();
                count = 0;
            }
            stage.push(column);
            count += column.len();
        }
        if !stage.is_empty() {
            push(&mut stages, &stage, count, &mut next);
        }
        stages
    }
}

/// Appends a stage of these columns, each with a list of its block rows. `next` is the first block
/// of each row that is in no stage yet.
fn push(stages: &mut Vec<i32>, columns: &[&[(i32, usize)]], count: usize, next: &mut [i32]) {
    let start = stages.len();
    stages.resize(start + LANES * NUMBERS, 0);
    let lanes = &mut stages[start..];
    for (i, column) in columns.iter().enumerate() {
        lanes[(FIRST_COLUMN + i) * NUMBERS] = column[0].0;
        for &(_, lane) in *column {
            lanes[lane * NUMBERS + 1] |= 1 << i;
        }
    }
    let mut place = 0;
    for (lane, next) in next.iter_mut().enumerate() {
        let own = lanes[lane * NUMBERS + 1].count_ones() as i32;
        lanes[lane * NUMBERS] = *next;
        lanes[lane * NUMBERS + 1] |= place << PLACE_SHIFT;
        *next += own;
        place += own;
    }
    lanes[COUNTS * NUMBERS] = columns.len() as i32;
    lanes[COUNTS * NUMBERS + 1] = count as i32;
}

#[cfg(test)]
#[path = "stages_tests.rs"]
mod tests;
