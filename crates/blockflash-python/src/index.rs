//! Attention by an index, scores of blocks of keys, and the choice among them, into tensors of the
//! caller.

use crate::attention::scores;
use crate::decode::workspace;
use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, Operands, of, optional, scratch, views};
use crate::options::Given;
use crate::window::token_mask;
use blockflash_foreign::{DecodeNumbers, DecodeOptions, DecodeTensors};
use blockflash_ops::{
    AttentionDecodeWorkspace, BlockReduction, IndexAttention, IndexAttentionOperands, IndexLists,
    IndexScores, KvCache, PackedTokens, Stream, TopK, View,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::Arc;

/// Attention of q to the blocks of keys that `lists`, i32 `[groups, rows, capacity]`, name, into
/// `o` and `lse`, as `attention_decode` describes them. With `cu_seqlens_k` keys and values are
/// packed, `[Tk, Hk, D]`, with at most `max_k` of a sequence. `allocate` is that of
/// `attention_decode`.
#[pyfunction]
#[pyo3(signature = (q, k, v, lists, o, lse, allocate, granularity, max_k, *options))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn index_attention(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    lists: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    allocate: &Bound<'_, PyAny>,
    granularity: i64,
    max_k: i64,
    options: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let py = q.py();
    let rows = [of("q", q)?, of("k", k)?, of("v", v)?, of("lists", lists)?];
    let DecodeOptions { tensors, numbers } = Given::decode(options)?;
    let outputs = [Some(of("o", o)?), optional("lse", lse)?];
    let call = Call::new(rows, tensors, numbers, [granularity, max_k])?;
    let (bytes, captured) = py.detach(|| call.workspace_bytes())?;
    // Held until the work is queued.
    let memory = if captured { Some(allocate.call1((bytes,))?) } else { None };
    let memory = optional("workspace", memory.as_ref())?;
    Ok(py.detach(|| {
        let workspace = given_or_own(memory.as_ref(), bytes, &call.stream)?;
        call.run(outputs, workspace.as_deref())
    })?)
}

/// A workspace in memory that was allocated for the call, or that of the stream.
fn given_or_own(
    memory: Option<&Foreign<'_>>,
    bytes: usize,
    stream: &Stream,
) -> Result<Option<Arc<AttentionDecodeWorkspace>>> {
    match memory {
        Some(memory) => {
            let tensor = scratch(memory, stream)?;
            Ok(Some(Arc::new(AttentionDecodeWorkspace::from_tensor(tensor)?)))
        }
        None => with_memory(|| workspace(stream, bytes)),
    }
}

fn size(what: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Failure::value(format!("{what} is {value}")))
}

fn needed() -> Failure {
    Failure::value("q, k, v, lists and the results are needed")
}

/// A call without its outputs.
pub(crate) struct Call<'a> {
    /// q, k, v and the lists.
    pub(crate) rows: Operands<'a, 4>,
    pub(crate) tensors: DecodeTensors<Option<Foreign<'a>>>,
    numbers: DecodeNumbers,
    /// Tokens of a block, and the most keys of a packed sequence.
    sizes: [usize; 2],
    pub(crate) stream: Stream,
}

