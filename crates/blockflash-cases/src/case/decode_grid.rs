//! Cases of attention to a cache by lists of their sizes.

use super::decode::{DecodeShape, Fill};
use super::grid::{GridPeers, each, head_dims, heads_kv};
use super::{Case, Shape};
use blockflash_sys::DType;
use serde::Deserialize;

/// Every combination of the lists is a case, except that `most_keys` leaves out those with more
/// keys in the batch.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeGrid {
    batch: Vec<usize>,
    seqlen_q: Option<Vec<usize>>,
    seqlen_kv: Vec<usize>,
    most_keys: Option<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    head_dim: usize,
    head_dim_v: Option<usize>,
    page_size: Option<Vec<usize>>,
    chosen: Option<usize>,
    fill: Option<Vec<Fill>>,
    window: Option<usize>,
    #[serde(default)]
    latent: bool,
    dtype: Vec<DType>,
    kv_dtype: Option<DType>,
    /// Which competitors the cases are measured with.
    #[serde(default)]
    pub peers: GridPeers,
}

impl DecodeGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let Self { num_heads_q, chosen, window, latent, kv_dtype, .. } = *self;
        let head_dims = head_dims(self.head_dim, self.head_dim_v);
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        let sizes = self.page_size.as_ref();
        let page_sizes =
            sizes.map_or(vec![None], |sizes| sizes.iter().copied().map(Some).collect());
        let (fills, queries) = (self.fill.as_deref(), self.seqlen_q.as_deref());
        let (fills, queries) = (fills.unwrap_or(&[Fill::Full]), queries.unwrap_or(&[1]));
        let mut cases = Vec::new();
        each!(dtype in self.dtype, page_size in page_sizes, fill in fills, seqlen_q in queries,
            seqlen_kv in self.seqlen_kv, batch in self.batch => {
            let shape = DecodeShape { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv,
                head_dims, page_size, chosen, fill, window, latent, dtype, kv_dtype };
            shape.check()?;
            if self.most_keys.is_none_or(|most| batch.saturating_mul(seqlen_kv) <= most) {
                cases.push(shape.into());
            }
        });
        Ok(cases)
    }
}
