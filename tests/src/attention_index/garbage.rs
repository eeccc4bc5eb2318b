//! Lists, block tables, lengths and offsets of any content.

use super::IndexForm;
use super::run::workspace_bytes;
use super::stored::row_bits;
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{decode, encode, normal, poison, rng};
use blockflash_ops::{
    AttentionDecodeWorkspace, Error, HeadDims, IndexAttention, IndexAttentionOperands, IndexLists,
    KvCache, Mask, Operation, PackedTokens, Stream, Tensor, View,
};
use rand::Rng;
use rand::rngs::StdRng;

/// Pages and tokens of NaN before and behind those of the call.
const MARGIN: usize = 2;

/// Any number, or one near what would be right.
fn ints(
    random: &mut StdRng,
    shape: &[usize],
    limit: usize,
    stream: &Stream,
) -> Result<Tensor, String> {
    let one = |random: &mut StdRng| match random.random_range(0..4) {
        0 => random.random::<i32>(),
        1 => [i32::MIN, -1, i32::MAX, limit as i32 + 1][random.random_range(0..4)],
        _ => random.random_range(0..=limit as i32),
    };
    let values: Vec<i32> = (0..shape.iter().product()).map(|_| one(random)).collect();
    Tensor::from_slice(stream, &values, shape).map_err(|error| error.to_string())
}

/// What is between the margins.
fn inside(tensor: &Tensor, count: usize) -> Result<View<'_>, blockflash_safe::Error> {
    tensor.view().slice(0, MARGIN..MARGIN + count)
}

fn packed_tokens(offsets: &Tensor, max_seqlen: usize) -> PackedTokens<'_> {
    PackedTokens { cu_seqlens: offsets.view(), max_seqlen }
}

