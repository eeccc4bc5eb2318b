//! What the bits of results must not depend on.

use super::run::{IndexInputs, workspace_bytes};
use super::{IndexCase, IndexData, IndexForm};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload};
use crate::number::rng;
use crate::token_outputs::{TokenOutputs, columns};
use blockflash_ops::{
    AttentionDecodeWorkspace, DType, Error, IndexAttention, IndexAttentionOperands, IndexLists,
    KvCache, Operation, Stream, Tensor, View,
};
use blockflash_sys::Kernel;
use rand::Rng;

/// Runs of a case that must have equal bits.
const REPEATS: usize = 40;

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Runs a case many times and requires the same bits every time.
pub fn same_bits_of_lists(
    case: &IndexCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let inputs = IndexInputs::upload(case, &IndexData::generate(case), stream)?;
    let mut first = None;
    for repeat in 0..REPEATS {
        let mut outputs = TokenOutputs::poisoned(case.tokens(), stream)?;
        match inputs.launch(&mut outputs, Choice::This(kernel), stream) {
            Err(Error::Unsupported { .. }) => return Ok(0),
            launched => launched.map_err(told)?,
        }
        wait(stream, &|| format!("repeat of {case:?}"))?;
        let bits = outputs.bits(stream)?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(REPEATS)
}

/// Computes every sequence of a case in pages, whose queries are not packed, alone, and requires
/// the bits that it has in a batch of this many times all of them.
pub fn lists_alone_as_in_a_batch(
    case: &IndexCase,
    times: usize,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    // The seed gives codes scales of pages and of rows, which are the same in any batch.
    let case = IndexCase { batch_invariant: true, seed: 3, ..case.clone() };
    let inputs = IndexInputs::upload(&case, &IndexData::generate(&case), stream)?;
    let (qk, whole, groups) = (case.form.head_dims.qk, inputs.cache(), case.groups);
    let queries = case.longest();
    // `None` if the kernel does not compute such a case.
    let run = |q: View<'_>, entries: &Tensor, cache: KvCache<'_>| -> Result<_, String> {
        let shape = [&q.shape()[..3], &[case.form.head_dims.v]].concat();
        let mut o = poisoned(stream, case.form.dtype, &shape)?;
        let entries = entries.view().permute(&[1, 0, 2]).expect("three dimensions");
        let entries = entries.slice(2, 0..case.capacity).expect("room behind lists");
        let lists = IndexLists { entries, granularity: case.granularity };
        let call = IndexAttention { q, lists, workspace: None, ..inputs.attention() };
        let bytes = workspace_bytes(&call, &cache, kernel, stream)?;
        let workspace = AttentionDecodeWorkspace::new(stream, bytes).map_err(told)?;
        let call = IndexAttention { workspace: Some(&workspace), ..call };
        let operands = IndexAttentionOperands { cache, o: o.view_mut(), lse: None };
        match call.run_with(kernel, operands, stream) {
            Err(Error::Unsupported { .. }) => return Ok(None),
            launched => launched.map_err(told)?,
        }
        wait(stream, &|| format!("a batch of {case:?}"))?;
        download(stream, &o).map(Some)
    };
    let mut shape = inputs.q.shape().to_vec();
    shape[0] *= times;
    let q = upload(stream, case.form.dtype, &download(stream, &inputs.q)?.repeat(times), &shape)?;
    let ints = |bits: Vec<u32>, shape: &[usize]| upload(stream, DType::I32, &bits, shape);
    let batch = case.batch() * times;
    let table = ints(download(stream, &inputs.table)?.repeat(times), &[batch, case.pages()[1]])?;
    let lengths = ints(download(stream, &inputs.lengths)?.repeat(times), &[batch])?;
    // Lists in their memory: queries, then groups.
    let room = inputs.entries.shape()[2];
    let entries =
        ints(download(stream, &inputs.entries)?.repeat(times), &[batch * queries, groups, room])?;
    let lists = |entries: &Tensor, queries: std::ops::Range<usize>| -> Result<Tensor, String> {
        let all = download(stream, entries)?;
        let part = &all[queries.start * groups * room..queries.end * groups * room];
        ints(part.to_vec(), &[queries.len(), groups, room])
    };
    let cache = KvCache {
        block_table: Some(table.view()),
        seqused_kv: case.seqused.then(|| lengths.view()),
        ..whole
    };
    let Some(together) = run(columns(&q, qk), &entries, cache)? else { return Ok(0) };
    let size = together.len() / batch;
    for b in 0..case.batch() {
        let cache = KvCache {
            block_table: whole.block_table.map(|view| sequence(view, b)),
            seqused_kv: whole.seqused_kv.map(|view| sequence(view, b)),
            ..whole
        };
        let own = lists(&inputs.entries, b * queries..(b + 1) * queries)?;
        let q = sequence(columns(&inputs.q, qk), b);
        let alone = run(q, &own, cache)?.ok_or("a refusal of one sequence alone")?;
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

/// Captures a call while no list names anything, and replays it with other lists and lengths: each
/// replay gives the bits of a call that is not captured.
pub fn replays_of_lists(
    form: IndexForm,
    granularity: usize,
    kernel: &'static Kernel,
    stream: &Stream,
    count: usize,
) -> Result<usize, String> {
    const LONGEST: usize = 2200;
    let heads = if form.is_latent() { [16, 1] } else { [16, 2] };
    let capacity = (1024 / granularity).max(2);
    let simple = |lengths: &[_]| IndexCase::simple(form, heads, [granularity, capacity], lengths);
    let case = simple(&[(2, LONGEST); 3]);
    let mut inputs = IndexInputs::upload(&case, &IndexData::generate(&case), stream)?;
    let (mut outputs, choice) =
        (TokenOutputs::poisoned(case.tokens(), stream)?, Choice::This(kernel));
    let bits = |ints: &[i32]| ints.iter().map(|&x| x as u32).collect::<Vec<u32>>();
    let none = vec![u32::MAX; inputs.entries.shape().iter().product()];
    refill(&mut inputs.entries, stream, &none)?;
    refill(&mut inputs.lengths, stream, &[1; 3])?;
    let graph = stream
        .capture(|stream| inputs.launch(&mut outputs, choice, stream))
        .map_err(|error| format!("capture: {error}"))?;
    let mut random = rng(0x1157);
    for replay in 0..count {
        let mut keys = [(); 3].map(|()| random.random_range(0..=LONGEST));
        if replay == 0 {
            keys = [LONGEST, 0, 1];
        }
        let seed = replay as u64;
        let other = IndexCase {
            seed,
            odd_entries: true,
            ascending: replay % 2 == 0,
            ..simple(&keys.map(|keys| (2, keys)))
        };
        refill(&mut inputs.entries, stream, &bits(&other.physical(&other.entries())))?;
        refill(&mut inputs.lengths, stream, &keys.map(|keys| keys as u32))?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay with lengths {keys:?}"))?;
        let mut direct = TokenOutputs::poisoned(case.tokens(), stream)?;
        inputs.launch(&mut direct, choice, stream).map_err(told)?;
        wait(stream, &|| format!("a call with lengths {keys:?}"))?;
        if outputs.bits(stream)? != direct.bits(stream)? {
            return Err(format!("replay {replay} with lengths {keys:?} differs from a call"));
        }
    }
    Ok(count)
}
