//! Caches whose values are the first columns of their keys.

use super::{KvCache, KvCacheMut};
use crate::check::Operand;
use crate::{Error, Result};
use blockflash_safe::{View, ViewMut};

/// The values of a [`KvCacheMut`].
#[derive(Debug)]
pub enum CacheValues<'a> {
    /// Memory of their own, see [`KvCache::v`].
    Own(ViewMut<'a>),
    /// This many first columns of the keys, see [`KvCacheMut::latent`].
    FirstColumns(usize),
}

impl CacheValues<'_> {
    /// The same values for reading, beside these keys.
    pub(super) fn as_view<'v>(&'v self, k: &View<'v>) -> Result<View<'v>> {
        match self {
            Self::Own(view) => Ok(view.as_view()),
            &Self::FirstColumns(columns) => first_columns(k, columns),
        }
    }

    /// The same values for one of several calls.
    pub(super) fn reborrow(&mut self) -> CacheValues<'_> {
        match self {
            Self::Own(view) => CacheValues::Own(view.reborrow()),
            &mut Self::FirstColumns(columns) => CacheValues::FirstColumns(columns),
        }
    }
}

impl<'a> KvCache<'a> {
    /// A contiguous cache of latent rows, whose every slot is used: of a row of keys, the first
    /// `head_dim_v` elements are the values. `rows` is what [`KvCache::k`] says, usually with one
    /// head.
    ///
    /// This is the cache of multi-head latent attention (MLA) whose projections are absorbed into
    /// queries and outputs: with `head_dim_v` 512, a row of 576 elements holds 512 of the
    /// compressed keys and values and 64 of the key that is turned by its position. Queries of all
    /// heads have 576 elements, outputs 512.
    ///
    /// ```
    /// # use blockflash_ops::{AttentionDecode, DType, Device, KvCache, Mask, Scores, Tensor};
    /// # let stream = Device::cpu().stream()?;
    /// // 8 pages of 64 slots; two sequences of 100 and 7 keys, 16 heads of queries.
    /// let rows = Tensor::zeros(&stream, DType::BF16, &[8, 64, 1, 576])?;
    /// let block_table = Tensor::from_slice(&stream, &[5, 2, 0, -1], &[2, 2])?;
    /// let seqused_kv = Tensor::from_slice(&stream, &[100, 7], &[2])?;
    /// let q = Tensor::zeros(&stream, DType::BF16, &[2, 1, 16, 576])?;
    /// let cache = KvCache {
    ///     block_table: Some(block_table.view()),
    ///     seqused_kv: Some(seqused_kv.view()),
    ///     ..KvCache::latent(rows.view(), 512)?
    /// };
    /// // The scale of the model, of keys with 128 + 64 elements.
    /// let softmax_scale = Some(192f32.sqrt().recip());
    /// let scores = Scores { softmax_scale, ..Mask::causal().into() };
    /// let decode = AttentionDecode { scores, ..AttentionDecode::new(q.view()) };
    /// assert_eq!(decode.forward(cache, &stream)?.o.shape(), [2, 1, 16, 512]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] unless `head_dim_v` is from 1 to the elements of a row.
    pub fn latent(rows: View<'a>, head_dim_v: usize) -> Result<Self> {
        Ok(Self::new(rows, first_columns(&rows, head_dim_v)?))
    }
}

impl<'a> KvCacheMut<'a> {
    /// Like [`KvCache::latent`], for a cache that a call may append to:
    /// [`AppendKv::latent`](crate::AppendKv::latent) makes the new rows.
    ///
    /// # Errors
    /// As [`KvCache::latent`].
    pub fn latent(rows: ViewMut<'a>, head_dim_v: usize) -> Result<Self> {
        first_columns(&rows.as_view(), head_dim_v)?;
        let v = CacheValues::FirstColumns(head_dim_v);
        Ok(Self { k: rows, v, k_scale: None, v_scale: None, block_table: None, seqused_kv: None })
    }
}

fn first_columns<'v>(rows: &View<'v>, columns: usize) -> Result<View<'v>> {
    let Some((last, &width)) = rows.shape().iter().enumerate().next_back() else {
        return Err(Operand::new("cache.k", rows).wrong_shape("[pages, page_size, 1, head_dim]"));
    };
    if columns == 0 || columns > width {
        let expected = format!("[1 to {width}], the columns of cache.k");
        return Err(Error::Shape { what: "head_dim_v", expected, found: vec![columns] });
    }
    Ok(rows.slice(last, 0..columns)?)
}
