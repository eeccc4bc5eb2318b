//! Gradients of attention from garbage: packed sequences whose offsets are wrong, a log-sum-exp of
//! any bits, and a workspace that another stream writes to.

use super::attention::{Packed, ended};
use super::guarded::{Guarded, Use};
use super::operands::{Around, Choice, Lengths, Options, Sizes, dims_of, sink_of};
use super::values::{numbers, one_of, overwritten, scores, token_mask};
use super::{Blocks, Checked, Ended, Place, Turn, text};
use crate::attention_bwd::dims_of_tile;
use crate::number::POISON;
use crate::placement::Placement;
use blockflash_ops::attention_bwd::{accepts, select, workspace_bytes};
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradientsMut, DType, Error, Mask, Operation, Scores,
};
use blockflash_sys::Kernel;
use bytemuck::cast_slice;
use rand::Rng;

/// What is garbage beside offsets.
#[derive(Debug)]
struct Garbage {
    /// Any bits as the log-sum-exp.
    lse: bool,
    /// What another stream overwrites the workspace with while kernels use it.
    workspace: Option<u8>,
}

/// A batch of equal lengths, at the edges of tiles or anywhere between them.
#[derive(Debug)]
struct Dense {
    sizes: Sizes,
    batch: usize,
    seqlens: [usize; 2],
    mask: Mask,
}

impl Sizes {
    /// Sizes that suit the kernel of the backward pass whose turn it is.
    fn of_gradients(turn: &mut Turn<'_>, blocks: Blocks) -> Self {
        let place = turn.place;
        let partial = blocks == Blocks::Partial;
        let (kernel, tile) =
            turn.pick(if partial { &place.gradients_terms } else { &place.gradients });
        let random = &mut turn.random;
        let heads_kv = random.random_range(1..=2);
        let heads_q = heads_kv * random.random_range(1..=2);
        Self {
            kernel: Choice(random.random_bool(0.75).then_some(kernel)),
            types: tile.types,
            heads_q,
            heads_kv,
            head_dims: dims_of(
                turn.number,
                tile.head_dims,
                &dims_of_tile(tile.head_dims.min()),
                random,
            ),
            blocks: [one_of(&[64, 128], random), one_of(&[64, 128], random)],
            mask_heads: one_of(&[1, heads_kv, heads_q], random),
            softcap: random
                .random_bool(if tile.takes_softcap() { 0.2 } else { 0.0 })
                .then_some(20.0),
            sink: random.random_bool(0.4),
            lse: true,
        }
    }
}

impl Garbage {
    fn new(turn: &mut Turn<'_>) -> Self {
        let (lse, on_gpu) = (turn.random.random_bool(0.3), turn.place.other.is_some());
        Self { lse, workspace: overwritten(on_gpu, &mut turn.random) }
    }
}

