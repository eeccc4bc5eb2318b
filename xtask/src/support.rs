//! The README's support table, made from the manifest.

use crate::workspace::{read, root, write};
use anyhow::{Context, Result};
use blockflash_sys::{
    Row, Target,
    manifest::{self, Variant},
};
use std::collections::{BTreeMap, BTreeSet};

const BEGIN: &str = "<!-- support:begin -->\n";
const END: &str = "<!-- support:end -->";

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    operation: &'static str,
    /// Head dimension of the tile, or block size.
    size: u32,
}

/// Whether the README's table is what the manifest gives.
pub fn is_current() -> Result<bool> {
    let readme = read(&root().join("README.md"))?;
    Ok(replaced(&readme, &markdown(manifest::rows()))? == readme)
}

/// Writes the table into the README.
pub fn update() -> Result<()> {
    let path = root().join("README.md");
    let readme = read(&path)?;
    write(&path, replaced(&readme, &markdown(manifest::rows()))?)
}

fn replaced(readme: &str, table: &str) -> Result<String> {
    let missing = || format!("README.md lacks `{}` or `{END}`", BEGIN.trim());
    let (before, rest) = readme.split_once(BEGIN).with_context(missing)?;
    let (_, after) = rest.split_once(END).with_context(missing)?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

/// The table: one line per operation and size, one column per target. Tiles are left out: they change with tuning, and
/// `blockflash info` shows them.
fn markdown(rows: &[Row]) -> String {
    let targets: BTreeSet<Target> = rows.iter().map(|row| row.target).collect();
    let mut served: BTreeMap<Line, BTreeSet<Target>> = BTreeMap::new();
    let mut dtypes: BTreeMap<Line, BTreeSet<&str>> = BTreeMap::new();
    for row in rows {
        let (line, dtype) = describe(row);
        dtypes.entry(line.clone()).or_default().insert(dtype);
        served.entry(line).or_default().insert(row.target);
    }
    let mut table = String::from("| operation | size | types |");
    for target in &targets {
        table += &format!(" {} |", column(*target));
    }
    table += &format!(" CPU |\n|---|---|---|{}---|\n", "---|".repeat(targets.len()));
    let mut previous: Option<Line> = None;
    for (line, by_target) in &served {
        let types = dtypes[line].iter().copied().collect::<Vec<_>>().join(", ");
        table += &format!("| {} | {} | {types} |", line.operation, size(line, previous.as_ref()));
        for target in &targets {
            table += if by_target.contains(target) { " yes |" } else { " – |" };
        }
        table += " yes |\n";
        previous = Some(line.clone());
    }
    table
}

fn describe(row: &Row) -> (Line, &'static str) {
    match row.variant {
        Variant::AttentionFwd(t) => {
            (Line { operation: "attention forward", size: t.head_dim }, t.dtype.name())
        }
        Variant::BsrMatmul(t) => (Line { operation: "BSR matmul", size: t.block_size }, t.dtype.name()),
    }
}

/// The sizes that a line serves: an attention tile takes every multiple of 8 above the next smaller tile.
fn size(line: &Line, previous: Option<&Line>) -> String {
    if line.operation == "BSR matmul" {
        return format!("block {}", line.size);
    }
    let smaller =
        previous.filter(|previous| previous.operation == line.operation).map_or(0, |line| line.size);
    format!("head_dim {}–{}", smaller + 8, line.size)
}

fn column(target: Target) -> &'static str {
    match target {
        Target::Sm80 => "sm_80 (A100)",
        Target::Sm89 => "sm_89 (Ada)",
        Target::Sm90 => "sm_90 (Hopper)",
        Target::Sm90a => "sm_90a (Hopper)",
        Target::Sm120 => "sm_120 (RTX Blackwell)",
        Target::Ptx80 => "other GPUs from sm_80 (PTX)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_cell() {
        let table = markdown(manifest::rows());
        assert!(table.starts_with("| operation | size | types | sm_80"));
        assert!(table.contains("| attention forward | head_dim 8–64 | bf16, f16 |"));
        assert!(table.contains("| BSR matmul | block 16 |"));
        let columns: BTreeSet<usize> = table.lines().map(|line| line.matches('|').count()).collect();
        assert_eq!(columns.len(), 1, "{table}");
    }

    #[test]
    fn only_the_block_between_the_marks_changes() {
        let readme = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(replaced(&readme, "new\n").unwrap(), format!("a\n{BEGIN}new\n{END}\nb\n"));
        assert!(replaced("no marks", "new").is_err());
    }
}
