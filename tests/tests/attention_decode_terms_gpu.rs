//! Every kernel of attention to caches that takes a bias, ALiBi or a mask of the last keys against
//! the oracle.

use blockflash_ops::attention_decode::CacheTile;
use blockflash_ops::{DType, Mask};
use blockflash_safe::Event;
use blockflash_tests::attention::{AttentionCase, Choice, Limits, dims_of_tile};
use blockflash_tests::attention_decode::{
    CacheLayout, Captured, DecodeCase, DecodeData, DecodeGroup, DecodeInputs, DecodeOutputs,
    TailCase, alone_as_in_a_batch, decode_cases_with_terms, decode_groups_with_terms,
    decode_reference, decode_terms, replays, run_case, run_or_refuse, same_bits, survives_garbage,
};
use blockflash_tests::gpu::{Gpu, Report, gpu};
use blockflash_tests::property;

const SUITE: &str = "attention_decode_terms_gpu";

#[test]
fn every_kernel_with_terms() {
    let Some(gpu) = gpu("attention_decode_terms_gpu::every_kernel_with_terms") else { return };
    let check = |((dtype, head_dim), kernels): DecodeGroup, gpu: &Gpu, report: &mut Report| {
        let (stream, dims) = (&gpu.stream, dims_of_tile(head_dim));
        let mut cases = decode_terms(dtype, dims[0]);
        cases.extend(decode_terms(dtype, head_dim));
        let limits =
            Limits { dtypes: vec![dtype], head_dims: dims, seqlen: 500, alignment: 8, work: 0 };
        let random = decode_cases_with_terms(limits, vec![16, 48, 64, 256]);
        cases.extend(property::samples(120, random));
        for case in cases {
            let data = DecodeData::generate(&case);
            let reference = decode_reference(&case, &data);
            for &(kernel, _) in &kernels {
                report.run(kernel, || run_or_refuse(&case, &data, &reference, kernel, stream));
            }
        }
        for (kernel, tile) in kernels {
            let choice = Choice::This(kernel);
            let story = |what: &'static str| {
                move |error| format!("{what} of {}: {error}", kernel.image_name())
            };
            let tail = Some(TailCase { tail: 70, shared: false });
            for append in [false, true] {
                report.run(kernel, || {
                    let captured = Captured { append, tail, codes: None };
                    replays(dtype, head_dim, captured, kernel, stream, 300).map_err(story("graph"))
                });
            }
            report.run(kernel, || {
                let alibi = matches!(tile, CacheTile::Few(_));
                let turn = usize::from(dtype == DType::F16);
                let run =
                    |seed| survives_garbage([turn, seed], head_dim, Some(alibi), choice, stream);
                (0..100).map(run).sum::<Result<usize, _>>().map_err(story("garbage"))
            });
            // With a mask that serves all sequences each one has the same rows alone.
            let tree = |lengths: &[(usize, usize)], tail| DecodeCase {
                equal: true,
                tail: Some(TailCase { tail, shared: true }),
                ..DecodeCase::simple(dtype, (8, 2), head_dim, lengths)
            };
            let many = [1, 0, 130, 4200, 777, 30_000];
            for (queries, tail) in [(1, 1), (5, 40), (64, 64)] {
                let case = tree(&many.map(|keys| (queries, keys)), tail).consistent();
                report.run(kernel, || same_bits(&case, choice, stream).map_err(story("repeat")));
                for times in [1, 24] {
                    report.run(kernel, || {
                        alone_as_in_a_batch(&case, times, choice, stream).map_err(story("batch"))
                    });
                }
            }
        }
    };
    gpu.check_groups(SUITE, &Report::default(), decode_groups_with_terms(&gpu), check);
}

