//! Runs cases on a device and checks everything that they write.

use super::{IndexBackwardCase, IndexBackwardData};
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload};
use crate::number::{POISON, decode, encode, poison, rng};
use crate::tolerance::check;
use blockflash_ops::attention_index::backward::plan_with;
use blockflash_ops::{
    AttentionGradientsMut, DType, Error, HeadDims, IndexAttention, IndexAttentionBackward,
    IndexLists, KvCache, PackedTokens, Stream, Tensor,
};
use blockflash_safe::AttentionIndexBwdKernels;
use rand::Rng;

/// The kernels of a run: those that are selected, or these.
pub type IndexBackwardChoice = Option<AttentionIndexBwdKernels<'static>>;

/// The operands of a case on a device.
struct Inputs {
    case: IndexBackwardCase,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    offsets: [Tensor; 2],
    entries: Tensor,
}

/// Gradients and workspace.
struct Outputs {
    gradients: [Tensor; 3],
    workspace: Tensor,
}

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn bits(dtype: DType, values: &[f32]) -> Vec<u32> {
    values.iter().map(|&x| if x.is_nan() { poison(dtype) } else { encode(dtype, x) }).collect()
}

/// The log-sum-exp in the order of its tensor.
fn lse_of(case: &IndexBackwardCase, data: &IndexBackwardData) -> Vec<u32> {
    let ([heads, _], [rows, _]) = (case.heads, case.rows());
    let per_sequence = if case.packed { rows } else { case.longest()[0] };
    let sequences = if case.packed { 1 } else { case.batch() };
    let at = |b: usize, head: usize, query: usize| (b * per_sequence + query) * heads + head;
    (0..sequences)
        .flat_map(|b| (0..heads).map(move |head| [b, head]))
        .flat_map(|[b, head]| (0..per_sequence).map(move |query| at(b, head, query)))
        .map(|at| data.lse[at].to_bits())
        .collect()
}

impl Inputs {
    fn upload(
        case: &IndexBackwardCase,
        data: &IndexBackwardData,
        stream: &Stream,
    ) -> Result<Self, String> {
        let (dtype, HeadDims { qk, v }, [heads, heads_kv]) =
            (case.dtype, case.head_dims, case.heads);
        let ([rows, rows_kv], [longest, longest_kv]) = (case.rows(), case.longest());
        let of_q = |width| match case.packed {
            true => vec![rows, heads, width],
            false => vec![case.batch(), longest, heads, width],
        };
        let of_k = |width| match case.packed {
            true => vec![1, rows_kv, heads_kv, width],
            false => vec![case.batch(), longest_kv, heads_kv, width],
        };
        let lse_shape = match case.packed {
            true => vec![heads, rows],
            false => vec![case.batch(), heads, longest],
        };
        let put =
            |values: &[f32], shape: &[usize]| upload(stream, dtype, &bits(dtype, values), shape);
        let offsets = case
            .offsets()
            .map(|offsets| Tensor::from_slice(stream, &offsets, &[case.batch() + 1]).map_err(told));
        let [starts_q, starts_k] = offsets;
        let lists = [case.groups, rows, case.list[1]];
        Ok(Self {
            case: case.clone(),
            q: put(&data.q, &of_q(qk))?,
            k: put(&data.k, &of_k(qk))?,
            v: put(&data.v, &of_k(v))?,
            o: put(&data.o, &of_q(v))?,
            d_o: put(&data.d_o, &of_q(v))?,
            lse: upload(stream, DType::F32, &lse_of(case, data), &lse_shape)?,
            offsets: [starts_q?, starts_k?],
            entries: Tensor::from_slice(stream, &data.entries, &lists).map_err(told)?,
        })
    }

    fn backward(&self) -> IndexAttentionBackward<'_> {
        let case = &self.case;
        let packed = |at: usize| {
            let max_seqlen = case.longest()[at].max(1);
            case.packed.then(|| PackedTokens { cu_seqlens: self.offsets[at].view(), max_seqlen })
        };
        let lists = IndexLists { entries: self.entries.view(), granularity: case.list[0] };
        let attention = IndexAttention {
            packed: packed(0),
            packed_kv: packed(1),
            scores: case.scores(),
            ..IndexAttention::new(self.q.view(), lists)
        };
        let cache = KvCache::new(self.k.view(), self.v.view());
        let (o, lse, d_o) = (self.o.view(), self.lse.view(), self.d_o.view());
        IndexAttentionBackward { attention, cache, o, lse, d_o }
    }

    /// Bytes of workspace with which a run has one pass, or as many as there may be.
    fn workspace(
        &self,
        kernels: IndexBackwardChoice,
        least: bool,
        stream: &Stream,
    ) -> Result<usize, String> {
        let (backward, device) = (self.backward(), stream.device());
        match (kernels, device.cuda_properties()) {
            (Some(kernels), Some(gpu)) => {
                let problem = backward.problem().map_err(told)?;
                let problem = if least { problem.with_workspace(0) } else { problem };
                let plan = plan_with(kernels, &problem, gpu).map_err(told)?;
                Ok(plan.workspace_bytes)
            }
            _ if least => backward.least_workspace_bytes(device).map_err(told),
            _ => backward.workspace_bytes(device).map_err(told),
        }
    }
}

