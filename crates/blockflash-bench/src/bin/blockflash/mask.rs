//! `blockflash mask`.

use crate::args::sizes;
use crate::failure::{Failure, Result, bail, ensure};
use crate::mask_file::{self, Known};
use crate::output::print;
use crate::progress::Progress;
use crate::table::{self, Facts};
use blockflash_bench::block_pattern::BlockPattern;
use blockflash_bench::case::Case;
use blockflash_bench::chart::{Chart, MAX_SHOWN, MaskPicture};
use blockflash_ops::{BlockGeometry, BlockMask, Mask};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
A pattern is one or more words joined by +. Lengths are in blocks. `causal` removes
the blocks that a causal mask hides that the other words would visit:
  full  window:8 (before and behind)  window:8,0  dilated:2,4  strided:4,1  sink:1  global:2
  uniform:0.25  random:0.25  power_law:0.25  banded:0.25  full_rows:0.25  clustered:0.25
  butterfly:0.25  paired:0.25
  (fraction of the blocks, drawn for each head as in benchmark cases)

A file holds booleans or lists. Booleans are the tensor `mask` of a .safetensors file or a .npy
array: [rows, cols], [heads, rows, cols] or [batch, heads, rows, cols] in blocks, or with --tokens
in queries and keys, which makes blocks that are full, partial or not visited. Lists are the
integer tensors `row_ptr` ([rows + 1], [heads, rows + 1] or [batch, heads, rows + 1]) and `col_idx`
of a .safetensors file, or row_ptr in an .npy file and col_idx in the file that --col-idx names.

Examples:
  blockflash mask show --pattern causal+window:8+sink:1 --seqlen 65536 --out mask.svg
  blockflash mask show mask.npy --block 128 --out mask.svg
  blockflash mask show attn_mask.npy --tokens --block 64 --out mask.svg
  blockflash mask show --case b1_s16384_h16_d128_q128kv128_d0.25_power_law_full_bf16 \\
      --head 0,1,2,3 --out mask.svg";

/// Options of `blockflash mask`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Count the blocks of a mask and draw it
    Show(Box<Show>),
}

#[derive(clap::Args)]
#[command(
    after_help = EXAMPLES,
    override_usage = "blockflash mask show [OPTIONS] FILE | --pattern WORDS --seqlen N | --case ID",
)]
pub struct Show {
    /// Read the mask from a .npy or .safetensors file
    #[arg(value_name = "FILE", conflicts_with_all = ["pattern", "case"])]
    file: Option<PathBuf>,
    /// Read the block columns from a .npy file, if FILE is the .npy file of row_ptr
    #[arg(long, value_name = "FILE", requires = "file")]
    col_idx: Option<PathBuf>,
    /// FILE holds booleans of queries and keys, not of blocks
    #[arg(long, requires = "file", conflicts_with = "col_idx")]
    tokens: bool,
    /// Make the mask from words, for example causal+window:8+sink:1
    #[arg(long, value_name = "WORDS", requires = "seqlen")]
    pattern: Option<BlockPattern>,
    /// Take the mask of a block-sparse benchmark case
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["pattern", "seqlen", "seqlen_kv", "block", "heads", "causal"],
    )]
    case: Option<Case>,
    /// Number of queries [default: the number that fills the blocks of the file]
    #[arg(long, value_name = "N")]
    seqlen: Option<usize>,
    /// Number of keys [default: the number of queries; with a boolean file, the number that fills
    /// its blocks]
    #[arg(long, value_name = "N")]
    seqlen_kv: Option<usize>,
    /// Queries and keys of a block, such as 64x128, or one number for both [default: 128]
    #[arg(long, value_name = "N|QxK", value_parser = block)]
    block: Option<[usize; 2]>,
    /// Number of heads of a pattern, or of a one-dimensional row_ptr that continues from head to
    /// head [default: 1]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Count only the pairs that a causal mask shows, too
    #[arg(long)]
    causal: bool,
    /// Draw only these heads, separated by commas [default: all, at most 16]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    head: Vec<usize>,
    /// Draw this batch entry
    #[arg(long, value_name = "N", default_value_t = 0)]
    batch: usize,
    /// Seed of random patterns
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write a picture to a .svg file (may be repeated)
    #[arg(long, value_name = "FILE", value_parser = picture_path)]
    out: Vec<PathBuf>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// A mask, what it is called, and what hides pairs inside its blocks.
struct Named {
    mask: BlockMask,
    name: String,
    token_mask: Mask,
}

/// Counts and draws.
pub fn run(args: Args) -> Result<ExitCode> {
    let Action::Show(show) = args.action;
    let named = show.mask()?;
    let shown = show.shown(&named.mask)?;
    let picture = MaskPicture { mask: &named.mask, name: &named.name, shown: &shown };
    if !show.out.is_empty() {
        let _progress = Progress::spinner("drawing");
        let drawing = picture.draw()?;
        drawing.write(&show.out)?;
    }
    print(&show.report(&named)?)?;
    Ok(ExitCode::SUCCESS)
}

