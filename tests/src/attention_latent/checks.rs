//! What the bits of results must not depend on.

use super::run::LatentInputs;
use super::{LatentCase, LatentData, LatentForm};
use crate::attention::Choice;
use crate::attention_decode::largest_workspace;
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload};
use crate::number::rng;
use crate::token_outputs::{TokenOutputs, columns};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, CacheAccess, DType, HeadDims, KvCache, Operation,
    Stream, View,
};
use blockflash_sys::Kernel;
use rand::Rng;

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Runs a case 100 times and requires the same bits every time.
pub fn same_bits_of_latents(
    case: &LatentCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let inputs = LatentInputs::upload(case, &LatentData::generate(case), stream)?;
    let mut first = None;
    for repeat in 0..100 {
        let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
        inputs.launch(&mut outputs, Choice::This(kernel), stream).map_err(told)?;
        wait(stream, &|| format!("repeat of {case:?}"))?;
        let bits = outputs.bits(stream)?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(100)
}

/// Computes every sequence of a case in pages, whose queries are not packed, alone, and requires
/// the bits that it has in a batch of this many times all of them.
pub fn alone_as_in_a_batch(
    case: &LatentCase,
    times: usize,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let case = LatentCase { batch_invariant: true, ..case.clone() };
    let inputs = LatentInputs::upload(&case, &LatentData::generate(&case), stream)?;
    let (HeadDims { qk, v }, whole) = (case.head_dims, inputs.cache());
    let run = |q: View<'_>, cache: KvCache<'_>| -> Result<Vec<u32>, String> {
        let shape = [&q.shape()[..3], &[v]].concat();
        let mut o = poisoned(stream, case.dtype, &shape)?;
        let decode = AttentionDecode { q, ..inputs.decode() };
        let workspace = largest_workspace(&decode, &cache, stream).map_err(told)?;
        let decode = AttentionDecode { workspace: Some(&workspace), ..decode };
        let cache = CacheAccess::Read(cache);
        let operands = AttentionDecodeOperands { cache, o: o.view_mut(), lse: None };
        decode.run_with(kernel, operands, stream).map_err(told)?;
        wait(stream, &|| format!("a batch of {case:?}"))?;
        download(stream, &o)
    };
    let mut shape = inputs.q.shape().to_vec();
    shape[0] *= times;
    let q = upload(stream, case.dtype, &download(stream, &inputs.q)?.repeat(times), &shape)?;
    let repeated = |tensor, width: usize| {
        let shape = [case.batch() * times, width];
        let shape = if width == 0 { &shape[..1] } else { &shape[..] };
        upload(stream, DType::I32, &download(stream, tensor)?.repeat(times), shape)
    };
    let table = repeated(&inputs.table, case.pages()[1])?;
    let lengths = repeated(&inputs.lengths, 0)?;
    let batch = KvCache {
        block_table: Some(table.view()),
        seqused_kv: case.seqused.then(|| lengths.view()),
        ..whole
    };
    let together = run(columns(&q, qk), batch)?;
    let size = together.len() / (case.batch() * times);
    for b in 0..case.batch() {
        let cache = KvCache {
            block_table: whole.block_table.map(|view| sequence(view, b)),
            seqused_kv: whole.seqused_kv.map(|view| sequence(view, b)),
            ..whole
        };
        let alone = run(sequence(columns(&inputs.q, qk), b), cache)?;
        for copy in 0..times {
            if together[(copy * case.batch() + b) * size..][..size] != alone {
                return Err(format!("sequence {b} has other bits in a batch\n    {case:?}"));
            }
        }
    }
    Ok(case.batch())
}

fn sequence(of: View<'_>, b: usize) -> View<'_> {
    of.slice(0, b..b + 1).expect("a sequence")
}

/// Captures a call while every sequence has one key, and replays it with other lengths: each replay
/// gives the bits of a call that is not captured.
pub fn replays_of_latents(
    form: LatentForm,
    kernel: &'static Kernel,
    stream: &Stream,
    count: usize,
) -> Result<usize, String> {
    const LONGEST: usize = 4200;
    let case = LatentCase::simple(form, 16, &[(1, LONGEST); 3]);
    let mut inputs = LatentInputs::upload(&case, &LatentData::generate(&case), stream)?;
    let (mut outputs, choice) =
        (TokenOutputs::poisoned(case.tokens(), stream)?, Choice::This(kernel));
    refill(&mut inputs.lengths, stream, &[1; 3])?;
    let graph = stream
        .capture(|stream| inputs.launch(&mut outputs, choice, stream))
        .map_err(|error| format!("capture: {error}"))?;
    let mut random = rng(0x1A7E);
    for replay in 0..count {
        let mut lengths = [(); 3].map(|()| random.random_range(0..=LONGEST as u32));
        if replay == 0 {
            lengths = [LONGEST as u32, 0, 1];
        }
        refill(&mut inputs.lengths, stream, &lengths)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay with lengths {lengths:?}"))?;
        let mut direct = TokenOutputs::poisoned(case.tokens(), stream)?;
        inputs.launch(&mut direct, choice, stream).map_err(told)?;
        wait(stream, &|| format!("a call with lengths {lengths:?}"))?;
        if outputs.bits(stream)? != direct.bits(stream)? {
            return Err(format!("replay {replay} with lengths {lengths:?} differs from a call"));
        }
    }
    Ok(count)
}
