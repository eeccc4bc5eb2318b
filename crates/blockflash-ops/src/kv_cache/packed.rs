use super::{CacheSizes, KvCache, PackedTokens};
use crate::attention::{MAX_SEQLEN, check_maximum};
use crate::check::{Operand, to_i32, vector};
use crate::{Error, Result};
use blockflash_sys::DType;

/// The sizes of a cache whose only page holds the keys of all sequences.
pub(crate) fn packed_keys(
    cache: &KvCache<'_>,
    sizes: CacheSizes,
    packed: &PackedTokens<'_>,
) -> Result<CacheSizes> {
    for (what, view) in
        [("cache.block_table", &cache.block_table), ("cache.seqused_kv", &cache.seqused_kv)]
    {
        if let Some(view) = view {
            return Err(Operand::new(what, view).wrong_shape("none beside packed_kv"));
        }
    }
    let k = Operand::new("cache.k", &cache.k);
    if sizes.pages != 1 {
        let expected = "[1, total_kv, num_heads_kv, head_dim], as packed_kv is given";
        return Err(k.wrong_shape(expected));
    }
    let (what, total) = ("packed_kv.cu_seqlens", sizes.page_size);
    let offsets = Operand::new(what, &packed.cu_seqlens);
    let &[count @ 1..=usize::MAX] = offsets.shape else {
        return Err(offsets.wrong_shape("[batch + 1]"));
    };
    vector(what, &packed.cu_seqlens, DType::I32, &[count])?;
    // Offsets into the packed rows are 32-bit.
    to_i32("total_kv", total)?;
    let (batch, longest) = (count - 1, packed.max_seqlen);
    check_maximum("packed_kv.max_seqlen", [batch, longest], total)?;
    if longest > MAX_SEQLEN {
        let (what, limit) = ("packed_kv.max_seqlen", MAX_SEQLEN);
        return Err(Error::TooLarge { what, value: longest, limit });
    }
    to_i32("batch", batch)?;
    Ok(CacheSizes { batch, capacity: longest.min(total), ..sizes })
}
