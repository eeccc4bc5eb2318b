//! Attention over packed sequences whose offsets are garbage.

use super::guarded::{Guarded, Use};
use super::operands::{Lengths, Operands, Options, Sizes};
use super::values::{damaged, one_of, overwritten, token_mask};
use super::{Blocks, Checked, Ended, Place, Turn, text};
use crate::number::POISON;
use crate::placement::Placement;
use blockflash_ops::block_sparse::BitTile;
use blockflash_ops::{BlockGeometry, BlockMask, CuSeqlens, DType, Error, Mask};
use bytemuck::cast_slice;
use rand::Rng;
use rand::rngs::StdRng;

/// A packed batch. Its lengths are right, its offsets need not be.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) sizes: Sizes,
    blocks: Blocks,
    /// Queries and keys of each sequence, as the block mask has them.
    lengths: Vec<[usize; 2]>,
    pub(super) totals: [usize; 2],
    longest: [usize; 2],
    mask: Mask,
    offsets: [Vec<i32>; 2],
    /// What another stream overwrites the offsets with while kernels read them.
    pub(super) overwritten: Option<u8>,
}

impl Packed {
    pub(super) fn new(sizes: Sizes, blocks: Blocks, turn: &mut Turn<'_>) -> Self {
        let (on_gpu, masked) = (turn.place.other.is_some(), blocks != Blocks::None);
        let random = &mut turn.random;
        let (batch, most) = match random.random_range(0..12) {
            0 => (usize::from(masked), 200),
            1 => (60, 9),
            _ => (random.random_range(1..=6), 150),
        };
        let length = |random: &mut StdRng| random.random_range(0..=most);
        let lengths: Vec<[usize; 2]> =
            (0..batch).map(|_| [length(random), length(random)]).collect();
        let right = [0, 1].map(|which| {
            let mut end = 0;
            let ends = lengths.iter().map(|length| {
                end += length[which] as i32;
                end
            });
            [0].into_iter().chain(ends).collect::<Vec<i32>>()
        });
        let totals = [0, 1].map(|which| {
            right[which].last().map_or(0, |&end| end as usize) + one_of(&[0, 0, 1, 9], random)
        });
        let longest = [0, 1].map(|which| {
            let right = lengths.iter().map(|length| length[which]).max().unwrap_or(0);
            match random.random_range(0..8) {
                // A mask is of sequences that are no longer.
                0 if !masked => right / 2,
                1 => 3 * right + 7,
                2 => right + 1,
                3 if !masked => 1 << random.random_range(0..18),
                _ => right,
            }
        });
        let offsets = [0, 1].map(|which| match random.random_bool(0.3) {
            true => right[which].clone(),
            false => damaged(&right[which], totals[which], random),
        });
        Self {
            mask: token_mask(most, random),
            offsets,
            overwritten: overwritten(on_gpu, random),
            sizes,
            blocks,
            lengths,
            totals,
            longest,
        }
    }

    /// A packed block mask in host memory, if there is one.
    pub(super) fn block_mask(&self, turn: &mut Turn<'_>) -> Result<Option<BlockMask>, Error> {
        if self.blocks == Blocks::None {
            return Ok(None);
        }
        let (Sizes { blocks: [block_q, block_kv], mask_heads, .. }, random) =
            (self.sizes, &mut turn.random);
        let density = one_of(&[0.1, 0.5, 1.0], random);
        let of_sequence = |&[q, kv]: &[usize; 2]| {
            let geometry = BlockGeometry::new(q, kv, block_q, block_kv)?;
            let visited: Vec<bool> = (0..mask_heads * geometry.rows() * geometry.cols())
                .map(|_| random.random_bool(density))
                .collect();
            let mask = BlockMask::from_bool(geometry, 1, mask_heads, &visited)?;
            if self.blocks == Blocks::Partial { partial(mask, random) } else { Ok(mask) }
        };
        let masks =
            self.lengths.iter().map(of_sequence).collect::<Result<Vec<BlockMask>, Error>>()?;
        BlockMask::packed(&masks.iter().collect::<Vec<_>>()).map(Some)
    }

