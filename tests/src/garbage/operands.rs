//! Operands of attention that suit a kernel, with margins.

use super::guarded::{Guarded, Use};
use super::values::{numbers, one_of};
use super::{Blocks, Checked, Place, Turn};
use crate::attention::{dims_of_tile, smallest_block};
use crate::number::{POISON, rng};
use crate::placement::Placement;
use blockflash_ops::attention::{accepts, select};
use blockflash_ops::{
    Attention, BlockGeometry, BlockMask, CuSeqlens, DType, ElementTypes, Error, HeadDims, Mask,
    Operation, Scores,
};
use blockflash_sys::Kernel;
use rand::Rng;
use rand::rngs::StdRng;
use std::fmt;

/// A kernel of the manifest, or the one that the library selects.
#[derive(Clone, Copy)]
pub(super) struct Choice(pub(super) Option<&'static Kernel>);

impl fmt::Debug for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map_or("the one selected".into(), Kernel::image_name))
    }
}

/// Sizes that suit the kernel whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) kernel: Choice,
    pub(super) types: ElementTypes,
    pub(super) heads_q: usize,
    pub(super) heads_kv: usize,
    pub(super) head_dims: HeadDims,
    /// Queries and keys of a block that consists of tiles.
    pub(super) blocks: [usize; 2],
    /// Of a block mask that the kernel can share among heads.
    pub(super) mask_heads: usize,
    pub(super) softcap: Option<f32>,
    pub(super) sink: bool,
    pub(super) lse: bool,
}

/// Shapes of attention.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lengths {
    Dense { batch: usize, seqlens: [usize; 2] },
    Packed { totals: [usize; 2] },
}

/// What a call has beside its tensors.
pub(super) struct Options<'a> {
    pub(super) mask: Mask,
    pub(super) cu_seqlens: Option<CuSeqlens<'a>>,
    pub(super) block_mask: Option<&'a BlockMask>,
}

impl Options<'_> {
    /// Whether blocks may be partial.
    pub(super) fn partial(&self) -> bool {
        self.block_mask.is_some_and(|mask| mask.bits().is_some())
    }
}

/// One of the head dimensions for which a tile is the narrowest. In a third of the cases v has
/// another one, or q and k; always where those of the tile differ.
pub(super) fn dims_of(
    number: usize,
    tile: HeadDims,
    widths: &[usize],
    random: &mut StdRng,
) -> HeadDims {
    let wide = one_of(widths, random);
    // Of its own, so that the other sizes of a case stay what they are with equal dimensions.
    let mut random = rng(!(number as u64));
    if tile.qk > tile.v {
        let qk = 8 * random.random_range(tile.v / 8 + 1..=tile.qk / 8);
        return HeadDims { qk, v: 8 * random.random_range(1..=tile.v / 8) };
    }
    let other = 8 * random.random_range(1..=(wide / 8).max(1));
    match random.random_range(0..6) {
        0 => HeadDims { qk: wide, v: other },
        1 => HeadDims { qk: other, v: wide },
        _ => HeadDims::all(wide),
    }
}

impl Sizes {
    pub(super) fn new(turn: &mut Turn<'_>, blocks: Blocks) -> Self {
        let place = turn.place;
        let (kernel, tile) = turn.pick(match blocks {
            Blocks::None => &place.attention,
            Blocks::Full => &place.attention_masked,
            Blocks::Partial => &place.attention_terms,
        });
        let random = &mut turn.random;
        let heads_kv = random.random_range(1..=2);
        let heads_q = heads_kv * tile.heads as usize * random.random_range(1..=2);
        // Heads of q that share a tile share the mask.
        let most = if tile.heads == 1 { heads_q } else { heads_kv };
        let asked = random.random();
        Self {
            kernel: Choice(random.random_bool(0.75).then_some(kernel)),
            types: tile.types,
            heads_q,
            heads_kv,
            head_dims: {
                let dims = dims_of(
                    turn.number,
                    tile.head_dims,
                    &dims_of_tile(tile.head_dims.min()),
                    random,
                );
                // Codes are read 16 at a time.
                let whole =
                    |d: usize| if tile.types.q.is_code() { d.next_multiple_of(16) } else { d };
                HeadDims { qk: whole(dims.qk), v: whole(dims.v) }
            },
            blocks: [tile.block_q, tile.block_kv].map(|tile| {
                let size = smallest_block(&[tile]);
                size * random.random_range(1..=(BlockGeometry::MAX_BLOCK_SIZE / size).min(2))
            }),
            mask_heads: one_of(&[1, heads_kv, most], random),
            softcap: random.random_bool(0.2).then_some(20.0),
            sink: random.random_bool(0.2),
            lse: asked == tile.lse.suits(asked),
        }
    }
}

/// The tensors of a call.
pub(super) struct Operands {
    qkv: [Guarded; 3],
    sink: Option<Guarded>,
    o: Guarded,
    lse: Option<Guarded>,
}

/// Shapes of tensors, and the margins around them.
pub(super) struct Around {
    /// Of q, k, v and o.
    pub(super) shapes: [Vec<usize>; 4],
    pub(super) rows: Placement,
    pub(super) lse_shape: Vec<usize>,
    pub(super) lse: Placement,
}

