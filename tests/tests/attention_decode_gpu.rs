//! Every kernel of attention to caches that the GPU can run against the oracle.

use blockflash_ops::attention_decode::CacheTile;
use blockflash_ops::{DType, Stream};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{KvAppend, Variant};
use blockflash_tests::attention::{Choice, Limits, dims_of_tile};
use blockflash_tests::attention_decode::{
    CacheLayout, Captured, DecodeCase, DecodeData, DecodeGroup, alone_as_in_a_batch,
    append_or_refuse, decode_cases, decode_edges, decode_groups, decode_lengths, decode_prefills,
    decode_reference, decode_splits, merge_cases, replays, run_merge, run_or_refuse, run_sum,
    same_bits, survives_garbage,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::property;

fn cases_of(dtype: DType, head_dim: usize) -> Vec<DecodeCase> {
    let (dims, wide) = (dims_of_tile(head_dim), head_dim);
    let mut cases = decode_lengths(dtype, wide, 4200);
    cases.extend(decode_edges(dtype, dims[0]));
    cases.extend(decode_edges(dtype, wide));
    let limits =
        Limits { dtypes: vec![dtype], head_dims: dims, seqlen: 500, alignment: 8, work: 0 };
    cases.extend(property::samples(60, decode_cases(limits, vec![16, 48, 64, 256])));
    cases
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel") else { return };
    let check = |((dtype, head_dim), kernels): DecodeGroup, gpu: &Gpu, report: &mut Report| {
        let stream = &gpu.stream;
        for case in cases_of(dtype, head_dim) {
            let data = DecodeData::generate(&case);
            let reference = decode_reference(&case, &data);
            for &(kernel, _) in &kernels {
                report.run(kernel, || run_or_refuse(&case, &data, &reference, kernel, stream));
            }
        }
        for (kernel, tile) in kernels {
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            let d = head_dim;
            for append in [false, true] {
                report.run(kernel, || {
                    let captured = Captured { append, ..Captured::default() };
                    replays(dtype, d, captured, kernel, stream, 1000).map_err(story("graph"))
                });
            }
            report.run(kernel, || same_bits_of(kernel, &tile, stream).map_err(story("repeat")));
            report.run(kernel, || {
                let seeds = 0..100;
                let turn = usize::from(dtype == DType::F16);
                let run =
                    |seed| survives_garbage([turn, seed], d, None, Choice::This(kernel), stream);
                seeds.map(run).sum::<Result<usize, _>>().map_err(story("garbage"))
            });
        }
    };
    gpu.check_groups("attention_decode_gpu", &Report::default(), decode_groups(&gpu), check);
}

#[test]
fn every_kernel_with_many_queries() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel_with_many_queries") else { return };
    let check = |((dtype, head_dim), kernels): DecodeGroup, gpu: &Gpu, report: &mut Report| {
        for case in decode_prefills(dtype, head_dim) {
            let data = DecodeData::generate(&case);
            let reference = decode_reference(&case, &data);
            for &(kernel, _) in &kernels {
                report.run(kernel, || run_or_refuse(&case, &data, &reference, kernel, &gpu.stream));
            }
        }
        for (kernel, _) in kernels {
            let lengths = [(130, 300), (1, 40), (129, 64), (127, 777)];
            let case = DecodeCase::simple(dtype, (64, 8), head_dim, &lengths);
            report.run(kernel, || same_bits(&case, Choice::This(kernel), &gpu.stream));
        }
    };
    gpu.check_groups("attention_decode_gpu", &Report::default(), decode_groups(&gpu), check);
}

/// The kernels for many rows where they divide the keys, together with the one that combines what
/// they leave.
#[test]
fn every_kernel_that_combines() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel_that_combines") else { return };
    let check = |((dtype, head_dim), kernels): DecodeGroup, gpu: &Gpu, report: &mut Report| {
        let combines = |kernel: &&Kernel| matches!(kernel.variant, Variant::AttentionCombine(_));
        let combine = gpu.kernels().find(combines);
        for case in decode_splits(dtype, head_dim) {
            let data = DecodeData::generate(&case);
            let reference = decode_reference(&case, &data);
            for &(kernel, tile) in &kernels {
                report.run(kernel, || run_or_refuse(&case, &data, &reference, kernel, &gpu.stream));
                if let (CacheTile::Many(_), Some(combine)) = (tile, combine) {
                    let same = || same_bits(&case, Choice::This(kernel), &gpu.stream);
                    report.run(combine, same);
                }
            }
        }
    };
    gpu.check_groups("attention_decode_gpu", &Report::default(), decode_groups(&gpu), check);
}

