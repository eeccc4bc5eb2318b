//! The outputs of a case, and the run of a whole case.

use super::{DecodeCase, DecodeData, DecodeInputs, decode_reference};
use crate::attention::{AttentionOutputs, Choice, placed};
use crate::gpu::wait;
use crate::host::{poisoned, view_mut};
use crate::placement::Placed;
use blockflash_ops::{DType, Stream, Tensor, ViewMut};

/// The outputs of a case on a device.
pub struct DecodeOutputs(pub AttentionOutputs);

/// Shape of a tensor of tokens, and the order of its dimensions that gives the logical tensor: with
/// a batch dimension if all sequences have equally many queries.
pub(super) fn with_batch(
    case: &DecodeCase,
    placed: &Placed,
    rows: usize,
) -> (Vec<usize>, Vec<usize>) {
    let batch = case.attention.sequences().len();
    let at = placed.permutation[rows];
    let mut shape = placed.physical.clone();
    shape[at] /= batch.max(1);
    shape.insert(at, batch);
    let mut order = vec![at];
    order.extend(placed.permutation.iter().enumerate().map(|(dim, &physical)| {
        if dim == rows || physical > at { physical + 1 } else { physical }
    }));
    (shape, order)
}

impl DecodeOutputs {
    /// Allocates and poisons the outputs of a case.
    pub fn poisoned(case: &DecodeCase, stream: &Stream) -> Result<Self, String> {
        let call = &case.attention;
        let ([.., o], lse) = placed(call);
        let shape = |placed: &Placed, rows: usize| match case.equal {
            true => with_batch(case, placed, rows).0,
            false => placed.physical.clone(),
        };
        let lse = call.lse.then(|| poisoned(stream, DType::F32, &shape(&lse, 1)));
        let o = poisoned(stream, call.dtype, &shape(&o, 0))?;
        Ok(Self(AttentionOutputs { o, lse: lse.transpose()? }))
    }

    pub(super) fn views(&mut self, case: &DecodeCase) -> (ViewMut<'_>, Option<ViewMut<'_>>) {
        let ([.., o_placed], lse_placed) = placed(&case.attention);
        let AttentionOutputs { o, lse } = &mut self.0;
        let logical = |tensor, placed: &Placed, rows| {
            if !case.equal {
                return view_mut(tensor, placed);
            }
            let order = with_batch(case, placed, rows).1;
            let whole: &mut Tensor = tensor;
            whole.view_mut().permute(&order).expect("a permutation")
        };
        let lse = lse.as_mut().map(|lse| logical(lse, &lse_placed, 1));
        (logical(o, &o_placed, 0), lse)
    }
}

/// Uploads, runs, waits and checks a case. Returns the number of compared outputs, or a complete
/// description of the failure.
pub fn run_case(case: &DecodeCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let story = |what: &str| format!("decoding on {}: {what}\n    {case:?}", stream.device());
    let data = DecodeData::generate(case);
    let run = || {
        let mut inputs = DecodeInputs::upload(case, &data, stream)?;
        let mut outputs = DecodeOutputs::poisoned(case, stream)?;
        inputs.launch(&mut outputs, kernel, stream).map_err(|error| format!("refused: {error}"))?;
        wait(stream, &|| story("hangs"))?;
        inputs.check_cache(&data, stream)?;
        let reference = decode_reference(case, &data);
        outputs.0.check(&case.attention, &reference, stream)
    };
    run().map_err(|error| story(&error))
}
