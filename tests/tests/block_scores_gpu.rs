//! Every kernel that scores blocks on a GPU against f64, and the choice made from its scores.

use blockflash_ops::block_sparse::{
    BlockChoice, BlockMaskBuffer, BlockScores, BlockSource, block_mean_scores,
};
use blockflash_ops::{BlockGeometry, BlockMask, DType, Device, Error, Mask, Stream, Tensor, View};
use blockflash_oracle::{BlockMean, Rounding};
use blockflash_sys::manifest::Variant;
use blockflash_sys::{BlockMaskKernel, Kernel};
use blockflash_tests::gpu::{Report, gpu, say, wait};
use blockflash_tests::host::{refill, upload};
use blockflash_tests::number::{encode, normal_rounded};
use blockflash_tests::tolerance::{Reference, check};
use std::ops::Range;

/// Sizes of q and k.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: [usize; 2],
    seqlens: [usize; 2],
    blocks: [usize; 2],
    head_dim: usize,
    /// Heads are before the sequence in memory.
    heads_first: bool,
}

/// q, then k, row-major.
type Data = [Vec<f32>; 2];

fn cases() -> Vec<Case> {
    let dims = [64, 128, 8, 96, 192, 256, 24, 40, 248];
    let lengths = [[300, 300], [1, 700], [1000, 129], [64, 64], [65, 4200], [4097, 500], [200, 1]];
    let blocks = [[64, 64], [128, 64], [64, 192], [1024, 128], [128, 128]];
    let heads = [[2, 2], [4, 2], [3, 1], [1, 1], [6, 3]];
    (0..45)
        .map(|turn| Case {
            batch: 1 + turn % 3 % 2,
            heads: heads[turn % 5],
            seqlens: lengths[turn % 7],
            blocks: blocks[turn / 2 % 5],
            head_dim: dims[turn % 9],
            heads_first: turn % 4 == 3,
        })
        .collect()
}

impl Case {
    fn geometry(&self) -> BlockGeometry {
        let ([q, kv], [block_q, block_kv]) = (self.seqlens, self.blocks);
        BlockGeometry::new(q, kv, block_q, block_kv).unwrap()
    }

    fn data(&self, dtype: DType, seed: u64) -> Data {
        std::array::from_fn(|i| {
            let count = self.batch * self.seqlens[i] * self.heads[i] * self.head_dim;
            // Means that differ from 0, as the means of real keys do.
            let mut values = normal_rounded(seed + i as u64, count, dtype);
            values.iter_mut().step_by(3).for_each(|x| *x = x.abs());
            values
        })
    }

    /// Offset of an element: `[batch, seqlen, heads, head_dim]`, or heads before the sequence.
    fn index(&self, i: usize, [entry, row, head]: [usize; 3]) -> usize {
        let (seqlen, heads) = (self.seqlens[i], self.heads[i]);
        match self.heads_first {
            true => ((entry * heads + head) * seqlen + row) * self.head_dim,
            false => ((entry * seqlen + row) * heads + head) * self.head_dim,
        }
    }

    fn shape(&self, i: usize) -> [usize; 4] {
        match self.heads_first {
            true => [self.batch, self.heads[i], self.seqlens[i], self.head_dim],
            false => [self.batch, self.seqlens[i], self.heads[i], self.head_dim],
        }
    }

