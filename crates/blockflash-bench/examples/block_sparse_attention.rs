//! Training with block-sparse attention: a layer of causal attention learns to predict the next
//! byte of a text, with dense attention and under a block mask.
//!
//! ```text
//! cargo run --release --example block_sparse_attention        windows of 4096 bytes, on a GPU
//! cargo run --release --example block_sparse_attention -- \
//!     --seqlen 512 --heads 2 --head-dim 32 --steps 100 --device cpu
//! ```
//!
//! Each token takes its query and its value from tables by its byte, and its key from a table by
//! the byte before. A query can thus find earlier places that follow the same byte, and read which
//! byte stood there: what the induction heads of transformers do. The logits are a product with the
//! output, plus a table of which byte follows which. Attention and its gradients are the library's;
//! tables, softmax and the optimizer (Adam) run on the host.
//!
//! Under the block mask a token visits its own block, the `--local` blocks before it, and every
//! `--stride`-th earlier one. The backward pass needs the mask with its transpose.
//!
//! First the gradients are checked: a step along the gradient of a table must change the loss by as
//! much as the gradient says. A wrong gradient, or a loss that stays above `--goal`, fails.
#![forbid(unsafe_code)]

use blockflash_bench::io::Array;
use blockflash_bench::random;
use blockflash_ops::{
    Align, Attention, AttentionOutput, BlockGeometry, BlockMask, DType, Device, Mask, Result,
    Stream, Tensor,
};
use clap::Parser;
use ndarray::{Array2, ArrayView2, Axis, Zip};
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

/// The text: the package carries it, so the program needs no file.
const TEXT: &str = concat!(
    include_str!("../README.md"),
    include_str!("block_sparse_attention.rs"),
    include_str!("block_sparse_training.rs"),
    include_str!("generation.rs"),
    include_str!("long_context.rs"),
);
const BYTES: usize = 256;

/// Trains attention over all earlier tokens, and over blocks of them.
#[derive(Parser)]
struct Args {
    /// Steps of each training
    #[arg(long, default_value_t = 200)]
    steps: usize,
    /// Bytes of a window; a step takes one
    #[arg(long, default_value_t = 4096)]
    seqlen: usize,
    /// Heads
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Elements of a row
    #[arg(long, default_value_t = 64)]
    head_dim: usize,
    /// Tokens of a block
    #[arg(long, default_value_t = 64)]
    block: usize,
    /// Blocks before its own that a token visits
    #[arg(long, default_value_t = 3)]
    local: usize,
    /// Distance between the other earlier blocks that a token visits
    #[arg(long, default_value_t = 8)]
    stride: usize,
    /// Size of a step
    #[arg(long, default_value_t = 0.1)]
    rate: f32,
    /// Part of the entropy of a byte that the loss on held-out text may be
    #[arg(long, default_value_t = 0.8)]
    goal: f64,
    /// Seed of tables and windows
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// cpu, cuda or cuda:N [default: the first usable GPU, else cpu]
    #[arg(long)]
    device: Option<Device>,
}

