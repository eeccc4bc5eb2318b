//! `blockflash attention`.

use crate::args::{Common, Half, Window, ensure, out_path, sizes, window};
use crate::failure::{Failure, Result};
use crate::operand::{Placed, Source, common_dtype, random, save};
use crate::output::{RunReport, print};
use crate::progress::Progress;
use crate::{measure, memory, table};
use blockflash_bench::check::{self, AttentionCase, Comparison};
use blockflash_bench::io::Array;
use blockflash_ops::{Align, Attention, AttentionProblem, DType, Mask, Row, Tensor};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  blockflash attention --random 1x2048x8x64 --mask causal --check
  blockflash attention --input qkv.safetensors --mask causal --window 1024,0 --out o.safetensors
  blockflash attention --q q.npy --k k.npy --v v.npy --dtype bf16 --out o.npy --lse lse.npy

Arrays are [batch, seqlen, heads, head_dim] in f16, bf16, f32 or f64; the number of query heads is a multiple of that of keys
and values. The log-sum-exp is f32 [batch, heads, seqlen].";

const USAGE: &str =
    "blockflash attention [OPTIONS] --random BxSxHxD | --input FILE | --q FILE --k FILE --v FILE";

/// Options of `blockflash attention`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct Args {
    /// Read the tensors q, k and v from a .safetensors file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["q", "k", "v", "random"], help_heading = "Input")]
    input: Option<PathBuf>,
    /// Read q from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["k", "v"], conflicts_with = "random", help_heading = "Input")]
    q: Option<PathBuf>,
    /// Read k from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "v"], conflicts_with = "random", help_heading = "Input")]
    k: Option<PathBuf>,
    /// Read v from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "k"], conflicts_with = "random", help_heading = "Input")]
    v: Option<PathBuf>,
    /// Draw q, k and v from N(0, 1): batch, seqlen, heads, head_dim
    #[arg(long, value_name = "BxSxHxD", value_parser = sizes::<4>, help_heading = "Input")]
    random: Option<[usize; 4]>,
    /// Heads of random k and v [default: as many as q]
    #[arg(long, value_name = "N", help_heading = "Input")]
    kv_heads: Option<usize>,
    /// Length of random k and v [default: that of q]
    #[arg(long, value_name = "N", help_heading = "Input")]
    seqlen_kv: Option<usize>,
    /// Element type to compute in [default: that of the files, f16 for f32, f64 and random]
    #[arg(long, value_name = "f16|bf16", hide_possible_values = true, help_heading = "Input")]
    dtype: Option<Half>,

    /// full, causal (the last query is aligned with the last key) or causal-top-left (the first with the first)
    #[arg(long, default_value = "full", hide_possible_values = true, help_heading = "Operation")]
    mask: MaskName,
    /// See only L keys before and R keys after the aligned one; `-` leaves a side open
    #[arg(long, value_name = "L,R", value_parser = window, allow_hyphen_values = true, help_heading = "Operation")]
    window: Option<Window>,
    /// Factor of the scores [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    scale: Option<f32>,
    /// Bend scores to X·tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    softcap: Option<f32>,

    /// Write the output to a .npy or .safetensors file (tensor `o`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    out: Option<PathBuf>,
    /// Write the log-sum-exp to a .npy or .safetensors file (tensor `lse`; it may be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    lse: Option<PathBuf>,

    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MaskName {
    Full,
    Causal,
    CausalTopLeft,
}