/// Runs a call whose lists, table, lengths and offsets hold anything, on a CPU but for the offsets:
/// what it reads is in the cache, among pages of NaN, and what it writes is in its output. Returns
/// the number of compared outputs, 0 where the kernel takes no such call.
pub fn lists_survive_garbage(
    seed: u64,
    form: IndexForm,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let told = |error: Error| format!("garbage {seed}: {error}");
    let mut random = rng(seed ^ 0x6A13);
    let IndexForm { dtype, head_dims: HeadDims { qk, v }, .. } = form;
    let latent = form.is_latent();
    let (batch, tokens) = (random.random_range(1..=5), random.random_range(1..=9));
    let heads_kv = if latent { 1 } else { [1, 2][seed as usize % 2] };
    let heads = heads_kv * [1, 3, 16, 20][seed as usize / 2 % 4];
    let groups = [1, heads_kv, heads][seed as usize / 3 % 3];
    let granularity = [1, 4, 16, 64, 128][seed as usize % 5];
    let page_size = [16, 48, 64][seed as usize % 3];
    let pages_of: usize = random.random_range(1..=9);
    let (columns, capacity) = (random.random_range(1..=6), random.random_range(0..=40usize));
    // Packed keys are one page.
    let packed_kv = seed % 4 == 1;
    let [page_size, pages] =
        if packed_kv { [pages_of * page_size, 1] } else { [page_size, pages_of] };
    let (packed, total) = (seed.is_multiple_of(2) || packed_kv, batch * tokens);
    let longest = if packed_kv { page_size } else { columns * page_size };

    let surrounded = |dtype, bits: Vec<u32>, width: usize, shape: &[usize]| {
        let nan = || std::iter::repeat_n(poison(dtype), MARGIN * width);
        let bits: Vec<u32> = nan().chain(bits).chain(nan()).collect();
        upload(stream, dtype, &bits, shape)
    };
    let mut rows = |which: usize| {
        let (columns, of_page) = (form.stored()[which], page_size * heads_kv);
        let bits = row_bits(form, which, random.random(), pages * of_page);
        let shape = [pages + 2 * MARGIN, page_size, heads_kv, columns];
        surrounded(form.cache_dtype(), bits, of_page * columns, &shape)
    };
    let (k, values) = (rows(0)?, rows(1)?);
    let bits = normal(random.random(), total * heads * qk);
    let bits = bits.into_iter().map(|x| encode(dtype, x)).collect();
    let q = surrounded(dtype, bits, heads * qk, &[total + 2 * MARGIN, heads, qk])?;
    let mut o = poisoned(stream, dtype, &[total + 2 * MARGIN, heads, v])?;
    let table = ints(&mut random, &[batch, columns], pages - 1, stream)?;
    let lengths = ints(&mut random, &[batch], longest, stream)?;
    let blocks = longest.div_ceil(granularity);
    let entries = ints(&mut random, &[groups, total, capacity], blocks, stream)?;
    let mut offsets = |of_each: usize, rows: usize| match stream.device().is_cpu() {
        false => ints(&mut random, &[batch + 1], rows, stream),
        true => {
            let right: Vec<i32> = (0..=batch).map(|b| (b * of_each) as i32).collect();
            Tensor::from_slice(stream, &right, &[batch + 1]).map_err(|error| error.to_string())
        }
    };
    let (offsets_q, offsets_kv) = (offsets(tokens, total)?, offsets(page_size / batch, page_size)?);

    let inner = MARGIN..MARGIN + total;
    let cut = |error: blockflash_safe::Error| error.to_string();
    let k = inside(&k, pages).map_err(cut)?;
    let values = match latent {
        true => k.slice(3, 0..form.stored()[1]).map_err(cut)?,
        false => inside(&values, pages).map_err(cut)?,
    };
    let cache = KvCache {
        block_table: (!packed_kv).then(|| table.view()),
        seqused_kv: (!packed_kv).then(|| lengths.view()),
        ..KvCache::new(k, values)
    };
    let mask = if seed.is_multiple_of(3) { Mask::Full } else { Mask::causal() };
    let rows = q.view().slice(0, inner.clone()).map_err(cut)?;
    let q = match packed {
        true => rows,
        false => rows.unflatten(0, tokens).map_err(cut)?,
    };
    let call = IndexAttention {
        packed: packed.then(|| packed_tokens(&offsets_q, tokens)),
        packed_kv: packed_kv.then(|| packed_tokens(&offsets_kv, page_size)),
        scores: mask.into(),
        batch_invariant: seed.is_multiple_of(5),
        ..IndexAttention::new(q, IndexLists { entries: entries.view(), granularity })
    };
    let bytes = match kernel {
        Choice::Selected => call.workspace_bytes(&cache, stream.device()).map_err(told)?,
        Choice::This(kernel) => workspace_bytes(&call, &cache, kernel, stream)?,
    };
    let workspace = AttentionDecodeWorkspace::new(stream, bytes).map_err(told)?;
    let call = IndexAttention { workspace: Some(&workspace), ..call };
    let view = o.view_mut().slice(0, inner.clone()).map_err(cut)?;
    let view = match packed {
        true => view,
        false => view.unflatten(0, tokens).map_err(cut)?,
    };
    let operands = IndexAttentionOperands { cache, o: view, lse: None };
    let launched = match kernel {
        Choice::Selected => call.forward_into(operands, stream),
        Choice::This(kernel) => call.run_with(kernel, operands, stream),
    };
    match launched {
        Err(Error::Unsupported { .. }) => return Ok(0),
        launched => launched.map_err(told)?,
    }
    wait(stream, &|| format!("garbage {seed}"))?;
    let bits = download(stream, &o)?;
    let inside = MARGIN * heads * v..(MARGIN + total) * heads * v;
    let wrong = |&at: &usize| match inside.contains(&at) {
        // Rows that no offset names, where offsets do not ascend, may not be written.
        true => !packed && !decode(dtype, bits[at]).is_finite(),
        false => bits[at] != poison(dtype),
    };
    // Of a packed row all columns are written, or none.
    let is_finite = |at: usize| decode(dtype, bits[at]).is_finite();
    let torn = |&row: &usize| (1..v).any(|c| is_finite(row * v + c) != is_finite(row * v));
    match (0..bits.len()).find(wrong).or_else(|| (0..bits.len() / v).find(torn)) {
        None => Ok(1),
        Some(at) => Err(format!("garbage {seed}: element or row {at} of o is wrong")),
    }
}
