//! Gradients of attention, as candle's `backward` asks for them.

use super::candle_core::{Result, Tensor};
use super::error::refused;
use super::memory::{Operand, Place, dtype_of, tensor};
use super::options::Options;
use blockflash_ops::{AttentionBackward, AttentionGradientsMut, DType};

/// The gradients of q, k and v from that of the output, and that of the bias where it is asked for,
/// in its shape and element type.
pub(crate) fn gradients(
    options: &Options,
    [q, k, v]: [&Tensor; 3],
    [o, lse, d_o]: [&Tensor; 3],
    bias: Option<&Tensor>,
) -> Result<([Tensor; 3], Option<Tensor>)> {
    // Sums give expanded gradients, whose neighbours in the last dimension are one element.
    let d_o = d_o.contiguous()?;
    let place = Place::of(q.device())?;
    let locked = [q, k, v, o, lse, &d_o].map(|tensor| tensor.storage_and_layout());
    let read = |what, at: usize| place.read(&Operand::of(what, &locked[at])?);
    let (q_read, k_read, v_read) = (read("q", 0)?, read("k", 1)?, read("v", 2)?);
    let (o, lse, d_o) = (read("o", 3)?, read("lse", 4)?, read("the gradient of o", 5)?);

    let dtype = dtype_of("q", q.dtype())?;
    let new = |of: &Tensor| place.allocate(dtype, of.dims(), false);
    let (mut dq, mut dk, mut dv) = (new(q)?, new(k)?, new(v)?);
    let new_like =
        |bias: &Tensor| place.allocate(dtype_of("bias", bias.dtype())?, bias.dims(), false);
    let mut dbias = bias.map(new_like).transpose()?;
    {
        let (mut dq, mut dk) = (place.write(&mut dq, q.dims())?, place.write(&mut dk, k.dims())?);
        let mut dv = place.write(&mut dv, v.dims())?;
        let dbias = dbias.as_mut().zip(bias);
        let dbias = dbias.map(|(dbias, bias)| place.write(dbias, bias.dims()));
        let mut dbias = dbias.transpose()?;
        options.with_views(&place, [&q_read, &k_read, &v_read], |attention| {
            let (attention, o, lse, d_o) = (*attention, o.view, lse.view, d_o.view);
            let call = AttentionBackward { attention, o, lse, d_o };
            let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|of| of.view.reborrow());
            let dbias = dbias.as_mut().map(|of| of.view.reborrow());
            let gradients =
                AttentionGradientsMut { dbias, ..AttentionGradientsMut::new(dq, dk, dv) };
            let bytes = call.workspace_bytes(&place.device()).map_err(refused)?;
            let mut workspace =
                (bytes > 0).then(|| place.allocate(DType::U8, &[bytes], false)).transpose()?;
            let mut workspace =
                workspace.as_mut().map(|of| place.write(of, &[bytes])).transpose()?;
            let workspace = workspace.as_mut().map(|of| of.view.reborrow());
            place.run(|stream| call.backward_into(gradients, workspace, stream))
        })?;
    }
    let dbias = dbias.zip(bias).map(|(dbias, bias)| tensor(dbias, bias.dims()));
    Ok(([tensor(dq, q.dims()), tensor(dk, k.dims()), tensor(dv, v.dims())], dbias))
}
