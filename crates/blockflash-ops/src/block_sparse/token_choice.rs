//! The pairs of tokens from which masks of full and partial blocks are rebuilt.

use super::token_patterns::{check_neighborhood, check_nodes, check_stride};
use super::validate::{Sizes, invalid};
use super::{BitTile, BlockMask};
use crate::attention::{MAX_SEQLEN, window_params};
use crate::check::{Operand, contiguous, to_i32};
use crate::{Align, Mask, Result};
use blockflash_safe::{Device, View};
use blockflash_sys::DType;
use blockflash_sys::params::{
    BLOCKFLASH_BLOCK_BITS_AXES, BLOCKFLASH_PAIRS_BOOL, BLOCKFLASH_PAIRS_DOCUMENTS,
    BLOCKFLASH_PAIRS_NEIGHBORHOOD, BLOCKFLASH_PAIRS_RANGES, BLOCKFLASH_PAIRS_STRIDED,
    BLOCKFLASH_PAIRS_TREE, blockflash_block_bits_params,
};

/// Axes of a grid, at most.
const MAX_AXES: usize = BLOCKFLASH_BLOCK_BITS_AXES as usize;

/// The pairs of tokens that a source shows: contiguous tensors, or numbers. What is the same for
/// all heads is best built in a mask with one head, which stands for all.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum TokenSource<'a> {
    /// u8 `[batch, heads, seqlen_q, seqlen_kv]`: the pairs that are not 0.
    Bool(View<'a>),
    /// i32 `[batch, heads, seqlen_q, 2 * ranges]`: for each query any number of ranges
    /// `[begin, end)` of keys, one after another. They may overlap and be empty; what is not from
    /// key 0 to the last one is left out.
    Ranges(View<'a>),
    /// Documents in one sequence, as by [`BlockMask::documents`]: a query sees the keys with its
    /// id, in any order. Negative ids are padding, which sees nothing and nobody sees.
    Documents {
        /// i32 `[batch, seqlen_q]`.
        ids_q: View<'a>,
        /// i32 `[batch, seqlen_kv]`.
        ids_kv: View<'a>,
    },
    /// Trees, as by [`BlockMask::tree`]: i32 `[batch, seqlen_q]`, the parent of each query. The
    /// last `seqlen_q` keys are those of the queries; a query sees all keys before them, its own
    /// one, and those of its ancestors. A parent that is not an earlier query, such as −1, is none.
    Tree(View<'a>),
    /// The keys that are a multiple of `stride` away from the query's position, which depends on
    /// `align` as in [`Mask`]. Within a [window](TokenChoice::within) this is
    /// [`BlockMask::dilated_window`]; a stride of 1 shows all pairs.
    Strided {
        /// At least 1.
        stride: usize,
        /// Where query 0 stands.
        align: Align,
    },
    /// Neighbourhoods on a grid of one to four dimensions, as by [`BlockMask::neighborhood`].
    Neighborhood {
        /// Sizes of the grid.
        grid: &'a [usize],
        /// Positions that are seen along each dimension.
        window: &'a [usize],
        /// How far apart they are.
        dilation: &'a [usize],
    },
}

/// The pairs of a mask that is rebuilt: those of a source within a token mask.
#[derive(Clone, Copy, Debug)]
pub struct TokenChoice<'a> {
    /// The source of the pairs.
    pub source: TokenSource<'a>,
    /// Hides the pairs outside of it, so that calls of attention need no token mask: blocks that it
    /// cuts become partial.
    pub within: Mask,
    /// The token mask of the calls. Blocks that it hides entirely are left out, and inside of the
    /// others it changes nothing.
    pub mask: Mask,
}

impl<'a> TokenChoice<'a> {
    /// The pairs of a source, under no token mask.
    pub const fn new(source: TokenSource<'a>) -> Self {
        Self { source, within: Mask::Full, mask: Mask::Full }
    }

    /// Checks that the source fits a mask of these sizes on this device.
    pub(super) fn check(&self, sizes: &Sizes, device: &Device) -> Result<()> {
        let Sizes { geometry, batch, heads } = *sizes;
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let tensor = |what: &'static str, view: &View<'_>, dtype, shape: &[usize]| {
            contiguous(what, view, dtype, shape)?;
            Operand::new(what, view).on(device)
        };
        match &self.source {
            TokenSource::Bool(pairs) => {
                tensor("pairs", pairs, DType::U8, &[batch, heads, seqlen_q, seqlen_kv])
            }
            TokenSource::Ranges(ranges) => {
                let count = range_count(ranges);
                to_i32("ranges", count)?;
                tensor("ranges", ranges, DType::I32, &[batch, heads, seqlen_q, 2 * count])
            }
            TokenSource::Documents { ids_q, ids_kv } => {
                tensor("ids_q", ids_q, DType::I32, &[batch, seqlen_q])?;
                tensor("ids_kv", ids_kv, DType::I32, &[batch, seqlen_kv])
            }
            TokenSource::Tree(parents) => {
                check_nodes(&geometry)?;
                tensor("parents", parents, DType::I32, &[batch, seqlen_q])
            }
            TokenSource::Strided { stride, .. } => check_stride("stride", *stride),
            TokenSource::Neighborhood { grid, window, dilation } => {
                check_neighborhood(&geometry, grid, window, dilation)?;
                if grid.len() > MAX_AXES {
                    let axes = grid.len();
                    return invalid(format!(
                        "a grid of {axes} dimensions, the limit is {MAX_AXES}"
                    ));
                }
                Ok(())
            }
        }
    }

    /// The mask with the constructors for the CPU, without regard to `mask`. The source has been
    /// checked and is on the CPU.
    pub(super) fn build(&self, sizes: &Sizes) -> Result<BlockMask> {
        let Sizes { geometry, batch, heads } = *sizes;
        let (seqlen_q, seqlen_kv) = (geometry.seqlen_q(), geometry.seqlen_kv());
        let shown = match self.source {
            TokenSource::Bool(pairs) => {
                let pairs: Vec<bool> = pairs.as_slice::<u8>()?.iter().map(|&p| p != 0).collect();
                BlockMask::from_token_mask(geometry, batch, heads, &pairs)
            }
            TokenSource::Ranges(ranges) => {
                let count = range_count(&ranges);
                let ranges = ranges.as_slice::<i32>()?;
                BlockMask::from_ranges(geometry, batch, heads, |batch, head, query| {
                    let row = (batch * heads + head) * seqlen_q + query;
                    let ends = ranges[row * count * 2..][..count * 2].chunks_exact(2);
                    ends.map(|ends| ends[0].max(0) as usize..ends[1].max(0) as usize)
                })
            }
            TokenSource::Documents { ids_q, ids_kv } => {
                BlockMask::documents(geometry, ids_q.as_slice()?, ids_kv.as_slice()?)
            }
            TokenSource::Tree(parents) => {
                let earlier = |(at, &parent): (usize, &i32)| {
                    if (0..(at % seqlen_q) as i32).contains(&parent) { parent } else { -1 }
                };
                let parents = parents.as_slice()?.iter().enumerate().map(earlier);
                BlockMask::tree(geometry, &parents.collect::<Vec<_>>())
            }
            TokenSource::Strided { stride, align } => {
                BlockMask::dilated_window(geometry, stride, None, None, align)
            }
            TokenSource::Neighborhood { grid, window, dilation } => {
                BlockMask::neighborhood(geometry, grid, window, dilation)
            }
        }?;
        if self.within == Mask::Full && [shown.batch, shown.heads] == [batch, heads] {
            return Ok(shown);
        }
        shown.intersection(&BlockMask::from_ranges(geometry, batch, heads, |_, _, query| {
            [self.within.visible(query, seqlen_q, seqlen_kv)]
        })?)
    }

    /// The tensors of the source.
    pub(super) fn tensors(&self) -> [Option<View<'a>>; 2] {
        match self.source {
            TokenSource::Bool(view) | TokenSource::Ranges(view) | TokenSource::Tree(view) => {
                [Some(view), None]
            }
            TokenSource::Documents { ids_q, ids_kv } => [Some(ids_q), Some(ids_kv)],
            TokenSource::Strided { .. } | TokenSource::Neighborhood { .. } => [None, None],
        }
    }

    /// Whether nodes are linked before blocks are classified.
    pub(super) fn has_nodes(&self) -> bool {
        matches!(self.source, TokenSource::Tree(_))
    }

    /// Neighbours in a row that a CTA of this many threads classifies.
    pub(super) fn cols_of_cta(&self, sizes: &Sizes, threads: usize) -> usize {
        /// Blocks of which a warp knows at a glance what bounds say.
        const GLANCED: usize = 32;
        /// CTAs that fill a GPU several times over.
        const MANY: usize = 8192;
        let geometry = &sizes.geometry;
        if let TokenSource::Bool(_) = self.source {
            // Each block is read: by a warp if it is a tile, and else by the CTA.
            let is_tile = [geometry.block_q(), geometry.block_kv()] == [BitTile::SIDE; 2];
            return if is_tile { threads / GLANCED } else { 1 };
        }
        // Bounds are taken once per CTA, but what they leave is more evenly spread over many.
        let ctas = sizes.groups() * geometry.rows() * geometry.cols().div_ceil(GLANCED);
        if ctas > MANY { threads } else { GLANCED }
    }

    /// Writes the numbers of the source into the argument of the kernel.
    pub(super) fn fill(
        &self,
        sizes: &Sizes,
        params: &mut blockflash_block_bits_params,
    ) -> Result<()> {
        let (seqlen_q, seqlen_kv) = (sizes.geometry.seqlen_q(), sizes.geometry.seqlen_kv());
        params.within = window_params(&self.within.limits(seqlen_q, seqlen_kv));
        params.source_kind = match self.source {
            TokenSource::Bool(_) => BLOCKFLASH_PAIRS_BOOL,
            TokenSource::Ranges(view) => {
                params.ranges = to_i32("ranges", range_count(&view))?;
                BLOCKFLASH_PAIRS_RANGES
            }
            TokenSource::Documents { .. } => BLOCKFLASH_PAIRS_DOCUMENTS,
            TokenSource::Tree(_) => BLOCKFLASH_PAIRS_TREE,
            TokenSource::Strided { stride, align } => {
                // No two positions are farther apart.
                params.stride = to_i32("stride", stride.min(MAX_SEQLEN))?;
                params.diagonal = match align {
                    Align::TopLeft => 0,
                    Align::BottomRight => {
                        to_i32("seqlen_kv", seqlen_kv)? - to_i32("seqlen_q", seqlen_q)?
                    }
                };
                BLOCKFLASH_PAIRS_STRIDED
            }
            TokenSource::Neighborhood { grid, window, dilation } => {
                params.axes = to_i32("dimensions", grid.len())?;
                for (to, from) in [
                    (&mut params.grid, grid),
                    (&mut params.window, window),
                    (&mut params.dilation, dilation),
                ] {
                    for (to, &from) in to.iter_mut().zip(from) {
                        *to = to_i32("grid", from)?;
                    }
                }
                BLOCKFLASH_PAIRS_NEIGHBORHOOD
            }
        };
        Ok(())
    }
}

/// Ranges of a query.
fn range_count(ranges: &View<'_>) -> usize {
    ranges.shape().get(3).copied().unwrap_or(0) / 2
}

#[cfg(test)]
#[path = "token_choice_tests.rs"]
mod tests;
