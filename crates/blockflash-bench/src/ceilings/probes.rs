//! The probes with their inputs: verified with a few iterations, then timed with many.

use super::oracle::{EXP2_SUM, Element, Expected, mma, wgmma};
use crate::error::{Error, Result};
use crate::random;
use crate::timing::{Cache, Repeat, Window};
use blockflash_ops::{CudaProperties, DType, Kernel, Stream, Tensor};
use blockflash_safe::PROBE_CHUNK_BYTES;
use blockflash_sys::manifest::Variant;
use blockflash_sys::{Probe, manifest};

/// A measured limit. HBM stands for device memory of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Ceiling {
    MmaF16,
    MmaBf16,
    MmaE4m3,
    WgmmaF16,
    WgmmaBf16,
    WgmmaE4m3,
    Exp2,
    HbmRead,
    HbmCopy,
    L2Read,
    /// Bulk copies from L2 into shared memory.
    L2Bulk,
}

const ALL: [(Ceiling, Probe); 11] = [
    (Ceiling::WgmmaF16, Probe::WgmmaF16),
    (Ceiling::WgmmaBf16, Probe::WgmmaBf16),
    (Ceiling::WgmmaE4m3, Probe::WgmmaE4m3),
    (Ceiling::MmaF16, Probe::MmaF16),
    (Ceiling::MmaBf16, Probe::MmaBf16),
    (Ceiling::MmaE4m3, Probe::MmaE4m3),
    (Ceiling::Exp2, Probe::Exp2),
    (Ceiling::HbmRead, Probe::Read),
    (Ceiling::HbmCopy, Probe::Copy),
    (Ceiling::L2Read, Probe::Read),
    (Ceiling::L2Bulk, Probe::Bulk),
];

impl Ceiling {
    /// Name in records.
    pub const fn name(self) -> &'static str {
        match self {
            Ceiling::MmaF16 => "mma_f16",
            Ceiling::MmaBf16 => "mma_bf16",
            Ceiling::MmaE4m3 => "mma_e4m3",
            Ceiling::WgmmaF16 => "wgmma_f16",
            Ceiling::WgmmaBf16 => "wgmma_bf16",
            Ceiling::WgmmaE4m3 => "wgmma_e4m3",
            Ceiling::Exp2 => "exp2",
            Ceiling::HbmRead => "hbm_read",
            Ceiling::HbmCopy => "hbm_copy",
            Ceiling::L2Read => "l2_read",
            Ceiling::L2Bulk => "l2_bulk",
        }
    }

    /// Unit of the rate.
    pub const fn unit(self) -> &'static str {
        match self {
            Ceiling::Exp2 => "exp/s",
            Ceiling::HbmRead | Ceiling::HbmCopy | Ceiling::L2Read | Ceiling::L2Bulk => "B/s",
            _ => "FLOP/s",
        }
    }

    const fn is_of_memory(self) -> bool {
        matches!(self, Ceiling::HbmRead | Ceiling::HbmCopy)
    }
}

/// Size in bytes of an input that exceeds every L2 cache.
const MEMORY_BYTES: usize = 512 << 20;
/// Iterations or passes after which the result is compared.
const FEW: u32 = 3;
/// Tolerance of a sum, relative to the sum of magnitudes. FP8 products on Hopper accumulate with 14
/// bits.
const TOLERANCE: f64 = 5e-4;

/// A probe that is prepared and ready for its windows.
#[derive(Debug)]
pub struct Probed {
    /// The ceiling that it measures.
    pub ceiling: Ceiling,
    /// Units of work of one launch.
    pub work: f64,
    /// Whether the result matched the expected one.
    pub verified: bool,
    /// Name of the kernel.
    pub symbol: String,
    stream: Stream,
    operands: Operands,
    repeat: Repeat,
}

impl Probed {
    /// Runs one window. Returns when the device is idle.
    ///
    /// # Errors
    /// If the device fails.
    pub fn window(&mut self, ms: f64) -> Result<Window> {
        let Self { stream, operands, repeat, .. } = self;
        repeat.window(stream, ms, |stream| operands.launch(stream, operands.iterations))
    }

    /// Number of launches in one CUDA graph.
    pub fn launches(&self) -> usize {
        self.repeat.launches()
    }
}

