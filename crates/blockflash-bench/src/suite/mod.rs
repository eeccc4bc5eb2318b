//! Suites: files that list the cases to measure, as grids, or cases that are drawn.

mod drawn;

pub use drawn::{DRAWN, Limits, Model, Models, Operation};

use crate::case::{
    AttentionGrid, BlockMaskGrid, BsrGrid, Case, ChoiceGrid, DecodeGrid, GridPeers, IndexGrid,
    Pass, QuantizeGrid, SddmmGrid,
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
    /// Minimum number of windows per implementation; a balanced order may add a few.
    pub rounds: usize,
    /// Length of a window in milliseconds.
    pub window_ms: f64,
    /// Idle time before each window in milliseconds.
    pub gap_ms: f64,
    /// Whether the joules of a launch are measured, too, which takes windows of at least
    /// [`MIN_WINDOW_MS`](crate::energy::MIN_WINDOW_MS).
    pub energy: bool,
    /// Competitors, in the syntax of `--peers`.
    pub peers: String,
    /// States of the L2 cache before a launch; each case is measured in each of them.
    pub cache: Vec<Cache>,
    /// Cases in the order of the file. A suite without cases measures only the ceilings of the GPU.
    pub cases: Vec<Case>,
    /// Cases that are measured without competitors.
    pub alone: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    description: String,
    rounds: Option<usize>,
    window_ms: Option<f64>,
    gap_ms: Option<f64>,
    energy: Option<bool>,
    peers: Option<String>,
    cache: Option<Vec<Cache>>,
    #[serde(default)]
    attention_fwd: Vec<AttentionGrid>,
    #[serde(default)]
    block_sparse_fwd: Vec<AttentionGrid>,
    #[serde(default)]
    attention_bwd: Vec<AttentionGrid>,
    #[serde(default)]
    block_sparse_bwd: Vec<AttentionGrid>,
    #[serde(default)]
    attention_decode: Vec<DecodeGrid>,
    #[serde(default)]
    attention_index: Vec<IndexGrid>,
    #[serde(default)]
    index_choice: Vec<ChoiceGrid>,
    #[serde(default)]
    block_mask_build: Vec<BlockMaskGrid>,
    #[serde(default)]
    quantize: Vec<QuantizeGrid>,
    #[serde(default)]
    bsr_matmul: Vec<BsrGrid>,
    #[serde(default)]
    bsr_sddmm: Vec<SddmmGrid>,
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
            _ if path.is_file() => std::fs::read_to_string(&path).map_err(Error::io(&path))?,
            Some((_, text)) => (*text).to_owned(),
            None => {
                let present = Self::names(benches).join(", ");
                return Err(Error::NoSuite { name: name.to_owned(), present });
            }
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self::parse(name, &text).map_err(|problem| Error::Suite { path, problem })
    }

    /// A suite of these cases at the default settings.
    pub fn of(cases: Vec<Case>) -> Self {
        Self {
            name: "cases".to_owned(),
            description: String::new(),
            rounds: 5,
            window_ms: 100.0,
            gap_ms: 100.0,
            energy: false,
            peers: "auto".to_owned(),
            cache: vec![Cache::Warm],
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
            let start = error.span().map_or(0, |span| span.start.min(text.len()));
            format!("line {}: {}", 1 + text[..start].matches('\n').count(), error.message())
        })?;
        let (cases, alone) = file.cases()?;
        let default = Self::of(cases);
        let suite = Self {
            name,
            description: file.description,
            rounds: file.rounds.unwrap_or(default.rounds),
            window_ms: file.window_ms.unwrap_or(default.window_ms),
            gap_ms: file.gap_ms.unwrap_or(default.gap_ms),
            energy: file.energy.unwrap_or(default.energy),
            peers: file.peers.unwrap_or(default.peers),
            cache: file.cache.unwrap_or(default.cache),
            alone,
            cases: default.cases,
        };
        suite.check().map(|()| suite)
    }

    fn check(&self) -> Result<(), String> {
        let Self { rounds, window_ms, gap_ms, cache, .. } = self;
        let mut ids = BTreeSet::new();
        for case in &self.cases {
            case.check().map_err(|problem| format!("{case}: {problem}"))?;
            if !ids.insert(case.to_string()) {
                return Err(format!("{case} occurs twice"));
            }
        }
        let windows = *window_ms > 0.0 && window_ms.is_finite();
        if *rounds == 0 || !windows || !(*gap_ms >= 0.0 && gap_ms.is_finite()) {
            return Err(format!(
                "rounds is {rounds} and window_ms {window_ms}, but both must be positive; gap_ms \
                 is {gap_ms}, but must not be negative"
            ));
        }
        if cache.is_empty() || (1..cache.len()).any(|at| cache[..at].contains(&cache[at])) {
            return Err("cache lists warm, cold and rotated, each at most once".to_owned());
        }
        Ok(())
    }
}

impl File {
    /// All cases, and those that are measured without competitors.
    fn cases(&self) -> Result<(Vec<Case>, Vec<Case>), String> {
        let (mut cases, mut alone) = (Vec::new(), Vec::new());
        let mut add = |peers: GridPeers, of_grid: Result<Vec<Case>, String>| {
            let of_grid = of_grid?;
            if peers == GridPeers::None {
                alone.extend_from_slice(&of_grid);
            }
            cases.extend(of_grid);
            Ok::<_, String>(())
        };
        for (grids, pass, block_sparse) in [
            (&self.attention_fwd, Pass::Forward, false),
            (&self.block_sparse_fwd, Pass::Forward, true),
            (&self.attention_bwd, Pass::Backward, false),
            (&self.block_sparse_bwd, Pass::Backward, true),
        ] {
            grids.iter().try_for_each(|grid| add(grid.peers, grid.expand(pass, block_sparse)))?;
        }
        self.attention_decode.iter().try_for_each(|grid| add(grid.peers, grid.expand()))?;
        self.attention_index.iter().try_for_each(|grid| add(grid.peers, grid.expand()))?;
        self.index_choice.iter().try_for_each(|grid| add(grid.peers, grid.expand()))?;
        let all = GridPeers::Suite;
        self.block_mask_build.iter().try_for_each(|grid| add(all, grid.expand()))?;
        self.quantize.iter().try_for_each(|grid| add(all, grid.expand()))?;
        self.bsr_matmul.iter().try_for_each(|grid| add(all, grid.expand()))?;
        self.bsr_sddmm.iter().try_for_each(|grid| add(all, grid.expand()))?;
        Ok((cases, alone))
    }
}

#[cfg(test)]
mod tests;
