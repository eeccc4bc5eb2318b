//! What a launch of attention over a cache knows beside its tensors, and the splits that follow.

use blockflash_sys::params::{blockflash_attention_decode_params, blockflash_scores};

/// The most splits that a sequence with up to `keys` keys may have, as the kernel divides it: the
/// number of splits of a sequence of medium length, and the limits of a split.
pub(super) fn most_splits(keys: i64, [splits, shortest, longest]: [i64; 3]) -> i64 {
    let up = |a: i64, b: i64| (a + b - 1) / b;
    // A window may begin anywhere in a step of 16 keys.
    let keys = up(keys, 16) * 16;
    let most = if keys <= longest * splits {
        splits.min(up(keys, shortest))
    } else {
        splits.max(up(keys, longest).min(256))
    };
    most.max(1)
}

/// What a launch of attention over a cache knows beside its tensors.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDecodeScalars {
    /// What happens to a score. Its pointer is ignored.
    pub scores: blockflash_scores,
    /// Queries of the longest sequence in a packed batch; ignored otherwise.
    pub longest: i32,
    /// Sequences with more queries are left to another kernel.
    pub most_queries: i32,
    /// Splits of a sequence of medium length.
    pub splits: i32,
    /// Fewest keys of a split.
    pub chunk_min: i32,
    /// Most keys of a split, unless there are 256 splits.
    pub chunk_max: i32,
    /// Log2 of the splits that an item of the kernel for one query has.
    pub run_log2: i32,
    /// Splits of an item of the kernel for several queries.
    pub run: i32,
    /// CTAs among which a kernel that counts lengths divides all keys; 0 if it does not.
    pub even_ctas: i32,
    /// Items that there is room for if it does; ignored otherwise.
    pub even_items: i32,
}

/// A CTA for each split of a group.
pub(super) fn fewest_in_cluster(p: &blockflash_attention_decode_params) -> u32 {
    let keys = p.cache.capacity.max(p.page_list_capacity.saturating_mul(p.cache.page_size));
    let division = [p.splits, p.chunk_min, p.chunk_max].map(i64::from);
    most_splits(keys.into(), division).min(16) as u32
}
