//! How a shape of each operation is drawn.

use super::Operation;
use super::dice::Dice;
use super::models::{Model, Models};
use crate::case::{
    AttentionShape, BlockLists, BsrShape, Case, DecodeShape, Fill, Lengths, MaskKind, Pass, Pattern,
};
use blockflash_sys::{DType, HeadDims};

/// Most models are served and trained in bf16.
const DTYPES: [DType; 3] = [DType::BF16, DType::BF16, DType::F16];
/// Tokens of a page.
const PAGES: [usize; 5] = [16, 32, 64, 128, 256];
/// Queries and keys of a block of a mask.
const BLOCKS: [[usize; 2]; 3] = [[64, 64], [128, 64], [128, 128]];
/// A length of block masks is a multiple of this.
const LARGEST_BLOCK: usize = 128;

/// A shape, which may be too large.
pub(super) fn draw(operation: Operation, models: &Models, dice: &mut Dice) -> Case {
    match operation {
        Operation::Decode => decode(models, dice).into(),
        Operation::Forward => forward(models, dice).into(),
        Operation::Backward => {
            let length = length(dice, 64, 65_536);
            AttentionShape { pass: Pass::Backward, ..dense(models, dice, length) }.into()
        }
        Operation::BlockSparse => block_sparse(models, dice).into(),
        Operation::Bsr => bsr(models, dice).into(),
        Operation::Packed => packed(models, dice).into(),
    }
}

/// The same with a smaller batch, or fewer columns of a product; none if there are none. So lengths
/// and matrices are the last to be bounded by limits.
pub(super) fn smaller(case: Case, dice: &mut Dice) -> Option<Case> {
    match case {
        Case::Attention(shape) if shape.lengths.is_none() && shape.batch > 1 => {
            Some(AttentionShape { batch: dice.log(1, shape.batch - 1), ..shape }.into())
        }
        Case::AttentionDecode(shape) if shape.batch > 1 => {
            Some(DecodeShape { batch: dice.log(1, shape.batch - 1), ..shape }.into())
        }
        Case::BsrMatmul(shape) if shape.n > 8 => {
            Some(BsrShape { n: 8 * dice.log(1, shape.n / 8 - 1).max(1), ..shape }.into())
        }
        _ => None,
    }
}

/// One of four lengths is a multiple of 64, as engines pad them.
fn length(dice: &mut Dice, least: usize, most: usize) -> usize {
    let (length, padded) = (dice.log(least, most), dice.one_in(4));
    if padded { length.next_multiple_of(64) } else { length }
}

/// Models whose attention cases can have, with whether they are decoders.
fn attentive(models: &Models) -> Vec<(Model, bool)> {
    let decoders = models.decoders.values().map(|&model| (model, true));
    let all = decoders.chain(models.encoders.values().map(|&model| (model, false)));
    all.filter(|(model, _)| model.head_dim_v.is_none()).collect()
}

/// Self-attention of a model over this length; three of four cases of a decoder are causal.
fn dense(models: &Models, dice: &mut Dice, length: usize) -> AttentionShape {
    let (model, decodes) = dice.pick(&attentive(models));
    let causal = !dice.one_in(4) && decodes;
    of(model, if causal { MaskKind::Causal } else { MaskKind::Full }, dice, length)
}

fn of(model: Model, mask: MaskKind, dice: &mut Dice, length: usize) -> AttentionShape {
    let [num_heads_q, num_heads_kv, head_dim] = model.heads;
    AttentionShape {
        pass: Pass::Forward,
        batch: dice.log(1, 64),
        seqlen_q: length,
        seqlen_kv: length,
        lengths: None,
        num_heads_q,
        num_heads_kv,
        head_dims: HeadDims::all(head_dim),
        lists: None,
        pairs: None,
        mask,
        dtype: dice.pick(&DTYPES),
    }
}

/// One of six cases is a layer with a sliding window. One of four causal ones has fewer queries
/// than keys, as a prompt that is read in chunks.
fn forward(models: &Models, dice: &mut Dice) -> AttentionShape {
    let length = length(dice, 64, 131_072);
    let queries = dice.log(16.min(length), length);
    if dice.one_in(6) {
        let (model, keys) = dice.pick(&with_windows(models));
        return of(model, MaskKind::Window(keys), dice, length);
    }
    let shape = dense(models, dice, length);
    match shape.mask == MaskKind::Causal && dice.one_in(4) {
        true => AttentionShape { seqlen_q: queries, ..shape },
        false => shape,
    }
}

