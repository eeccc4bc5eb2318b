//! What is made once per pattern, beside its index arrays.

use super::parts::Lengths;
use super::stages::Stages;
use super::transpose::pattern_hash;
use super::validate::{EdgeBlock, Shape, invalid};
use super::{BsrMatrix, grouping};
use crate::Result;
use crate::check::Operand;
use blockflash_safe::{Device, Stream, Tensor};

/// The order of the block rows, and what groups of them share.
#[derive(Debug)]
pub(super) struct PatternPlan {
    pub(super) row_order: Tensor,
    /// Of the block rows in their order.
    pub(super) lengths: Lengths,
    pub(super) stages: Option<Stages>,
    pub(super) hash: u64,
}

impl PatternPlan {
    /// Of indices that have passed validation, made on the host; its tensors are on the stream's device.
    pub(super) fn on_host(shape: &Shape, row_ptr: &[i32], col_idx: &[i32], stream: &Stream) -> Result<Self> {
        let order = grouping::row_order(shape.block_size, shape.block_cols, row_ptr, col_idx);
        Ok(Self {
            row_order: Tensor::from_slice(stream, &order, &[order.len()])?,
            lengths: Lengths::of_rows(row_ptr, &order),
            stages: Stages::new(shape.block_size, row_ptr, col_idx, &order, stream)?,
            hash: pattern_hash(row_ptr, col_idx),
        })
    }

    /// The matrix of this pattern. Indices and values have passed validation, the former being those of the plan.
    pub(super) fn matrix(
        self,
        shape: &Shape,
        row_ptr: Tensor,
        col_idx: Tensor,
        values: Tensor,
        edge_blocks: Vec<EdgeBlock>,
    ) -> BsrMatrix {
        let Shape { rows, cols, block_size, .. } = *shape;
        let Self { row_order, lengths, stages, hash: pattern_hash } = self;
        BsrMatrix {
            rows,
            cols,
            block_size,
            row_ptr,
            col_idx,
            values,
            row_order,
            lengths,
            stages,
            pattern_hash,
            edge_blocks,
        }
    }
}

impl BsrMatrix {
    /// Compares the plan of the matrix, by which kernels take its block rows, with the one that the host makes of the same indices: for
    /// tests. On a GPU this waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`](crate::Error::InvalidBsr) names the first part that differs, which is never so;
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) if the stream is of another device than the matrix; a failing device.
    pub fn check_plan(&self, stream: &Stream) -> Result<()> {
        Operand::new("matrix", &self.values.view()).on(stream.device())?;
        let host = Device::cpu().stream()?;
        let shape = Shape::new(self.rows, self.cols, self.block_size)?;
        let [row_ptr, col_idx] = [self.row_ptr.to_vec(stream)?, self.col_idx.to_vec(stream)?];
        let plan = PatternPlan::on_host(&shape, &row_ptr, &col_idx, &host)?;
        let same = |name: &str, found: &Tensor, expected: &Tensor| {
            let [found, expected] = [found.to_vec::<i32>(stream)?, expected.to_vec::<i32>(&host)?];
            match (0..found.len().max(expected.len())).find(|&at| found.get(at) != expected.get(at)) {
                Some(at) => differs(&format!("{name}[{at}]"), found.get(at), expected.get(at)),
                None => Ok(()),
            }
        };
        same("row_order", &self.row_order, &plan.row_order)?;
        if self.pattern_hash != plan.hash {
            return differs("the hash", self.pattern_hash, plan.hash);
        }
        if self.lengths != plan.lengths {
            return differs("lengths", &self.lengths, plan.lengths);
        }
        match (&self.stages, plan.stages) {
            (None, None) => Ok(()),
            (Some(found), Some(expected)) => {
                same("group_stages", &found.group_stages, &expected.group_stages)?;
                same("stages", &found.stages, &expected.stages)?;
                if found.lengths == expected.lengths {
                    return Ok(());
                }
                differs("lengths of groups", &found.lengths, expected.lengths)
            }
            (found, expected) => differs("whether there are stages", found.is_some(), expected.is_some()),
        }
    }
}

fn differs(what: &str, found: impl std::fmt::Debug, expected: impl std::fmt::Debug) -> Result<()> {
    invalid(format!("the plan differs from that of the host: {what}: {found:?}, expected {expected:?}"))
}
