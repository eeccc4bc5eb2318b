//! The gradients of attention.

use super::attention::{blocks, results};
use super::named::Named;
use crate::attention::call;
use crate::error::{Failure, Result};
use blockflash_foreign::xla::Call;
use blockflash_foreign::{AttentionNumbers, AttentionOptions, AttentionTensors, Views, views};
use blockflash_ops::{AttentionBackward, AttentionGradientsMut, BlockMask, BlockMaskBuffer, View};

/// What a call has besides the options. `bias_gradient` asks for the gradient of the bias.
const KNOWN: [&str; 10] =
    ["q", "k", "v", "o", "lse", "d_o", "blocks", "block_q", "block_k", "bias_gradient"];

/// Computes `dq`, `dk` and `dv`, with a sink `d_sink`, and with `bias_gradient` `d_bias`.
pub(super) fn run(call_: Call<'_>) -> Result<()> {
    let Call { operands, mut outputs, attributes, memory } = call_;
    // Operands may have fewer entries of vmap.
    let dims = outputs.first().map_or(&[][..], |dq| dq.dims());
    let known = (AttentionOptions::TABLE, &KNOWN[..]);
    let named = Named::new(&operands, &attributes, dims, known)?;
    let mut names = vec!["dq", "dk", "dv"];
    names.extend(named.has("sink").then_some("d_sink"));
    names.extend(named.flag("bias_gradient")?.then_some("d_bias"));
    if outputs.len() != names.len() {
        return Err(results(&outputs, &names.join(", ")));
    }
    let dims: Vec<_> = names.iter().zip(&outputs).map(|(&name, o)| (name, o.dims())).collect();
    for part in named.parts(&dims)? {
        let [q, k, v, o, lse, d_o] = named.tensors(["q", "k", "v", "o", "lse", "d_o"], part)?;
        let AttentionOptions { tensors, numbers } =
            AttentionOptions::read(&mut named.options(part))?;
        let (stream, qkv) = (q.stream()?, [q, k, v]);
        let mask = blocks(&named, part, &qkv, &numbers)?;
        let mask = mask.map(|blocks| blocks.build(true, &stream)).transpose()?;
        let mask = mask.as_ref().map(BlockMaskBuffer::mask);
        let [q, k, v] = qkv;
        let operands = [q, k, v, o, lse, d_o].map(Some);
        let (read, options, []) = views((operands.each_ref(), tensors.each_ref().into()), [])?;
        let bytes =
            operation(read, options.into(), &numbers, mask)?.workspace_bytes(memory.device())?;
        let mut scratch = (bytes > 0).then(|| memory.scratch(bytes)).transpose()?;
        let mut write = [const { None }; 6];
        for ((name, output), at) in names.iter().zip(&mut outputs).zip(0..) {
            // The gradient of a bias has its place also where there is no sink.
            let place = if *name == "d_bias" { 4 } else { at };
            write[place] = Some(named.written(name, output, part)?);
        }
        write[5] = scratch.as_mut().map(|memory| memory.foreign("workspace")).transpose()?;
        let (read, options, written) =
            views((operands.each_ref(), tensors.each_ref().into()), write)?;
        let [Some(dq), Some(dk), Some(dv), d_sink, dbias, workspace] = written else {
            return Err(Failure::value("dq, dk and dv are needed"));
        };
        let gradients = AttentionGradientsMut { dq, dk, dv, d_sink, dbias };
        operation(read, options.into(), &numbers, mask)?
            .backward_into(gradients, workspace, &stream)?;
    }
    Ok(())
}

fn operation<'v>(
    [q, k, v, o, lse, d_o]: Views<'v, 6>,
    tensors: AttentionTensors<Option<View<'v>>>,
    numbers: &AttentionNumbers,
    mask: Option<&'v BlockMask>,
) -> Result<AttentionBackward<'v>> {
    let (Some(o), Some(lse), Some(d_o)) = (o, lse, d_o) else {
        return Err(Failure::value("o, lse and d_o are needed"));
    };
    Ok(AttentionBackward { attention: call([q, k, v], tensors, numbers, mask)?, o, lse, d_o })
}
