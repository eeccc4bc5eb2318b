//! Values that change, in larger blocks: made once per pattern, filled as often as values change.

use super::BsrMatrix;
use super::coarsen::{LargeBlocks, copy_blocks};
use super::transpose::Pattern;
use crate::check::{Operand, grid_x, to_i32};
use crate::float::Float;
use crate::{Error, Result, arch};
use blockflash_safe::{BsrReblockOperands, CudaProperties, Device, LaunchConfig, Stream, Tensor};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::params::blockflash_bsr_reblock_params;
use blockflash_sys::{DType, Row};
use half::{bf16, f16};
use std::ptr::{null, null_mut};

/// Name of the operation in errors.
const OP: &str = "bsr_reblock";
/// Bytes that a thread copies at a time: rows of blocks consist of them.
const CHUNK_BYTES: usize = 16;

/// A block-sparse matrix in larger blocks than another one of the same values, on the same device: what
/// [`with_block_size`](BsrMatrix::with_block_size) makes on the host, for weights that change on a GPU.
///
/// The pattern is gone through once. Then [`update`](Self::update) copies new values into the larger blocks, and products take
/// [`matrix`](Self::matrix), whose arrays stay where they are. An index for its transpose ([`BsrTranspose`](super::BsrTranspose)) is made of
/// that matrix, too.
///
/// ```
/// # use blockflash_ops::{BsrMatrix, BsrReblock, DType, Device, Tensor};
/// let stream = Device::cpu().stream()?;
/// let mut weights = BsrMatrix::from_coo(64, 64, 16, DType::F16, &[(3, 5, 1.0), (20, 20, 2.0), (40, 3, 4.0)])?;
/// let mut large = BsrReblock::new(&weights, 32, &stream)?;
/// assert_eq!((large.matrix().nnz_blocks(), large.matrix().to_dense()?), (2, weights.to_dense()?));
///
/// weights.set_values(&Tensor::zeros(&stream, DType::F16, &[3, 16, 16])?, &stream)?;
/// large.update(&weights, &stream)?;
/// assert_eq!(large.matrix().to_dense()?, weights.to_dense()?);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BsrReblock {
    of: Pattern,
    matrix: BsrMatrix,
    block_idx: Tensor,
    /// `None` on the CPU.
    row: Option<&'static Row>,
}

impl BsrReblock {
    /// The same matrix in blocks of `block_size`, a multiple of its own, on its device. What is larger is made on the host: on a GPU this
    /// waits for the work on the stream.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] for a size that is no multiple of the matrix' own or beyond [`MAX_BLOCK_SIZE`](BsrMatrix::MAX_BLOCK_SIZE);
    /// [`Error::DeviceMismatch`] if the stream is of another device than the matrix; on a GPU [`Error::Unsupported`] if there is no kernel
    /// for it, or rows of the matrix' own blocks are not whole 16 bytes; out of memory, or a failing device.
    pub fn new(a: &BsrMatrix, block_size: usize, stream: &Stream) -> Result<Self> {
        Operand::new("a", &a.values().view()).on(stream.device())?;
        let row = stream.device().cuda_properties().map(|gpu| select(a, gpu)).transpose()?;
        let (rows, cols) = (a.row_ptr().to_vec::<i32>(stream)?, a.col_idx().to_vec::<i32>(stream)?);
        let blocks = LargeBlocks::new(a, block_size, &rows, &cols)?;
        let matrix = match a.dtype() {
            DType::F16 => zeros::<f16>(&blocks),
            DType::BF16 => zeros::<bf16>(&blocks),
            _ => zeros::<f32>(&blocks),
        };
        let shape = [blocks.col_idx.len(), blocks.factor, blocks.factor];
        let mut reblock = Self {
            of: Pattern::of(a),
            matrix: matrix?.to(stream)?,
            block_idx: Tensor::from_slice(stream, &blocks.block_idx, &shape)?,
            row,
        };
        reblock.update(a, stream)?;
        Ok(reblock)
    }

    /// The matrix in larger blocks, with the values of the last [`update`](Self::update).
    pub fn matrix(&self) -> &BsrMatrix {
        &self.matrix
    }

    /// i32 `[nnz_blocks of the matrix, factor, factor]`, where a large block has `factor` rows and columns of the blocks that it was made of:
    /// which of them lies there, −1 is none.
    pub fn block_idx(&self) -> &Tensor {
        &self.block_idx
    }

    /// Where the matrix is.
    pub fn device(&self) -> Device {
        self.matrix.device()
    }

    /// Copies the values of `from`, which has the pattern that this was made of, into the larger blocks. On a GPU this is one launch:
    /// nothing is allocated and nothing waits, so the call can be captured into a graph; on the CPU it returns when the values are there.
    ///
    /// # Errors
    /// [`Error::InvalidBsr`] for another pattern, [`Error::DType`] for values of another type, [`Error::DeviceMismatch`] for a matrix or a
    /// stream of another device; a failing device.
    pub fn update(&mut self, from: &BsrMatrix, stream: &Stream) -> Result<()> {
        self.check(from, stream)?;
        match (self.row, from.dtype()) {
            (Some(row), _) => self.launch(row, from, stream),
            (None, DType::F16) => self.copy_on_host::<f16>(from),
            (None, DType::BF16) => self.copy_on_host::<bf16>(from),
            (None, _) => self.copy_on_host::<f32>(from),
        }
    }