impl<'a> Call<'a> {
    pub(crate) fn new(
        rows: [Foreign<'a>; 4],
        tensors: DecodeTensors<Option<Foreign<'a>>>,
        numbers: DecodeNumbers,
        [granularity, max_k]: [i64; 2],
    ) -> Result<Self> {
        let stream = rows[0].stream()?;
        let sizes = [size("granularity", granularity)?, size("max_seqlen_k", max_k)?];
        Ok(Self { rows: rows.map(Some), tensors, numbers, sizes, stream })
    }

    /// How large a workspace it needs, and whether that is to be memory of a graph.
    fn workspace_bytes(&self) -> Result<(usize, bool)> {
        if self.stream.device().is_cpu() {
            return Ok((0, false));
        }
        let given = self.tensors.each_ref().into();
        let (rows, tensors, []) = views((self.rows.each_ref(), given), [])?;
        let (call, cache) = self.operation(rows, &DecodeTensors::from(tensors))?;
        let bytes = call.workspace_bytes(&cache, self.stream.device())?;
        Ok((bytes, bytes > 0 && self.stream.is_capturing()?))
    }

    /// Computes; queues the work on a GPU.
    fn run(
        &self,
        outputs: Operands<'a, 2>,
        workspace: Option<&AttentionDecodeWorkspace>,
    ) -> Result<()> {
        let given = self.tensors.each_ref().into();
        let (rows, tensors, [o, lse]) = views((self.rows.each_ref(), given), outputs)?;
        let (call, cache) = self.operation(rows, &DecodeTensors::from(tensors))?;
        let call = IndexAttention { workspace, ..call };
        let o = o.ok_or_else(needed)?;
        Ok(call.forward_into(IndexAttentionOperands { cache, o, lse }, &self.stream)?)
    }

    pub(crate) fn operation<'v>(
        &self,
        [q, k, v, lists]: [Option<View<'v>>; 4],
        tensors: &DecodeTensors<Option<View<'v>>>,
    ) -> Result<(IndexAttention<'v>, KvCache<'v>)> {
        let (Some(q), Some(k), Some(v), Some(entries)) = (q, k, v, lists) else {
            return Err(needed());
        };
        let numbers = &self.numbers;
        let others = [
            ("rotary_cos", tensors.rotary_cos.is_some()),
            ("rotary_sin", tensors.rotary_sin.is_some()),
            ("pages", tensors.page_lists.is_some() || tensors.page_counts.is_some()),
            ("tail_mask", tensors.tail_mask.is_some()),
        ];
        if let Some((what, _)) = others.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Failure::value(format!("{what} is given, which index_attention lacks")));
        }
        let [granularity, max_k] = self.sizes;
        let max_seqlen = size("max_seqlen_q", numbers.max_q)?;
        let packed = tensors.cu_seqlens_q.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
        let packed_kv = of_keys(tensors.cu_seqlens_k, max_k);
        let [k, v] = [pages(k, packed_kv.is_some())?, pages(v, packed_kv.is_some())?];
        let &DecodeTensors { seqused_k: seqused_kv, block_table, k_scale, v_scale, .. } = tensors;
        let cache = KvCache { seqused_kv, block_table, k_scale, v_scale, ..KvCache::new(k, v) };
        let call = IndexAttention {
            packed,
            packed_kv,
            scores: scores(numbers.into(), (*tensors).into())?,
            batch_invariant: numbers.batch_invariant,
            ..IndexAttention::new(q, IndexLists { entries, granularity })
        };
        Ok((call, cache))
    }
}

fn of_keys(cu_seqlens: Option<View<'_>>, max_seqlen: usize) -> Option<PackedTokens<'_>> {
    cu_seqlens.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen })
}

/// Keys or values as those of a cache, whose only page holds packed ones.
fn pages(rows: View<'_>, packed: bool) -> Result<View<'_>> {
    if packed { Ok(rows.insert(0).map_err(blockflash_ops::Error::from)?) } else { Ok(rows) }
}

/// Writes the scores of blocks of keys for each query, f32 `[groups, rows, blocks]`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn block_scores(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    scores: &Bound<'_, PyAny>,
    weights: Option<&Bound<'_, PyAny>>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    block_table: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    cu_seqlens_k: Option<&Bound<'_, PyAny>>,
    granularity: i64,
    max_q: i64,
    max_k: i64,
    left: i64,
    right: i64,
    mean: bool,
    relu: bool,
    scale: f64,
) -> PyResult<()> {
    let py = q.py();
    let read = [
        Some(of("q", q)?),
        Some(of("k", k)?),
        optional("weights", weights)?,
        optional("seqused_k", seqused_k)?,
        optional("block_table", block_table)?,
        optional("cu_seqlens_q", cu_seqlens_q)?,
        optional("cu_seqlens_k", cu_seqlens_k)?,
    ];
    let scores = of("scores", scores)?;
    let run = || -> Result<()> {
        let stream = scores.stream()?;
        let (read, [], [scores]) = views((read.each_ref(), []), [Some(scores)])?;
        let [q, k, weights, seqused_kv, block_table, of_q, of_k] = read;
        let (Some(q), Some(k), Some(scores)) = (q, k, scores) else { return Err(needed()) };
        let k = pages(k, of_k.is_some())?;
        let cache = KvCache { seqused_kv, block_table, ..KvCache::new(k, k) };
        let call = IndexScores {
            packed: of_keys(of_q, size("max_seqlen_q", max_q)?),
            packed_kv: of_keys(of_k, size("max_seqlen_k", max_k)?),
            weights,
            mask: token_mask(left, right, false)?,
            reduction: if mean { BlockReduction::Mean } else { BlockReduction::Max },
            relu,
            scale: scale as f32,
            ..IndexScores::new(q, cache, size("granularity", granularity)?)
        };
        Ok(call.compute_into(scores, &stream)?)
    };
    Ok(py.detach(run)?)
}

