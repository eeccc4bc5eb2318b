//! The block mask of `blockflash attention`.

use crate::failure::{Result, bail};
use crate::mask::block;
use crate::mask_file::{self, Known};
use blockflash_bench::block_pattern::BlockPattern;
use blockflash_bench::io::Format;
use blockflash_ops::{BlockGeometry, BlockMask, Mask};
use std::path::PathBuf;

/// Which blocks are attended.
#[derive(clap::Args)]
#[command(next_help_heading = "Block mask")]
pub struct MaskArgs {
    /// Attend only within the blocks that a file lists or that words describe, such as
    /// causal+window:8+sink:1 (see `blockflash mask show --help`)
    #[arg(long, value_name = "FILE|WORDS", value_parser = source, group = "which_mask")]
    block_mask: Option<Source>,
    /// Attend only the pairs that are true in a .npy file, or in the tensor `mask` of a
    /// .safetensors file: [seqlen_q, seqlen_kv], [heads, seqlen_q, seqlen_kv] or with the batch in
    /// front
    #[arg(long, value_name = "FILE", group = "which_mask")]
    mask_file: Option<PathBuf>,
    /// Queries and keys of a block, such as 64x128, or one number for both. Both are multiples of
    /// 64 [default: 128]
    #[arg(long, value_name = "N|QxK", value_parser = block, requires = "which_mask")]
    block: Option<[usize; 2]>,
    /// Number of heads of the mask: 1, the heads of k and v, or the heads of q [default: the heads
    /// in the file; 1 for words]
    #[arg(long, value_name = "N", requires = "block_mask")]
    mask_heads: Option<usize>,
    /// Read the block columns from a .npy file, if the file of the mask is the .npy file of row_ptr
    #[arg(long, value_name = "FILE", requires = "block_mask")]
    mask_col_idx: Option<PathBuf>,
}

#[derive(Clone, Debug)]
enum Source {
    Words(BlockPattern),
    File(PathBuf),
}

impl MaskArgs {
    /// What the words say about pairs inside of blocks.
    pub fn token_mask(&self) -> Mask {
        match &self.block_mask {
            Some(Source::Words(pattern)) => pattern.token_mask(),
            _ => Mask::Full,
        }
    }

    /// The files that are read.
    pub fn files(&self) -> [(&'static str, Option<&PathBuf>); 3] {
        let file = match &self.block_mask {
            Some(Source::File(path)) => Some(path),
            _ => None,
        };
        [
            ("--block-mask", file),
            ("--mask-col-idx", self.mask_col_idx.as_ref()),
            ("--mask-file", self.mask_file.as_ref()),
        ]
    }

    /// The mask on the host; `packed` are the lengths of queries and keys of the sequences of a
    /// packed batch.
    pub fn load(
        &self,
        [seqlen_q, seqlen_kv]: [usize; 2],
        packed: Option<&[Vec<usize>; 2]>,
        seed: u64,
    ) -> Result<Option<BlockMask>> {
        let of_words =
            |pattern: &BlockPattern, [seqlen_q, seqlen_kv]: [usize; 2]| -> Result<BlockMask> {
                let [block_q, block_kv] = self.block.unwrap_or([128; 2]);
                let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?;
                Ok(pattern.mask(geometry, self.mask_heads.unwrap_or(1), seed)?)
            };
        let of_file = |file: &PathBuf, tokens| {
            if packed.is_some() {
                bail!(
                    "a mask from a file needs sequences of equal length: with --cu-seqlens, \
                     describe it by words"
                );
            }
            let known = Known {
                col_idx: self.mask_col_idx.as_deref(),
                heads: self.mask_heads,
                seqlen: Some(seqlen_q),
                seqlen_kv: Some(seqlen_kv),
                block: self.block,
                tokens,
            };
            mask_file::read(&known, file)
        };
        if let Some(file) = &self.mask_file {
            return Ok(Some(of_file(file, true)?));
        }
        Ok(Some(match (&self.block_mask, packed) {
            (None, _) => return Ok(None),
            (Some(Source::Words(_)), _) if self.mask_col_idx.is_some() => {
                bail!("--mask-col-idx needs a file in --block-mask");
            }
            (Some(Source::Words(pattern)), None) => of_words(pattern, [seqlen_q, seqlen_kv])?,
            (Some(Source::Words(pattern)), Some([q, kv])) => {
                let masks = q.iter().zip(kv).map(|(&q, &kv)| of_words(pattern, [q, kv]));
                BlockMask::packed(&masks.collect::<Result<Vec<_>>>()?.iter().collect::<Vec<_>>())?
            }
            (Some(Source::File(file)), _) => of_file(file, false)?,
        }))
    }
}

/// Words, or the name of a file; what can be read as words is words, unless a folder precedes it.
fn source(text: &str) -> std::result::Result<Source, String> {
    let path = PathBuf::from(text);
    match text.parse::<BlockPattern>() {
        Ok(pattern) => Ok(Source::Words(pattern)),
        Err(_) if Format::of(&path).is_some() || path.exists() => Ok(Source::File(path)),
        Err(error) => Err(format!("{error}, or the name of a file")),
    }
}
