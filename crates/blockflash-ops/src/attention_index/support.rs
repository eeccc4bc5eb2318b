use super::{IndexAttentionProblem, IndexListSizes};
use crate::kv_cache::CacheSizes;
use crate::selection::{self, Problem};
use blockflash_sys::{DType, HeadDims};
use std::collections::BTreeSet;

/// Lines of the support table: each tile's range of head dimensions, and one that no kernel takes.
pub(crate) fn support(dtype: DType) -> Vec<(String, IndexAttentionProblem)> {
    let lists = IndexListSizes { groups: 1, capacity: 1, granularity: 1, strides: [1; 2] };
    let of_cache = |cache| IndexAttentionProblem::of(cache, [1, 1], lists);
    let problem = |head_dim| of_cache(CacheSizes::contiguous(dtype, [1, 16], 1, head_dim));
    let tiles = || IndexAttentionProblem::kernels().iter().flat_map(|peers| &peers.kernels);
    let (mut lines, mut start) = (Vec::new(), 8);
    let others = tiles().filter(|(_, tile)| !tile.is_latent());
    for widest in selection::ascending(others.map(|(_, tile)| tile.head_dims().max() as u32)) {
        lines.push((format!("head_dim {start}..={widest} by 8"), problem(widest as usize)));
        start = widest + 8;
    }
    let latent = tiles().filter(|(_, tile)| tile.is_latent());
    for head_dims in latent.map(|(_, tile)| tile.head_dims()).collect::<BTreeSet<_>>() {
        let HeadDims { qk, v } = head_dims;
        let size = format!("head_dim {qk} with values in the first {v} columns of the keys");
        lines.push((size, of_cache(CacheSizes::latent(dtype, [1, 16], head_dims))));
    }
    if dtype == DType::BF16 {
        let of_codes = of_cache(CacheSizes::latent_codes([1, 16])).with_queries(dtype);
        lines.push(("head_dim 576 of latent rows of codes".into(), of_codes));
    }
    lines.push(("other head_dim (59)".into(), problem(59)));
    lines
}