    /// Like [`update`](Self::update) on a GPU with this very kernel: for tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] if the row is none that copies blocks, or does not run on this device.
    pub fn update_with(&mut self, row: &Row, from: &BsrMatrix, stream: &Stream) -> Result<()> {
        self.check(from, stream)?;
        let runs = match stream.device().cuda_properties() {
            Some(gpu) => arch::runs(row, gpu).map_err(|obstacle| obstacle.to_string()),
            None => Err("it runs on a GPU".into()),
        };
        runs.map_err(|what| unsupported(row.target, format!("{}: {what}", row.symbol())))?;
        self.launch(row, from, stream)
    }

    fn check(&self, from: &BsrMatrix, stream: &Stream) -> Result<()> {
        self.of.expect("matrix in larger blocks", "from", from)?;
        let values = from.values.view();
        let operand = Operand::new("from", &values);
        operand.dtype_in(&[self.matrix.dtype()])?;
        operand.on(stream.device())?;
        Operand::new("matrix", &self.matrix.values.view()).on(stream.device())
    }

    fn launch(&mut self, row: &Row, from: &BsrMatrix, stream: &Stream) -> Result<()> {
        if self.matrix.nnz_blocks() == 0 {
            return Ok(());
        }
        let (params, config) = plan(row, from, &self.matrix)?;
        let (block_idx, to) = (self.block_idx.view(), self.matrix.unchecked_values_mut());
        let operands = BsrReblockOperands { block_idx, from: from.values.view(), to };
        Ok(stream.launch_bsr_reblock(row, &config, &params, operands)?)
    }

    fn copy_on_host<T: Float>(&mut self, from: &BsrMatrix) -> Result<()> {
        let sizes = [from.block_size, self.matrix.block_size];
        let (block_idx, values) = (self.block_idx.view(), from.values.view());
        let mut to = self.matrix.unchecked_values_mut();
        copy_blocks::<T>(block_idx.as_slice()?, sizes, values.as_slice()?, to.as_mut_slice()?);
        Ok(())
    }
}

fn zeros<T: Float>(blocks: &LargeBlocks) -> Result<BsrMatrix> {
    blocks.matrix(&vec![T::zeroed(); blocks.col_idx.len() * blocks.shape.block_elements()])
}

/// The preferred kernel that the GPU runs.
fn select(a: &BsrMatrix, gpu: &CudaProperties) -> Result<&'static Row> {
    select_among(manifest::rows(), a, gpu)
}

fn select_among<'r>(rows: &'r [Row], a: &BsrMatrix, gpu: &CudaProperties) -> Result<&'r Row> {
    let unsupported = |what| unsupported(gpu.compute_capability, what);
    if !(a.block_size * a.dtype().size()).is_multiple_of(CHUNK_BYTES) {
        return Err(unsupported(format!(
            "rows of blocks of {} in {} are no multiples of {CHUNK_BYTES} bytes",
            a.block_size,
            a.dtype()
        )));
    }
    rows.iter()
        .filter(|row| matches!(row.variant, Variant::BsrReblock(_)) && arch::runs(row, gpu).is_ok())
        .min_by_key(|row| arch::preference(row.target))
        .ok_or_else(|| unsupported("no kernel makes blocks larger on this GPU: make them on the CPU".into()))
}

/// The launch that fills `to`, which has blocks.
fn plan(
    row: &Row,
    from: &BsrMatrix,
    to: &BsrMatrix,
) -> Result<(blockflash_bsr_reblock_params, LaunchConfig)> {
    let Variant::BsrReblock(kernel) = row.variant else {
        return Err(unsupported(row.target, format!("{} computes something else", row.symbol())));
    };
    let row_chunks = |matrix: &BsrMatrix| matrix.block_size * matrix.dtype().size() / CHUNK_BYTES;
    let params = blockflash_bsr_reblock_params {
        block_idx: null(),
        from: null(),
        to: null_mut(),
        large_blocks: to_i32("nnz_blocks", to.nnz_blocks())?,
        factor: to_i32("factor", to.block_size / from.block_size)?,
        block: to_i32("block_size", from.block_size)?,
        row_chunks: to_i32("chunks of a row", row_chunks(from))?,
    };
    let parts = (to.block_size * row_chunks(to)).div_ceil(kernel.block_chunks() as usize);
    let config = LaunchConfig {
        grid: [grid_x(&[to.nnz_blocks(), parts])?, 1, 1],
        block: row.threads(),
        smem_bytes: row.smem_bytes(),
        cluster: None,
        programmatic_dependent_launch: false,
    };
    Ok((params, config))
}

fn unsupported(arch: impl ToString, what: String) -> Error {
    Error::Unsupported { op: OP, arch: arch.to_string(), what }
}

#[cfg(test)]
#[path = "reblock_tests.rs"]
mod tests;
