//! Suites: files that list what is measured, as grids of cases.

mod grid;

use crate::case::Case;
use crate::error::{Error, Result};
use crate::timing::Cache;
use grid::{AttentionGrid, BlockSparseGrid, BsrGrid};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A list of cases, and how to measure them unless the command says otherwise.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Name of the file without `.toml`.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// How often each implementation gets a window.
    pub rounds: usize,
    /// Length of a window in milliseconds.
    pub window_ms: f64,
    /// Idle time before each window in milliseconds.
    pub gap_ms: f64,
    /// Rivals as `--peers` takes them.
    pub peers: String,
    /// State of the L2 cache before a launch; each case is measured in every one.
    pub cache: Vec<Cache>,
    /// In the order of the file. A suite without cases measures what the GPU does at best and nothing else.
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    description: String,
    #[serde(default = "default_rounds")]
    rounds: usize,
    #[serde(default = "default_window_ms")]
    window_ms: f64,
    #[serde(default = "default_gap_ms")]
    gap_ms: f64,
    #[serde(default = "default_peers")]
    peers: String,
    #[serde(default = "default_cache")]
    cache: Vec<Cache>,
    #[serde(default)]
    attention_fwd: Vec<AttentionGrid>,
    #[serde(default)]
    block_sparse_fwd: Vec<BlockSparseGrid>,
    #[serde(default)]
    bsr_matmul: Vec<BsrGrid>,
}

fn default_rounds() -> usize {
    5
}

fn default_window_ms() -> f64 {
    100.0
}

fn default_gap_ms() -> f64 {
    50.0
}

fn default_cache() -> Vec<Cache> {
    vec![Cache::Warm]
}

fn default_peers() -> String {
    "auto".to_owned()
}

impl Suite {
    /// Reads a suite by name from `benches/suites`, or any file by a path that ends in `.toml`.
    ///
    /// # Errors
    /// [`Error::NoSuite`] lists what there is; [`Error::Suite`] says what is wrong in the file; [`Error::Io`].
    pub fn load(benches: &Path, name: &str) -> Result<Self> {
        let path = match name.ends_with(".toml") {
            true => PathBuf::from(name),
            false => benches.join("suites").join(format!("{name}.toml")),
        };
        if !path.is_file() {
            let present = Self::names(benches)?.join(", ");
            return Err(Error::NoSuite { name: name.to_owned(), present });
        }
        let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self::parse(name, &text).map_err(|problem| Error::Suite { path, problem })
    }

