//! The table of the guide: a line per operation and size, a column per compiled target.

use super::{Computed, SMALLEST_BLOCK, computed};
use blockflash_sys::manifest::{Quantize, Size, Variant};
use blockflash_sys::{Kernel, Target};
use std::collections::{BTreeMap, BTreeSet};

/// A line of the table that has kernels. The derived order is the order of lines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    /// Position of the operation in the manifest.
    operation: usize,
    block_mask: bool,
    size: Size,
}

/// Content of a line besides its name.
#[derive(Clone, Default)]
struct Cells {
    types: BTreeSet<&'static str>,
    targets: BTreeSet<Target>,
    /// What head dimensions are multiples of.
    multiple: u32,
}

/// The table: one line per operation and size, one column per target, and lines for the sizes and
/// types that only the CPU computes. Tiles are left out because they change with tuning;
/// `blockflash info` shows them.
pub(super) fn markdown(kernels: &[Kernel]) -> String {
    let (operations, all) = computed(kernels);
    let mut lines: BTreeMap<Line, Cells> = BTreeMap::new();
    for one in all {
        let Computed { operation, block_mask, size, dtype, target } = one;
        let cells = lines.entry(Line { operation, block_mask, size }).or_default();
        cells.types.insert(dtype.name());
        cells.targets.insert(target);
        cells.multiple = one.multiple();
    }
    let targets: BTreeSet<Target> =
        lines.values().flat_map(|cells| &cells.targets).copied().collect();
    let mut table = String::from("| operation | size | types |");
    for target in &targets {
        table += &format!(" {} |", target.gpus());
    }
    table += &format!(" CPU |\n|---|---|---|{}---|\n", "---|".repeat(targets.len()));
    let mut push = |operation: &str, size: &str, cells: &Cells| {
        let types = cells.types.iter().copied().collect::<Vec<_>>().join(", ");
        table += &format!("| {operation} | {size} | {types} |");
        for target in &targets {
            table += if cells.targets.contains(target) { " yes |" } else { " – |" };
        }
        table += " yes |\n";
    };
    let mut before = None;
    // Operations that only the CPU computes, grouped by the size that has no kernel.
    let mut others: [(&str, Vec<&str>); 2] =
        [("any other head_dim", vec![]), ("any other block", vec![])];
    for (line, cells) in &lines {
        let operation = operations[line.operation];
        // Variants of an operation follow its name after a comma.
        let name = operation.split(',').next().unwrap_or(operation);
        let other = match line.size {
            _ if line.block_mask => {
                let block = SMALLEST_BLOCK;
                let size = format!("multiples of {block} × {block}");
                let variant = operation.strip_prefix(name).unwrap_or_default();
                push(&format!("attention under a block mask{variant}"), &size, cells);
                continue;
            }
            Size::HeadDim(head_dim) => {
                // A tile accepts every multiple above the next smaller tile.
                let multiple = cells.multiple;
                let smaller = before.filter(|(operation, _)| *operation == line.operation);
                let least = smaller.map_or(multiple, |(_, head_dim)| head_dim + multiple);
                let size = format!("head_dim {least}–{head_dim}, multiples of {multiple}");
                push(operation, &size, cells);
                before = Some((line.operation, head_dim));
                &mut others[0].1
            }
            Size::Latent { qk, v, codes } => {
                let of = if codes { " of e4m3" } else { "" };
                push(operation, &format!("latent rows of {qk}, values of {v}{of}"), cells);
                continue;
            }
            Size::Block(block) => {
                push(operation, &format!("block {block}"), cells);
                &mut others[1].1
            }
        };
        if !other.contains(&name) {
            other.push(name);
        }
    }
    let of_all = lines.values().filter(|cells| cells.multiple == 8);
    let types = of_all.flat_map(|cells| &cells.types).copied().collect();
    let on_cpu = Cells { types, ..Cells::default() };
    for (size, names) in others {
        push(&names.join(", "), size, &on_cpu);
    }
    let of = |types: &[&'static str]| Cells {
        types: types.iter().copied().collect(),
        ..Cells::default()
    };
    push("all of these", "all of these", &of(&["f32"]));
    push("attention forward", "any head_dim", &of(&["e4m3", "e5m2", "i8"]));
    // One kernel takes all types.
    let types = of(&["bf16", "f16", "f32"]);
    let quantizes = |kernel: &&Kernel| matches!(kernel.variant, Variant::Quantize(_));
    let with = kernels.iter().filter(quantizes).map(|kernel| kernel.target).collect();
    let sizes = format!("head_dim 8–{}, multiples of 8", Quantize::MOST_HEAD_DIM);
    push("quantising to 8 bits", &sizes, &Cells { targets: with, ..types.clone() });
    push("quantising to 8 bits", "any other head_dim", &types);
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::manifest;

    #[test]
    fn every_row_has_its_cell() {
        let table = markdown(manifest::kernels());
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
    fn codes_have_lines_of_hopper() {
        let table = markdown(manifest::kernels());
        for line in [
            "| attention forward, 8 bits | head_dim 16–64, multiples of 16",
            "| attention forward, 8 bits | head_dim 80–128, multiples of 16",
            "| attention forward, 8 bits | head_dim 144–256, multiples of 16",
            "| attention under a block mask, 8 bits | multiples of 64 × 64",
        ] {
            let line = format!("{line} | e4m3 | – | – | – | yes | – | – | yes |\n");
            assert!(table.contains(&line), "{table}");
        }
    }

    #[test]
    fn what_only_the_cpu_runs_is_said() {
        let table = markdown(manifest::kernels());
        for line in [
            "| attention forward, attention backward, attention over a cache, attention to listed \
             keys, gradients of attention by lists, scores of blocks of keys, summaries of pages, \
             choice of pages | any other head_dim | bf16, f16",
            "| BSR matmul, sampled product | any other block | bf16, f16",
            "| all of these | all of these | f32",
            "| attention forward | any head_dim | e4m3, e5m2, i8",
            "| quantising to 8 bits | any other head_dim | bf16, f16, f32",
        ] {
            let line = format!("{line} | – | – | – | – | – | – | yes |\n");
            assert!(table.contains(&line), "{table}");
        }
    }

    #[test]
    fn quantising_takes_every_type() {
        let line = "| quantising to 8 bits | head_dim 8–256, multiples of 8 | bf16, f16, f32 | yes \
                    | yes | yes | – | – | yes | yes |\n";
        assert!(markdown(manifest::kernels()).contains(line));
    }

    #[test]
    fn what_only_some_kernels_take_has_lines_of_its_own() {
        let table = markdown(manifest::kernels());
        for (block, hopper) in [(16, "–"), (32, "–"), (64, "yes"), (128, "yes")] {
            let line = format!(
                "| BSR matmul, Aᵀ, column-major B | block {block} | bf16, f16 \
                 | yes | yes | yes | {hopper} | yes | yes | yes |"
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
}
