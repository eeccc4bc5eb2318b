//! The README's support table, made from the manifest.

use crate::workspace::{read, root, write};
use anyhow::{Context, Result};
use blockflash_sys::manifest::{
    self, AttentionFwd, AttentionFwdHopper, BsrMatmul, BsrMatmulHopper, BsrSddmm, BsrSddmmHopper,
    Variant,
};
use blockflash_sys::{Row, Target};
use std::collections::{BTreeMap, BTreeSet};

const BEGIN: &str = "<!-- support:begin -->\n";
const END: &str = "<!-- support:end -->";

/// Block masks have blocks of this many queries and keys, or multiples.
const SMALLEST_BLOCK: u32 = 64;

/// One line of the table, in the order of the table: an operation with the head dimension of its
/// tile, or its block size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Line {
    AttentionForward { head_dim: u32 },
    BlockMasks,
    BsrMatmul { block_size: u32 },
    BsrMatmulTransposed { block_size: u32 },
    BsrSddmm { block_size: u32 },
    OtherHeadDims,
    OtherBlocks,
    SinglePrecision,
}

impl Line {
    /// What no kernel computes, and the CPU does: sizes between and beyond those of the kernels,
    /// and f32.
    const CPU_ONLY: [Self; 3] = [Self::OtherHeadDims, Self::OtherBlocks, Self::SinglePrecision];
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
    let mut served: BTreeMap<Line, BTreeSet<Target>> = BTreeMap::new();
    let mut dtypes: BTreeMap<Line, BTreeSet<&str>> = BTreeMap::new();
    let mut targets = BTreeSet::new();
    let widest = rows.iter().filter_map(Row::attention_tile).map(|tile| tile.head_dim).max();
    for row in rows {
        let Some((line, dtype)) = describe(row) else { continue };
        targets.insert(row.target);
        // The widest row takes every head dimension; if its tile divides the smallest blocks, then
        // every mask, too.
        let divides = |size| SMALLEST_BLOCK.is_multiple_of(size);
        let masks = row.attention_tile().filter(|tile| {
            Some(tile.head_dim) == widest && divides(tile.block_q) && divides(tile.block_kv)
        });
        for line in [Some(line), masks.map(|_| Line::BlockMasks)].into_iter().flatten() {
            dtypes.entry(line).or_default().insert(dtype);
            served.entry(line).or_default().insert(row.target);
        }
    }
    let kernel_types: BTreeSet<&str> = dtypes.values().flatten().copied().collect();
    for line in Line::CPU_ONLY {
        let types = if line == Line::SinglePrecision {
            BTreeSet::from(["f32"])
        } else {
            kernel_types.clone()
        };
        dtypes.insert(line, types);
        served.insert(line, BTreeSet::new());
    }
    let mut table = String::from("| operation | size | types |");
    for target in &targets {
        table += &format!(" {} |", column(*target));
    }
    table += &format!(" CPU |\n|---|---|---|{}---|\n", "---|".repeat(targets.len()));
    let mut smaller = 0;
    for (line, by_target) in &served {
        let types = dtypes[line].iter().copied().collect::<Vec<_>>().join(", ");
        table += &match *line {
            // A tile takes every multiple of 8 above the next smaller tile.
            Line::AttentionForward { head_dim } => {
                format!(
                    "| attention forward | head_dim {}–{head_dim}, multiples of 8 | {types} |",
                    smaller + 8
                )
            }
            Line::BlockMasks => {
                let block = SMALLEST_BLOCK;
                format!(
                    "| attention under a block mask | multiples of {block} × {block} | {types} |"
                )
            }
            Line::BsrMatmul { block_size } => {
                format!("| BSR matmul | block {block_size} | {types} |")
            }
            Line::BsrMatmulTransposed { block_size } => {
                format!("| BSR matmul, Aᵀ, column-major B | block {block_size} | {types} |")
            }
            Line::BsrSddmm { block_size } => {
                format!("| sampled product | block {block_size} | {types} |")
            }
            Line::OtherHeadDims => format!("| attention forward | any other head_dim | {types} |"),
            Line::OtherBlocks => {
                format!("| BSR matmul, sampled product | any other block | {types} |")
            }
            Line::SinglePrecision => format!("| all of these | all of these | {types} |"),
        };
        if let Line::AttentionForward { head_dim } = *line {
            smaller = head_dim;
        }
        for target in &targets {
            table += if by_target.contains(target) { " yes |" } else { " – |" };
        }
        table += " yes |\n";
    }
    table
}

