//! The kernels of the table that compute attention to caches, and what each of them must do.

use super::run::largest_workspace;
use super::{DecodeCase, DecodeData, DecodeInputs, DecodeOutputs};
use crate::attention::{AttentionReference, Choice};
use crate::gpu::{Gpu, wait};
use crate::host::{download, upload};
use blockflash_ops::attention_decode::{CacheTile, accepts, tile};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, CacheAccess, DType, Error, KvCache, Operation,
    Stream, Tensor, kv_append,
};
use blockflash_sys::Kernel;
use std::collections::BTreeMap;

/// Kernels with their tiles, by element type and head dimension.
pub type DecodeGroup = ((DType, usize), Vec<(&'static Kernel, CacheTile)>);

/// The kernels that a GPU can run, but for those that take nothing without score terms, and those
/// that take codes or latent rows alone.
pub fn decode_groups(gpu: &Gpu) -> Vec<DecodeGroup> {
    groups(gpu, |tile| match tile {
        CacheTile::Few(tile) => !tile.terms,
        CacheTile::Several(_) | CacheTile::Many(_) => true,
        CacheTile::Latent(_) => false,
    })
}

/// Those that take a bias, ALiBi or a mask of the last keys.
pub fn decode_groups_with_terms(gpu: &Gpu) -> Vec<DecodeGroup> {
    groups(gpu, |tile| match tile {
        CacheTile::Few(tile) => tile.terms,
        CacheTile::Several(_) => true,
        CacheTile::Many(_) | CacheTile::Latent(_) => false,
    })
}

fn groups(gpu: &Gpu, takes: impl Fn(&CacheTile) -> bool) -> Vec<DecodeGroup> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let kernels = gpu.kernels().filter_map(|kernel| Some((kernel, tile(kernel)?)));
    let takes = |tile: &CacheTile| !tile.types().kv.is_code() && takes(tile);
    for (kernel, tile) in kernels.filter(|(_, tile)| takes(tile)) {
        groups.entry((tile.types().q, tile.head_dims().qk)).or_default().push((kernel, tile));
    }
    groups.into_iter().collect()
}

/// Runs a case whose data and reference are given. A kernel that does not accept it must refuse it.
pub fn run_or_refuse(
    case: &DecodeCase,
    data: &DecodeData,
    reference: &AttentionReference,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let mut inputs = DecodeInputs::upload(case, data, stream)?;
    let gpu = stream.device().cuda_properties().ok_or("kernels run on GPUs")?;
    let problem = inputs.decode().problem(&inputs.cache()).map_err(|error| error.to_string())?;
    let accepted = accepts(kernel, &problem, gpu).is_ok();
    let mut outputs = DecodeOutputs::poisoned(case, stream)?;
    match inputs.launch(&mut outputs, Choice::This(kernel), stream) {
        Ok(()) if accepted => {}
        Err(Error::Unsupported { .. }) if !accepted => return Ok(0),
        other => return Err(format!("accepted: {accepted}, but {other:?}\n    {case:?}")),
    }
    let check = || {
        wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
        inputs.check_cache(data, stream)?;
        outputs.0.check(&case.attention, reference, stream)
    };
    check().map_err(|error: String| format!("{error}\n    {case:?}"))
}

/// Runs the append of a case without attention. A kernel that does not accept it must refuse it.
pub fn append_or_refuse(
    case: &DecodeCase,
    data: &DecodeData,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let mut inputs = DecodeInputs::upload(case, data, stream)?;
    let gpu = stream.device().cuda_properties().ok_or("kernels run on GPUs")?;
    let accepted = inputs.append_alone(|new, cache| {
        let accepted = kv_append::accepts(kernel, &new.problem(&cache.as_cache()?)?, gpu).is_ok();
        match new.run_with(kernel, cache, stream) {
            Err(Error::Unsupported { .. }) if !accepted => Ok(false),
            result => result.map(|()| true),
        }
    });
    if accepted.map_err(|error| format!("{error}\n    {case:?}"))? {
        wait(stream, &|| format!("{} with {case:?}", kernel.image_name()))?;
        inputs.check_cache(data, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(2)
}

/// Runs a case 30 times and requires the same bits every time.
pub fn same_bits(case: &DecodeCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let mut inputs = DecodeInputs::upload(case, &DecodeData::generate(case), stream)?;
    let mut outputs = DecodeOutputs::poisoned(case, stream)?;
    let mut first = None;
    for repeat in 0..30 {
        outputs.0.poison(stream)?;
        inputs.launch(&mut outputs, kernel, stream).map_err(|error| error.to_string())?;
        wait(stream, &|| format!("repeat of {case:?}"))?;
        let bits = outputs.0.bits(stream)?;
        if *first.get_or_insert_with(|| bits.clone()) != bits {
            return Err(format!("repeat {repeat} differs from the first run\n    {case:?}"));
        }
    }
    Ok(30)
}

/// Computes every sequence of a paged case with equally many queries alone, and requires the bits
/// that it has in a batch of this many times all of them, whose items are longer.
pub fn alone_as_in_a_batch(
    case: &DecodeCase,
    times: usize,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let inputs = DecodeInputs::upload(case, &DecodeData::generate(case), stream)?;
    let decode = AttentionDecode { batch_invariant: true, ..inputs.decode() };
    let cache = inputs.cache();
    let run = |decode: AttentionDecode<'_>, cache: KvCache<'_>| -> Result<Vec<u32>, Error> {
        let mut o = Tensor::empty(stream, case.attention.dtype, decode.q.shape())?;
        let workspace = match stream.device().is_cpu() {
            true => None,
            false => Some(largest_workspace(&decode, &cache, stream)?),
        };
        let decode = AttentionDecode { workspace: workspace.as_ref(), ..decode };
        let o_view = o.view_mut();
        let operands =
            AttentionDecodeOperands { cache: CacheAccess::Read(cache), o: o_view, lse: None };
        match kernel {
            Choice::Selected => decode.forward_into(operands, stream)?,
            Choice::This(kernel) => decode.run_with(kernel, operands, stream)?,
        }
        Ok(download(stream, &o).expect("a tensor of the stream's device"))
    };
    let repeated = |tensor: &Tensor| {
        let mut shape = tensor.shape().to_vec();
        shape[0] *= times;
        upload(stream, tensor.dtype(), &download(stream, tensor)?.repeat(times), &shape)
    };
    let q = repeated(&inputs.q)?;
    let table = inputs.table.as_ref().map(repeated).transpose()?;
    let lengths = inputs.seqused.as_ref().map(repeated).transpose()?;
    let many = KvCache {
        block_table: table.as_ref().map(Tensor::view),
        seqused_kv: lengths.as_ref().map(Tensor::view),
        ..cache
    };
    let whole = run(AttentionDecode { q: q.view(), ..decode }, many);
    let whole = whole.map_err(|error| error.to_string())?;
    let batch = case.attention.sequences().len();
    let of_one = whole.len() / (batch * times).max(1);
    for b in 0..batch {
        let alone = || {
            let one = b..b + 1;
            let cache = KvCache {
                block_table: cache.block_table.map(|t| t.slice(0, one.clone())).transpose()?,
                seqused_kv: cache.seqused_kv.map(|t| t.slice(0, one.clone())).transpose()?,
                ..cache
            };
            run(AttentionDecode { q: decode.q.slice(0, one.clone())?, ..decode }, cache)
        };
        let alone = alone().map_err(|error| error.to_string())?;
        for b in (b..batch * times).step_by(batch) {
            if alone != whole[b * of_one..][..of_one] {
                return Err(format!("sequence {b} differs from itself alone\n    {case:?}"));
            }
        }
    }
    Ok(batch * times)
}
