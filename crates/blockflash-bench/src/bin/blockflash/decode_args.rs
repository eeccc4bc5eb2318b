//! Options of `blockflash attention-decode`.

use crate::args::{Code, Common, out_path, sizes};
use crate::failure::{Result, ensure};
use crate::list_args::ListArgs;
use crate::offsets::Offsets;
use crate::outputs::Outputs;
use crate::qkv_args::{MaskName, Qkv, ScoreArgs, Written};
use blockflash_bench::case::PageSelection;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  blockflash attention-decode --random 8x1x32x128 --kv-heads 8 --seqlen-kv 4096 --check
  blockflash attention-decode --random 2x4x8x64 --seqlen-kv 512 --page-size 16 \\
      --seqused-kv 500,37 --check
  blockflash attention-decode --input cache.safetensors --seqused-kv lengths.npy --out o.npy
  blockflash attention-decode --q q.npy --k pages_k.npy --v pages_v.npy --block-table table.npy \\
      --seqused-kv lengths.npy --window 1024,0 --out o.npy --lse lse.npy
  blockflash attention-decode --random 8x1x32x128 --kv-heads 8 --kv-dtype e4m3 --check
  blockflash attention-decode --random 8x1x16x576 --kv-heads 1 --v-head-dim 512 --latent \
      --seqlen-kv 8192 --page-size 64 --dtype bf16 --check
  blockflash attention-decode --random 1x1x32x128 --kv-heads 8 --seqlen-kv 32768 --page-size 64 \\
      --select-pages 64 --check
  blockflash attention-decode --random 1x128x64x128 --kv-heads 4 --seqlen-kv 8192 --lists random \\
      --granularity 128 --entries 16 --check

q is [batch, queries, heads, head_dim]: the last queries of each sequence. The cache k and v is
[batch, capacity, heads, head_dim], or with a block table [pages, page_size, heads, head_dim]. The
block table is [batch, pages of a sequence]. A mask is aligned with the last key of each sequence.";

const USAGE: &str = "blockflash attention-decode [OPTIONS] --random BxQxHxD | --input FILE | \
                     --q FILE --k FILE --v FILE";

/// Options of `blockflash attention-decode`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, override_usage = USAGE, next_help_heading = "Input")]
pub struct Args {
    #[command(flatten)]
    pub qkv: Qkv,
    /// Draw q and the cache from N(0, 1): batch size, queries of a sequence, heads and head
    /// dimension
    #[arg(long, value_name = "BxQxHxD", value_parser = sizes::<4>)]
    pub random: Option<[usize; 4]>,
    /// Keys that a random cache holds for each sequence [default: 1024]
    #[arg(long, value_name = "N")]
    pub seqlen_kv: Option<usize>,
    /// Divide a random cache into pages of this many keys, in a random order
    #[arg(long, value_name = "N")]
    pub page_size: Option<usize>,
    /// Take the first columns of random keys for the values, `--v-head-dim` of them: the latent
    /// rows of MLA
    #[arg(long)]
    pub latent: bool,
    /// Element type of the cache, whose elements are multiplied with scales [default: the type of
    /// the files if they are of 8 bits, else the same as of q]
    #[arg(long, value_name = "e4m3|e5m2|i8")]
    pub kv_dtype: Option<Code>,
    /// What keys of 8 bits are multiplied with [default: 1; drawn for each sequence and head of a
    /// random cache]
    #[arg(long, value_name = "SCALE")]
    pub k_scale: Option<f32>,
    /// What values of 8 bits are multiplied with [default: as for keys]
    #[arg(long, value_name = "SCALE")]
    pub v_scale: Option<f32>,
    /// Read the pages of each sequence, in the order of their keys, from a file (tensor
    /// `block_table`)
    #[arg(long, value_name = "FILE", conflicts_with = "random")]
    pub block_table: Option<PathBuf>,
    /// How many keys each sequence has: a list such as 500,37 or a file (tensor `seqused_kv`)
    /// [default: as many as there is room for]
    #[arg(long, value_name = "LIST|FILE", value_parser = Offsets::parse)]
    pub seqused_kv: Option<Offsets>,

    /// full or causal (the last query is aligned with the last key) [default: causal]
    #[arg(long, value_name = "MASK", help_heading = "Operation")]
    pub mask: Option<MaskName>,
    #[command(flatten)]
    pub scores: ScoreArgs,
    /// Visit at most N pages of each sequence, at least 2, which are selected for each head of keys
    /// before each run: the first and the last one, and those whose summaries score best with the
    /// queries
    #[arg(long, value_name = "N", help_heading = "Operation",
        value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub select_pages: Option<u32>,
    /// What summarises the keys of a page: their minimum and maximum, which bound the scores, or
    /// their mean [default: bounds]
    #[arg(
        long,
        value_name = "bounds|mean",
        help_heading = "Operation",
        requires = "select_pages",
        conflicts_with = "lists"
    )]
    pub summaries: Option<Summaries>,

    #[command(flatten)]
    pub lists: ListArgs,

    #[command(flatten)]
    pub written: Written,
    /// Write the pages that were selected, i32 [batch, heads of keys, N], columns of the block
    /// table, to a .npy or .safetensors file (tensor `pages`; it may be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path, requires = "select_pages",
        conflicts_with = "lists", help_heading = "Output")]
    pub pages: Option<PathBuf>,

    #[command(flatten)]
    pub common: Common,
}

/// What is kept of the keys of a page.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Summaries {
    Bounds,
    Mean,
}

impl Args {
    /// The scales that are given, each for the whole cache.
    pub fn scales(&self, codes: bool) -> Result<[Option<f32>; 2]> {
        let given = [("--k-scale", self.k_scale), ("--v-scale", self.v_scale)];
        for (name, scale) in given {
            let Some(scale) = scale else { continue };
            ensure!(codes, "{name} is for a cache of 8 bits: see --kv-dtype");
            let fits = scale.is_finite() && scale > 0.0;
            ensure!(fits, "{name} is {scale}, but must be finite and greater than 0");
        }
        Ok(given.map(|(_, scale)| scale))
    }

    /// How pages are selected, if they are.
    pub fn selection(&self) -> Result<Option<PageSelection>> {
        let Some(room) = self.select_pages else { return Ok(None) };
        ensure!(
            self.page_size.is_some() || self.block_table.is_some(),
            "--select-pages needs a cache in pages: give --page-size or --block-table"
        );
        let statistics = if self.summaries == Some(Summaries::Mean) { 1 } else { 2 };
        Ok(Some(PageSelection { room: usize::try_from(room)?, statistics }))
    }

    /// The files to write.
    pub fn outputs(&self) -> Result<Outputs> {
        let inputs = [
            ("--block-table", self.block_table.as_ref()),
            ("--seqused-kv", self.seqused_kv.as_ref().and_then(Offsets::file)),
            self.lists.file(),
        ];
        let pages = ("--pages", "pages", self.pages.as_ref());
        self.written
            .outputs(&[pages], &[&self.qkv.files()[..], &self.scores.files(), &inputs].concat())
    }
}