/// Runs a case on packed sequences, under a packed block mask or none.
pub(super) fn packed(turn: &mut Turn<'_>, blocks: Blocks) -> Checked<Ended> {
    let sizes = Sizes::of_gradients(turn, blocks);
    let case = (Packed::new(sizes, blocks, turn), Garbage::new(turn));
    of_packed(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn of_packed(case: &(Packed, Garbage), turn: &mut Turn<'_>) -> Checked<Ended> {
    let ((packed, garbage), place) = (case, turn.place);
    let block_mask = packed.block_mask(turn).map_err(text)?;
    let block_mask = block_mask.map(|mask| mask.with_transpose()?.to(&place.stream));
    let block_mask = block_mask.transpose().map_err(text)?;
    let mut offsets = packed.offsets(turn)?;
    let lengths = Lengths::Packed { totals: packed.totals };
    let mut gradients = Gradients::new(&packed.sizes, lengths, garbage, turn)?;
    let options = packed.options(&offsets, block_mask.as_ref());
    let launched = gradients.launch(&packed.sizes, &options, turn);
    for offsets in &mut offsets {
        offsets.overwrite(packed.overwritten, place.other.as_ref())?;
    }
    gradients.spoil(garbage, place)?;
    turn.wait(case)?;
    packed.judge(&offsets, place)?;
    // What was refused wrote nothing.
    let right = launched.is_ok() && packed.overwritten.is_none();
    gradients.judge(garbage, right, place)?;
    ended(launched, place)
}

/// Runs a case without offsets.
pub(super) fn dense(turn: &mut Turn<'_>) -> Checked<Ended> {
    let sizes = Sizes::of_gradients(turn, Blocks::None);
    let random = &mut turn.random;
    let length = |random: &mut _| match rand::Rng::random_range(random, 0..4) {
        0 => one_of(&[0, 1, 63, 64, 65, 127, 128, 129], random),
        _ => rand::Rng::random_range(random, 1..=400),
    };
    let seqlens = [length(random), length(random)];
    let mask = token_mask(seqlens[0].max(seqlens[1]), random);
    let case =
        (Dense { sizes, batch: random.random_range(1..=2), seqlens, mask }, Garbage::new(turn));
    of_dense(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn of_dense(case: &(Dense, Garbage), turn: &mut Turn<'_>) -> Checked<Ended> {
    let (Dense { sizes, batch, seqlens, mask }, garbage) = case;
    let lengths = Lengths::Dense { batch: *batch, seqlens: *seqlens };
    let mut gradients = Gradients::new(sizes, lengths, garbage, turn)?;
    let options = Options { mask: *mask, cu_seqlens: None, block_mask: None };
    let launched = gradients.launch(sizes, &options, turn);
    gradients.spoil(garbage, turn.place)?;
    turn.wait(case)?;
    gradients.judge(garbage, launched.is_ok(), turn.place)?;
    ended(launched, turn.place)
}

/// The tensors of a call.
struct Gradients {
    /// q, k, v, o and the gradient of o.
    inputs: [Guarded; 5],
    lse: Guarded,
    sink: Option<Guarded>,
    /// Of q, k and v.
    qkv: [Guarded; 3],
    d_sink: Option<Guarded>,
    /// With room for every kernel.
    workspace: Option<Guarded>,
}

impl Gradients {
    fn new(
        sizes: &Sizes,
        lengths: Lengths,
        garbage: &Garbage,
        turn: &mut Turn<'_>,
    ) -> Checked<Self> {
        let sink = sink_of(sizes, turn)?;
        let (stream, random) = (&turn.place.stream, &mut turn.random);
        let around = Around::new(sizes, lengths, random);
        let [of_q, of_k, of_v, of_o] = &around.shapes;
        let mut input = |name, shape: &[usize]| {
            let content = numbers(sizes.types.q, shape.iter().product(), random);
            Guarded::new(name, sizes.types.q, (shape, &around.rows, POISON), &content, stream)
        };
        let inputs = [
            input("q", of_q)?,
            input("k", of_k)?,
            input("v", of_v)?,
            input("o", of_o)?,
            input("d_o", of_o)?,
        ];
        let count = around.lse_shape.iter().product();
        // Not less than the scores, so that no probability is infinite.
        let large = || (0..count).map(|at| 9.0 + (at % 7) as f32).collect();
        let lse: Vec<f32> = if garbage.lse { scores(count, random) } else { large() };
        let lse_at = (&around.lse_shape[..], &around.lse, POISON);
        let gradient =
            |name, shape| Guarded::output(name, sizes.types.q, (shape, &around.rows), stream);
        let beside = Placement { order: Vec::new(), padding: vec![(1, 1)] };
        let d_sink = || Guarded::output("d_sink", DType::F32, (&[sizes.heads_q], &beside), stream);
        Ok(Self {
            inputs,
            lse: Guarded::new("lse", DType::F32, lse_at, cast_slice(&lse), stream)?,
            qkv: [gradient("dq", of_q)?, gradient("dk", of_k)?, gradient("dv", of_v)?],
            d_sink: sink.as_ref().map(|_| d_sink()).transpose()?,
            sink,
            workspace: None,
        })
    }

    /// Queues the backward pass by the kernel whose turn it is, if it takes the problem, else by
    /// the selected ones. Where a GPU is imagined, there must be some.
    fn launch(
        &mut self,
        sizes: &Sizes,
        options: &Options<'_>,
        turn: &mut Turn<'_>,
    ) -> Result<(), Error> {
        let place = turn.place;
        let [q, k, v, o, d_o] = self.inputs.each_ref().map(Guarded::view);
        let attention = Attention {
            scores: Scores {
                mask: options.mask,
                sink: self.sink.as_ref().map(Guarded::view),
                softcap: sizes.softcap,
                ..Scores::default()
            },
            cu_seqlens: options.cu_seqlens,
            block_mask: options.block_mask,
            ..Attention::new(q, k, v)
        };
        let call = AttentionBackward { attention, o, lse: self.lse.view(), d_o };
        let [dq, dk, dv] = self.qkv.each_mut().map(Guarded::view_mut);
        let d_sink = self.d_sink.as_mut().map(Guarded::view_mut);
        let gradients = AttentionGradientsMut { d_sink, ..AttentionGradientsMut::new(dq, dk, dv) };
        let problem = call.problem()?.with_gradients(&gradients)?;
        let Some(gpu) = place.imagined.as_ref().or(place.stream.device().cuda_properties()) else {
            return call.backward_into(gradients, None, &place.stream);
        };
        let kernel: Option<&Kernel> =
            sizes.kernel.0.filter(|kernel| accepts(kernel, &problem, gpu).is_ok());
        let bytes = match kernel {
            Some(kernel) => workspace_bytes(kernel, &problem, gpu)?,
            None if problem.is_empty() => 0,
            None => workspace_bytes(select(&problem, gpu)?, &problem, gpu)?,
        };
        if place.imagined.is_some() {
            return call.backward_into(gradients, None, &place.stream);
        }
        // Margins of whole vectors, since the workspace is aligned to them.
        let margin = one_of(&[0, 16, 256], &mut turn.random);
        let beside = Placement { order: Vec::new(), padding: vec![(margin, margin)] };
        let workspace = Guarded::output("workspace", DType::U8, (&[bytes], &beside), &place.stream);
        let workspace = self.workspace.insert(workspace.expect("a workspace"));
        workspace.used_on(place.other.as_ref()).expect("a second stream");
        let workspace = Some(workspace.view_mut());
        match kernel {
            Some(kernel) => call.run_with(kernel, (gradients, workspace), &place.stream),
            None => call.backward_into(gradients, workspace, &place.stream),
        }
    }

    /// Overwrites the workspace while kernels use it.
    fn spoil(&mut self, garbage: &Garbage, place: &Place) -> Checked<()> {
        self.workspace.as_mut().map_or(Ok(()), |workspace| {
            workspace.overwrite(garbage.workspace, place.other.as_ref())
        })
    }

    /// Checks all tensors; `right` says whether gradients must have been computed.
    fn judge(&self, garbage: &Garbage, right: bool, place: &Place) -> Checked<()> {
        let stream = &place.stream;
        let inputs = self.inputs.iter().chain([&self.lse]).chain(&self.sink);
        inputs.into_iter().try_for_each(|input| input.judge(Use::Read, stream))?;
        let numbers = right && !garbage.lse && garbage.workspace.is_none();
        let used = if numbers { Use::WrittenWhole } else { Use::Filled };
        let mut outputs = self.qkv.iter().chain(&self.d_sink);
        outputs.try_for_each(|output| output.judge(used, stream))?;
        match &self.workspace {
            // Its margins are overwritten, too.
            Some(workspace) if garbage.workspace.is_none() => workspace.judge(Use::Filled, stream),
            _ => Ok(()),
        }
    }
}
