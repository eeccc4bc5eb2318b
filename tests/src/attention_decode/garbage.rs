//! Random garbage in everything that decides about addresses: tables, lengths, lists, offsets.

use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, upload};
use crate::number::{decode, encode, normal, poison, rng};
use blockflash_ops::{
    AppendKv, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess,
    DType, Error, KvCacheMut, Mask, Operation, PackedTokens, PageLists, Rotary, RotaryPairs,
    Scores, Stream, Tensor,
};
use rand::Rng;
use rand::rngs::StdRng;

/// Pages, and rows of packed tokens, before and after the ones that a call is given.
const MARGIN: usize = 3;

fn garbage(random: &mut StdRng, near: i32) -> i32 {
    match random.random_range(0..6) {
        0 => i32::MIN,
        1 => i32::MAX,
        2 => random.random(),
        3 => -1,
        _ => random.random_range(-2..near.max(0) + 3),
    }
}

/// One call with garbage that follows from `seed`: the launch ends, what it writes is inside, and
/// what it reads too, as NaN is around. Offsets of packed tokens are garbage on a GPU only, since
/// the CPU refuses them. With `terms` it has a mask of the last keys, and ALiBi where that is
/// `true`. Returns the number of compared outputs.
pub fn survives_garbage(
    [dtype_seed, seed]: [usize; 2],
    head_dim: usize,
    terms: Option<bool>,
    kernel: Choice,
    stream: &Stream,
) -> Result<usize, String> {
    let dtype = [DType::BF16, DType::F16][dtype_seed % 2];
    let mut random = rng(seed as u64 ^ 0x6A2B);
    let (batch, mut tokens, heads_kv) = (random.random_range(1..5), random.random_range(1..6), 2);
    let mut heads_q = heads_kv * [1, 4][seed % 2];
    if seed % 12 == 6 {
        // This many queries that the sequences may have two kernels.
        (tokens, heads_q) = (random.random_range(100..140), 64);
    }
    let (page_size, max_pages, pages) = (16, random.random_range(1..9), random.random_range(1..9));
    let packed = seed % 3 == 0 && !stream.device().is_cpu();
    let (listed, append, turns) = (seed % 4 == 1, seed % 5 < 3, seed % 7 < 3);
    let (capacity, half) = (max_pages * page_size, head_dim / [2, 4][seed % 2]);

    let ints = |random: &mut StdRng, shape: &[usize], near: usize| {
        let values: Vec<i32> =
            (0..shape.iter().product()).map(|_| garbage(random, near as i32)).collect();
        Tensor::from_slice(stream, &values, shape).map_err(|error| error.to_string())
    };
    // Numbers between NaN.
    let rows = |seed: u64, inner: usize, width: usize, shape: &[usize]| {
        let nan = || std::iter::repeat_n(poison(dtype), MARGIN * width);
        let numbers = normal(seed, inner * width).into_iter().map(|x| encode(dtype, x));
        let bits: Vec<u32> = nan().chain(numbers).chain(nan()).collect();
        upload(stream, dtype, &bits, shape)
    };
    let page_shape = [pages + 2 * MARGIN, page_size, heads_kv, head_dim];
    let page_width = page_size * heads_kv * head_dim;
    let (mut k, mut v) =
        (rows(1, pages, page_width, &page_shape)?, rows(2, pages, page_width, &page_shape)?);
    let inner = MARGIN..MARGIN + batch * tokens;
    let token_shape = |heads| [batch * tokens + 2 * MARGIN, heads, head_dim];
    let q = rows(3, batch * tokens, heads_q * head_dim, &token_shape(heads_q))?;
    let new = rows(4, batch * tokens, heads_kv * head_dim, &token_shape(heads_kv))?;
    let angles = rows(5, capacity, half, &[capacity + 2 * MARGIN, half])?;
    let mut o = poisoned(stream, dtype, &token_shape(heads_q))?;

    let table = ints(&mut random, &[batch, max_pages], pages)?;
    let lengths = ints(&mut random, &[batch], capacity)?;
    let lists = ints(&mut random, &[batch, heads_kv, max_pages], max_pages)?;
    let counts = ints(&mut random, &[batch], max_pages)?;
    let offsets = match packed {
        true => ints(&mut random, &[batch + 1], batch * tokens)?,
        false => {
            let offsets: Vec<i32> = (0..=batch).map(|b| (b * tokens) as i32).collect();
            Tensor::from_slice(stream, &offsets, &[batch + 1]).map_err(|error| error.to_string())?
        }
    };
    let tail = random.random_range(1..=capacity);
    let entries: Vec<u8> =
        (0..batch * tokens * tail).map(|_| random.random_range(0..3u8) * 100).collect();
    let tail_mask = Tensor::from_slice(stream, &entries, &[batch * tokens, tail]);
    let tail_mask = tail_mask.map_err(|error| error.to_string())?;
    let slopes = Tensor::from_slice(stream, &vec![0.5f32; heads_q], &[heads_q]);
    let slopes = slopes.map_err(|error| error.to_string())?;
    let run = |k: &mut Tensor, v: &mut Tensor, o: &mut Tensor| -> Result<(), Error> {
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: tokens });
        let pages = listed.then(|| PageLists { lists: lists.view(), counts: counts.view() });
        let mask = if seed % 2 == 0 { Mask::causal() } else { Mask::Full };
        let q = q.view().slice(0, inner.clone())?;
        let angles = angles.view().slice(0, MARGIN..MARGIN + capacity)?;
        let pairs = [RotaryPairs::Halves, RotaryPairs::Interleaved][seed / 2 % 2];
        let rotary = turns.then_some(Rotary { cos: angles, sin: angles, pairs });
        let mut decode = AttentionDecode {
            packed,
            pages,
            scores: Scores {
                alibi: terms.filter(|&alibi| alibi).map(|_| slopes.view()),
                ..mask.into()
            },
            rotary,
            tail_mask: terms.map(|_| tail_mask.view()),
            ..AttentionDecode::new(q)
        };
        let page_range = MARGIN..page_shape[0] - MARGIN;
        let cache = KvCacheMut {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCacheMut::new(
                k.view_mut().slice(0, page_range.clone())?,
                v.view_mut().slice(0, page_range)?,
            )
        };
        let bytes = decode.workspace_bytes(&cache.as_cache()?, stream.device())?;
        let workspace = AttentionDecodeWorkspace::new(stream, 4 * bytes)?;
        decode.workspace = Some(&workspace);
        let new = new.view().slice(0, inner.clone())?;
        let new = AppendKv { packed, rotary, ..AppendKv::new(new, new) };
        let cache = match append {
            true => CacheAccess::Append(&new, cache),
            false => CacheAccess::Read(cache.as_cache()?),
        };
        let o = o.view_mut().slice(0, inner.clone())?;
        let operands = AttentionDecodeOperands { cache, o, lse: None };
        match kernel {
            Choice::Selected => decode.forward_into(operands, stream),
            Choice::This(kernel) => decode.run_with(kernel, operands, stream),
        }
    };
    match run(&mut k, &mut v, &mut o) {
        Err(Error::Unsupported { .. }) if listed && matches!(kernel, Choice::This(_)) => {
            return Ok(0);
        }
        other => other.map_err(|error| format!("garbage {seed}: {error}"))?,
    }
    wait(stream, &|| format!("garbage {seed}"))?;

    let check = |name: &str, tensor: &Tensor, inner: usize, width: usize| {
        let bits = download(stream, tensor)?;
        let inside = MARGIN * width..(MARGIN + inner) * width;
        let wrong = |&at: &usize| match inside.contains(&at) {
            // Rows that no offset names are not written.
            true => !(packed && name == "o") && decode(dtype, bits[at]).is_nan(),
            false => bits[at] != poison(dtype),
        };
        match (0..bits.len()).find(wrong) {
            None => Ok(()),
            Some(at) => Err(format!("garbage {seed}: element {at} of {name} is {:#x}", bits[at])),
        }
    };
    check("o", &o, batch * tokens, heads_q * head_dim)?;
    check("k", &k, pages, page_width)?;
    check("v", &v, pages, page_width)?;
    Ok(3)
}
