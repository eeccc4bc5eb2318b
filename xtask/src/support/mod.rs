//! The support tables of the README and of the guide, and the sizes of images in ARCHITECTURE.md,
//! generated from the manifest.

mod detailed;
mod sizes;
mod summary;

use crate::workspace::{read, root, write};
use anyhow::{Context, Result};
use blockflash_sys::manifest::{self, Size, Support};
use blockflash_sys::{DType, Kernel, Target};

const BEGIN: &str = "<!-- support:begin -->\n";
const END: &str = "<!-- support:end -->";

/// Blocks of block masks have this many queries and keys, or multiples.
const SMALLEST_BLOCK: u32 = 64;

/// A table in Markdown.
type Table = fn(&[Kernel]) -> String;
/// The pages with their tables.
const PAGES: [(&str, Table); 3] = [
    ("README.md", summary::markdown),
    ("docs/src/support.md", detailed::markdown),
    ("ARCHITECTURE.md", sizes::markdown),
];

/// One size of an operation that a kernel computes.
struct Computed {
    /// Position among the operations.
    operation: usize,
    block_mask: bool,
    size: Size,
    dtype: DType,
    target: Target,
}

impl Computed {
    /// What head dimensions are multiples of: 16 bytes, read at once.
    fn multiple(&self) -> u32 {
        16 / self.dtype.size() as u32
    }
}

/// The operations in the order of the manifest, and what kernels compute of them.
fn computed(kernels: &[Kernel]) -> (Vec<&'static str>, Vec<Computed>) {
    let (mut operations, mut all) = (Vec::new(), Vec::new());
    let width = |kernel: &Kernel| {
        kernel.attention_tile().filter(|tile| tile.takes_block_masks()).map(|tile| tile.head_dims)
    };
    // Of codes or not, on the target.
    let peers = |kernel: &Kernel, other: &&Kernel| {
        let is_code = |of: &Kernel| of.attention_tile().is_some_and(|tile| tile.types.q.is_code());
        (other.target, is_code(other)) == (kernel.target, is_code(kernel))
    };
    for kernel in kernels {
        let Some(Support { operation, size, dtype }) = kernel.family().supports() else { continue };
        let known = operations.iter().position(|known| *known == operation);
        let operation = known.unwrap_or_else(|| {
            operations.push(operation);
            operations.len() - 1
        });
        // The widest tile accepts every head dimension; if it divides the smallest blocks, it
        // accepts every mask, too.
        let takes_masks = kernel.attention_tile().is_some_and(|tile| {
            let widest =
                kernels.iter().filter(|other| peers(kernel, other)).filter_map(width).max();
            let divides = |&side: &u32| SMALLEST_BLOCK.is_multiple_of(side);
            tile.takes_block_masks()
                && Some(tile.head_dims) == widest
                && [tile.block_q, tile.block_kv].iter().all(divides)
        });
        let target = kernel.target;
        all.push(Computed { operation, block_mask: false, size, dtype, target });
        if takes_masks {
            let size = Size::Block(SMALLEST_BLOCK);
            all.push(Computed { operation, block_mask: true, size, dtype, target });
        }
    }
    (operations, all)
}

/// The first page whose table is not that of the manifest.
pub fn outdated() -> Result<Option<&'static str>> {
    for (page, table) in PAGES {
        let text = read(&root().join(page))?;
        if replaced(page, &text, &table(manifest::kernels()))? != text {
            return Ok(Some(page));
        }
    }
    Ok(None)
}

/// Writes the tables into the pages.
pub fn update() -> Result<()> {
    for (page, table) in PAGES {
        let path = root().join(page);
        write(&path, replaced(page, &read(&path)?, &table(manifest::kernels()))?)?;
    }
    Ok(())
}

fn replaced(page: &str, text: &str, table: &str) -> Result<String> {
    let missing = || format!("{page} lacks `{}` or `{END}`", BEGIN.trim());
    let (before, rest) = text.split_once(BEGIN).with_context(missing)?;
    let (_, after) = rest.split_once(END).with_context(missing)?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_block_between_the_marks_changes() {
        let readme = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(
            replaced("a.md", &readme, "new\n").unwrap(),
            format!("a\n{BEGIN}new\n{END}\nb\n")
        );
        assert!(replaced("a.md", "no marks", "new").is_err());
    }
}
