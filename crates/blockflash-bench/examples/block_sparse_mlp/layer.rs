//! The layer on the device: `y = down · silu(up · x)` in two launches.
//!
//! A model keeps activations as `[tokens, features]`. Here they are `[features, tokens]`, since the
//! library multiplies a sparse matrix from the left, `C = A·B`: weights `[out, in]` are A as they
//! are, and what a projection writes is what the next one reads. A stack of such layers stays in
//! this layout. Rows begin at multiples of 16 bytes for any number of tokens, one included: the
//! buffers are wider than the matrices, and what lies behind a row is neither read nor written.

use super::reference::{SAMPLES, Sample};
use super::weights::{Kept, Ranking, Weights, out_of_memory};
use blockflash_bench::io::Array;
use blockflash_bench::{Result, random};
use blockflash_ops::bsr_matmul::BsrMatrix;
use blockflash_ops::{Activation, BsrMatmul, BsrWorkspace, DType, Stream, Tensor};
use std::cell::Cell;

/// Elements of 16 bytes.
const ALIGNMENT: usize = 8;

/// Weights of a layer on the device: up and down projection.
pub struct Mlp {
    pub kept: [Kept; 2],
    /// The same weights several times: see [`Mlp::new`].
    copies: Vec<[BsrMatrix; 2]>,
    next: Cell<usize>,
}

impl Mlp {
    /// Keeps the best blocks of both projections. The weights are stored so often that the copies
    /// have `fresh_bytes`: launches take them in turns, as a model runs through its layers, so that
    /// none finds its weights in a cache of half that size.
    ///
    /// # Errors
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

    /// Stored blocks by all.
    pub fn density(&self) -> f64 {
        let [up, down] = &self.copies[0];
        let all = [up, down].map(|matrix| (matrix.block_rows() * matrix.block_cols()) as f64);
        (up.nnz_blocks() + down.nnz_blocks()) as f64 / (all[0] + all[1])
    }

    /// Operations for a token.
    pub fn flops(&self) -> f64 {
        2.0 * (self.kept[0].elements() + self.kept[1].elements()) as f64
    }
}

/// Activations of some tokens on the device.
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
        // Lanes 0 and 1 are those of the weights.
        let x = random::normal(DType::BF16, &[features, stride], seed, 2, |_| ())
            .map_err(out_of_memory)?;
        let empty = |rows| Tensor::empty(stream, DType::BF16, &[rows, stride]);
        let (hidden, y) = (empty(intermediate)?, empty(features)?);
        Ok(Self { tokens, x: x.upload(stream)?, hidden, y, workspace: BsrWorkspace::new(stream)? })
    }

    /// How many there are.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Launches the layer: activation and first product are one launch.
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

    /// The layer once, from memory full of NaN: the output of the tokens of
    /// [`sampled`](Self::sampled).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn output(&mut self, mlp: &Mlp, stream: &Stream) -> Result<Vec<Sample>> {
        self.hidden.fill_bytes(stream, 0xFF)?;
        self.y.fill_bytes(stream, 0xFF)?;
        self.forward(mlp, stream)?;
        self.sample(&self.y, stream)
    }

    /// The input of those tokens.
    ///
    /// # Errors
    /// A device that fails.
    pub fn input(&self, stream: &Stream) -> Result<Vec<Sample>> {
        self.sample(&self.x, stream)
    }

    /// The tokens that are compared: evenly spread, the first and the last among them.
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