/// A tree of drafted tokens at the end of a long cache, by the kernels that are selected: in pages
/// and without, with lengths that the host knows and on the device, packed, and without a causal
/// mask.
#[test]
fn trees_over_long_caches() {
    let Some(gpu) = gpu("attention_decode_terms_gpu::trees_over_long_caches") else { return };
    for dtype in [DType::F16, DType::BF16] {
        for head_dim in [64, 96, 128, 192, 256] {
            for (turn, keys) in [8192, 8191, 4100, 8192].into_iter().enumerate() {
                let simple =
                    DecodeCase::simple(dtype, (32, 8), head_dim, &[(64, keys), (64, keys)]);
                let mask = if turn % 2 == 0 { Mask::causal() } else { Mask::Full };
                let attention = AttentionCase { scores: mask.into(), ..simple.attention.clone() };
                let layout = match turn {
                    0 => CacheLayout::Contiguous { capacity: keys },
                    _ => simple.layout,
                };
                let case = DecodeCase {
                    attention,
                    layout,
                    equal: turn < 3,
                    seqused: turn != 0,
                    tail: Some(TailCase { tail: 64, shared: turn == 2 }),
                    ..simple
                };
                run_case(&case.consistent(), Choice::Selected, &gpu.stream).unwrap();
            }
        }
    }
}

/// Microseconds of a call, of 200 in a graph. No key is poison, whatever the tail hides.
fn microseconds(case: &DecodeCase, gpu: &Gpu) -> f64 {
    let (stream, data) = (&gpu.stream, DecodeData::generate(case));
    let whole = DecodeCase { tail: None, ..case.clone() };
    let mut inputs = DecodeInputs::upload(&whole, &data, stream)
        .and_then(|inputs| inputs.with_tail(case, &data, stream))
        .unwrap();
    let mut outputs = DecodeOutputs::poisoned(case, stream).unwrap();
    inputs.launch(&mut outputs, Choice::Selected, stream).unwrap();
    let calls = |stream: &_| {
        (0..200).try_for_each(|_| inputs.launch(&mut outputs, Choice::Selected, stream))
    };
    let graph = stream.capture(calls).unwrap();
    let [begin, end] = [(); 2].map(|()| Event::new(&gpu.device, true).unwrap());
    graph.launch(stream).unwrap();
    begin.record(stream).unwrap();
    graph.launch(stream).unwrap();
    end.record(stream).unwrap();
    end.synchronize().unwrap();
    begin.elapsed_us(&end).unwrap() / 200.0
}

/// A tree of 64 tokens at the end of 8192 keys costs about what the causal call costs. Other
/// programs must not use the GPU.
#[test]
#[ignore = "it compares times"]
fn a_tree_is_as_fast_as_a_causal_mask() {
    let Some(gpu) = gpu("attention_decode_terms_gpu::a_tree_is_as_fast_as_a_causal_mask") else {
        return;
    };
    let mut slowest = 0.0;
    for batch in [1, 8] {
        for paged in [false, true] {
            let lengths = vec![(64, 8192); batch];
            let simple = DecodeCase::simple(DType::BF16, (32, 8), 128, &lengths);
            let layout = match paged {
                false => CacheLayout::Contiguous { capacity: 8192 },
                true => CacheLayout::Paged {
                    page_size: 64,
                    max_pages: 128,
                    spare: 0,
                    shared: 0,
                    heads_first: false,
                },
            };
            let attention =
                AttentionCase { scores: Mask::causal().into(), ..simple.attention.clone() };
            let causal = DecodeCase { attention, layout, equal: true, seqused: false, ..simple };
            let causal = causal.consistent();
            let tail = Some(TailCase { tail: 64, shared: false });
            let tree = DecodeCase { tail, ..causal.clone() };
            microseconds(&causal, &gpu);
            let [causal, tree] = [&causal, &tree].map(|case| microseconds(case, &gpu));
            println!("batch {batch}, paged {paged}: causal {causal:.1} us, tree {tree:.1} us");
            slowest = f64::max(slowest, tree / causal);
        }
    }
    assert!(slowest < 1.25, "{slowest}");
}
