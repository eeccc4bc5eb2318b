//! The switch that verifies what kernels read on the device: on the CPU, and on a GPU as far as the
//! host side goes. The switch is one of the process, so this is a test program of its own.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::FakeDriver;
use blockflash_ops::{
    AppendKv, Attention, AttentionBackward, AttentionDecode, AttentionDecodeOperands,
    AttentionDecodeWorkspace, CacheAccess, ChoosePages, CuSeqlens, DType, Device, Error,
    IndexScores, KvCache, KvCacheMut, Operation, PackedTokens, PageLists, Quantize, QuantizeScale,
    Result, Stream, SummarizePages, Tensor, set_checks,
};
use blockflash_safe::Error as SafeError;

/// What may be wrong in the calls below; the default is right.
#[derive(Clone, Copy)]
struct Data {
    offsets: [i32; 3],
    max_seqlen: usize,
    lengths: [i32; 2],
    table: [i32; 4],
    list: [i32; 2],
    count: i32,
    /// New tokens of each sequence.
    tokens: [i32; 3],
    /// What rows that are quantised are divided by.
    scale: f32,
}

const GOOD: Data = Data {
    offsets: [0, 5, 7],
    max_seqlen: 5,
    lengths: [32, 20],
    table: [3, 1, 2, 0],
    list: [0, 1],
    count: 2,
    tokens: [0, 5, 7],
    scale: 0.5,
};

fn ints(stream: &Stream, values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(stream, values, shape).unwrap()
}

fn one(stream: &Stream, value: f32) -> Tensor {
    Tensor::from_slice(stream, &[value], &[1]).unwrap()
}

fn zeros(stream: &Stream, shape: &[usize]) -> Tensor {
    Tensor::zeros(stream, DType::F16, shape).unwrap()
}

/// The gradients of packed attention after their forward pass.
fn attention(data: &Data, stream: &Stream) -> Result<()> {
    let x = zeros(stream, &[7, 2, 64]);
    let offsets = ints(stream, &data.offsets, &[3]);
    let max = data.max_seqlen;
    let (q, kv) = (offsets.view(), offsets.view());
    let cu_seqlens = Some(CuSeqlens { q, kv, max_seqlen_q: max, max_seqlen_kv: max });
    let call = Attention { cu_seqlens, ..Attention::new(x.view(), x.view(), x.view()) };
    let output = call.forward(stream)?;
    call.backward(&output, x.view(), stream)?;
    Ok(())
}

/// Only the gradients, of results that may be wrong.
fn backward(data: &Data, stream: &Stream) -> Result<()> {
    let x = zeros(stream, &[7, 2, 64]);
    let lse = Tensor::zeros(stream, DType::F32, &[2, 7])?;
    let offsets = ints(stream, &data.offsets, &[3]);
    let max = data.max_seqlen;
    let (q, kv) = (offsets.view(), offsets.view());
    let cu_seqlens = Some(CuSeqlens { q, kv, max_seqlen_q: max, max_seqlen_kv: max });
    let attention = Attention { cu_seqlens, ..Attention::new(x.view(), x.view(), x.view()) };
    AttentionBackward { attention, o: x.view(), lse: lse.view(), d_o: x.view() }
        .backward(stream)
        .map(drop)
}

/// Queries to a cache of 4 pages of 16 slots, with lists of pages.
fn decode(data: &Data, stream: &Stream) -> Result<()> {
    let (q, cached) = (zeros(stream, &[7, 2, 64]), zeros(stream, &[4, 16, 1, 64]));
    let (offsets, lengths) = (ints(stream, &data.offsets, &[3]), ints(stream, &data.lengths, &[2]));
    let table = ints(stream, &data.table, &[2, 2]);
    let lists = ints(stream, &[data.list, GOOD.list].concat(), &[2, 1, 2]);
    let counts = ints(stream, &[data.count, 1], &[2]);
    let cache = KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCache::new(cached.view(), cached.view())
    };
    let packed = PackedTokens { cu_seqlens: offsets.view(), max_seqlen: data.max_seqlen };
    let pages = PageLists { lists: lists.view(), counts: counts.view() };
    let call = AttentionDecode {
        packed: Some(packed),
        pages: Some(pages),
        ..AttentionDecode::new(q.view())
    };
    call.forward(cache, stream)?;

    let mut summaries = zeros(stream, &[4, 1, 1, 64]);
    SummarizePages { cache, tokens: 64 }.summarize_into(summaries.view_mut(), stream)?;
    let (mut lists, mut counts) = (ints(stream, &[0; 4], &[2, 1, 2]), ints(stream, &[0; 2], &[2]));
    let choice =
        ChoosePages { packed: Some(packed), ..ChoosePages::new(q.view(), cache, summaries.view()) };
    let bytes = choice.workspace_bytes(stream.device())?;
    let workspace = AttentionDecodeWorkspace::new(stream, bytes.max(1))?;
    let choice = ChoosePages { workspace: Some(&workspace), ..choice };
    choice.choose_into(lists.view_mut(), counts.view_mut(), stream)
}

