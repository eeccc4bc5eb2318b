use super::family::Family;
use super::{
    attention_bwd_sm80, attention_bwd_sm90a, attention_cache_sm90a, attention_combine_sm90a,
    attention_decode_sm80, attention_decode_sm90a, attention_fwd_e4m3_sm90a, attention_fwd_sm80,
    attention_fwd_sm90a, attention_fwd_small_sm90a, attention_fwd_wide_sm90a, attention_index_bwd,
    attention_index_sm80, attention_index_sm90a, attention_latent_index_few_sm90a,
    attention_latent_index_sm80, attention_latent_index_sm90a, attention_latent_sm80,
    attention_latent_sm90a, attention_merge_sm80, block_mask, bsr_matmul_any_sm80,
    bsr_matmul_narrow_sm80, bsr_matmul_sm80, bsr_matmul_sm90a, bsr_sddmm_sm80, bsr_sddmm_sm90a,
    index_choice, index_union_sm80, kv_append_codes_sm80, kv_append_sm80, page_choice, probe,
    quantize_sm80, row_copy_sm80,
};
use crate::Target;

/// The kernel family of a kernel with its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Variant {
    /// Attention forward, dense or under a block mask, with the instructions of Ampere and later.
    AttentionFwd(attention_fwd_sm80::AttentionFwd),
    /// Attention forward, dense or under a block mask, with the instructions of Hopper.
    AttentionFwdHopper(attention_fwd_sm90a::AttentionFwdHopper),
    /// The same for grids that do not fill the GPU.
    AttentionFwdSmall(attention_fwd_small_sm90a::AttentionFwdSmall),
    /// The same for head dimensions beyond 256.
    AttentionFwdWide(attention_fwd_wide_sm90a::AttentionFwdWide),
    /// Attention forward of codes of 8 bits, dense or under a block mask, with the instructions of
    /// Hopper.
    AttentionFwdE4m3(attention_fwd_e4m3_sm90a::AttentionFwdE4m3),
    /// A step of the attention backward, with the instructions of Ampere and later.
    AttentionBwd(attention_bwd_sm80::AttentionBwd),
    /// A step of the attention backward, with the instructions of Hopper.
    AttentionBwdHopper(attention_bwd_sm90a::AttentionBwdHopper),
    /// Attention of many queries to the keys of a cache, with the instructions of Hopper.
    AttentionCacheHopper(attention_cache_sm90a::AttentionCacheHopper),
    /// Attention over a cache from its splits, with the instructions of Hopper.
    AttentionCombine(attention_combine_sm90a::AttentionCombine),
    /// Attention of few queries to the keys of a cache, with the instructions of Ampere and later.
    AttentionDecode(attention_decode_sm80::AttentionDecode),
    /// Attention of several queries to the keys of a cache, with the instructions of Hopper.
    AttentionDecodeHopper(attention_decode_sm90a::AttentionDecodeHopper),
    /// Attention to the keys that lists name, by neighbouring queries together, with the
    /// instructions of Hopper.
    AttentionIndexHopper(attention_index_sm90a::AttentionIndexHopper),
    /// A step of the gradients of attention by lists.
    AttentionIndexBwd(attention_index_bwd::AttentionIndexBwd),
    /// Attention to the keys that lists name, with the instructions of Ampere and later.
    AttentionIndex(attention_index_sm80::AttentionIndex),
    /// Attention to a cache whose values are the first columns of its keys, with the instructions
    /// of Ampere and later.
    AttentionLatent(attention_latent_sm80::AttentionLatent),
    /// The same with the instructions of Hopper.
    AttentionLatentHopper(attention_latent_sm90a::AttentionLatentHopper),
    /// Attention to the rows that lists name, in a cache whose values are the first columns of its
    /// keys, with the instructions of Ampere and later.
    AttentionLatentIndex(attention_latent_index_sm80::AttentionLatentIndex),
    /// The same with the instructions of Hopper.
    AttentionLatentIndexHopper(attention_latent_index_sm90a::AttentionLatentIndexHopper),
    /// The same for few heads, with the instructions of Hopper.
    AttentionLatentIndexFew(attention_latent_index_few_sm90a::AttentionLatentIndexFew),
    /// Attention over all keys from attention over parts of them.
    AttentionMerge(attention_merge_sm80::AttentionMerge),
    /// The union of the lists of neighbouring queries.
    IndexUnion(index_union_sm80::IndexUnion),
    /// Appending to a cache, and rotary embeddings.
    KvAppend(kv_append_sm80::KvAppend),
    /// The same into a cache of 8-bit codes.
    KvAppendCodes(kv_append_codes_sm80::KvAppendCodes),
    /// BSR matrix times dense matrix, with the instructions of Ampere and later.
    BsrMatmul(bsr_matmul_sm80::BsrMatmul),
    /// The same with A as stored or transposed, and with row-major or column-major B and C: the
    /// launch decides.
    BsrMatmulAny(bsr_matmul_any_sm80::BsrMatmulAny),
    /// The same with few columns, on Hopper.
    BsrMatmulNarrow(bsr_matmul_narrow_sm80::BsrMatmulNarrow),
    /// BSR matrix times dense matrix, with the instructions of Hopper.
    BsrMatmulHopper(bsr_matmul_sm90a::BsrMatmulHopper),
    /// Product of dense matrices at the stored blocks of a BSR matrix, with the instructions of
    /// Ampere and later.
    BsrSddmm(bsr_sddmm_sm80::BsrSddmm),
    /// The same with the instructions of Hopper.
    BsrSddmmHopper(bsr_sddmm_sm90a::BsrSddmmHopper),
    /// Block masks made on the GPU.
    BlockMask(block_mask::BlockMaskKernel),
    /// Scores of blocks of keys, and the choice of the largest.
    Index(index_choice::IndexKernel),
    /// The choice of the pages of a cache that attention visits.
    PageChoice(page_choice::PageKernel),
    /// Rows of attention as codes of 8 bits.
    Quantize(quantize_sm80::Quantize),
    /// Rows of a few tensors, copied by few CTAs.
    RowCopy(row_copy_sm80::RowCopy),
    /// No operation: it runs one unit of the GPU at its highest rate, against which kernels are
    /// compared.
    Probe(probe::Probe),
}

