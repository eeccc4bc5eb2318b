//! Keys and values that stay from call to call: contiguous or in pages, with lengths on the device.

mod host;
mod latent;
pub(crate) mod latent_codes;
mod packed;
mod rotary;
mod rows;
mod scales;
mod sizes;
mod stored;
mod tokens;
mod verify;

pub use latent::CacheValues;
pub use rotary::{Rotary, RotaryPairs, RotarySizes};
pub use scales::{CacheScale, ScaleStrides};
pub use sizes::{CacheSizes, TableSizes};
pub use tokens::PackedTokens;

pub(crate) use host::{HostCache, HostRotary};
pub(crate) use packed::packed_keys;
pub(crate) use rows::HostRows;
pub(crate) use scales::HostScale;
pub(crate) use sizes::{FLOATS, TYPES};
pub(crate) use stored::Stored;
pub(crate) use tokens::{token_ranges, token_sizes};

use crate::Result;
use crate::check::Operand;
use blockflash_safe::{Device, KvCacheViews, View, ViewMut};

/// The keys and values of a batch for [`AttentionDecode`](crate::AttentionDecode), read-only.
///
/// ```
/// # use blockflash_ops::{Device, KvCache, Tensor, DType};
/// # let stream = Device::cpu().stream()?;
/// // 40 pages of 16 slots for 2 heads of keys with head_dim 64.
/// let k = Tensor::zeros(&stream, DType::BF16, &[40, 16, 2, 64])?;
/// let v = Tensor::zeros(&stream, DType::BF16, &[40, 16, 2, 64])?;
/// // Sequence 0 has 20 keys in the pages 7 and 3, sequence 1 has none yet.
/// let block_table = Tensor::from_slice(&stream, &[7, 3, -1, -1, -1, -1], &[2, 3])?;
/// let seqused_kv = Tensor::from_slice(&stream, &[20, 0], &[2])?;
/// let cache = KvCache {
///     block_table: Some(block_table.view()),
///     seqused_kv: Some(seqused_kv.view()),
///     ..KvCache::new(k.view(), v.view())
/// };
/// assert_eq!(cache.sizes()?.capacity, 48);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// Table and lengths are read on the device at each launch, so a captured graph follows them. A
/// GPU reads only what the lengths cover: slots beyond may hold anything. Whatever table and
/// lengths hold, nothing outside the tensors is touched:
///
/// - A length counts as 0 if it is negative, and as the capacity if it is greater.
/// - Entries of the table count as page 0 if they are negative, and as the last page if there is no
///   such page. Entries that belong to no key of the sequence are not used.
///
/// [`set_checks`](crate::set_checks) makes such lengths and entries errors.
#[derive(Clone, Copy, Debug)]
pub struct KvCache<'a> {
    /// Keys, `[batch, capacity, num_heads_kv, head_dim]`; with a [`block_table`](Self::block_table)
    /// `[pages, page_size, num_heads_kv, head_dim]`. All strides but the last are free, so a cache
    /// `[pages, num_heads_kv, page_size, head_dim]` is a permuted view.
    pub k: View<'a>,
    /// Values, in the shape of the keys but for their own `head_dim`, in their element type. They
    /// may be columns of the keys; [`latent`](Self::latent) makes such a cache, and
    /// [`latent_codes`](Self::latent_codes) one of rows of codes, which are keys and values.
    pub v: View<'a>,
    /// Only for keys of 8 bits (`e4m3`, `e5m2`, `i8`), f32: what the codes are multiplied with;
    /// `None` is 1. In one of these shapes, where each extent may also be 1 for a scale that all
    /// share:
    ///
    /// - `[1]`: one scale for the whole cache.
    /// - `[batch, num_heads_kv]`: one for each sequence and head.
    /// - `[pages, page_size, num_heads_kv]`: one for each row; `[pages, 1, num_heads_kv]` is one
    ///   for each page and head. A contiguous cache has a page for each sequence.
    ///
    /// Strides are free. Scales are read on the device at each launch. They should be finite and
    /// positive, which [`set_checks`](crate::set_checks) verifies; what others make of the numbers
    /// is that of IEEE arithmetic.
    pub k_scale: Option<View<'a>>,
    /// Like [`k_scale`](Self::k_scale), of the values.
    pub v_scale: Option<View<'a>>,
    /// i32 `[batch, max_pages]`: the pages of each sequence in the order of their keys. Sequences
    /// may share pages. The capacity of a sequence is `max_pages * page_size`. A GPU needs pages of
    /// a multiple of 16 slots.
    pub block_table: Option<View<'a>>,
    /// i32 `[batch]`: how many keys each sequence has; `None` is the whole capacity.
    pub seqused_kv: Option<View<'a>>,
}

