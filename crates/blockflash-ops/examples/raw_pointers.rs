//! Attention inside of an engine that has memory, a stream and CUDA graphs of its own, here those
//! of cudarc: blockflash gets addresses, and queues its kernels between those of the engine.
//!
//! ```text
//! cargo run --release -p blockflash-ops --example raw_pointers              on a GPU, else the CPU
//! cargo run --release -p blockflash-ops --example raw_pointers -- --cpu
//! ```
//!
//! Two sequences of unequal length: attention of the prompts to themselves, an append of their keys
//! and values to a paged cache, and then a step for each further token, which appends and attends.
//! The engine captures that step once and replays it: a replay reads lengths and block table from
//! the memory in which the engine has written them. On the CPU the same calls get addresses of the
//! host. Every row is compared with attention in f64.

use blockflash_ops::{
    AppendKv, Attention, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace,
    CacheAccess, CuSeqlens, DType, Device, KvCacheMut, Layout, Mask, PackedTokens, Stream, View,
    ViewMut,
};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits};
use half::bf16;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 64;
const PROMPTS: [usize; 2] = [37, 5];
const STEPS: usize = 30;
/// Slots of a page, and the pages of each sequence.
const PAGE: usize = 16;
const BLOCK_TABLE: [i32; 10] = [7, 2, 9, 0, 5, 3, 8, 1, 6, 4];

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        None => run(Device::best()),
        Some("--cpu") => run(Device::cpu()),
        Some(other) => Err(format!("{other} is given, expected --cpu or nothing").into()),
    }
}

#[test]
fn host_pointers_give_the_results_too() -> Result<()> {
    run(Device::cpu())
}

fn run(device: Device) -> Result<()> {
    let engine = Engine::new(device)?;
    let stream = engine.stream()?;
    let sequences = PROMPTS.map(|prompt| Sequence::new(prompt, prompt + STEPS));

    // What the engine has: a cache `[pages, heads, slots, head_dim]`, block table and lengths.
    let mut cache = Cache {
        k: engine.buffer(BLOCK_TABLE.len() * HEADS_KV * PAGE * DIM)?,
        v: engine.buffer(BLOCK_TABLE.len() * HEADS_KV * PAGE * DIM)?,
        block_table: engine.filled(&BLOCK_TABLE)?,
        lengths: engine.buffer(PROMPTS.len())?,
    };

    // Captured while all lengths are 0: the first call loads kernels, and appends nothing.
    let mut step = Step::new(&engine, &mut cache, &stream)?;
    step.queue(&mut cache, &stream)?;
    let graph = match &engine.cuda {
        None => None,
        Some(cuda) => {
            cuda.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            let queued = step.queue(&mut cache, &stream);
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = cuda.end_capture(flags)?; // also after an error, or the stream is lost
            queued?;
            graph
        }
    };

    // The prompts, one after another in one call.
    engine.write(&mut cache.lengths, &PROMPTS.map(|prompt| prompt as i32))?;
    let total: usize = PROMPTS.iter().sum();
    let [q, k, v] = rows(&sequences, |sequence| 0..sequence.prompt);
    let (q, k, v) = (engine.filled(&q)?, engine.filled(&k)?, engine.filled(&v)?);
    let mut o = engine.buffer::<u16>(total * HEADS * DIM)?;
    let offsets = engine.filled(&[0, PROMPTS[0] as i32, total as i32])?;
    let cu_seqlens = offsets.view(Layout::contiguous(&[3])?)?;
    let max_seqlen = PROMPTS[0].max(PROMPTS[1]);
    let new = Layout::contiguous(&[total, HEADS_KV, DIM])?;
    let (queries, k, v) = (Layout::contiguous(&[total, HEADS, DIM])?, k.view(new)?, v.view(new)?);
    let attention = Attention {
        cu_seqlens: Some(CuSeqlens {
            q: cu_seqlens,
            kv: cu_seqlens,
            max_seqlen_q: max_seqlen,
            max_seqlen_kv: max_seqlen,
        }),
        scores: Mask::causal().into(),
        ..Attention::new(q.view(queries)?, k, v)
    };
    attention.forward_into(o.view_mut(queries)?, None, &stream)?;
    let packed = Some(PackedTokens { cu_seqlens, max_seqlen });
    AppendKv { packed, ..AppendKv::new(k, v) }.append_into(cache.access()?, &stream)?;
    let mut worst = error(&sequences, |sequence| 0..sequence.prompt, &engine.read(&o)?);

    // Further tokens: the engine writes new rows and lengths, and launches its graph.
    for at in 0..STEPS {
        let token = |sequence: &Sequence| sequence.prompt + at..sequence.prompt + at + 1;
        let [q, k, v] = rows(&sequences, token);
        engine.write(&mut step.q, &q)?;
        engine.write(&mut step.k, &k)?;
        engine.write(&mut step.v, &v)?;
        engine.write(&mut cache.lengths, &PROMPTS.map(|prompt| (prompt + at + 1) as i32))?;
        match &graph {
            Some(graph) => graph.launch()?,
            None => step.queue(&mut cache, &stream)?,
        }
        worst = worst.max(error(&sequences, token, &engine.read(&step.o)?));
    }
    let how = if graph.is_some() { "replays of a graph" } else { "calls" };
    println!("{device}: {} prompts, {STEPS} {how}, error at most {worst:.5}", PROMPTS.len());
    // Values are below 1, and a result has 8 bits.
    if worst < 0.01 { Ok(()) } else { Err(format!("the error is {worst}, expected 0.01").into()) }
}

