//! The table of the README: a line per operation, or for several that are alike.

use super::{Computed, SMALLEST_BLOCK, computed};
use blockflash_sys::manifest::Size;
use blockflash_sys::{Kernel, Target};
use std::collections::{BTreeMap, BTreeSet};

/// A line of the table. The derived order is the order of lines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    /// Position of the operation in the manifest.
    operation: usize,
    block_mask: bool,
}

/// Content of a line besides its name: the sizes that have kernels, and on which targets.
#[derive(Default)]
struct Cells {
    types: BTreeSet<&'static str>,
    targets: BTreeMap<Size, BTreeSet<Target>>,
    /// Columns of the latent rows that have kernels.
    latent: BTreeSet<u32>,
    /// Types of a variant of the operation, which only Hopper has kernels for.
    on_hopper: BTreeSet<&'static str>,
}

/// The table: one line per operation, or for several that are alike, and one for what only the CPU
/// computes. Tiles and targets are left out because they change with tuning; `blockflash info`
/// shows them.
pub(super) fn markdown(kernels: &[Kernel]) -> String {
    let (operations, all) = computed(kernels);
    let mut lines: BTreeMap<Line, Cells> = BTreeMap::new();
    for Computed { operation, block_mask, size, dtype, target } in all {
        // Codes are a variant that has no line of its own.
        let name = operations[operation].split(',').next().unwrap_or_default();
        let plain = operations.iter().position(|&other| dtype.is_code() && other == name);
        let operation = plain.unwrap_or(operation);
        let cells = lines.entry(Line { operation, block_mask }).or_default();
        if plain.is_some() {
            cells.on_hopper.insert(dtype.name());
            continue;
        }
        cells.types.insert(dtype.name());
        if let Size::Latent { qk, .. } = size {
            cells.latent.insert(qk);
            continue;
        }
        cells.targets.entry(size).or_default().insert(target);
    }
    let mut table = String::from(
        "| operation | sizes on a GPU | types | Ampere, Ada, Blackwell | Hopper | CPU |\n\
         |---|---|---|---|---|---|\n",
    );
    // Operations with equal cells share a line, but for variants, whose names have commas.
    let mut rows: Vec<(Vec<&str>, String)> = Vec::new();
    for (line, cells) in &lines {
        let (operation, mut sizes) = match line.block_mask {
            true => (
                "attention under a block mask",
                format!("blocks that are multiples of {SMALLEST_BLOCK} × {SMALLEST_BLOCK}"),
            ),
            false => (operations[line.operation], of_sizes(cells.targets.keys())),
        };
        if !cells.latent.is_empty() {
            let latent: Vec<_> = cells.latent.iter().map(u32::to_string).collect();
            sizes += &format!("; latent rows of {}", latent.join(", "));
        }
        let mut types = cells.types.iter().copied().collect::<Vec<_>>().join(", ");
        for dtype in &cells.on_hopper {
            types += &format!(", on Hopper {dtype}");
        }
        let [portable, hopper] = [(Target::Ptx80, "portable"), (Target::Sm90a, "own kernels")].map(
            |(target, kernels)| {
                let with = cells.targets.iter().filter(|(_, targets)| targets.contains(&target));
                let with: Vec<&Size> = with.map(|(size, _)| size).collect();
                match with.len() {
                    0 => None,
                    count if count == cells.targets.len() => Some(kernels.to_owned()),
                    _ => Some(format!("{kernels} for {}", of_sizes(with.into_iter()))),
                }
            },
        );
        let portable = portable.as_deref().unwrap_or("–");
        let hopper = hopper.as_deref().unwrap_or(portable);
        let row = format!("| {sizes} | {types} | {portable} | {hopper} | yes |\n");
        match rows.last_mut() {
            Some((names, last)) if *last == row && !names.iter().any(|name| name.contains(',')) => {
                names.push(operation);
            }
            _ => rows.push((vec![operation], row)),
        }
    }
    for (names, row) in rows {
        table += &format!("| {} {row}", names.join(", "));
    }
    table + "| all of these | any head_dim, any block | f32, too | – | – | yes |\n"
}

/// A tile takes every multiple of 8 up to its head dimension, so the largest one counts.
fn of_sizes<'a>(sizes: impl Iterator<Item = &'a Size> + Clone) -> String {
    let blocks = sizes.clone().filter_map(|size| match size {
        Size::Block(block) => Some(block.to_string()),
        Size::HeadDim(_) | Size::Latent { .. } => None,
    });
    let blocks: Vec<_> = blocks.collect();
    let head_dim = sizes.filter_map(|size| match size {
        Size::HeadDim(head_dim) => Some(*head_dim),
        Size::Block(_) | Size::Latent { .. } => None,
    });
    match head_dim.max() {
        Some(head_dim) => format!("head_dim 8–{head_dim}, multiples of 8"),
        None => format!("blocks of {}", blocks.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::manifest;

    fn table() -> String {
        markdown(manifest::kernels())
    }

    #[test]
    fn every_row_has_its_cell() {
        let table = table();
        assert!(table.starts_with("| operation | sizes on a GPU | types | Ampere"));
        let columns: BTreeSet<usize> =
            table.lines().map(|line| line.matches('|').count()).collect();
        assert_eq!(columns.len(), 1, "{table}");
        assert!(table.lines().count() <= 12, "a table for a front page:\n{table}");
    }

    #[test]
    fn what_has_kernels_for_all_sizes_is_one_line() {
        let table = table();
        let (codes, none) = (", on Hopper e4m3", "");
        let narrow = " for head_dim 8–256, multiples of 8";
        for (operation, sizes, codes, own) in [
            ("attention forward", "head_dim 8–512, multiples of 8", codes, none),
            ("attention under a block mask", "blocks that are multiples of 64 × 64", codes, none),
            ("attention backward", "head_dim 8–512, multiples of 8", none, narrow),
            (
                "attention over a cache",
                "head_dim 8–512, multiples of 8; latent rows of 512, 576",
                none,
                narrow,
            ),
            ("BSR matmul", "blocks of 16, 32, 64, 128", none, none),
        ] {
            let types = format!("bf16, f16{codes}");
            let line = format!(
                "| {operation} | {sizes} | {types} | portable | own kernels{own} | yes |\n"
            );
            assert!(table.contains(&line), "{table}");
        }
    }

    #[test]
    fn what_only_some_kernels_take_is_said() {
        let table = table();
        let blocks = "blocks of 16, 32, 64, 128 | bf16, f16 | portable | own kernels for blocks \
                      of 64, 128 | yes |\n";
        for operation in ["BSR matmul, Aᵀ, column-major B", "sampled product"] {
            assert!(table.contains(&format!("| {operation} | {blocks}")), "{table}");
        }
        let line = "| gradients of attention by lists, scores of blocks of keys, summaries of \
                    pages, choice of pages | head_dim 8–256, multiples of 8 | bf16, f16 | portable \
                    | portable | yes |\n";
        assert!(table.contains(line), "{table}");
    }

    #[test]
    fn what_only_the_cpu_runs_is_said() {
        let line = "| all of these | any head_dim, any block | f32, too | – | – | yes |\n";
        assert!(table().ends_with(line));
    }

    /// No size of an operation lacks a portable kernel: PTX for sm_80 runs on every GPU.
    #[test]
    fn every_size_has_a_portable_kernel() {
        assert!(!table().contains("portable for"));
    }
}
