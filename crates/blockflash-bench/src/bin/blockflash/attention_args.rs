//! Options of `blockflash attention`.

use crate::args::{Common, Half, Window, out_path, sizes, window};
use crate::attention_mask::MaskArgs;
use crate::failure::Result;
use crate::offsets::Offsets;
use crate::outputs::Outputs;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  blockflash attention --random 1x2048x8x64 --mask causal --check
  blockflash attention --input qkv.safetensors --mask causal --window 1024,0 --out o.safetensors
  blockflash attention --q q.npy --k k.npy --v v.npy --dtype bf16 --out o.npy --lse lse.npy
  blockflash attention --random 1x8192x8x64 --block-mask causal+window:8+sink:1 --block 64 --check
  blockflash attention --random 1x4096x8x64 --cu-seqlens 0,1000,4096 --sink random --check

Arrays are [batch, seqlen, heads, head_dim] in f16, bf16, f32 or f64; the number of query heads is
a multiple of that of keys and values. The log-sum-exp is f32 [batch, heads, seqlen]. With
--cu-seqlens arrays are [rows, heads, head_dim], sequence i has the rows from offset i to offset
i + 1, and the log-sum-exp is [heads, rows].

A block mask in a file is a boolean tensor `mask` in .safetensors or an .npy array: [rows, cols] in
blocks for all heads, [heads, rows, cols] for a list per head, or [batch, heads, rows, cols]; or int
tensors `row_ptr`, [rows + 1], [heads, rows + 1] or [batch, heads, rows + 1], and `col_idx` in
.safetensors. The words are those that `blockflash mask show --help` lists; with `causal` among
them, --mask is causal unless it is given.";

const USAGE: &str =
    "blockflash attention [OPTIONS] --random BxSxHxD | --input FILE | --q FILE --k FILE --v FILE";

/// Options of `blockflash attention`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE)]
pub struct Args {
    /// Read the tensors q, k and v from a .safetensors file
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["q", "k", "v", "random"],
        help_heading = "Input",
    )]
    pub input: Option<PathBuf>,
    /// Read q from a .npy file
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["k", "v"],
        conflicts_with = "random",
        help_heading = "Input",
    )]
    pub q: Option<PathBuf>,
    /// Read k from a .npy file
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["q", "v"],
        conflicts_with = "random",
        help_heading = "Input",
    )]
    pub k: Option<PathBuf>,
    /// Read v from a .npy file
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["q", "k"],
        conflicts_with = "random",
        help_heading = "Input",
    )]
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
    pub mask: Option<MaskName>,
    /// See only L keys before and R keys after the aligned one; `-` leaves a side open
    #[arg(
        long,
        value_name = "L,R",
        value_parser = window,
        allow_hyphen_values = true,
        help_heading = "Operation",
    )]
    pub window: Option<Window>,
    /// Factor of the scores [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub scale: Option<f32>,
    /// Bend scores to X·tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub softcap: Option<f32>,
    /// Add a score per query head to the sum of exponentials: f32 `[heads]` from a file
    /// (tensor `sink`), or `random`
    #[arg(long, value_name = "FILE|random", help_heading = "Operation")]
    pub sink: Option<PathBuf>,

    #[command(flatten)]
    pub block_mask: MaskArgs,

    /// Use the GPU kernel whose name contains this, instead of the selected one
    #[arg(long, alias = "row", value_name = "SYMBOL", help_heading = "Operation")]
    pub kernel: Option<String>,

    /// Write the output to a .npy or .safetensors file (tensor `o`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub out: Option<PathBuf>,
    /// Compute the log-sum-exp, and write it to a .npy or .safetensors file (tensor `lse`; it may
    /// be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub lse: Option<PathBuf>,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MaskName {
    Full,
    Causal,
    CausalTopLeft,
}

impl Args {
    /// The files to write.
    pub fn outputs(&self) -> Result<Outputs> {
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