    /// Names of the suites, in alphabetical order.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn names(benches: &Path) -> Result<Vec<String>> {
        let folder = benches.join("suites");
        let entries = std::fs::read_dir(&folder).map_err(Error::io(&folder))?;
        let name = |path: PathBuf| Some(path.file_name()?.to_str()?.strip_suffix(".toml")?.to_owned());
        let mut names: Vec<_> = entries.flatten().filter_map(|entry| name(entry.path())).collect();
        names.sort();
        Ok(names)
    }

    fn parse(name: String, text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| {
            // The message of the parser spans lines and draws the place.
            let line =
                error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            format!("line {line}: {}", error.message())
        })?;
        let File { description, rounds, window_ms, gap_ms, peers, cache, .. } = file;
        let mut cases = Vec::new();
        file.attention_fwd.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        file.block_sparse_fwd.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        file.bsr_matmul.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        for (index, case) in cases.iter().enumerate() {
            if cases[..index].contains(case) {
                return Err(format!("{case} occurs twice"));
            }
        }
        if rounds == 0
            || !(window_ms > 0.0 && window_ms.is_finite())
            || !(gap_ms >= 0.0 && gap_ms.is_finite())
        {
            return Err("rounds and window_ms must be positive, gap_ms must not be negative".to_owned());
        }
        if cache.is_empty() || (1..cache.len()).any(|index| cache[..index].contains(&cache[index])) {
            return Err("cache lists warm, cold or both, each once".to_owned());
        }
        Ok(Self { name, description, rounds, window_ms, gap_ms, peers, cache, cases })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRID: &str = "description = 'x'\n[[attention_fwd]]\ntokens = 1024\nseqlen = [256, 512]\nnum_heads_q = 4\n\
                        head_dim = 64\nmask = ['full', 'causal']\ndtype = ['bf16']\n";

    fn problem(text: &str) -> String {
        Suite::parse("t".into(), text).unwrap_err()
    }

    #[test]
    fn grids_expand_to_every_combination() {
        let suite = Suite::parse("t".into(), GRID).unwrap();
        let ids: Vec<_> = suite.cases.iter().map(Case::to_string).collect();
        let expected = [
            "b4_s256_h4_d64_full_bf16",
            "b2_s512_h4_d64_full_bf16",
            "b4_s256_h4_d64_causal_bf16",
            "b2_s512_h4_d64_causal_bf16",
        ];
        assert_eq!(ids, expected);
        assert_eq!((suite.rounds, suite.peers.as_str()), (5, "auto"));
    }

    #[test]
    fn lengths_are_a_dimension_of_a_grid() {
        let grid = GRID.replace("tokens = 1024\nseqlen = [256, 512]", "lengths = [[700, 300, 300], [64]]");
        let ids: Vec<_> =
            Suite::parse("t".into(), &grid).unwrap().cases.iter().map(Case::to_string).collect();
        let expected = [
            "varlen700+300x2_h4_d64_full_bf16",
            "varlen64_h4_d64_full_bf16",
            "varlen700+300x2_h4_d64_causal_bf16",
            "varlen64_h4_d64_causal_bf16",
        ];
        assert_eq!(ids, expected);
        assert!(problem(&grid.replace("[64]", "[]")).contains("empty"));
        assert!(problem(&grid.replace("[64]", "[64, 0]")).contains("length of 0"));
        assert!(problem(&grid.replace("head_dim = 64", "head_dim = 0")).contains("size of 0"));
        assert!(problem(&grid.replace("lengths", "tokens = 1064\nlengths")).contains("lengths say"));
        let neither = "has either seqlen or lengths";
        assert!(problem(&grid.replace("lengths", "seqlen = [8]\nlengths")).contains(neither));
        assert!(problem(&GRID.replace("seqlen = [256, 512]\n", "")).contains(neither));
    }

    #[test]
    fn mistakes_are_named() {
        assert!(Suite::parse("t".into(), "description = 'only ceilings'").unwrap().cases.is_empty());
        assert!(problem(&GRID.replace("num_heads_q", "heads")).contains("line"));
        assert!(problem(&GRID.replace("1024", "1000")).contains("no multiple"));
        assert!(problem(&GRID.replace("512", "256")).contains("twice"));
        assert!(problem(&format!("rounds = 0\n{GRID}")).contains("positive"));
        assert!(problem(&format!("cache = []\n{GRID}")).contains("cache"));
        assert!(problem(&format!("cache = ['tepid']\n{GRID}")).starts_with("line 1"));
        let sparse = "description = 'x'\n[[block_sparse_fwd]]\nbatch = 1\nseqlen = [1000]\nnum_heads_q = 2\n\
                      head_dim = 64\nblock = [[128, 128]]\ndensity = [0.5]\ndtype = ['bf16']\n";
        assert!(problem(sparse).contains("multiple"));
        assert!(problem("not toml").starts_with("line 1: "));
    }

    #[test]
    fn the_suites_of_the_repository_are_valid() {
        let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
        let names = Suite::names(&benches).unwrap();
        assert!(names.iter().any(|name| name == "smoke"));
        for name in names {
            Suite::load(&benches, &name).unwrap();
        }
        let missing = Suite::load(&benches, "nothing").unwrap_err().to_string();
        assert!(missing.contains("\"nothing\"") && missing.contains("smoke"));
    }
}