fn main() {
    if let Err(error) = run(&Args::parse()) {
        eprintln!("error: {error}");
        std::process::exit(2);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    // The last eighth is held out. A window has a byte before and one behind it.
    let (learned, held_out) = TEXT.as_bytes().split_at(TEXT.len() / 8 * 7);
    let window = args.seqlen.saturating_add(2);
    if [args.seqlen, args.steps, args.heads].contains(&0) || window > held_out.len() {
        let most = held_out.len() - 2;
        return Err(format!("--steps, --heads, --seqlen: above 0, --seqlen at most {most}").into());
    }
    let device = args.device.unwrap_or_else(Device::best);
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let cpu = Device::cpu().stream()?;
    for sparse in [false, true] {
        check(&mut Model::new(args, sparse, DType::F32, &cpu)?, &learned[..window.min(300)])?;
    }

    let entropy = entropy(TEXT.as_bytes());
    println!("entropy of a byte: {entropy:.3} bits, on {device} in {dtype}");
    println!("attention      step  bits per byte  held out   ms/step");
    for sparse in [false, true] {
        let mut model = Model::new(args, sparse, dtype, &device.stream()?)?;
        let name = if sparse { "block-sparse" } else { "dense" };
        let (mut start, mut losses, mut last) = (Instant::now(), Vec::new(), f64::NAN);
        for step in 1..=args.steps {
            let at = random::choose(1, learned.len() - window, args.seed, step as u64)[0];
            losses.push(model.backward(&learned[at..at + window])?);
            model.descend(step, args);
            if step % args.steps.div_ceil(10) == 0 || step == args.steps {
                let ms = start.elapsed().as_secs_f64() * 1e3 / losses.len() as f64;
                let mean = losses.iter().sum::<f64>() / losses.len() as f64;
                last = model.loss(&held_out[..window])?.0;
                println!("{name:<13} {step:>5} {mean:>14.3} {last:>9.3} {ms:>9.2}");
                (start, losses) = (Instant::now(), Vec::new());
            }
        }
        // Not `>`: NaN is no success either.
        let fits = last <= args.goal * entropy; // not so of NaN
        if !fits {
            return Err(format!("{name}: {last:.3} bits per byte are above --goal").into());
        }
    }
    Ok(())
}

/// Moves each table along its gradient: the loss must change as the gradient says.
fn check(model: &mut Model, text: &[u8]) -> Result<(), Failure> {
    model.backward(text)?;
    for (at, name) in ["queries", "keys", "values", "output", "follows"].iter().enumerate() {
        let Table { values, gradient, .. } = model.tables[at].clone();
        let norm = f64::from(gradient.iter().map(|x| x * x).sum::<f32>()).sqrt();
        let step = (0.02 * values.len() as f64).sqrt() * 0.03 / norm;
        let mut loss_at = |by: f64| -> Result<f64> {
            model.tables[at].values = &values + &gradient * by as f32;
            Ok(model.loss(text)?.0)
        };
        let slope = (loss_at(step)? - loss_at(-step)?) / (2.0 * step * norm) * 2f64.ln();
        loss_at(0.0)?;
        println!("gradient of {name}: norm {norm:.6}, difference of the loss {slope:.6}");
        let fits = (slope - norm).abs() <= 0.02 * norm; // not so of NaN
        if !fits {
            return Err(format!("the gradient of {name} is wrong").into());
        }
    }
    Ok(())
}

/// Parameters with a row for each byte, their gradient and the averages of Adam.
#[derive(Clone)]
struct Table {
    values: Array2<f32>,
    gradient: Array2<f32>,
    mean: Array2<f32>,
    square: Array2<f32>,
}

impl Table {
    fn new(columns: usize, deviation: f32, seed: u64) -> Self {
        let normals = random::normals(BYTES * columns, seed);
        let zeros = Array2::zeros((BYTES, columns));
        let mut values = zeros.clone();
        values.iter_mut().zip(normals).for_each(|(value, normal)| *value = normal * deviation);
        Self { values, gradient: zeros.clone(), mean: zeros.clone(), square: zeros }
    }

    fn rows(&self, bytes: &[u8]) -> Array2<f32> {
        self.values.select(Axis(0), &bytes.iter().map(|&byte| byte.into()).collect::<Vec<_>>())
    }

    /// The gradient of the rows that [`rows`](Self::rows) gave, added up for each byte.
    fn collect(&mut self, rows: ArrayView2<'_, f32>, bytes: &[u8], factor: f32) {
        self.gradient.fill(0.0);
        for (row, &byte) in rows.outer_iter().zip(bytes) {
            self.gradient.row_mut(byte.into()).scaled_add(factor, &row);
        }
    }

    /// A step of Adam (Kingma and Ba, 2015).
    fn descend(&mut self, step: usize, rate: f32) {
        let [a, b] = [0.9f32, 0.98];
        let [of_mean, of_square] = [a, b].map(|decay| 1.0 / (1.0 - decay.powi(step as i32)));
        let Self { values, gradient, mean, square } = self;
        Zip::from(values).and(gradient).and(mean).and(square).for_each(|value, d, mean, square| {
            *mean += (1.0 - a) * (*d - *mean);
            *square += (1.0 - b) * (*d * *d - *square);
            *value -= rate * *mean * of_mean / ((*square * of_square).sqrt() + 1e-8);
        });
    }
}

struct Model {
    /// Queries, keys, values and output, each `[256, heads · head_dim]`; which byte follows which,
    /// `[256, 256]`.
    tables: [Table; 5],
    /// How to make the mask for a number of tokens: blocks, local blocks, stride.
    blocks: Option<[usize; 3]>,
    heads: usize,
    dtype: DType,
    stream: Stream,
}

/// What the backward pass needs of the forward pass.
struct Pass {
    qkv: [Tensor; 3],
    mask: Option<BlockMask>,
    output: AttentionOutput,
    o: Array2<f32>,
    /// The gradient of the logits, for the sum of the losses in nats.
    d_logits: Array2<f32>,
}

impl Pass {
    fn call(&self) -> Attention<'_> {
        let [q, k, v] = self.qkv.each_ref().map(Tensor::view);
        let block_mask = self.mask.as_ref();
        Attention { scores: Mask::causal().into(), block_mask, ..Attention::new(q, k, v) }
    }
}

