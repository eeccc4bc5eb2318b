//! What persistent kernels of Hopper do unlike the others: blocks of threads that stay, tiles taken
//! by a counter, launches that begin before the previous one ends.

use super::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, BlockCase,
    BlockPattern, Choice, Content, Lengths, MaskHeads, smallest_block, takes_blocks,
};
use crate::gpu::{Gpu, wait};
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_ops::{Kernel, Stream};
use blockflash_sys::manifest::AttentionTile;

/// Multiply-adds per case and computation of the oracle; larger cases are sampled.
const BUDGET: f64 = 1e8;

/// Scores of ±100, maxima that rise with every key, one key that outweighs all others.
pub fn stress(tile: &AttentionTile) -> Vec<AttentionCase> {
    let seqlen = (2 * tile.block_q as usize + 3, 5 * tile.block_kv as usize + 7);
    let mut cases = Vec::new();
    for content in
        [Content::LargeScores, Content::GrowingMaxima, Content::OneHugeLogit, Content::HugeScores]
    {
        for mask in [Mask::Full, Mask::causal()] {
            for softcap in [None, Some(30.0)] {
                let simple = AttentionCase::of_tile(tile, (4, 2), seqlen);
                cases.push(AttentionCase {
                    seed: 17,
                    content,
                    scores: Scores { mask, softcap, ..Scores::default() },
                    ..simple
                });
            }
        }
    }
    cases
}

/// No key at all, and queries that see none.
pub fn without_keys(tile: &AttentionTile) -> Vec<AttentionCase> {
    let (block_q, block_kv) = (tile.block_q as usize, tile.block_kv as usize);
    let of = |lengths, mask, sink| AttentionCase {
        lengths,
        scores: Scores { mask, sink, ..Scores::default() },
        ..AttentionCase::of_tile(tile, (4, 2), (0, 0))
    };
    let dense = |seqlen_q, seqlen_kv| Lengths::Dense { batch: 2, seqlen_q, seqlen_kv };
    let packed =
        |lengths: &[(usize, usize)]| Lengths::Packed { lengths: lengths.to_vec(), slack: (3, 0) };
    let behind = Mask::Window { left: None, right: Some(0), align: Align::BottomRight };
    let mut cases = Vec::new();
    for sink in [None, Some(())] {
        cases.extend([
            of(dense(2 * block_q + 1, 0), Mask::Full, sink),
            of(dense(block_q, 0), Mask::causal(), sink),
            of(dense(3 * block_q, block_kv / 2), Mask::causal(), sink),
            of(dense(block_q + 9, 5), behind, sink),
            of(packed(&[(block_q + 1, 0), (0, 0), (1, 0)]), Mask::Full, sink),
            of(
                packed(&[(block_q, 0), (7, 2 * block_kv), (2 * block_q, 3), (5, 0)]),
                Mask::causal(),
                sink,
            ),
        ]);
    }
    cases
}

/// More tiles than multiprocessors, of unequal length; with an even seed some of their blocks are
/// visited, if the kernel can.
pub fn busy(kernel: &Kernel, tile: &AttentionTile, gpu: &Gpu, seed: u64) -> AttentionCase {
    let heads_kv = gpu.properties.multiprocessors as usize / 4 + 1;
    let seqlen_q = 3 * tile.block_q as usize + 5;
    let seqlen = (seqlen_q, seqlen_q + 77);
    let simple = AttentionCase::of_tile(tile, (2 * heads_kv, heads_kv), seqlen);
    let lists = seed.is_multiple_of(2) && takes_blocks(kernel);
    let block_mask = lists.then(|| some_blocks(&[tile]));
    AttentionCase { seed, scores: Mask::causal().into(), block_mask, ..simple }
}

/// Some of the smallest blocks that consist of tiles of these kernels.
pub fn some_blocks(tiles: &[&AttentionTile]) -> BlockCase {
    let smallest = |size: fn(&AttentionTile) -> u32| {
        smallest_block(&tiles.iter().map(|tile| size(tile)).collect::<Vec<_>>())
    };
    BlockCase {
        block_q: smallest(|tile| tile.block_q),
        block_kv: smallest(|tile| tile.block_kv),
        per_entry: false,
        // Heads that share a tile share its blocks, too.
        heads: if tiles.iter().all(|tile| tile.heads == 1) {
            MaskHeads::Query
        } else {
            MaskHeads::KeyValue
        },
        pattern: BlockPattern::Random(0.6),
    }
}

/// A case with its oracle and its operands on a stream.
pub struct Job {
    case: AttentionCase,
    reference: AttentionReference,
    inputs: AttentionInputs,
    stream: Stream,
}