impl Outputs {
    fn poisoned(inputs: &Inputs, bytes: usize, stream: &Stream) -> Result<Self, String> {
        let squeezed = |tensor: &Tensor| match inputs.case.packed {
            true => tensor.shape()[1..].to_vec(),
            false => tensor.shape().to_vec(),
        };
        let dtype = inputs.case.dtype;
        let new = |shape: &[usize]| poisoned(stream, dtype, shape);
        let gradients =
            [new(inputs.q.shape())?, new(&squeezed(&inputs.k))?, new(&squeezed(&inputs.v))?];
        Ok(Self { gradients, workspace: poisoned(stream, DType::U8, &[bytes])? })
    }

    fn poison(&mut self, stream: &Stream) -> Result<(), String> {
        let mut tensors = self.gradients.iter_mut().chain([&mut self.workspace]);
        tensors.try_for_each(|tensor| tensor.fill_bytes(stream, POISON)).map_err(told)
    }

    fn launch(
        &mut self,
        inputs: &Inputs,
        kernels: IndexBackwardChoice,
        stream: &Stream,
    ) -> Result<(), Error> {
        let [dq, dk, dv] = self.gradients.each_mut().map(Tensor::view_mut);
        let gradients = AttentionGradientsMut::new(dq, dk, dv);
        let workspace = Some(self.workspace.view_mut());
        match kernels {
            Some(kernels) => {
                inputs.backward().run_with_kernels(kernels, (gradients, workspace), stream)
            }
            None => inputs.backward().backward_into(gradients, workspace, stream),
        }
    }

    fn bits(&self, stream: &Stream) -> Result<[Vec<u32>; 3], String> {
        let [dq, dk, dv] = self.gradients.each_ref().map(|tensor| download(stream, tensor));
        Ok([dq?, dk?, dv?])
    }

    /// Judges the gradients; returns how many were compared.
    fn check(
        &self,
        case: &IndexBackwardCase,
        data: &IndexBackwardData,
        stream: &Stream,
    ) -> Result<usize, String> {
        let references = data.reference(case);
        let named = [("dq", case.heads[0]), ("dk", case.heads[1]), ("dv", case.heads[1])];
        for ((bits, (reference, rounding)), (name, heads)) in
            self.bits(stream)?.iter().zip(references).zip(named)
        {
            let width = reference.width;
            let name = |at: usize| {
                let row = at / width;
                format!("{name}[row {}, head {}, {}]", row / heads, row % heads, at % width)
            };
            if let Some(at) = bits.iter().position(|&bits| bits == poison(case.dtype)) {
                return Err(format!("{} was not written", name(at)));
            }
            let got: Vec<f64> =
                bits.iter().map(|&bits| f64::from(decode(case.dtype, bits))).collect();
            check(&got, &reference, &rounding, name)?;
            let untouched = |&at: &usize| reference.partial[at] == 0.0 && got[at] != 0.0;
            if let Some(at) = (0..got.len()).find(untouched) {
                return Err(format!("{} is {}, but nothing contributes to it", name(at), got[at]));
            }
        }
        Ok(3)
    }
}

/// Runs and checks a case on a device, with the workspace for one pass or the smallest one.
fn run(
    case: &IndexBackwardCase,
    least: bool,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    let data = IndexBackwardData::generate(case);
    let run = || {
        let inputs = Inputs::upload(case, &data, stream)?;
        let bytes = inputs.workspace(kernels, least, stream)?;
        let mut outputs = Outputs::poisoned(&inputs, bytes, stream)?;
        let launched = outputs.launch(&inputs, kernels, stream);
        launched.map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| format!("gradients of {case:?}"))?;
        outputs.check(case, &data, stream)
    };
    run().map_err(|error| format!("{error}\n    {case:?}"))
}

/// Runs and checks a case on a device.
pub fn run_index_backward(
    case: &IndexBackwardCase,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    run(case, false, kernels, stream)
}

