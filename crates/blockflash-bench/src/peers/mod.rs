//! Rivals run in another process: `benches/peers/serve.py` lives as long as the run and is asked
//! for one window at a time.

mod server;

use crate::case::PeerCase;
use crate::timing::{Cache, GRAPH_US, MAX_LAUNCHES, Window};
use serde::Deserialize;
use serde_json::{Value, json};
use server::Server;
pub use server::{Command, Failure};
use std::collections::BTreeMap;
use std::time::Duration;

/// Timeout for the start, which may import torch from a cold disk.
const HELLO: Duration = Duration::from_secs(180);
/// Timeout for inputs, reference, compilation and graph capture, without the sweep of a tuned
/// rival.
const PREPARE: Duration = Duration::from_secs(180);
/// Time that a window may take beyond its length.
const WINDOW: Duration = Duration::from_secs(20);

/// Stands for all rivals when there is no server that could name them.
const EVERYTHING: &str = "all";

/// What the server offers, in its own words.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Hello {
    /// Rival names by operation, in the order of the server.
    peers: BTreeMap<String, Vec<String>>,
    absent: BTreeMap<String, String>,
    references: Vec<String>,
    deterministic: Vec<String>,
    torch: Option<String>,
    cudnn: Option<Value>,
}

/// A rival that is prepared and ready for its windows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Prepared {
    /// Whether its output matches the reference.
    pub verified: bool,
    /// ‖out − reference‖ / ‖reference‖; `None` for NaN.
    pub rel_err: Option<f64>,
    /// Launch parameters; empty if the rival reports none.
    #[serde(default)]
    pub settings: String,
}

/// Selection of rivals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// No rival: the server is not started.
    None,
    /// Every rival that the machine has.
    Auto,
    /// Rivals whose names contain one of these texts.
    Some(Vec<String>),
}