/// An engine: a device, and its stream on a GPU.
struct Engine {
    device: Device,
    cuda: Option<Arc<CudaStream>>,
}

/// Memory of the engine.
struct Buffer<T> {
    device: Device,
    dtype: DType,
    memory: Memory<T>,
}

enum Memory<T> {
    Host(Vec<T>),
    Cuda(CudaSlice<T>),
}

/// Elements: i32, and the bits of bf16.
trait Element: DeviceRepr + ValidAsZeroBits + Copy + Default {
    const DTYPE: DType;
}

impl Element for i32 {
    const DTYPE: DType = DType::I32;
}

impl Element for u16 {
    const DTYPE: DType = DType::BF16;
}

impl Engine {
    fn new(device: Device) -> Result<Engine> {
        let cuda = match device.cuda_properties() {
            None => None,
            Some(gpu) => {
                let context = CudaContext::new(gpu.ordinal)?;
                // SAFETY: all memory is used on one stream. (Events that cudarc records in a
                // capture could not be waited for afterwards.)
                unsafe { context.disable_event_tracking() };
                Some(context.new_stream()?)
            }
        };
        Ok(Engine { device, cuda })
    }

    /// The engine's stream, for blockflash.
    fn stream(&self) -> Result<Stream> {
        let Some(cuda) = &self.cuda else { return Ok(self.device.stream()?) };
        // SAFETY: 1. A stream of the primary context, which cudarc uses. 2. The engine is dropped
        // after all that is made of it. 3. Buffers and workspace of the captured step outlive the
        // graph, whose launches are in the order of one stream.
        Ok(unsafe { Stream::from_raw(&self.device, cuda.cu_stream().cast())? })
    }

    fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let memory = match &self.cuda {
            None => Memory::Host(vec![T::default(); len]),
            Some(cuda) => Memory::Cuda(cuda.alloc_zeros(len)?),
        };
        Ok(Buffer { device: self.device, dtype: T::DTYPE, memory })
    }

    fn filled<T: Element>(&self, elements: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.buffer(elements.len())?;
        self.write(&mut buffer, elements)?;
        Ok(buffer)
    }

    /// Writes all elements, in the order of the stream.
    fn write<T: Element>(&self, buffer: &mut Buffer<T>, elements: &[T]) -> Result<()> {
        match (&mut buffer.memory, &self.cuda) {
            (Memory::Host(memory), _) => memory.copy_from_slice(elements),
            (Memory::Cuda(memory), Some(cuda)) => cuda.memcpy_htod(elements, memory)?,
            (Memory::Cuda(_), None) => unreachable!("memory of another engine"),
        }
        Ok(())
    }

    /// All elements, when the work that is queued by now is done.
    fn read<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        match (&buffer.memory, &self.cuda) {
            (Memory::Host(memory), _) => Ok(memory.clone()),
            (Memory::Cuda(memory), Some(cuda)) => {
                let elements = cuda.clone_dtoh(memory)?;
                cuda.synchronize()?;
                Ok(elements)
            }
            (Memory::Cuda(_), None) => unreachable!("memory of another engine"),
        }
    }
}

