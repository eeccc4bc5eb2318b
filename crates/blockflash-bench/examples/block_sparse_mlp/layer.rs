//! The layer on the device: `y = down · silu(up · x)` in two launches.
//!
//! A model keeps activations as `[tokens, features]`. Here they are `[features, tokens]`, because
//! the library multiplies a sparse matrix from the left, `C = A·B`: weights `[out, in]` are A
//! without a transpose, and the output of a projection is the input of the next, so a stack of such
//! layers stays in this layout. Rows begin at multiples of 16 bytes for any number of tokens, one
//! included: the buffers are wider than the matrices, and the padding behind a row is neither read
//! nor written.

use super::reference::{SAMPLES, Sample};
use super::weights::{Kept, Ranking, Weights, out_of_memory};
use blockflash_bench::io::Array;
use blockflash_bench::{Result, random};
use blockflash_ops::bsr_matmul::BsrMatrix;
use blockflash_ops::{Activation, BsrMatmul, BsrWorkspace, DType, Stream, Tensor};
use std::cell::Cell;

/// Number of elements in 16 bytes.
const ALIGNMENT: usize = 8;

/// Weights of a layer on the device: up and down projections.
pub struct Mlp {
    pub kept: [Kept; 2],
    /// Several copies of the same weights: see [`Mlp::new`].
    copies: Vec<[BsrMatrix; 2]>,
    next: Cell<usize>,
}

impl Mlp {
    /// Keeps the blocks with the greatest norms in both projections. The weights are stored in so
    /// many copies that these have `fresh_bytes` together. Launches use the copies in turns, as a
    /// model runs through its layers, so that no launch finds its weights in a cache of half that
    /// size.
    ///
    /// # Errors
    /// Too little memory, or a device that fails.
    /// Too little memory, a device that fails.
    pub fn new(
        weights: [&Weights; 2],
        rankings: &[Ranking; 2],
        density: f64,
        fresh_bytes: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let kept = rankings.each_ref().map(|ranking| ranking.keep(density));
        let [up, down] = [weights[0].bsr(&kept[0])?, weights[1].bsr(&kept[1])?];
        let bytes = (kept[0].elements() + kept[1].elements()) * DType::BF16.size();
        let copies =
            (0..fresh_bytes.div_ceil(bytes).max(1)).map(|_| Ok([up.to(stream)?, down.to(stream)?]));
        Ok(Self { copies: copies.collect::<Result<_>>()?, kept, next: Cell::new(0) })
    }

    /// Rows and columns of a block.
    pub fn block_size(&self) -> usize {
        self.kept[0].block_size
    }

    /// Fraction of the blocks that is stored.
    pub fn density(&self) -> f64 {
        let [up, down] = &self.copies[0];
        let all = [up, down].map(|matrix| (matrix.block_rows() * matrix.block_cols()) as f64);
        (up.nnz_blocks() + down.nnz_blocks()) as f64 / (all[0] + all[1])
    }

    /// Floating-point operations per token.
    pub fn flops(&self) -> f64 {
        2.0 * (self.kept[0].elements() + self.kept[1].elements()) as f64
    }
}

/// Activations of a number of tokens on the device.
pub struct Activations {
    tokens: usize,
    /// `[features, stride]`, `[intermediate, stride]`, `[features, stride]`.
    x: Tensor,
    hidden: Tensor,
    y: Tensor,
    workspace: BsrWorkspace,
}

impl Activations {
    /// Inputs ~ N(0, 1).
    ///
    /// # Errors
    /// Too little memory, a device that fails.
    pub fn new(
        [features, intermediate]: [usize; 2],
        tokens: usize,
        seed: u64,
        stream: &Stream,
    ) -> Result<Self> {
        let stride = tokens.next_multiple_of(ALIGNMENT);
        // The weights use random streams 0 and 1.
        let x = random::normal(DType::BF16, &[features, stride], seed, 2, |_| ())
            .map_err(out_of_memory)?;
        let empty = |rows| Tensor::empty(stream, DType::BF16, &[rows, stride]);
        let (hidden, y) = (empty(intermediate)?, empty(features)?);
        Ok(Self { tokens, x: x.upload(stream)?, hidden, y, workspace: BsrWorkspace::new(stream)? })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Launches the layer; the activation is fused into the first product.
    ///
    /// # Errors
    /// A device that has no such kernel or fails.
    pub fn forward(&mut self, mlp: &Mlp, stream: &Stream) -> Result<()> {
        let [up, down] = &mlp.copies[mlp.next.get()];
        mlp.next.set((mlp.next.get() + 1) % mlp.copies.len());
        let tokens = 0..self.tokens;
        let workspace = Some(&self.workspace);
        let up = BsrMatmul::new(up, self.x.view().slice(1, tokens.clone())?);
        let up = BsrMatmul { activation: Activation::Silu, workspace, ..up };
        up.matmul_into(self.hidden.view_mut().slice(1, tokens.clone())?, stream)?;
        let down = BsrMatmul::new(down, self.hidden.view().slice(1, tokens.clone())?);
        let down = BsrMatmul { workspace, ..down };
        Ok(down.matmul_into(self.y.view_mut().slice(1, tokens)?, stream)?)
    }

    /// Runs the layer once into memory full of NaN, and returns the output of the
    /// [`sampled`](Self::sampled) tokens.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn output(&mut self, mlp: &Mlp, stream: &Stream) -> Result<Vec<Sample>> {
        self.hidden.fill_bytes(stream, 0xFF)?;
        self.y.fill_bytes(stream, 0xFF)?;
        self.forward(mlp, stream)?;
        self.sample(&self.y, stream)
    }

    /// The input of the sampled tokens.
    ///
    /// # Errors
    /// A device that fails.
    pub fn input(&self, stream: &Stream) -> Result<Vec<Sample>> {
        self.sample(&self.x, stream)
    }

    /// The tokens to compare: evenly spaced, including the first and the last.
    pub fn sampled(&self) -> Vec<usize> {
        let count = SAMPLES.min(self.tokens);
        (0..count).map(|at| at * (self.tokens - 1) / (count - 1).max(1)).collect()
    }

    fn sample(&self, tensor: &Tensor, stream: &Stream) -> Result<Vec<Sample>> {
        let array = Array::download(tensor, stream)?;
        let stride = self.tokens.next_multiple_of(ALIGNMENT);
        let tokens = self.sampled();
        let rows = (0..array.len() / stride).map(|row| {
            let values = array.to_f32(row * stride..(row + 1) * stride);
            let mut sample = [0.0; SAMPLES];
            sample.iter_mut().zip(&tokens).for_each(|(value, &token)| *value = values[token]);
            sample
        });
        Ok(rows.collect())
    }
}
