//! A small transformer with random weights, and one step of it over a cache.
//!
//! A layer is `x += Wo·attention(Wqkv·x)`, `x += Wdown·gelu(Wup·x)`. There is no normalization,
//! for which the library has no kernel; weights are scaled so that x stays about 1. Matrices are
//! dense: all their blocks are stored. The embedding of tokens and the choice of the next one run
//! on the host.

use super::layer::rounded;
use super::sparsity::Sparsity;
use blockflash_bench::Result;
use blockflash_bench::random;
use blockflash_ops::{
    Activation, AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace,
    BsrMatmul, BsrMatrix, BsrWorkspace, CacheAccess, DType, KvCacheMut, Mask, Rotary, RotaryPairs,
    Stream, Tensor, View, ViewMut,
};

/// Sizes of a model and of its cache.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub layers: usize,
    /// Heads of queries, and of keys and values.
    pub heads: [usize; 2],
    pub head_dim: usize,
    pub vocabulary: usize,
    /// Slots of a page.
    pub page_size: usize,
    /// Pages of a sequence, at most.
    pub max_pages: usize,
    pub pages: usize,
    pub dtype: DType,
}

impl Sizes {
    /// Elements of x.
    pub fn width(&self) -> usize {
        self.heads[0] * self.head_dim
    }

    /// Most tokens of a sequence.
    pub fn capacity(&self) -> usize {
        self.page_size * self.max_pages
    }
}

/// The weights of a layer.
pub struct Layer {
    pub qkv: BsrMatrix,
    pub out: BsrMatrix,
    pub up: BsrMatrix,
    pub down: BsrMatrix,
}

pub struct Model {
    pub sizes: Sizes,
    pub layers: Vec<Layer>,
    pub head: BsrMatrix,
    /// `[vocabulary, width]`
    embedding: Vec<f32>,
    /// Cosines and sines, `[capacity, head_dim / 2]` in host memory and on the device.
    pub angles: [Vec<f32>; 2],
    tables: [Tensor; 2],
    workspace: BsrWorkspace,
}

/// Keys and values of a layer, `[pages, page_size, heads, head_dim]`.
pub struct Cache([Tensor; 2]);

/// Tensors of a step for so many sequences with so many tokens each. A captured graph keeps using
/// them: what changes is copied into them.
pub struct Step {
    /// `[batch, tokens, 1, width]`; the next three have such shapes, too.
    x: Tensor,
    qkv: Tensor,
    o: Tensor,
    inner: Tensor,
    /// f32 `[batch, tokens, 1, vocabulary]`
    logits: Tensor,
    /// i32 `[batch, max_pages]`
    block_table: Tensor,
    /// i32 `[batch]`: keys of each sequence with those of this step. A row without a sequence has
    /// 0: its token is dropped, and it attends to nothing.
    seqused_kv: Tensor,
    workspace: AttentionDecodeWorkspace,
}

