//! Attention.

use super::named::Named;
use super::parts::Part;
use crate::attention::call;
use crate::error::{Failure, Result};
use blockflash_foreign::xla::{Call, Output};
use blockflash_foreign::{AttentionNumbers, AttentionOptions, Foreign, views};
use blockflash_ops::{BlockChoice, BlockGeometry, BlockMaskBuffer, BlockSource, Stream};

/// What a call has besides the options.
const KNOWN: [&str; 6] = ["q", "k", "v", "blocks", "block_q", "block_k"];

/// Computes `o` in the shape of q with the head dimension of v, and `lse`.
pub(super) fn run(call_: Call<'_>) -> Result<()> {
    let Call { operands, mut outputs, attributes, .. } = call_;
    let [o, lse] = &mut outputs[..] else { return Err(results(&outputs, "o and lse")) };
    let known = (AttentionOptions::TABLE, &KNOWN[..]);
    let named = Named::new(&operands, &attributes, o.dims(), known)?;
    for part in named.parts(&[("o", o.dims()), ("lse", lse.dims())])? {
        let qkv = named.tensors(["q", "k", "v"], part)?;
        let AttentionOptions { tensors, numbers } =
            AttentionOptions::read(&mut named.options(part))?;
        let stream = qkv[0].stream()?;
        let mask = blocks(&named, part, &qkv, &numbers)?;
        let mask = mask.map(|blocks| blocks.build(false, &stream)).transpose()?;
        let write = [named.written("o", o, part)?, named.written("lse", lse, part)?].map(Some);
        let qkv = qkv.map(Some);
        let (qkv, tensors, [o, lse]) = views((qkv.each_ref(), tensors.each_ref().into()), write)?;
        let o = o.ok_or_else(|| Failure::value("o is needed"))?;
        let mask = mask.as_ref().map(BlockMaskBuffer::mask);
        call(qkv, tensors.into(), &numbers, mask)?.forward_into(o, lse, &stream)?;
    }
    Ok(())
}

/// Wrong results.
pub(super) fn results(outputs: &[Output<'_>], expected: &str) -> Failure {
    Failure::value(format!("there are {} results, expected {expected}", outputs.len()))
}

/// The visited blocks, and the sizes of their mask.
pub(super) struct Blocks<'c> {
    blocks: Foreign<'c>,
    geometry: BlockGeometry,
}

/// The block mask of a part, if it has one: the operand `blocks`, u8 `[batch | 1, heads_q | 1,
/// rows, cols]`, not 0 where a block is visited.
pub(super) fn blocks<'c>(
    named: &Named<'c, '_>,
    part: Part,
    [q, k, _]: &[Foreign<'_>; 3],
    numbers: &AttentionNumbers,
) -> Result<Option<Blocks<'c>>> {
    if numbers.block_mask != 0 {
        return Err(Failure::value("block_mask is a number, expected the operand blocks"));
    }
    let Some(blocks) = named.tensor("blocks", part)? else { return Ok(None) };
    let sizes = [q, k].map(|tensor| tensor.layout().shape().get(1).copied());
    let [Some(seqlen_q), Some(seqlen_kv)] = sizes else {
        return Err(Failure::value("blocks are given for q and k without a length"));
    };
    let block = [named.size("block_q")?, named.size("block_k")?];
    let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block[0], block[1])?;
    Ok(Some(Blocks { blocks, geometry }))
}

impl Blocks<'_> {
    /// The mask, which is built on the device.
    pub(super) fn build(&self, backward: bool, stream: &Stream) -> Result<BlockMaskBuffer> {
        let blocks = self.blocks.view()?;
        let &[batch, heads, ..] = blocks.shape() else {
            let shape = blocks.shape();
            let text = format!("blocks has shape {shape:?}, expected [batch, heads, rows, cols]");
            return Err(Failure::value(text));
        };
        let room = blocks.layout().elements();
        let mut buffer = BlockMaskBuffer::new(self.geometry, batch, heads, room, stream)?;
        if backward && !stream.device().is_cpu() {
            buffer = buffer.with_transpose(stream)?;
        }
        buffer.build(&BlockChoice::new(BlockSource::Bool(blocks)), stream)?;
        Ok(buffer)
    }
}
