//! `blockflash attention`.

use crate::args::{Common, Half, Window, out_path, sizes, window};
use crate::attention_mask::MaskArgs;
use crate::attention_operands::{Offsets, Operands};
use crate::attention_result::{check, details, flops};
use crate::failure::{Failure, Result};
use crate::measure;
use crate::operand::Placed;
use crate::output::{RunReport, print};
use crate::outputs::Outputs;
use blockflash_bench::io::Array;
use blockflash_ops::attention::{accepts, select};
use blockflash_ops::{
    Align, Attention, AttentionProblem, CuSeqlens, DType, Device, Mask, Operation, Row, Tensor,
};
use blockflash_sys::manifest;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  blockflash attention --random 1x2048x8x64 --mask causal --check
  blockflash attention --input qkv.safetensors --mask causal --window 1024,0 --out o.safetensors
  blockflash attention --q q.npy --k k.npy --v v.npy --dtype bf16 --out o.npy --lse lse.npy
  blockflash attention --random 1x8192x8x64 --block-mask causal+window:8+sink:1 --block 64 --check
  blockflash attention --random 1x4096x8x64 --cu-seqlens 0,1000,4096 --sink random --check

Arrays are [batch, seqlen, heads, head_dim] in f16, bf16, f32 or f64; the number of query heads is a
multiple of that of keys and values. The log-sum-exp is f32 [batch, heads, seqlen]. With --cu-seqlens
arrays are [rows, heads, head_dim], sequence i has the rows from offset i to offset i + 1, and the
log-sum-exp is [heads, rows].

A block mask in a file is a boolean tensor `mask` in .safetensors or an .npy array, [rows, cols] in blocks
for all heads, [heads, rows, cols] for a list per head, or [batch, heads, rows, cols]; or int tensors
`row_ptr`, [rows + 1], [heads, rows + 1] or [batch, heads, rows + 1], and `col_idx` in .safetensors. The
words are those that `blockflash mask show --help` lists; with `causal` among them, --mask is causal unless
it is given.";

const USAGE: &str =
    "blockflash attention [OPTIONS] --random BxSxHxD | --input FILE | --q FILE --k FILE --v FILE";

/// Options of `blockflash attention`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct Args {
    /// Read the tensors q, k and v from a .safetensors file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["q", "k", "v", "random"], help_heading = "Input")]
    pub input: Option<PathBuf>,
    /// Read q from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["k", "v"], conflicts_with = "random", help_heading = "Input")]
    pub q: Option<PathBuf>,
    /// Read k from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "v"], conflicts_with = "random", help_heading = "Input")]
    pub k: Option<PathBuf>,
    /// Read v from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "k"], conflicts_with = "random", help_heading = "Input")]
    pub v: Option<PathBuf>,
    /// Draw q, k and v from N(0, 1): batch, seqlen (with --cu-seqlens 1 and all rows), heads,
    /// head_dim
    #[arg(long, value_name = "BxSxHxD", value_parser = sizes::<4>, help_heading = "Input")]
    pub random: Option<[usize; 4]>,
    /// Heads of random k and v [default: as many as q]
    #[arg(long, value_name = "N", help_heading = "Input")]
    pub kv_heads: Option<usize>,
    /// Length of random k and v [default: that of q]
    #[arg(long, value_name = "N", help_heading = "Input")]
    pub seqlen_kv: Option<usize>,
    /// Element type to compute in [default: that of the files, f16 for f32, f64 and random]
    #[arg(long, value_name = "f16|bf16", hide_possible_values = true, help_heading = "Input")]
    pub dtype: Option<Half>,
    /// Pack sequences: the rows at which each begins and the last one ends, 0,100,250, or a file
    /// (tensor `cu_seqlens`)
    #[arg(long, value_name = "LIST|FILE", value_parser = Offsets::parse, help_heading = "Input")]
    pub cu_seqlens: Option<Offsets>,
    /// The same of keys and values, where they are others (tensor `cu_seqlens_kv`)
    #[arg(
        long,
        value_name = "LIST|FILE",
        value_parser = Offsets::parse,
        requires = "cu_seqlens",
        help_heading = "Input"
    )]
    pub cu_seqlens_kv: Option<Offsets>,

    /// full, causal (the last query is aligned with the last key) or causal-top-left (the first
    /// with the first) [default: full]
    #[arg(long, value_name = "MASK", hide_possible_values = true, help_heading = "Operation")]
    mask: Option<MaskName>,
    /// See only L keys before and R keys after the aligned one; `-` leaves a side open
    #[arg(long, value_name = "L,R", value_parser = window, allow_hyphen_values = true, help_heading = "Operation")]
    window: Option<Window>,
    /// Factor of the scores [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    scale: Option<f32>,
    /// Bend scores to X·tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    softcap: Option<f32>,
    /// Add a score per query head to the sum of exponentials: f32 `[heads]` from a file
    /// (tensor `sink`), or `random`
    #[arg(long, value_name = "FILE|random", help_heading = "Operation")]
    pub sink: Option<PathBuf>,

    #[command(flatten)]
    block_mask: MaskArgs,

    /// Use the GPU kernel whose name contains this, instead of the selected one
    #[arg(long, value_name = "SYMBOL", help_heading = "Operation")]
    row: Option<String>,

    /// Write the output to a .npy or .safetensors file (tensor `o`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    out: Option<PathBuf>,
    /// Compute the log-sum-exp, and write it to a .npy or .safetensors file (tensor `lse`; it may
    /// be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    lse: Option<PathBuf>,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MaskName {
    Full,
    Causal,
    CausalTopLeft,
}

