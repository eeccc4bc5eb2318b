//! Random garbage in everything that decides about addresses: tables, lengths, offsets.

use super::PageKernels;
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{poison, rng};
use blockflash_ops::{
    AttentionDecodeWorkspace, ChoosePages, DType, Error, KvCache, Operation, PackedTokens, Stream,
    SummarizePages, Tensor,
};
use rand::Rng;

/// Pages, and sequences of the outputs, before and after the ones that a call is given.
const MARGIN: usize = 3;

/// Both steps with garbage that follows from `seed`: the launches end, and what they write is
/// inside. Keys, queries and summaries have any bits. Offsets of packed queries are garbage on a
/// GPU only, since the CPU refuses them. Returns the number of compared outputs.
pub fn pages_survive_garbage(
    seed: u64,
    dtype: DType,
    kernels: PageKernels,
    stream: &Stream,
) -> Result<usize, String> {
    let mut random = rng(seed ^ 0x6A2C);
    let head_dim = 8 * random.random_range(1..=32);
    let (batch, tokens, heads) = (random.random_range(1..5), random.random_range(0..5), 2);
    let group = [1, 3][random.random_range(0..2)];
    let (page_size, statistics) = (16, random.random_range(1..=2));
    let (max_pages, pages) = (random.random_range(1..200), random.random_range(1..9));
    let capacity = random.random_range(2..max_pages + 3);
    let packed = seed.is_multiple_of(3) && !stream.device().is_cpu();

    let mut ints = |shape: &[usize], near: usize| {
        let mut garbage = || match random.random_range(0..6) {
            0 => i32::MIN,
            1 => i32::MAX,
            2 => random.random(),
            3 => -1,
            _ => random.random_range(-2..near as i32 + 3),
        };
        let values: Vec<i32> = (0..shape.iter().product()).map(|_| garbage()).collect();
        Tensor::from_slice(stream, &values, shape).map_err(|error| error.to_string())
    };
    let table = ints(&[batch, max_pages], pages)?;
    let lengths = ints(&[batch], max_pages * page_size)?;
    let offsets = match packed {
        true => ints(&[batch + 1], batch * tokens)?,
        false => {
            let offsets: Vec<i32> = (0..=batch).map(|b| (b * tokens) as i32).collect();
            Tensor::from_slice(stream, &offsets, &[batch + 1]).map_err(|error| error.to_string())?
        }
    };
    let mut bits = |shape: &[usize]| {
        let any: Vec<u32> =
            (0..shape.iter().product()).map(|_| random.random::<u16>().into()).collect();
        upload(stream, dtype, &any, shape)
    };
    let k = bits(&[pages, page_size, heads, head_dim])?;
    let q = bits(&[batch * tokens, heads * group, head_dim])?;
    let mut summaries =
        poisoned(stream, dtype, &[pages + 2 * MARGIN, statistics, heads, head_dim])?;
    let mut lists = poisoned(stream, DType::I32, &[batch + 2 * MARGIN, heads, capacity])?;
    let mut counts = poisoned(stream, DType::I32, &[batch + 2 * MARGIN])?;

    let mut run = || -> Result<(), Error> {
        let cache = KvCache {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCache::new(k.view(), k.view())
        };
        let inner = MARGIN..MARGIN + batch;
        let of_pages = MARGIN..MARGIN + pages;
        let summarize = SummarizePages { cache, tokens: [1, 40, 1 << 20][seed as usize % 3] };
        let to = summaries.view_mut().slice(0, of_pages.clone())?;
        match kernels.summaries {
            Choice::Selected => summarize.run(to, stream)?,
            Choice::This(kernel) => summarize.run_with(kernel, to, stream)?,
        }
        let from = summaries.view().slice(0, of_pages)?;
        let choose = ChoosePages::new(q.view(), cache, from);
        let workspace =
            AttentionDecodeWorkspace::new(stream, choose.workspace_bytes(stream.device())?)?;
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: tokens });
        let choose = ChoosePages { packed, workspace: Some(&workspace), ..choose };
        let out = (lists.view_mut().slice(0, inner.clone())?, counts.view_mut().slice(0, inner)?);
        match kernels.choice {
            Choice::Selected => choose.run(out, stream),
            Choice::This(kernel) => choose.run_with(kernel, out, stream),
        }
    };
    run().map_err(|error| format!("garbage {seed}: {error}"))?;
    wait(stream, &|| format!("garbage {seed}"))?;

    let outside = |name: &str, tensor: &Tensor| -> Result<(), String> {
        let bits = download(stream, tensor)?;
        let margin = bits.len() / tensor.shape()[0] * MARGIN;
        let inside = margin..bits.len() - margin;
        let mut written = (0..bits.len()).filter(|&at| bits[at] != poison(tensor.dtype()));
        match written.find(|at| !inside.contains(at)) {
            None => Ok(()),
            Some(at) => Err(format!("garbage {seed}: element {at} of {name} is {:#x}", bits[at])),
        }
    };
    outside("the summaries", &summaries)?;
    outside("the lists", &lists)?;
    outside("the counts", &counts)?;
    let columns = 0..max_pages as i32;
    let inner = |tensor: &Tensor| {
        let all = tensor.to_vec::<i32>(stream).map_err(|error| error.to_string())?;
        let margin = all.len() / tensor.shape()[0] * MARGIN;
        Ok::<_, String>(all[margin..all.len() - margin].to_vec())
    };
    if let Some(entry) = inner(&lists)?.iter().find(|entry| !columns.contains(entry)) {
        return Err(format!("garbage {seed}: page {entry} of {max_pages}"));
    }
    match inner(&counts)?.iter().find(|&&count| count < 0 || count as usize > capacity) {
        None => Ok(3),
        Some(count) => Err(format!("garbage {seed}: {count} pages of {capacity}")),
    }
}
