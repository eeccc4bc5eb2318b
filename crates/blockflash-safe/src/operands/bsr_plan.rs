//! Planning a block-sparse pattern on the GPU.

use super::{Fit, ceil_div, fits, fits_row, pointer, pointer_mut, require, starts_last};
use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use blockflash_sys::BsrPlanKernel;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::{
    BLOCKFLASH_BSR_PLAN_CHECK, BLOCKFLASH_BSR_PLAN_COUNT, BLOCKFLASH_BSR_PLAN_FILL,
    BLOCKFLASH_BSR_PLAN_GROUP, BLOCKFLASH_BSR_PLAN_LIMIT, BLOCKFLASH_BSR_PLAN_REPORT_WORDS,
    blockflash_bsr_plan_params,
};
use std::ptr::null_mut;

/// Lanes of a stage that stand for block rows, and for block columns.
const ROW_LANES: i64 = 16;
const COLUMN_LANES: i64 = 8;

/// Tensors of [`Variant::BsrPlan`](crate::manifest::Variant), all contiguous i32. What one step reads of another is the promise of the
/// caller: that the steps before have run with the same tensors and parameters.
#[derive(Debug)]
pub struct BsrPlanOperands<'a> {
    /// `[rows + 1]`, whatever its entries are.
    pub row_ptr: View<'a>,
    /// `[nnz_blocks]`, whatever its entries are.
    pub col_idx: View<'a>,
    /// `[rows]`.
    pub by_length: ViewMut<'a>,
    /// As `params.h` says, at an address that is a multiple of 8; zeros before the first step.
    pub report: ViewMut<'a>,
    /// What rows are compared by; without it they are ordered by length.
    pub groups: Option<BsrPlanGroups<'a>>,
    /// `[groups, cols]` and `[groups, cols + 1]`: block columns of each group, and where its stages begin. For the last two steps.
    pub columns: Option<[ViewMut<'a>; 2]>,
    /// `[groups + 1]` and `[stages, 32, 2]`, the latter at an address that is a multiple of 8. For the last step: the caller knows that there
    /// is room for the stages that the report counts.
    pub stages: Option<[ViewMut<'a>; 2]>,
}

/// Tensors by which block rows are grouped, all contiguous i32.
#[derive(Debug)]
pub struct BsrPlanGroups<'a> {
    /// `[rows, row_words]`, at an address that is a multiple of 16.
    pub bits: ViewMut<'a>,
    /// `[rows]`.
    pub row_order: ViewMut<'a>,
    /// `[rows]`.
    pub formed: ViewMut<'a>,
    /// `[groups]`.
    pub group_columns: ViewMut<'a>,
}