/// Writes the lists of the blocks with the largest scores, i32 `[groups, rows, k]`. `allocate` is
/// that of `attention_decode`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(crate) fn top_k(
    scores: &Bound<'_, PyAny>,
    chosen: &Bound<'_, PyAny>,
    allocate: &Bound<'_, PyAny>,
    k: i64,
    seqused_k: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    cu_seqlens_k: Option<&Bound<'_, PyAny>>,
    granularity: i64,
    batch: i64,
    capacity: i64,
    max_q: i64,
    max_k: i64,
    left: i64,
    right: i64,
    first: i64,
    last: i64,
) -> PyResult<()> {
    let py = scores.py();
    let scores = of("scores", scores)?;
    let stream = scores.stream().map_err(Failure::from)?;
    let read = [
        Some(scores),
        optional("seqused_k", seqused_k)?,
        optional("cu_seqlens_q", cu_seqlens_q)?,
        optional("cu_seqlens_k", cu_seqlens_k)?,
    ];
    let chosen = of("chosen", chosen)?;
    let room = size("k", k)?;
    let sizes = [
        size("granularity", granularity)?,
        size("batch", batch)?,
        size("capacity", capacity)?,
        size("max_seqlen_q", max_q)?,
        size("max_seqlen_k", max_k)?,
        size("first", first)?,
        size("last", last)?,
    ];
    let (bytes, captured) = py.detach(|| -> Result<(usize, bool)> {
        if stream.device().is_cpu() {
            return Ok((0, false));
        }
        let (read, [], []) = views((read.each_ref(), []), [])?;
        let bytes = choice(read, sizes, [left, right])?.workspace_bytes(room, stream.device())?;
        Ok((bytes, bytes > 0 && stream.is_capturing()?))
    })?;
    // Held until the work is queued.
    let memory = if captured { Some(allocate.call1((bytes,))?) } else { None };
    let memory = optional("workspace", memory.as_ref())?;
    Ok(py.detach(|| -> Result<()> {
        let workspace = given_or_own(memory.as_ref(), bytes, &stream)?;
        let (read, [], [chosen]) = views((read.each_ref(), []), [Some(chosen)])?;
        let call = TopK { workspace: workspace.as_deref(), ..choice(read, sizes, [left, right])? };
        Ok(call.choose_into(chosen.ok_or_else(needed)?, &stream)?)
    })?)
}

fn choice<'v>(
    [scores, seqused_kv, of_q, of_k]: [Option<View<'v>>; 4],
    [granularity, batch, capacity, max_q, max_k, first, last]: [usize; 7],
    [left, right]: [i64; 2],
) -> Result<TopK<'v>> {
    let scores = scores.ok_or_else(needed)?;
    Ok(TopK {
        batch,
        packed: of_keys(of_q, max_q),
        capacity,
        packed_kv: of_keys(of_k, max_k),
        seqused_kv,
        mask: token_mask(left, right, false)?,
        first,
        last,
        ..TopK::new(scores, granularity)
    })
}
