use super::scores::ScoreSizes;
use super::{BlockGeometry, block_mean_scores};
use crate::check::{Operand, aligned, grid_x, to_i32, to_i64};
use crate::selection::{Problem, select, tile_of};
use crate::{Error, Result};
use blockflash_safe::{BlockScoresOperands, LaunchConfig, Stream, Tensor, View};
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_SCORES_MEANS, BLOCKFLASH_BLOCK_SCORES_PRODUCTS, blockflash_block_scores_params,
};
use blockflash_sys::{DType, Kernel};
use std::ptr::{null, null_mut};

/// Scores of blocks that are recomputed on the device of q and k: the mean query of each block row
/// times the mean key of each block column, as [`block_mean_scores`] computes them on the CPU.
///
/// All memory is allocated at the start. On a GPU, [`compute`](Self::compute) is two launches that
/// read q and k once and can be captured in a graph. The scores serve as
/// [`BlockSource::Scores`](super::BlockSource::Scores). Sums are f32 in a fixed order.
///
/// ```
/// use blockflash_ops::block_sparse::{BlockChoice, BlockMaskBuffer, BlockScores, BlockSource};
/// use blockflash_ops::{BlockGeometry, Device, View};
///
/// let stream = Device::cpu().stream()?; // or of a GPU
/// let geometry = BlockGeometry::new(300, 300, 64, 64)?;
/// let data: Vec<f32> = (0..300 * 2 * 8).map(|i| (i as f32).sin()).collect();
/// let q = View::from_slice(&data, &[1, 300, 2, 8])?;
///
/// let mut scores = BlockScores::new(geometry, q, q, &stream)?;
/// let mut buffer = BlockMaskBuffer::new(geometry, 1, 2, 2 * 5 * 3, &stream)?;
/// scores.compute(q, q, &stream)?;
/// let source = BlockSource::Scores { scores: scores.scores().view(), k: 3 };
/// buffer.build(&BlockChoice::new(source), &stream)?;
/// assert_eq!(buffer.to_host(&stream)?.nnz(), 30);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockScores {
    sizes: ScoreSizes,
    scores: Tensor,
    /// `None` on the CPU, and where there is nothing to compute.
    workspace: Option<Workspace>,
}

#[derive(Debug)]
struct Workspace {
    kernel: &'static Kernel,
    q_means: Tensor,
    k_means: Tensor,
}

impl BlockScores {
    /// Allocates the scores of a q `[batch, seqlen_q, heads_q, head_dim]` and a k `[batch,
    /// seqlen_kv, heads_kv, head_dim]` with the sizes and types of the ones given. All scores are 0
    /// until the first [`compute`](Self::compute).
    ///
    /// # Errors
    /// The errors of [`block_mean_scores`]; on a GPU [`Error::Unsupported`] for f32, for a
    /// `head_dim` that is not a multiple of 8 from 8 to 256, and for a GPU without a kernel.
    pub fn new(geometry: BlockGeometry, q: View<'_>, k: View<'_>, stream: &Stream) -> Result<Self> {
        let sizes = ScoreSizes::of(geometry, &q, &k)?;
        let ScoreSizes { batch, heads_q, heads_kv, head_dim, .. } = sizes;
        let zeros = |shape: &[usize]| Tensor::zeros(stream, DType::F32, shape);
        let scores = zeros(&[batch, heads_q, geometry.rows(), geometry.cols()])?;
        let workspace = match stream.device().cuda_properties() {
            Some(gpu) if !scores.layout().is_empty() => {
                let kernel = select(&sizes, gpu)?;
                // Loads the kernel now, since the first computation may be captured in a graph.
                stream.device().preload(kernel)?;
                let q_means = zeros(&[batch, heads_q, geometry.rows(), head_dim])?;
                let k_means = zeros(&[batch, heads_kv, geometry.cols(), head_dim])?;
                Some(Workspace { kernel, q_means, k_means })
            }
            _ => None,
        };
        Ok(Self { sizes, scores, workspace })
    }

    /// f32 `[batch, heads_q, rows, cols]`.
    pub fn scores(&self) -> &Tensor {
        &self.scores
    }

