//! The plan of a pattern whose indices are on a GPU, made there. What the host needs to know comes back in one small report.

use super::grouping::{self, LEAST_GAIN, LEAST_LENGTH};
use super::parts::Lengths;
use super::pattern_plan::PatternPlan;
use super::stages::{LANES, Limits, NUMBERS, Stages};
use super::validate::Shape;
use crate::check::{grid_x, to_i32};
use crate::{Error, Result, arch};
use blockflash_safe::{BsrPlanGroups, BsrPlanOperands, CudaProperties, LaunchConfig, Stream, Tensor};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::params::{
    BLOCKFLASH_BSR_PLAN_CHECK, BLOCKFLASH_BSR_PLAN_COUNT, BLOCKFLASH_BSR_PLAN_FILL,
    BLOCKFLASH_BSR_PLAN_GROUP, BLOCKFLASH_BSR_PLAN_LIMIT, BLOCKFLASH_BSR_PLAN_REPORT_WORDS,
    BLOCKFLASH_BSR_PLAN_WRONG, blockflash_bsr_plan_params,
};
use blockflash_sys::{DType, Row};
use std::ptr::{null, null_mut};

/// Name of the operation in errors.
const OP: &str = "bsr_plan";
/// The numbers of the report before those of block rows.
const REPORT_WORDS: usize = BLOCKFLASH_BSR_PLAN_REPORT_WORDS as usize;
/// Block columns that the kernel counts together, and the words of bits that they take.
const CHUNK: [usize; 2] = [256, 8];

/// The preferred kernel that the GPU runs.
pub(super) fn select(gpu: &CudaProperties) -> Option<&'static Row> {
    select_among(manifest::rows(), gpu)
}

fn select_among<'r>(rows: &'r [Row], gpu: &CudaProperties) -> Option<&'r Row> {
    rows.iter()
        .filter(|row| matches!(row.variant, Variant::BsrPlan(_)) && arch::runs(row, gpu).is_ok())
        .min_by_key(|row| arch::preference(row.target))
}

/// Whether the kernels plan patterns of this size.
pub(super) fn takes(shape: &Shape) -> bool {
    let Shape { block_size, block_rows, block_cols, .. } = *shape;
    let limit = 1..=BLOCKFLASH_BSR_PLAN_LIMIT as usize;
    let compares = grouping::rows_that_share(block_size) > 1;
    limit.contains(&block_rows)
        && limit.contains(&block_cols)
        && (!compares || grouping::are_compared(block_rows, block_cols))
}

/// Whether this very row plans such a pattern on the stream's device.
pub(super) fn accepts(row: &Row, shape: &Shape, stream: &Stream) -> Result<()> {
    let refused = |what: String| Err(unsupported(row, what));
    if !matches!(row.variant, Variant::BsrPlan(_)) {
        return refused("it computes something else".into());
    }
    if !takes(shape) {
        return refused(format!("{} x {} blocks", shape.block_rows, shape.block_cols));
    }
    match stream.device().cuda_properties().map(|gpu| arch::runs(row, gpu)) {
        Some(runs) => runs.map_err(|obstacle| unsupported(row, obstacle.to_string())),
        None => refused("it runs on a GPU".into()),
    }
}

fn unsupported(row: &Row, what: String) -> Error {
    let what = format!("{}: {what}", row.symbol());
    Error::Unsupported { op: OP, arch: row.target.to_string(), what }
}

