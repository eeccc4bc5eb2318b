//! Attention over a cache, and the merge of attention over parts of the keys, into tensors of the
//! caller.

use crate::attention::token_mask;
use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, views};
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, AttentionMerge,
    CacheAccess, KvCache, KvCacheMut, PackedTokens, PageLists, Rotary, RotaryPairs, Stream, View,
};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// The numbers of a call, as the operators of torch have them.
#[derive(Clone, Copy, Debug)]
struct Options {
    max_q: i64,
    /// Keys before a query's own; -1 does not limit them.
    left: i64,
    /// Keys after a query's own; -1 does not limit them.
    right: i64,
    /// `None` is `1 / sqrt(head_dim)`.
    scale: Option<f64>,
    /// 0 is none.
    softcap: f64,
    interleaved: bool,
}

/// Attention of q `[B, Sq, Hq, D]`, or packed with `cu_seqlens_q`, to `k_cache` and `v_cache`
/// `[B, capacity, Hk, D]`, or `[pages, page_size, Hk, D]` with a `block_table`, into `o` in the
/// shape of q and `lse`, f32 `[B, Hq, Sq]` or `[Hq, Tq]`. With `k` and `v` it appends them first.
///
/// `allocate` gets a number of bytes and returns a uint8 tensor of that size on the device of q. It
/// is called at most once, for the workspace of a call that is captured in a CUDA graph.
#[pyfunction]
#[pyo3(signature = (
    q, k_cache, v_cache, o, lse, allocate, k=None, v=None, seqused_k=None, block_table=None,
    cu_seqlens_q=None, cu_seqlens_k=None, sink=None, rotary_cos=None, rotary_sin=None,
    page_lists=None, page_counts=None, max_q=0, left=-1, right=-1, scale=None, softcap=0.0,
    interleaved=false
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attention_decode(
    q: &Bound<'_, PyAny>,
    k_cache: &Bound<'_, PyAny>,
    v_cache: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    allocate: &Bound<'_, PyAny>,
    k: Option<&Bound<'_, PyAny>>,
    v: Option<&Bound<'_, PyAny>>,
    seqused_k: Option<&Bound<'_, PyAny>>,
    block_table: Option<&Bound<'_, PyAny>>,
    cu_seqlens_q: Option<&Bound<'_, PyAny>>,
    cu_seqlens_k: Option<&Bound<'_, PyAny>>,
    sink: Option<&Bound<'_, PyAny>>,
    rotary_cos: Option<&Bound<'_, PyAny>>,
    rotary_sin: Option<&Bound<'_, PyAny>>,
    page_lists: Option<&Bound<'_, PyAny>>,
    page_counts: Option<&Bound<'_, PyAny>>,
    max_q: i64,
    left: i64,
    right: i64,
    scale: Option<f64>,
    softcap: f64,
    interleaved: bool,
) -> PyResult<()> {
    let py = q.py();
    let optional = |what, tensor: Option<_>| tensor.map(|at| Foreign::of(what, at)).transpose();
    let cache = [Foreign::of("k_cache", k_cache)?, Foreign::of("v_cache", v_cache)?].map(Some);
    let inputs = [
        Some(Foreign::of("q", q)?),
        optional("k", k)?,
        optional("v", v)?,
        optional("seqused_k", seqused_k)?,
        optional("block_table", block_table)?,
        optional("cu_seqlens_q", cu_seqlens_q)?,
        optional("cu_seqlens_k", cu_seqlens_k)?,
        optional("sink", sink)?,
        optional("rotary_cos", rotary_cos)?,
        optional("rotary_sin", rotary_sin)?,
        optional("page_lists", page_lists)?,
        optional("page_counts", page_counts)?,
    ];
    let outputs = [Some(Foreign::of("o", o)?), optional("lse", lse)?];
    let options = Options { max_q, left, right, scale, softcap, interleaved };
    let stream = inputs[0].as_ref().ok_or_else(|| Failure::value("q is needed"))?.stream()?;
    let call = Call { cache, inputs, options, stream };
    let (bytes, captured) = py.detach(|| call.workspace_bytes())?;
    // Held until the work is queued.
    let memory = if captured { Some(allocate.call1((bytes,))?) } else { None };
    let memory = optional("workspace", memory.as_ref())?;
    Ok(py.detach(|| {
        let workspace = match memory {
            Some(memory) => {
                let tensor = memory.scratch(&call.stream)?;
                Some(Arc::new(AttentionDecodeWorkspace::from_tensor(tensor)?))
            }
            None => with_memory(|| workspace(&call.stream, bytes))?,
        };
        call.run(outputs, workspace.as_deref())
    })?)
}

