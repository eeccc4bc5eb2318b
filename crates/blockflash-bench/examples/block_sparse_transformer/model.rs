//! A transformer that predicts the next byte of a text.
//!
//! A token starts as the sum of two vectors, one of its byte and one of the byte before it. That is
//! all a token knows about its place, and enough to look for earlier occurrences of a byte and read
//! what followed. Each block adds attention and then an MLP with block-sparse weights, both of the
//! normalised sum so far; the logits are a product with the last normalised sum.

use super::attention::{Pattern, SelfAttention};
use super::host::{self, Norm, Place, Vector};
use super::layer::{Layer, transposed};
use super::sparsity::Sparsity;
use super::text::{BYTES, Batch};
use blockflash_bench::{Result, random};
use blockflash_ops::{Activation, DType, Tensor};

/// The network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    pub layers: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// Features inside of an MLP.
    pub hidden: usize,
    /// Rows and columns of a block of weights.
    pub block: usize,
    /// Fraction of the blocks of an MLP that is stored.
    pub density: f64,
    pub pattern: Pattern,
}

impl Sizes {
    /// Features of a token.
    pub fn features(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Blocks of the two products of an MLP.
    ///
    /// # Errors
    /// Sizes that are 0, or an invalid density.
    pub fn mlp(&self, seed: u64) -> Result<[Sparsity; 2]> {
        let [features, hidden] = [self.features(), self.hidden];
        Ok([
            Sparsity::draw([hidden, features], self.block, self.density, seed ^ 5 << 32)?,
            Sparsity::draw([features, hidden], self.block, self.density, seed ^ 6 << 32)?,
        ])
    }

    /// Seed of a block of the network.
    pub const fn seed_of(seed: u64, layer: usize) -> u64 {
        seed ^ (layer as u64 + 1) << 40
    }
}

/// What changes parameters: it is given the name, the values and the gradient of each.
pub type Rule<'a> = dyn FnMut(&str, &mut [f32], &[f32]) + 'a;

/// Attention and MLP, each behind a norm.
struct Block {
    norms: [Norm; 2],
    attention: SelfAttention,
    mlp: [Layer; 2],
    /// The outputs of the norms, rounded, `[tokens, features]`.
    normed: [Tensor; 2],
    /// `[tokens, hidden]`, like its gradient.
    hidden: Tensor,
    d_hidden: Tensor,
}

/// All parameters, and what the backward pass needs of the forward pass.
pub struct Transformer {
    /// `[256, features]`, of the byte and of the byte before it.
    embeddings: [Vector; 2],
    blocks: Vec<Block>,
    norm: Norm,
    normed: Tensor,
    unembedding: Layer,
    /// f32 `[tokens, features]`: what a product adds, or the gradient of its input.
    sum: Tensor,
    /// f32 `[tokens, 256]`
    logits: Tensor,
    features: usize,
    place: Place,
}

impl Transformer {
    /// Draws the parameters of a network for windows `[batch, seqlen]`.
    ///
    /// # Errors
    /// Invalid sizes, too little memory, or a device that has no such kernels or fails.
    pub fn new(sizes: &Sizes, windows: [usize; 2], seed: u64, place: &Place) -> Result<Self> {
        let (features, tokens) = (sizes.features(), windows[0] * windows[1]);
        let Place { stream, dtype } = place;
        let normed = || place.empty(*dtype, &[tokens, features]);
        let block = |layer| {
            let seed = Sizes::seed_of(seed, layer);
            let [up, down] = sizes.mlp(seed)?;
            let hidden = || place.empty(*dtype, &[tokens, sizes.hidden]);
            Ok(Block {
                norms: [Norm::new(features), Norm::new(features)],
                attention: SelfAttention::new(sizes, windows, seed, place)?,
                mlp: [
                    // ReLU halves the mean square.
                    Layer::new(&up, 2.0, seed ^ 7 << 32, *dtype, stream)?,
                    Layer::new(&down, 1.0, seed ^ 8 << 32, *dtype, stream)?,
                ],
                normed: [normed()?, normed()?],
                hidden: hidden()?,
                d_hidden: hidden()?,
            })
        };
        let all = Sparsity::draw([BYTES, features], sizes.block, 1.0, 0)?;
        let embedding = |lane: u64| Vector::new(random::normals(BYTES * features, seed ^ lane));
        Ok(Self {
            embeddings: [embedding(1 << 32), embedding(2 << 32)],
            blocks: (0..sizes.layers).map(block).collect::<Result<_>>()?,
            norm: Norm::new(features),
            normed: normed()?,
            // Training starts with nearly equal probabilities.
            unembedding: Layer::new(&all, 0.01, seed ^ 3 << 32, *dtype, stream)?,
            sum: place.empty(DType::F32, &[tokens, features])?,
            logits: place.empty(DType::F32, &[tokens, BYTES])?,
            features,
            place: place.clone(),
        })
    }

