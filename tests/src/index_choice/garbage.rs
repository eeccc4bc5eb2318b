//! Random garbage in everything that decides about addresses: tables, lengths, offsets, scores.

use super::{IndexKernels, text};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{poison, rng};
use blockflash_ops::{
    AttentionDecodeWorkspace, BlockReduction, DType, Error, IndexScores, KvCache, Mask, Operation,
    PackedTokens, Stream, Tensor, TopK,
};
use rand::Rng;

/// Rows of the outputs before and after the ones that a call is given.
const MARGIN: usize = 3;

/// Both steps with garbage that follows from `seed`: the launches end, what they write is inside,
/// and lists hold columns or −1. Keys, queries, weights and scores have any bits. Offsets are
/// garbage on a GPU only, since the CPU refuses them. There are at most `most_blocks`, from 128 on.
/// Returns the number of compared outputs.
pub fn index_choice_survives_garbage(
    seed: u64,
    dtype: DType,
    kernels: IndexKernels,
    most_blocks: usize,
    stream: &Stream,
) -> Result<usize, String> {
    let mut random = rng(seed ^ 0x6A2D);
    let on_gpu = !stream.device().is_cpu();
    let head_dim = 8 * random.random_range(1..=16);
    let (batch, tokens) = (random.random_range(1..5), random.random_range(0..70));
    let (heads_kv, groups, heads) = (1, [1, 2][random.random_range(0..2)], 4);
    let granularity = [1, 4, 16, 64, 128][random.random_range(0..5)];
    let (page_size, pages) = (16 * random.random_range(1..5), random.random_range(1..9));
    let max_pages = random.random_range(1..60).min(most_blocks / page_size);
    let (packed, packed_kv) = (on_gpu && random.random(), on_gpu && random.random());
    let causal = random.random();
    let k = random.random_range(1..40);
    let first = random.random_range(0..=k);
    let last = random.random_range(0..=k - first);

    let mut ints = |shape: &[usize], near: usize| {
        let mut garbage = || match random.random_range(0..6) {
            0 => i32::MIN,
            1 => i32::MAX,
            2 => random.random(),
            3 => -1,
            _ => random.random_range(-2..near as i32 + 3),
        };
        let values: Vec<i32> = (0..shape.iter().product()).map(|_| garbage()).collect();
        Tensor::from_slice(stream, &values, shape).map_err(text)
    };
    let rows = batch * tokens;
    let table = ints(&[batch, max_pages], pages)?;
    let lengths = ints(&[batch], max_pages * page_size)?;
    let offsets_q = ints(&[batch + 1], rows)?;
    let offsets_kv = ints(&[batch + 1], pages * page_size)?;
    let mut bits = |dtype: DType, shape: &[usize]| {
        let any: Vec<u32> = (0..shape.iter().product()).map(|_| random.random()).collect();
        upload(stream, dtype, &any, shape)
    };
    let q = bits(dtype, &[rows, heads, head_dim])?;
    let keys = bits(dtype, &[pages, page_size, heads_kv, head_dim])?;
    let weights = bits(DType::F32, &[rows, heads])?;
    // Packed keys are one page.
    let all = pages * page_size;
    let capacity = if packed_kv { all } else { max_pages * page_size };
    let blocks = capacity.div_ceil(granularity);
    let any = bits(DType::F32, &[groups, rows, blocks])?;

    let shape = [groups + 2 * MARGIN, rows, blocks];
    let mut scores = poisoned(stream, DType::F32, &shape)?;
    let mut lists = poisoned(stream, DType::I32, &[groups + 2 * MARGIN, rows, k])?;
    let mut run = || -> Result<(), Error> {
        let stored = match packed_kv {
            true => keys.view().flatten(0..2)?.insert(0)?,
            false => keys.view(),
        };
        let cache = KvCache {
            block_table: (!packed_kv).then(|| table.view()),
            seqused_kv: (!packed_kv).then(|| lengths.view()),
            ..KvCache::new(stored, stored)
        };
        let q = match packed {
            true => q.view(),
            false => q.view().unflatten(0, tokens)?,
        };
        let call = IndexScores {
            packed: packed
                .then(|| PackedTokens { cu_seqlens: offsets_q.view(), max_seqlen: tokens }),
            packed_kv: packed_kv
                .then(|| PackedTokens { cu_seqlens: offsets_kv.view(), max_seqlen: all }),
            weights: Some(weights.view()),
            mask: if causal { Mask::causal() } else { Mask::Full },
            reduction: if causal { BlockReduction::Max } else { BlockReduction::Mean },
            relu: seed.is_multiple_of(2),
            ..IndexScores::new(q, cache, granularity)
        };
        let inner = MARGIN..MARGIN + groups;
        let out = scores.view_mut().slice(0, inner.clone())?;
        match kernels.scores {
            Choice::Selected => call.run(out, stream)?,
            Choice::This(kernel) => call.run_with(kernel, out, stream)?,
        }
        let choice = TopK { first, last, ..call.top_k(any.view())? };
        let bytes = choice.workspace_bytes(k, stream.device())?;
        let workspace = AttentionDecodeWorkspace::new(stream, bytes)?;
        let choice = TopK { workspace: Some(&workspace), ..choice };
        let out = lists.view_mut().slice(0, inner)?;
        match kernels.top_k {
            Choice::Selected => choice.run(out, stream),
            Choice::This(kernel) => choice.run_with(kernel, out, stream),
        }
    };
    if rows == 0 {
        return Ok(1);
    }
    match run() {
        // A tile may be too narrow for the heads.
        Err(Error::Unsupported { .. }) if matches!(kernels.scores, Choice::This(_)) => {
            return Ok(0);
        }
        launched => launched.map_err(|error| format!("garbage {seed}: {error}"))?,
    }
    wait(stream, &|| format!("garbage {seed}"))?;

    for (name, tensor, written) in [("scores", &scores, blocks), ("lists", &lists, k)] {
        let bits = download(stream, tensor)?;
        let margin = MARGIN * rows * written;
        let inside = margin..bits.len() - margin;
        // Only a score may be any number; no computed NaN has the bits of poison.
        for (at, &found) in bits.iter().enumerate() {
            if (found == poison(tensor.dtype())) == inside.contains(&at) && name == "scores"
                || name == "lists" && !inside.contains(&at) && found != poison(DType::I32)
            {
                return Err(format!("garbage {seed}: element {at} of the {name} is {found:#x}"));
            }
        }
        let columns = -1..blocks as i32;
        if name == "lists"
            && let Some(entry) =
                bits[inside].iter().find(|&&bits| !columns.contains(&(bits as i32)))
        {
            return Err(format!("garbage {seed}: block {entry} of {blocks}"));
        }
    }
    Ok(2)
}