impl Model {
    fn new(args: &Args, sparse: bool, dtype: DType, stream: &Stream) -> Result<Self> {
        let features = args.heads * args.head_dim;
        let table =
            |columns, deviation, lane: u64| Table::new(columns, deviation, args.seed ^ lane << 32);
        Ok(Self {
            // Keys start as the queries, so that a query begins with places after the same byte.
            tables: [
                table(features, 1.0, 0),
                table(features, 1.0, 0),
                table(features, 0.1, 1),
                table(features, 0.1, 2),
                table(BYTES, 0.02, 3),
            ],
            blocks: sparse.then_some([args.block, args.local, args.stride]),
            heads: args.heads,
            dtype,
            stream: stream.clone(),
        })
    }

    fn upload(&self, rows: &Array2<f32>) -> Result<Tensor> {
        let (tokens, features) = rows.dim();
        let shape = [1, tokens, self.heads, features / self.heads];
        let values: Vec<f32> = rows.iter().copied().collect();
        // The shape has as many elements as there are values.
        let array =
            Array::rounded(&shape, &values, self.dtype).unwrap_or_else(|| Array::from(values));
        Ok(array.upload(&self.stream)?)
    }

    fn download(&self, tensor: &Tensor) -> Result<Array2<f32>> {
        let array = Array::download(tensor, &self.stream)?;
        let [_, tokens, heads, dim] = *array.shape() else { return Ok(Array2::zeros((0, 0))) };
        let values = array.to_f32(0..array.len());
        Ok(Array2::from_shape_vec((tokens, heads * dim), values).unwrap_or_default())
    }

    /// Bits per byte of a text, whose first byte is only known and whose last only predicted.
    fn loss(&self, text: &[u8]) -> Result<(f64, Pass)> {
        let [before, own, next] = [0, 1, 2].map(|at| &text[at..at + text.len() - 2]);
        let tokens = own.len();
        let mask = match self.blocks {
            None => None,
            Some([block, local, stride]) => {
                let geometry = BlockGeometry::new(tokens, tokens, block, block)?;
                let mask = BlockMask::strided(geometry, stride, local, Align::BottomRight)?;
                let mask = mask.intersect_mask(Mask::causal())?.with_transpose()?;
                Some(mask.to(&self.stream)?)
            }
        };
        let [queries, keys, values, output, follows] = &self.tables;
        let qkv = [(queries, own), (keys, before), (values, own)];
        let [q, k, v] = qkv.map(|(table, bytes)| self.upload(&table.rows(bytes)));
        let qkv = [q?, k?, v?];
        let [q, k, v] = qkv.each_ref().map(Tensor::view);
        let block_mask = mask.as_ref();
        let call =
            Attention { scores: Mask::causal().into(), block_mask, ..Attention::new(q, k, v) };
        let attended = call.forward(&self.stream)?;
        let o = self.download(&attended.o)?;
        let mut logits = o.dot(&output.values.t()) + follows.rows(own);
        let mut loss = 0.0;
        for (mut row, &byte) in logits.outer_iter_mut().zip(next) {
            let most = row.fold(f32::NEG_INFINITY, |most, &logit| most.max(logit));
            row.mapv_inplace(|logit| (logit - most).exp());
            row /= row.sum();
            loss -= f64::from(row[usize::from(byte)]).log2();
            row[usize::from(byte)] -= 1.0;
        }
        let pass = Pass { qkv, mask, output: attended, o, d_logits: logits };
        Ok((loss / tokens as f64, pass))
    }

    /// Leaves the gradients of the loss in nats in the tables; returns the loss in bits.
    fn backward(&mut self, text: &[u8]) -> Result<f64> {
        let [before, own] = [0, 1].map(|at| &text[at..at + text.len() - 2]);
        let (loss, pass) = self.loss(text)?;
        let factor = 1.0 / own.len() as f32;
        let d_o = self.upload(&pass.d_logits.dot(&self.tables[3].values))?;
        let gradients = pass.call().backward(&pass.output, d_o.view(), &self.stream)?;
        for (at, (rows, bytes)) in
            [(&gradients.dq, own), (&gradients.dk, before), (&gradients.dv, own)].iter().enumerate()
        {
            let rows = self.download(rows)?;
            self.tables[at].collect(rows.view(), bytes, factor);
        }
        self.tables[3].gradient = pass.d_logits.t().dot(&pass.o) * factor;
        self.tables[4].collect(pass.d_logits.view(), own, factor);
        Ok(loss)
    }

    /// The rate falls to 0 in equal steps.
    fn descend(&mut self, step: usize, args: &Args) {
        let rate = args.rate * (1.0 - (step - 1) as f32 / args.steps as f32);
        self.tables.iter_mut().for_each(|table| table.descend(step, rate));
    }
}

/// Bits of a byte for who knows nothing but how frequent bytes are.
fn entropy(text: &[u8]) -> f64 {
    let mut counts = [0usize; BYTES];
    text.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
    let parts = counts.iter().filter(|&&count| count > 0).map(|&n| n as f64 / text.len() as f64);
    -parts.map(|part| part * part.log2()).sum::<f64>()
}