fn describe(row: &Row) -> Option<(Line, &'static str)> {
    match row.variant {
        Variant::AttentionFwd(AttentionFwd { head_dim, dtype, .. })
        | Variant::AttentionFwdHopper(AttentionFwdHopper { head_dim, dtype, .. }) => {
            Some((Line::AttentionForward { head_dim }, dtype.name()))
        }
        Variant::BsrMatmulHopper(BsrMatmulHopper {
            block_size,
            dtype,
            a_transposed,
            b_column_major,
            ..
        }) if a_transposed || b_column_major => {
            Some((Line::BsrMatmulTransposed { block_size }, dtype.name()))
        }
        Variant::BsrMatmulAny(BsrMatmul { block_size, dtype, .. }) => {
            Some((Line::BsrMatmulTransposed { block_size }, dtype.name()))
        }
        Variant::BsrMatmul(BsrMatmul { block_size, dtype, .. })
        | Variant::BsrMatmulHopper(BsrMatmulHopper { block_size, dtype, .. }) => {
            Some((Line::BsrMatmul { block_size }, dtype.name()))
        }
        Variant::BsrSddmm(BsrSddmm { block_size, dtype, .. })
        | Variant::BsrSddmmHopper(BsrSddmmHopper { block_size, dtype, .. }) => {
            Some((Line::BsrSddmm { block_size }, dtype.name()))
        }
        // Prepares the operand of an operation, or computes nothing that a user asks for.
        _ => None,
    }
}

fn column(target: Target) -> &'static str {
    match target {
        Target::Sm80 => "sm_80 (A100)",
        Target::Sm89 => "sm_89 (Ada)",
        Target::Sm90 => "sm_90 (Hopper)",
        Target::Sm90a => "sm_90a (Hopper)",
        Target::Sm120 => "sm_120 (RTX Blackwell)",
        Target::Ptx80 => "other GPUs from sm_80 (PTX)",
        other => other.name(),
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
            "| attention forward | any other head_dim | bf16, f16 | – | – | – | – | – | – | yes |\n",
            "| BSR matmul, sampled product | any other block | bf16, f16 | – | – | – | – | – | – | yes |\n",
            "| all of these | all of these | f32 | – | – | – | – | – | – | yes |\n",
        ] {
            assert!(table.contains(line), "{table}");
        }
    }

    #[test]
    fn what_only_some_kernels_take_has_lines_of_its_own() {
        let table = markdown(manifest::rows());
        for (block, hopper) in [(16, "–"), (32, "–"), (64, "yes"), (128, "yes")] {
            let line = format!(
                "| BSR matmul, Aᵀ, column-major B | block {block} | bf16, f16 | yes | yes | yes | {hopper} | yes | yes | yes |"
            );
            assert!(table.contains(&line), "{table}");
        }
        assert!(
            table.contains("| sampled product | block 16 | bf16, f16 | yes | yes | yes | – |"),
            "{table}"
        );
        assert!(
            table.contains("| sampled product | block 64 | bf16, f16 | yes | yes | yes | yes |"),
            "{table}"
        );
    }

    #[test]
    fn only_the_block_between_the_marks_changes() {
        let readme = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(replaced(&readme, "new\n").unwrap(), format!("a\n{BEGIN}new\n{END}\nb\n"));
        assert!(replaced("no marks", "new").is_err());
    }
}