/// Scores of blocks of keys of such a cache, and a choice among them.
fn choose(data: &Data, stream: &Stream) -> Result<()> {
    let (q, keys) = (zeros(stream, &[7, 2, 64]), zeros(stream, &[4, 16, 1, 64]));
    let (offsets, lengths) = (ints(stream, &data.offsets, &[3]), ints(stream, &data.lengths, &[2]));
    let table = ints(stream, &data.table, &[2, 2]);
    let cache = KvCache {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCache::new(keys.view(), keys.view())
    };
    let packed = PackedTokens { cu_seqlens: offsets.view(), max_seqlen: data.max_seqlen };
    let call = IndexScores { packed: Some(packed), ..IndexScores::new(q.view(), cache, 4) };
    let scores = call.compute(2, stream)?;
    call.top_k(scores.view())?.choose(3, stream).map(drop)
}

/// An append alone, and then one with attention.
fn append(data: &Data, stream: &Stream) -> Result<()> {
    let new = zeros(stream, &[7, 1, 64]);
    let (mut k, mut v) = (zeros(stream, &[4, 16, 1, 64]), zeros(stream, &[4, 16, 1, 64]));
    let (tokens, lengths) = (ints(stream, &data.tokens, &[3]), ints(stream, &data.lengths, &[2]));
    let table = ints(stream, &data.table, &[2, 2]);
    let mut cache = KvCacheMut {
        block_table: Some(table.view()),
        seqused_kv: Some(lengths.view()),
        ..KvCacheMut::new(k.view_mut(), v.view_mut())
    };
    let packed = Some(PackedTokens { cu_seqlens: tokens.view(), max_seqlen: 7 });
    let new = AppendKv { packed, ..AppendKv::new(new.view(), new.view()) };
    new.append_into(cache.reborrow(), stream)?;
    let q = zeros(stream, &[2, 1, 2, 64]);
    AttentionDecode::new(q.view()).append(&new, cache, stream).map(drop)
}

/// Packed rows, with a scale that is given.
fn quantize(data: &Data, stream: &Stream) -> Result<()> {
    let x = zeros(stream, &[7, 2, 64]);
    let (offsets, scale) = (ints(stream, &data.offsets, &[3]), one(stream, data.scale));
    let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: data.max_seqlen });
    let scale = QuantizeScale::Given(scale.view());
    Quantize { packed, scale, ..Quantize::new(x.view()) }.quantize(DType::I8, stream).map(drop)
}

type Call = fn(&Data, &Stream) -> Result<()>;

