//! Options of `blockflash attention-decode`.

use crate::args::{Common, Half, Window, out_path, sizes, window};
use crate::attention_args::MaskName;
use crate::failure::Result;
use crate::offsets::Offsets;
use crate::outputs::Outputs;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  blockflash attention-decode --random 8x1x32x128 --kv-heads 8 --seqlen-kv 4096 --check
  blockflash attention-decode --random 2x4x8x64 --seqlen-kv 512 --page-size 16 \\
      --seqused-kv 500,37 --check
  blockflash attention-decode --input cache.safetensors --seqused-kv lengths.npy --out o.npy
  blockflash attention-decode --q q.npy --k pages_k.npy --v pages_v.npy --block-table table.npy \\
      --seqused-kv lengths.npy --window 1024,0 --out o.npy --lse lse.npy

q is [batch, queries, heads, head_dim]: the last queries of each sequence. The cache k and v is
[batch, capacity, heads, head_dim], or with a block table [pages, page_size, heads, head_dim]. The
block table is [batch, pages of a sequence]. A mask is aligned with the last key of each sequence.";

const USAGE: &str = "blockflash attention-decode [OPTIONS] --random BxQxHxD | --input FILE | \
                     --q FILE --k FILE --v FILE";

/// Options of `blockflash attention-decode`.
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
    /// Read the keys of the cache from a .npy file
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["q", "v"],
        conflicts_with = "random",
        help_heading = "Input",
    )]
    pub k: Option<PathBuf>,
    /// Read the values of the cache from a .npy file
    #[arg(
        long,
        value_name = "FILE",
        requires_all = ["q", "k"],
        conflicts_with = "random",
        help_heading = "Input",
    )]
    pub v: Option<PathBuf>,
    /// Draw q and the cache from N(0, 1): batch size, queries of a sequence, heads and head
    /// dimension
    #[arg(long, value_name = "BxQxHxD", value_parser = sizes::<4>, help_heading = "Input")]
    pub random: Option<[usize; 4]>,
    /// Number of heads of a random cache [default: as many as q]
    #[arg(long, value_name = "N", help_heading = "Input")]
    pub kv_heads: Option<usize>,
    /// Keys that a random cache holds for each sequence [default: 1024]
    #[arg(long, value_name = "N", help_heading = "Input")]
    pub seqlen_kv: Option<usize>,
    /// Divide a random cache into pages of so many keys, in a random order
    #[arg(long, value_name = "N", help_heading = "Input")]
    pub page_size: Option<usize>,
    /// Element type to compute in [default: the type of the files; f16 for f32, f64 and random
    /// input]
    #[arg(long, value_name = "f16|bf16", hide_possible_values = true, help_heading = "Input")]
    pub dtype: Option<Half>,
    /// Read the pages of each sequence, in the order of their keys, from a file (tensor
    /// `block_table`)
    #[arg(long, value_name = "FILE", conflicts_with = "random", help_heading = "Input")]
    pub block_table: Option<PathBuf>,
    /// How many keys each sequence has: a list such as 500,37 or a file (tensor `seqused_kv`)
    /// [default: as many as there is room for]
    #[arg(long, value_name = "LIST|FILE", value_parser = Offsets::parse, help_heading = "Input")]
    pub seqused_kv: Option<Offsets>,

    /// full or causal (the last query is aligned with the last key) [default: causal]
    #[arg(long, value_name = "MASK", hide_possible_values = true, help_heading = "Operation")]
    pub mask: Option<MaskName>,
    /// Attend to at most L keys before and R keys after the aligned key; `-` leaves a side
    /// unlimited
    #[arg(
        long,
        value_name = "L,R",
        value_parser = window,
        allow_hyphen_values = true,
        help_heading = "Operation",
    )]
    pub window: Option<Window>,
    /// Multiply the scores by this factor [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub scale: Option<f32>,
    /// Replace each score by X·tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Operation")]
    pub softcap: Option<f32>,
    /// Add one score per query head, an attention sink, to the sum of exponentials: f32 `[heads]`
    /// from a file (tensor `sink`), or `random`
    #[arg(long, value_name = "FILE|random", help_heading = "Operation")]
    pub sink: Option<PathBuf>,

    /// Write the output to a .npy or .safetensors file (tensor `o`)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub out: Option<PathBuf>,
    /// Compute the log-sum-exp, f32 [batch, heads, queries], and write it to a .npy or .safetensors
    /// file (tensor `lse`; it may be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path, help_heading = "Output")]
    pub lse: Option<PathBuf>,

    #[command(flatten)]
    pub common: Common,
}

impl Args {
    /// The files to write.
    pub fn outputs(&self) -> Result<Outputs> {
        Outputs::new(
            &[("--out", "o", self.out.as_ref()), ("--lse", "lse", self.lse.as_ref())],
            &[
                ("--input", self.input.as_ref()),
                ("--q", self.q.as_ref()),
                ("--k", self.k.as_ref()),
                ("--v", self.v.as_ref()),
                ("--block-table", self.block_table.as_ref()),
                ("--seqused-kv", self.seqused_kv.as_ref().and_then(Offsets::file)),
                ("--sink", self.sink.as_ref()),
            ],
        )
    }
}
