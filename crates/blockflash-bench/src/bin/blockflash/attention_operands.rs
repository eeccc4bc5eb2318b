//! Operands of `blockflash attention`.

use crate::args::ensure;
use crate::attention::call;
use crate::attention_args::Args;
use crate::failure::{Failure, Result};
use crate::offsets::Offsets;
use crate::operand::{Source, StandIn, common_dtype, load_all, random};
use blockflash_bench::io::Array;
use blockflash_bench::memory;
use blockflash_ops::DType;
use std::path::Path;

/// What is computed on the host.
pub struct Operands {
    pub q: Array,
    pub k: Array,
    pub v: Array,
    /// f32 `[heads]`.
    pub sink: Option<Array>,
    pub packed: Option<Packed>,
}

/// The sequences of a packed batch, which cover the rows of q and the rows of k and v.
pub struct Packed {
    /// i32 `[batch + 1]`, of the queries and of the keys.
    pub offsets: [Array; 2],
    pub lengths: [Vec<usize>; 2],
}

impl Operands {
    pub fn new(args: &Args) -> Result<Self> {
        let [q, k, v] = tensors(args)?;
        let packed = args
            .cu_seqlens
            .as_ref()
            .map(|offsets| Packed::new(args, offsets, &q, &k))
            .transpose()?;
        let sink =
            args.scores.sink.as_deref().map(|path| sink(path, &q, args.common.seed)).transpose()?;
        Ok(Self { q, k, v, sink, packed })
    }
}

/// Attention sinks of the heads of q, from a file or random.
pub fn sink(path: &Path, q: &Array, seed: u64) -> Result<Array> {
    if path != Path::new("random") {
        return Source::open(path, "sink")?.load(DType::F32);
    }
    let &[.., heads, _] = q.shape() else {
        return Err(Failure::new(format!("q is {:?}, which has no heads", q.shape())));
    };
    random("sink", DType::F32, &[heads], seed, 3)
}

fn tensors(args: &Args) -> Result<[Array; 3]> {
    let dtype = args.qkv.dtype();
    let packed = args.cu_seqlens.is_some();
    if let Some([batch, seqlen_q, heads_q, head_dim]) = args.random {
        let q = [batch, seqlen_q, heads_q, head_dim];
        let kv = [
            batch,
            args.seqlen_kv.unwrap_or(seqlen_q),
            args.qkv.kv_heads.unwrap_or(heads_q),
            head_dim,
        ];
        ensure(!packed || batch == 1, "--cu-seqlens divides the rows of --random 1xROWSxHxD")?;
        let dtype = dtype.unwrap_or(DType::F16);
        memory::ensure("q, k, v and o", memory::size(&[&q, &kv, &kv, &q], dtype.size()))?;
        if !packed {
            refuse(args, dtype, [&q, &kv])?;
        }
        let draw = |what, shape: [usize; 4], lane| {
            let shape = if packed { &shape[1..] } else { &shape[..] };
            random(what, dtype, shape, args.common.seed, lane)
        };
        return Ok([draw("q", q, 0)?, draw("k", kv, 1)?, draw("v", kv, 2)?]);
    }
    // clap does not enforce `requires` where what is required conflicts with another option that is
    // given.
    ensure(
        args.qkv.kv_heads.is_none() && args.seqlen_kv.is_none(),
        "--kv-heads and --seqlen-kv only apply to --random",
    )?;
    let sources = args.qkv.sources("BxSxHxD")?;
    let dtype = common_dtype(dtype, &sources)?;
    let o = memory::size(&[sources[0].shape()?], dtype.size());
    if !packed {
        refuse(args, dtype, [sources[0].shape()?, sources[1].shape()?])?;
    }
    load_all(sources, dtype, o)
}

/// Refuses a call whose sizes or options do not fit before a tensor of it is drawn or read.
fn refuse(args: &Args, dtype: DType, [q, kv]: [&[usize]; 2]) -> Result<()> {
    let (Some(q), Some(kv)) = (StandIn::new(dtype, q), StandIn::new(dtype, kv)) else {
        return Ok(());
    };
    call(args, [q.view()?, kv.view()?, kv.view()?])?.problem()?;
    Ok(())
}

impl Packed {
    fn new(args: &Args, of_queries: &Offsets, q: &Array, k: &Array) -> Result<Self> {
        let of_keys = args.cu_seqlens_kv.as_ref();
        let offsets = [
            of_queries.load("cu_seqlens")?,
            of_keys.unwrap_or(of_queries).load(
                // Where one file has both, each has its name.
                if of_keys.is_some() { "cu_seqlens_kv" } else { "cu_seqlens" },
            )?,
        ];
        let [lengths_q, lengths_kv] = [("q", q, &offsets[0]), ("k", k, &offsets[1])]
            .map(|(name, tensor, offsets)| lengths(name, tensor, offsets));
        Ok(Self { lengths: [lengths_q?, lengths_kv?], offsets })
    }

    /// The most queries and keys of a sequence.
    pub fn longest(&self) -> [usize; 2] {
        self.lengths.each_ref().map(|lengths| lengths.iter().copied().max().unwrap_or(0))
    }
}

/// The lengths between the offsets, which must cover the rows of a packed tensor.
fn lengths(name: &str, tensor: &Array, offsets: &Array) -> Result<Vec<usize>> {
    let &[rows, _, _] = tensor.shape() else {
        return Err(Failure::new(format!(
            "{name} is {:?}, expected [rows, heads, head_dim] with --cu-seqlens",
            tensor.shape()
        )));
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
    ensure(end == rows, &wrong(format!("end at {end}, but it has {rows} rows")).to_string())?;
    Ok(lengths)
}