/// Wrong data, the calls that read it, and what the error says.
fn wrong() -> Vec<(Data, Vec<Call>, &'static str)> {
    let packed: Vec<Call> = vec![attention, backward, decode, choose, quantize];
    let cached: Vec<Call> = vec![decode, choose, append];
    vec![
        (Data { max_seqlen: 4, ..GOOD }, packed.clone(), "sequence 0 has 5 rows, the maximum is 4"),
        (Data { offsets: [1, 5, 7], ..GOOD }, packed.clone(), "q[0] is 1: the first offset must"),
        (
            Data { offsets: [0, 5, 4], ..GOOD },
            packed.clone(),
            "q[2] is 4: offsets must not descend",
        ),
        (Data { offsets: [0, 5, 8], ..GOOD }, packed, "q[2] is 8: the packed tensor has 7 rows"),
        (
            Data { lengths: [32, 33], ..GOOD },
            cached.clone(),
            "cache.seqused_kv[1] is 33: the capacity is 32, 2 pages of 16 slots",
        ),
        (
            Data { lengths: [-1, 20], ..GOOD },
            cached.clone(),
            "cache.seqused_kv[0] is -1: a length must not be negative",
        ),
        (
            Data { table: [3, 1, 2, 4], ..GOOD },
            cached.clone(),
            "cache.block_table[1, 1] is 4: the cache has 4 pages",
        ),
        (
            Data { table: [-1, 1, 2, 0], ..GOOD },
            cached,
            "cache.block_table[0, 0] is -1: the cache has 4 pages",
        ),
        (
            Data { list: [1, 1], ..GOOD },
            vec![decode],
            "pages.lists[0, 0, 1] is 1: columns must ascend, the one before is 1",
        ),
        (
            Data { list: [0, 2], ..GOOD },
            vec![decode],
            "pages.lists[0, 0, 1] is 2: the block table has 2 columns",
        ),
        (
            Data { count: 3, ..GOOD },
            vec![decode],
            "pages.counts[0] is 3: a list has 0 to 2 entries",
        ),
        (
            Data { lengths: [4, 20], ..GOOD },
            vec![append],
            "cache.seqused_kv[0] is 4: lengths count the 5 tokens that are appended",
        ),
        (
            Data { table: [3, 1, 2, 1], lengths: [20, 20], ..GOOD },
            vec![append],
            "cache.block_table[1, 1] is 1: sequence 0 also appends to slots 2..4 of this page",
        ),
        (
            Data { scale: f32::INFINITY, ..GOOD },
            vec![quantize],
            "scale is inf, but must be finite and greater than 0",
        ),
    ]
}

#[test]
fn the_switch_makes_errors_of_what_kernels_clamp() {
    FakeDriver::load();
    let streams = [Device::cpu(), Device::cuda(0).unwrap(), Device::cuda(1).unwrap()];
    for stream in streams.map(|device| device.stream().unwrap()) {
        for on in [true, false] {
            set_checks(on);
            for call in [attention as Call, backward, decode, choose, append, quantize] {
                call(&GOOD, &stream).unwrap();
            }
            // Entries of the table that belong to no key are free.
            let short = Data { lengths: [16, 0], table: [3, -7, 99, 99], list: [0, 1], ..GOOD };
            decode(&short, &stream).unwrap();
            for (data, calls, problem) in wrong() {
                for call in calls {
                    let result = call(&data, &stream);
                    if on {
                        let error = result.unwrap_err();
                        assert!(
                            matches!(
                                error,
                                Error::InvalidCuSeqlens { .. }
                                    | Error::InvalidData { .. }
                                    | Error::InvalidScale { .. }
                            ),
                            "{error:?}"
                        );
                        assert!(error.to_string().contains(problem), "{error}: {problem}");
                    } else if !stream.device().is_cpu() {
                        result.unwrap();
                    }
                }
            }
        }
    }
    a_capture_is_refused();
}

/// The host cannot read what a graph will. Not a test of its own, as the switch is one of all.
fn a_capture_is_refused() {
    let stream = Device::cuda(0).unwrap().stream().unwrap();
    let (q, cached) = (zeros(&stream, &[2, 1, 2, 64]), zeros(&stream, &[2, 32, 1, 64]));
    let lengths = ints(&stream, &[1, 32], &[2]);
    let cache =
        KvCache { seqused_kv: Some(lengths.view()), ..KvCache::new(cached.view(), cached.view()) };
    let call = AttentionDecode::new(q.view());
    let bytes = call.workspace_bytes(&cache, stream.device()).unwrap();
    let workspace = AttentionDecodeWorkspace::new(&stream, bytes).unwrap();
    let call = AttentionDecode { workspace: Some(&workspace), ..call };
    let mut o = zeros(&stream, &[2, 1, 2, 64]);
    let mut run = |stream: &Stream| {
        let (cache, o) = (CacheAccess::Read(cache), o.view_mut());
        call.run(AttentionDecodeOperands { cache, o, lse: None }, stream)
    };
    run(&stream).unwrap();
    for on in [true, false] {
        set_checks(on);
        match stream.capture(&mut run) {
            Ok(_) => assert!(!on),
            Err(Error::Safe(SafeError::InCapture { what })) => {
                assert!(on && what.contains("BLOCKFLASH_CHECK"), "{what}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    // Calls without such data do not care.
    set_checks(true);
    let mut o = zeros(&stream, &[2, 1, 2, 64]);
    let dense = Attention::new(q.view(), q.view(), q.view());
    stream.capture(|stream| dense.forward_into(o.view_mut(), None, stream)).unwrap();
}
