//! Generation with a paged cache, continuous batching and CUDA graphs: what an inference engine
//! does with the library, in small.
//!
//! ```text
//! cargo run --release --example generation                  on a GPU, else on the CPU
//! cargo run --release --example generation -- --layers 2 --sequences 6 --device cpu
//! ```
//!
//! A transformer with random weights generates tokens for many sequences. A layer is
//! `x += Wo·attention(Wqkv·x)`, `x += Wdown·gelu(Wup·x)`; its matrices store all blocks. One call
//! of `AttentionDecode` rotates queries and keys, appends to a paged cache, and attends to it.
//!
//! Sequences join when a row of the batch and pages for all of their tokens are free, and leave
//! when they are done. A prompt is one step of many tokens; each later step runs in the smallest
//! bucket (1, 2, 4, … sequences) that holds everybody. On a GPU each bucket is captured once as a
//! CUDA graph. A replay reads tokens, lengths and block tables from the tensors of its `Step`, so
//! joining and leaving change data, never the graph. A row without a sequence has length 0: it
//! attends to nothing and appends nothing. Embedding and choice of tokens run on the host, so a
//! step ends with a copy of the logits, which the times include.
//!
//! At the end each sequence is computed again in one step with a cache of its own. A token whose
//! logit is lower than the best one by more than rounding explains is an error.
//! `examples/generation_with_torch.py` of the repository times the same step in PyTorch.
#![forbid(unsafe_code)]

use blockflash_bench::io::Array;
use blockflash_bench::random;
use blockflash_ops::{
    Activation, AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace,
    BsrMatmul, BsrMatrix, BsrWorkspace, CacheAccess, DType, Device, Graph, KvCacheMut, Mask,
    Result, Rotary, RotaryPairs, Stream, Tensor,
};
use clap::Parser;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

const HEAD_DIM: usize = 64;
const PAGE: usize = 16;
/// Rows and columns of the blocks of weights, which divides all of their sizes.
const BLOCK: usize = 64;

