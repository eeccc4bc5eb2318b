use super::BlockMask;
use super::validate::{Sizes, invalid};
use crate::check::{Operand, contiguous};
use crate::{Mask, Result};
use blockflash_safe::{Device, View};
use blockflash_sys::DType;

/// The source of the blocks of a mask: contiguous tensors with a value, or a list, for each row of
/// each head.
#[derive(Clone, Copy, Debug)]
pub enum BlockSource<'a> {
    /// u8 `[batch, heads, rows, cols]`: the blocks that are not 0.
    Bool(View<'a>),
    /// i32 `[batch, heads, rows, k]`: lists of up to `k` columns per row, in any order. Entries of
    /// −1 are skipped. A column that does not exist or comes twice is an error.
    TopK(View<'a>),
    /// The `k` blocks of each row with the largest scores, as [`BlockMask::top_k_from_scores`]
    /// chooses them. Blocks that the token mask hides entirely are never chosen, ties go to the
    /// smaller column, and a row with at most `k` candidates takes all of them. NaN is an error.
    Scores {
        /// f32 `[batch, heads, rows, cols]`.
        scores: View<'a>,
        /// Blocks per row.
        k: usize,
    },
}

/// The blocks of a mask: the blocks of a source and the blocks that are always visited, except the
/// ones that the token mask hides.
#[derive(Clone, Copy, Debug)]
pub struct BlockChoice<'a> {
    /// The source of the blocks.
    pub source: BlockSource<'a>,
    /// Blocks that are visited in any case: windows, sinks, global rows and columns, and whatever
    /// else constructors of [`BlockMask`] make of full blocks. It has the geometry of the mask that
    /// is built. Its numbers of batch entries and heads are 1 or the numbers of that mask.
    pub always: Option<&'a BlockMask>,
    /// The token mask. Blocks that it hides entirely are left out.
    pub mask: Mask,
}

impl<'a> BlockChoice<'a> {
    /// Only the blocks of a source, under no token mask.
    pub const fn new(source: BlockSource<'a>) -> Self {
        Self { source, always: None, mask: Mask::Full }
    }

    /// Checks that the operands fit a mask of these sizes on this device.
    pub(super) fn check(&self, sizes: &Sizes, device: &Device) -> Result<()> {
        let Sizes { geometry, batch, heads } = *sizes;
        let (what, view, dtype, last) = match &self.source {
            BlockSource::Bool(blocks) => ("blocks", blocks, DType::U8, geometry.cols()),
            BlockSource::TopK(columns) => ("columns", columns, DType::I32, list_length(columns)),
            BlockSource::Scores { scores, .. } => ("scores", scores, DType::F32, geometry.cols()),
        };
        contiguous(what, view, dtype, &[batch, heads, geometry.rows(), last])?;
        Operand::new(what, view).on(device)?;
        let Some(always) = self.always else { return Ok(()) };
        if let Some(sequences) = always.sequences() {
            return invalid(format!(
                "`always` is packed from {} sequences, expected a mask that is not packed",
                sequences.len()
            ));
        }
        if always.bits().is_some() {
            return invalid("`always` has partial blocks, expected full ones".into());
        }
        if always.geometry != geometry {
            return invalid(format!(
                "`always` has the geometry {:?}, not {geometry:?}",
                always.geometry
            ));
        }
        for (what, found, expected) in
            [("batch", always.batch, batch), ("heads", always.heads, heads)]
        {
            if ![1, expected].contains(&found) {
                return invalid(format!("{what} of `always` is {found}, neither 1 nor {expected}"));
            }
        }
        Operand::new("always", &always.row_ptr().view()).on(device)
    }

    /// Builds the mask with the constructors for the CPU. The operands have been checked and are on
    /// the CPU.
    pub(super) fn build(&self, sizes: &Sizes) -> Result<BlockMask> {
        let Sizes { geometry, batch, heads } = *sizes;
        let chosen = match &self.source {
            BlockSource::Bool(blocks) => {
                let blocks: Vec<bool> =
                    blocks.as_slice::<u8>()?.iter().map(|&block| block != 0).collect();
                BlockMask::from_bool(geometry, batch, heads, &blocks)
            }
            BlockSource::TopK(columns) => BlockMask::from_top_k(
                geometry,
                batch,
                heads,
                list_length(columns),
                columns.as_slice()?,
            ),
            BlockSource::Scores { scores, k } => {
                let scores = scores.as_slice()?;
                BlockMask::top_k_from_scores(geometry, batch, heads, scores, *k, self.mask)
            }
        }?;
        let all = match self.always {
            Some(always) => chosen.union(always)?,
            None => chosen,
        };
        all.intersect_mask(self.mask)
    }
}

/// `k` of lists `[batch, heads, rows, k]`.
pub(super) fn list_length(columns: &View<'_>) -> usize {
    columns.shape().last().copied().unwrap_or(0)
}
