//! Appending to a cache whose values are the first columns of its keys: each element of a row is
//! written once.

use super::{AppendKv, AppendKvProblem};
use crate::check::Operand;
use crate::kv_cache::{CacheSizes, CacheValues, FLOATS, KvCacheMut};
use crate::{Error, Result};
use blockflash_safe::View;
use blockflash_sys::HeadDims;

impl<'a> AppendKv<'a> {
    /// New rows for a [latent cache](crate::KvCache::latent), `[batch, tokens, num_heads_kv,
    /// head_dim]` or packed, stored as they are:
    ///
    /// ```
    /// # use blockflash_ops::{AppendKv, Device, DType, KvCacheMut, Tensor};
    /// # let stream = Device::cpu().stream()?;
    /// let mut rows = Tensor::zeros(&stream, DType::F32, &[1, 100, 1, 96])?; // room for 100 tokens
    /// let seqused_kv = Tensor::from_slice(&stream, &[5], &[1])?; // three before, two new ones
    /// let new = Tensor::from_slice(&stream, &[1f32; 2 * 96], &[1, 2, 1, 96])?;
    /// let cache = KvCacheMut {
    ///     seqused_kv: Some(seqused_kv.view()),
    ///     ..KvCacheMut::latent(rows.view_mut(), 64)?
    /// };
    /// AppendKv::latent(new.view()).append_into(cache, &stream)?;
    /// assert_eq!(rows.to_vec::<f32>(&stream)?[3 * 96..5 * 96], [1.0; 2 * 96]);
    /// # Ok::<(), blockflash_ops::Error>(())
    /// ```
    ///
    /// [`rotary`](Self::rotary) turns the columns behind the values, the first `rotary_dim` of
    /// them. [`latent_parts`](Self::latent_parts) takes both parts of the rows as two tensors.
    pub const fn latent(rows: View<'a>) -> Self {
        Self { k: rows, v: None, packed: None, rotary: None }
    }

    /// Like [`latent`](Self::latent), of rows in two parts: `values` has the first `head_dim_v`
    /// columns, and `rotary` those behind them, which [`rotary`](Self::rotary) turns.
    pub const fn latent_parts(values: View<'a>, rotary: View<'a>) -> Self {
        Self::new(rotary, values)
    }

    /// What is stored as the columns behind the values, and as the values; `k` and `v` for a cache
    /// that is not latent.
    pub(super) fn parts(&self, problem: &AppendKvProblem) -> Result<[View<'a>; 2]> {
        let HeadDims { qk, v } = problem.head_dims;
        let Some(values) = self.v else {
            let last = self.k.shape().len() - 1;
            return Ok([self.k.slice(last, v..v + qk)?, self.k.slice(last, 0..v)?]);
        };
        Ok([self.k, values])
    }

    /// Checks that rows of a latent form come to such a cache, and only they.
    pub(super) fn check_form(
        &self,
        problem: &AppendKvProblem,
        cache: &KvCacheMut<'_>,
    ) -> Result<()> {
        match (&cache.v, problem.is_latent()) {
            (CacheValues::Own(_), false) | (CacheValues::FirstColumns(_), true) => Ok(()),
            (CacheValues::FirstColumns(_), false) => {
                let expected = "none, since all columns of cache.k are values".into();
                let found = self.v.map_or(vec![], |v| v.shape().to_vec());
                Err(Error::Shape { what: "new.v", expected, found })
            }
            (CacheValues::Own(v), true) => Err(Operand::of_mut("cache.v", v)
                .wrong_shape("memory of its own, or a cache of KvCacheMut::latent")),
        }
    }
}

/// The columns of new keys and new values for a cache, whose elements are stored apart. In a latent
/// cache those are the columns behind the values, and the values; a row that is all values is
/// stored in two halves, since kernels write two tensors.
pub(super) fn head_dims(new: &AppendKv<'_>, cache: &CacheSizes) -> Result<HeadDims> {
    let HeadDims { qk, v } = cache.head_dims;
    if cache.has_code_rows() {
        let expected = "no rows of codes, to which AppendLatentCodes appends".into();
        return Err(Error::DType { what: "cache.k", expected, found: cache.dtype });
    }
    if new.v.is_none() && !cache.shared {
        let expected = "the new values, since cache.v has memory of its own".into();
        return Err(Error::Shape { what: "new.v", expected, found: vec![] });
    }
    if !cache.shared || new.v.is_some() && qk == v {
        return Ok(cache.head_dims);
    }
    if cache.dtype.is_code() {
        let expected = FLOATS.map(|dtype| dtype.name()).join(" or ");
        let expected = format!("{expected}, since its values are columns of its keys");
        return Err(Error::DType { what: "cache.k", expected, found: cache.dtype });
    }
    let values = if qk == v { qk.div_ceil(2).next_multiple_of(8).min(qk) } else { v };
    Ok(HeadDims { qk: qk - values, v: values })
}
