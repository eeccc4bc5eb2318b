//! Block-sparse training: a network with block-sparse weights learns another one, its teacher, from
//! samples.
//!
//! ```text
//! cargo run --release --example block_sparse_training         1024 -> 4096 -> 1024, on a GPU
//! cargo run --release --example block_sparse_training -- \
//!     --inputs 256 --hidden 512 --outputs 256 --device cpu
//! ```
//!
//! The network is `y = W2·relu(W1·x)`; which blocks the weights store is drawn once and stays. A
//! step is five products of four kinds:
//!
//! ```text
//! h = relu(x·W1ᵀ)   y = h·W2ᵀ     BsrMatmul::linear, the activation fused
//! dh = dy·W2                      BsrMatmul::dense_sparse, W2 transposed by its index
//! dW2 = dyᵀ·h       dW1 = dhᵀ·x   BsrSddmm: the gradients of stored blocks only
//! ```
//!
//! The optimizer keeps a copy of the weights in f32, since the sum of small steps needs more digits
//! than bf16 has, and rounds it into the matrices after each step. Here it runs on the host, with
//! the element-wise steps; on a GPU it would write through `BsrMatrix::values_mut`.
//!
//! First the gradients are checked: a step along the gradient of a layer must change the loss by as
//! much as the gradient says. A wrong gradient, or a loss that falls less than `--goal` asks for,
//! fails. The losses are printed as lines; redirect stdout to keep them.
#![forbid(unsafe_code)]

use blockflash_bench::io::Array;
use blockflash_bench::random;
use blockflash_ops::{
    Activation, BsrMatmul, BsrMatrix, BsrSddmm, BsrTranspose, DType, Device, Result, Stream,
    Tensor, ViewMut,
};
use clap::Parser;
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

/// Trains a network with block-sparse weights.
#[derive(Parser)]
struct Args {
    /// Inputs of the network
    #[arg(long, default_value_t = 1024)]
    inputs: usize,
    /// Features between the layers
    #[arg(long, default_value_t = 4096)]
    hidden: usize,
    /// Outputs of the network
    #[arg(long, default_value_t = 1024)]
    outputs: usize,
    /// Rows and columns of a block, which divides these sizes
    #[arg(long, default_value_t = 64)]
    block: usize,
    /// Part of the blocks that is stored
    #[arg(long, default_value_t = 0.25)]
    density: f64,
    /// Samples of a step
    #[arg(long, default_value_t = 512)]
    batch: usize,
    /// Batches that are learned from, one after the other and again
    #[arg(long, default_value_t = 16)]
    batches: usize,
    /// Steps
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Size of a step
    #[arg(long, default_value_t = 2.0)]
    rate: f32,
    /// What of a step is repeated in the next
    #[arg(long, default_value_t = 0.9)]
    momentum: f32,
    /// Part of the first loss that may be left at the end
    #[arg(long, default_value_t = 0.5)]
    goal: f64,
    /// Seed of weights and samples
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
    let (block, density) = (args.block, args.density);
    if [args.batch, args.batches, args.steps].contains(&0) {
        return Err("--batch, --batches and --steps must be positive".into());
    }
    let fits = density > 0.0 && density <= 1.0;
    if !fits {
        return Err(format!("--density is {density}, expected above 0 and at most 1").into());
    }
    for (name, size) in
        [("inputs", args.inputs), ("hidden", args.hidden), ("outputs", args.outputs)]
    {
        if block == 0 || size == 0 || size % block != 0 {
            return Err(
                format!("--{name} is {size}, no positive multiple of --block {block}").into()
            );
        }
    }
    let device = args.device.unwrap_or_else(Device::best);
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    check(args)?;

