use super::AttentionDecodeProblem;
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Problem};
use blockflash_sys::{DType, HeadDims};
use std::collections::BTreeSet;

/// Lines of the support table: each tile's range of head dimensions, and one that no kernel takes.
pub(crate) fn support(dtype: DType) -> Vec<(String, AttentionDecodeProblem)> {
    let problem = |head_dim| {
        let cache = CacheSizes::contiguous(dtype, [1, 16], 1, head_dim);
        AttentionDecodeProblem::of(cache, 1, 1)
    };
    let mut lines = Vec::new();
    let mut start = 8;
    let tiles = || AttentionDecodeProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    let others = tiles().filter(|(_, tile)| !tile.is_latent());
    for widest in selection::ascending(others.map(|(_, tile)| tile.head_dims().max() as u32)) {
        lines.push((format!("head_dim {start}..={widest} by 8"), problem(widest as usize)));
        start = widest + 8;
    }
    let latent: BTreeSet<_> =
        tiles().filter(|(_, tile)| tile.is_latent()).map(|(_, tile)| tile.head_dims()).collect();
    for head_dims in latent {
        let cache = CacheSizes::latent(dtype, [1, 16], head_dims);
        let HeadDims { qk, v } = head_dims;
        let size = format!("head_dim {qk} with values in the first {v} columns of the keys");
        lines.push((size, AttentionDecodeProblem::of(cache, 1, 1)));
    }
    if dtype == DType::BF16 {
        let of_codes = AttentionDecodeProblem::of(CacheSizes::latent_codes([1, 16]), 1, 1);
        lines.push(("head_dim 576 of latent rows of codes".into(), of_codes.with_queries(dtype)));
    }
    lines.push(("other head_dim (59)".into(), problem(59)));
    lines
}
