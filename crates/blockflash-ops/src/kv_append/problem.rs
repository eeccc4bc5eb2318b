use super::AppendKv;
use crate::Result;
use crate::attention::Strides;
use crate::check::Operand;
use crate::kv_cache::{CacheSizes, KvCache, RotarySizes, token_sizes};
use blockflash_sys::DType;

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
        let (none, chooses) = (Strides { batch: 0, seq: 0, head: 0 }, [false; 2]);
        Self { cache, dtype, chooses, tokens: 0, packed: None, k: none, v: none, rotary: None }
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
        let (k, v) = (Operand::new("new.k", &self.k), Operand::new("new.v", &self.v));
        cache.takes(&k)?;
        v.dtype_in(&[k.dtype])?;
        let rows = token_sizes(&k, self.packed.as_ref())?;
        let expected = [cache.batch, cache.num_heads_kv, cache.head_dims.qk];
        if [rows.batch, rows.heads, rows.head_dim] != expected {
            let [batch, heads, head_dim] = expected;
            return Err(k.wrong_shape(match rows.packed {
                None => format!("[{batch}, tokens, {heads}, {head_dim}]"),
                Some(_) => format!("[total, {heads}, {head_dim}] of {batch} sequences"),
            }));
        }
        let [of_rows @ .., _] = k.shape else { return Err(k.wrong_shape("rows")) };
        v.shape_is(&[of_rows, &[cache.head_dims.v]].concat())?;
        let of_v = token_sizes(&v, self.packed.as_ref())?;
        let rotary = self.rotary.as_ref();
        let rotary = rotary.map(|r| r.sizes(k.dtype, cache.head_dims.qk, cache.capacity));
        Ok(AppendKvProblem {
            cache,
            dtype: k.dtype,
            chooses: [false; 2],
            tokens: rows.tokens,
            packed: rows.packed,
            k: rows.strides,
            v: of_v.strides,
            rotary: rotary.transpose()?,
        })
    }
}