/// Prepares every ceiling whose probe runs on the GPU of the stream.
pub(super) fn prepare(stream: &Stream) -> Result<Vec<Probed>> {
    let Some(gpu) = stream.device().cuda_properties() else { return Ok(Vec::new()) };
    let kernel = |probe: Probe| {
        let runs = |kernel: &&Kernel| kernel.target.runs_on(gpu.compute_capability);
        manifest::kernels()
            .iter()
            .filter(runs)
            .find(|kernel| kernel.variant == Variant::Probe(probe))
    };
    let of =
        |(ceiling, probe): (Ceiling, Probe)| Some(probed(kernel(probe)?, ceiling, gpu, stream));
    ALL.into_iter().filter_map(of).collect()
}

/// Runs the probe of a kernel and compares its output; returns the number of compared words.
///
/// # Errors
/// [`Error::Option`] says what is wrong.
pub fn verify(kernel: &'static Kernel, stream: &Stream) -> Result<usize> {
    let wrong = |what: &str| Error::Option(format!("{}: {what}", kernel.symbol()));
    let gpu = stream.device().cuda_properties().ok_or_else(|| wrong("runs on a GPU"))?;
    let Variant::Probe(probe) = kernel.variant else { return Err(wrong("is not a probe")) };
    let mut compared = 0;
    for (ceiling, _) in ALL.into_iter().filter(|(_, other)| *other == probe) {
        let mut operands = Operands::new(kernel, probe, ceiling, gpu, stream)?;
        if !operands.verify(stream)? {
            return Err(wrong("a result is wrong"));
        }
        compared += operands.output.shape().first().copied().unwrap_or(0);
    }
    Ok(compared)
}

fn probed(
    kernel: &'static Kernel,
    ceiling: Ceiling,
    gpu: &CudaProperties,
    stream: &Stream,
) -> Result<Probed> {
    let Variant::Probe(probe) = kernel.variant else {
        return Err(Error::Option(format!("{} is not a probe", kernel.symbol())));
    };
    let mut operands = Operands::new(kernel, probe, ceiling, gpu, stream)?;
    let verified = operands.verify(stream)?;
    let repeat =
        Repeat::new(stream, Cache::Warm, |stream| operands.launch(stream, operands.iterations))?;
    let (work, symbol) = (operands.work(), kernel.symbol());
    Ok(Probed { ceiling, work, verified, symbol, stream: stream.clone(), operands, repeat })
}

#[derive(Debug)]
struct Operands {
    kernel: &'static Kernel,
    probe: Probe,
    words: Vec<i32>,
    input: Tensor,
    output: Tensor,
    blocks: u32,
    /// Iterations of a timed launch, which takes a few hundred microseconds on a large GPU.
    iterations: u32,
}

impl Operands {
    fn new(
        kernel: &'static Kernel,
        probe: Probe,
        ceiling: Ceiling,
        gpu: &CudaProperties,
        stream: &Stream,
    ) -> Result<Self> {
        let bytes = match probe {
            _ if ceiling.is_of_memory() => MEMORY_BYTES.min(gpu.memory_bytes as usize / 8),
            // A quarter of L2, since a cache in two halves may hold data twice.
            Probe::Read | Probe::Bulk => gpu.l2_bytes as usize / 4,
            _ => 0,
        };
        let bytes = (bytes / PROBE_CHUNK_BYTES * PROBE_CHUNK_BYTES).max(4 * PROBE_CHUNK_BYTES);
        let words = match Element::of(probe) {
            None => random::words(bytes / 4, 1),
            Some(element) => {
                let values = random::normals(bytes / 4 * element.per_word(), 1);
                values.chunks(element.per_word()).map(|values| element.pack(values)).collect()
            }
        };
        let blocks = gpu.multiprocessors * probe.min_blocks();
        let passes = |bytes_in_all: usize| bytes_in_all.div_ceil(bytes) as u32;
        let iterations = match probe {
            Probe::MmaF16 | Probe::MmaBf16 | Probe::MmaE4m3 => 1500,
            Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 => 500,
            Probe::Exp2 => 1000,
            Probe::Read | Probe::Copy if ceiling.is_of_memory() => 1,
            Probe::Read | Probe::Copy => passes(1 << 30),
            Probe::Bulk => ((1 << 30) / PROBE_CHUNK_BYTES as u32).div_ceil(blocks),
        };
        let threads = (blocks * kernel.threads()) as usize;
        let output = if probe == Probe::Copy { words.len() } else { threads };
        Ok(Self {
            kernel,
            probe,
            input: Tensor::from_slice(stream, &words, &[words.len()])?,
            output: Tensor::empty(stream, DType::I32, &[output])?,
            words,
            blocks,
            iterations,
        })
    }

