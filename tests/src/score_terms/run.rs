//! Runs of a case on a device.

use super::{SlopesOf, TermCase, TermData};
use crate::gpu::wait;
use crate::host::{array, download, poisoned};
use crate::number::decode;
use crate::tolerance::{Reference, check};
use blockflash_ops::attention::{Attention, Scores};
use blockflash_ops::attention_bwd::workspace_bytes;
use blockflash_ops::{
    AttentionBackward, AttentionGradientsMut, BlockMask, DType, Error, Operation, Stream, Tensor,
};
use blockflash_oracle::{PRODUCTS, Rounding};
use blockflash_sys::Kernel;

/// The operands of a case on a device.
struct Operands {
    qkv: [Tensor; 3],
    sink: Option<Tensor>,
    bias: Option<Tensor>,
    slopes: Option<Tensor>,
    block_mask: Option<BlockMask>,
}

impl Operands {
    fn upload(case: &TermCase, data: &TermData, stream: &Stream) -> Result<Self, String> {
        let up = |dtype, shape: &[usize], values: &[f32]| {
            array(dtype, shape, values).upload(stream).map_err(|error| error.to_string())
        };
        let TermCase { dtype, head_dim: d, batch, heads, seqlens, .. } = *case;
        let q = up(dtype, &[batch, seqlens[0], heads[0], d], &data.qkv[0])?;
        let [k, v] = [1, 2].map(|i| up(dtype, &[batch, seqlens[1], heads[1], d], &data.qkv[i]));
        let bias = case.bias.map(|of| {
            let [b, h, i, j] = case.bias_shape();
            let (rows, cols) = if of.transposed { (j, i) } else { (i, j) };
            let mut values = vec![f32::NAN; b * h * rows * (cols + of.gap)];
            for (at, &x) in data.bias.iter().enumerate() {
                let [matrix, query, key] = [at / (i * j), at / j % i, at % j];
                let (row, col) = if of.transposed { (key, query) } else { (query, key) };
                values[(matrix * rows + row) * (cols + of.gap) + col] = x;
            }
            up(of.dtype, &[b, h, rows, cols + of.gap], &values)
        });
        let slopes = case.alibi.map(|of| match of {
            SlopesOf::Heads => up(DType::F32, &[heads[0]], &data.slopes[..heads[0]]),
            SlopesOf::Entries => up(DType::F32, &[batch, heads[0]], &data.slopes),
        });
        Ok(Self {
            qkv: [q, k?, v?],
            sink: case.sink.then(|| up(DType::F32, &[heads[0]], &data.sink)).transpose()?,
            bias: bias.transpose()?,
            slopes: slopes.transpose()?,
            block_mask: case.block_mask(stream)?,
        })
    }

    fn attention(&self, case: &TermCase) -> Attention<'_> {
        let [q, k, v] = self.qkv.each_ref().map(Tensor::view);
        let bias = self.bias.as_ref().zip(case.bias).map(|(tensor, of)| {
            let cols = tensor.shape()[3] - of.gap;
            let view = tensor.view().slice(3, 0..cols).expect("columns of the bias");
            if of.transposed { view.permute(&[0, 1, 3, 2]).expect("four axes") } else { view }
        });
        let scores = Scores {
            softcap: case.softcap,
            sink: self.sink.as_ref().map(Tensor::view),
            bias,
            alibi: self.slopes.as_ref().map(Tensor::view),
            ..Scores::of(case.mask)
        };
        Attention { scores, block_mask: self.block_mask.as_ref(), ..Attention::new(q, k, v) }
    }
}

/// Compares a result, element by element.
fn compare(
    name: &str,
    tensor: &Tensor,
    reference: &Reference,
    rounding: &Rounding,
    stream: &Stream,
) -> Result<(), String> {
    let bits = download(stream, tensor)?;
    let got: Vec<f64> = bits.iter().map(|&bits| f64::from(decode(tensor.dtype(), bits))).collect();
    check(&got, reference, rounding, |at| format!("{name}[{at}]"))
}

