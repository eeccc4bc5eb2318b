//! Block masks for block-sparse attention: which blocks of queries × keys are visited.
//!
//! A [`BlockMask`] is built on the host, from index arrays, booleans, top-k lists, scores or a
//! pattern, and masks are combined by [`union`](BlockMask::union) and
//! [`intersection`](BlockMask::intersection). Within a visited block the token
//! [`Mask`](crate::Mask) still decides pair by pair, and bits where the block is partial: masks of
//! tokens, such as [documents](BlockMask::documents) or any
//! [boolean mask](BlockMask::from_token_mask), are made of full and partial blocks. Pairs outside
//! all visited blocks are not attended. [`Attention::block_mask`](crate::Attention::block_mask)
//! requires the mask on the device of the tensors, and [`BlockMask::to`] copies it to a GPU. For
//! variable-length batches [`BlockMask::packed`] concatenates the masks of the sequences.
//!
//! A mask that depends on the data of each call is built on the device that holds the data:
//! [`BlockScores`] computes scores of blocks, and [`BlockMaskBuffer`] builds the mask from them. On
//! a GPU both run without the host, so a graph can capture them together with the attention that
//! follows.
//!
//! ```
//! use blockflash_ops::{Align, Attention, BlockGeometry, BlockMask, Device, Mask, View};
//!
//! // 1000 queries and keys in blocks of 128 × 64: three blocks back, and the first block, as far
//! // as the causal mask shows them.
//! let geometry = BlockGeometry::new(1000, 1000, 128, 64)?;
//! let local = BlockMask::window(geometry, Some(3), Some(0), Align::BottomRight)?;
//! let mask = local.union(&BlockMask::sink(geometry, 1)?)?.intersect_mask(Mask::causal())?;
//!
//! assert_eq!(mask.row(0, 0, 4)?.collect::<Vec<_>>(), [0, 5, 6, 7, 8, 9]);
//! assert!(mask.visited_pairs(Mask::causal())? < Mask::causal().visited_pairs(1000, 1000));
//!
//! // The same for both heads.
//! let data: Vec<f32> = (0..1000 * 2 * 8).map(|i| (i as f32).sin()).collect();
//! let q = View::from_slice(&data, &[1, 1000, 2, 8])?;
//! let (scores, block_mask) = (Mask::causal().into(), Some(&mask));
//! let attention = Attention { scores, block_mask, ..Attention::new(q, q, q) };
//! let output = attention.forward(&Device::cpu().stream()?)?;
//! assert_eq!(output.o.shape(), [1, 1000, 2, 8]);
//! # Ok::<(), blockflash_ops::Error>(())
//! ```

mod bit_tile;
mod bits;
mod block_scores;
mod buffer;
mod build;
mod build_plan;
mod choice;
mod combine;
mod device_transpose;
mod from_tensors;
mod geometry;
mod kernel;
mod mask;
mod packed;
mod patterns;
mod problems;
mod scores;
mod token_buffer;
mod token_choice;
mod token_patterns;
mod tokens;
mod transpose;
mod validate;

pub use bit_tile::BitTile;
pub(crate) use bits::BlockBits;
pub use block_scores::BlockScores;
pub use buffer::BlockMaskBuffer;
pub use choice::{BlockChoice, BlockSource};
pub use from_tensors::BlockColumns;
pub use geometry::BlockGeometry;
pub use mask::BlockMask;
pub use scores::block_mean_scores;
pub use token_choice::{TokenChoice, TokenSource};

#[cfg(test)]
pub(crate) mod fixtures;
