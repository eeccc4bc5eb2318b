//! Cases of attention by an index by lists of their sizes.

use super::grid::{GridPeers, each, head_dims, heads_kv};
use super::index::{IndexShape, Listing};
use super::{Case, Shape};
use blockflash_sys::DType;
use serde::Deserialize;

/// Every combination of the lists is a case, except that `most_keys` leaves out those with more
/// keys in the batch.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexGrid {
    batch: Vec<usize>,
    /// `None`: as many as keys.
    seqlen_q: Option<Vec<usize>>,
    seqlen_kv: Vec<usize>,
    most_keys: Option<usize>,
    num_heads_q: usize,
    num_heads_kv: Option<usize>,
    groups: usize,
    head_dim: usize,
    head_dim_v: Option<usize>,
    page_size: Option<usize>,
    granularity: usize,
    entries: usize,
    lists: Option<Vec<Listing>>,
    #[serde(default)]
    latent: bool,
    dtype: Vec<DType>,
    /// Which competitors the cases are measured with.
    #[serde(default)]
    pub peers: GridPeers,
}

impl IndexGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let Self { num_heads_q, groups, page_size, granularity, entries, latent, .. } = *self;
        let head_dims = head_dims(self.head_dim, self.head_dim_v);
        let num_heads_kv = heads_kv(num_heads_q, self.num_heads_kv)?;
        let lists = self.lists.as_deref().unwrap_or(&[Listing::Uniform]);
        let queries = self.seqlen_q.as_ref();
        let queries: Vec<_> =
            queries.map_or(vec![None], |some| some.iter().copied().map(Some).collect());
        let mut cases = Vec::new();
        each!(dtype in self.dtype, lists in lists, seqlen_q in queries,
            seqlen_kv in self.seqlen_kv, batch in self.batch => {
            let seqlen_q = seqlen_q.unwrap_or(seqlen_kv);
            let shape = IndexShape { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv,
                groups, head_dims, page_size, granularity, entries, lists, latent, dtype };
            shape.check()?;
            if self.most_keys.is_none_or(|most| batch.saturating_mul(seqlen_kv) <= most) {
                cases.push(shape.into());
            }
        });
        Ok(cases)
    }
}