impl BsrPlanOperands<'_> {
    fn fit(
        &self,
        row: &Row,
        kernel: &BsrPlanKernel,
        config: &LaunchConfig,
        p: &blockflash_bsr_plan_params,
    ) -> Fit {
        let [rows, cols, nnz_blocks, group_rows] =
            [p.rows, p.cols, p.nnz_blocks, p.group_rows].map(i64::from);
        let sizes = 1..=i64::from(BLOCKFLASH_BSR_PLAN_LIMIT);
        require(sizes.contains(&rows) && sizes.contains(&cols), "rows or columns are none or too many")?;
        require(sizes.contains(&group_rows) && nnz_blocks >= 0, "a size is out of range")?;
        let row_words = ceil_div(cols, 256) as i64 * 8;
        require(i64::from(p.row_words) == row_words, "row_words are not those of the columns")?;
        let groups = ceil_div(rows, group_rows as u32) as i64;
        let report = i64::from(BLOCKFLASH_BSR_PLAN_REPORT_WORDS) + 2 * rows + groups;
        let array = |name: &str, view: &View<'_>, length: i64| fits(name, view, DType::I32, [(length, 1)]);
        let matrix = |name: &str, view: &View<'_>, rows: i64, cols: i64| {
            fits(name, view, DType::I32, [(rows, cols), (cols, 1)])
        };
        array("row_ptr", &self.row_ptr, rows + 1)?;
        array("col_idx", &self.col_idx, nnz_blocks)?;
        array("by_length", &self.by_length.as_view(), rows)?;
        array("report", &self.report.as_view(), report)?;
        require(self.report.is_aligned(8), "the address of report is no multiple of 8")?;
        if let Some(BsrPlanGroups { bits, row_order, formed, group_columns }) = &self.groups {
            matrix("bits", &bits.as_view(), rows, row_words)?;
            require(bits.is_aligned(16), "the address of bits is no multiple of 16")?;
            array("row_order", &row_order.as_view(), rows)?;
            array("formed", &formed.as_view(), rows)?;
            array("group_columns", &group_columns.as_view(), groups)?;
        }
        if let Some([columns, starts]) = &self.columns {
            matrix("columns", &columns.as_view(), groups, cols)?;
            matrix("starts", &starts.as_view(), groups, cols + 1)?;
            let (columns, blocks) = (i64::from(p.stage_columns), i64::from(p.stage_blocks));
            require(
                (1..=COLUMN_LANES).contains(&columns) && group_rows <= ROW_LANES && group_rows <= blocks,
                "a column of a group does not fit into a stage",
            )?;
        }
        if let Some([group_stages, stages]) = &self.stages {
            array("group_stages", &group_stages.as_view(), groups + 1)?;
            let stages = stages.as_view();
            let count = stages.shape().first().map_or(0, |&count| count as i64);
            fits("stages", &stages, DType::I32, [(count, 64), (32, 2), (2, 1)])?;
            require(stages.is_aligned(8), "the address of stages is no multiple of 8")?;
        }
        let (grouped, listed) = (self.groups.is_some(), self.columns.is_some());
        let (has_all, blocks) = match p.step {
            BLOCKFLASH_BSR_PLAN_CHECK => (true, ceil_div(rows, kernel.warps)),
            BLOCKFLASH_BSR_PLAN_GROUP => (grouped, 1),
            BLOCKFLASH_BSR_PLAN_COUNT => (grouped && listed, i128::from(groups)),
            BLOCKFLASH_BSR_PLAN_FILL => (grouped && listed && self.stages.is_some(), i128::from(groups)),
            _ => return Err("an unknown step".to_owned()),
        };
        require(has_all, "the step has not all of its tensors")?;
        starts_last(config)?;
        fits_row(config, row, blocks..=blocks)
    }

    /// All tensors but the indices.
    fn written(&self) -> [Option<&ViewMut<'_>>; 10] {
        let groups = self.groups.as_ref();
        [
            Some(&self.by_length),
            Some(&self.report),
            groups.map(|groups| &groups.bits),
            groups.map(|groups| &groups.row_order),
            groups.map(|groups| &groups.formed),
            groups.map(|groups| &groups.group_columns),
            self.columns.as_ref().map(|[columns, _]| columns),
            self.columns.as_ref().map(|[_, starts]| starts),
            self.stages.as_ref().map(|[group_stages, _]| group_stages),
            self.stages.as_ref().map(|[_, stages]| stages),
        ]
    }

    fn pointers(&self, p: &blockflash_bsr_plan_params) -> blockflash_bsr_plan_params {
        let [
            by_length,
            report,
            bits,
            row_order,
            formed,
            group_columns,
            columns,
            starts,
            group_stages,
            stages,
        ] = self.written().map(|view| view.map_or(null_mut(), pointer_mut).cast::<i32>());
        blockflash_bsr_plan_params {
            row_ptr: pointer(&self.row_ptr).cast(),
            col_idx: pointer(&self.col_idx).cast(),
            bits: bits.cast(),
            by_length,
            row_order,
            formed,
            group_columns,
            report,
            columns,
            starts,
            group_stages,
            stages,
            ..*p
        }
    }
}

impl Stream {
    /// Launches a step of [`Variant::BsrPlan`](crate::manifest::Variant). The pointers in `params` are ignored: those of the operands are
    /// used.
    ///
    /// # Errors
    /// As [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_bsr_plan(
        &self,
        row: &Row,
        config: &LaunchConfig,
        params: &blockflash_bsr_plan_params,
        operands: &mut BsrPlanOperands<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::BsrPlan(kernel) = &row.variant else {
            return Err(failed("not a kernel that plans block-sparse patterns".to_owned()));
        };
        let operands = &*operands;
        let [a, b, c, d, e, f, g, h, i, j] = operands.written().map(|view| view.map(ViewMut::as_view));
        let views = [Some(operands.row_ptr), Some(operands.col_idx), a, b, c, d, e, f, g, h, i, j];
        self.expect_all(&views)?;
        operands.fit(row, kernel, config, params).map_err(failed)?;
        let params = operands.pointers(params);
        // SAFETY:
        // 1. The row is the variant whose parameter struct this is.
        // 2. As in `launch_attention_fwd`. The first step reads no further than the indices reach, whatever their entries are, and the others
        //    do nothing if it finds them wrong; what steps leave for one another, and that the last one has room, is the promise of the
        //    caller.
        // 3. All tensors but the indices are borrowed exclusively.
        unsafe { self.launch_with(row, config, |_| params, views.iter().flatten().filter_map(View::owner)) }
    }
}

#[cfg(test)]
#[path = "bsr_plan_tests.rs"]
mod tests;
