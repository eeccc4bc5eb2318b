//! `blockflash attention-decode`.

use crate::decode_args::Args;
use crate::failure::{Result, bail, ensure};
use crate::list_args::with_lists;
use crate::operand::{Source, StandIn, common_dtype, load_each, random};
use crate::qkv_args::{o_bytes, with_tensors};
use crate::run::Run;
use blockflash_bench::case::{
    CacheValues, Chosen, DecodeData, DecodeOperands, DecodeShape, Fill, IndexOperands, Operands,
};
use blockflash_bench::io::Stored;
use blockflash_bench::memory;
use blockflash_ops::{AttentionDecode, DType, HeadDims, KvCache, Mask, Scores};
use std::path::Path;
use std::process::ExitCode;

/// Keys of a random cache, unless a number is given.
const KEYS: usize = 1024;

/// Runs attention to a cache once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let outputs = args.outputs()?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;
    let scores = args.scores.of(args.mask, Mask::causal())?;
    let data = match args.random {
        Some(sizes) => drawn(&args, scores, sizes)?,
        None => read(&args, scores)?,
    };
    let given = args.scales(data.k.dtype().is_code())?;
    let [mut k_scale, mut v_scale] = data.scales;
    for (scale, given) in [(&mut k_scale, given[0]), (&mut v_scale, given[1])] {
        *scale = given.map_or(scale.take(), |given| Some(vec![given].into()));
    }
    let data = DecodeData { scales: [k_scale, v_scale], ..data };
    let seqused_kv = match &args.seqused_kv {
        Some(lengths) => Some(lengths.load("seqused_kv")?),
        None => None,
    };
    let columns =
        data.block_table.as_ref().map_or(1, |table| table.shape().get(1).copied().unwrap_or(0));
    let capacity = data.k.shape().get(1).map_or(0, |slots| slots * columns);
    let scores = with_tensors(scores, &data.q, capacity, args.common.seed)?;
    let wants_lse = outputs.has("lse") || args.common.check;
    let chosen = args.selection()?.map_or(Chosen::All, Chosen::Selected);
    let data = DecodeData { seqused_kv, chosen, ..data };
    let mut operands: Box<dyn Operands> = match &args.lists.lists {
        Some(lists) => {
            let data = with_lists(&args, data, lists)?;
            Box::new(IndexOperands::new(scores, data, wants_lse, &stream)?)
        }
        None => Box::new(DecodeOperands::new(scores, data, wants_lse, &stream)?),
    };
    let (operation, kernel) = ("attention-decode", None);
    Run { operation, common: &args.common, kernel, outputs, device: &device, stream: &stream }
        .of(&mut *operands)
}

fn drawn(
    args: &Args,
    scores: Scores<&Path>,
    [batch, queries, heads, head_dim]: [usize; 4],
) -> Result<DecodeData> {
    let keys = args.seqlen_kv.unwrap_or(KEYS);
    let page_size = args.page_size.unwrap_or(keys);
    let divides = page_size > 0 && keys.is_multiple_of(page_size) || args.page_size.is_none();
    ensure!(divides, "{keys} keys cannot be divided into pages of {page_size}");
    let pages = if args.page_size.is_some() { keys / page_size } else { 1 };
    let q = [batch, queries, heads, head_dim];
    let all = batch.saturating_mul(pages);
    let num_heads_kv = args.qkv.kv_heads.unwrap_or(heads);
    let head_dims = HeadDims { qk: head_dim, v: args.qkv.v_head_dim.unwrap_or(head_dim) };
    let [k, v] = [head_dims.qk, head_dims.v].map(|width| [all, page_size, num_heads_kv, width]);
    let o = [batch, queries, heads, head_dims.v];
    let dtype = args.qkv.dtype().unwrap_or(DType::F16);
    // The host notes where each key is stored, too.
    let places = memory::size(&[&k[..2]], size_of::<usize>());
    let kv_dtype = args.kv_dtype.map(DType::from);
    let of_kv = kv_dtype.unwrap_or(dtype);
    let cache: &[&[usize]] = if args.latent { &[&k] } else { &[&k, &v] };
    let tensors =
        memory::size(&[&q, &o], dtype.size()).saturating_add(memory::size(cache, of_kv.size()));
    memory::ensure("q, k, v and o", tensors.saturating_add(places))?;
    ensure!(
        !args.latent || head_dims.v <= head_dim && kv_dtype.is_none(),
        "--latent takes values of at most {head_dim} elements, the --v-head-dim, and no --kv-dtype"
    );
    refuse(scores, [dtype, of_kv], [&q, &k, &v], args.page_size.map(|_| [batch, pages]))?;
    ensure!(i32::try_from(all).is_ok(), "there are too many pages");
    let shape = DecodeShape {
        batch,
        seqlen_q: queries,
        seqlen_kv: keys,
        num_heads_q: heads,
        num_heads_kv,
        head_dims,
        page_size: args.page_size,
        chosen: None,
        fill: Fill::Full,
        window: None,
        latent: args.latent,
        dtype,
        kv_dtype,
    };
    let seed = args.common.seed;
    shape.data(seed, |what, shape: &[usize], dtype, lane| random(what, dtype, shape, seed, lane))
}

