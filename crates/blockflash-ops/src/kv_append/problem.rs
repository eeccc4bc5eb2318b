use super::{AppendKv, latent};
use crate::Result;
use crate::attention::Strides;
use crate::check::Operand;
use crate::kv_cache::{CacheSizes, KvCache, RotarySizes, token_sizes};
use blockflash_sys::{DType, HeadDims};

/// An append reduced to plain numbers. [`AppendKv::problem`] makes one from tensors, with all
/// checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendKvProblem {
    /// The cache.
    pub cache: CacheSizes,
    /// Element type of the new tokens: that of the cache, unless that holds codes.
    pub dtype: DType,
    /// Whether the call chooses and writes the scales of keys, and of values.
    pub chooses: [bool; 2],
    /// New tokens of each sequence; at most this many when packed.
    pub tokens: usize,
    /// Rows of the packed new tokens.
    pub packed: Option<usize>,
    /// Elements of a row of new keys, and of new values, as they are stored: those of the cache,
    /// but of a latent one those behind the values, and the values.
    pub head_dims: HeadDims,
    /// Strides of the new keys.
    pub k: Strides,
    /// Strides of the new values.
    pub v: Strides,
    /// Set when keys are turned by their positions.
    pub rotary: Option<RotarySizes>,
}

impl AppendKvProblem {
    /// No token of this type for this cache.
    pub(crate) fn nothing(cache: CacheSizes, dtype: DType) -> Self {
        let none = Strides { batch: 0, seq: 0, head: 0 };
        Self {
            cache,
            dtype,
            chooses: [false; 2],
            tokens: 0,
            packed: None,
            head_dims: cache.head_dims,
            k: none,
            v: none,
            rotary: None,
        }
    }

    /// Whether the values are stored as columns of the keys.
    pub fn is_latent(&self) -> bool {
        self.head_dims != self.cache.head_dims
    }

    /// Whether there is nothing to store.
    pub fn is_empty(&self) -> bool {
        let rows = self.packed.map_or(self.tokens, |total| total.min(self.tokens));
        let CacheSizes { batch, capacity, num_heads_kv, .. } = self.cache;
        [rows, batch, capacity, num_heads_kv].contains(&0)
    }
}

impl AppendKv<'_> {
    /// Everything that can be checked without reading a tensor, and the result as plain numbers.
    ///
    /// # Errors
    /// All checks of [`KvCache::sizes`]; [`Error::DType`](crate::Error::DType),
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Stride`](crate::Error::Stride) for tokens
    /// and rotary tables that do not fit the cache.
    pub fn problem(&self, cache: &KvCache<'_>) -> Result<AppendKvProblem> {
        let cache = cache.sizes()?;
        let head_dims = latent::head_dims(self, &cache)?;
        let k = Operand::new("new.k", &self.k);
        cache.takes(&k)?;
        let rows = token_sizes(&k, self.packed.as_ref())?;
        let width = if self.v.is_some() { head_dims.qk } else { cache.head_dims.qk };
        let expected = [cache.batch, cache.num_heads_kv, width];
        if [rows.batch, rows.heads, rows.head_dim] != expected {
            let [batch, heads, head_dim] = expected;
            return Err(k.wrong_shape(match rows.packed {
                None => format!("[{batch}, tokens, {heads}, {head_dim}]"),
                Some(_) => format!("[total, {heads}, {head_dim}] of {batch} sequences"),
            }));
        }
        let mut problem = AppendKvProblem {
            tokens: rows.tokens,
            packed: rows.packed,
            head_dims,
            k: rows.strides,
            v: rows.strides,
            ..AppendKvProblem::nothing(cache, k.dtype)
        };
        if let Some(v) = &self.v {
            let v = Operand::new("new.v", v);
            v.dtype_in(&[k.dtype])?;
            let [of_rows @ .., _] = k.shape else { return Err(k.wrong_shape("rows")) };
            v.shape_is(&[of_rows, &[cache.head_dims.v]].concat())?;
            problem.v = token_sizes(&v, self.packed.as_ref())?.strides;
        }
        if let Some(rotary) = &self.rotary {
            // The columns that positions turn are those behind the values.
            let turned = if problem.is_latent() {
                cache.head_dims.qk - cache.head_dims.v
            } else {
                head_dims.qk
            };
            problem.rotary = Some(rotary.sizes(k.dtype, turned, cache.capacity)?);
        }
        Ok(problem)
    }
}
