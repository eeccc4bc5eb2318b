//! Attention over a cache, and the merge of attention over parts of the keys, into tensors of the
//! caller.

use crate::attention::scores;
use crate::error::{Failure, Result, with_memory};
use crate::foreign::{Foreign, Operands, of, optional, scratch, views};
use crate::options::Given;
use blockflash_foreign::{DecodeNumbers, DecodeOptions, DecodeTensors};
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, AttentionMerge,
    CacheAccess, CacheScale, KvCache, KvCacheMut, PackedTokens, PageLists, Rotary, RotaryPairs,
    Stream, View, ViewMut,
};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::sync::{Arc, Mutex, PoisonError};

/// Attention of q `[B, Sq, Hq, D]`, or packed with `cu_seqlens_q`, to `k_cache` and `v_cache`
/// `[B, capacity, Hk, D]`, or `[pages, page_size, Hk, D]` with a `block_table`, into `o` in the
/// shape of q and `lse`, f32 `[B, Hq, Sq]` or `[Hq, Tq]`. With `k` and `v` it appends them first. A
/// cache of 8 bits is multiplied with `k_scale` and `v_scale`, or with `k_token_scale` and
/// `v_token_scale`, into which the append writes the scales that it chooses for its rows.
///
/// `allocate` gets a number of bytes and returns a uint8 tensor of that size on the device of q. It
/// is called at most once, for the workspace of a call that is captured in a CUDA graph.
#[pyfunction]
#[pyo3(signature = (q, k_cache, v_cache, o, lse, allocate, k=None, v=None, *options,
    k_token_scale=None, v_token_scale=None))]
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
    options: &Bound<'_, PyTuple>,
    k_token_scale: Option<&Bound<'_, PyAny>>,
    v_token_scale: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let py = q.py();
    let q = of("q", q)?;
    let stream = q.stream().map_err(Failure::from)?;
    let rows = [Some(q), optional("k", k)?, optional("v", v)?];
    let cache = [of("k_cache", k_cache)?, of("v_cache", v_cache)?].map(Some);
    let token_scales =
        [optional("k_token_scale", k_token_scale)?, optional("v_token_scale", v_token_scale)?];
    let DecodeOptions { tensors, numbers } = Given::decode(options)?;
    let outputs = [Some(of("o", o)?), optional("lse", lse)?];
    let call = Call { cache, token_scales, rows, tensors, numbers, stream };
    let (bytes, captured) = py.detach(|| call.workspace_bytes())?;
    // Held until the work is queued.
    let memory = if captured { Some(allocate.call1((bytes,))?) } else { None };
    let memory = optional("workspace", memory.as_ref())?;
    Ok(py.detach(|| {
        let workspace = match memory {
            Some(memory) => {
                let tensor = scratch(&memory, &call.stream)?;
                Some(Arc::new(AttentionDecodeWorkspace::from_tensor(tensor)?))
            }
            None => with_memory(|| workspace(&call.stream, bytes))?,
        };
        call.run(outputs, workspace.as_deref())
    })?)
}

/// A call without its outputs.
pub(crate) struct Call<'a> {
    pub(crate) cache: Operands<'a, 2>,
    /// Of keys and of values: where the append writes the scales that it chooses.
    pub(crate) token_scales: Operands<'a, 2>,
    /// q, k and v.
    pub(crate) rows: Operands<'a, 3>,
    pub(crate) tensors: DecodeTensors<Option<Foreign<'a>>>,
    pub(crate) numbers: DecodeNumbers,
    pub(crate) stream: Stream,
}

impl<'a> Call<'a> {
    /// How large a workspace it needs, and whether that is to be memory of a graph.
    pub(crate) fn workspace_bytes(&self) -> Result<(usize, bool)> {
        if self.stream.device().is_cpu() {
            return Ok((0, false));
        }
        let of_cache = (self.cache.each_ref(), self.token_scales.each_ref());
        let ([Some(k), Some(v)], [k_scale, v_scale], []) = views(of_cache, [])? else {
            return Err(needed());
        };
        let (rows, tensors, []) =
            views((self.rows.each_ref(), self.tensors.each_ref().into()), [])?;
        let tensors = DecodeTensors::from(tensors);
        let (call, _) = operation(rows, &tensors, &self.numbers)?;
        let cache = cache(k, v, &tensors);
        let [k_scale, v_scale] = [k_scale.or(cache.k_scale), v_scale.or(cache.v_scale)];
        let cache = KvCache { k_scale, v_scale, ..cache };
        let bytes = call.workspace_bytes(&cache, self.stream.device())?;
        Ok((bytes, bytes > 0 && self.stream.is_capturing()?))
    }