/// A call without its outputs.
struct Call<'a> {
    cache: [Option<Foreign<'a>>; 2],
    /// In the order of the arguments: what is only read.
    inputs: [Option<Foreign<'a>>; 12],
    options: Options,
    stream: Stream,
}

impl<'a> Call<'a> {
    /// How large a workspace it needs, and whether that is to be memory of a graph.
    fn workspace_bytes(&self) -> Result<(usize, bool)> {
        if self.stream.device().is_cpu() {
            return Ok((0, false));
        }
        let ([Some(k), Some(v)], []) = views(&self.cache, [])? else {
            return Err(Failure::value("k_cache and v_cache are needed"));
        };
        let (inputs, []) = views(&self.inputs, [])?;
        let (call, _) = operation(&inputs, self.options)?;
        let [_, _, _, seqused_kv, block_table, ..] = inputs;
        let cache = KvCache { seqused_kv, block_table, ..KvCache::new(k, v) };
        let bytes = call.workspace_bytes(&cache, self.stream.device())?;
        Ok((bytes, bytes > 0 && self.stream.is_capturing()?))
    }

    /// Computes; queues the work on a GPU.
    fn run(
        self,
        [o, lse]: [Option<Foreign<'a>>; 2],
        workspace: Option<&AttentionDecodeWorkspace>,
    ) -> Result<()> {
        let Self { cache: [k, v], inputs, options, stream } = self;
        let needed = || Failure::value("k_cache, v_cache and o are needed");
        if inputs[1].is_some() || inputs[2].is_some() {
            let (inputs, [k, v, o, lse]) = views(&inputs, [k, v, o, lse])?;
            let (call, new) = operation(&inputs, options)?;
            let (Some(k), Some(v), Some(o), Some(new)) = (k, v, o, new) else {
                return Err(needed());
            };
            let [_, _, _, seqused_kv, block_table, ..] = inputs;
            let cache = KvCacheMut { seqused_kv, block_table, ..KvCacheMut::new(k, v) };
            let cache = CacheAccess::Append(&new, cache);
            let call = AttentionDecode { workspace, ..call };
            return Ok(call.forward_into(AttentionDecodeOperands { cache, o, lse }, &stream)?);
        }
        // Views of all that is read, so that no output shares memory with any of it.
        let [q, _, _, seqused, table, cu_q, cu_k, sink, cos, sin, lists, counts] = inputs;
        let read = [k, v, q, None, None, seqused, table, cu_q, cu_k, sink, cos, sin, lists, counts];
        let ([k, v, inputs @ ..], [o, lse]) = views(&read, [o, lse])?;
        let (call, _) = operation(&inputs, options)?;
        let (Some(k), Some(v), Some(o)) = (k, v, o) else { return Err(needed()) };
        let [_, _, _, seqused_kv, block_table, ..] = inputs;
        let cache = CacheAccess::Read(KvCache { seqused_kv, block_table, ..KvCache::new(k, v) });
        let call = AttentionDecode { workspace, ..call };
        Ok(call.forward_into(AttentionDecodeOperands { cache, o, lse }, &stream)?)
    }
}

/// The call without its workspace, and what it appends.
fn operation<'v>(
    inputs: &[Option<View<'v>>; 12],
    options: Options,
) -> Result<(AttentionDecode<'v>, Option<AppendKv<'v>>)> {
    let &[q, k, v, _, _, cu_q, cu_k, sink, cos, sin, lists, counts] = inputs;
    let q = q.ok_or_else(|| Failure::value("q is needed"))?;
    let max_seqlen = usize::try_from(options.max_q)
        .map_err(|_| Failure::value(format!("max_seqlen_q is {}", options.max_q)))?;
    let packed = cu_q.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
    let rotary = match (cos, sin) {
        (None, None) => None,
        (Some(cos), Some(sin)) => {
            let pairs =
                if options.interleaved { RotaryPairs::Interleaved } else { RotaryPairs::Halves };
            Some(Rotary { cos, sin, pairs })
        }
        _ => return Err(Failure::value("rotary_cos and rotary_sin come together")),
    };
    let pages = match (lists, counts) {
        (None, None) => None,
        (Some(lists), Some(counts)) => Some(PageLists { lists, counts }),
        _ => return Err(Failure::value("page_lists and page_counts come together")),
    };
    let new = match (k, v) {
        (None, None) if cu_k.is_none() => None,
        (Some(k), Some(v)) => {
            // No sequence has more new tokens than there are.
            let max_seqlen = k.shape().first().copied().unwrap_or(0);
            let packed = cu_k.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
            Some(AppendKv { packed, rotary, ..AppendKv::new(k, v) })
        }
        _ => return Err(Failure::value("k and v come together, and cu_seqlens_k with them")),
    };
    let call = AttentionDecode {
        packed,
        mask: token_mask(options.left, options.right, false)?,
        softmax_scale: options.scale.map(|scale| scale as f32),
        softcap: (options.softcap != 0.0).then_some(options.softcap as f32),
        sink,
        rotary,
        pages,
        ..AttentionDecode::new(q)
    };
    Ok((call, new))
}

/// A workspace of at least this many bytes for calls on this stream, which has one for itself.
fn workspace(stream: &Stream, bytes: usize) -> Result<Option<Arc<AttentionDecodeWorkspace>>> {
    static WORKSPACES: Mutex<Vec<(Stream, Arc<AttentionDecodeWorkspace>)>> = Mutex::new(Vec::new());
    if bytes == 0 {
        return Ok(None);
    }
    let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    let found = workspaces.iter().position(|(owner, _)| owner.is_same_queue(stream));
    if let Some(at) = found.filter(|&at| workspaces[at].1.bytes() >= bytes) {
        return Ok(Some(Arc::clone(&workspaces[at].1)));
    }
    // Sizes double, so that few are made.
    let made = AttentionDecodeWorkspace::new(stream, bytes.next_power_of_two())?;
    let made = Arc::new(made);
    match found {
        Some(at) => workspaces[at].1 = Arc::clone(&made),
        None => workspaces.push((stream.clone(), Arc::clone(&made))),
    }
    Ok(Some(made))
}

/// Merges `parts_o` `[parts, rows, heads, D]` and `parts_lse`, f32 `[parts, heads, rows]`, into `o`
/// `[rows, heads, D]` and `lse`, f32 `[heads, rows]`.
#[pyfunction]
pub(crate) fn attention_merge(
    parts_o: &Bound<'_, PyAny>,
    parts_lse: &Bound<'_, PyAny>,
    o: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let py = parts_o.py();
    let parts = [Foreign::of("parts_o", parts_o)?, Foreign::of("parts_lse", parts_lse)?];
    let outputs = [Foreign::of("o", o)?, Foreign::of("lse", lse)?];
    let run = || -> Result<()> {
        let stream = parts[0].stream()?;
        let ([parts_o, parts_lse], [o, lse]) = views(&parts.map(Some), outputs.map(Some))?;
        let (Some(parts_o), Some(parts_lse), Some(o)) = (parts_o, parts_lse, o) else {
            return Err(Failure::value("parts_o, parts_lse and o are needed"));
        };
        Ok(AttentionMerge::new(parts_o, parts_lse).merge_into(o, lse, &stream)?)
    };
    Ok(py.detach(run)?)
}
