//! Runs a backward pass on a device and checks every element of the gradients.

use super::{BackwardData, BackwardReference};
use crate::attention::{AttentionCase, AttentionInputs, Choice, Content, placed, written};
use crate::gpu::wait;
use crate::host::{download, place, poisoned, replace, view, view_mut};
use crate::number::POISON;
use crate::placement::Placed;
use crate::tolerance::{Reference, check};
use blockflash_ops::attention_bwd::workspace_bytes;
use blockflash_ops::{
    AttentionBackward, AttentionGradientsMut, DType, Device, Error, Operation, Stream, Tensor,
};
use blockflash_oracle::Rounding;
use blockflash_sys::manifest;
use std::f32::consts::{LN_2, LOG2_E};

/// The same case with finite numbers only.
pub fn finite(case: AttentionCase) -> AttentionCase {
    let content = match case.content {
        Content::UnseenNan | Content::NanInKeys | Content::NanInValues => Content::Normal,
        other => other,
    };
    AttentionCase { content, ..case }
}

/// Placements of the gradients of o, q, k and v: those of the forward pass in other turns.
fn gradients_placed(case: &AttentionCase) -> [Placed; 4] {
    let [q, kv, _] = case.shapes();
    let [of_q, of_k, of_v, of_o] = &case.placements;
    [of_v.place(&q), of_k.place(&q), of_q.place(&kv), of_o.place(&kv)]
}

/// The log-sum-exp as the forward kernels round it. A bit of it is worth up to a quarter where the
/// largest score of a query is huge, and the kernels of gradients round in the same steps. Beyond
/// 2^22 they pass over a few bits, so there it stays exact.
fn lse_on(device: &Device, case: &AttentionCase, exact: &[f32]) -> Vec<f32> {
    if case.content != Content::HugeScores || device.is_cpu() {
        return exact.to_vec();
    }
    let scale = case.scale();
    let rounded = |&x: &f32| match x.abs() < 2f32.powi(22) {
        true => x / scale * (LOG2_E * scale) * LN_2,
        false => x,
    };
    exact.iter().map(rounded).collect()
}

/// The operands of a case on a device.
pub struct BackwardInputs {
    case: AttentionCase,
    forward: AttentionInputs,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
}

/// The gradients of a case on a device, poisoned when made.
pub struct BackwardOutputs {
    case: AttentionCase,
    qkv: [Tensor; 3],
    d_sink: Option<Tensor>,
    dbias: Option<Tensor>,
    workspace: Tensor,
}

impl BackwardInputs {
    /// Uploads the data of a case; the gaps of the tensors hold NaN.
    pub fn upload(
        case: &AttentionCase,
        data: &BackwardData,
        stream: &Stream,
    ) -> Result<Self, String> {
        let ([.., o], lse) = placed(case);
        let [d_o, ..] = gradients_placed(case);
        let lse_values = lse_on(stream.device(), case, &data.lse);
        Ok(Self {
            case: case.clone(),
            forward: AttentionInputs::upload(case, &data.forward, stream)?,
            o: place(stream, case.dtype, &data.o, &o)?,
            lse: place(stream, DType::F32, &lse_values, &lse)?,
            d_o: place(stream, case.dtype, &data.d_o, &d_o)?,
        })
    }

    /// Replaces all operands in place, as a replayed graph needs it; see
    /// [`AttentionInputs::refill`].
    pub fn refill(
        &mut self,
        case: &AttentionCase,
        data: &BackwardData,
        stream: &Stream,
    ) -> Result<(), String> {
        self.forward.refill(case, &data.forward, stream)?;
        let ([.., o], lse) = placed(case);
        let [d_o, ..] = gradients_placed(case);
        replace(&mut self.o, stream, &data.o, &o)?;
        replace(&mut self.lse, stream, &lse_on(stream.device(), case, &data.lse), &lse)?;
        replace(&mut self.d_o, stream, &data.d_o, &d_o)?;
        self.case = case.clone();
        Ok(())
    }

    /// The call.
    pub fn backward(&self) -> AttentionBackward<'_> {
        let ([.., o], lse) = placed(&self.case);
        let [d_o, ..] = gradients_placed(&self.case);
        AttentionBackward {
            attention: self.forward.attention(),
            o: view(&self.o, &o),
            lse: view(&self.lse, &lse),
            d_o: view(&self.d_o, &d_o),
        }
    }
}

