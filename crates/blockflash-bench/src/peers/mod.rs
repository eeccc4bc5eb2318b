//! Competitors run in another process: `benches/peers/serve.py` lives as long as the run and is
//! asked for one window at a time.

mod server;

use crate::case::PeerCase;
use crate::timing::{Cache, GRAPH_US, MAX_LAUNCHES, Window};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use server::Server;
pub use server::{Command, Failure};
use std::collections::BTreeMap;
use std::time::Duration;

/// Timeout for the start, which may import torch from a cold disk.
const HELLO: Duration = Duration::from_secs(180);
/// Timeout for inputs, reference, compilation and graph capture, without the sweep of a tuned
/// competitor.
const PREPARE: Duration = Duration::from_secs(180);
/// Time that a window may take beyond its length.
const WINDOW: Duration = Duration::from_secs(20);

/// Stands for all competitors when there is no server that could name them.
const EVERYTHING: &str = "all";

/// What the server offers, in its own words.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Hello {
    /// Competitor names by operation, in the order of the server.
    peers: BTreeMap<String, Vec<String>>,
    absent: BTreeMap<String, String>,
    references: Vec<String>,
    deterministic: Vec<String>,
    torch: Option<String>,
    cudnn: Option<Value>,
}

/// A competitor that is prepared and ready for its windows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Prepared {
    /// Whether its output matches the reference.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖; `None` for NaN.
    pub rel_err: Option<f64>,
    /// Launch parameters; empty if the competitor reports none.
    #[serde(default)]
    pub settings: String,
}

/// Selection of competitors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// No competitor: the server is not started.
    None,
    /// Every competitor that the machine has.
    Auto,
    /// Competitors whose names contain one of these texts.
    Some(Vec<String>),
}

impl Selection {
    /// `none`, `auto`, or a comma-separated list of names or parts of names.
    pub fn parse(text: &str) -> Self {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        match text.trim() {
            "none" | "" => Self::None,
            "auto" => Self::Auto,
            _ => Self::Some(names.map(str::to_owned).collect()),
        }
    }

    fn wants(&self, name: &str) -> bool {
        match self {
            Self::None => false,
            Self::Auto => true,
            Self::Some(parts) => parts.iter().any(|part| name.contains(part.as_str())),
        }
    }
}

/// The competitors of a run.
#[derive(Debug)]
pub struct Peers {
    command: Command,
    tune_seconds: u64,
    selection: Selection,
    hello: Hello,
    server: Option<Server>,
    /// The case that is prepared and its prepared competitors, kept so that a new process can
    /// prepare them again.
    case: Option<Value>,
    prepared: Vec<String>,
    cache: Cache,
    flush_bytes: usize,
}

impl Peers {
    /// Starts the server and asks which competitors it has. Without Python or torch there are no
    /// competitors, and [`absent`](Self::absent) gives the reason.
    pub fn start(command: Command, selection: Selection, tune_seconds: u64) -> Self {
        let mut peers = Self {
            command,
            tune_seconds,
            selection,
            hello: Hello::default(),
            server: None,
            case: None,
            prepared: Vec::new(),
            cache: Cache::Warm,
            flush_bytes: 0,
        };
        if peers.selection != Selection::None
            && let Err(failure) = peers.restart()
        {
            peers.hello.absent.insert(EVERYTHING.to_owned(), failure.message);
        }
        peers
    }

    /// No competitors, for measurements of ours only.
    pub fn none() -> Self {
        let command = Command { program: "python3".into(), arguments: vec![], verbose: false };
        Self::start(command, Selection::None, 0)
    }

    /// Competitors that this machine lacks, grouped by reason.
    pub fn absent(&self) -> Vec<(Vec<String>, String)> {
        let mut reasons: Vec<(Vec<String>, String)> = Vec::new();
        let wanted = |name: &str| name == EVERYTHING || self.selection.wants(name);
        for (name, reason) in self.hello.absent.iter().filter(|(name, _)| wanted(name)) {
            match reasons.iter_mut().find(|(_, other)| other == reason) {
                Some((names, _)) => names.push(name.clone()),
                None => reasons.push((vec![name.clone()], reason.clone())),
            }
        }
        reasons
    }

    /// Entries of `--peers` that no competitor's name contains.
    pub fn unknown(&self) -> Vec<String> {
        let Selection::Some(parts) = &self.selection else { return Vec::new() };
        if self.hello.absent.contains_key(EVERYTHING) {
            return Vec::new(); // nobody could say
        }
        let names = self.hello.peers.values().flatten().chain(self.hello.absent.keys());
        let unknown = |part: &&String| !names.clone().any(|name| name.contains(part.as_str()));
        parts.iter().filter(unknown).cloned().collect()
    }