/// Runs attention once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let mask = mask(args.mask, args.window)?;
    let shared_npy = args.out.is_some() && args.out == args.lse && !is_safetensors(args.out.as_ref());
    ensure(!shared_npy, "--out and --lse name the same .npy file; only .safetensors holds both")?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;

    let [q, k, v] = operands(&args)?;
    let [placed_q, placed_k, placed_v] =
        [Placed::new(&q, &stream)?, Placed::new(&k, &stream)?, Placed::new(&v, &stream)?];
    let attention = Attention {
        mask,
        softmax_scale: args.scale,
        softcap: args.softcap,
        ..Attention::new(placed_q.view()?, placed_k.view()?, placed_v.view()?)
    };
    let problem = attention.problem()?;
    let kernel = match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => Some(blockflash_ops::attention::select(&problem, gpu)?),
        _ => None,
    };

    let mut o = Tensor::empty(&stream, problem.dtype, q.shape())?;
    let lse_shape = [problem.batch, problem.num_heads_q, problem.seqlen_q];
    let mut lse = Tensor::empty(&stream, DType::F32, &lse_shape)?;
    let mut forward = || Ok(attention.forward_into(o.view_mut(), Some(lse.view_mut()), &stream)?);
    let first_us = measure::first("attention", &stream, &mut forward)?;
    let timing = measure::repeat("attention, again", &stream, first_us, args.common.repeat, forward)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if args.out.is_some() || args.lse.is_some() || args.common.check {
        let (o, lse) = (Array::download(&o, &stream)?, Array::download(&lse, &stream)?);
        written = save(&[("o", &o, args.out.as_ref()), ("lse", &lse, args.lse.as_ref())])?;
        if args.common.check {
            let denominator = kernel.and_then(Row::denominator);
            checks = check([&q, &k, &v], &problem, [&o, &lse], denominator, args.common.seed)?;
        }
    }

    let report = RunReport {
        operation: "attention",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: [("q", &q), ("k", &k), ("v", &v)]
            .map(|(name, array)| (name, array.shape().to_vec(), problem.dtype))
            .to_vec(),
        details: details(&problem),
        flops: blockflash_ops::attention_flops(&problem).unwrap_or(0) as f64,
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

fn mask(name: MaskName, window: Option<Window>) -> Result<Mask> {
    let align = if name == MaskName::CausalTopLeft { Align::TopLeft } else { Align::BottomRight };
    Ok(match (name, window) {
        (MaskName::Full, None) => Mask::Full,
        (MaskName::Full, Some(Window { left, right })) => Mask::Window { left, right, align },
        (_, None) => Mask::Causal { align },
        (_, Some(Window { left, right: None | Some(0) })) => Mask::Window { left, right: Some(0), align },
        (_, Some(Window { right: Some(right), .. })) => {
            return Err(Failure::new(format!(
                "--window with {right} keys after the query contradicts a causal --mask: the right side must be 0 or -"
            )));
        }
    })
}

fn operands(args: &Args) -> Result<[Array; 3]> {
    let dtype = args.dtype.map(DType::from);
    if let Some([batch, seqlen_q, heads_q, head_dim]) = args.random {
        let q = [batch, seqlen_q, heads_q, head_dim];
        let kv = [batch, args.seqlen_kv.unwrap_or(seqlen_q), args.kv_heads.unwrap_or(heads_q), head_dim];
        memory::ensure("q, k, v and o", memory::size(&[&q, &kv, &kv, &q], DType::F16.size()))?;
        let draw = |what, shape: &[usize], lane| {
            random(what, dtype.unwrap_or(DType::F16), shape, args.common.seed, lane)
        };
        return Ok([
            draw("q", &[batch, seqlen_q, heads_q, head_dim], 0)?,
            draw("k", &kv, 1)?,
            draw("v", &kv, 2)?,
        ]);
    }
    // clap does not enforce `requires` where what is required conflicts with another option that is given.
    ensure(
        args.kv_heads.is_none() && args.seqlen_kv.is_none(),
        "--kv-heads and --seqlen-kv only apply to --random",
    )?;
    let sources = match (&args.input, &args.q, &args.k, &args.v) {
        (Some(file), ..) => [Source::open(file, "q")?, Source::open(file, "k")?, Source::open(file, "v")?],
        (None, Some(q), Some(k), Some(v)) => {
            [Source::open(q, "q")?, Source::open(k, "k")?, Source::open(v, "v")?]
        }
        _ => {
            return Err(Failure::new(
                "nothing to compute: give --input FILE, or --q, --k and --v, or --random BxSxHxD (see --help)",
            ));
        }
    };
    let dtype = common_dtype(dtype, &sources)?;
    let [q, k, v] = sources;
    Ok([q.load(dtype)?, k.load(dtype)?, v.load(dtype)?])
}

fn is_safetensors(path: Option<&PathBuf>) -> bool {
    path.and_then(|path| path.extension())
        .is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"))
}

fn details(problem: &AttentionProblem) -> Vec<(&'static str, String)> {
    let aligned = |align| match align {
        Align::BottomRight if problem.seqlen_q != problem.seqlen_kv => ", bottom-right",
        Align::TopLeft if problem.seqlen_q != problem.seqlen_kv => ", top-left",
        _ => "",
    };
    let keys = |side: Option<usize>| side.map_or("all".to_owned(), |keys| table::count(keys as u64));
    let mask = match problem.mask {
        Mask::Full => "full".to_owned(),
        Mask::Causal { align } => format!("causal{}", aligned(align)),
        Mask::Window { left, right, align } => {
            format!("window, {} keys before and {} after{}", keys(left), keys(right), aligned(align))
        }
    };
    let mut details = vec![("mask", mask), ("scale", format!("{}", problem.softmax_scale))];
    if let Some(softcap) = problem.softcap {
        details.push(("softcap", format!("{softcap}")));
    }
    details
}

fn check(
    [q, k, v]: [&Array; 3],
    problem: &AttentionProblem,
    [o, lse]: [&Array; 2],
    denominator: Option<DType>,
    seed: u64,
) -> Result<Vec<(&'static str, Comparison)>> {
    let bottom_right = problem.seqlen_kv as i64 - problem.seqlen_q as i64;
    let (left, right, align) = match problem.mask {
        Mask::Full => (None, None, Align::TopLeft),
        Mask::Causal { align } => (None, Some(0), align),
        Mask::Window { left, right, align } => (left, right, align),
    };
    let case = AttentionCase {
        q,
        k,
        v,
        lengths: None,
        blocks: None,
        diagonal: if align == Align::TopLeft { 0 } else { bottom_right },
        left,
        right,
        softmax_scale: problem.softmax_scale,
        softcap: problem.softcap,
        denominator,
    };
    let progress = Progress::fractions("checking");
    let [o, lse] = check::attention(&case, o, lse, seed, |done| progress.fraction(done))?;
    Ok(vec![("o", o), ("lse", lse)])
}
