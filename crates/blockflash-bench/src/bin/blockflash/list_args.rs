//! Options of attention by an index, as a part of those of `blockflash attention-decode`.

use crate::decode_args::Args;
use crate::failure::{Failure, Result, ensure};
use crate::operand::Source;
use blockflash_bench::case::{DecodeData, IndexData, IndexShape, Listing};
use blockflash_ops::{DType, HeadDims};
use std::path::{Path, PathBuf};

/// Room of random lists, unless a number is given.
const ENTRIES: usize = 16;

/// Which blocks of keys each query visits.
#[derive(clap::Args)]
#[command(next_help_heading = "Operation")]
pub struct ListArgs {
    /// Visit the blocks of keys that a list names for each query (attention by an index): i32
    /// `[groups, batch * queries, room]` from a file (tensor `lists`), or `random`: the block of
    /// the query and others before it, of full sequences. Without --bias and --alibi
    #[arg(long, value_name = "FILE|random", conflicts_with = "select_pages")]
    pub lists: Option<PathBuf>,
    /// Keys of a block of lists: for random lists and on a GPU 1, 4, 16, 64 or 128 [default: 64]
    #[arg(long, value_name = "N", requires = "lists")]
    pub granularity: Option<usize>,
    /// Room of random lists [default: 16]
    #[arg(long, value_name = "N", requires = "lists")]
    pub entries: Option<usize>,
    /// Random lists of a query: 1, one for each head of keys, or for each head [default: one for
    /// each head of keys]
    #[arg(long, value_name = "N", requires = "lists")]
    pub list_groups: Option<usize>,
}

impl ListArgs {
    /// The file, with the option that names it.
    pub fn file(&self) -> (&'static str, Option<&PathBuf>) {
        ("--lists", self.lists.as_ref().filter(|path| !is_random(path)))
    }
}

fn is_random(path: &Path) -> bool {
    path == Path::new("random")
}

/// The call with the lists of its queries, which `lists` says where they come from.
pub fn with_lists(args: &Args, decode: DecodeData, lists: &Path) -> Result<IndexData> {
    let ListArgs { granularity, entries, list_groups, .. } = &args.lists;
    for (name, given) in [("--bias", &args.scores.bias), ("--alibi", &args.scores.alibi)] {
        ensure!(given.is_none(), "--lists does not take {name}");
    }
    let granularity = granularity.unwrap_or(64);
    if !is_random(lists) {
        ensure!(
            entries.is_none() && list_groups.is_none(),
            "--entries and --list-groups only apply to --lists random"
        );
        let lists = Source::open(lists, "lists")?.load(DType::I32)?;
        return Ok(IndexData { decode, lists, granularity });
    }
    let (&[batch, seqlen_q, num_heads_q, qk], &[_, page_size, num_heads_kv, _]) =
        (decode.q.shape(), decode.k.shape())
    else {
        let (q, k) = (decode.q.shape(), decode.k.shape());
        return Err(Failure::new(format!(
            "q is {q:?} and k {k:?}, expected four sizes: see --help"
        )));
    };
    let columns = decode.block_table.as_ref().map(|table| table.shape().iter().skip(1).product());
    let shape = IndexShape {
        batch,
        seqlen_q,
        seqlen_kv: page_size.saturating_mul(columns.unwrap_or(1)),
        num_heads_q,
        num_heads_kv,
        groups: list_groups.unwrap_or(num_heads_kv),
        head_dims: HeadDims::all(qk),
        page_size: decode.block_table.as_ref().map(|_| page_size),
        granularity,
        entries: entries.unwrap_or(ENTRIES),
        lists: Listing::Uniform,
        latent: false,
        dtype: decode.q.dtype(),
    };
    let lists = shape.draw_lists(args.common.seed);
    let lists = lists.map_err(|error| Failure::new(format!("--lists random: {error}")))?;
    Ok(IndexData { lists, decode, granularity })
}
