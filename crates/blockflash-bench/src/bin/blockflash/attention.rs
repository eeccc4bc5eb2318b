//! `blockflash attention`.

use crate::attention_args::Args;
use crate::failure::{Failure, Result, bail, ensure};
use crate::offsets::Offsets;
use crate::operand::{StandIn, common_dtype, load_all, random};
use crate::qkv_args::{o_bytes, with_tensors};
use crate::run::Run;
use blockflash_bench::case::{AttentionData, AttentionOperands};
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_ops::{Attention, DType, Scores};
use std::path::Path;
use std::process::ExitCode;

/// Runs attention once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let outputs = args.outputs()?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;
    let scores = args.scores.of(args.mask, args.block_mask.token_mask())?;
    let data = data(&args, scores)?;
    let keys = data.k.shape().get(1).copied().unwrap_or(0);
    let scores = with_tensors(scores, &data.q, keys, args.common.seed)?;
    let wants_lse = outputs.has("lse") || args.common.check;
    let mut operands = AttentionOperands::new(scores, data, wants_lse, &stream)?;
    let (operation, kernel) = ("attention", args.kernel.as_deref());
    Run { operation, common: &args.common, kernel, outputs, device: &device, stream: &stream }
        .of(&mut operands)
}

/// What is computed from, read or drawn.
fn data(args: &Args, scores: Scores<&Path>) -> Result<AttentionData> {
    let [q, k, v] = tensors(args, scores)?;
    let lengths = match &args.cu_seqlens {
        Some(offsets) => Some(packed(args, offsets, [&q, &k])?),
        None => None,
    };
    let seqlens = [&q, &k].map(|tensor| tensor.shape().get(1).copied().unwrap_or(0));
    let block_mask = args.block_mask.load(seqlens, lengths.as_ref(), args.common.seed)?;
    Ok(AttentionData { q, k, v, lengths, block_mask })
}

fn tensors(args: &Args, scores: Scores<&Path>) -> Result<[Array; 3]> {
    let dtype = args.qkv.dtype();
    let packed = args.cu_seqlens.is_some();
    if let Some([batch, seqlen_q, heads_q, head_dim]) = args.random {
        let q = [batch, seqlen_q, heads_q, head_dim];
        let seqlen_kv = args.seqlen_kv.unwrap_or(seqlen_q);
        let heads_kv = args.qkv.kv_heads.unwrap_or(heads_q);
        let v_head_dim = args.qkv.v_head_dim.unwrap_or(head_dim);
        let [k, v] = [head_dim, v_head_dim].map(|width| [batch, seqlen_kv, heads_kv, width]);
        let o = [batch, seqlen_q, heads_q, v_head_dim];
        ensure!(!packed || batch == 1, "--cu-seqlens divides the rows of --random 1xROWSxHxD");
        let dtype = dtype.unwrap_or(DType::F16);
        memory::ensure("q, k, v and o", memory::size(&[&q, &k, &v, &o], dtype.size()))?;
        if !packed {
            refuse(scores, dtype, [&q, &k, &v])?;
        }
        let draw = |what, shape: [usize; 4], lane| {
            let shape = if packed { &shape[1..] } else { &shape[..] };
            random(what, dtype, shape, args.common.seed, lane)
        };
        return Ok([draw("q", q, 0)?, draw("k", k, 1)?, draw("v", v, 2)?]);
    }
    // clap does not enforce `requires` where what is required conflicts with another option that is
    // given.
    ensure!(
        !args.qkv.has_sizes() && args.seqlen_kv.is_none(),
        "--kv-heads, --v-head-dim and --seqlen-kv only apply to --random"
    );
    let sources = args.qkv.sources("BxSxHxD")?;
    let dtype = common_dtype(dtype, &sources)?;
    let o = o_bytes(&sources, dtype)?;
    if !packed {
        let [q, k, v] = &sources;
        refuse(scores, dtype, [q.shape()?, k.shape()?, v.shape()?])?;
    }
    load_all(sources, dtype, o)
}

/// Refuses a call whose sizes or options do not fit before a tensor of it is drawn or read.
fn refuse(scores: Scores<&Path>, dtype: DType, [q, k, v]: [&[usize]; 3]) -> Result<()> {
    let stand_in = |shape| StandIn::new(dtype, shape);
    let (Some(q), Some(k), Some(v)) = (stand_in(q), stand_in(k), stand_in(v)) else {
        return Ok(());
    };
    let scores = scores.without_tensors();
    Attention { scores, ..Attention::new(q.view()?, k.view()?, v.view()?) }.problem()?;
    Ok(())
}

/// Lengths of the queries and of the keys of the sequences.
fn packed(args: &Args, of_queries: &Offsets, [q, k]: [&Array; 2]) -> Result<[Vec<usize>; 2]> {
    let of_keys = args.cu_seqlens_kv.as_ref();
    // Where one file has both, each has its name.
    let name = if of_keys.is_some() { "cu_seqlens_kv" } else { "cu_seqlens" };
    let offsets = [of_queries.load("cu_seqlens")?, of_keys.unwrap_or(of_queries).load(name)?];
    let [of_q, of_k] = &offsets;
    Ok([lengths("q", q, of_q)?, lengths("k", k, of_k)?])
}

/// The lengths between the offsets, which must cover the rows of a packed tensor.
fn lengths(name: &str, tensor: &Array, offsets: &Array) -> Result<Vec<usize>> {
    let &[rows, _, _] = tensor.shape() else {
        bail!("{name} is {:?}, expected [rows, heads, head_dim] with --cu-seqlens", tensor.shape());
    };
    let wrong = |what: String| Failure::new(format!("the offsets of {name} {what}"));
    let (&[_], Some(entries)) = (offsets.shape(), offsets.as_i32()) else {
        return Err(wrong(format!("are {:?}, expected [sequences + 1]", offsets.shape())));
    };
    if entries.first() != Some(&0) {
        return Err(wrong("do not begin with 0".to_owned()));
    }
    let length = |pair: &[i32]| {
        let length = i64::from(pair[1]) - i64::from(pair[0]);
        usize::try_from(length)
            .map_err(|_| wrong(format!("descend from {} to {}", pair[0], pair[1])))
    };
    let lengths = entries.windows(2).map(length).collect::<Result<Vec<_>>>()?;
    let end: usize = lengths.iter().sum();
    ensure!(end == rows, "{}", wrong(format!("end at {end}, but it has {rows} rows")).to_string());
    Ok(lengths)
}