    let stream = device.stream()?;
    let (teacher, mut student) = networks(args, dtype, &stream)?;
    let draw = |at| Batch::draw(args, args.batch, args.seed ^ (5 << 32 | at), &teacher);
    let batches = (0..args.batches as u64).map(draw).collect::<Result<Vec<_>>>()?;
    let held_out = draw(args.batches as u64)?;
    // Relative to the loss of answering 0 to everything.
    let relative =
        |loss: f64, batch: &Batch| loss / squares(&batch.targets) * 2.0 * args.batch as f64;
    let first = relative(student.loss(&held_out)?.0, &held_out);
    println!("step      loss  held out   ms/step");
    println!("{:>4} {first:>9.4} {first:>9.4}", 0);
    let (mut start, mut losses, mut last) = (Instant::now(), Vec::new(), first);
    for step in 1..=args.steps {
        let batch = &batches[(step - 1) % args.batches];
        losses.push(relative(student.backward(batch)?, batch));
        student.descend(args)?;
        if step % args.steps.div_ceil(20) == 0 || step == args.steps {
            let ms = start.elapsed().as_secs_f64() * 1e3 / losses.len() as f64;
            let mean = losses.iter().sum::<f64>() / losses.len() as f64;
            last = relative(student.loss(&held_out)?.0, &held_out);
            println!("{step:>4} {mean:>9.4} {last:>9.4} {ms:>9.3}");
            (start, losses) = (Instant::now(), Vec::new());
        }
    }
    println!("{:.1} % of the first loss is left", last / first * 100.0);
    // NaN is no success either.
    if last / first <= args.goal {
        Ok(())
    } else {
        Err("the loss fell less than --goal asks".into())
    }
}

/// Moves the weights of each layer along its gradient, in f32 on the CPU. Then, if the training
/// computes otherwise, compares its gradients with those.
fn check(args: &Args) -> Result<(), Failure> {
    const SAMPLES: usize = 32;
    let gradients = |dtype, stream: &Stream| -> Result<(Network, Batch)> {
        let (teacher, mut network) = networks(args, dtype, stream)?;
        let batch = Batch::draw(args, SAMPLES, args.seed, &teacher)?;
        network.backward(&batch)?;
        Ok((network, batch))
    };
    let (mut network, batch) = gradients(DType::F32, &Device::cpu().stream()?)?;
    let expected = network.layers.each_ref().map(|layer| layer.gradient.clone());
    for (at, gradient) in expected.iter().enumerate() {
        // Of the loss, whereas `gradient` is divided by the number of samples, as the loss is.
        let norm = squares(gradient).sqrt();
        let step = 1e-2 * squares(&network.layers[at].exact).sqrt() / norm;
        let before = network.layers[at].exact.clone();
        let mut loss_at = |by: f64| -> Result<f64> {
            let moved = before.iter().zip(gradient).map(|(x, d)| x + (by * f64::from(*d)) as f32);
            network.layers[at].exact = moved.collect();
            network.layers[at].round(&network.stream)?;
            Ok(network.loss(&batch)?.0)
        };
        let slope = (loss_at(step)? - loss_at(-step)?) / (2.0 * step * norm);
        loss_at(0.0)?;
        println!("gradient of layer {}: norm {norm:.5}, difference of the loss {slope:.5}", at + 1);
        // Not `>`: NaN is wrong, too.
        let fits = (slope - norm).abs() <= 0.02 * norm; // not so of NaN
        if !fits {
            return Err(format!("the gradient of layer {} is wrong", at + 1).into());
        }
    }
    let device = args.device.unwrap_or_else(Device::best);
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let (found, _) = gradients(dtype, &device.stream()?)?;
    for (at, (layer, expected)) in found.layers.iter().zip(&expected).enumerate() {
        let pairs = layer.gradient.iter().zip(expected);
        let differences: Vec<f32> = pairs.map(|(found, expected)| found - expected).collect();
        let error = (squares(&differences) / squares(expected)).sqrt();
        println!("gradient of layer {} in {dtype} on {device}: relative error {error:.1e}", at + 1);
        let fits = error <= 0.05; // not so of NaN
        if !fits {
            return Err(format!("the gradient of layer {} differs on {device}", at + 1).into());
        }
    }
    Ok(())
}

