//! Runs a case on a device and checks every element, including those that must not be written.

use super::{AttentionCase, AttentionData, AttentionReference, Blocks, Content, Lengths, Sequence};
use crate::gpu::wait;
use crate::host::{array, download, place, poisoned, replace, view, view_mut};
use crate::number::{POISON, decode, poison};
use crate::placement::Placed;
use crate::tolerance::check;
use blockflash_cases::io::Array;
use blockflash_ops::attention::{Attention, CuSeqlens};
use blockflash_ops::{BlockMask, DType, OperandScales, Operation, Scores, Stream, Tensor};
use blockflash_sys::Kernel;

/// The kernel that computes a case.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    /// The kernel that the library selects; on the CPU, the CPU backend.
    Selected,
    /// This kernel of the table.
    This(&'static Kernel),
}

impl Choice {
    /// The given kernel; `None` for the selected one.
    pub fn kernel(self) -> Option<&'static Kernel> {
        match self {
            Self::Selected => None,
            Self::This(kernel) => Some(kernel),
        }
    }
}

/// The operands of a case on a device.
pub struct AttentionInputs {
    case: AttentionCase,
    qkv: [Tensor; 3],
    sink: Option<Tensor>,
    bias: Option<Tensor>,
    alibi: Option<Tensor>,
    cu_seqlens: Option<[Tensor; 2]>,
    block_mask: Option<BlockMask>,
    scales: [Option<Tensor>; 3],
}

/// The outputs of a case on a device, poisoned when made.
pub struct AttentionOutputs {
    pub(crate) o: Tensor,
    pub(crate) lse: Option<Tensor>,
}

/// Placements of q, k, v and o, and of the log-sum-exp. Broadcast keys and values are there once.
pub(crate) fn placed(case: &AttentionCase) -> ([Placed; 4], Placed) {
    let [q, mut kv, lse] = case.shapes();
    if case.broadcast_kv {
        kv[0] = kv[0].min(1);
    }
    let shapes = [&q, &kv, &kv, &q];
    (std::array::from_fn(|i| case.placements[i].place(shapes[i])), case.lse_placement.place(&lse))
}

impl AttentionInputs {
    /// Uploads the data of a case; the gaps of the tensors hold NaN.
    pub fn upload(
        case: &AttentionCase,
        data: &AttentionData,
        stream: &Stream,
    ) -> Result<Self, String> {
        let (placed, _) = placed(case);
        let tensor = |i: usize, values| place(stream, case.input_type(), values, &placed[i]);
        let small = |array: Array| array.upload(stream).map_err(|error| error.to_string());
        let sink = case.scores.sink.map(|()| small(data.sink.clone().into()));
        let bias = case.terms.bias.as_ref().zip(case.bias_placed());
        let bias = bias.map(|(bias, placed)| place(stream, bias.dtype, &data.bias, &placed));
        let alibi = case.alibi_shape().map(|shape| small(array(DType::F32, &shape, &data.alibi)));
        let cu_seqlens = offsets(case).map(|[q, kv]| Ok::<_, String>([small(q)?, small(kv)?]));
        let scale = |which| {
            case.scales(which).map(|(shape, values)| small(array(DType::F32, &shape, &values)))
        };
        Ok(Self {
            scales: [scale(0).transpose()?, scale(1).transpose()?, scale(2).transpose()?],
            case: case.clone(),
            qkv: [tensor(0, &data.q)?, tensor(1, &data.k)?, tensor(2, &data.v)?],
            sink: sink.transpose()?,
            bias: bias.transpose()?,
            alibi: alibi.transpose()?,
            cu_seqlens: cu_seqlens.transpose()?,
            block_mask: case.block_mask(stream)?,
        })
    }

    /// Replaces q, k, v, the sink, what is added to scores and the sequence offsets in place, as a
    /// replayed graph needs it. The new case has the shapes, placements and block mask of the old
    /// one, and no sequence longer than the longest that a captured call announced.
    pub fn refill(
        &mut self,
        case: &AttentionCase,
        data: &AttentionData,
        stream: &Stream,
    ) -> Result<(), String> {
        assert_eq!(self.case.shapes(), case.shapes());
        assert_eq!(Blocks::of(&self.case), Blocks::of(case), "block masks stay");
        assert_eq!(self.case.codes, case.codes, "scales stay");
        let qkv = self.qkv.iter_mut().zip([&data.q, &data.k, &data.v]).zip(placed(case).0);
        for ((tensor, values), placed) in qkv {
            replace(tensor, stream, values, &placed)?;
        }
        let bias = self.bias.iter_mut().zip(case.bias_placed());
        for (tensor, placed) in bias {
            replace(tensor, stream, &data.bias, &placed)?;
        }
        let sink = self.sink.iter_mut().zip([Array::from(data.sink.clone())]);
        let slopes = case.alibi_shape().map(|shape| array(DType::F32, &shape, &data.alibi));
        let slopes = self.alibi.iter_mut().zip(slopes);
        let cu_seqlens =
            self.cu_seqlens.iter_mut().flatten().zip(offsets(case).into_iter().flatten());
        self.case = case.clone();
        sink.chain(slopes)
            .chain(cu_seqlens)
            .try_for_each(|(tensor, array)| array.write(tensor, stream))
            .map_err(|error| format!("refill: {error}"))
    }

