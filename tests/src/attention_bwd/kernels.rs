//! The kernels of the table that compute gradients of attention, the cases that they are given, and
//! their refusals.

use super::{
    BackwardData, BackwardInputs, BackwardOutputs, BackwardReference, finite, run_and_check,
};
use crate::attention::{
    AttentionCase, Choice, Lengths, Limits, attention_cases, block_sparse_cases, block_tile_cases,
    edge_cases, head_dims, many_heads, special_cases,
};
use crate::gpu::{Gpu, wait};
use crate::property;
use blockflash_ops::attention::Mask;
use blockflash_ops::{DType, Error, Stream};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{self, AttentionBwdStep as Step, AttentionBwdTile, Variant};
use std::collections::BTreeMap;

/// Kernels with their tiles, by element type and the head dimension that all tensors may have. The
/// kernels of a group compute the same problems, so they share cases and references.
pub type BackwardGroup = ((DType, usize), Vec<(&'static Kernel, AttentionBwdTile)>);

/// All groups.
pub type BackwardGroups = BTreeMap<(DType, usize), Vec<(&'static Kernel, AttentionBwdTile)>>;

/// The kernels of the attention backward that a GPU can run: those with score terms, which have
/// cases of their own, or those without.
pub fn backward_groups(gpu: &Gpu, terms: bool) -> BackwardGroups {
    let mut groups = BackwardGroups::new();
    for (kernel, tile) in
        gpu.kernels().filter_map(|kernel| Some((kernel, kernel.attention_bwd_tile()?)))
    {
        if tile.terms != terms {
            continue;
        }
        groups.entry((tile.types.q, tile.head_dims.min())).or_default().push((kernel, tile));
    }
    groups
}

/// Head dimensions for which a tile is the narrowest.
pub(crate) fn dims_of_tile(head_dim: usize) -> Vec<usize> {
    let widths = manifest::kernels()
        .iter()
        .filter_map(Kernel::attention_bwd_tile)
        .map(|tile| tile.head_dims.min());
    let narrower = widths.filter(|&width| width < head_dim).max().unwrap_or(0);
    head_dims(narrower + 1..=head_dim)
}

/// Edges of tiles, every option, layouts, packed sequences and block masks.
pub fn cases_of(dtype: DType, head_dim: usize) -> Vec<AttentionCase> {
    let dims = dims_of_tile(head_dim);
    let (narrow, wide) = (dims[0], dims[dims.len() - 1]);
    let mut cases = edge_cases(dtype, &dims, 64, 64);
    // Beside sums of dq, narrow tiles have 128 queries.
    if head_dim == 64 {
        cases.extend(edge_cases(dtype, &dims, 128, 128));
    }
    cases.extend(special_cases(dtype, wide, 64));
    // Backward cases are finite, so those with a planted NaN are repetitions.
    cases.retain(|case| {
        finite(case.clone()).content == case.content
            || matches!(case.lengths, Lengths::Packed { .. })
    });
    cases.extend(many_heads(dtype, narrow));
    // Some heads ascend and some descend where dq is summed.
    let equal_heads = AttentionCase::simple(dtype, (4, 4), narrow, (700, 900));
    cases.push(AttentionCase { scores: Mask::causal().into(), ..equal_heads });
    for block in [64, 128] {
        cases.extend(block_tile_cases(dtype, wide, block, block));
    }
    let limits = || Limits {
        dtypes: vec![dtype],
        head_dims: dims.clone(),
        seqlen: 400,
        alignment: 8,
        work: 10_000_000,
    };
    cases.extend(property::samples(30, attention_cases(limits())));
    cases.extend(property::samples(10, block_sparse_cases(limits())));
    cases.into_iter().map(finite).collect()
}

/// Runs a case. A kernel that cannot compute it must refuse it.
pub fn run_or_refuse(
    case: &AttentionCase,
    data: &BackwardData,
    reference: &BackwardReference,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let Some(reason) = refusal(case, kernel) else {
        return run_and_check(case, data, reference, Choice::This(kernel), stream);
    };
    let inputs = BackwardInputs::upload(case, data, stream)?;
    let mut outputs = BackwardOutputs::of_any_kernel(&inputs, stream)?;
    match outputs.launch(&inputs, Choice::This(kernel), stream) {
        Err(Error::Unsupported { what, .. }) if what.contains(reason) => Ok(0),
        other => Err(format!("not refused because of {reason:?}: {other:?}\n    {case:?}")),
    }
}

/// The refusal that is due from a kernel of the case's type and width, if it cannot compute the
/// case.
fn refusal(case: &AttentionCase, kernel: &Kernel) -> Option<&'static str> {
    let tile = kernel.attention_bwd_tile()?;
    let hopper = matches!(kernel.variant, Variant::AttentionBwdHopper(_));
    let packed = matches!(case.lengths, Lengths::Packed { .. });
    match tile.step {
        Step::Zeros if !packed => return Some("every row belongs to a sequence"),
        Step::Sinks if case.scores.sink.is_none() => return Some("no gradient of a sink"),
        _ => {}
    }
    if let Some(block) = case.block_mask {
        let divides = |tile: u32, block: usize| tile == 0 || block.is_multiple_of(tile as usize);
        let whole = divides(tile.block_q, block.block_q) && divides(tile.block_kv, block.block_kv);
        // Another step has no kernel with narrower tiles.
        let some = [block.block_q, block.block_kv].iter().all(|block| block.is_multiple_of(64));
        if tile.step.visits() && !whole || !some {
            return Some("divide");
        }
    }
    // Tensor maps cannot describe repeated entries.
    let repeated = case.broadcast_kv
        && matches!(case.lengths, Lengths::Dense { batch: 2.., seqlen_kv: 1.., .. });
    if hopper && repeated && tile.step.visits() {
        return Some("tensor map");
    }
    let sums = matches!(tile.step, Step::KeysAndSums | Step::Sums);
    if sums && case.block_mask.is_some() {
        return Some("under a block mask");
    }
    (case.scores.softcap.is_some() && !tile.takes_softcap()).then_some("take no softcap")
}

/// Runs a case 20 times and requires the same bits every time.
pub fn same_gradients(
    case: &AttentionCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    repeated_gradients(case, Choice::This(kernel), 20, stream)
}

/// Runs a case this many times and requires the same bits every time, whatever gradients and
/// workspace held before.
pub fn repeated_gradients(
    case: &AttentionCase,
    kernel: Choice,
    repeats: usize,
    stream: &Stream,
) -> Result<usize, String> {
    let inputs = BackwardInputs::upload(case, &BackwardData::generate(case), stream)?;
    let mut outputs = match kernel {
        Choice::Selected => BackwardOutputs::poisoned(&inputs, stream)?,
        Choice::This(_) => BackwardOutputs::of_any_kernel(&inputs, stream)?,
    };
    let mut first = None;
    for repeat in 0..repeats {
        outputs.poison(stream)?;
        outputs.launch(&inputs, kernel, stream).map_err(|error| error.to_string())?;
        wait(stream, &|| format!("repeat {repeat} of {case:?}"))?;
        let bits = outputs.bits(stream)?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(repeats)
}
