//! Block masks in files.

use crate::failure::{Failure, Result, bail};
use crate::operand::Source;
use blockflash_bench::case::from_rows;
use blockflash_bench::io::{Array, Stored};
use blockflash_ops::{BlockGeometry, BlockMask, DType};
use std::path::Path;

/// What is known of a mask besides its file.
#[derive(Clone, Copy)]
pub struct Known<'a> {
    /// The block columns, where the file is the `.npy` file of `row_ptr`.
    pub col_idx: Option<&'a Path>,
    pub heads: Option<usize>,
    pub seqlen: Option<usize>,
    pub seqlen_kv: Option<usize>,
    /// Queries and keys of a block.
    pub block: Option<[usize; 2]>,
    /// Booleans are of pairs of tokens, not of blocks.
    pub tokens: bool,
}

/// Reads booleans, or the index arrays.
pub fn read(known: &Known<'_>, file: &Path) -> Result<BlockMask> {
    let is_bool = |source: &Source| source.stored() == Some(Stored::Bool);
    let wrong = |what: &str| bail!("{} {what}", file.display());
    // The one array of an .npy file answers to every name.
    let (row_ptr, col_idx) = match (Source::open_optional(file, "")?, known.col_idx) {
        (Some(array), None) if is_bool(&array) => {
            return from_booleans(known, Source::open(file, "mask")?);
        }
        (Some(_), None) => {
            return wrong(
                "holds integers: if it is a row_ptr, name the file of its block columns, too",
            );
        }
        (Some(array), Some(_)) if is_bool(&array) => {
            return wrong("holds booleans, so no file of block columns may be named");
        }
        (Some(_), Some(col_idx)) => (file, col_idx),
        (None, Some(_)) => {
            return wrong(
                "is not a .npy file and holds its own col_idx, so name no other file for it",
            );
        }
        (None, None) if Source::open_optional(file, "row_ptr")?.is_none() => {
            let mask = Source::open(file, "mask")?;
            return if is_bool(&mask) {
                from_booleans(known, mask)
            } else {
                wrong("has a mask that is not boolean")
            };
        }
        (None, None) => (file, file),
    };
    let index = |file, name| Source::open(file, name)?.load(DType::I32);
    if known.tokens {
        return wrong("holds lists of blocks, not booleans of tokens");
    }
    from_indices(known, &index(row_ptr, "row_ptr")?, &index(col_idx, "col_idx")?)
}

fn from_booleans(known: &Known<'_>, source: Source) -> Result<BlockMask> {
    let mask = source.load(DType::I32)?;
    let [batch, heads, rows, cols] = match *mask.shape() {
        [rows, cols] => [1, 1, rows, cols],
        [heads, rows, cols] => [1, heads, rows, cols],
        [batch, heads, rows, cols] => [batch, heads, rows, cols],
        ref other => {
            let unit = if known.tokens { "tokens" } else { "blocks" };
            bail!("mask is {other:?}, expected [rows, cols] in {unit}");
        }
    };
    if known.heads.is_some_and(|wanted| wanted != heads) {
        bail!("mask has {heads} heads, which is not what was asked for");
    }
    let [block_q, block_kv] = known.block.unwrap_or([128; 2]);
    let visible: Vec<bool> =
        mask.as_i32().unwrap_or_default().iter().map(|&visible| visible != 0).collect();
    if known.tokens {
        let given = [known.seqlen.unwrap_or(rows), known.seqlen_kv.unwrap_or(cols)];
        if given != [rows, cols] {
            bail!("the file has {rows} x {cols} tokens, not {} x {}", given[0], given[1]);
        }
        let geometry = BlockGeometry::new(rows, cols, block_q, block_kv)?;
        return Ok(BlockMask::from_token_mask(geometry, batch, heads, &visible)?);
    }
    let seqlen_q = known.seqlen.unwrap_or(rows.saturating_mul(block_q));
    let seqlen_kv = known.seqlen_kv.unwrap_or(cols.saturating_mul(block_kv));
    let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, block_q, block_kv)?;
    if [geometry.rows(), geometry.cols()] != [rows, cols] {
        bail!(
            "the file has {rows} x {cols} blocks, but {seqlen_q} x {seqlen_kv} tokens have {} x \
             {} of {block_q} x {block_kv}",
            geometry.rows(),
            geometry.cols()
        );
    }
    Ok(BlockMask::from_bool(geometry, batch, heads, &visible)?)
}

fn from_indices(known: &Known<'_>, row_ptr: &Array, col_idx: &Array) -> Result<BlockMask> {
    let wanted = known.heads;
    let contradiction = || {
        Failure::new(format!(
            "row_ptr is {:?}, which does not match {} heads",
            row_ptr.shape(),
            wanted.unwrap_or(1)
        ))
    };
    let (batch, heads, rows) = match *row_ptr.shape() {
        // Offsets that go on from head to head have one end only.
        [entries] => {
            let heads = wanted.unwrap_or(1);
            match entries.checked_sub(1).filter(|rows| heads > 0 && rows % heads == 0) {
                Some(rows) => (1, heads, rows / heads),
                None => return Err(contradiction()),
            }
        }
        [heads, entries] if entries > 0 && wanted.is_none_or(|wanted| wanted == heads) => {
            (1, heads, entries - 1)
        }
        [batch, heads, entries] if entries > 0 && wanted.is_none_or(|wanted| wanted == heads) => {
            (batch, heads, entries - 1)
        }
        [_, _] | [_, _, _] if wanted.is_some() => return Err(contradiction()),
        ref other => {
            bail!("row_ptr is {other:?}, expected [rows + 1]");
        }
    };
    let [block_q, block_kv] = known.block.unwrap_or([128; 2]);
    let seqlen_q = known.seqlen.unwrap_or(rows.saturating_mul(block_q));
    let geometry =
        BlockGeometry::new(seqlen_q, known.seqlen_kv.unwrap_or(seqlen_q), block_q, block_kv)?;
    if geometry.rows() != rows {
        bail!(
            "row_ptr has {rows} rows, but {seqlen_q} queries have {} blocks of {block_q}",
            geometry.rows()
        );
    }
    let [row_ptr_values, col_idx] =
        [row_ptr, col_idx].map(|array| array.as_i32().unwrap_or_default());
    Ok(match row_ptr.shape().len() {
        1 => from_rows(geometry, heads, row_ptr_values, col_idx)?,
        _ => BlockMask::from_parts(geometry, batch, heads, row_ptr_values, col_idx)?,
    })
}