/// `[batch, tokens, heads, dim]` as `[rows, features]`.
fn rows(x: View<'_>) -> Result<View<'_>> {
    Ok(x.flatten(2..4)?.flatten(0..2)?)
}

impl Model {
    /// # Errors
    /// Too little memory, or a device that fails.
    pub fn new(sizes: Sizes, seed: u64, stream: &Stream) -> Result<Self> {
        let (width, inner) = (sizes.width(), 4 * sizes.width());
        let qkv = (sizes.heads[0] + 2 * sizes.heads[1]) * sizes.head_dim;
        let mut next = seed;
        let mut matrix = |outputs, inputs, gain| -> Result<BsrMatrix> {
            next += 1;
            let all = Sparsity::draw([outputs, inputs], 128, 1.0, next)?;
            let values = all.values(gain, next);
            let matrix =
                BsrMatrix::from_blocks(outputs, inputs, 128, sizes.dtype, &all.blocks, &values)?;
            Ok(matrix.to(stream)?)
        };
        let gain = 0.5 / sizes.layers as f32;
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                qkv: matrix(qkv, width, 1.0)?,
                out: matrix(width, width, gain)?,
                up: matrix(inner, width, 1.0)?,
                down: matrix(width, inner, gain)?,
            })
        };
        let layers = (0..sizes.layers).map(layer).collect::<Result<Vec<_>>>()?;
        let (positions, half) = (sizes.capacity(), sizes.head_dim / 2);
        let angles = [f32::cos, f32::sin].map(|f| {
            let angle = |at: usize| {
                let frequency = 10_000f32.powf(-((at % half) as f32) / half as f32);
                f((at / half) as f32 * frequency)
            };
            (0..positions * half).map(angle).collect::<Vec<f32>>()
        });
        let table = |values| Tensor::from_slice(stream, values, &[positions, half]);
        Ok(Self {
            layers,
            head: matrix(sizes.vocabulary, width, 4.0)?,
            embedding: random::normals(sizes.vocabulary * width, seed),
            tables: [table(&angles[0])?, table(&angles[1])?],
            angles,
            workspace: BsrWorkspace::new(stream)?,
            sizes,
        })
    }

    /// An empty cache for each layer.
    ///
    /// # Errors
    /// Too little memory.
    pub fn caches(&self, stream: &Stream) -> Result<Vec<Cache>> {
        let Sizes { pages, page_size, heads, head_dim, dtype, .. } = self.sizes;
        let tensor = || Tensor::zeros(stream, dtype, &[pages, page_size, heads[1], head_dim]);
        self.layers.iter().map(|_| Ok(Cache([tensor()?, tensor()?]))).collect()
    }

    /// The rows of x for these tokens, on the device.
    ///
    /// # Errors
    /// Too little memory.
    pub fn embedded(&self, tokens: &[u32], shape: &[usize], stream: &Stream) -> Result<Tensor> {
        let width = self.sizes.width();
        let row = |&token: &u32| &self.embedding[token as usize * width..][..width];
        let values: Vec<f32> = tokens.iter().flat_map(row).copied().collect();
        Ok(rounded(&values, shape, self.sizes.dtype)?.upload(stream)?)
    }

    /// `to = activation(from·wᵀ + beta·to)`, both `[batch, tokens, heads, dim]`.
    ///
    /// # Errors
    /// A device that has no such kernel or fails.
    pub fn product(
        &self,
        w: &BsrMatrix,
        from: &Tensor,
        to: &mut Tensor,
        (activation, beta): (Activation, f32),
        stream: &Stream,
    ) -> Result<()> {
        let workspace = Some(&self.workspace);
        let linear = BsrMatmul::linear(rows(from.view())?, w)?;
        let c = to.view_mut().flatten(2..4)?.flatten(0..2)?.permute(&[1, 0])?;
        Ok(BsrMatmul { activation, beta, workspace, ..linear }.matmul_into(c, stream)?)
    }

    /// Queues a step: appends the keys and values of its tokens to the caches, and leaves the
    /// logits of the tokens that follow. On a GPU a graph can capture it.
    ///
    /// # Errors
    /// A device that has no such kernels or fails.
    pub fn forward(&self, step: &mut Step, caches: &mut [Cache], stream: &Stream) -> Result<()> {
        let (set, add) = ((Activation::None, 0.0), (Activation::None, 1.0));
        for (layer, cache) in self.layers.iter().zip(caches) {
            self.product(&layer.qkv, &step.x, &mut step.qkv, set, stream)?;
            self.attend(step, cache, stream)?;
            self.product(&layer.out, &step.o, &mut step.x, add, stream)?;
            let gelu = (Activation::Gelu, 0.0);
            self.product(&layer.up, &step.x, &mut step.inner, gelu, stream)?;
            self.product(&layer.down, &step.inner, &mut step.x, add, stream)?;
        }
        self.product(&self.head, &step.x, &mut step.logits, set, stream)
    }

    fn attend(&self, step: &mut Step, cache: &mut Cache, stream: &Stream) -> Result<()> {
        let [q, k, v] = parts(&step.qkv, self.sizes.heads)?;
        let [cos, sin] = self.tables.each_ref().map(Tensor::view);
        let rotary = Some(Rotary { cos, sin, pairs: RotaryPairs::Halves });
        let new = AppendKv { rotary, ..AppendKv::new(k, v) };
        let decode = AttentionDecode {
            mask: Mask::causal(),
            rotary,
            workspace: Some(&step.workspace),
            ..AttentionDecode::new(q)
        };
        let cache = cache.view(&step.block_table, &step.seqused_kv);
        let cache = CacheAccess::Append(&new, cache);
        let o = step.o.view_mut();
        Ok(decode.forward_into(AttentionDecodeOperands { cache, o, lse: None }, stream)?)
    }

    /// Tensors of a step.
    ///
    /// # Errors
    /// Too little memory, or a device that has no such kernel.
    pub fn step(&self, batch: usize, tokens: usize, stream: &Stream) -> Result<Step> {
        let Sizes { heads: [heads_q, heads_kv], head_dim, vocabulary, dtype, .. } = self.sizes;
        let tensor = |dtype, heads, dim| Tensor::zeros(stream, dtype, &[batch, tokens, heads, dim]);
        let mut step = Step {
            x: tensor(dtype, 1, self.sizes.width())?,
            qkv: tensor(dtype, heads_q + 2 * heads_kv, head_dim)?,
            o: tensor(dtype, heads_q, head_dim)?,
            inner: tensor(dtype, 1, 4 * self.sizes.width())?,
            logits: tensor(DType::F32, 1, vocabulary)?,
            block_table: Tensor::zeros(stream, DType::I32, &[batch, self.sizes.max_pages])?,
            seqused_kv: Tensor::zeros(stream, DType::I32, &[batch])?,
            workspace: AttentionDecodeWorkspace::new(stream, 0)?,
        };
        let mut one = self.caches_of_one_page(stream)?;
        let [q, ..] = parts(&step.qkv, self.sizes.heads)?;
        let cache = one.view(&step.block_table, &step.seqused_kv);
        let bytes = AttentionDecode::new(q).workspace_bytes(&cache.as_cache(), stream.device())?;
        step.workspace = AttentionDecodeWorkspace::new(stream, bytes)?;
        Ok(step)
    }

    /// The size of a workspace does not depend on the number of pages.
    fn caches_of_one_page(&self, stream: &Stream) -> Result<Cache> {
        let Sizes { page_size, heads, head_dim, dtype, .. } = self.sizes;
        let tensor = || Tensor::zeros(stream, dtype, &[1, page_size, heads[1], head_dim]);
        Ok(Cache([tensor()?, tensor()?]))
    }
}