/// The plan of a pattern that [`takes`] accepts, or `None` if its indices are wrong. Waits for the report.
pub(super) fn plan(
    row: &Row,
    shape: &Shape,
    row_ptr: &Tensor,
    col_idx: &Tensor,
    stream: &Stream,
) -> Result<Option<PatternPlan>> {
    let params = params(shape, col_idx.shape()[0])?;
    let sizes = Sizes::of(shape);
    let mut buffers = Buffers::new(&sizes, stream)?;
    let step = |step: i32, buffers: &mut Buffers, stages: Option<&mut [Tensor; 2]>| -> Result<()> {
        let config = config(row, &sizes, step)?;
        let params = blockflash_bsr_plan_params { step, ..params };
        let mut operands = buffers.operands(row_ptr, col_idx, stages);
        Ok(stream.launch_bsr_plan(row, &config, &params, &mut operands)?)
    };
    step(BLOCKFLASH_BSR_PLAN_CHECK, &mut buffers, None)?;
    if sizes.compares() {
        step(BLOCKFLASH_BSR_PLAN_GROUP, &mut buffers, None)?;
    }
    if sizes.has_stages {
        step(BLOCKFLASH_BSR_PLAN_COUNT, &mut buffers, None)?;
    }
    let Some(report) = Found::read(&buffers.report.to_vec::<i32>(stream)?, &sizes) else { return Ok(None) };
    let stages = if sizes.has_stages {
        let count = report.stages.iter().map(|&stages| stages as usize).sum();
        let empty = |shape: &[usize]| Tensor::empty(stream, DType::I32, shape);
        let mut tensors = [empty(&[sizes.groups + 1])?, empty(&[count, LANES, NUMBERS])?];
        step(BLOCKFLASH_BSR_PLAN_FILL, &mut buffers, Some(&mut tensors))?;
        let [group_stages, stages] = tensors;
        Some(Stages { stages, group_stages, lengths: Lengths::new(report.stages) })
    } else {
        None
    };
    Ok(Some(PatternPlan {
        row_order: buffers.row_order(),
        lengths: Lengths::new(report.lengths),
        stages,
        hash: report.hash,
    }))
}

/// The kernel argument, but for its pointers and the step.
fn params(shape: &Shape, nnz_blocks: usize) -> Result<blockflash_bsr_plan_params> {
    let sizes = Sizes::of(shape);
    let limits = Limits::of(shape.block_size);
    let [stage_columns, stage_blocks] = limits.map_or([0; 2], |limits| [limits.columns, limits.blocks]);
    Ok(blockflash_bsr_plan_params {
        row_ptr: null(),
        col_idx: null(),
        bits: null_mut(),
        by_length: null_mut(),
        row_order: null_mut(),
        formed: null_mut(),
        group_columns: null_mut(),
        report: null_mut(),
        columns: null_mut(),
        starts: null_mut(),
        group_stages: null_mut(),
        stages: null_mut(),
        least_length: LEAST_LENGTH,
        most_kept: 1.0 - LEAST_GAIN,
        step: BLOCKFLASH_BSR_PLAN_CHECK,
        rows: to_i32("block rows", sizes.rows)?,
        cols: to_i32("block columns", sizes.cols)?,
        nnz_blocks: to_i32("nnz_blocks", nnz_blocks)?,
        row_words: to_i32("row_words", sizes.row_words)?,
        group_rows: to_i32("group_rows", sizes.group_rows)?,
        stage_columns: to_i32("stage_columns", stage_columns)?,
        stage_blocks: to_i32("stage_blocks", stage_blocks)?,
    })
}

/// The launch of a step.
fn config(row: &Row, sizes: &Sizes, step: i32) -> Result<LaunchConfig> {
    let Variant::BsrPlan(kernel) = row.variant else {
        return Err(unsupported(row, "it computes something else".into()));
    };
    let blocks = match step {
        BLOCKFLASH_BSR_PLAN_CHECK => sizes.rows.div_ceil(kernel.warps as usize),
        BLOCKFLASH_BSR_PLAN_GROUP => 1,
        _ => sizes.groups,
    };
    Ok(LaunchConfig {
        grid: [grid_x(&[blocks])?, 1, 1],
        block: row.threads(),
        smem_bytes: row.smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: false,
    })
}

/// Sizes of what the steps leave.
struct Sizes {
    rows: usize,
    cols: usize,
    row_words: usize,
    group_rows: usize,
    groups: usize,
    has_stages: bool,
}