impl Show {
    fn mask(&self) -> Result<Named> {
        let named = |mask, name, token_mask| Named { mask, name, token_mask };
        match (&self.file, &self.pattern, &self.case) {
            (Some(file), ..) => {
                let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                Ok(named(mask_file::read(&self.known(), file)?, name, self.token_mask(Mask::Full)))
            }
            (None, Some(pattern), _) => {
                let seqlen = self.seqlen.unwrap_or(0); // clap asks for it
                let [block_q, block_kv] = self.block.unwrap_or([128; 2]);
                let geometry = BlockGeometry::new(
                    seqlen,
                    self.seqlen_kv.unwrap_or(seqlen),
                    block_q,
                    block_kv,
                )?;
                let mask = pattern.mask(geometry, self.heads.unwrap_or(1), self.seed)?;
                Ok(named(mask, pattern.to_string(), self.token_mask(pattern.token_mask())))
            }
            (None, None, Some(case)) => {
                let sparse = case.attention().and_then(|shape| shape.block_sparse());
                let sparse =
                    sparse.ok_or_else(|| Failure::new(format!("{case} has no block mask")))?;
                let (shape, lists) = (sparse.shape, sparse.lists);
                let name = format!("{} {}, {}", lists.pattern, lists.density, shape.mask);
                Ok(named(sparse.block_mask(self.seed)?, name, shape.mask()))
            }
            (None, None, None) => bail!(
                "nothing to show: give FILE, or --pattern WORDS and --seqlen N, or --case ID (see \
                 --help)"
            ),
        }
    }

    fn known(&self) -> Known<'_> {
        Known {
            col_idx: self.col_idx.as_deref(),
            heads: self.heads,
            seqlen: self.seqlen,
            seqlen_kv: self.seqlen_kv,
            block: self.block,
            tokens: self.tokens,
        }
    }

    fn token_mask(&self, own: Mask) -> Mask {
        if self.causal { Mask::causal() } else { own }
    }

    fn shown(&self, mask: &BlockMask) -> Result<Vec<[usize; 2]>> {
        let heads = match self.head.is_empty() {
            true => (0..mask.heads().min(MAX_SHOWN)).collect(),
            false => self.head.clone(),
        };
        ensure!(
            self.batch < mask.batch(),
            "--batch {}, but the mask has {}",
            self.batch,
            mask.batch()
        );
        if let Some(head) = heads.iter().find(|&&head| head >= mask.heads()) {
            bail!("--head {head}, but the mask has {} heads", mask.heads());
        }
        Ok(heads.into_iter().map(|head| [self.batch, head]).collect())
    }

    fn report(&self, Named { mask, name, token_mask }: &Named) -> Result<String> {
        let pairs = mask.visited_pairs(*token_mask)?;
        let groups = (mask.batch() * mask.heads()) as u64;
        let all = groups * token_mask.visited_pairs(mask.seqlen_q(), mask.seqlen_kv());
        let of_all = if all == 0 { 0.0 } else { pairs as f64 / all as f64 };
        let blocks = groups * mask.rows() as u64 * mask.cols() as u64;
        let bit_bytes =
            mask.bits().map_or(0, |[_, words]| 4 * words.shape().iter().product::<usize>());
        let written: Vec<_> = self.out.iter().map(|path| path.display().to_string()).collect();
        if self.json {
            return Ok(serde_json::to_string(&json!({
                "name": name, "batch": mask.batch(), "heads": mask.heads(),
                "seqlen_q": mask.seqlen_q(), "seqlen_kv": mask.seqlen_kv(),
                "block_q": mask.block_q(), "block_kv": mask.block_kv(),
                "blocks": blocks, "visited_blocks": mask.nnz(), "density": mask.density(),
                "partial_blocks": mask.partial_blocks()?, "bit_bytes": bit_bytes,
                "imbalance": mask.imbalance()?, "visited_pairs": pairs, "pairs": all,
                "written": written,
            }))?);
        }
        let mut facts = Facts::default();
        facts.add("mask", name);
        facts.add("tokens", format!("{} x {}", mask.seqlen_q(), mask.seqlen_kv()));
        facts.add("blocks of", format!("{} x {}", mask.block_q(), mask.block_kv()));
        facts.add(
            "batch, heads",
            format!("{}, {} (1: the same for all)", mask.batch(), mask.heads()),
        );
        let visited = table::count(mask.nnz() as u64);
        facts.add(
            "visited",
            format!("{visited} of {} blocks, density {:.4}", table::count(blocks), mask.density()),
        );
        if bit_bytes > 0 {
            let partial = table::count(mask.partial_blocks()? as u64);
            let bytes = table::count(bit_bytes as u64);
            facts.add("partial", format!("{partial} of them, with {bytes} bytes of bits"));
        }
        facts.add("imbalance", format!("{:.2} (longest row / mean row)", mask.imbalance()?));
        let hidden =
            if *token_mask == Mask::Full { "all" } else { "those that the causal mask shows" };
        facts.add("pairs", format!("{}, {:.2} % of {hidden}", table::count(pairs), 100.0 * of_all));
        written.iter().for_each(|file| facts.add("written", file));
        Ok(facts.to_string())
    }
}

/// `128`, `64x128`.
pub fn block(text: &str) -> std::result::Result<[usize; 2], String> {
    let one = || text.trim().parse().map(|size| [size; 2]);
    sizes::<2>(text)
        .or_else(|_| one())
        .map_err(|_| "expected a block size, for example 128 or 64x128".to_owned())
}

/// A picture to write: the name must say the format.
fn picture_path(text: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if Chart::accepts(&path) { Ok(path) } else { Err("the name must end in .svg".to_owned()) }
}