/// Runs attention once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let outputs = args.outputs()?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;

    let operands = Operands::new(&args)?;
    let Operands { q, k, v, sink, packed } = &operands;
    let place = |array| Placed::new(array, &stream);
    let [placed_q, placed_k, placed_v] = [place(q)?, place(k)?, place(v)?];
    let placed_sink = sink.as_ref().map(place).transpose()?;
    let offsets = match packed {
        Some(packed) => {
            Some((packed.longest(), place(&packed.offsets[0])?, place(&packed.offsets[1])?))
        }
        None => None,
    };
    let cu_seqlens = match &offsets {
        Some(([max_seqlen_q, max_seqlen_kv], q, kv)) => Some(CuSeqlens {
            q: q.view()?,
            kv: kv.view()?,
            max_seqlen_q: *max_seqlen_q,
            max_seqlen_kv: *max_seqlen_kv,
        }),
        None => None,
    };
    let attention = Attention {
        mask: mask(args.mask, args.window, args.block_mask.token_mask())?,
        softmax_scale: args.scale,
        softcap: args.softcap,
        sink: placed_sink.as_ref().map(Placed::view).transpose()?,
        cu_seqlens,
        ..Attention::new(placed_q.view()?, placed_k.view()?, placed_v.view()?)
    };
    attention.check_cu_seqlens(&stream)?;
    let lengths = packed.as_ref().map(|packed| &packed.lengths);
    let block_mask = args.block_mask.load(&attention.problem()?, lengths, args.common.seed)?;
    let placed_mask = block_mask.as_ref().map(|mask| mask.to(&stream)).transpose()?;
    let attention = Attention { block_mask: placed_mask.as_ref(), ..attention };
    let with_lse = outputs.has("lse") || args.common.check;
    let problem = attention.problem()?;
    let problem = if with_lse { problem.with_lse() } else { problem };
    let kernel = kernel(args.row.as_deref(), &problem, &device)?;

    let mut o = Tensor::empty(&stream, problem.dtype, q.shape())?;
    let lse_shape = match *q.shape() {
        [rows, heads, _] => vec![heads, rows],
        _ => vec![problem.batch, problem.num_heads_q, problem.seqlen_q],
    };
    let mut lse = with_lse.then(|| Tensor::empty(&stream, DType::F32, &lse_shape)).transpose()?;
    let mut forward = || {
        let (o, lse) = (o.view_mut(), lse.as_mut().map(Tensor::view_mut));
        match kernel.filter(|_| args.row.is_some()) {
            Some(row) => attention.run_with(row, (o, lse), &stream)?,
            None => attention.forward_into(o, lse, &stream)?,
        }
        Ok(())
    };
    let first_us = measure::first("attention", &stream, &mut forward)?;
    let timing =
        measure::repeat("attention, again", &stream, first_us, args.common.repeat, forward)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if outputs.has("o") || with_lse {
        let o = Array::download(&o, &stream)?;
        let lse = lse.as_ref().map(|lse| Array::download(lse, &stream)).transpose()?;
        let results = [Some(("o", &o)), lse.as_ref().map(|lse| ("lse", lse))];
        written = outputs.save(&results.into_iter().flatten().collect::<Vec<_>>())?;
        if let (Some(lse), true) = (&lse, args.common.check) {
            let (mask, seed) = (block_mask.as_ref(), args.common.seed);
            checks = check(&operands, &problem, mask, [&o, lse], seed)?;
        }
    }

    let report = RunReport {
        operation: "attention",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: [("q", q), ("k", k), ("v", v)]
            .map(|(name, array)| (name, array.shape().to_vec(), problem.dtype))
            .to_vec(),
        details: details(&operands, &problem, block_mask.as_ref()),
        flops: flops(&operands, &problem, block_mask.as_ref())?,
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

/// The kernel that computes the problem, `None` on the CPU: the first whose name contains `row`, or
/// the selected one.
fn kernel(
    row: Option<&str>,
    problem: &AttentionProblem,
    device: &Device,
) -> Result<Option<&'static Row>> {
    let Some(gpu) = device.cuda_properties().filter(|_| !problem.is_empty()) else {
        return match row {
            Some(_) => Err(Failure::new("--row names a GPU kernel, and none computes this")),
            None => Ok(None),
        };
    };
    let Some(name) = row else { return Ok(Some(select(problem, gpu)?)) };
    let mut rows = manifest::rows().iter().filter(|row| row.symbol().contains(name));
    rows.find(|row| accepts(row, problem, gpu).is_ok()).map(Some).ok_or_else(|| {
        Failure::new(format!("no kernel whose name contains {name} computes this on this GPU"))
    })
}