impl Variant {
    /// The parameters as a kernel family.
    pub const fn family(&self) -> &dyn Family {
        match self {
            Variant::AttentionFwd(tile) => tile,
            Variant::AttentionFwdHopper(tile) => tile,
            Variant::AttentionFwdSmall(tile) => tile,
            Variant::AttentionFwdWide(tile) => tile,
            Variant::AttentionFwdE4m3(tile) => tile,
            Variant::AttentionBwd(tile) => tile,
            Variant::AttentionBwdHopper(tile) => tile,
            Variant::AttentionCacheHopper(tile) => tile,
            Variant::AttentionCombine(kernel) => kernel,
            Variant::AttentionDecode(tile) => tile,
            Variant::AttentionDecodeHopper(tile) => tile,
            Variant::AttentionIndexHopper(tile) => tile,
            Variant::AttentionIndexBwd(kernel) => kernel,
            Variant::AttentionIndex(tile) => tile,
            Variant::AttentionLatent(tile) => tile,
            Variant::AttentionLatentHopper(tile) => tile,
            Variant::AttentionLatentIndex(tile) => tile,
            Variant::AttentionLatentIndexHopper(tile) => tile,
            Variant::AttentionLatentIndexFew(tile) => tile,
            Variant::AttentionMerge(kernel) => kernel,
            Variant::IndexUnion(kernel) => kernel,
            Variant::KvAppend(kernel) => kernel,
            Variant::KvAppendCodes(kernel) => kernel,
            Variant::BsrMatmul(tile) => tile,
            Variant::BsrMatmulAny(tile) => tile,
            Variant::BsrMatmulNarrow(tile) => tile,
            Variant::BsrMatmulHopper(tile) => tile,
            Variant::BsrSddmm(tile) => tile,
            Variant::BsrSddmmHopper(tile) => tile,
            Variant::BlockMask(kernel) => kernel,
            Variant::Index(kernel) => kernel,
            Variant::PageChoice(kernel) => kernel,
            Variant::Quantize(kernel) => kernel,
            Variant::RowCopy(kernel) => kernel,
            Variant::Probe(probe) => probe,
        }
    }

