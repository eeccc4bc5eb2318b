//! Operands of a sampled product.

use crate::case::SddmmShape;
use crate::check;
use crate::error::{Error, Result};
use crate::io::Array;
use blockflash_ops::bsr_sddmm::BsrSddmmProblem;
use blockflash_ops::{
    BsrMatrix, BsrSddmm, DType, Device, Major, Operation, PreparedBsrSddmm, Row, Stream, Tensor,
};

/// Inputs on the device and in host memory, and the values.
#[derive(Debug)]
pub(super) struct SddmmOperands {
    inputs: Inputs,
    values: Tensor,
    row_ptr: Vec<i32>,
    col_idx: Vec<i32>,
    /// A and B as they lie in memory.
    host: [Array; 2],
}

#[derive(Debug)]
struct Inputs {
    shape: SddmmShape,
    pattern: BsrMatrix,
    a: Tensor,
    b: Tensor,
}

impl Inputs {
    fn product(&self) -> Result<BsrSddmm<'_>> {
        let order = |major| if major == Major::Row { [0, 1] } else { [1, 0] };
        let a = self.a.view().permute(&order(self.shape.a_major))?;
        let b = self.b.view().permute(&order(self.shape.b_major))?;
        Ok(BsrSddmm::new(&self.pattern, a, b))
    }
}

impl SddmmOperands {
    /// `normal` draws an input of a shape; its last argument tells inputs apart. The seed is that
    /// of the pattern.
    pub(super) fn new(
        shape: &SddmmShape,
        stream: &Stream,
        seed: u64,
        normal: impl Fn(&[usize], DType, u64) -> Result<Array>,
    ) -> Result<Self> {
        let SddmmShape { m, n, k, block_size, a_major, b_major, dtype, .. } = *shape;
        let (row_ptr, col_idx) = shape.pattern(seed);
        let sizes = [col_idx.len(), block_size, block_size];
        // Of the pattern the values do not count.
        let zeros = Tensor::zeros(&Device::cpu().stream()?, dtype, &sizes)?;
        let pattern = BsrMatrix::from_parts(m, n, block_size, &row_ptr, &col_idx, zeros.view())?;
        let stored = |major, rows: usize, cols: usize| {
            if major == Major::Row { [rows, cols] } else { [cols, rows] }
        };
        let host =
            [normal(&stored(a_major, m, k), dtype, 0)?, normal(&stored(b_major, k, n), dtype, 1)?];
        Ok(Self {
            inputs: Inputs {
                shape: *shape,
                pattern: pattern.to(stream)?,
                a: host[0].upload(stream)?,
                b: host[1].upload(stream)?,
            },
            values: Tensor::empty(stream, dtype, &sizes)?,
            row_ptr,
            col_idx,
            host,
        })
    }

    pub(super) fn problem(&mut self) -> Result<BsrSddmmProblem> {
        Ok(self.inputs.product()?.problem(&self.values.view_mut())?)
    }

    pub(super) fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        let product = self.inputs.product()?;
        match row {
            None => product.sddmm_into(self.values.view_mut(), stream)?,
            Some(row) => product.run_with(row, self.values.view_mut(), stream)?,
        }
        Ok(())
    }

    pub(super) fn prepare(&mut self, stream: &Stream) -> Result<PreparedBsrSddmm> {
        Ok(self.inputs.product()?.prepare(&self.values.view_mut(), stream)?)
    }

    pub(super) fn launch_prepared(
        &mut self,
        prepared: &PreparedBsrSddmm,
        stream: &Stream,
    ) -> Result<()> {
        Ok(self.inputs.product()?.run_prepared(prepared, self.values.view_mut(), stream)?)
    }

    /// The values, to be poisoned before a launch that is verified.
    pub(super) fn values(&mut self) -> &mut Tensor {
        &mut self.values
    }

    /// Compares values with the f64 reference.
    pub(super) fn compare(&self, values: &Array, seed: u64) -> Result<check::Comparison> {
        let SddmmShape { m, n, k, a_major, b_major, .. } = self.inputs.shape;
        let case = check::SddmmCase {
            row_ptr: &self.row_ptr,
            col_idx: &self.col_idx,
            sizes: [m, n, k],
            a: &self.host[0],
            b: &self.host[1],
            majors: [a_major, b_major],
            old: None,
            alpha: 1.0,
            beta: 0.0,
        };
        check::bsr_sddmm(&case, values, seed, |_| ())
            .map_err(|mismatch| Error::Option(mismatch.to_string()))
    }
}