    /// The call.
    pub fn attention(&self) -> Attention<'_> {
        let case = &self.case;
        let (placed, _) = placed(case);
        let [q, mut k, mut v] = std::array::from_fn(|i| view(&self.qkv[i], &placed[i]));
        if let (true, Lengths::Dense { batch: batch @ 1.., .. }) =
            (case.broadcast_kv, &case.lengths)
        {
            k = k.expand(0, *batch).expect("one entry is stored");
            v = v.expand(0, *batch).expect("one entry is stored");
        }
        let longest = |which: fn(&(usize, usize)) -> usize| match &case.lengths {
            // Any upper bound will do, except 0 where there are rows.
            Lengths::Packed { lengths, .. } => {
                (lengths.iter().map(which).max().unwrap_or(0) + case.seed as usize % 3).max(1)
            }
            Lengths::Dense { .. } => 0,
        };
        let [of_q, of_k, of_v] =
            self.scales.each_ref().map(|scale| scale.as_ref().map(Tensor::view));
        Attention {
            scores: Scores {
                sink: self.sink.as_ref().map(Tensor::view),
                bias: self
                    .bias
                    .as_ref()
                    .zip(case.bias_placed())
                    .map(|(t, placed)| view(t, &placed)),
                alibi: self.alibi.as_ref().map(Tensor::view),
                ..case.scores.without_tensors()
            },
            cu_seqlens: self.cu_seqlens.as_ref().map(|[q, kv]| CuSeqlens {
                q: q.view(),
                kv: kv.view(),
                max_seqlen_q: longest(|l| l.0),
                max_seqlen_kv: longest(|l| l.1),
            }),
            block_mask: self.block_mask.as_ref(),
            scales: OperandScales { q: of_q, k: of_k, v: of_v },
            o_dtype: case.codes.map(|_| case.dtype),
            ..Attention::new(q, k, v)
        }
    }
}

impl AttentionOutputs {
    /// Allocates and poisons the outputs of a case.
    pub fn poisoned(case: &AttentionCase, stream: &Stream) -> Result<Self, String> {
        let ([.., o], lse) = placed(case);
        Ok(Self {
            o: poisoned(stream, case.dtype, &o.physical)?,
            lse: case.lse.then(|| poisoned(stream, DType::F32, &lse.physical)).transpose()?,
        })
    }

    /// Poisons the outputs again.
    pub fn poison(&mut self, stream: &Stream) -> Result<(), String> {
        let mut tensors = [Some(&mut self.o), self.lse.as_mut()].into_iter().flatten();
        tensors
            .try_for_each(|tensor| tensor.fill_bytes(stream, POISON))
            .map_err(|error| error.to_string())
    }

    /// Queues the computation.
    pub fn launch(
        &mut self,
        inputs: &AttentionInputs,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), blockflash_ops::Error> {
        self.launch_call(&inputs.case, &inputs.attention(), kernel, stream)
    }

    /// Queues a call whose operands were not made by [`AttentionInputs`], for outputs of this case.
    pub fn launch_call(
        &mut self,
        case: &AttentionCase,
        call: &Attention<'_>,
        kernel: Choice,
        stream: &Stream,
    ) -> Result<(), blockflash_ops::Error> {
        let ([.., o], lse) = placed(case);
        let o = view_mut(&mut self.o, &o);
        let lse = self.lse.as_mut().map(|tensor| view_mut(tensor, &lse));
        match kernel {
            Choice::Selected => call.forward_into(o, lse, stream),
            Choice::This(kernel) => call.run_with(kernel, (o, lse), stream),
        }
    }

    /// Every bit of both outputs, gaps included.
    pub fn bits(&self, stream: &Stream) -> Result<[Vec<u32>; 2], String> {
        let lse = self.lse.as_ref().map(|lse| download(stream, lse)).transpose()?;
        Ok([download(stream, &self.o)?, lse.unwrap_or_default()])
    }