/// The same with the smallest workspace, which has many queries computed in several passes.
pub fn with_workspace_of_many_passes(
    case: &IndexBackwardCase,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    run(case, true, kernels, stream)
}

/// Runs a case 20 times, in one pass and in many, and requires the same bits every time, whatever
/// gradients and workspace held before.
pub fn same_gradients_of_lists(
    case: &IndexBackwardCase,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    let inputs = Inputs::upload(case, &IndexBackwardData::generate(case), stream)?;
    for least in [false, true] {
        let bytes = inputs.workspace(kernels, least, stream)?;
        let mut outputs = Outputs::poisoned(&inputs, bytes, stream)?;
        let mut first = None;
        for repeat in 0..20 {
            outputs.poison(stream)?;
            outputs.launch(&inputs, kernels, stream).map_err(told)?;
            wait(stream, &|| format!("repeat {repeat} of {case:?}"))?;
            let bits = outputs.bits(stream)?;
            if *first.get_or_insert_with(|| bits.clone()) != bits {
                return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
            }
        }
    }
    Ok(6)
}

/// Captures a call once and replays it with other lists and numbers.
pub fn replays_of_gradients_of_lists(
    case: &IndexBackwardCase,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    let mut inputs = Inputs::upload(case, &IndexBackwardData::generate(case), stream)?;
    let bytes = inputs.workspace(kernels, false, stream)?;
    let mut outputs = Outputs::poisoned(&inputs, bytes, stream)?;
    // Kernels are loaded outside of the capture.
    outputs.launch(&inputs, kernels, stream).map_err(told)?;
    let graph = stream.capture(|stream| outputs.launch(&inputs, kernels, stream));
    let graph = graph.map_err(|error| format!("capture: {error}"))?;
    for seed in [77, 78] {
        let case = IndexBackwardCase { seed, ..case.clone() };
        let data = IndexBackwardData::generate(&case);
        for (tensor, values) in [
            (&mut inputs.q, &data.q),
            (&mut inputs.k, &data.k),
            (&mut inputs.v, &data.v),
            (&mut inputs.o, &data.o),
            (&mut inputs.d_o, &data.d_o),
        ] {
            refill(tensor, stream, &bits(case.dtype, values))?;
        }
        refill(&mut inputs.lse, stream, &lse_of(&case, &data))?;
        let entries: Vec<u32> = data.entries.iter().map(|&entry| entry as u32).collect();
        refill(&mut inputs.entries, stream, &entries)?;
        outputs.poison(stream)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay of {case:?}"))?;
        outputs.check(&case, &data, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(6)
}

/// Lists and offsets of any bits: the launches end, and write every gradient; those of keys are
/// asked for where offsets ascend.
pub fn gradients_of_lists_survive_garbage(
    seed: u64,
    case: &IndexBackwardCase,
    kernels: IndexBackwardChoice,
    stream: &Stream,
) -> Result<usize, String> {
    let mut random = rng(seed ^ 0x6A5);
    let mut data = IndexBackwardData::generate(case);
    let numbers = [&mut data.q, &mut data.k, &mut data.v, &mut data.o, &mut data.d_o];
    for values in numbers.into_iter().chain([&mut data.lse]) {
        values.iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = 0.5);
    }
    let near = case.rows()[1] as i32;
    let mut any = || match random.random_range(0..3) {
        0 => random.random(),
        1 => random.random_range(-1..8),
        _ => random.random_range(-near..2 * near + 2),
    };
    data.entries.iter_mut().for_each(|entry| *entry = any());
    let mut inputs = Inputs::upload(case, &data, stream)?;
    if case.packed {
        for offsets in &mut inputs.offsets {
            let values: Vec<u32> = (0..=case.batch()).map(|_| any() as u32).collect();
            refill(offsets, stream, &values)?;
        }
    }
    let bytes = inputs.workspace(kernels, seed.is_multiple_of(2), stream)?;
    let mut outputs = Outputs::poisoned(&inputs, bytes, stream)?;
    outputs.launch(&inputs, kernels, stream).map_err(told)?;
    wait(stream, &|| format!("garbage {seed} in {case:?}"))?;
    let written = if case.packed { 1 } else { 3 };
    for (bits, name) in outputs.bits(stream)?.iter().zip(["dq", "dk", "dv"]).take(written) {
        if let Some(at) = bits.iter().position(|&bits| bits == poison(case.dtype)) {
            return Err(format!("{name}[{at}] was not written with garbage {seed}\n    {case:?}"));
        }
    }
    Ok(written)
}
