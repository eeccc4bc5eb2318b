//! The support tables of the README and of the guide, generated from the manifest.

mod detailed;
mod summary;

use crate::workspace::{read, root, write};
use anyhow::{Context, Result};
use blockflash_sys::Kernel;
use blockflash_sys::manifest;

const BEGIN: &str = "<!-- support:begin -->\n";
const END: &str = "<!-- support:end -->";

/// Blocks of block masks have this many queries and keys, or multiples.
const SMALLEST_BLOCK: u32 = 64;

/// A table in Markdown.
type Table = fn(&[Kernel]) -> String;
/// The pages with their tables.
const PAGES: [(&str, Table); 2] =
    [("README.md", summary::markdown), ("docs/src/support.md", detailed::markdown)];

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
