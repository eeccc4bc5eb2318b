//! Every kernel that builds block masks on a GPU against the constructors for the CPU: entry by
//! entry, without a tolerance.

use blockflash_ops::attention::{Attention, Mask};
use blockflash_ops::block_sparse::BlockMaskBuffer;
use blockflash_ops::{DType, Error, Stream};
use blockflash_sys::manifest::Variant;
use blockflash_sys::{BlockMaskKernel, Kernel};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, BlockCase,
    BlockPattern, Choice, Lengths, MaskHeads,
};
use blockflash_tests::block_masks::{
    Arrays, MaskCase, MaskData, MaskInputs, MaskSource, build_and_check, cut, mask_cases, prepare,
};
use blockflash_tests::gpu::{Report, gpu, say, wait};
use blockflash_tests::host::cpu;

const SOURCES: [MaskSource; 3] = [MaskSource::Bool, MaskSource::TopK, MaskSource::Scores];

fn text(error: impl Into<Error>) -> String {
    error.into().to_string()
}

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("block_mask_gpu::every_kernel") else { return };
    let stream = &gpu.stream;
    let is_build = |kernel: &&Kernel| {
        matches!(kernel.variant, Variant::BlockMask(BlockMaskKernel::Build { .. }))
    };
    let kernels: Vec<_> = gpu.kernels().filter(is_build).collect();
    assert!(!kernels.is_empty());
    let mut report = Report::default();
    for kernel in kernels {
        let story =
            |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
        for case in mask_cases() {
            report.run(kernel, || build_and_check(&case, Some(kernel), stream));
        }
        report.run(kernel, || ends_with_its_capacity(kernel, stream).map_err(story("capacity")));
        report.run(kernel, || names_what_is_wrong(kernel, stream).map_err(story("problems")));
        report.run(kernel, || replays_a_graph(kernel, stream).map_err(story("graph")));
        report.run(kernel, || attention_follows(kernel, stream).map_err(story("attention")));
    }
    report.finish(&gpu, "block_mask_gpu");
}

