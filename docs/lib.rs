//! The pages of the guide (`src/SUMMARY.md`) as documentation of modules: the tests of this crate
//! are the Rust programs on these pages. Its Python programs run in
//! `crates/blockflash-python/tests/test_readme.py`.
#![forbid(unsafe_code)]

/// Every page that has a Rust program, by its path below `src`.
#[cfg(any(test, doctest))]
macro_rules! pages {
    ($($name:ident: $path:literal,)*) => {
        $(
            #[cfg(doctest)]
            #[doc = include_str!(concat!("src/", $path))]
            mod $name {}
        )*

        #[cfg(test)]
        const PAGES: &[&str] = &[$($path),*];
    };
}

#[cfg(any(test, doctest))]
pages! {
    install: "install.md",
    attention: "attention.md",
    block_masks: "block-masks.md",
    decoding: "decoding.md",
    index_attention: "index-attention.md",
    block_sparse: "block-sparse.md",
    several_gpus: "several-gpus.md",
    candle: "candle.md",
    engines: "engines.md",
    from_candle_flash_attn: "migration/candle-flash-attn.md",
    from_cusparse: "migration/cusparse.md",
}

#[cfg(test)]
mod tests {
    use super::PAGES;
    use std::{collections::BTreeSet, fs, path::Path};

    /// What a code block may be: `rust` runs here, `python` in the tests of the Python package. The
    /// others are only shown.
    const LANGUAGES: [&str; 7] = ["rust", "rust,no_run", "python", "sh", "toml", "c", "text"];

    fn text(page: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(page);
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{page}: {error}"))
    }

    /// The pages that SUMMARY.md names.
    fn listed() -> BTreeSet<String> {
        let summary = text("SUMMARY.md");
        let links = summary.split("](").skip(1);
        links.map(|rest| rest.split(')').next().unwrap_or_default().to_owned()).collect()
    }

    /// The languages of the code blocks of a page.
    fn languages(page: &str) -> Vec<String> {
        let (mut found, mut inside) = (Vec::new(), false);
        for fence in text(page).lines().filter_map(|line| line.strip_prefix("```")) {
            found.extend((!inside).then(|| fence.to_owned()));
            inside = !inside;
        }
        found
    }

    #[test]
    fn every_file_is_a_page_of_the_summary() {
        let mut files = BTreeSet::new();
        for folder in ["", "migration/", "models/"] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
            for entry in fs::read_dir(path).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                files.extend(name.ends_with(".md").then(|| format!("{folder}{name}")));
            }
        }
        assert!(files.remove("SUMMARY.md"));
        assert_eq!(files, listed());
    }

    #[test]
    fn every_rust_program_is_compiled() {
        let rust = |page: &String| languages(page).iter().any(|tag| tag.starts_with("rust"));
        let with_rust: BTreeSet<_> = listed().into_iter().filter(rust).collect();
        assert_eq!(with_rust, PAGES.iter().map(|page| (*page).to_owned()).collect());
    }

    #[test]
    fn every_code_block_says_what_checks_it() {
        for page in listed() {
            for tag in languages(&page) {
                assert!(LANGUAGES.contains(&&*tag), "{page}: a code block of {tag:?}");
            }
        }
    }
}
