//! Block tables, lengths and offsets of any content.

use super::LatentForm;
use super::rows::{self, stored};
use crate::attention_decode::largest_workspace;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{decode, encode, normal, poison, rng};
use blockflash_ops::{
    AttentionDecode, AttentionDecodeOperands, CacheAccess, Error, HeadDims, KvCache, Mask,
    Operation, PackedTokens, Stream, Tensor,
};
use blockflash_sys::Kernel;
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

/// Runs a call whose table, lengths and offsets hold anything: what it reads is in the cache, among
/// pages of NaN, and what it writes is in its output.
pub fn latents_survive_garbage(
    seed: u64,
    form: LatentForm,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let mut random = rng(seed ^ 0x6A12);
    let (dtype, HeadDims { qk, v }, _) = form;
    let (batch, tokens) = (random.random_range(1..=5), random.random_range(1..=9));
    let (heads, page_size) = ([1, 3, 16, 40][seed as usize % 4], [16, 48, 64][seed as usize % 3]);
    let (pages, columns_of) = (random.random_range(1..=9), random.random_range(1..=6));
    let (packed, total) = (seed.is_multiple_of(2), batch * tokens);
    let surrounded = |dtype, bits: Vec<u32>, width: usize, shape: &[usize]| {
        let nan = || std::iter::repeat_n(poison(dtype), MARGIN * width);
        let bits: Vec<u32> = nan().chain(bits).chain(nan()).collect();
        upload(stream, dtype, &bits, shape)
    };
    let (of_rows, width) = stored(form);
    let (bits, _) = rows::generate(form, random.random(), pages * page_size);
    let shape = [pages + 2 * MARGIN, page_size, 1, width];
    let rows = surrounded(of_rows, bits, page_size * width, &shape)?;
    let bits = normal(random.random(), total * heads * qk);
    let bits = bits.into_iter().map(|x| encode(dtype, x)).collect();
    let q = surrounded(dtype, bits, heads * qk, &[total + 2 * MARGIN, heads, qk])?;
    let mut o = poisoned(stream, dtype, &[total + 2 * MARGIN, heads, v])?;
    let table = ints(&mut random, &[batch, columns_of], pages - 1, stream)?;
    let lengths = ints(&mut random, &[batch], columns_of * page_size, stream)?;
    let offsets = match packed {
        true => ints(&mut random, &[batch + 1], total, stream)?,
        false => {
            let right: Vec<i32> = (0..=batch).map(|b| (b * tokens) as i32).collect();
            Tensor::from_slice(stream, &right, &[batch + 1]).map_err(|error| error.to_string())?
        }
    };
    let inner = MARGIN..MARGIN + total;
    let run = |o: &mut Tensor| -> Result<(), Error> {
        let pages = rows.view().slice(0, MARGIN..MARGIN + pages)?;
        let cache = KvCache {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..rows::cache(form, pages)?
        };
        let mask = if seed.is_multiple_of(3) { Mask::Full } else { Mask::causal() };
        let decode = AttentionDecode {
            packed: Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: tokens }),
            scores: mask.into(),
            batch_invariant: seed.is_multiple_of(5),
            ..AttentionDecode::new(q.view().slice(0, inner.clone())?)
        };
        let workspace = largest_workspace(&decode, &cache, stream)?;
        let decode = AttentionDecode { workspace: Some(&workspace), ..decode };
        let o = o.view_mut().slice(0, inner.clone())?;
        let operands = AttentionDecodeOperands { cache: CacheAccess::Read(cache), o, lse: None };
        decode.run_with(kernel, operands, stream)
    };
    run(&mut o).map_err(|error| format!("garbage {seed}: {error}"))?;
    wait(stream, &|| format!("garbage {seed}"))?;
    let bits = download(stream, &o)?;
    let inside = MARGIN * heads * v..(MARGIN + total) * heads * v;
    let wrong = |&at: &usize| match inside.contains(&at) {
        // Rows that no offset names are not written.
        true => !packed && decode(dtype, bits[at]).is_nan(),
        false => bits[at] != poison(dtype),
    };
    // Of a packed row all columns are written, or none.
    let is_nan = |at: usize| decode(dtype, bits[at]).is_nan();
    let torn = |&row: &usize| (1..v).any(|c| is_nan(row * v + c) != is_nan(row * v));
    let found = (0..bits.len()).find(wrong).or_else(|| (0..bits.len() / v).find(torn));
    match found {
        None => Ok(1),
        Some(at) => Err(format!("garbage {seed}: element or row {at} of o is wrong")),
    }
}