#[test]
fn the_cpu_builds_the_same() {
    let stream = cpu();
    let failures: Vec<String> =
        mask_cases().iter().filter_map(|case| build_and_check(case, None, &stream).err()).collect();
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

/// Queues a build and waits for it.
fn build(
    inputs: &MaskInputs,
    buffer: &mut BlockMaskBuffer,
    kernel: &Kernel,
    stream: &Stream,
) -> Result<Arrays, String> {
    inputs.build(buffer, Some(kernel), stream).map_err(text)?;
    wait(stream, &|| format!("building with {}", kernel.image_name()))?;
    Arrays::of(buffer.mask(), stream).map_err(text)
}

fn ends_with_its_capacity(kernel: &Kernel, stream: &Stream) -> Result<usize, String> {
    let mut compared = 0;
    for source in SOURCES {
        let case =
            MaskCase { groups: [2, 3], mask: Mask::causal(), ..MaskCase::new(source, [37, 50], 6) };
        let data = case.data();
        let mask = case.expected(&data).map_err(text)?;
        let row_ptr = mask.row_ptr().to_vec::<i32>(&cpu()).map_err(text)?;
        let (nnz, end) = (mask.nnz(), row_ptr[40] as usize);
        for capacity in [0, 1, end - 1, end, end + 1, nnz / 2, nnz - 1, nnz] {
            let (mut buffer, inputs) = prepare(&case, &data, capacity, stream)?;
            let got = build(&inputs, &mut buffer, kernel, stream)?;
            compared += got.compare(&cut(&mask, capacity, &cpu()).map_err(text)?)?;
            let problem = buffer.check(stream).err().map(text);
            // A build on the CPU reports the same.
            let (mut host, inputs) = prepare(&case, &data, capacity, &cpu())?;
            let expected = inputs.build(&mut host, None, &cpu()).err().map(text);
            if problem != expected || expected.is_some() != (capacity < nnz) {
                return Err(format!(
                    "capacity {capacity} of {nnz}: {problem:?}, expected {expected:?}"
                ));
            }
            buffer.check(stream).map_err(|error| format!("the second check: {error}"))?;
        }
    }
    Ok(compared)
}

/// An invalid entry is reported once, with its first position, and affects nothing else.
fn names_what_is_wrong(kernel: &Kernel, stream: &Stream) -> Result<usize, String> {
    let place = |at: usize, last: usize, rows: usize| {
        format!(
            "at batch {}, head {}, row {}, position {}",
            at / last / rows / 3,
            at / last / rows % 3,
            at / last % rows,
            at % last
        )
    };
    let mut compared = 0;
    for seed in 0..12 {
        let groups = [2, 3];
        let case = MaskCase { groups, seed, ..MaskCase::new(MaskSource::Scores, [21, 700], 9) };
        let (rows, cols) = (21, 700);
        let mut data = case.data();
        let clean = data.clone();
        let planted = [seed as usize * 1001 + 13, 40_000 + seed as usize * 3, 87_000];
        planted
            .into_iter()
            .for_each(|at| data.scores[at] = [f32::NAN, -f32::NAN][seed as usize % 2]);
        let (mut buffer, mut inputs) = prepare(&case, &data, 6 * rows * 9, stream)?;
        let got = build(&inputs, &mut buffer, kernel, stream)?;
        // NaN is never chosen. Nor is −∞ here, since enough other scores are larger, so it stands
        // for NaN in the expected mask.
        let without = MaskData {
            scores: data
                .scores
                .iter()
                .map(|&x| if x.is_nan() { f32::NEG_INFINITY } else { x })
                .collect(),
            ..data.clone()
        };
        let expected = case.expected(&without).map_err(text)?;
        compared += got.compare(&Arrays::of(&expected, &cpu()).map_err(text)?)?;
        // Other builds do not hide the error.
        inputs.refill(&clean, stream).map_err(text)?;
        build(&inputs, &mut buffer, kernel, stream)?;
        expect_problem(
            &mut buffer,
            &format!("score is NaN {}", place(planted[0], cols, rows)),
            stream,
        )?;

        let case = MaskCase { source: MaskSource::TopK, k: 75, ..case };
        let mut data = case.data();
        let twice = 75 * (seed as usize * 5 + 3);
        let missing = 75 * (seed as usize * 5 + 40) + seed as usize * 6;
        // The two equal columns are in one piece of 32 or far apart. All other columns of a list
        // differ, so no third one is equal.
        data.lists[twice] = 333;
        data.lists[twice + 1..twice + 75]
            .iter_mut()
            .filter(|col| **col == 333)
            .for_each(|col| *col = -1);
        let clean = data.clone();
        data.lists[twice + 1 + seed as usize * 6] = 333;
        data.lists[missing] = [-2, cols as i32, i32::MAX, i32::MIN][seed as usize % 4];
        let (mut buffer, inputs) = prepare(&case, &data, 6 * rows * 75, stream)?;
        let got = build(&inputs, &mut buffer, kernel, stream)?;
        let mut without = clean;
        without.lists[twice + 1 + seed as usize * 6] = -1;
        without.lists[missing] = -1;
        let expected = case.expected(&without).map_err(text)?;
        compared += got.compare(&Arrays::of(&expected, &cpu()).map_err(text)?)?;
        let at = place(twice + 1 + seed as usize * 6, 75, rows);
        expect_problem(&mut buffer, &format!("a column comes twice {at}"), stream)?;
        data.lists[twice] = -1;
        let (mut buffer, inputs) = prepare(&case, &data, 6 * rows * 75, stream)?;
        build(&inputs, &mut buffer, kernel, stream)?;
        expect_problem(
            &mut buffer,
            &format!("a column does not exist {}", place(missing, 75, rows)),
            stream,
        )?;
    }
    Ok(compared)
}

fn expect_problem(
    buffer: &mut BlockMaskBuffer,
    expected: &str,
    stream: &Stream,
) -> Result<(), String> {
    match buffer.check(stream) {
        Err(Error::InvalidBlockMask(problem)) if problem.starts_with(expected) => {}
        other => return Err(format!("check says {other:?}, not {expected:?}")),
    }
    buffer.check(stream).map_err(|error| format!("the second check: {error}"))
}

/// Two builds in one graph, of scores and of lists, whose data changes between replays.
fn replays_a_graph(kernel: &Kernel, stream: &Stream) -> Result<usize, String> {
    let groups = [2, 2];
    let case = |source, seed| MaskCase {
        groups,
        seed,
        mask: Mask::causal(),
        always: Some([1, 2]),
        ..MaskCase::new(source, [50, 90], 8)
    };
    let sources = [MaskSource::Scores, MaskSource::TopK];
    // The blocks that are always visited stay as in the first data.
    let first = sources.map(|source| case(source, 1).data());
    let room = 4 * 50 * 90;
    let (mut scored, mut scores) = prepare(&case(sources[0], 1), &first[0], room, stream)?;
    let (mut listed, mut lists) = prepare(&case(sources[1], 1), &first[1], room, stream)?;
    let graph = stream
        .capture(|stream| {
            scores.build(&mut scored, Some(kernel), stream)?;
            lists.build(&mut listed, Some(kernel), stream)
        })
        .map_err(|error: Error| format!("capture: {error}"))?;
    let mut compared = 0;
    for seed in 2..7 {
        let data: [MaskData; 2] = std::array::from_fn(|i| MaskData {
            always: first[i].always.clone(),
            ..case(sources[i], seed).data()
        });
        scores.refill(&data[0], stream).map_err(text)?;
        lists.refill(&data[1], stream).map_err(text)?;
        graph.launch(stream).map_err(text)?;
        wait(stream, &|| format!("replay of {}", kernel.image_name()))?;
        for (i, buffer) in [&mut scored, &mut listed].into_iter().enumerate() {
            buffer.check(stream).map_err(text)?;
            let expected = case(sources[i], seed).expected(&data[i]).map_err(text)?;
            let got = Arrays::of(buffer.mask(), stream).map_err(text)?;
            compared += got.compare(&Arrays::of(&expected, &cpu()).map_err(text)?)?;
        }
    }
    Ok(compared)
}

/// A graph that builds a mask and attends with it; the oracle knows the blocks.
fn attention_follows(kernel: &Kernel, stream: &Stream) -> Result<usize, String> {
    let case = |pattern| AttentionCase {
        lengths: Lengths::Dense { batch: 2, seqlen_q: 600, seqlen_kv: 900 },
        scores: Mask::causal().into(),
        block_mask: Some(BlockCase {
            block_q: 128,
            block_kv: 128,
            per_entry: true,
            heads: MaskHeads::KeyValue,
            pattern,
        }),
        ..AttentionCase::simple(DType::BF16, (4, 2), 64, (0, 0))
    };
    let dense = case(BlockPattern::Random(1.0));
    let data = AttentionData::generate(&dense);
    let inputs = AttentionInputs::upload(&dense, &data, stream)?;
    let mut outputs = AttentionOutputs::poisoned(&dense, stream)?;

    let mask = MaskCase {
        seqlens: [600, 900],
        blocks: [128, 128],
        groups: [2, 2],
        mask: dense.scores.mask,
        ..MaskCase::new(MaskSource::Bool, [1, 1], 0)
    };
    let mut blocks = mask.data();
    let (mut buffer, mut source) = prepare(&mask, &blocks, 2 * 2 * 5 * 8, stream)?;
    let graph = stream
        .capture(|stream| {
            source.build(&mut buffer, Some(kernel), stream)?;
            let call = Attention { block_mask: Some(buffer.mask()), ..inputs.attention() };
            outputs.launch_call(&dense, &call, Choice::Selected, stream)
        })
        .map_err(|error: Error| format!("capture: {error}"))?;
    let mut compared = 0;
    let patterns = [0.5, 0.0, 0.2, 0.9].map(BlockPattern::Random);
    for pattern in patterns.into_iter().chain([BlockPattern::EmptyRowsAndColumns]) {
        let case = case(pattern);
        let reference = AttentionReference::compute(&case, &data, 1e8);
        let host = case.block_mask(&cpu())?.ok_or("the case has a block mask")?;
        blocks.blocks = host.to_bool().map_err(text)?;
        source.refill(&blocks, stream).map_err(text)?;
        outputs.poison(stream)?;
        graph.launch(stream).map_err(text)?;
        wait(stream, &|| format!("attention after {}", kernel.image_name()))?;
        buffer.check(stream).map_err(text)?;
        compared += outputs
            .check(&case, &reference, stream)
            .map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(compared)
}

/// Nothing is visited before the first build, and operands that do not fit are refused.
#[test]
fn buffers_before_their_first_build() {
    let Some(gpu) = gpu("block_mask_gpu::buffers_before_their_first_build") else { return };
    let case = MaskCase { groups: [1, 2], ..MaskCase::new(MaskSource::Bool, [5, 9], 0) };
    let [batch, heads] = case.groups;
    let mut buffer = match BlockMaskBuffer::new(case.geometry(), batch, heads, 50, &gpu.stream) {
        Ok(buffer) => buffer,
        Err(Error::Unsupported { what, .. }) => {
            say(&format!("SKIPPED ({what}): block_mask_gpu::buffers_before_their_first_build"));
            return;
        }
        Err(error) => panic!("{error}"),
    };
    buffer.check(&gpu.stream).unwrap();
    let nothing = buffer.to_host(&gpu.stream).unwrap();
    assert_eq!((nothing.nnz(), buffer.mask().nnz(), buffer.capacity()), (0, 50, 50));
    let order = buffer.mask().row_order().to_vec::<i32>(&gpu.stream).unwrap();
    assert_eq!(order, [[4, 3, 2, 1, 0]; 2].concat());
    let data = case.data();
    let inputs = MaskInputs::upload(&case, &data, &cpu()).unwrap();
    let error = inputs.build(&mut buffer, None, &gpu.stream).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "blocks", .. }), "{error}");
    let error = inputs.build(&mut buffer, None, &cpu()).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch { what: "buffer", .. }), "{error}");
    let inputs = MaskInputs::upload(&case, &data, &gpu.stream).unwrap();
    inputs.build(&mut buffer, None, &gpu.stream).unwrap();
    let captured = gpu.stream.capture(|stream| buffer.check(stream));
    assert!(matches!(captured, Err(Error::Safe(blockflash_safe::Error::InCapture { .. }))));
}