    fn launch(&mut self, stream: &Stream, iterations: u32) -> Result<()> {
        let Self { kernel, blocks, input, output, .. } = self;
        Ok(stream.launch_probe(kernel, *blocks, iterations, input.view(), output.view_mut())?)
    }

    /// Units of work of a timed launch.
    fn work(&self) -> f64 {
        let bytes = 4.0 * self.words.len() as f64;
        let warps = f64::from(self.blocks * self.kernel.threads() / 32);
        let each = match self.probe {
            // 16 products of 16 × 8 × 16 per iteration.
            Probe::MmaF16 | Probe::MmaBf16 => warps * 16.0 * 4096.0,
            Probe::MmaE4m3 => warps * 16.0 * 8192.0,
            // A warpgroup multiplies 64 × 256 × 64, or twice the depth for 8-bit types.
            Probe::WgmmaF16 | Probe::WgmmaBf16 => warps / 4.0 * 2.0 * 64.0 * 256.0 * 64.0,
            Probe::WgmmaE4m3 => warps / 4.0 * 2.0 * 64.0 * 256.0 * 128.0,
            Probe::Exp2 => warps * 32.0 * 16.0,
            Probe::Read => bytes,
            Probe::Copy => 2.0 * bytes,
            Probe::Bulk => f64::from(self.blocks) * PROBE_CHUNK_BYTES as f64,
        };
        each * f64::from(self.iterations)
    }

    fn verify(&mut self, stream: &Stream) -> Result<bool> {
        self.output.fill_bytes(stream, 0xFF)?;
        let few = if self.probe == Probe::Exp2 { 100 } else { FEW };
        self.launch(stream, few)?;
        let found = self.output.to_vec::<i32>(stream)?;
        let words = &self.words;
        let folded = |words: &[i32]| words.iter().fold(0, |fold, word| fold ^ word);
        let close = |expected: &[Expected]| {
            found.iter().enumerate().all(|(thread, &bits)| {
                let Expected { value, magnitude } = expected[thread % expected.len()];
                let (few, found) = (f64::from(few), f64::from(f32::from_bits(bits as u32)));
                (found - few * value).abs() <= TOLERANCE * few * magnitude
            })
        };
        Ok(match (self.probe, Element::of(self.probe)) {
            (Probe::MmaF16 | Probe::MmaBf16 | Probe::MmaE4m3, Some(element)) => {
                close(&mma(words, element))
            }
            (_, Some(element)) => close(&wgmma(words, element)),
            (Probe::Copy, _) => found == *words,
            // The input is read three times: an odd number, so the exclusive or of all words
            // remains.
            (Probe::Read, _) => folded(&found) == folded(words),
            (Probe::Bulk, _) => {
                let chunk_words = PROBE_CHUNK_BYTES / 4;
                let chunks = words.len() / chunk_words;
                let blocks = self.blocks as usize;
                let expected = |block: usize| {
                    let chunk = |i: usize| (block + i * blocks) % chunks * chunk_words;
                    (0..few as usize)
                        .fold(0, |fold, i| fold ^ folded(&words[chunk(i)..][..chunk_words]))
                };
                found
                    .chunks(self.kernel.threads() as usize)
                    .enumerate()
                    .all(|(block, of_block)| folded(of_block) == expected(block))
            }
            (Probe::Exp2, _) => {
                let value = |bits: i32| f64::from(f32::from_bits(bits as u32));
                found.iter().all(|&bits| (value(bits) - EXP2_SUM).abs() < 1e-4)
            }
            // Every other probe has an element type.
            _ => false,
        })
    }
}