impl Args {
    fn outputs(&self) -> Result<Outputs> {
        let inputs = [
            ("--input", self.input.as_ref()),
            ("--q", self.q.as_ref()),
            ("--k", self.k.as_ref()),
            ("--v", self.v.as_ref()),
            ("--sink", self.sink.as_ref()),
            ("--cu-seqlens", self.cu_seqlens.as_ref().and_then(Offsets::file)),
            ("--cu-seqlens-kv", self.cu_seqlens_kv.as_ref().and_then(Offsets::file)),
        ];
        let inputs = [&inputs[..], &self.block_mask.files()].concat();
        Outputs::new(
            &[("--out", "o", self.out.as_ref()), ("--lse", "lse", self.lse.as_ref())],
            &inputs,
        )
    }
}

/// The token mask; `of_words` is what the words of a block mask say of it.
fn mask(name: Option<MaskName>, window: Option<Window>, of_words: Mask) -> Result<Mask> {
    let name =
        name.unwrap_or(if of_words == Mask::Full { MaskName::Full } else { MaskName::Causal });
    let align = if name == MaskName::CausalTopLeft { Align::TopLeft } else { Align::BottomRight };
    Ok(match (name, window) {
        (MaskName::Full, None) => Mask::Full,
        (MaskName::Full, Some(Window { left, right })) => Mask::Window { left, right, align },
        (_, None) => Mask::Causal { align },
        (_, Some(Window { left, right: None | Some(0) })) => {
            Mask::Window { left, right: Some(0), align }
        }
        (_, Some(Window { right: Some(right), .. })) => {
            return Err(Failure::new(format!(
                "--window with {right} keys after the query contradicts a causal --mask: the right side must be 0 or -"
            )));
        }
    })
}