    fn logical<'a>(&self, view: View<'a>) -> View<'a> {
        if self.heads_first { view.permute(&[0, 2, 1, 3]).unwrap() } else { view }
    }

    fn upload(&self, dtype: DType, data: &Data, stream: &Stream) -> Result<[Tensor; 2], String> {
        let [q, k] = [0, 1].map(|i| upload(stream, dtype, &bits(dtype, &data[i]), &self.shape(i)));
        Ok([q?, k?])
    }

    /// The mean of a block of rows of a head.
    fn mean(
        &self,
        data: &Data,
        i: usize,
        [entry, head]: [usize; 2],
        rows: Range<usize>,
    ) -> BlockMean {
        let row = |row| &data[i][self.index(i, [entry, row, head])..][..self.head_dim];
        BlockMean::of(self.head_dim, rows.map(row))
    }

    fn reference(&self, data: &Data) -> Reference {
        let (geometry, [heads_q, heads_kv]) = (self.geometry(), self.heads);
        let mut reference = Reference { width: geometry.cols(), ..Reference::default() };
        for (entry, head) in
            (0..self.batch).flat_map(|entry| (0..heads_q).map(move |head| (entry, head)))
        {
            let k: Vec<_> = (0..geometry.cols())
                .map(|col| {
                    self.mean(data, 1, [entry, head * heads_kv / heads_q], geometry.keys(col))
                })
                .collect();
            for row in 0..geometry.rows() {
                let q = self.mean(data, 0, [entry, head], geometry.queries(row));
                reference.extend(k.iter().map(|k| q.score(k)));
            }
        }
        let views =
            [0, 1].map(|i| self.logical(View::from_slice(&data[i], &self.shape(i)).unwrap()));
        let plain = block_mean_scores(geometry, views[0], views[1]).unwrap();
        reference.plain = plain.into_iter().map(f64::from).collect();
        reference
    }

    /// One f32 rounding per row of a block and per product.
    fn rounding(&self) -> Rounding {
        let steps = self.blocks[0].max(self.blocks[1]) + self.head_dim;
        Rounding::of_products(0, steps, DType::F32)
    }
}

fn bits(dtype: DType, values: &[f32]) -> Vec<u32> {
    values.iter().map(|&x| encode(dtype, x)).collect()
}

fn text(error: impl Into<Error>) -> String {
    error.into().to_string()
}

/// Compares scores with f64.
fn judge(
    case: &Case,
    data: &Data,
    scores: &BlockScores,
    stream: &Stream,
) -> Result<Vec<f32>, String> {
    let got = scores.scores().to_vec::<f32>(stream).map_err(text)?;
    let wide: Vec<f64> = got.iter().map(|&x| x.into()).collect();
    check(&wide, &case.reference(data), &case.rounding(), |at| format!("score {at} of {case:?}"))?;
    Ok(got)
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("block_scores_gpu::every_kernel") else { return };
    let scores_of = |kernel: &'static Kernel| match kernel.variant {
        Variant::BlockMask(BlockMaskKernel::Scores { dtype, .. }) => Some((kernel, dtype)),
        _ => None,
    };
    let kernels: Vec<_> = gpu.kernels().filter_map(scores_of).collect();
    assert!(!kernels.is_empty());
    let mut report = Report::default();
    for (kernel, dtype) in kernels {
        for (seed, case) in cases().into_iter().enumerate() {
            report
                .run(kernel, || scores_and_choice(kernel, dtype, &case, seed as u64, &gpu.stream));
        }
        report.run(kernel, || replays_a_graph(kernel, dtype, &gpu.stream));
    }
    report.finish(&gpu, "block_scores_gpu");
}

/// Computes the scores twice, with the same bits, and chooses from them.
fn scores_and_choice(
    kernel: &Kernel,
    dtype: DType,
    case: &Case,
    seed: u64,
    stream: &Stream,
) -> Result<usize, String> {
    let data = case.data(dtype, 100 * seed);
    let tensors = case.upload(dtype, &data, stream)?;
    let [q, k] = [0, 1].map(|i| case.logical(tensors[i].view()));
    let mut scores = BlockScores::new(case.geometry(), q, k, stream).map_err(text)?;
    scores.compute_with(kernel, q, k, stream).map_err(text)?;
    wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
    let got = judge(case, &data, &scores, stream)
        .map_err(|error| format!("{}: {error}", kernel.image_name()))?;
    scores.compute_with(kernel, q, k, stream).map_err(text)?;
    if scores.scores().to_vec::<f32>(stream).map_err(text)? != got {
        return Err(format!("{}: other bits in a second run of {case:?}", kernel.image_name()));
    }
    let (geometry, mask, take) = (case.geometry(), Mask::causal(), 3);
    let [batch, heads] = [case.batch, case.heads[0]];
    let capacity = batch * heads * geometry.rows() * take;
    let mut buffer =
        BlockMaskBuffer::new(geometry, batch, heads, capacity, stream).map_err(text)?;
    let source = BlockSource::Scores { scores: scores.scores().view(), k: take };
    buffer.build(&BlockChoice { mask, ..BlockChoice::new(source) }, stream).map_err(text)?;
    buffer.check(stream).map_err(text)?;
    let found = buffer.to_host(stream).map_err(text)?;
    let expected =
        BlockMask::top_k_from_scores(geometry, batch, heads, &got, take, mask).map_err(text)?;
    if found.to_bool().map_err(text)? != expected.to_bool().map_err(text)? {
        return Err(format!("other blocks are chosen than on the CPU\n    {case:?}"));
    }
    Ok(got.len())
}