impl Sizes {
    fn of(shape: &Shape) -> Self {
        let Shape { block_size, block_rows: rows, block_cols: cols, .. } = *shape;
        let group_rows = grouping::rows_that_share(block_size);
        let groups = rows.div_ceil(group_rows);
        let row_words = cols.div_ceil(CHUNK[0]) * CHUNK[1];
        Self { rows, cols, row_words, group_rows, groups, has_stages: Limits::of(block_size).is_some() }
    }

    /// Whether rows are compared with one another, or are in the order of their lengths.
    fn compares(&self) -> bool {
        self.group_rows > 1
    }
}

/// Tensors on the device, named as in `params.h`.
struct Buffers {
    by_length: Tensor,
    report: Tensor,
    /// bits, row_order, formed, group_columns.
    groups: Option<[Tensor; 4]>,
    /// columns, starts.
    columns: Option<[Tensor; 2]>,
}

impl Buffers {
    fn new(sizes: &Sizes, stream: &Stream) -> Result<Self> {
        let Sizes { rows, cols, row_words, groups, .. } = *sizes;
        let empty = |shape: &[usize]| Tensor::empty(stream, DType::I32, shape);
        let of_groups = || {
            Ok::<_, Error>([empty(&[rows, row_words])?, empty(&[rows])?, empty(&[rows])?, empty(&[groups])?])
        };
        let of_columns = || Ok::<_, Error>([empty(&[groups, cols])?, empty(&[groups, cols + 1])?]);
        Ok(Self {
            by_length: empty(&[rows])?,
            report: Tensor::zeros(stream, DType::I32, &[REPORT_WORDS + 2 * rows + groups])?,
            groups: sizes.compares().then(of_groups).transpose()?,
            columns: sizes.has_stages.then(of_columns).transpose()?,
        })
    }

    fn operands<'a>(
        &'a mut self,
        row_ptr: &'a Tensor,
        col_idx: &'a Tensor,
        stages: Option<&'a mut [Tensor; 2]>,
    ) -> BsrPlanOperands<'a> {
        BsrPlanOperands {
            row_ptr: row_ptr.view(),
            col_idx: col_idx.view(),
            by_length: self.by_length.view_mut(),
            report: self.report.view_mut(),
            groups: self.groups.as_mut().map(|tensors| {
                let [bits, row_order, formed, group_columns] = tensors.each_mut().map(Tensor::view_mut);
                BsrPlanGroups { bits, row_order, formed, group_columns }
            }),
            columns: self.columns.as_mut().map(|tensors| tensors.each_mut().map(Tensor::view_mut)),
            stages: stages.map(|tensors| tensors.each_mut().map(Tensor::view_mut)),
        }
    }

    /// The order of the rows.
    fn row_order(self) -> Tensor {
        match self.groups {
            Some([_, row_order, _, _]) => row_order,
            None => self.by_length,
        }
    }
}

/// What the device reports about right indices.
struct Found {
    hash: u64,
    /// Of the block rows in their order.
    lengths: Vec<i32>,
    /// Of each group.
    stages: Vec<i32>,
}

impl Found {
    fn read(report: &[i32], sizes: &Sizes) -> Option<Self> {
        let (words, numbers) = report.split_at_checked(REPORT_WORDS)?;
        let (by_length, numbers) = numbers.split_at_checked(sizes.rows)?;
        let (ranks, stages) = numbers.split_at_checked(sizes.rows)?;
        if words[BLOCKFLASH_BSR_PLAN_WRONG as usize] != 0 {
            return None;
        }
        let lengths = if sizes.compares() {
            ranks.iter().map(|&rank| by_length.get(rank as usize).copied()).collect::<Option<_>>()?
        } else {
            by_length.to_vec()
        };
        let hash = u64::from(words[1] as u32) << 32 | u64::from(words[0] as u32);
        Some(Self { hash, lengths, stages: stages.to_vec() })
    }
}

#[cfg(test)]
#[path = "device_plan_tests.rs"]
mod tests;