/// Weights `[outputs, inputs]` with their gradient and the state of the optimizer.
struct Layer {
    weights: BsrMatrix,
    index: BsrTranspose,
    /// The weights in f32, in the order of the blocks; the next two likewise.
    exact: Vec<f32>,
    gradient: Vec<f32>,
    velocity: Vec<f32>,
    /// Stored inputs of an output.
    fan_in: usize,
}

impl Layer {
    /// Draws equally many blocks in each block row, and weights ~ N(0, gain / inputs of an output).
    fn new(
        args: &Args,
        [outputs, inputs]: [usize; 2],
        gain: f32,
        [pattern, seed]: [u64; 2],
        dtype: DType,
        stream: &Stream,
    ) -> Result<Self> {
        let (rows, cols) = (outputs / args.block, inputs / args.block);
        let per_row = ((args.density * cols as f64).round() as usize).max(1);
        let row = |row| random::choose(per_row, cols, pattern, row as u64).into_iter();
        let blocks: Vec<_> = (0..rows).flat_map(|at| row(at).map(move |col| (at, col))).collect();
        let fan_in = per_row * args.block;
        let count = blocks.len() * args.block * args.block;
        let deviation = (gain / fan_in as f32).sqrt();
        let exact: Vec<f32> =
            random::normals(count, seed).into_iter().map(|value| value * deviation).collect();
        let weights = BsrMatrix::from_blocks(outputs, inputs, args.block, dtype, &blocks, &exact)?;
        let weights = weights.to(stream)?;
        let index = BsrTranspose::new(&weights, stream)?;
        let (gradient, velocity) = (vec![0.0; count], vec![0.0; count]);
        Ok(Self { weights, index, exact, gradient, velocity, fan_in })
    }

    /// Rounds the weights into the matrix; its pattern and index stay.
    fn round(&mut self, stream: &Stream) -> Result<()> {
        let shape = self.weights.values().shape().to_vec();
        let dtype = self.weights.dtype();
        let values = upload(&self.exact, &shape, dtype, &Device::cpu().stream()?)?;
        self.weights.set_values(&values, stream)
    }

    /// `dyᵀ·x / samples` at the stored blocks.
    fn find_gradient(&mut self, dy: &Tensor, x: &Tensor, stream: &Stream) -> Result<()> {
        let product = BsrSddmm::new(&self.weights, dy.view().permute(&[1, 0])?, x.view());
        let alpha = 1.0 / x.shape()[0] as f32;
        let mut values = Tensor::zeros(stream, DType::F32, self.weights.values().shape())?;
        BsrSddmm { alpha, ..product }.sddmm_into(values.view_mut(), stream)?;
        self.gradient = values.to_vec(stream)?;
        Ok(())
    }
}

struct Network {
    layers: [Layer; 2],
    dtype: DType,
    stream: Stream,
}

impl Network {
    /// `relu(x·W1ᵀ)` in the type of the weights, and y in f32.
    fn forward(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let Self { layers: [first, second], dtype, stream } = self;
        let linear = |layer: &Layer, x: &Tensor, activation, dtype| -> Result<Tensor> {
            let shape = [x.shape()[0], layer.weights.rows()];
            let mut y = Tensor::empty(stream, dtype, &shape)?;
            let product = BsrMatmul { activation, ..BsrMatmul::linear(x.view(), &layer.weights)? };
            product.matmul_into(transposed(&mut y)?, stream)?;
            Ok(y)
        };
        let hidden = linear(first, x, Activation::Relu, *dtype)?;
        let y = linear(second, &hidden, Activation::None, DType::F32)?;
        Ok([hidden, y])
    }

    /// Half the squared error of a sample, on average; y − targets and the hidden features.
    fn loss(&self, batch: &Batch) -> Result<(f64, Vec<f32>, Tensor)> {
        let [hidden, y] = self.forward(&batch.x)?;
        let y = y.to_vec::<f32>(&self.stream)?;
        let errors: Vec<f32> = y.iter().zip(&batch.targets).map(|(y, t)| y - t).collect();
        Ok((0.5 * squares(&errors) / batch.x.shape()[0] as f64, errors, hidden))
    }

