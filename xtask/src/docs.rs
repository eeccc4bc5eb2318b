//! `cargo xtask docs`: the guide as a site, built by mdBook, and its links.

use crate::{
    venv::Venv,
    workspace::{list, read, root, run as run_command, target_dir},
};
use anyhow::{Result, bail};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Addresses of files of this repository.
const SOURCES: [&str; 3] = [
    "https://github.com/blockflash/blockflash/blob/main/",
    "https://github.com/blockflash/blockflash/tree/main/",
    "https://raw.githubusercontent.com/blockflash/blockflash/main/",
];

/// Build the guide of `docs/` into target/docs/book, and check its links.
#[derive(clap::Args, Default)]
pub struct Args {}

/// Runs the command.
pub fn run(_: &Args) -> Result<()> {
    let book = target_dir("docs")?.join("book");
    let mut mdbook = Venv::new("docs", "docs/requirements.txt")?.program("mdbook");
    run_command(mdbook.args(["build", "docs", "--dest-dir"]).arg(&book))?;
    let mut pages = BTreeMap::new();
    collect(&book, &mut pages)?;
    let wrong = broken(&pages, |path| path.exists());
    wrong.iter().for_each(|what| eprintln!("error: {what}"));
    match wrong.len() {
        0 => println!("{} pages in {}", pages.len(), book.join("index.html").display()),
        count => bail!("{count} broken links in the guide"),
    }
    Ok(())
}

/// The texts of all pages in a folder and below it, but for the one whose links are of the site.
fn collect(folder: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for path in list(folder)? {
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|end| end == "html") && !path.ends_with("404.html") {
            pages.insert(path.clone(), read(&path)?);
        }
    }
    Ok(())
}

/// Links to files that do not exist, and to places that their page does not have.
fn broken(pages: &BTreeMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let places: BTreeMap<&Path, BTreeSet<&str>> =
        pages.iter().map(|(path, text)| (path.as_path(), values(text, "id"))).collect();
    let mut wrong = Vec::new();
    for (page, text) in pages {
        for link in values(text, "href").union(&values(text, "src")) {
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let ours = SOURCES.iter().find_map(|start| file.strip_prefix(start));
            let target = match ours {
                Some(file) => root().join(file),
                None if link.contains(':') || link.starts_with("//") => continue, // Another site.
                None => joined(page, file),
            };
            let found = match places.get(target.as_path()) {
                Some(places) => place.is_empty() || places.contains(place),
                None => exists(&target),
            };
            if !found {
                let page = page.strip_prefix(root()).unwrap_or(page);
                wrong.push(format!("{}: no target for the link {link}", page.display()));
            }
        }
    }
    wrong
}

/// The values of an attribute in a page.
fn values<'a>(text: &'a str, attribute: &str) -> BTreeSet<&'a str> {
    let before = format!(" {attribute}=\"");
    text.split(&*before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

/// The file that a link of a page names.
fn joined(page: &Path, link: &str) -> PathBuf {
    if link.is_empty() {
        return page.to_path_buf();
    }
    let mut path = page.parent().unwrap_or(page).to_path_buf();
    for part in link.split('/') {
        match part {
            ".." => drop(path.pop()),
            "." | "" => {}
            name => path.push(name),
        }
    }
    path
}

#[cfg(test)]
#[path = "docs_commands.rs"]
mod commands;

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &str = "https://github.com/blockflash/blockflash/tree/main/none";

    #[test]
    fn links_to_nowhere_are_found() {
        let pages = [
            (
                "b/index.html",
                r##"<a href="x/y.html#here">
                <a href="x/none.html"> <img src="x/p.svg">
                <a href="https://github.com/blockflash/blockflash/blob/main/Cargo.toml#L1">
                <a href="https://github.com/blockflash/blockflash/tree/main/none">"##,
            ),
            (
                "b/x/y.html",
                r##"<h2 id="here"><a href="#here"> <a href="#there">
                <a href="../index.html"> <a href="https://x.org/none"> <a href="../x/y.html#no">"##,
            ),
        ];
        let pages = pages.map(|(path, text)| (PathBuf::from(path), text.to_owned())).into();
        let files = [PathBuf::from("b/x/p.svg"), root().join("Cargo.toml")];
        let found = broken(&pages, |path| files.iter().any(|file| file == path));
        let ends: Vec<&str> = found.iter().filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(ends, [NONE, "x/none.html", "#there", "../x/y.html#no"]);
    }
}