#[test]
fn every_kernel_that_merges() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel_that_merges") else { return };
    let merges = |kernel: &&Kernel| matches!(kernel.variant, Variant::AttentionMerge(_));
    let mut report = Report::default();
    for kernel in gpu.kernels().filter(merges) {
        for case in property::samples(100, merge_cases(1, vec![8, 64, 72, 128, 256])) {
            report.run(kernel, || run_merge(&case, Choice::This(kernel), &gpu.stream));
            report.run(kernel, || run_sum(&case, kernel, &gpu.stream));
        }
    }
    report.finish(&gpu, "attention_decode_gpu");
}

#[test]
fn every_kernel_that_appends() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel_that_appends") else { return };
    let appends = |kernel: &Kernel, dtype| kernel.variant == Variant::KvAppend(KvAppend { dtype });
    let mut report = Report::default();
    for dtype in [DType::F16, DType::BF16] {
        let kernels: Vec<_> = gpu.kernels().filter(|kernel| appends(kernel, dtype)).collect();
        let head_dims = vec![8, 24, 64, 128, 264];
        let mut cases: Vec<_> = head_dims.iter().flat_map(|&d| decode_edges(dtype, d)).collect();
        let limits = Limits { dtypes: vec![dtype], head_dims, seqlen: 500, alignment: 8, work: 0 };
        cases.extend(property::samples(100, decode_cases(limits, vec![1, 16, 48, 256])));
        for case in cases.iter().filter(|_| !kernels.is_empty()) {
            let case = DecodeCase { append: true, ..case.clone() }.consistent();
            let data = DecodeData::generate(&case);
            for &kernel in &kernels {
                report.run(kernel, || append_or_refuse(&case, &data, kernel, &gpu.stream));
            }
        }
    }
    report.finish(&gpu, "attention_decode_gpu");
}

/// Sequences whose splits are computed in runs of every length, the longer the more sequences there
/// are: against the oracle, and alone as in a batch.
#[test]
fn every_kernel_that_takes_runs_of_splits() {
    let Some(gpu) = gpu("attention_decode_gpu::every_kernel_that_takes_runs_of_splits") else {
        return;
    };
    let check = |((dtype, head_dim), kernels): DecodeGroup, gpu: &Gpu, report: &mut Report| {
        let takes_runs = |(_, tile): &&(_, CacheTile)| matches!(tile, CacheTile::Several(_));
        for &(kernel, _) in kernels.iter().filter(takes_runs) {
            let (stream, d) = (&gpu.stream, head_dim);
            let runs =
                [((16, 8), 2112, [11, 33]), ((16, 8), 6000, [2, 11]), ((4, 1), 31_000, [8, 33])];
            for (heads, keys, batches) in runs {
                let simple = DecodeCase::simple(dtype, heads, d, &[(9, keys)]);
                let case = DecodeCase { equal: true, seqused: false, ..simple }.consistent();
                let data = DecodeData::generate(&case);
                let reference = decode_reference(&case, &data);
                report.run(kernel, || run_or_refuse(&case, &data, &reference, kernel, stream));
                report.run(kernel, || same_bits(&case, Choice::This(kernel), stream));
                for times in batches {
                    report.run(kernel, || {
                        alone_as_in_a_batch(&case, times, Choice::This(kernel), stream)
                    });
                }
            }
        }
    };
    gpu.check_groups("attention_decode_gpu", &Report::default(), decode_groups(&gpu), check);
}

/// Repeats, and each sequence alone, have the same bits; also where one sequence has many splits,
/// and in batches that give every CTA several of them, or, with known lengths, long runs of them.
fn same_bits_of(
    kernel: &'static Kernel,
    tile: &CacheTile,
    stream: &Stream,
) -> Result<usize, String> {
    let lengths = [1, 0, 130, 4200, 777, 30_000].map(|keys| (1, keys));
    let simple = DecodeCase::simple(tile.types().q, (8, 2), tile.head_dims().qk, &lengths);
    let case = DecodeCase { equal: true, ..simple };
    let choice = Choice::This(kernel);
    let alone: Result<usize, String> =
        [1, 24].into_iter().map(|times| alone_as_in_a_batch(&case, times, choice, stream)).sum();
    let long_runs = |[keys, times]: [usize; 2]| {
        let simple = DecodeCase::simple(tile.types().q, (8, 2), tile.head_dims().qk, &[(1, keys)]);
        let layout = CacheLayout::Paged {
            page_size: 16,
            max_pages: keys / 16,
            spare: 2,
            shared: 0,
            heads_first: false,
        };
        let case = DecodeCase { equal: true, seqused: false, layout, ..simple };
        alone_as_in_a_batch(&case, times, choice, stream)
    };
    // On an H200, for two CTAs per SM, runs of 8 of 8 splits, 4 of 16, 16 of 32, and 4 of 20 of
    // which the last is shorter.
    let known: Result<usize, String> =
        [[1024, 130], [2048, 33], [8192, 64], [5104, 30]].into_iter().map(long_runs).sum();
    Ok(same_bits(&case, choice, stream)? + alone? + known?)
}