impl Around {
    pub(super) fn new(sizes: &Sizes, lengths: Lengths, random: &mut StdRng) -> Self {
        let Sizes { heads_q, heads_kv, head_dims: HeadDims { qk, v }, .. } = *sizes;
        let of_heads = [[heads_q, qk], [heads_kv, qk], [heads_kv, v], [heads_q, v]];
        // Rows before and after, and a head more: none, where a memory checker sees the ends.
        let margin = one_of(&[0, 0, 1, 70], random);
        let heads = random.random_range(0..=1) * margin.min(1);
        let rows = [(margin, margin), (heads, heads), (0, 0)];
        let shapes = |[of_q, of_kv]: [&[usize]; 2], of_heads: [[usize; 2]; 4]| {
            [0, 1, 2, 3].map(|i| [[of_q, of_kv, of_kv, of_q][i], &of_heads[i]].concat())
        };
        let (shapes, padding, lse_shape, lse_padding) = match lengths {
            Lengths::Packed { totals: [q, kv] } => (
                shapes([&[q], &[kv]], of_heads),
                rows.to_vec(),
                vec![heads_q, q],
                vec![(heads, heads), (margin, margin)],
            ),
            Lengths::Dense { batch, seqlens: [q, kv] } => (
                shapes([&[batch, q], &[batch, kv]], of_heads),
                [&[(heads, heads)], &rows[..]].concat(),
                vec![batch, heads_q, q],
                vec![(0, heads), (heads, 0), (margin, margin)],
            ),
        };
        let placed = |padding| Placement { order: Vec::new(), padding };
        Self { shapes, rows: placed(padding), lse_shape, lse: placed(lse_padding) }
    }
}

/// A logit per head.
pub(super) fn sink_of(sizes: &Sizes, turn: &mut Turn<'_>) -> Checked<Option<Guarded>> {
    let content = numbers(DType::F32, sizes.heads_q, &mut turn.random);
    let beside = Placement { order: Vec::new(), padding: vec![(1, 1)] };
    let place = (&[sizes.heads_q][..], &beside, POISON);
    let sink = || Guarded::new("sink", DType::F32, place, &content, &turn.place.stream);
    sizes.sink.then(sink).transpose()
}

impl Operands {
    pub(super) fn new(sizes: &Sizes, lengths: Lengths, turn: &mut Turn<'_>) -> Checked<Self> {
        let ElementTypes { q: dtype, o, .. } = sizes.types;
        let (stream, random) = (&turn.place.stream, &mut turn.random);
        let around = Around::new(sizes, lengths, random);
        let mut input = |name, shape: &[usize]| {
            let content = numbers(dtype, shape.iter().product(), random);
            Guarded::new(name, dtype, (shape, &around.rows, POISON), &content, stream)
        };
        let [of_q, of_k, of_v, of_o] = &around.shapes;
        let qkv = [input("q", of_q)?, input("k", of_k)?, input("v", of_v)?];
        let sink = sink_of(sizes, turn)?;
        let lse = || Guarded::output("lse", DType::F32, (&around.lse_shape, &around.lse), stream);
        Ok(Self {
            qkv,
            sink,
            o: Guarded::output("o", o, (of_o, &around.rows), stream)?,
            lse: sizes.lse.then(lse).transpose()?,
        })
    }

    /// Queues attention. Where a GPU is imagined, its kernel must accept the problem.
    pub(super) fn launch(
        &mut self,
        sizes: &Sizes,
        options: &Options<'_>,
        place: &Place,
    ) -> Result<(), Error> {
        let [q, k, v] = &self.qkv;
        let call = Attention {
            scores: Scores {
                mask: options.mask,
                sink: self.sink.as_ref().map(Guarded::view),
                softcap: sizes.softcap,
                ..Scores::default()
            },
            cu_seqlens: options.cu_seqlens,
            block_mask: options.block_mask,
            o_dtype: sizes.types.q.is_code().then_some(sizes.types.o),
            ..Attention::new(q.view(), k.view(), v.view())
        };
        let (o, lse) = (self.o.view_mut(), self.lse.as_mut().map(Guarded::view_mut));
        // All blocks may have come out full.
        let suits = |kernel: &&Kernel| {
            kernel.attention_tile().is_none_or(|tile| tile.terms == options.partial())
        };
        let kernel = sizes.kernel.0.filter(suits);
        if let Some(gpu) = &place.imagined {
            let problem = call.problem()?.with_outputs(&o, lse.as_ref())?;
            match kernel {
                Some(kernel) => accepts(kernel, &problem, gpu)?,
                None if problem.is_empty() => {}
                None => drop(select(&problem, gpu)?),
            }
            return call.forward_into(o, lse, &place.stream);
        }
        match kernel {
            Some(kernel) => call.run_with(kernel, (o, lse), &place.stream),
            None => call.forward_into(o, lse, &place.stream),
        }
    }

    /// Checks all tensors.
    pub(super) fn judge(&self, outputs: Use, place: &Place) -> Checked<()> {
        let inputs = self.qkv.iter().chain(&self.sink);
        inputs.into_iter().try_for_each(|input| input.judge(Use::Read, &place.stream))?;
        let outputs_of = [Some(&self.o), self.lse.as_ref()].into_iter().flatten();
        outputs_of.into_iter().try_for_each(|output| output.judge(outputs, &place.stream))
    }
}