    /// Leaves the gradients in the layers; returns the loss.
    fn backward(&mut self, batch: &Batch) -> Result<f64> {
        let (loss, errors, hidden) = self.loss(batch)?;
        let Self { layers: [first, second], dtype, stream } = self;
        let dy = upload(&errors, &[batch.x.shape()[0], second.weights.rows()], *dtype, stream)?;
        second.find_gradient(&dy, &hidden, stream)?;
        let mut d_hidden = Tensor::empty(stream, *dtype, hidden.shape())?;
        BsrMatmul::dense_sparse(dy.view(), &second.weights, &second.index)?
            .matmul_into(transposed(&mut d_hidden)?, stream)?;
        // The derivative of ReLU follows from its output.
        let mut d_sums = download(&d_hidden, stream)?;
        let outputs = download(&hidden, stream)?;
        d_sums.iter_mut().zip(outputs).filter(|(_, h)| *h <= 0.0).for_each(|(d, _)| *d = 0.0);
        let d_sums = upload(&d_sums, hidden.shape(), *dtype, stream)?;
        first.find_gradient(&d_sums, &batch.x, stream)?;
        Ok(loss)
    }

    /// Gradient descent with momentum. The rate is that of an output with one input: an output with
    /// more reacts to the sum of their steps.
    fn descend(&mut self, args: &Args) -> Result<()> {
        for layer in &mut self.layers {
            let rate = args.rate / layer.fan_in as f32;
            let steps = layer.velocity.iter_mut().zip(&layer.gradient);
            for (weight, (velocity, gradient)) in layer.exact.iter_mut().zip(steps) {
                *velocity = args.momentum * *velocity + gradient;
                *weight -= rate * *velocity;
            }
            layer.round(&self.stream)?;
        }
        Ok(())
    }
}

/// Teacher and student with equal patterns and other weights.
fn networks(args: &Args, dtype: DType, stream: &Stream) -> Result<(Network, Network)> {
    let network = |seed: u64| -> Result<Network> {
        // ReLU halves the mean square.
        let up = ([args.hidden, args.inputs], 2.0, [args.seed ^ 1 << 32, seed ^ 1 << 40]);
        let down = ([args.outputs, args.hidden], 1.0, [args.seed ^ 2 << 32, seed ^ 2 << 40]);
        let layer = |(sizes, gain, seeds)| Layer::new(args, sizes, gain, seeds, dtype, stream);
        Ok(Network { layers: [layer(up)?, layer(down)?], dtype, stream: stream.clone() })
    };
    Ok((network(args.seed ^ 3 << 32)?, network(args.seed ^ 4 << 32)?))
}

/// Inputs ~ N(0, 1), and what the teacher makes of them.
struct Batch {
    x: Tensor,
    targets: Vec<f32>,
}

impl Batch {
    fn draw(args: &Args, samples: usize, seed: u64, teacher: &Network) -> Result<Self> {
        let x = random::normals(samples * args.inputs, seed);
        let x = upload(&x, &[samples, args.inputs], teacher.dtype, &teacher.stream)?;
        let [_, y] = teacher.forward(&x)?;
        Ok(Self { x, targets: y.to_vec(&teacher.stream)? })
    }
}

fn upload(values: &[f32], shape: &[usize], dtype: DType, stream: &Stream) -> Result<Tensor> {
    // The shapes here have as many elements as there are values.
    let array = Array::rounded(shape, values, dtype).unwrap_or_else(|| Array::from(vec![0.0f32]));
    Ok(array.upload(stream)?)
}

fn download(tensor: &Tensor, stream: &Stream) -> Result<Vec<f32>> {
    let array = Array::download(tensor, stream)?;
    Ok(array.to_f32(0..array.len()))
}

/// `[samples, features]` as `[features, samples]`, the shape of C in the operation.
fn transposed(y: &mut Tensor) -> Result<ViewMut<'_>> {
    Ok(y.view_mut().permute(&[1, 0])?)
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|&value| f64::from(value).powi(2)).sum()
}
