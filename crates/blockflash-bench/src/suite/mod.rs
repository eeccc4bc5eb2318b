//! Suites: files that list the cases to measure, as grids.

use crate::case::{
    AttentionGrid, BlockMaskGrid, BlockSparseGrid, BsrGrid, Case, DecodeGrid, GridPeers, SddmmGrid,
};
use crate::error::{Error, Result};
use crate::timing::Cache;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A list of cases and their default measurement settings.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Name of the file without `.toml`.
    pub name: String,
    /// One line that describes the suite.
    pub description: String,
    /// Minimum number of windows per implementation; balanced turns may add a few.
    pub rounds: usize,
    /// Length of a window in milliseconds.
    pub window_ms: f64,
    /// Idle time before each window in milliseconds.
    pub gap_ms: f64,
    /// Whether the joules of a launch are measured, too, which takes windows of at least
    /// [`MIN_WINDOW_MS`](crate::energy::MIN_WINDOW_MS).
    pub energy: bool,
    /// Rivals, in the syntax of `--peers`.
    pub peers: String,
    /// States of the L2 cache before a launch; each case is measured in each of them.
    pub cache: Vec<Cache>,
    /// Cases in the order of the file. A suite without cases measures only the ceilings of the GPU.
    pub cases: Vec<Case>,
    /// Cases that are measured without rivals.
    pub alone: Vec<Case>,
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
    #[serde(default)]
    energy: bool,
    #[serde(default = "default_peers")]
    peers: String,
    #[serde(default = "default_cache")]
    cache: Vec<Cache>,
    #[serde(default)]
    attention_fwd: Vec<AttentionGrid>,
    #[serde(default)]
    block_sparse_fwd: Vec<BlockSparseGrid>,
    #[serde(default)]
    attention_bwd: Vec<AttentionGrid>,
    #[serde(default)]
    block_sparse_bwd: Vec<BlockSparseGrid>,
    #[serde(default)]
    attention_decode: Vec<DecodeGrid>,
    #[serde(default)]
    block_mask_build: Vec<BlockMaskGrid>,
    #[serde(default)]
    bsr_matmul: Vec<BsrGrid>,
    #[serde(default)]
    bsr_sddmm: Vec<SddmmGrid>,
}

fn default_rounds() -> usize {
    5
}

fn default_window_ms() -> f64 {
    100.0
}

fn default_gap_ms() -> f64 {
    100.0
}

fn default_cache() -> Vec<Cache> {
    vec![Cache::Warm]
}

fn default_peers() -> String {
    "auto".to_owned()
}

/// The suites that the program has with it, by name.
const OWN: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/suites.rs"));

impl Suite {
    /// Loads a suite by name from `benches/suites`, else the one of this name that the program has
    /// with it; or from any path that ends in `.toml`.
    ///
    /// # Errors
    /// [`Error::NoSuite`] lists the available suites; [`Error::Suite`] says what is wrong in the
    /// file; [`Error::Io`].
    pub fn load(benches: &Path, name: &str) -> Result<Self> {
        let path = match name.ends_with(".toml") {
            true => PathBuf::from(name),
            false => benches.join("suites").join(format!("{name}.toml")),
        };
        let own = OWN.iter().find(|(own, _)| *own == name);
        let text = match own {
            Some((_, text)) if !path.is_file() => (*text).to_owned(),
            None if !path.is_file() => {
                let present = Self::names(benches).join(", ");
                return Err(Error::NoSuite { name: name.to_owned(), present });
            }
            _ => std::fs::read_to_string(&path).map_err(Error::io(&path))?,
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self::parse(name, &text).map_err(|problem| Error::Suite { path, problem })
    }

    /// A suite of these cases without rivals, at the default settings.
    pub fn of(cases: Vec<Case>) -> Self {
        Self {
            name: "cases".to_owned(),
            description: String::new(),
            rounds: default_rounds(),
            window_ms: default_window_ms(),
            gap_ms: default_gap_ms(),
            energy: false,
            peers: "none".to_owned(),
            cache: default_cache(),
            cases,
            alone: Vec::new(),
        }
    }

    /// Names of the suites in `benches/suites` and of those of the program, in alphabetical order.
    pub fn names(benches: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(benches.join("suites")).into_iter().flatten().flatten();
        let name =
            |path: PathBuf| Some(path.file_name()?.to_str()?.strip_suffix(".toml")?.to_owned());
        let mut names: BTreeSet<_> = entries.filter_map(|entry| name(entry.path())).collect();
        names.extend(OWN.iter().map(|(name, _)| (*name).to_owned()));
        names.into_iter().collect()
    }

    fn parse(name: String, text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| {
            // The parser's message spans several lines and draws the location; only its text and
            // the line number are kept.
            let line = error
                .span()
                .map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            format!("line {line}: {}", error.message())
        })?;
        let File { description, rounds, window_ms, gap_ms, energy, peers, cache, .. } = file;
        let (mut cases, mut alone) = (Vec::new(), Vec::new());
        let mut expand = |peers: GridPeers, grid: &dyn Fn(&mut Vec<Case>) -> Result<(), String>| {
            let first = cases.len();
            grid(&mut cases)?;
            if peers == GridPeers::None {
                alone.extend_from_slice(&cases[first..]);
            }
            Ok::<_, String>(())
        };
        file.attention_fwd
            .iter()
            .try_for_each(|grid| expand(grid.peers, &|cases| grid.expand(cases)))?;
        file.block_sparse_fwd
            .iter()
            .try_for_each(|grid| expand(grid.peers, &|cases| grid.expand(cases)))?;
        file.attention_bwd.iter().try_for_each(|grid| {
            expand(grid.peers, &|cases| backward(cases, |forward| grid.expand(forward)))
        })?;
        file.block_sparse_bwd.iter().try_for_each(|grid| {
            expand(grid.peers, &|cases| backward(cases, |forward| grid.expand(forward)))
        })?;
        file.attention_decode
            .iter()
            .try_for_each(|grid| expand(grid.peers, &|cases| grid.expand(cases)))?;
        file.block_mask_build.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        file.bsr_matmul.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        file.bsr_sddmm.iter().try_for_each(|grid| grid.expand(&mut cases))?;
        let mut ids = BTreeSet::new();
        for case in &cases {
            case.check().map_err(|problem| format!("{case}: {problem}"))?;
            if !ids.insert(case.to_string()) {
                return Err(format!("{case} occurs twice"));
            }
        }
        if rounds == 0
            || !(window_ms > 0.0 && window_ms.is_finite())
            || !(gap_ms >= 0.0 && gap_ms.is_finite())
        {
            return Err(
                "rounds and window_ms must be positive, gap_ms must not be negative".to_owned()
            );
        }
        if cache.is_empty() || (1..cache.len()).any(|index| cache[..index].contains(&cache[index]))
        {
            return Err("cache lists warm, cold and rotated, each at most once".to_owned());
        }
        Ok(Self {
            name,
            description,
            rounds,
            window_ms,
            gap_ms,
            energy,
            peers,
            cache,
            cases,
            alone,
        })
    }
}

/// Adds the backward pass of each case that a grid of attention has.
fn backward(
    cases: &mut Vec<Case>,
    grid: impl Fn(&mut Vec<Case>) -> Result<(), String>,
) -> Result<(), String> {
    let mut forward = Vec::new();
    grid(&mut forward)?;
    cases.extend(forward.into_iter().filter_map(Case::backward));
    Ok(())
}

#[cfg(test)]
mod tests;