impl BackwardOutputs {
    /// Allocates and poisons the gradients, and the workspace of the call.
    pub fn poisoned(inputs: &BackwardInputs, stream: &Stream) -> Result<Self, String> {
        let bytes = inputs.backward().workspace_bytes(stream.device());
        let bytes = bytes.map_err(|error| format!("workspace: {error}"))?;
        Self::with_workspace(inputs, bytes, stream)
    }

    /// The same with room for the workspace of any kernel that takes the problem, selected or not.
    pub fn of_any_kernel(inputs: &BackwardInputs, stream: &Stream) -> Result<Self, String> {
        let problem = inputs.backward().problem().map_err(|error| error.to_string())?;
        let gpu = stream.device().cuda_properties().ok_or("not on a GPU")?;
        let most = manifest::kernels()
            .iter()
            .filter(|kernel| kernel.attention_bwd_tile().is_some_and(|tile| !tile.terms))
            .map(|kernel| workspace_bytes(kernel, &problem, gpu).map_err(|error| error.to_string()))
            .try_fold(0, |most, bytes| bytes.map(|bytes| most.max(bytes)))?;
        Self::with_workspace(inputs, most, stream)
    }

    /// The same with a workspace of this many bytes.
    pub fn with_workspace(
        inputs: &BackwardInputs,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Self, String> {
        let case = &inputs.case;
        let [_, gradients @ ..] = gradients_placed(case);
        let [dq, dk, dv] = gradients.map(|placed| poisoned(stream, case.dtype, &placed.physical));
        let d_sink = case.scores.sink.map(|()| poisoned(stream, DType::F32, &[case.heads_q]));
        let dbias = case.terms.bias.as_ref().zip(case.bias_placed());
        let dbias = dbias.map(|(b, placed)| poisoned(stream, b.gradient_dtype(), &placed.physical));
        Ok(Self {
            case: case.clone(),
            qkv: [dq?, dk?, dv?],
            d_sink: d_sink.transpose()?,
            dbias: dbias.transpose()?,
            workspace: poisoned(stream, DType::U8, &[bytes])?,
        })
    }

    /// Poisons the gradients and the workspace again.
    pub fn poison(&mut self, stream: &Stream) -> Result<(), String> {
        let others = self.d_sink.iter_mut().chain(&mut self.dbias).chain([&mut self.workspace]);
        let mut tensors = self.qkv.iter_mut().chain(others);
        let filled = tensors.try_for_each(|tensor| tensor.fill_bytes(stream, POISON));
        filled.map_err(|error| error.to_string())
    }

    /// The gradients for writing, and the workspace.
    pub fn views(&mut self) -> (AttentionGradientsMut<'_>, Option<blockflash_ops::ViewMut<'_>>) {
        let [_, placed @ ..] = gradients_placed(&self.case);
        let [dq, dk, dv] = &mut self.qkv;
        let dbias = self.dbias.as_mut().zip(self.case.bias_placed());
        let gradients = AttentionGradientsMut {
            dq: view_mut(dq, &placed[0]),
            dk: view_mut(dk, &placed[1]),
            dv: view_mut(dv, &placed[2]),
            d_sink: self.d_sink.as_mut().map(Tensor::view_mut),
            dbias: dbias.map(|(tensor, placed)| view_mut(tensor, &placed)),
        };
        (gradients, Some(self.workspace.view_mut()))
    }

    /// Queues the computation.
    pub fn launch(
        &mut self,
        inputs: &BackwardInputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (gradients, workspace) = self.views();
        match kernel {
            Choice::Selected => inputs.backward().backward_into(gradients, workspace, stream),
            Choice::This(row) => inputs.backward().run_with(row, (gradients, workspace), stream),
        }
    }

    /// Every bit of all gradients, gaps included: of q, k, v, the sink and the bias.
    pub fn bits(&self, stream: &Stream) -> Result<[Vec<u32>; 5], String> {
        let [dq, dk, dv] = &self.qkv;
        let d_sink = self.d_sink.as_ref().map(|d_sink| download(stream, d_sink)).transpose()?;
        let [dq, dk, dv] = [dq, dk, dv].map(|tensor| download(stream, tensor));
        let dbias = self.dbias.as_ref().map(|dbias| download(stream, dbias)).transpose()?;
        Ok([dq?, dk?, dv?, d_sink.unwrap_or_default(), dbias.unwrap_or_default()])
    }

    /// The logical values of the gradients of q, k and v, after checking that exactly these were
    /// written.
    pub fn values(&self, stream: &Stream) -> Result<[Vec<f32>; 3], String> {
        let [_, placed @ ..] = gradients_placed(&self.case);
        let bits = self.bits(stream)?;
        let value = |i: usize, name: &str| {
            let values = written(&placed[i], &bits[i], self.case.dtype, |_| true);
            values.map_err(|error| format!("{name}: {error}"))
        };
        Ok([value(0, "dq")?, value(1, "dk")?, value(2, "dv")?])
    }

    /// Judges the gradients; returns how many were compared.
    pub fn check(&self, reference: &BackwardReference, stream: &Stream) -> Result<usize, String> {
        let case = &self.case;
        let (d, roundings) = (case.head_dim, reference.rounding(case));
        let named = [("dq", case.heads_q), ("dk", case.heads_kv), ("dv", case.heads_kv)];
        for (i, (values, (name, heads))) in self.values(stream)?.iter().zip(named).enumerate() {
            let name = |at: usize| {
                format!("{name}[row {}, head {}, {}]", at / d / heads, at / d % heads, at % d)
            };
            judge(values, &reference.qkv[i], &roundings[i], name)?;
        }
        let compared = 3 + self.check_bias(reference, stream)?;
        let Some(d_sink) = &self.d_sink else { return Ok(compared) };
        let d_sink = d_sink.to_vec::<f32>(stream).map_err(|error| error.to_string())?;
        let rounding = reference.sink_rounding(case);
        judge(&d_sink, &reference.d_sink, &rounding, |head| format!("d_sink[{head}]"))?;
        Ok(compared + 1)
    }

    /// Judges the gradient of the bias, if there is one.
    fn check_bias(&self, reference: &BackwardReference, stream: &Stream) -> Result<usize, String> {
        let Some((bias, placed)) = self.case.terms.bias.as_ref().zip(self.case.bias_placed())
        else {
            return Ok(0);
        };
        let [.., bits] = self.bits(stream)?;
        let values = written(&placed, &bits, bias.gradient_dtype(), |_| true)
            .map_err(|error| format!("dbias: {error}"))?;
        let shape = self.case.bias_shape();
        let name = |at: usize| {
            let [_, heads, queries, keys] = [shape[0], shape[1], shape[2], shape[3]];
            let (row, key) = (at / keys, at % keys);
            let (head, query) = (row / queries, row % queries);
            format!("dbias[{}, {}, {query}, {key}]", head / heads, head % heads)
        };
        judge(&values, &reference.dbias, &reference.bias_rounding(&self.case), name)?;
        Ok(1)
    }
}

/// The tolerance rule; and what no pair contributes to is 0, also beyond the sequences.
fn judge(
    values: &[f32],
    reference: &Reference,
    rounding: &Rounding,
    name: impl Fn(usize) -> String,
) -> Result<(), String> {
    let count = reference.exact.len();
    let got: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
    check(&got[..count], reference, rounding, &name)?;
    let untouched = |at: usize| at >= count || reference.partial[at] == 0.0;
    match (0..got.len()).find(|&at| untouched(at) && got[at] != 0.0) {
        None => Ok(()),
        Some(at) => Err(format!("{} is {}, but nothing contributes to it", name(at), got[at])),
    }
}

/// Uploads, runs, waits and checks a case whose data and reference are given. Returns the number of
/// compared outputs, or a complete description of the failure.
pub fn run_and_check(
    case: &AttentionCase,
    data: &BackwardData,
    reference: &BackwardReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let story = |what: &str| format!("gradients on {}: {what}\n    {case:?}", stream.device());
    let run = || {
        let inputs = BackwardInputs::upload(case, data, stream)?;
        let mut outputs = match kernel {
            Choice::Selected => BackwardOutputs::poisoned(&inputs, stream)?,
            Choice::This(_) => BackwardOutputs::of_any_kernel(&inputs, stream)?,
        };
        outputs.launch(&inputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs"))?;
        outputs.check(reference, stream)
    };
    run().map_err(|error| story(&error))
}

/// The same from the case alone, with [finite] numbers.
pub fn run_case(case: &AttentionCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let case = &finite(case.clone());
    let data = BackwardData::generate(case);
    let reference = BackwardReference::compute(case, &data);
    run_and_check(case, &data, &reference, kernel, stream)
}