    /// Computes; queues the work on a GPU.
    pub(crate) fn run(
        self,
        [o, lse]: Operands<'a, 2>,
        workspace: Option<&AttentionDecodeWorkspace>,
    ) -> Result<()> {
        let Self { cache: [k, v], token_scales, ref rows, ref tensors, ref numbers, ref stream } =
            self;
        let given = tensors.each_ref().into();
        if rows[1].is_some() || rows[2].is_some() {
            let [k_scale, v_scale] = token_scales;
            let written = [k, v, o, lse, k_scale, v_scale];
            let (rows, tensors, written) = views((rows.each_ref(), given), written)?;
            let [k, v, o, lse, k_token_scale, v_token_scale] = written;
            let tensors = DecodeTensors::from(tensors);
            let (call, new) = operation(rows, &tensors, numbers)?;
            let (Some(k), Some(v), Some(o), Some(new)) = (k, v, o, new) else {
                return Err(needed());
            };
            let DecodeTensors { seqused_k: seqused_kv, block_table, k_scale, v_scale, .. } =
                tensors;
            let k_scale = scale("k_scale", k_scale, k_token_scale)?;
            let v_scale = scale("v_scale", v_scale, v_token_scale)?;
            let cache =
                KvCacheMut { seqused_kv, block_table, k_scale, v_scale, ..KvCacheMut::new(k, v) };
            let cache = CacheAccess::Append(&new, cache);
            let call = AttentionDecode { workspace, ..call };
            return Ok(call.forward_into(AttentionDecodeOperands { cache, o, lse }, stream)?);
        }
        if token_scales.iter().any(Option::is_some) {
            return Err(Failure::value(
                "k_token_scale and v_token_scale are given without k and v",
            ));
        }
        // Views of all that is read, so that no output shares memory with any of it.
        let ([k, v, q], tensors, [o, lse]) = views(([&k, &v, &rows[0]], given), [o, lse])?;
        let tensors = DecodeTensors::from(tensors);
        let (call, _) = operation([q, None, None], &tensors, numbers)?;
        let (Some(k), Some(v), Some(o)) = (k, v, o) else { return Err(needed()) };
        let cache = CacheAccess::Read(cache(k, v, &tensors));
        let call = AttentionDecode { workspace, ..call };
        Ok(call.forward_into(AttentionDecodeOperands { cache, o, lse }, stream)?)
    }
}

fn needed() -> Failure {
    Failure::value("k_cache, v_cache and o are needed")
}

/// The scales of keys or values that are appended to.
fn scale<'v>(
    what: &str,
    given: Option<View<'v>>,
    chosen: Option<ViewMut<'v>>,
) -> Result<Option<CacheScale<'v>>> {
    match (given, chosen) {
        (given, None) => Ok(given.map(CacheScale::Given)),
        (None, Some(chosen)) => Ok(Some(CacheScale::PerToken(chosen))),
        _ => Err(Failure::value(format!("{what} is given, expected None: the append chooses it"))),
    }
}

/// A cache that is read.
fn cache<'v>(k: View<'v>, v: View<'v>, tensors: &DecodeTensors<Option<View<'v>>>) -> KvCache<'v> {
    let &DecodeTensors { seqused_k: seqused_kv, block_table, k_scale, v_scale, .. } = tensors;
    KvCache { seqused_kv, block_table, k_scale, v_scale, ..KvCache::new(k, v) }
}

/// The call of q, k and v without its workspace, and what it appends.
fn operation<'v>(
    [q, k, v]: [Option<View<'v>>; 3],
    tensors: &DecodeTensors<Option<View<'v>>>,
    numbers: &DecodeNumbers,
) -> Result<(AttentionDecode<'v>, Option<AppendKv<'v>>)> {
    let q = q.ok_or_else(|| Failure::value("q is needed"))?;
    let max_seqlen = usize::try_from(numbers.max_q)
        .map_err(|_| Failure::value(format!("max_seqlen_q is {}", numbers.max_q)))?;
    let packed = tensors.cu_seqlens_q.map(|cu_seqlens| PackedTokens { cu_seqlens, max_seqlen });
    let rotary = match (tensors.rotary_cos, tensors.rotary_sin) {
        (None, None) => None,
        (Some(cos), Some(sin)) => {
            let pairs =
                if numbers.interleaved { RotaryPairs::Interleaved } else { RotaryPairs::Halves };
            Some(Rotary { cos, sin, pairs })
        }
        _ => return Err(Failure::value("rotary_cos and rotary_sin come together")),
    };
    let pages = match (tensors.page_lists, tensors.page_counts) {
        (None, None) => None,
        (Some(lists), Some(counts)) => Some(PageLists { lists, counts }),
        _ => return Err(Failure::value("page_lists and page_counts come together")),
    };
    let new = match (k, v) {
        (None, None) if tensors.cu_seqlens_k.is_none() => None,
        (Some(k), Some(v)) => {
            // No sequence has more new tokens than there are.
            let max_seqlen = k.shape().first().copied().unwrap_or(0);
            let packed = |cu_seqlens| PackedTokens { cu_seqlens, max_seqlen };
            let packed = tensors.cu_seqlens_k.map(packed);
            Some(AppendKv { packed, rotary, ..AppendKv::new(k, v) })
        }
        _ => return Err(Failure::value("k and v come together, and cu_seqlens_k with them")),
    };
    let call = AttentionDecode {
        packed,
        scores: scores(numbers.into(), (*tensors).into())?,
        rotary,
        pages,
        tail_mask: tensors.tail_mask,
        batch_invariant: numbers.batch_invariant,
        ..AttentionDecode::new(q)
    };
    Ok((call, new))
}

/// A workspace of at least this many bytes for calls on this stream, which has one for itself.
pub(crate) fn workspace(
    stream: &Stream,
    bytes: usize,
) -> Result<Option<Arc<AttentionDecodeWorkspace>>> {
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
    let parts = [of("parts_o", parts_o)?, of("parts_lse", parts_lse)?];
    let outputs = [of("o", o)?, of("lse", lse)?];
    let run = || -> Result<()> {
        let (stream, parts) = (parts[0].stream()?, parts.map(Some));
        let (parts, [], [o, lse]) = views((parts.each_ref(), []), outputs.map(Some))?;
        let ([Some(parts_o), Some(parts_lse)], Some(o)) = (parts, o) else {
            return Err(Failure::value("parts_o, parts_lse and o are needed"));
        };
        Ok(AttentionMerge::new(parts_o, parts_lse).merge_into(o, lse, &stream)?)
    };
    Ok(py.detach(run)?)
}
