//! Links of documents to files: what they name exists, and what a package's documents name comes
//! with the package, since its readers have nothing else.

use crate::workspace::root;
use std::path::{Component, Path, PathBuf};

/// The links of a document that are wrong, as line and reason.
pub fn wrong(name: &str, text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, target) in targets(text) {
        let path = joined(Path::new(name).parent().unwrap_or(Path::new("")), target);
        match path {
            Some(path) if !root().join(&path).exists() => {
                found.push((line, format!("no file {} for the link", path.display())));
            }
            Some(path) if package(Path::new(name)) != package(&path) && is_packaged(name) => {
                let reason = "a link that leaves the package: give the address of the repository";
                found.push((line, reason.to_owned()));
            }
            Some(_) => {}
            None => found.push((line, "a link that leaves the repository".to_owned())),
        }
    }
    found
}

/// Targets of links to files, without what follows `#`, with the numbers of their lines.
fn targets(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().zip(1..);
    let links = lines.flat_map(|(line, number)| {
        line.split("](").skip(1).map(move |rest| (number, rest.split([')', '#']).next()))
    });
    links.filter_map(|(number, target)| {
        let target = target?.trim();
        let is_file = !target.is_empty() && !target.contains("://") && !target.contains([' ', ':']);
        is_file.then_some((number, target))
    })
}

/// A path from the root of the repository.
fn joined(folder: &Path, target: &str) -> Option<PathBuf> {
    let mut path = folder.to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => path.pop().then_some(())?,
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    Some(path)
}

/// The folder of the crate that a file is in.
fn package(name: &Path) -> Option<PathBuf> {
    let mut parts = name.components();
    let folder = parts.next().filter(|folder| folder.as_os_str() == "crates")?;
    Some(Path::new(&folder).join(parts.next()?))
}

fn is_packaged(name: &str) -> bool {
    package(Path::new(name)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_leave_or_lead_nowhere() {
        let lines = |name: &str, text: &str| -> Vec<usize> {
            wrong(name, text).into_iter().map(|(line, _)| line).collect()
        };
        let text = "[a](../blockflash-ops/README.md)\n[b](https://x.org/../y) [c](#here)\n\
                    [d](src/lib.rs) and [e](README.md#x)\n[f](src/none.rs)\n[g](crate::Mask)";
        assert_eq!(lines("crates/blockflash-safe/README.md", text), [1, 4]);
        assert_eq!(lines("README.md", "[a](crates/blockflash-ops/README.md) [b](none.md)"), [1]);
        assert_eq!(lines("benches/README.md", "[a](../README.md)\n[b](../../README.md)"), [2]);
    }
}