    /// The offsets on the device, ready to be overwritten.
    pub(super) fn offsets(&self, turn: &mut Turn<'_>) -> Checked<[Guarded; 2]> {
        let padding = vec![(one_of(&[0, 1, 5], &mut turn.random), 3)];
        let (beside, place) = (Placement { order: Vec::new(), padding }, turn.place);
        let offsets = |name, entries: &[i32]| {
            let place_of = (&[entries.len()][..], &beside, POISON);
            let content = cast_slice(entries);
            let mut offsets = Guarded::new(name, DType::I32, place_of, content, &place.stream)?;
            offsets.used_on(place.other.as_ref()).map(|()| offsets)
        };
        let [q, kv] = &self.offsets;
        Ok([offsets("cu_seqlens.q", q)?, offsets("cu_seqlens.kv", kv)?])
    }

    pub(super) fn options<'a>(
        &self,
        [q, kv]: &'a [Guarded; 2],
        block_mask: Option<&'a BlockMask>,
    ) -> Options<'a> {
        let [max_seqlen_q, max_seqlen_kv] = self.longest;
        let cu_seqlens = CuSeqlens { q: q.view(), kv: kv.view(), max_seqlen_q, max_seqlen_kv };
        Options { mask: self.mask, cu_seqlens: Some(cu_seqlens), block_mask }
    }

    /// Checks the offsets, unless they were overwritten.
    pub(super) fn judge(&self, offsets: &[Guarded; 2], place: &Place) -> Checked<()> {
        match self.overwritten {
            Some(_) => Ok(()),
            None => offsets.iter().try_for_each(|one| one.judge(Use::Read, &place.stream)),
        }
    }
}

/// The same mask with any bits for most blocks.
fn partial(mask: BlockMask, random: &mut StdRng) -> Result<BlockMask, Error> {
    let tiles = mask.block_q() / BitTile::SIDE * (mask.block_kv() / BitTile::SIDE);
    let blocks = random.random_range(1..=3);
    let words: Vec<u32> = (0..blocks * tiles * BitTile::WORDS).map(|_| random.random()).collect();
    let first = |random: &mut StdRng| match random.random_range(0..=blocks) {
        0 => -1,
        block => ((block - 1) * tiles) as i32,
    };
    let block_bits: Vec<i32> = (0..mask.nnz()).map(|_| first(random)).collect();
    mask.with_bits(&block_bits, &words)
}

/// How a case on packed sequences ended.
pub(super) fn ended(launched: Result<(), Error>, place: &Place) -> Checked<Ended> {
    match launched {
        Ok(()) => Ok(Ended::Computed),
        // A GPU does not look before it computes.
        Err(Error::InvalidCuSeqlens { .. }) if place.other.is_none() => Ok(Ended::Refused),
        // All rows are of no sequence, or too long for half of a maximum of 1.
        Err(Error::MaxSeqlen { .. }) => Ok(Ended::Refused),
        Err(error) => Err(format!("refused: {error}")),
    }
}

/// Runs a case, under a packed block mask or none.
pub(super) fn packed(turn: &mut Turn<'_>, blocks: Blocks) -> Checked<Ended> {
    let case = Packed::new(Sizes::new(turn, blocks), blocks, turn);
    attend(&case, turn).map_err(|error| turn.story(&error, &case))
}

fn attend(case: &Packed, turn: &mut Turn<'_>) -> Checked<Ended> {
    let place = turn.place;
    let mut operands = Operands::new(&case.sizes, Lengths::Packed { totals: case.totals }, turn)?;
    let block_mask = case.block_mask(turn).map_err(text)?;
    let block_mask = block_mask.map(|mask| mask.to(&place.stream)).transpose().map_err(text)?;
    let mut offsets = case.offsets(turn)?;
    let options = case.options(&offsets, block_mask.as_ref());
    let launched = operands.launch(&case.sizes, &options, place);
    for offsets in &mut offsets {
        offsets.overwrite(case.overwritten, place.other.as_ref())?;
    }
    turn.wait(case)?;
    operands.judge(Use::Written, place)?;
    case.judge(&offsets, place)?;
    ended(launched, place)
}
