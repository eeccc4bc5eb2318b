//! Options of `blockflash attention`.

use crate::args::{Common, sizes};
use crate::attention_mask::MaskArgs;
use crate::failure::Result;
use crate::offsets::Offsets;
use crate::outputs::Outputs;
use crate::qkv_args::{MaskName, Qkv, ScoreArgs, Written};

const EXAMPLES: &str = "\
Examples:
  blockflash attention --random 1x2048x8x64 --mask causal --check
  blockflash attention --input qkv.safetensors --mask causal --window 1024,0 --out o.safetensors
  blockflash attention --q q.npy --k k.npy --v v.npy --dtype bf16 --out o.npy --lse lse.npy
  blockflash attention --random 1x8192x8x64 --block-mask causal+window:8+sink:1 --block 64 --check
  blockflash attention --random 1x4096x8x64 --cu-seqlens 0,1000,4096 --sink random --check
  blockflash attention --random 1x2048x8x64 --bias random --alibi --mask causal --check

Arrays are [batch, seqlen, heads, head_dim] in f16, bf16, f32 or f64. The number of query heads is
a multiple of the number of key and value heads. The log-sum-exp is f32 [batch, heads, seqlen]. With
--cu-seqlens, arrays are [rows, heads, head_dim], sequence i has the rows from offset i to offset
i + 1, and the log-sum-exp is [heads, rows].

A file with a block mask holds booleans or lists. Booleans are the tensor `mask` of a .safetensors
file or a .npy array: [rows, cols] in blocks for all heads, [heads, rows, cols] for a mask per head
or [batch, heads, rows, cols]. Lists are the integer tensors `row_ptr`, [rows + 1],
[heads, rows + 1] or [batch, heads, rows + 1], and `col_idx` of a .safetensors file.
`blockflash mask show --help` lists the words that describe a mask. If `causal` is one of them,
--mask defaults to causal.";

const USAGE: &str =
    "blockflash attention [OPTIONS] --random BxSxHxD | --input FILE | --q FILE --k FILE --v FILE";

/// Options of `blockflash attention`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE, next_help_heading = "Input")]
pub struct Args {
    #[command(flatten)]
    pub qkv: Qkv,
    /// Draw q, k and v from N(0, 1): batch size, sequence length, heads and head dimension. With
    /// --cu-seqlens, the batch size is 1 and the length counts the rows of all sequences
    #[arg(long, value_name = "BxSxHxD", value_parser = sizes::<4>)]
    pub random: Option<[usize; 4]>,
    /// Sequence length of random k and v [default: the same as q]
    #[arg(long, value_name = "N")]
    pub seqlen_kv: Option<usize>,
    /// Treat the rows of q, k and v as packed sequences. The offsets at which each sequence begins
    /// and the last one ends are a list such as 0,100,250 or a file (tensor `cu_seqlens`)
    #[arg(long, value_name = "LIST|FILE", value_parser = Offsets::parse)]
    pub cu_seqlens: Option<Offsets>,
    /// Offsets of keys and values (tensor `cu_seqlens_kv`) [default: the same as for queries]
    #[arg(long, value_name = "LIST|FILE", value_parser = Offsets::parse, requires = "cu_seqlens")]
    pub cu_seqlens_kv: Option<Offsets>,

    /// full, causal (the last query is aligned with the last key) or causal-top-left (the first
    /// query is aligned with the first key) [default: full]
    #[arg(long, value_name = "MASK", help_heading = "Operation")]
    pub mask: Option<MaskName>,
    #[command(flatten)]
    pub scores: ScoreArgs,
    #[command(flatten)]
    pub block_mask: MaskArgs,

    /// Use the first suitable GPU kernel whose name contains this text, not the selected one
    #[arg(long, alias = "row", value_name = "SYMBOL", help_heading = "Operation")]
    pub kernel: Option<String>,

    #[command(flatten)]
    pub written: Written,

    #[command(flatten)]
    pub common: Common,
}

impl Args {
    /// The files to write.
    pub fn outputs(&self) -> Result<Outputs> {
        let inputs = [
            ("--cu-seqlens", self.cu_seqlens.as_ref().and_then(Offsets::file)),
            ("--cu-seqlens-kv", self.cu_seqlens_kv.as_ref().and_then(Offsets::file)),
        ];
        let masks = self.block_mask.files();
        let inputs = [&self.qkv.files()[..], &self.scores.files(), &inputs, &masks].concat();
        self.written.outputs(&[], &inputs)
    }
}