    /// Judges the outputs; returns how many were compared.
    pub fn check(
        &self,
        case: &AttentionCase,
        reference: &AttentionReference,
        stream: &Stream,
    ) -> Result<usize, String> {
        let ([.., o_placed], lse_placed) = placed(case);
        let [o, lse] = self.bits(stream)?;
        let (d, heads) = (case.head_dim, case.heads_q);
        let sequences = case.sequences();
        let used = case.rows().0[0];
        let rows = &reference.rows;
        let o_name = |row: [usize; 3], e: usize| {
            format!("o[batch {}, query {}, head {}, {e}]", row[0], row[1], row[2])
        };
        let o = written(&o_placed, &o, case.dtype, |at| at < used * heads * d)
            .map_err(|e| format!("o: {e}"))?;
        let o_at = |&[b, i, h]: &[usize; 3]| ((sequences[b].q_start + i) * heads + h) * d;
        let got: Vec<f64> =
            rows.iter().flat_map(|row| &o[o_at(row)..][..d]).map(|&x| f64::from(x)).collect();
        check(&got, &reference.o, &reference.rounding(case), |i| o_name(rows[i / d], i % d))?;
        let may_be_nan = matches!(case.content, Content::NanInKeys | Content::NanInValues)
            || case.has_infinite_scales();
        if let (false, Some(at)) =
            (may_be_nan, o[..used * heads * d].iter().position(|x| !x.is_finite()))
        {
            return Err(format!(
                "o: logical element {at} is {}, nothing there is NaN or infinite",
                o[at]
            ));
        }
        if self.lse.is_none() {
            return Ok(1);
        }
        let total = case.shapes()[2].last().copied().unwrap_or(0).max(1);
        let packed = matches!(case.lengths, Lengths::Packed { .. });
        let lse = written(&lse_placed, &lse, DType::F32, |at| !packed || at % total < used)
            .map_err(|error| format!("lse: {error}"))?;
        let got: Vec<f64> =
            rows.iter().map(|&[b, i, h]| f64::from(lse[case.lse_index(b, h, i)])).collect();
        let lse_name = |i: usize| {
            format!("lse[batch {}, query {}, head {}]", rows[i][0], rows[i][1], rows[i][2])
        };
        check(&got, &reference.lse, &AttentionReference::lse_rounding(case), lse_name)?;
        Ok(2)
    }
}

/// The logical values of an output, after checking that exactly the elements for which `due` is
/// true were written.
pub(crate) fn written(
    placed: &Placed,
    physical: &[u32],
    dtype: DType,
    due: impl Fn(usize) -> bool,
) -> Result<Vec<f32>, String> {
    let poison = poison(dtype);
    if let Some(at) = placed.first_touched_gap(physical, poison) {
        return Err(format!(
            "element {at} of the memory {:?} is in a gap but was written: bits {:#x}",
            placed.physical, physical[at]
        ));
    }
    let logical = placed.gather(physical);
    for (at, &bits) in logical.iter().enumerate() {
        match (due(at), bits == poison) {
            (true, true) => return Err(format!("logical element {at} was not written")),
            (false, false) => {
                return Err(format!("logical element {at} belongs to no sequence but was written"));
            }
            _ => {}
        }
    }
    Ok(logical.into_iter().map(|bits| decode(dtype, bits)).collect())
}

/// Offsets of the queries and of the keys of a packed case.
fn offsets(case: &AttentionCase) -> Option<[Array; 2]> {
    matches!(case.lengths, Lengths::Packed { .. }).then(|| {
        let ends = |end: fn(&Sequence) -> usize| {
            let ends = case.sequences().into_iter().map(|s| end(&s) as i32);
            std::iter::once(0).chain(ends).collect::<Vec<_>>().into()
        };
        [ends(|s| s.q_start + s.q_len), ends(|s| s.kv_start + s.kv_len)]
    })
}

/// Uploads, runs, waits and checks a case whose data and reference are given. Returns the number of
/// compared outputs, or a complete description of the failure.
pub fn run_and_check(
    case: &AttentionCase,
    data: &AttentionData,
    reference: &AttentionReference,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let run = || {
        let inputs = AttentionInputs::upload(case, data, stream)?;
        let mut outputs = AttentionOutputs::poisoned(case, stream)?;
        outputs.launch(&inputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story(kernel, stream, case, "hangs"))?;
        outputs.check(case, reference, stream)
    };
    run().map_err(|error| story(kernel, stream, case, &error))
}

/// The same from the case alone.
pub fn run_case(case: &AttentionCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let data = AttentionData::generate(case);
    let reference = AttentionReference::compute(case, &data, 2e8);
    run_and_check(case, &data, &reference, kernel, stream)
}

fn story(kernel: Choice, stream: &Stream, case: &AttentionCase, what: &str) -> String {
    let kernel = match kernel {
        Choice::Selected => format!("attention on {}", stream.device()),
        Choice::This(kernel) => kernel.image_name(),
    };
    format!("{kernel}: {what}\n    {case:?}")
}