    /// Every variant that is compiled for a target, the preferred ones first.
    pub(super) fn all(target: Target) -> Vec<Variant> {
        let mut variants = Vec::new();
        variants.extend(attention_fwd_sm90a::tiles(target).map(Variant::AttentionFwdHopper));
        variants.extend(attention_fwd_small_sm90a::tiles(target).map(Variant::AttentionFwdSmall));
        variants.extend(attention_fwd_wide_sm90a::tiles(target).map(Variant::AttentionFwdWide));
        variants.extend(attention_fwd_sm80::tiles(target).map(Variant::AttentionFwd));
        variants.extend(attention_fwd_e4m3_sm90a::tiles(target).map(Variant::AttentionFwdE4m3));
        variants.extend(attention_bwd_sm90a::tiles(target).map(Variant::AttentionBwdHopper));
        variants.extend(attention_bwd_sm80::tiles(target).map(Variant::AttentionBwd));
        variants.extend(attention_cache_sm90a::tiles(target).map(Variant::AttentionCacheHopper));
        variants.extend(attention_combine_sm90a::tiles(target).map(Variant::AttentionCombine));
        variants.extend(attention_decode_sm80::tiles(target).map(Variant::AttentionDecode));
        variants.extend(attention_decode_sm90a::tiles(target).map(Variant::AttentionDecodeHopper));
        variants.extend(attention_index_sm90a::tiles(target).map(Variant::AttentionIndexHopper));
        variants.extend(attention_index_bwd::tiles(target).map(Variant::AttentionIndexBwd));
        variants.extend(attention_index_sm80::tiles(target).map(Variant::AttentionIndex));
        variants.extend(attention_latent_sm80::tiles(target).map(Variant::AttentionLatent));
        variants.extend(attention_latent_sm90a::tiles(target).map(Variant::AttentionLatentHopper));
        variants.extend(
            attention_latent_index_sm90a::tiles(target).map(Variant::AttentionLatentIndexHopper),
        );
        variants.extend(
            attention_latent_index_few_sm90a::tiles(target).map(Variant::AttentionLatentIndexFew),
        );
        variants
            .extend(attention_latent_index_sm80::tiles(target).map(Variant::AttentionLatentIndex));
        variants.extend(attention_merge_sm80::tiles(target).map(Variant::AttentionMerge));
        variants.extend(index_union_sm80::tiles(target).map(Variant::IndexUnion));
        variants.extend(kv_append_sm80::tiles(target).map(Variant::KvAppend));
        variants.extend(kv_append_codes_sm80::tiles(target).map(Variant::KvAppendCodes));
        variants.extend(bsr_matmul_sm90a::tiles(target).map(Variant::BsrMatmulHopper));
        variants.extend(bsr_sddmm_sm90a::tiles(target).map(Variant::BsrSddmmHopper));
        variants.extend(bsr_sddmm_sm80::tiles(target).map(Variant::BsrSddmm));
        variants.extend(bsr_matmul_sm80::tiles(target).map(Variant::BsrMatmul));
        variants.extend(bsr_matmul_narrow_sm80::tiles(target).map(Variant::BsrMatmulNarrow));
        variants.extend(bsr_matmul_any_sm80::tiles(target).map(Variant::BsrMatmulAny));
        variants.extend(block_mask::tiles(target).map(Variant::BlockMask));
        variants.extend(index_choice::tiles(target).map(Variant::Index));
        variants.extend(page_choice::tiles(target).map(Variant::PageChoice));
        variants.extend(quantize_sm80::tiles(target).map(Variant::Quantize));
        variants.extend(row_copy_sm80::tiles(target).map(Variant::RowCopy));
        variants.extend(probe::tiles(target).map(Variant::Probe));
        variants
    }
}