fn replays_a_graph(kernel: &Kernel, dtype: DType, stream: &Stream) -> Result<usize, String> {
    let case = cases()[1];
    let mut tensors = case.upload(dtype, &case.data(dtype, 1), stream)?;
    let [q, k] = [0, 1].map(|i| case.logical(tensors[i].view()));
    let mut scores = BlockScores::new(case.geometry(), q, k, stream).map_err(text)?;
    let graph = stream
        .capture(|stream| scores.compute_with(kernel, q, k, stream))
        .map_err(|error: Error| format!("capture: {error}"))?;
    let mut compared = 0;
    for seed in [5, 6, 7] {
        let data = case.data(dtype, seed);
        for (tensor, data) in tensors.iter_mut().zip(&data) {
            refill(tensor, stream, &bits(dtype, data))?;
        }
        graph.launch(stream).map_err(text)?;
        wait(stream, &|| format!("replay of {}", kernel.image_name()))?;
        compared += judge(&case, &data, &scores, stream)?.len();
    }
    Ok(compared)
}

/// The oracle and the rule, without a GPU.
#[test]
fn the_cpu_scores_the_same() {
    let stream = Device::cpu().stream().unwrap();
    for (seed, case) in cases().into_iter().enumerate() {
        let data = case.data(DType::BF16, 100 * seed as u64);
        let tensors = case.upload(DType::BF16, &data, &stream).unwrap();
        let [q, k] = [0, 1].map(|i| case.logical(tensors[i].view()));
        let mut scores = BlockScores::new(case.geometry(), q, k, &stream).unwrap();
        scores.compute(q, k, &stream).unwrap();
        judge(&case, &data, &scores, &stream).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn what_the_gpu_cannot_score_is_refused() {
    let Some(gpu) = gpu("block_scores_gpu::what_the_gpu_cannot_score_is_refused") else { return };
    let stream = &gpu.stream;
    let geometry = BlockGeometry::new(100, 100, 64, 64).unwrap();
    let wide = Tensor::zeros(stream, DType::F32, &[1, 100, 2, 8]).unwrap();
    let error = BlockScores::new(geometry, wide.view(), wide.view(), stream).unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "block_mask", .. }), "{error}");
    let odd = Tensor::zeros(stream, DType::F16, &[1, 100, 2, 12]).unwrap();
    let error = BlockScores::new(geometry, odd.view(), odd.view(), stream).unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "block_mask", .. }), "{error}");
    let good = Tensor::zeros(stream, DType::F16, &[1, 101, 2, 20]).unwrap();
    let view = good.view().slice(1, 0..100).unwrap().slice(3, 4..12).unwrap();
    match BlockScores::new(geometry, view, view, stream) {
        Ok(mut scores) => {
            let error = scores.compute(view, view, stream).unwrap_err();
            assert!(matches!(error, Error::Misaligned { what: "q", .. }), "{error}");
        }
        Err(Error::Unsupported { what, .. }) => say(&format!("SKIPPED ({what}): block_scores_gpu")),
        Err(error) => panic!("{error}"),
    }
}