fn read(args: &Args, scores: Scores<&Path>) -> Result<DecodeData> {
    // clap does not enforce `requires` where what is required conflicts with another option that is
    // given.
    ensure!(
        !args.qkv.has_sizes()
            && !args.latent
            && args.seqlen_kv.is_none()
            && args.page_size.is_none(),
        "--kv-heads, --v-head-dim, --latent, --seqlen-kv and --page-size only apply to --random"
    );
    let sources = args.qkv.sources("BxQxHxD")?;
    let kv_dtype = args.kv_dtype.map(DType::from).or_else(|| codes(&sources));
    // Beside codes, q has a type of its own.
    let alike = if kv_dtype.is_some() { &sources[..1] } else { &sources[..] };
    let dtype = common_dtype(args.qkv.dtype(), alike)?;
    let of_kv = kv_dtype.unwrap_or(dtype);
    let o = o_bytes(&sources, dtype)?;
    let table = args.block_table.as_ref().map(|path| Source::open(path, "block_table"));
    let block_table = table.transpose()?.map(|source| source.load(DType::I32)).transpose()?;
    let of_table =
        block_table.as_ref().and_then(|table| <[usize; 2]>::try_from(table.shape()).ok());
    if block_table.is_none() == of_table.is_none() {
        let [q, k, v] = &sources;
        refuse(scores, [dtype, of_kv], [q.shape()?, k.shape()?, v.shape()?], of_table)?;
    }
    let [q, k, v] = load_each(sources, [dtype, of_kv, of_kv], o)?;
    let &[pages, _, _, _] = k.shape() else {
        bail!("k is {:?}, expected four sizes: see --help", k.shape());
    };
    let (seqused_kv, chosen, seed) = (None, Chosen::All, args.common.seed);
    let scales = [None, None];
    let v = CacheValues::Own(v);
    Ok(DecodeData { q, k, v, scales, pages, block_table, seqused_kv, chosen, seed })
}

/// The type of a cache of codes in files.
fn codes([_, k, v]: &[Source; 3]) -> Option<DType> {
    let code = |source: &Source| match source.stored()? {
        Stored::E4m3 => Some(DType::E4M3),
        Stored::E5m2 => Some(DType::E5M2),
        Stored::I8 => Some(DType::I8),
        _ => None,
    };
    code(k).filter(|&of_k| code(v) == Some(of_k))
}

/// Refuses a call whose sizes or options do not fit before a tensor of it is drawn or read.
fn refuse(
    scores: Scores<&Path>,
    [dtype, of_kv]: [DType; 2],
    [q, k, v]: [&[usize]; 3],
    table: Option<[usize; 2]>,
) -> Result<()> {
    let shape = table.unwrap_or_default();
    let stand_in = StandIn::new;
    let (Some(q), Some(k), Some(v), Some(of_table)) =
        (stand_in(dtype, q), stand_in(of_kv, k), stand_in(of_kv, v), stand_in(DType::I32, &shape))
    else {
        return Ok(());
    };
    let block_table = table.map(|_| of_table.view()).transpose()?;
    let cache = KvCache { block_table, ..KvCache::new(k.view()?, v.view()?) };
    let scores = scores.without_tensors();
    AttentionDecode { scores, ..AttentionDecode::new(q.view()?) }.problem(&cache)?;
    Ok(())
}