impl<T> Buffer<T> {
    fn len(&self) -> usize {
        match &self.memory {
            Memory::Host(memory) => memory.len(),
            Memory::Cuda(memory) => memory.len(),
        }
    }

    /// All elements, for reading.
    fn view(&self, layout: Layout) -> Result<View<'_>> {
        assert_eq!(layout.span(), self.len());
        let address = match &self.memory {
            Memory::Host(memory) => memory.as_ptr().expose_provenance(),
            Memory::Cuda(memory) => memory.device_ptr(memory.stream()).0 as usize,
        };
        // SAFETY: 1. The layout spans the elements of the buffer. 2. It is borrowed on the CPU; on
        // a GPU all uses are in the order of one stream, and it outlives the graph.
        let view = unsafe {
            View::from_raw(&self.device, with_exposed_provenance(address), self.dtype, layout)
        };
        Ok(view?)
    }

    /// All elements, for writing.
    fn view_mut(&mut self, layout: Layout) -> Result<ViewMut<'_>> {
        assert_eq!(layout.span(), self.len());
        let address = match &mut self.memory {
            Memory::Host(memory) => memory.as_mut_ptr().expose_provenance(),
            Memory::Cuda(memory) => memory.device_ptr(memory.stream()).0 as usize,
        };
        // SAFETY: as above, borrowed alone.
        let view = unsafe {
            let address = with_exposed_provenance_mut(address);
            ViewMut::from_raw(&self.device, address, self.dtype, layout)
        };
        Ok(view?)
    }
}

struct Cache {
    k: Buffer<u16>,
    v: Buffer<u16>,
    block_table: Buffer<i32>,
    lengths: Buffer<i32>,
}

impl Cache {
    /// `[pages, slots, heads, head_dim]` by strides, whatever the order of slots and heads is.
    fn access(&mut self) -> Result<KvCacheMut<'_>> {
        let pages = BLOCK_TABLE.len();
        let shape = [pages, PAGE, HEADS_KV, DIM];
        let layout = Layout::strided(&shape, &[HEADS_KV * PAGE * DIM, DIM, PAGE * DIM, 1])?;
        let table = Layout::contiguous(&[PROMPTS.len(), pages / PROMPTS.len()])?;
        let lengths = Layout::contiguous(&[PROMPTS.len()])?;
        Ok(KvCacheMut {
            block_table: Some(self.block_table.view(table)?),
            seqused_kv: Some(self.lengths.view(lengths)?),
            ..KvCacheMut::new(self.k.view_mut(layout)?, self.v.view_mut(layout)?)
        })
    }
}

/// A step of one token for each sequence.
struct Step {
    q: Buffer<u16>,
    k: Buffer<u16>,
    v: Buffer<u16>,
    o: Buffer<u16>,
    workspace: AttentionDecodeWorkspace,
}

impl Step {
    const Q: [usize; 4] = [PROMPTS.len(), 1, HEADS, DIM];
    const KV: [usize; 4] = [PROMPTS.len(), 1, HEADS_KV, DIM];

    fn new(engine: &Engine, cache: &mut Cache, stream: &Stream) -> Result<Step> {
        let [q_len, kv_len] = [Self::Q, Self::KV].map(|shape| shape.iter().product());
        let q = engine.buffer(q_len)?;
        let decode = AttentionDecode::new(q.view(Layout::contiguous(&Self::Q)?)?);
        let bytes = decode.workspace_bytes(&cache.access()?.as_cache()?, stream.device())?;
        Ok(Step {
            k: engine.buffer(kv_len)?,
            v: engine.buffer(kv_len)?,
            o: engine.buffer(q_len)?,
            workspace: AttentionDecodeWorkspace::new(stream, bytes)?,
            q,
        })
    }

