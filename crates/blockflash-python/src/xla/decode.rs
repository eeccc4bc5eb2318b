//! Attention over a cache.

use super::attention::results;
use super::named::Named;
use crate::decode::{Call as Decode, needed};
use crate::error::{Failure, Result};
use crate::foreign::scratch;
use blockflash_foreign::DecodeOptions;
use blockflash_foreign::xla::Call;
use blockflash_ops::AttentionDecodeWorkspace;

/// What a call has besides the options.
const KNOWN: [&str; 5] = ["q", "k_cache", "v_cache", "k", "v"];

/// Computes `o` and `lse`. With `k` and `v` it appends them to the cache first, which is then in
/// the memory of further results.
pub(super) fn run(call: Call<'_>) -> Result<()> {
    let Call { operands, mut outputs, attributes, memory } = call;
    let Some((o, rest)) = outputs.split_first_mut() else {
        return Err(results(&outputs, "o and lse"));
    };
    let known = (DecodeOptions::TABLE, &KNOWN[..]);
    let named = Named::new(&operands, &attributes, o.dims(), known)?;
    let appends = named.has("k") || named.has("v");
    let (lse, caches) = match rest {
        [lse] if !appends => (lse, None),
        [lse, k_cache, v_cache] if appends => (lse, Some([k_cache, v_cache])),
        _ => {
            let expected = if appends { "o, lse, k_cache and v_cache" } else { "o and lse" };
            return Err(Failure::value(format!("the results are not {expected}")));
        }
    };
    let mut caches = caches;
    for (name, output) in [("k_cache", 2), ("v_cache", 3)] {
        let place = named.operand(name).ok_or_else(needed)?.output();
        if appends && place != Some(output) {
            return Err(Failure::value(format!("{name} is not in the memory of its result")));
        }
    }
    for part in named.entries() {
        let q = named.tensors(["q"], part)?;
        let stream = q[0].stream()?;
        let [q] = q.map(Some);
        let rows = [q, named.tensor("k", part)?, named.tensor("v", part)?];
        let cache = match &mut caches {
            Some([k, v]) => {
                [named.written("k_cache", k, part)?, named.written("v_cache", v, part)?]
            }
            None => named.tensors(["k_cache", "v_cache"], part)?,
        };
        let DecodeOptions { tensors, numbers } = DecodeOptions::read(&mut named.options(part))?;
        let call = Decode {
            cache: cache.map(Some),
            token_scales: [None, None],
            rows,
            tensors,
            numbers,
            stream: stream.clone(),
        };
        let (bytes, _) = call.workspace_bytes()?;
        let mut room = (bytes > 0).then(|| memory.scratch(bytes)).transpose()?;
        let room = room.as_mut().map(|room| room.foreign("workspace")).transpose()?;
        let workspace = match &room {
            Some(room) => Some(AttentionDecodeWorkspace::from_tensor(scratch(room, &stream)?)?),
            None => None,
        };
        let write = [named.written("o", o, part)?, named.written("lse", lse, part)?].map(Some);
        call.run(write, workspace.as_ref())?;
    }
    Ok(())
}