/// A [`KvCache`] that a call may append to.
#[derive(Debug)]
pub struct KvCacheMut<'a> {
    /// See [`KvCache::k`].
    pub k: ViewMut<'a>,
    /// See [`KvCache::v`].
    pub v: CacheValues<'a>,
    /// The scales of the keys, see [`KvCache::k_scale`], given or chosen by appends.
    pub k_scale: Option<CacheScale<'a>>,
    /// The scales of the values.
    pub v_scale: Option<CacheScale<'a>>,
    /// See [`KvCache::block_table`].
    pub block_table: Option<View<'a>>,
    /// See [`KvCache::seqused_kv`].
    pub seqused_kv: Option<View<'a>>,
}

impl<'a> KvCache<'a> {
    /// A contiguous cache whose every slot is used.
    pub const fn new(k: View<'a>, v: View<'a>) -> Self {
        Self { k, v, k_scale: None, v_scale: None, block_table: None, seqused_kv: None }
    }

    /// The tensors, for a launch.
    pub(crate) const fn views(&self) -> KvCacheViews<'a> {
        let Self { k, v, block_table, seqused_kv: seqused, k_scale, v_scale } = *self;
        KvCacheViews { k, v, block_table, seqused, scales: [k_scale, v_scale] }
    }

    /// Checks that every tensor is on this device.
    pub(crate) fn on(&self, device: &Device) -> Result<()> {
        let tensors = [
            ("cache.k", Some(&self.k)),
            ("cache.v", Some(&self.v)),
            ("cache.k_scale", self.k_scale.as_ref()),
            ("cache.v_scale", self.v_scale.as_ref()),
            ("cache.block_table", self.block_table.as_ref()),
            ("cache.seqused_kv", self.seqused_kv.as_ref()),
        ];
        tensors.into_iter().try_for_each(|(what, view)| {
            view.map_or(Ok(()), |view| Operand::new(what, view).on(device))
        })
    }
}

impl<'a> KvCacheMut<'a> {
    /// A contiguous cache whose every slot is used.
    pub const fn new(k: ViewMut<'a>, v: ViewMut<'a>) -> Self {
        let v = CacheValues::Own(v);
        Self { k, v, k_scale: None, v_scale: None, block_table: None, seqused_kv: None }
    }

    /// The same cache for reading.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) for more [`CacheValues::FirstColumns`] than the keys
    /// have.
    pub fn as_cache(&self) -> Result<KvCache<'_>> {
        let k = self.k.as_view();
        Ok(KvCache {
            k,
            v: self.v.as_view(&k)?,
            k_scale: self.k_scale.as_ref().map(CacheScale::as_view),
            v_scale: self.v_scale.as_ref().map(CacheScale::as_view),
            block_table: self.block_table,
            seqused_kv: self.seqused_kv,
        })
    }

    /// Whether appends choose the scales of keys, and of values.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) for scales that are not one for each row.
    pub(crate) fn chooses(&self, sizes: &CacheSizes) -> Result<[bool; 2]> {
        let rows = [sizes.pages, sizes.page_size, sizes.num_heads_kv];
        let chooses = |what, scale: &Option<CacheScale<'_>>| match scale {
            Some(CacheScale::PerToken(view)) => {
                Operand::of_mut(what, view).shape_is(&rows).map(|()| true)
            }
            _ => Ok(false),
        };
        Ok([chooses("cache.k_scale", &self.k_scale)?, chooses("cache.v_scale", &self.v_scale)?])
    }

    /// The same cache for one of several calls.
    pub fn reborrow(&mut self) -> KvCacheMut<'_> {
        KvCacheMut {
            k: self.k.reborrow(),
            v: self.v.reborrow(),
            k_scale: self.k_scale.as_mut().map(CacheScale::reborrow),
            v_scale: self.v_scale.as_mut().map(CacheScale::reborrow),
            block_table: self.block_table,
            seqused_kv: self.seqused_kv,
        }
    }
}

#[cfg(test)]
mod tests;