    /// The kernel that computes the scores; `None` on the CPU, and where there is nothing to
    /// compute.
    pub fn kernel(&self) -> Option<&'static Kernel> {
        self.workspace.as_ref().map(|workspace| workspace.kernel)
    }

    /// Computes the scores of tensors of the same sizes and type. On a GPU this is queued on the
    /// stream, and nothing is allocated.
    ///
    /// # Errors
    /// The errors of [`block_mean_scores`]; [`Error::NotPrepared`] for other sizes or another type;
    /// [`Error::DeviceMismatch`]; on a GPU [`Error::Misaligned`] for an address that is not a
    /// multiple of 16 or a stride that is not a multiple of 8 elements.
    pub fn compute(&mut self, q: View<'_>, k: View<'_>, stream: &Stream) -> Result<()> {
        self.checked(&q, &k, stream)?;
        match (&self.workspace, stream.device().is_cpu()) {
            (Some(Workspace { kernel, .. }), _) => self.launch(kernel, q, k, stream),
            (None, true) => {
                let scores = block_mean_scores(self.sizes.geometry, q, k)?;
                Ok(self.scores.copy_from_slice(stream, &scores)?)
            }
            (None, false) => Ok(()),
        }
    }

    /// Like [`compute`](Self::compute) with this kernel: for tests and measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] on the CPU, or if the kernel does not compute these scores or
    /// does not run on this GPU.
    pub fn compute_with(
        &mut self,
        kernel: &Kernel,
        q: View<'_>,
        k: View<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.checked(&q, &k, stream)?;
        self.launch(kernel, q, k, stream)
    }

    fn checked(&self, q: &View<'_>, k: &View<'_>, stream: &Stream) -> Result<()> {
        let found = self.scores.device();
        if found != *stream.device() {
            return Err(Error::DeviceMismatch {
                what: "scores",
                expected: *stream.device(),
                found,
            });
        }
        if ScoreSizes::of(self.sizes.geometry, q, k)? != self.sizes {
            return Err(Error::NotPrepared { op: ScoreSizes::OP });
        }
        Operand::new("q", q).on(stream.device())?;
        Operand::new("k", k).on(stream.device())
    }

    fn launch(&mut self, kernel: &Kernel, q: View<'_>, k: View<'_>, stream: &Stream) -> Result<()> {
        let Some(workspace) = &mut self.workspace else {
            let what = format!("{} computes scores on a GPU, and at least one", kernel.symbol());
            return Err(Error::Unsupported {
                op: ScoreSizes::OP,
                arch: stream.device().to_string(),
                what,
            });
        };
        aligned("q", &q)?;
        aligned("k", &k)?;
        for (params, config) in plan(kernel, &self.sizes, q.strides(), k.strides())? {
            let operands = BlockScoresOperands {
                q,
                k,
                q_means: workspace.q_means.view_mut(),
                k_means: workspace.k_means.view_mut(),
                scores: self.scores.view_mut(),
            };
            stream.launch::<blockflash_safe::BlockScores>(kernel, &config, &params, operands)?;
        }
        Ok(())
    }
}

/// Plans the two launches as plain data with null pointers. There is at least one score, and the
/// kernel has the head dimension.
fn plan(
    kernel: &Kernel,
    sizes: &ScoreSizes,
    q_strides: &[usize],
    k_strides: &[usize],
) -> Result<[(blockflash_block_scores_params, LaunchConfig); 2]> {
    let (_, tile) = tile_of::<ScoreSizes>(kernel, &kernel.target)?;
    let &ScoreSizes { geometry, batch, heads_q, heads_kv, head_dim, .. } = sizes;
    let (rows, cols) = (geometry.rows(), geometry.cols());
    let q = strides("q", q_strides, [batch, geometry.seqlen_q(), heads_q])?;
    let k = strides("k", k_strides, [batch, geometry.seqlen_kv(), heads_kv])?;
    let params = blockflash_block_scores_params {
        q: null(),
        k: null(),
        q_means: null_mut(),
        k_means: null_mut(),
        scores: null_mut(),
        q_stride_batch: q[0],
        q_stride_seq: q[1],
        q_stride_head: q[2],
        k_stride_batch: k[0],
        k_stride_seq: k[1],
        k_stride_head: k[2],
        step: BLOCKFLASH_BLOCK_SCORES_MEANS,
        batch: to_i32("batch", batch)?,
        num_heads_q: to_i32("num_heads_q", heads_q)?,
        num_heads_kv: to_i32("num_heads_kv", heads_kv)?,
        seqlen_q: to_i32("seqlen_q", geometry.seqlen_q())?,
        seqlen_kv: to_i32("seqlen_kv", geometry.seqlen_kv())?,
        block_q: to_i32("block_q", geometry.block_q())?,
        block_kv: to_i32("block_kv", geometry.block_kv())?,
        rows: to_i32("rows", rows)?,
        cols: to_i32("cols", cols)?,
        head_dim: to_i32("head_dim", head_dim)?,
    };
    let config = |blocks| LaunchConfig::of(kernel, blocks, false);
    // The first launch has a CTA per mean, the second one per tile of scores.
    let means = heads_q.saturating_mul(rows).saturating_add(heads_kv.saturating_mul(cols));
    let tiles = |blocks: usize| blocks.div_ceil(tile);
    let products =
        blockflash_block_scores_params { step: BLOCKFLASH_BLOCK_SCORES_PRODUCTS, ..params };
    Ok([
        (params, config(grid_x(&[means, batch])?)),
        (products, config(grid_x(&[tiles(cols), tiles(rows), heads_q, batch])?)),
    ])
}

/// Checks the strides of batch entries, rows and heads, since the kernel loads 16 bytes at a time.
/// The stride of a dimension with one entry is never used.
fn strides(what: &'static str, strides: &[usize], extents: [usize; 3]) -> Result<[i64; 3]> {
    let mut found = [0; 3];
    for (at, dim) in ["batch", "sequence", "head"].into_iter().enumerate() {
        let stride = strides[at];
        if extents[at] > 1 && !stride.is_multiple_of(8) {
            let problem = format!("the {dim} stride is {stride} elements, not a multiple of 8");
            return Err(Error::Misaligned { what, problem });
        }
        found[at] = to_i64("stride", stride)?;
    }
    Ok(found)
}

#[cfg(test)]
#[path = "block_scores_tests.rs"]
mod tests;