/// Generates from a transformer with random weights.
#[derive(Parser)]
struct Args {
    /// Layers
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Heads of queries, a multiple of those of keys
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Heads of keys and values
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Tokens that exist, a multiple of 64
    #[arg(long, default_value_t = 1024)]
    vocabulary: usize,
    /// Sequences to generate
    #[arg(long, default_value_t = 48)]
    sequences: usize,
    /// Most sequences at a time, rounded up to a power of 2
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Most tokens of a prompt, and most tokens that follow it
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Seed of weights and prompts
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

fn run(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let Args { layers, heads, kv_heads, vocabulary, sequences, batch, tokens, .. } = *args;
    let positive = ![layers, heads, kv_heads, vocabulary, sequences, batch].contains(&0);
    if !positive || tokens < 2 || vocabulary % BLOCK > 0 {
        return Err("sizes are positive, --tokens 2 or more, --vocabulary a multiple of 64".into());
    }
    let device = args.device.unwrap_or_else(Device::best);
    let dtype = if device.is_cpu() { DType::F32 } else { DType::BF16 };
    let stream = &device.stream()?;
    let model = Model::new(args, dtype, stream)?;
    let (done, tallies) = serve(&model, args, stream)?;

    println!("{device} in {dtype}, {layers} layers, {heads} heads");
    println!("step            steps   tokens  ms/step  tokens/s");
    for (batch, [steps, tokens, seconds]) in tallies {
        let what = if batch == 0 { "prompt".to_owned() } else { format!("batch of {batch}") };
        let (ms, rate) = (seconds * 1e3 / steps, tokens / seconds);
        println!("{what:<14} {steps:>6} {tokens:>8} {ms:>8.3} {rate:>9.0}");
    }
    let [mut equal, mut tied] = [0; 2];
    let gaps = done.iter().map(|sequence| model.gaps(sequence, stream));
    for gap in gaps.collect::<Result<Vec<_>>>()?.concat() {
        let rounding = if dtype == DType::F32 { 1e-4 } else { 0.03 };
        match gap {
            0.0 => equal += 1,
            gap if gap <= rounding => tied += 1,
            _ => return Err(format!("the logit of a token is {gap} below the best").into()),
        }
    }
    println!("in one step: {equal} tokens equal, {tied} tied");
    Ok(())
}

/// Steps, tokens and seconds: of prompts at 0, else by the size of the bucket.
type Tallies = BTreeMap<usize, [f64; 3]>;

/// Generates all sequences, as many at a time as there are rows and pages for.
fn serve(model: &Model, args: &Args, stream: &Stream) -> Result<(Vec<Sequence>, Tallies)> {
    // Not enough pages for all rows at once: sequences wait for pages, too.
    let pages = model.max_pages * args.batch.div_ceil(2);
    let mut free: Vec<i32> = (0..pages as i32).rev().collect();
    let mut cache = model.cache(pages, stream)?;
    let mut buckets = BTreeMap::new();
    for batch in (0..=args.batch.next_power_of_two().ilog2()).map(|bits| 1 << bits) {
        let mut step = model.step(batch, 1, stream)?;
        // The first run loads kernels. No row has a sequence yet, so the cache stays.
        model.forward(&mut step, &mut cache, stream)?;
        let capture = |stream: &Stream| model.forward(&mut step, &mut cache, stream);
        let graph = (!stream.device().is_cpu()).then(|| stream.capture(capture)).transpose()?;
        buckets.insert(batch, (step, graph));
    }
    let (mut waiting, mut running, mut done) = (prompts(args), Vec::new(), Vec::new());
    let mut tallies = Tallies::new();
    let mut count = |bucket, tokens: usize, start: Instant| {
        let tally: &mut [f64; 3] = tallies.entry(bucket).or_default();
        let more = [1.0, tokens as f64, start.elapsed().as_secs_f64()];
        tally.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    };
    while !(waiting.is_empty() && running.is_empty()) {
        // Sequences join: a step of all tokens of the prompt.
        while running.len() < args.batch
            && let Some(needed) = waiting.front().map(|next: &Sequence| next.end.div_ceil(PAGE))
            && let Some(kept) = free.len().checked_sub(needed)
            && let Some(mut sequence) = waiting.pop_front()
        {
            let start = Instant::now();
            sequence.pages = free.split_off(kept);
            let mut step = (model.step(1, sequence.prompt, stream)?, None);
            model.advance(&mut step, std::slice::from_mut(&mut sequence), &mut cache, stream)?;
            count(0, sequence.prompt, start);
            running.push(sequence);
        }
        // All of them get one more token.
        if let Some((&batch, bucket)) = buckets.range_mut(running.len().max(1)..).next() {
            let start = Instant::now();
            model.advance(bucket, &mut running, &mut cache, stream)?;
            count(batch, running.len(), start);
        }
        // And leave.
        for mut sequence in running.extract_if(.., |one| one.tokens.len() >= one.end) {
            free.append(&mut sequence.pages);
            done.push(sequence);
        }
    }
    Ok((done, tallies))
}

/// A sequence: its prompt, and then what was generated.
struct Sequence {
    tokens: Vec<u32>,
    prompt: usize,
    /// Its length at the end.
    end: usize,
    /// The pages that hold its keys and values.
    pages: Vec<i32>,
}

/// Prompts of random tokens, of many lengths.
fn prompts(args: &Args) -> VecDeque<Sequence> {
    let below = |word: i32, most: usize| word as u32 as usize % most;
    let sequence = |at| {
        let lengths = random::words(2, args.seed ^ (1 << 32 | at));
        let prompt = 1 + below(lengths[0], args.tokens);
        let words = random::words(prompt, args.seed ^ (2 << 32 | at));
        let tokens = words.into_iter().map(|word| below(word, args.vocabulary) as u32).collect();
        let end = prompt + 2 + below(lengths[1], args.tokens - 1);
        Sequence { tokens, prompt, end, pages: Vec::new() }
    };
    (0..args.sequences as u64).map(sequence).collect()
}

struct Model {
    /// Of each layer Wqkv, Wo, Wup and Wdown; then that of the logits.
    weights: Vec<BsrMatrix>,
    embedding: Vec<f32>,
    /// Cosines and sines of rotary embeddings, `[capacity, HEAD_DIM / 2]`.
    tables: [Tensor; 2],
    workspace: BsrWorkspace,
    heads: [usize; 2],
    vocabulary: usize,
    /// Pages of the longest sequence.
    max_pages: usize,
    dtype: DType,
}

/// Keys and values of each layer, `[pages, PAGE, heads, HEAD_DIM]`.
type Cache = Vec<[Tensor; 2]>;

/// Tensors of a step, `[batch, tokens, heads, dim]`. A captured graph keeps using them.
struct Step {
    x: Tensor,
    qkv: Tensor,
    o: Tensor,
    inner: Tensor,
    logits: Tensor,
    block_table: Tensor,
    seqused_kv: Tensor,
    workspace: AttentionDecodeWorkspace,
}

impl Model {
    fn new(args: &Args, dtype: DType, stream: &Stream) -> Result<Self> {
        let heads = [args.heads, args.kv_heads];
        let width = args.heads * HEAD_DIM;
        let qkv = width + 2 * args.kv_heads * HEAD_DIM;
        let gain = 0.5 / args.layers as f32;
        let out = (width, width, gain);
        let layer = [(qkv, width, 1.0), out, (4 * width, width, 1.0), (width, 4 * width, gain)];
        let sizes = layer.repeat(args.layers).into_iter().chain([(args.vocabulary, width, 4.0)]);
        let matrix = |(seed, (outputs, inputs, gain)): (u64, (usize, usize, f32))| {
            let (rows, cols) = (outputs / BLOCK, inputs / BLOCK);
            let blocks: Vec<_> =
                (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
            let mut values = random::normals(outputs * inputs, args.seed ^ seed << 16);
            let deviation = (gain / inputs as f32).sqrt();
            values.iter_mut().for_each(|value| *value *= deviation);
            BsrMatrix::from_blocks(outputs, inputs, BLOCK, dtype, &blocks, &values)?.to(stream)
        };
        let max_pages = (2 * args.tokens).div_ceil(PAGE);
        let half = HEAD_DIM / 2;
        let table = |f: fn(f32) -> f32| {
            let angle = |at: usize| {
                let frequency = 10_000f32.powf(-((at % half) as f32) / half as f32);
                f((at / half) as f32 * frequency)
            };
            let angles: Vec<f32> = (0..max_pages * PAGE * half).map(angle).collect();
            Tensor::from_slice(stream, &angles, &[max_pages * PAGE, half])
        };
        Ok(Self {
            weights: (1..).zip(sizes).map(matrix).collect::<Result<_>>()?,
            embedding: random::normals(args.vocabulary * width, args.seed),
            tables: [table(f32::cos)?, table(f32::sin)?],
            workspace: BsrWorkspace::new(stream)?,
            heads,
            vocabulary: args.vocabulary,
            max_pages,
            dtype,
        })
    }

    fn cache(&self, pages: usize, stream: &Stream) -> Result<Cache> {
        let shape = [pages, PAGE, self.heads[1], HEAD_DIM];
        let tensor = || Tensor::zeros(stream, self.dtype, &shape);
        (0..self.weights.len() / 4).map(|_| Ok([tensor()?, tensor()?])).collect()
    }

    fn step(&self, batch: usize, tokens: usize, stream: &Stream) -> Result<Step> {
        let [heads, heads_kv] = self.heads;
        let tensor = |dtype, heads, dim| Tensor::zeros(stream, dtype, &[batch, tokens, heads, dim]);
        let mut step = Step {
            x: tensor(self.dtype, heads, HEAD_DIM)?,
            qkv: tensor(self.dtype, heads + 2 * heads_kv, HEAD_DIM)?,
            o: tensor(self.dtype, heads, HEAD_DIM)?,
            inner: tensor(self.dtype, 4 * heads, HEAD_DIM)?,
            logits: tensor(DType::F32, 1, self.vocabulary)?,
            block_table: Tensor::zeros(stream, DType::I32, &[batch, self.max_pages])?,
            seqused_kv: Tensor::zeros(stream, DType::I32, &[batch])?,
            workspace: AttentionDecodeWorkspace::new(stream, 0)?,
        };
        // The size does not depend on the number of pages.
        let mut cache = self.cache(1, stream)?;
        let decode = AttentionDecode::new(step.qkv.view().slice(2, 0..heads)?);
        let cache = cache_of(&mut cache[0], [&step.block_table, &step.seqused_kv]);
        let bytes = decode.workspace_bytes(&cache.as_cache()?, stream.device())?;
        step.workspace = AttentionDecodeWorkspace::new(stream, bytes)?;
        Ok(step)
    }

    /// A step for these sequences: it computes as many of their last tokens as there is room for,
    /// and adds the likeliest next one.
    fn advance(
        &self,
        (step, graph): &mut (Step, Option<Graph>),
        sequences: &mut [Sequence],
        cache: &mut Cache,
        stream: &Stream,
    ) -> Result<()> {
        let &[batch, count, ..] = step.x.shape() else { return Ok(()) };
        let width = self.heads[0] * HEAD_DIM;
        let (mut x, mut table, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for Sequence { tokens, pages, .. } in &*sequences {
            for &token in &tokens[tokens.len() - count..] {
                x.extend(&self.embedding[token as usize * width..][..width]);
            }
            table.extend(pages);
            lengths.push(tokens.len() as i32);
            // Entries behind its last page are not used.
            table.resize(lengths.len() * self.max_pages, 0);
        }
        x.resize(batch * count * width, 0.0);
        table.resize(batch * self.max_pages, 0);
        lengths.resize(batch, 0);
        // The shape has as many elements as there are values.
        let x = Array::rounded(step.x.shape(), &x, self.dtype).unwrap_or_else(|| Array::from(x));
        step.x.copy_from(stream, &x.upload(stream)?)?;
        step.block_table.copy_from_slice(stream, &table)?;
        step.seqused_kv.copy_from_slice(stream, &lengths)?;
        match graph {
            Some(graph) => graph.launch(stream)?,
            None => self.forward(step, cache, stream)?,
        }
        let logits = step.logits.to_vec::<f32>(stream)?;
        let last_rows = logits.chunks(self.vocabulary).skip(count - 1).step_by(count);
        for (sequence, logits) in sequences.iter_mut().zip(last_rows) {
            sequence.tokens.push(likeliest(logits) as u32);
        }
        Ok(())
    }

    /// `to = activation(from·wᵀ + beta·to)`
    fn product(
        &self,
        at: usize,
        (from, to): (&Tensor, &mut Tensor),
        (activation, beta): (Activation, f32),
        stream: &Stream,
    ) -> Result<()> {
        let rows = from.view().flatten(2..4)?.flatten(0..2)?;
        let columns = to.view_mut().flatten(2..4)?.flatten(0..2)?.permute(&[1, 0])?;
        let linear = BsrMatmul::linear(rows, &self.weights[at])?;
        let workspace = Some(&self.workspace);
        BsrMatmul { activation, beta, workspace, ..linear }.matmul_into(columns, stream)
    }

    /// Queues a step: appends keys and values to the cache, and leaves logits of the tokens that
    /// follow. On a GPU a graph can capture it.
    fn forward(&self, step: &mut Step, cache: &mut Cache, stream: &Stream) -> Result<()> {
        let (set, add) = ((Activation::None, 0.0), (Activation::None, 1.0));
        let [heads, heads_kv] = self.heads;
        for (layer, cache) in cache.iter_mut().enumerate() {
            self.product(4 * layer, (&step.x, &mut step.qkv), set, stream)?;
            let part = |first, heads| step.qkv.view().slice(2, first..first + heads);
            let (k, v) = (part(heads, heads_kv)?, part(heads + heads_kv, heads_kv)?);
            let [cos, sin] = self.tables.each_ref().map(Tensor::view);
            let rotary = Some(Rotary { cos, sin, pairs: RotaryPairs::Halves });
            let (scores, workspace) = (Mask::causal().into(), Some(&step.workspace));
            let query = AttentionDecode::new(part(0, heads)?);
            let decode = AttentionDecode { scores, rotary, workspace, ..query };
            let new = AppendKv { rotary, ..AppendKv::new(k, v) };
            let cache = cache_of(cache, [&step.block_table, &step.seqused_kv]);
            let cache = CacheAccess::Append(&new, cache);
            let operands = AttentionDecodeOperands { cache, o: step.o.view_mut(), lse: None };
            decode.forward_into(operands, stream)?;
            self.product(4 * layer + 1, (&step.o, &mut step.x), add, stream)?;
            let gelu = (Activation::Gelu, 0.0);
            self.product(4 * layer + 2, (&step.x, &mut step.inner), gelu, stream)?;
            self.product(4 * layer + 3, (&step.inner, &mut step.x), add, stream)?;
        }
        self.product(self.weights.len() - 1, (&step.x, &mut step.logits), set, stream)
    }

    /// Computes a sequence in one step: how far the logit of each generated token is below the best
    /// one, relative to that.
    fn gaps(&self, sequence: &Sequence, stream: &Stream) -> Result<Vec<f32>> {
        let tokens = sequence.tokens[..sequence.tokens.len() - 1].to_vec();
        let pages = (0..self.max_pages as i32).collect();
        let mut step = (self.step(1, tokens.len(), stream)?, None);
        let mut again = [Sequence { tokens, pages, ..*sequence }];
        self.advance(&mut step, &mut again, &mut self.cache(self.max_pages, stream)?, stream)?;
        let logits = step.0.logits.to_vec::<f32>(stream)?;
        let rows = logits.chunks(self.vocabulary).zip(&sequence.tokens[1..]);
        let gap = |(row, &token): (&[f32], &u32)| {
            let best = row[likeliest(row)];
            (best - row[token as usize]) / best.abs()
        };
        Ok(rows.skip(sequence.prompt - 1).map(gap).collect())
    }
}

/// The index of the largest logit.
fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}

fn cache_of<'a>(cache: &'a mut [Tensor; 2], [table, lengths]: [&'a Tensor; 2]) -> KvCacheMut<'a> {
    let [k, v] = cache.each_mut().map(Tensor::view_mut);
    let (block_table, seqused_kv) = (Some(table.view()), Some(lengths.view()));
    KvCacheMut { block_table, seqused_kv, ..KvCacheMut::new(k, v) }
}
