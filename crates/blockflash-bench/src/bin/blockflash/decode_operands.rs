//! Operands of `blockflash attention-decode`.

use crate::args::ensure;
use crate::decode::call;
use crate::decode_args::Args;
use crate::failure::{Failure, Result};
use crate::operand::{Source, StandIn, common_dtype, load_all, random};
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_bench::random::shuffle;
use blockflash_ops::{DType, KvCache};

/// Keys of a random cache, unless a number is given.
const KEYS: usize = 1024;

/// What is computed on the host.
pub struct Operands {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    /// i32 `[batch, pages of a sequence]`.
    pub block_table: Option<Array>,
    /// i32 `[batch]`.
    pub seqused_kv: Option<Array>,
    /// f32 `[heads]`.
    pub sink: Option<Array>,
    /// Keys of each sequence.
    pub lengths: Vec<usize>,
    /// Where the keys lie in the cache, one sequence behind the other.
    pub slots: Vec<usize>,
}

impl Operands {
    pub fn new(args: &Args) -> Result<Self> {
        let ([q, k, v], block_table) = match args.random {
            Some(sizes) => drawn(args, sizes)?,
            None => read(args)?,
        };
        let seqused_kv =
            args.seqused_kv.as_ref().map(|list| list.load("seqused_kv")).transpose()?;
        let sink = args.scores.sink(&q, args.common.seed)?;
        let &[pages, page_size, _, _] = k.shape() else {
            let text = format!("k is {:?}, expected four sizes: see --help", k.shape());
            return Err(Failure::new(text));
        };
        let (batch, capacity) = match block_table.as_ref().map(Array::shape) {
            None => (pages, page_size),
            Some(&[batch, columns]) => (batch, columns.saturating_mul(page_size)),
            Some(shape) => {
                let text = format!("the block table is {shape:?}, expected [batch, pages]");
                return Err(Failure::new(text));
            }
        };
        let lengths = lengths(seqused_kv.as_ref(), batch, capacity)?;
        let entries = block_table.as_ref().map(|table| table.as_i32().unwrap_or_default());
        let slots = slots(entries, &lengths, [pages, page_size, capacity])?;
        Ok(Self { q, k, v, block_table, seqused_kv, sink, lengths, slots })
    }
}

type Tensors = ([Array; 3], Option<Array>);

fn drawn(args: &Args, [batch, queries, heads, head_dim]: [usize; 4]) -> Result<Tensors> {
    let (keys, seed) = (args.seqlen_kv.unwrap_or(KEYS), args.common.seed);
    let page_size = args.page_size.unwrap_or(keys);
    let divides = page_size > 0 && keys.is_multiple_of(page_size) || args.page_size.is_none();
    ensure(divides, &format!("{keys} keys cannot be divided into pages of {page_size}"))?;
    let pages = if args.page_size.is_some() { keys / page_size } else { 1 };
    let q = [batch, queries, heads, head_dim];
    let all = batch.saturating_mul(pages);
    let kv = [all, page_size, args.qkv.kv_heads.unwrap_or(heads), head_dim];
    let dtype = args.qkv.dtype().unwrap_or(DType::F16);
    // The host notes where each key lies, too.
    let places = memory::size(&[&kv[..2]], size_of::<usize>());
    let tensors = memory::size(&[&q, &kv, &kv, &q], dtype.size());
    memory::ensure("q, k, v and o", tensors.saturating_add(places))?;
    refuse(args, dtype, [&q, &kv], args.page_size.map(|_| [batch, pages]))?;
    let draw = |what, shape: &[usize], lane| random(what, dtype, shape, seed, lane);
    let tensors = [draw("q", &q, 0)?, draw("k", &kv, 1)?, draw("v", &kv, 2)?];
    let table = args.page_size.map(|_| {
        let last = i32::try_from(all).map_err(|_| Failure::new("there are too many pages"))?;
        let mut table: Vec<_> = (0..last).collect();
        shuffle(&mut table, seed);
        Array::new(&[batch, pages], table).ok_or_else(|| Failure::new("a table of all pages"))
    });
    Ok((tensors, table.transpose()?))
}

fn read(args: &Args) -> Result<Tensors> {
    // clap does not enforce `requires` where what is required conflicts with another option that is
    // given.
    ensure(
        args.qkv.kv_heads.is_none() && args.seqlen_kv.is_none() && args.page_size.is_none(),
        "--kv-heads, --seqlen-kv and --page-size only apply to --random",
    )?;
    let sources = args.qkv.sources("BxQxHxD")?;
    let dtype = common_dtype(args.qkv.dtype(), &sources)?;
    let o = memory::size(&[sources[0].shape()?], dtype.size());
    let table = args.block_table.as_ref().map(|path| Source::open(path, "block_table"));
    let table = table.transpose()?.map(|source| source.load(DType::I32)).transpose()?;
    let of_table = table.as_ref().and_then(|table| <[usize; 2]>::try_from(table.shape()).ok());
    if table.is_none() == of_table.is_none() {
        refuse(args, dtype, [sources[0].shape()?, sources[1].shape()?], of_table)?;
    }
    Ok((load_all(sources, dtype, o)?, table))
}

/// Refuses a call whose sizes or options do not fit before a tensor of it is drawn or read.
fn refuse(
    args: &Args,
    dtype: DType,
    [q, kv]: [&[usize]; 2],
    table: Option<[usize; 2]>,
) -> Result<()> {
    let shape = table.unwrap_or_default();
    let stand_in = StandIn::new;
    let (Some(q), Some(kv), Some(of_table)) =
        (stand_in(dtype, q), stand_in(dtype, kv), stand_in(DType::I32, &shape))
    else {
        return Ok(());
    };
    let block_table = table.map(|_| of_table.view()).transpose()?;
    let cache = KvCache { block_table, ..KvCache::new(kv.view()?, kv.view()?) };
    call(args, q.view()?)?.problem(&cache)?;
    Ok(())
}

fn lengths(seqused_kv: Option<&Array>, batch: usize, capacity: usize) -> Result<Vec<usize>> {
    let Some(array) = seqused_kv else { return Ok(vec![capacity; batch]) };
    let entries = array.as_i32().filter(|_| array.shape() == [batch]).ok_or_else(|| {
        Failure::new(format!("the lengths are {:?}, expected [{batch}]", array.shape()))
    })?;
    let length = |(entry, &length): (usize, &i32)| {
        usize::try_from(length).ok().filter(|&length| length <= capacity).ok_or_else(|| {
            Failure::new(format!("sequence {entry} has {length} keys, expected 0 to {capacity}"))
        })
    };
    entries.iter().enumerate().map(length).collect()
}

/// The library takes any entry of the table for some page; here one that is none is a mistake.
fn slots(
    table: Option<&[i32]>,
    lengths: &[usize],
    [pages, page_size, capacity]: [usize; 3],
) -> Result<Vec<usize>> {
    let mut slots = Vec::new();
    for (entry, &length) in lengths.iter().enumerate() {
        let Some(table) = table else {
            slots.extend((0..length).map(|key| entry * capacity + key));
            continue;
        };
        let columns = capacity / page_size.max(1);
        for (column, first) in (0..length).step_by(page_size.max(1)).enumerate() {
            let page = table[entry * columns + column];
            let page =
                usize::try_from(page).ok().filter(|&page| page < pages).ok_or_else(|| {
                    Failure::new(format!(
                        "page {column} of sequence {entry} is {page}, but there are {pages}"
                    ))
                })?;
            let used = page_size.min(length - first);
            slots.extend((0..used).map(|slot| page * page_size + slot));
        }
    }
    Ok(slots)
}
