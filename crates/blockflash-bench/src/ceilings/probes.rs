//! The probes with their inputs: verified with a few iterations, then timed with many.

use super::expected::{EXP2_SUM, Element, Expected, mma, wgmma};
use crate::error::{Error, Result};
use crate::random;
use crate::timing::{Cache, Repeat, Window};
use blockflash_ops::{CudaProperties, DType, Kernel, Stream, Tensor};
use blockflash_safe::PROBE_CHUNK_BYTES;
use blockflash_sys::manifest::Variant;
use blockflash_sys::{Probe, manifest};

/// A measured limit. HBM stands for device memory of any kind, `l2_bulk` for bulk copies from L2
/// into shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ceiling {
    /// Name in records.
    pub name: &'static str,
    /// Unit of the rate: `FLOP/s`, `exp/s` or `B/s`.
    pub unit: &'static str,
    probe: Probe,
}

const fn ceiling(name: &'static str, unit: &'static str, probe: Probe) -> Ceiling {
    Ceiling { name, unit, probe }
}

const ALL: [Ceiling; 11] = [
    ceiling("wgmma_f16", "FLOP/s", Probe::WgmmaF16),
    ceiling("wgmma_bf16", "FLOP/s", Probe::WgmmaBf16),
    ceiling("wgmma_e4m3", "FLOP/s", Probe::WgmmaE4m3),
    ceiling("mma_f16", "FLOP/s", Probe::MmaF16),
    ceiling("mma_bf16", "FLOP/s", Probe::MmaBf16),
    ceiling("mma_e4m3", "FLOP/s", Probe::MmaE4m3),
    ceiling("exp2", "exp/s", Probe::Exp2),
    ceiling("hbm_read", "B/s", Probe::Read),
    ceiling("hbm_copy", "B/s", Probe::Copy),
    ceiling("l2_read", "B/s", Probe::Read),
    ceiling("l2_bulk", "B/s", Probe::Bulk),
];

/// Size in bytes of an input that exceeds every L2 cache.
const MEMORY_BYTES: usize = 512 << 20;
/// Iterations or passes after which the result is compared: an odd number.
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
    fn new(
        kernel: &'static Kernel,
        ceiling: Ceiling,
        gpu: &CudaProperties,
        stream: &Stream,
    ) -> Result<Self> {
        let mut operands = Operands::new(kernel, ceiling, gpu, stream)?;
        let verified = operands.verify(stream)?;
        let launch = |stream: &Stream| operands.launch(stream, operands.iterations);
        let repeat = Repeat::new(stream, Cache::Warm, launch)?;
        let (work, symbol, stream) = (operands.work(), kernel.symbol(), stream.clone());
        Ok(Self { ceiling, work, verified, symbol, stream, operands, repeat })
    }

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
    let of = |ceiling: Ceiling| {
        let kernel = manifest::kernels().iter().find(|kernel| {
            kernel.target.runs_on(gpu.compute_capability)
                && kernel.variant == Variant::Probe(ceiling.probe)
        });
        Some(Probed::new(kernel?, ceiling, gpu, stream))
    };
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
    for ceiling in ALL.into_iter().filter(|ceiling| ceiling.probe == probe) {
        let mut operands = Operands::new(kernel, ceiling, gpu, stream)?;
        if !operands.verify(stream)? {
            return Err(wrong("a result is wrong"));
        }
        compared += operands.output.shape().first().copied().unwrap_or(0);
    }
    Ok(compared)
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
        Ceiling { name, probe, .. }: Ceiling,
        gpu: &CudaProperties,
        stream: &Stream,
    ) -> Result<Self> {
        let of_memory = name.starts_with("hbm");
        let bytes = match probe {
            _ if of_memory => MEMORY_BYTES.min(gpu.memory_bytes as usize / 8),
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
        let iterations = match probe {
            Probe::MmaF16 | Probe::MmaBf16 | Probe::MmaE4m3 => 1500,
            Probe::WgmmaF16 | Probe::WgmmaBf16 | Probe::WgmmaE4m3 => 500,
            Probe::Exp2 => 1000,
            Probe::Read | Probe::Copy if of_memory => 1,
            Probe::Read | Probe::Copy => (1usize << 30).div_ceil(bytes) as u32,
            Probe::Bulk => ((1 << 30) / PROBE_CHUNK_BYTES as u32).div_ceil(blocks),
        };
        let threads = (blocks * kernel.threads()) as usize;
        let output = if probe == Probe::Copy { words.len() } else { threads };
        let input = Tensor::from_slice(stream, &words, &[words.len()])?;
        let output = Tensor::empty(stream, DType::I32, &[output])?;
        Ok(Self { kernel, probe, words, input, output, blocks, iterations })
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
            // 16 products of 16 × 8 × 16 per iteration, of twice the depth for 8-bit types.
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
        let (words, blocks) = (&self.words, self.blocks as usize);
        let folded = |words: &[i32]| words.iter().fold(0, |fold, word| fold ^ word);
        let float = |bits: i32| f64::from(f32::from_bits(bits as u32));
        Ok(match self.probe {
            Probe::Copy => found == *words,
            // The input is read an odd number of times, so the exclusive or of all words remains.
            Probe::Read => folded(&found) == folded(words),
            Probe::Bulk => {
                let chunks: Vec<_> =
                    words.chunks_exact(PROBE_CHUNK_BYTES / 4).map(folded).collect();
                let expected = |block: usize| {
                    let read =
                        (0..few as usize).map(|i| chunks[(block + i * blocks) % chunks.len()]);
                    read.fold(0, |fold, chunk| fold ^ chunk)
                };
                let of_blocks = found.chunks(self.kernel.threads() as usize).enumerate();
                of_blocks.into_iter().all(|(block, found)| folded(found) == expected(block))
            }
            Probe::Exp2 => found.iter().all(|&bits| (float(bits) - EXP2_SUM).abs() < 1e-4),
            matrix => {
                let Some(element) = Element::of(matrix) else { return Ok(false) };
                let expected = match matrix {
                    Probe::MmaF16 | Probe::MmaBf16 | Probe::MmaE4m3 => mma(words, element),
                    _ => wgmma(words, element),
                };
                let few = f64::from(few);
                found.iter().zip(expected.iter().cycle()).all(|(&bits, expected)| {
                    let Expected { value, magnitude } = expected;
                    (float(bits) - few * value).abs() <= TOLERANCE * few * magnitude
                })
            }
        })
    }
}
