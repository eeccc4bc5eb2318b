//! Attention over a cache.

use super::attention::results;
use super::named::Named;
use crate::decode::Call as Decode;
use crate::error::{Failure, Result};
use crate::foreign::scratch;
use blockflash_foreign::DecodeOptions;
use blockflash_foreign::xla::Call;
use blockflash_ops::AttentionDecodeWorkspace;

/// What a call has besides the options.
const KNOWN: [&str; 7] = ["q", "k_cache", "v_cache", "k", "v", "k_token_scale", "v_token_scale"];

/// What an append changes, which is in the memory of the results behind `o` and `lse`.
const CHANGED: [&str; 4] = ["k_cache", "v_cache", "k_token_scale", "v_token_scale"];

/// Computes `o` and `lse`. With `k` and `v` it appends them to the cache first, which is then in
/// the memory of further results, and so are the scales of rows that the append chooses.
pub(super) fn run(call: Call<'_>) -> Result<()> {
    let Call { operands, mut outputs, attributes, memory } = call;
    let Some((o, rest)) = outputs.split_first_mut() else {
        return Err(results(&outputs, "o and lse"));
    };
    let known = (DecodeOptions::TABLE, &KNOWN[..]);
    let named = Named::new(&operands, &attributes, o.dims(), known)?;
    let appends = named.has("k") || named.has("v");
    let chooses = named.has("k_token_scale") || named.has("v_token_scale");
    let changed = match (appends, chooses) {
        (false, false) => &CHANGED[..0],
        (true, false) => &CHANGED[..2],
        (true, true) => &CHANGED[..],
        (false, true) => {
            return Err(Failure::value("k_token_scale and v_token_scale come with k and v"));
        }
    };
    let (lse, written) = match rest {
        [lse, written @ ..] if written.len() == changed.len() => (lse, written),
        _ => {
            let expected = [&["o", "lse"], changed].concat().join(", ");
            return Err(Failure::value(format!("the results are not {expected}")));
        }
    };
    for (at, &name) in changed.iter().enumerate() {
        let operand = named.operand(name);
        let operand = operand.ok_or_else(|| Failure::value(format!("{name} is needed")))?;
        if operand.output() != Some(2 + at) {
            return Err(Failure::value(format!("{name} is not in the memory of its result")));
        }
    }
    for part in named.entries() {
        let q = named.tensors(["q"], part)?;
        let stream = q[0].stream()?;
        let [q] = q.map(Some);
        let rows = [q, named.tensor("k", part)?, named.tensor("v", part)?];
        let places = changed.iter().zip(&mut *written);
        let mut places = places.map(|(name, output)| named.written(name, output, part));
        let [k_cache, v_cache, k_scale, v_scale] = [(); 4].map(|()| places.next().transpose());
        let cache = match appends {
            true => [k_cache?, v_cache?],
            false => named.tensors(["k_cache", "v_cache"], part)?.map(Some),
        };
        let token_scales = [k_scale?, v_scale?];
        let DecodeOptions { tensors, numbers } = DecodeOptions::read(&mut named.options(part))?;
        let call = Decode { cache, token_scales, rows, tensors, numbers, stream: stream.clone() };
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