    /// Appends and attends: nothing is allocated, and nobody waits.
    fn queue(&mut self, cache: &mut Cache, stream: &Stream) -> Result<()> {
        let [q, kv] = [Layout::contiguous(&Self::Q)?, Layout::contiguous(&Self::KV)?];
        let new = AppendKv::new(self.k.view(kv)?, self.v.view(kv)?);
        let cache = CacheAccess::Append(&new, cache.access()?);
        let operands = AttentionDecodeOperands { cache, o: self.o.view_mut(q)?, lse: None };
        let decode = AttentionDecode {
            scores: Mask::causal().into(),
            workspace: Some(&self.workspace),
            ..AttentionDecode::new(self.q.view(q)?)
        };
        Ok(decode.forward_into(operands, stream)?)
    }
}

/// The rows of a sequence, `[tokens, heads, head_dim]`.
struct Sequence {
    prompt: usize,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Sequence {
    /// Made-up values between -1 and 1.
    fn new(prompt: usize, tokens: usize) -> Sequence {
        let rows = |seed: u32, heads: usize| {
            let value = |at: usize| {
                let hash = (at as u32 ^ seed << 20).wrapping_mul(0x9e37_79b1);
                bf16::from_f32((hash >> 8) as f32 / 8_388_608.0 - 1.0)
            };
            (0..tokens * heads * DIM).map(value).collect()
        };
        let (seed, heads) = (prompt as u32, HEADS_KV);
        Sequence {
            prompt,
            q: rows(seed, HEADS),
            k: rows(seed + 1, heads),
            v: rows(seed + 2, heads),
        }
    }

    /// A row of the output, `[heads, head_dim]`: attention of a token to those up to it, in f64.
    fn attended(&self, token: usize) -> Vec<f64> {
        let row =
            |of: &[bf16], at: usize| of[at * DIM..][..DIM].iter().map(|x| x.to_f64()).collect();
        let mut o = Vec::with_capacity(HEADS * DIM);
        for head in 0..HEADS {
            let kv =
                |of: &[bf16], at| -> Vec<f64> { row(of, at * HEADS_KV + head * HEADS_KV / HEADS) };
            let q: Vec<f64> = row(&self.q, token * HEADS + head);
            let score = |at| {
                let products = q.iter().zip(kv(&self.k, at)).map(|(q, k)| q * k);
                (products.sum::<f64>() / (DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (0..=token).map(score).collect();
            let sum: f64 = weights.iter().sum();
            let mut mean = [0.0; DIM];
            for (at, weight) in weights.into_iter().enumerate() {
                let v = kv(&self.v, at);
                mean.iter_mut().zip(v).for_each(|(mean, v)| *mean += weight / sum * v);
            }
            o.extend(mean);
        }
        o
    }
}

/// The bits of q, k and v of some tokens of each sequence.
fn rows(sequences: &[Sequence], tokens: impl Fn(&Sequence) -> Range<usize>) -> [Vec<u16>; 3] {
    let of = |pick: fn(&Sequence) -> &[bf16], heads: usize| {
        let part = |sequence| {
            let Range { start, end } = tokens(sequence);
            pick(sequence)[start * heads * DIM..end * heads * DIM].iter().map(|x| x.to_bits())
        };
        sequences.iter().flat_map(part).collect()
    };
    [of(|s| &s.q, HEADS), of(|s| &s.k, HEADS_KV), of(|s| &s.v, HEADS_KV)]
}

/// The largest distance of an output of these tokens, NaN as infinity.
fn error(sequences: &[Sequence], tokens: impl Fn(&Sequence) -> Range<usize>, o: &[u16]) -> f64 {
    let expected = sequences.iter().flat_map(|s| tokens(s).flat_map(|token| s.attended(token)));
    let distance = |(&bits, expected): (&u16, f64)| {
        let distance = (bf16::from_bits(bits).to_f64() - expected).abs();
        if distance.is_nan() { f64::INFINITY } else { distance }
    };
    o.iter().zip(expected).map(distance).fold(0.0, f64::max)
}
