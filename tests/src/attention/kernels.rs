//! The kernels of the table that compute attention, the cases that they are given, and their
//! refusals.

use super::{
    AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, AttentionReference, Choice,
    Lengths, MaskHeads, head_dims, run_and_check,
};
use crate::gpu::{Gpu, wait};
use blockflash_ops::{DType, Error, Stream};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{self, AttentionTile};
use std::collections::BTreeMap;

/// Kernels with their tiles, by element type and the head dimension that all tensors may have. The
/// kernels of a group compute the same problems, so they share cases and references.
pub type KernelGroup = ((DType, usize), Vec<(&'static Kernel, AttentionTile)>);

/// All groups.
pub type KernelGroups = BTreeMap<(DType, usize), Vec<(&'static Kernel, AttentionTile)>>;

/// The attention kernels that a GPU can run. Those with score terms or of codes have cases of their
/// own.
pub fn kernel_groups(gpu: &Gpu) -> KernelGroups {
    let mut groups = KernelGroups::new();
    for (kernel, tile) in
        gpu.kernels().filter_map(|kernel| Some((kernel, kernel.attention_tile()?)))
    {
        if tile.terms || tile.types.q.is_code() {
            continue;
        }
        groups.entry((tile.types.q, tile.head_dims.min())).or_default().push((kernel, tile));
    }
    groups
}

/// Head dimensions for which a tile is the narrowest.
pub fn dims_of_tile(head_dim: usize) -> Vec<usize> {
    let tiles = manifest::kernels().iter().filter_map(Kernel::attention_tile);
    let widths = tiles.map(|tile| tile.head_dims.min());
    let narrower = widths.filter(|&width| width < head_dim).max().unwrap_or(0);
    head_dims(narrower + 1..=head_dim)
}

/// Whether a kernel can compute cases with offsets of sequences.
pub fn takes_packed(kernel: &Kernel) -> bool {
    kernel.attention_tile().is_some_and(|tile| !tile.dense_only)
}

/// Whether a kernel can compute cases with lists of blocks.
pub fn takes_blocks(kernel: &Kernel) -> bool {
    kernel.attention_tile().is_some_and(|tile| tile.block_masks)
}

/// Whether a kernel can compute a case, as far as offsets of sequences and lists of blocks go.
pub fn takes_lists_of(kernel: &Kernel, case: &AttentionCase) -> bool {
    (takes_packed(kernel) || !matches!(case.lengths, Lengths::Packed { .. }))
        && (takes_blocks(kernel) || case.block_mask.is_none())
}

/// Runs a case. A kernel that cannot compute it must refuse it.
pub fn run_or_refuse(
    case: &AttentionCase,
    data: &AttentionData,
    reference: &AttentionReference,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let case = &case.as_asked(kernel);
    let Some(reason) = refusal(case, kernel) else {
        return run_and_check(case, data, reference, Choice::This(kernel), stream);
    };
    let inputs = AttentionInputs::upload(case, data, stream)?;
    match AttentionOutputs::poisoned(case, stream)?.launch(&inputs, Choice::This(kernel), stream) {
        Err(Error::Unsupported { what, .. }) if what.contains(reason) => {}
        other => return Err(format!("not refused because of {reason:?}: {other:?}\n    {case:?}")),
    }
    if case.block_mask.is_none() && case.codes.is_none() {
        // The library selects another kernel.
        run_and_check(case, data, reference, Choice::Selected, stream)?;
    }
    Ok(0)
}

/// The refusal that is due from a kernel of the case's type and width, if it cannot compute the
/// case.
fn refusal(case: &AttentionCase, kernel: &Kernel) -> Option<&'static str> {
    let tile = kernel.attention_tile()?;
    if case.block_mask.is_some() && takes_packed(kernel) && !takes_blocks(kernel) {
        return Some("it takes none");
    }
    let divides = |tile: u32, block: usize| block.is_multiple_of(tile as usize);
    let consists_of_tiles = case.block_mask.is_none_or(|block| {
        divides(tile.block_q, block.block_q) && divides(tile.block_kv, block.block_kv)
    });
    if !consists_of_tiles {
        return Some("do not divide the blocks");
    }
    let shared = |groups: usize| (case.heads_q / groups).is_multiple_of(tile.heads as usize);
    let mask_heads = case.block_mask.map_or(1, |block| match block.heads {
        MaskHeads::One => 1,
        MaskHeads::KeyValue => case.heads_kv,
        MaskHeads::Query => case.heads_q,
    });
    if !shared(case.heads_kv) || !shared(mask_heads) {
        return Some("share a tile");
    }
    if !takes_lists_of(kernel, case) {
        return Some("packed sequences");
    }
    // Tensor maps cannot describe repeated entries.
    let repeated = case.broadcast_kv
        && matches!(case.lengths, Lengths::Dense { batch: 2.., seqlen_kv: 1.., .. });
    (repeated && tile.tensor_maps).then_some("tensor map")
}

/// Runs a case 30 times and requires the same bits every time.
pub fn same_bits(
    case: &AttentionCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let case = &case.as_asked(kernel);
    let inputs = AttentionInputs::upload(case, &AttentionData::generate(case), stream)?;
    let mut outputs = AttentionOutputs::poisoned(case, stream)?;
    let mut first = None;
    for repeat in 0..30 {
        outputs.poison(stream)?;
        outputs.launch(&inputs, Choice::This(kernel), stream).map_err(|error| error.to_string())?;
        wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
        let bits = outputs.bits(stream)?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(30)
}