impl Selection {
    /// `none`, `auto`, or a comma-separated list of names or parts of names.
    pub fn parse(text: &str) -> Self {
        let names = || {
            text.split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect()
        };
        match text.trim() {
            "none" | "" => Self::None,
            "auto" => Self::Auto,
            _ => Self::Some(names()),
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

/// The rivals of a run.
#[derive(Debug)]
pub struct Peers {
    command: Command,
    tune_seconds: u64,
    selection: Selection,
    hello: Hello,
    server: Option<Server>,
    /// The case that is prepared and its prepared rivals, kept so that a new process can prepare
    /// them again.
    case: Option<Value>,
    prepared: Vec<String>,
    cache: Cache,
    flush_bytes: usize,
}

impl Peers {
    /// Starts the server and asks which rivals it has. Without Python or torch there are no rivals,
    /// and [`absent`](Self::absent) gives the reason.
    pub fn start(command: Command, selection: Selection, tune_seconds: u64) -> Self {
        let (hello, server, case, prepared) = (Hello::default(), None, None, Vec::new());
        let (cache, flush_bytes) = (Cache::Warm, 0);
        let mut peers = Self {
            command,
            tune_seconds,
            selection,
            hello,
            server,
            case,
            prepared,
            cache,
            flush_bytes,
        };
        if peers.selection == Selection::None {
            return peers;
        }
        if let Err(failure) = peers.restart() {
            peers.hello.absent.insert(EVERYTHING.to_owned(), failure.message);
            peers.server = None;
        }
        peers
    }

    /// Rivals that this machine lacks, grouped by reason.
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

    /// Entries of `--peers` that no rival's name contains.
    pub fn unknown(&self) -> Vec<String> {
        let Selection::Some(parts) = &self.selection else { return Vec::new() };
        let known: Vec<_> =
            self.hello.peers.values().flatten().chain(self.hello.absent.keys()).collect();
        if self.hello.absent.contains_key(EVERYTHING) {
            return Vec::new(); // nobody could say
        }
        let unknown = |part: &&String| !known.iter().any(|name| name.contains(part.as_str()));
        parts.iter().filter(unknown).cloned().collect()
    }

    /// Versions of the libraries that the server uses, as readable text.
    pub fn versions(&self) -> Option<String> {
        let torch = self.hello.torch.as_ref()?;
        Some(match &self.hello.cudnn {
            Some(cudnn) => format!("torch {torch}, cuDNN {cudnn}"),
            None => format!("torch {torch}"),
        })
    }

    /// Names of the selected rivals of an operation that this machine has.
    pub fn of(&self, op: &str) -> Vec<String> {
        let names = self.hello.peers.get(op).into_iter().flatten();
        names.filter(|name| self.selection.wants(name)).cloned().collect()
    }

    /// Whether the rival is only a mark: it computes something else, such as a dense product.
    pub fn is_reference(&self, name: &str) -> bool {
        self.hello.references.iter().any(|reference| reference == name)
    }

    /// Whether the rival gives the same bits at each launch, which preparing it checks.
    pub fn is_deterministic(&self, name: &str) -> bool {
        self.hello.deterministic.iter().any(|deterministic| deterministic == name)
    }

    /// Sets the state of the L2 cache for rivals that are prepared from now on, and how many bytes
    /// they overwrite to make the cache cold, or take in turn.
    pub fn set_cache(&mut self, cache: Cache, flush_bytes: usize) {
        (self.cache, self.flush_bytes) = (cache, flush_bytes);
    }

    /// Builds the inputs of the case in the server (once per case), captures the launches of the
    /// rival and verifies their output.
    ///
    /// # Errors
    /// The error of the rival. If the server died or hung, it is started again.
    pub fn prepare(&mut self, case: &PeerCase, name: &str) -> Result<Prepared, Failure> {
        let case = serde_json::to_value(case).map_err(|error| Failure::of(error.to_string()))?;
        if self.case.as_ref() != Some(&case) {
            self.forget();
            self.case = Some(case);
        }
        let prepared = self.ask_prepare(name);
        match &prepared {
            Ok(_) => self.prepared.push(name.to_owned()),
            Err(failure) if failure.lost => self.recover(),
            Err(_) => {}
        }
        prepared
    }

    /// Runs one window of a prepared rival. Returns when its GPU work is done.
    ///
    /// # Errors
    /// The error of the rival. If the server died or hung, it is started again and the other rivals
    /// are prepared anew.
    pub fn window(&mut self, name: &str, ms: f64) -> Result<Window, Failure> {
        let timeout = WINDOW + Duration::from_secs_f64(ms * 1e-3 * 5.0);
        let answer = self.ask(&json!({"op": "window", "peer": name, "ms": ms}), timeout);
        if let Err(failure) = &answer {
            self.prepared.retain(|other| other != name);
            if failure.lost {
                self.recover();
            }
        }
        answer.and_then(decode)
    }

    /// Frees the inputs and rivals of a case, so that our next window finds the memory free.
    pub fn forget(&mut self) {
        if self.case.take().is_some() {
            self.prepared.clear();
            if self.ask(&json!({"op": "drop"}), PREPARE).is_err_and(|failure| failure.lost) {
                self.recover();
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
        self.ask(&request, PREPARE + 4 * Duration::from_secs(self.tune_seconds)).and_then(decode)
    }

    fn ask(&mut self, request: &Value, timeout: Duration) -> Result<Value, Failure> {
        match &mut self.server {
            Some(server) => server.ask(request, timeout),
            None => Err(Failure::of("the server of the rivals is not running")),
        }
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.server = None; // the old process is gone before the new one needs its memory
        let mut server = Server::start(&self.command)?;
        self.hello = server.ask(&json!({"op": "hello"}), HELLO).and_then(decode)?;
        self.server = Some(server);
        Ok(())
    }

    /// Starts a new process and prepares the rivals of the lost one. A rival that cannot be
    /// prepared again fails at its next window.
    fn recover(&mut self) {
        if self.restart().is_err() {
            self.server = None;
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

fn decode<T: serde::de::DeserializeOwned>(answer: Value) -> Result<T, Failure> {
    serde_json::from_value(answer)
        .map_err(|error| Failure::of(format!("unexpected answer of the server: {error}")))
}

#[cfg(test)]
mod tests;