    /// The loss of a byte of the batch in nats, and what [`backward`](Self::backward) starts with:
    /// the gradient of the logits.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn forward(&mut self, batch: &Batch) -> Result<(f64, Vec<f32>)> {
        let Self { embeddings, blocks, norm, normed, unembedding, sum, logits, .. } = self;
        let (features, place) = (self.features, &self.place);
        let stream = &place.stream;
        let mut x = Vec::with_capacity(batch.bytes.len() * features);
        for bytes in batch.bytes.iter().zip(&batch.before) {
            let [own, before] = [(bytes.0, &embeddings[0]), (bytes.1, &embeddings[1])]
                .map(|(&byte, table)| &table.values[byte as usize * features..][..features]);
            x.extend(own.iter().zip(before).map(|(own, before)| own + before));
        }
        let shape = [batch.bytes.len(), features];
        for Block { norms, attention, mlp: [up, down], normed, hidden, .. } in blocks {
            normed[0] = place.upload(&norms[0].forward(&x), &shape)?;
            attention.forward(normed[0].view(), sum.view_mut(), stream)?;
            host::add(&mut x, &place.download(sum)?);

            normed[1] = place.upload(&norms[1].forward(&x), &shape)?;
            up.forward(normed[1].view(), Activation::Relu)?
                .matmul_into(transposed(hidden)?, stream)?;
            down.forward(hidden.view(), Activation::None)?.matmul_into(transposed(sum)?, stream)?;
            host::add(&mut x, &place.download(sum)?);
        }
        *normed = place.upload(&norm.forward(&x), &shape)?;
        unembedding
            .forward(normed.view(), Activation::None)?
            .matmul_into(transposed(logits)?, stream)?;
        let mut logits = place.download(logits)?;
        let loss = host::cross_entropy(&mut logits, &batch.targets);
        Ok((loss / batch.targets.len() as f64, logits))
    }

    /// Finds the gradients of all parameters. Those of activations are of the loss of all tokens
    /// together, which keeps them large enough for f16.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn backward(&mut self, batch: &Batch, d_logits: &[f32]) -> Result<()> {
        let Self { embeddings, blocks, norm, normed, unembedding, sum, .. } = self;
        let (features, place) = (self.features, &self.place);
        let (stream, tokens) = (&place.stream, batch.bytes.len());
        let shape = [tokens, features];
        let dy = place.upload(d_logits, &[tokens, BYTES])?;
        unembedding.find_gradient(dy.view(), normed.view(), stream)?;
        unembedding.backward(dy.view())?.matmul_into(transposed(sum)?, stream)?;
        let mut dx = norm.backward(&place.download(sum)?);
        for block in blocks.iter_mut().rev() {
            let Block { norms, attention, mlp: [up, down], normed, hidden, d_hidden } = block;
            let dy = place.upload(&dx, &shape)?;
            down.find_gradient(dy.view(), hidden.view(), stream)?;
            down.backward(dy.view())?.matmul_into(transposed(d_hidden)?, stream)?;
            let mut gradient = place.download(d_hidden)?;
            host::relu_backward(&mut gradient, &place.download(hidden)?);
            let gradient = place.upload(&gradient, hidden.shape())?;
            up.find_gradient(gradient.view(), normed[1].view(), stream)?;
            up.backward(gradient.view())?.matmul_into(transposed(sum)?, stream)?;
            host::add(&mut dx, &norms[1].backward(&place.download(sum)?));

            let dy = place.upload(&dx, &shape)?;
            attention.backward(normed[0].view(), dy.view(), sum.view_mut(), stream)?;
            host::add(&mut dx, &norms[0].backward(&place.download(sum)?));
        }
        for (table, bytes) in embeddings.iter_mut().zip([&batch.bytes, &batch.before]) {
            table.gradient.fill(0.0);
            for (row, &byte) in dx.chunks(features).zip(bytes) {
                host::add(&mut table.gradient[byte as usize * features..][..features], row);
            }
            table.gradient.iter_mut().for_each(|gradient| *gradient /= tokens as f32);
        }
        Ok(())
    }

    /// Goes through all parameters, always in this order.
    ///
    /// # Errors
    /// A device that fails.
    pub fn update(&mut self, rule: &mut Rule<'_>) -> Result<()> {
        let Self { embeddings, blocks, norm, unembedding, place: Place { stream, .. }, .. } = self;
        let mut of_host = |name: &str, Vector { values, gradient }: &mut Vector| {
            rule(name, values, gradient);
        };
        for (name, table) in ["byte", "byte before"].iter().zip(embeddings) {
            of_host(name, table);
        }
        of_host("last norm", &mut norm.gain);
        for (at, Block { norms, .. }) in blocks.iter_mut().enumerate() {
            for (name, norm) in ["norm of attention", "norm of mlp"].iter().zip(norms) {
                of_host(&format!("{at} {name}"), &mut norm.gain);
            }
        }
        for (at, Block { attention, mlp, .. }) in blocks.iter_mut().enumerate() {
            let mlp = ["up", "down"].into_iter().zip(mlp);
            for (name, layer) in attention.layers().chain(mlp) {
                let name = format!("{at} {name}");
                layer.update(stream, |values, gradient| rule(&name, values, gradient))?;
            }
        }
        unembedding.update(stream, |values, gradient| rule("logits", values, gradient))
    }
}
