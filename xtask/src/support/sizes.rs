//! What the images of each operation add to the packages.

use crate::kernels::store;
use blockflash_sys::Kernel;
use std::collections::BTreeMap;

/// Operations, and how the folders of their kernels start.
const GROUPS: [(&str, &[&str]); 10] = [
    ("attention", &["attention_fwd"]),
    ("its gradients", &["attention_bwd"]),
    ("gradients of attention by lists", &["attention_index_bwd", "index_transpose"]),
    (
        "attention over a cache",
        &[
            "attention_combine",
            "attention_decode",
            "attention_latent",
            "attention_merge",
            "kv_append",
            "page_",
        ],
    ),
    ("attention to listed keys", &["attention_index_sm", "index_union"]),
    ("quantising to 8 bits", &["quantize"]),
    ("attention by an index: scores and choice", &["index_scores", "top_k"]),
    ("block masks made on the device", &["block_"]),
    ("BSR matmul, gradients of its values", &["bsr_"]),
    ("copies of rows, ceilings", &["row_copy", "probe"]),
];

/// Kilobytes by operation, of Hopper and of other GPUs.
pub(super) fn markdown(kernels: &[Kernel]) -> String {
    let mut bytes: BTreeMap<String, (usize, bool, u64)> = BTreeMap::new();
    for kernel in kernels {
        let of = |(_, starts): &(_, &[&str])| starts.iter().any(|s| kernel.source().starts_with(s));
        let Some(group) = GROUPS.iter().position(of) else { continue };
        let size = || store::path(kernel).metadata().map_or(0, |file| file.len());
        let hopper = kernel.target.is_always_embedded();
        bytes.entry(kernel.archive_name()).or_insert_with(|| (group, hopper, size()));
    }
    let sum = |hopper: bool, groups: &[usize]| {
        let all = bytes.values().filter(|(g, h, _)| *h == hopper && groups.contains(g));
        all.map(|(.., size)| size).sum::<u64>().div_ceil(1000)
    };
    let row = |name: &str, groups: &[usize]| {
        format!("| {name} | {} | {} |\n", sum(true, groups), sum(false, groups))
    };
    let mut table = "| kB of images | blockflash-sys (Hopper) | blockflash-images (other GPUs) |\n\
                     |---|---:|---:|\n"
        .to_owned();
    for (at, (name, _)) in GROUPS.iter().enumerate() {
        table += &row(name, &[at]);
    }
    table + &row("all", &(0..GROUPS.len()).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockflash_sys::manifest;

    #[test]
    fn every_kernel_is_in_a_group() {
        for kernel in manifest::kernels() {
            let starts = GROUPS.iter().flat_map(|(_, starts)| *starts);
            assert!(starts.filter(|s| kernel.source().starts_with(**s)).count() == 1);
        }
    }
}