/// Queries, keys and values of `[batch, tokens, heads, head_dim]`.
pub fn parts(qkv: &Tensor, [heads_q, heads_kv]: [usize; 2]) -> Result<[View<'_>; 3]> {
    let part = |first: usize, heads: usize| qkv.view().slice(2, first..first + heads);
    Ok([part(0, heads_q)?, part(heads_q, heads_kv)?, part(heads_q + heads_kv, heads_kv)?])
}

impl Cache {
    fn view<'a>(&'a mut self, block_table: &'a Tensor, seqused_kv: &'a Tensor) -> KvCacheMut<'a> {
        let [k, v] = self.0.each_mut().map(|tensor| -> ViewMut<'a> { tensor.view_mut() });
        KvCacheMut {
            block_table: Some(block_table.view()),
            seqused_kv: Some(seqused_kv.view()),
            ..KvCacheMut::new(k, v)
        }
    }
}

impl Step {
    /// What a step works on: for each sequence its tokens, its row of the block table, and its
    /// length with these tokens.
    ///
    /// # Errors
    /// A device that fails.
    pub fn fill(
        &mut self,
        model: &Model,
        [tokens, table, lengths]: [&[u32]; 3],
        stream: &Stream,
    ) -> Result<()> {
        let ints = |values: &[u32]| values.iter().map(|&x| x as i32).collect::<Vec<_>>();
        let x = model.embedded(tokens, self.x.shape(), stream)?;
        self.x.copy_from(stream, &x)?;
        self.block_table.copy_from_slice(stream, &ints(table))?;
        self.seqused_kv.copy_from_slice(stream, &ints(lengths))?;
        Ok(())
    }

    /// The likeliest next token after each token.
    ///
    /// # Errors
    /// A device that fails.
    pub fn next_tokens(&self, stream: &Stream) -> Result<Vec<u32>> {
        let logits: Vec<f32> = self.logits.to_vec(stream)?;
        let vocabulary = self.logits.shape()[3];
        Ok(logits.chunks_exact(vocabulary).map(likeliest).collect())
    }
}

/// The index of the largest logit.
pub fn likeliest(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap_or(0) as u32
}