/// One of three cases of a decoder is causal; such lists can only be uniform. Half of the batches
/// are one sequence, as videos are.
fn block_sparse(models: &Models, dice: &mut Dice) -> AttentionShape {
    let length = LARGEST_BLOCK * dice.log(4, 1024);
    let (model, decodes) = dice.pick(&attentive(models));
    let causal = dice.one_in(3) && decodes;
    let mask = if causal { MaskKind::Causal } else { MaskKind::Full };
    let batch = if dice.one_in(2) { 1 } else { dice.log(2, 4) };
    let shape = AttentionShape { batch, ..of(model, mask, dice, length) };
    let [block_q, block_kv] = dice.pick(&BLOCKS);
    let pattern = dice.pick(Pattern::ALL);
    let lists = BlockLists {
        mask_heads: dice.pick(&[shape.num_heads_q, shape.num_heads_kv, 1]),
        block_q,
        block_kv,
        density: density(dice),
        pattern: if shape.mask == MaskKind::Causal { Pattern::Uniform } else { pattern },
    };
    AttentionShape { lists: Some(lists), ..shape }
}

/// In thousandths, so that ids are short.
fn density(dice: &mut Dice) -> f64 {
    dice.log(16, 511) as f64 / 1000.0
}

/// The number of columns is 1, 8 or another multiple of 8: tokens that are decoded, or a prompt.
fn bsr(models: &Models, dice: &mut Dice) -> BsrShape {
    let all: Vec<_> = models.decoders.values().chain(models.encoders.values()).collect();
    let [hidden, intermediate] = dice.pick(&all).mlp;
    let [m, k] = dice.pick(&[[hidden, intermediate], [intermediate, hidden]]);
    let fits = |block: &usize| m.is_multiple_of(*block) && k.is_multiple_of(*block);
    let blocks: Vec<_> = [16, 32, 64, 128].into_iter().filter(fits).collect();
    let n = match dice.below(8) {
        0 => 1,
        1 => 8,
        _ => 8 * dice.log(1, 2048),
    };
    BsrShape {
        m,
        n,
        k,
        block_size: dice.pick(&blocks),
        density: density(dice),
        pattern: dice.pick(Pattern::ALL),
        dtype: dice.pick(&DTYPES),
    }
}

/// Lengths by a power law: of each octave up to the greatest as many. One of three cases is a layer
/// with a sliding window.
fn packed(models: &Models, dice: &mut Dice) -> AttentionShape {
    let (count, most) = (dice.log(2, 31), dice.log(256, 32_768));
    let lengths: Vec<_> = (0..count).map(|_| dice.log(16, most)).collect();
    let longest = lengths.iter().copied().max().unwrap_or(most);
    let shape = match dice.one_in(3) {
        true => {
            let (model, keys) = dice.pick(&with_windows(models));
            of(model, MaskKind::Window(keys), dice, longest)
        }
        false => dense(models, dice, longest),
    };
    AttentionShape { batch: count, lengths: Lengths::new(&lengths).ok(), ..shape }
}

/// Decoders with a sliding window, of which attention can be a case.
fn with_windows(models: &Models) -> Vec<(Model, usize)> {
    models.decoders.values().filter_map(|&model| Some((model, model.window?))).collect()
}

/// One query in half of the cases, and in one of six a layer with a sliding window. Half of the
/// caches are in pages, with lengths; of the contiguous ones, one of three has lengths.
fn decode(models: &Models, dice: &mut Dice) -> DecodeShape {
    let (Model { heads, .. }, window) = match dice.one_in(6) {
        true => {
            let (model, keys) = dice.pick(&with_windows(models));
            (model, Some(keys))
        }
        false => {
            let mut decoders = attentive(models);
            decoders.retain(|(_, decodes)| *decodes);
            (dice.pick(&decoders).0, None)
        }
    };
    let [num_heads_q, num_heads_kv, head_dim] = heads;
    let several = dice.log(2, 64);
    let seqlen_q = if dice.one_in(2) { 1 } else { several };
    let keys = length(dice, 128, 131_072);
    let (page, in_pages) = (dice.pick(&PAGES), dice.one_in(2));
    let fill = match in_pages {
        true => dice.pick(&[Fill::Equal, Fill::Power]),
        false => dice.pick(&[Fill::Full, Fill::Full, Fill::Power]),
    };
    DecodeShape {
        batch: dice.log(1, 256),
        seqlen_q,
        seqlen_kv: if in_pages { keys.next_multiple_of(page) } else { keys },
        num_heads_q,
        num_heads_kv,
        head_dims: HeadDims::all(head_dim),
        page_size: in_pages.then_some(page),
        chosen: None,
        fill,
        window,
        latent: false,
        dtype: dice.pick(&DTYPES),
        kv_dtype: None,
    }
}
