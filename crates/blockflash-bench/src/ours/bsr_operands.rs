//! Memory of a BSR matmul that is measured.

use crate::Result;
use blockflash_ops::bsr_matmul::{self, BsrMatrix, BsrProblem};
use blockflash_ops::{
    BsrMatmul, BsrWorkspace, CudaProperties, Operation, PreparedBsrMatmul, Row, Stream, Tensor,
    ViewMut,
};

/// Inputs and output on the device, and everything that a caller can lend.
#[derive(Debug)]
pub(super) struct BsrOperands {
    a: BsrMatrix,
    b: Tensor,
    c: Tensor,
    workspace: BsrWorkspace,
}

impl BsrOperands {
    /// `a` may be on the host.
    pub(super) fn new(a: &BsrMatrix, b: Tensor, c: Tensor, stream: &Stream) -> Result<Self> {
        Ok(Self { a: a.to(stream)?, b, c, workspace: BsrWorkspace::new(stream)? })
    }

    /// The product and where it goes.
    fn product(&mut self) -> (BsrMatmul<'_>, ViewMut<'_>) {
        let Self { a, b, c, workspace } = self;
        (BsrMatmul { workspace: Some(workspace), ..BsrMatmul::new(a, b.view()) }, c.view_mut())
    }

    fn problem(&mut self) -> Result<BsrProblem> {
        let (product, c) = self.product();
        Ok(product.problem(&c)?)
    }

    pub(super) fn select(&mut self, gpu: &CudaProperties) -> Result<&'static Row> {
        Ok(bsr_matmul::select(&self.problem()?, gpu)?)
    }

    pub(super) fn accepts(&mut self, row: &Row, gpu: &CudaProperties) -> Result<bool> {
        Ok(bsr_matmul::accepts(row, &self.problem()?, gpu).is_ok())
    }

    /// With the kernel of a row, or the selected one.
    pub(super) fn launch(&mut self, row: Option<&'static Row>, stream: &Stream) -> Result<()> {
        let (product, c) = self.product();
        match row {
            None => product.matmul_into(c, stream)?,
            Some(row) => product.run_with(row, c, stream)?,
        }
        Ok(())
    }

    pub(super) fn prepare(&mut self, stream: &Stream) -> Result<PreparedBsrMatmul> {
        let (product, c) = self.product();
        Ok(product.prepare(&c, stream)?)
    }

    pub(super) fn launch_prepared(
        &mut self,
        prepared: &PreparedBsrMatmul,
        stream: &Stream,
    ) -> Result<()> {
        let (product, c) = self.product();
        Ok(product.run_prepared(prepared, c, stream)?)
    }

    pub(super) fn output(&mut self) -> &mut Tensor {
        &mut self.c
    }
}