impl Job {
    /// The case with its operands on a stream.
    pub fn new(case: AttentionCase, stream: &Stream) -> Result<Job, String> {
        let data = AttentionData::generate(&case);
        let reference = AttentionReference::compute(&case, &data, BUDGET);
        let inputs = AttentionInputs::upload(&case, &data, stream)?;
        Ok(Job { case, reference, inputs, stream: stream.clone() })
    }

    /// Poisoned outputs.
    pub fn outputs(&self, count: usize) -> Result<Vec<AttentionOutputs>, String> {
        (0..count).map(|_| AttentionOutputs::poisoned(&self.case, &self.stream)).collect()
    }

    /// Queues the computation.
    pub fn launch(
        &self,
        outputs: &mut AttentionOutputs,
        kernel: &'static Kernel,
    ) -> Result<(), String> {
        outputs
            .launch(&self.inputs, Choice::This(kernel), &self.stream)
            .map_err(|error| error.to_string())
    }

    /// The first output is right, and all others are the same in every bit.
    pub fn check(&self, outputs: &[AttentionOutputs], kernel: &Kernel) -> Result<usize, String> {
        wait(&self.stream, &|| format!("{} with {:?}", kernel.image_name(), self.case))?;
        let mut compared = 0;
        let mut first = None;
        for (at, output) in outputs.iter().enumerate() {
            let bits = output.bits(&self.stream)?;
            if *first.get_or_insert_with(|| bits.clone()) != bits {
                return Err(format!("output {at} differs from the first one\n    {:?}", self.case));
            }
            if at == 0 {
                let judged = output.check(&self.case, &self.reference, &self.stream);
                compared += judged.map_err(|error| format!("{error}\n    {:?}", self.case))?;
            }
        }
        Ok(compared)
    }
}

/// Launches one after the other, all with the same bits.
pub fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    gpu: &Gpu,
    seed: u64,
    times: usize,
) -> Result<usize, String> {
    let job = Job::new(busy(kernel, tile, gpu, seed), &gpu.stream)?;
    let mut outputs = job.outputs(times)?;
    outputs.iter_mut().try_for_each(|output| job.launch(output, kernel))?;
    job.check(&outputs, kernel)
}

/// Two streams that are busy at once, with one thread that feeds both.
pub fn shares_the_gpu(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let stream = || gpu.device.stream().map_err(|error| error.to_string());
    let jobs = [
        Job::new(busy(kernel, tile, gpu, 2), &stream()?)?,
        Job::new(busy(kernel, tile, gpu, 3), &stream()?)?,
    ];
    let mut outputs = [jobs[0].outputs(25)?, jobs[1].outputs(25)?];
    let [first, second] = &mut outputs;
    for (a, b) in first.iter_mut().zip(second) {
        jobs[0].launch(a, kernel)?;
        jobs[1].launch(b, kernel)?;
    }
    jobs.iter()
        .zip(&outputs)
        .try_fold(0, |sum, (job, outputs)| Ok(sum + job.check(outputs, kernel)?))
}

/// Two graphs of several launches each, replayed at the same time while a third stream launches
/// directly.
pub fn replays_graphs(
    kernel: &'static Kernel,
    tile: &AttentionTile,
    gpu: &Gpu,
) -> Result<usize, String> {
    let stream = || gpu.device.stream().map_err(|error| error.to_string());
    let mut jobs = Vec::new();
    for seed in 4..7 {
        jobs.push(Job::new(busy(kernel, tile, gpu, seed), &stream()?)?);
    }
    let mut outputs = Vec::new();
    for job in &jobs {
        outputs.push(job.outputs(4)?);
    }
    let mut graphs = Vec::new();
    for (job, outputs) in jobs.iter().zip(&mut outputs).take(2) {
        let record = |_: &Stream| {
            outputs.iter_mut().try_for_each(|output| {
                output.launch(&job.inputs, Choice::This(kernel), &job.stream)
            })
        };
        graphs.push(job.stream.capture(record).map_err(|error| format!("capture: {error}"))?);
    }
    for replay in 0..5 {
        for (at, output) in outputs[2].iter_mut().enumerate() {
            // Now on its own stream, now on the other's: launches of one graph never overlap.
            for (which, graph) in graphs.iter().enumerate().filter(|_| at % 2 == 0) {
                let stream = &jobs[(which + replay) % 2].stream;
                graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
            }
            jobs[2].launch(output, kernel)?;
        }
    }
    for job in &jobs {
        wait(&job.stream, &|| format!("graphs of {}", kernel.image_name()))?;
    }
    jobs.iter()
        .zip(&outputs)
        .try_fold(0, |sum, (job, outputs)| Ok(sum + job.check(outputs, kernel)?))
}
