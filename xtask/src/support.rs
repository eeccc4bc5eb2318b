//! The README's support table, made from the manifest.

use crate::workspace::{read, root, write};
use anyhow::{Context, Result};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::{DType, Row, Target};
use std::collections::{BTreeMap, BTreeSet};

const BEGIN: &str = "<!-- support:begin -->\n";
const END: &str = "<!-- support:end -->";

/// Block masks have blocks of this many queries and keys, or multiples.
const SMALLEST_BLOCK: u32 = 64;

/// What the table has lines for, in their order: one for each size of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    AttentionForward,
    BlockMasks,
    BsrMatmul,
    BsrMatmulTransposed,
    BsrSddmm,
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

/// The table: one line per operation and size, one column per target. Tiles are left out: they
/// change with tuning, and `blockflash info` shows them.
fn markdown(rows: &[Row]) -> String {
    let mut lines: BTreeMap<(Operation, u32), (BTreeSet<&str>, BTreeSet<Target>)> = BTreeMap::new();
    let widest = rows.iter().filter_map(Row::attention_tile).map(|tile| tile.head_dim).max();
    for row in rows {
        let Some((operation, size, dtype)) = describe(row) else { continue };
        // The widest row takes every head dimension; if its tile divides the smallest blocks, it
        // takes every mask, too.
        let divides = |size| SMALLEST_BLOCK.is_multiple_of(size);
        let masks = row.attention_tile().filter(|tile| {
            Some(tile.head_dim) == widest && divides(tile.block_q) && divides(tile.block_kv)
        });
        let masks = masks.map(|_| (Operation::BlockMasks, SMALLEST_BLOCK));
        for line in [Some((operation, size)), masks].into_iter().flatten() {
            let (types, targets) = lines.entry(line).or_default();
            types.insert(dtype.name());
            targets.insert(row.target);
        }
    }
    let targets: BTreeSet<Target> =
        lines.values().flat_map(|(_, targets)| targets).copied().collect();
    let types: BTreeSet<&str> = lines.values().flat_map(|(types, _)| types).copied().collect();
    let mut table = String::from("| operation | size | types |");
    table.extend(targets.iter().map(|target| format!(" {} |", column(*target))));
    table += &format!(" CPU |\n|---|---|---|{}---|\n", "---|".repeat(targets.len()));
    let mut add = |operation: &str, size: &str, types: &BTreeSet<&str>, on: &BTreeSet<Target>| {
        let types = types.iter().copied().collect::<Vec<_>>().join(", ");
        table += &format!("| {operation} | {size} | {types} |");
        table.extend(
            targets.iter().map(|target| if on.contains(target) { " yes |" } else { " – |" }),
        );
        table += " yes |\n";
    };
    let mut smaller = 0;
    for ((operation, size), (types, on)) in &lines {
        let (name, size) = match operation {
            // A tile takes every multiple of 8 above the next smaller tile.
            Operation::AttentionForward => {
                let least = std::mem::replace(&mut smaller, *size) + 8;
                ("attention forward", format!("head_dim {least}–{size}, multiples of 8"))
            }
            Operation::BlockMasks => {
                ("attention under a block mask", format!("multiples of {size} × {size}"))
            }
            Operation::BsrMatmul => ("BSR matmul", format!("block {size}")),
            Operation::BsrMatmulTransposed => {
                ("BSR matmul, Aᵀ, column-major B", format!("block {size}"))
            }
            Operation::BsrSddmm => ("sampled product", format!("block {size}")),
        };
        add(name, &size, types, on);
    }
    // No kernel computes these, but the CPU does.
    let nowhere = BTreeSet::new();
    add("attention forward", "any other head_dim", &types, &nowhere);
    add("BSR matmul, sampled product", "any other block", &types, &nowhere);
    add("all of these", "all of these", &BTreeSet::from(["f32"]), &nowhere);
    table
}

/// The line that a row belongs to; `None` for one that prepares the operand of an operation, or
/// computes nothing that a user asks for.
fn describe(row: &Row) -> Option<(Operation, u32, DType)> {
    Some(match row.variant {
        Variant::AttentionFwd(tile) => (Operation::AttentionForward, tile.head_dim, tile.dtype),
        Variant::AttentionFwdHopper(tile) => {
            (Operation::AttentionForward, tile.head_dim, tile.dtype)
        }
        Variant::BsrMatmul(tile) => (Operation::BsrMatmul, tile.block_size, tile.dtype),
        Variant::BsrMatmulAny(tile) => {
            (Operation::BsrMatmulTransposed, tile.block_size, tile.dtype)
        }
        Variant::BsrMatmulHopper(tile) if tile.a_transposed || tile.b_column_major => {
            (Operation::BsrMatmulTransposed, tile.block_size, tile.dtype)
        }
        Variant::BsrMatmulHopper(tile) => (Operation::BsrMatmul, tile.block_size, tile.dtype),
        Variant::BsrSddmm(tile) => (Operation::BsrSddmm, tile.block_size, tile.dtype),
        Variant::BsrSddmmHopper(tile) => (Operation::BsrSddmm, tile.block_size, tile.dtype),
        Variant::BlockMask(_) | Variant::Probe(_) => return None,
    })
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
        assert!(
            table.contains("| attention forward | head_dim 8–64, multiples of 8 | bf16, f16 |")
        );
        assert!(table.contains("| BSR matmul | block 16 |"));
        let masks = table.lines().find(|line| line.contains("block mask")).unwrap();
        assert!(masks.starts_with(
            "| attention under a block mask | multiples of 64 × 64 | bf16, f16 | yes |"
        ));
        let columns: BTreeSet<usize> =
            table.lines().map(|line| line.matches('|').count()).collect();
        assert_eq!(columns.len(), 1, "{table}");
    }

    #[test]
    fn what_only_the_cpu_runs_is_said() {
        let table = markdown(manifest::rows());
        for line in [
            "attention forward | any other head_dim | bf16, f16",
            "BSR matmul, sampled product | any other block | bf16, f16",
            "all of these | all of these | f32",
        ] {
            let line = format!("| {line} | – | – | – | – | – | – | yes |\n");
            assert!(table.contains(&line), "{table}");
        }
    }

    #[test]
    fn what_only_some_kernels_take_has_lines_of_its_own() {
        let table = markdown(manifest::rows());
        for (block, hopper) in [(16, "–"), (32, "–"), (64, "yes"), (128, "yes")] {
            let line = format!(
                "| BSR matmul, Aᵀ, column-major B | block {block} | bf16, f16 \
                | yes | yes | yes | {hopper} | yes | yes | yes |"
            );
            assert!(table.contains(&line), "{table}");
        }
        for (block, hopper) in [(16, "–"), (64, "yes")] {
            let line = format!("block {block} | bf16, f16 | yes | yes | yes | {hopper} |");
            assert!(table.contains(&format!("| sampled product | {line}")), "{table}");
        }
    }

    #[test]
    fn only_the_block_between_the_marks_changes() {
        let readme = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(replaced(&readme, "new\n").unwrap(), format!("a\n{BEGIN}new\n{END}\nb\n"));
        assert!(replaced("no marks", "new").is_err());
    }
}