    /// Versions of the libraries that the server uses, as readable text.
    pub fn versions(&self) -> Option<String> {
        let torch = self.hello.torch.as_ref()?;
        let cudnn = self.hello.cudnn.as_ref().map(|cudnn| format!(", cuDNN {cudnn}"));
        Some(format!("torch {torch}{}", cudnn.unwrap_or_default()))
    }

    /// Names of the selected competitors of an operation that this machine has.
    pub fn of(&self, op: &str) -> Vec<String> {
        let names = self.hello.peers.get(op).into_iter().flatten();
        names.filter(|name| self.selection.wants(name)).cloned().collect()
    }

    /// Whether it is only a reference and no competitor: it computes something else, such as a
    /// dense product.
    pub fn is_reference(&self, name: &str) -> bool {
        self.hello.references.iter().any(|reference| reference == name)
    }

    /// Whether the competitor gives the same bits at each launch, which preparing it checks.
    pub fn is_deterministic(&self, name: &str) -> bool {
        self.hello.deterministic.iter().any(|deterministic| deterministic == name)
    }

    /// Sets the state of the L2 cache for competitors that are prepared from now on, and how many
    /// bytes they overwrite to make the cache cold, or how large all copies are together.
    pub fn set_cache(&mut self, cache: Cache, flush_bytes: usize) {
        (self.cache, self.flush_bytes) = (cache, flush_bytes);
    }

    /// Builds the inputs of the case in the server (once per case), captures the launches of the
    /// competitor and verifies their output.
    ///
    /// # Errors
    /// The error of the competitor. If the server died or hung, it is started again.
    pub fn prepare(&mut self, case: &PeerCase, name: &str) -> Result<Prepared, Failure> {
        let case = serde_json::to_value(case).map_err(|error| Failure::of(error.to_string()))?;
        if self.case.as_ref() != Some(&case) {
            self.forget();
            self.case = Some(case);
        }
        let prepared = self.ask_prepare(name);
        match &prepared {
            Ok(_) => self.prepared.push(name.to_owned()),
            Err(failure) => self.recover(failure),
        }
        prepared
    }

    /// Runs one window of a prepared competitor. Returns when its GPU work is done.
    ///
    /// # Errors
    /// The error of the competitor. If the server died or hung, it is started again and the others
    /// are prepared anew.
    pub fn window(&mut self, name: &str, ms: f64) -> Result<Window, Failure> {
        let timeout = WINDOW + Duration::from_secs_f64(ms * 1e-3 * 5.0);
        let answer = self.ask(&json!({"op": "window", "peer": name, "ms": ms}), timeout);
        if let Err(failure) = &answer {
            self.prepared.retain(|other| other != name);
            self.recover(failure);
        }
        answer
    }

    /// Frees the inputs and competitors of a case, so that our next window finds the memory free.
    pub fn forget(&mut self) {
        if self.case.take().is_some() {
            self.prepared.clear();
            if let Err(failure) = self.ask::<Value>(&json!({"op": "drop"}), PREPARE) {
                self.recover(&failure);
            }
        }
    }

    fn ask_prepare(&mut self, name: &str) -> Result<Prepared, Failure> {
        let request = json!({
            "op": "prepare", "case": self.case, "peer": name,
            "options": {"tune_seconds": self.tune_seconds},
            "graph_us": GRAPH_US, "max_launches": MAX_LAUNCHES,
            "cache": self.cache, "flush_bytes": self.flush_bytes,
        });
        self.ask(&request, PREPARE + 4 * Duration::from_secs(self.tune_seconds))
    }

    fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Value,
        timeout: Duration,
    ) -> Result<T, Failure> {
        let none = || Failure::of("the server of the competitors is not running");
        let answer = self.server.as_mut().ok_or_else(none)?.ask(request, timeout)?;
        serde_json::from_value(answer)
            .map_err(|error| Failure::of(format!("unexpected answer of the server: {error}")))
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.server = None; // the old process is gone before the new one needs its memory
        self.server = Some(Server::start(&self.command)?);
        let hello = self.ask(&json!({"op": "hello"}), HELLO);
        self.hello = hello.inspect_err(|_| self.server = None)?;
        Ok(())
    }

    /// If a failure has cost the process, starts a new one and prepares the competitors of the lost
    /// one. A competitor that cannot be prepared again fails at its next window.
    fn recover(&mut self, failure: &Failure) {
        if !failure.lost || self.restart().is_err() {
            return;
        }
        for name in std::mem::take(&mut self.prepared) {
            match self.ask_prepare(&name) {
                Ok(_) => self.prepared.push(name),
                Err(failure) if failure.lost => {
                    // The server was lost twice in a row. It is not started a third time, or a run
                    // might never end.
                    self.server = None;
                    return;
                }
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