/// Runs the forward pass, with a kernel or the selected one; returns the number of compared
/// outputs.
pub fn run_forward(
    case: &TermCase,
    data: &TermData,
    kernel: Option<&'static Kernel>,
    stream: &Stream,
) -> Result<usize, String> {
    let run = || {
        let operands = Operands::upload(case, data, stream)?;
        let call = operands.attention(case);
        let [batch, seqlen_q] = [case.batch, case.seqlens[0]];
        let text = |error: blockflash_ops::Error| error.to_string();
        let poisoned = |dtype, shape: &[usize]| poisoned(stream, dtype, shape);
        let mut o = poisoned(case.dtype, &[batch, seqlen_q, case.heads[0], case.head_dim])?;
        let mut lse = poisoned(DType::F32, &[batch, case.heads[0], seqlen_q])?;
        let tile = kernel.and_then(Kernel::attention_tile);
        let has_lse = tile.is_none_or(|tile| tile.lse.suits(true));
        match kernel {
            Some(kernel) => {
                let asked = has_lse.then(|| lse.view_mut());
                match call.run_with(kernel, (o.view_mut(), asked), stream) {
                    Err(Error::Unsupported { .. }) if may_refuse(kernel) => return Ok(0),
                    result => result.map_err(text)?,
                }
            }
            None => {
                call.forward_into(o.view_mut(), Some(lse.view_mut()), stream).map_err(text)?;
            }
        }
        wait(stream, &|| format!("{case:?}"))?;
        let exponent = data.exponent;
        let rounding = Rounding {
            factor: Some(case.dtype),
            exponent,
            ..Rounding::of_products(case.seqlens[1], 1, case.dtype)
        };
        compare("o", &o, &data.forward[0], &rounding, stream)?;
        if !has_lse {
            return Ok(1);
        }
        let steps = 8 + case.head_dim.div_ceil(PRODUCTS);
        let rounding = Rounding::of_products(0, steps, DType::F32);
        compare("lse", &lse, &data.forward[1], &rounding, stream)?;
        Ok(2)
    };
    run().map_err(|error: String| story(case, kernel, &error))
}

/// The same for the gradients, of which some cases have none.
pub fn run_backward(
    case: &TermCase,
    data: &TermData,
    kernel: Option<&'static Kernel>,
    stream: &Stream,
) -> Result<usize, String> {
    let run = || {
        if case.nonfinite {
            return Ok(0);
        }
        let operands = Operands::upload(case, data, stream)?;
        let attention = operands.attention(case);
        let TermCase { dtype, head_dim: d, batch, heads, seqlens, .. } = *case;
        let text = |error: blockflash_ops::Error| error.to_string();
        let up = |dtype, shape: &[usize], values: &[f32]| {
            array(dtype, shape, values).upload(stream).map_err(|error| error.to_string())
        };
        let of_q = [batch, seqlens[0], heads[0], d];
        let of_kv = [batch, seqlens[1], heads[1], d];
        let o = up(dtype, &of_q, &data.o)?;
        let d_o = up(dtype, &of_q, &data.d_o)?;
        let lse = up(DType::F32, &[batch, heads[0], seqlens[0]], &data.lse)?;
        let poisoned = |dtype, shape: &[usize]| poisoned(stream, dtype, shape);
        let (mut dq, mut dk, mut dv) =
            (poisoned(dtype, &of_q)?, poisoned(dtype, &of_kv)?, poisoned(dtype, &of_kv)?);
        let mut dbias =
            case.bias.map(|bias| poisoned(bias.dtype, &case.bias_shape())).transpose()?;
        let call = AttentionBackward { attention, o: o.view(), lse: lse.view(), d_o: d_o.view() };
        let bytes = match (kernel, stream.device().cuda_properties()) {
            (Some(kernel), Some(gpu)) => {
                workspace_bytes(kernel, &call.problem().map_err(text)?, gpu).map_err(text)?
            }
            _ => call.workspace_bytes(stream.device()).map_err(text)?,
        };
        let mut workspace = poisoned(DType::U8, &[bytes.max(1)])?;
        let mut gradients = AttentionGradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        gradients.dbias = dbias.as_mut().map(Tensor::view_mut);
        let out = (gradients, Some(workspace.view_mut()));
        match kernel {
            Some(kernel) => match call.run_with(kernel, out, stream) {
                Err(Error::Unsupported { .. }) if may_refuse(kernel) => return Ok(0),
                result => result.map_err(text)?,
            },
            None => call.run(out, stream).map_err(text)?,
        }
        wait(stream, &|| format!("{case:?}"))?;
        let group = heads[0] / heads[1];
        let terms = [seqlens[1], seqlens[0] * group, seqlens[0] * group];
        for (at, tensor) in [&dq, &dk, &dv].into_iter().enumerate() {
            let rounding = data.rounding(terms[at], case);
            compare(["dq", "dk", "dv"][at], tensor, &data.gradients[at], &rounding, stream)?;
        }
        let Some(dbias) = &dbias else { return Ok(3) };
        let full = batch * heads[0] * seqlens[0] * seqlens[1];
        let summed = full / case.bias_shape().iter().product::<usize>().max(1);
        let rounding = Rounding::of_products(summed, 8, dbias.dtype());
        let additions = rounding.additions + d.div_ceil(PRODUCTS);
        let rounding = Rounding { exponent: data.exponent, additions, ..rounding };
        compare("dbias", dbias, &data.gradients[3], &rounding, stream)?;
        Ok(4)
    };
    run().map_err(|error: String| story(case, kernel, &error))
}

/// The kernels of Hopper leave some problems to portable ones, which take all.
fn may_refuse(kernel: &Kernel) -> bool {
    !kernel.target.is_portable()
}

fn story(case: &TermCase, kernel: Option<&Kernel>, error: &str) -> String {
    let kernel = kernel.map_or("the selected kernel".to_owned(), |kernel| kernel.image_name());
    format!("{kernel}: {error}\n    {case:?}")
}
