//! Products of other libraries, which take turns with ours.

use super::weights::{Kept, Weights};
use blockflash_bench::case::{BsrShape, Pattern, PeerCase};
use blockflash_bench::peers::{Command, Peers, Selection};
use blockflash_bench::timing::{flush_bytes, median};
use blockflash_bench::{Error, Result, machine};
use blockflash_ops::{DType, Device};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Name of the operation in the protocol.
const OP: &str = "bsr_matmul";

/// Time of a rival for both projections. It multiplies blocks at the same places with values of its
/// own, without the activation. Like ours, its weights come from device memory at each launch.
#[derive(Clone, Debug, Serialize)]
pub struct Rival {
    pub name: String,
    /// Microseconds of both products; `None` after an error.
    pub us: Option<f64>,
    pub error: Option<String>,
    /// Times of each projection.
    #[serde(skip)]
    times: [Vec<f64>; 2],
}

/// The process of the rivals.
pub struct Rivals {
    peers: Peers,
    seed: u64,
    /// Total size of the weight copies that launches use in turns.
    fresh_bytes: usize,
    /// Folder for pattern files.
    scratch: PathBuf,
}

impl Rivals {
    /// Starts the rivals. `list` is `none`, `auto`, or a comma-separated list of parts of names;
    /// `step` is told which rivals are missing.
    ///
    /// # Errors
    /// If rivals are wanted and their folder is missing, or a name matches no rival.
    pub fn start(
        list: &str,
        tune_seconds: u64,
        seed: u64,
        device: &Device,
        step: impl Fn(&str),
    ) -> Result<Self> {
        let selection = Selection::parse(list);
        let script = match selection {
            Selection::None => PathBuf::new(),
            _ => machine::benches()?.join("peers").join("serve.py"),
        };
        let arguments = vec![script.into(), "--device".into(), device.to_string().into()];
        let command = Command { program: "python3".into(), arguments, verbose: false };
        let peers = Peers::start(command, selection, tune_seconds);
        if let Some(name) = peers.unknown().first() {
            return Err(Error::Option(format!(
                "--peers: there is no rival whose name contains {name:?}"
            )));
        }
        for (names, reason) in peers.absent() {
            step(&format!("absent rivals: {} ({reason})", names.join(", ")));
        }
        Ok(Self::new(peers, seed, flush_bytes(&device.stream()?)))
    }

    /// The rivals of a running process, with this many bytes of weight copies.
    pub fn new(peers: Peers, seed: u64, fresh_bytes: usize) -> Self {
        // The folder belongs to this process alone and is removed with it.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let scratch =
            std::env::temp_dir().join(format!("blockflash-mlp-{}-{number}", std::process::id()));
        Self { peers, seed, fresh_bytes, scratch }
    }

    /// The rivals that multiply dense matrices, or the rivals that multiply blocks.
    pub fn named(&self, dense: bool) -> Vec<Rival> {
        let names =
            self.peers.of(OP).into_iter().filter(|name| self.peers.is_reference(name) == dense);
        names.map(|name| Rival { name, us: None, error: None, times: Default::default() }).collect()
    }

    /// Prepares the rivals for a projection; a rival that fails keeps its error from then on.
    ///
    /// # Errors
    /// A pattern that cannot be written.
    pub fn prepare(
        &mut self,
        rivals: &mut [Rival],
        weights: &Weights,
        kept: &Kept,
        tokens: usize,
    ) -> Result<()> {
        let case = self.case(weights, kept, tokens)?;
        for rival in rivals.iter_mut().filter(|rival| rival.error.is_none()) {
            rival.error = match self.peers.prepare(&case, &rival.name) {
                Ok(prepared) if prepared.verified => None,
                Ok(_) => Some("wrong result".to_owned()),
                Err(failure) => Some(failure.message),
            };
        }
        Ok(())
    }

    fn case(&self, weights: &Weights, kept: &Kept, tokens: usize) -> Result<PeerCase> {
        let failed = |source| Error::Io { path: self.scratch.clone(), source };
        std::fs::create_dir_all(&self.scratch).map_err(failed)?;
        let (m, k) = weights.0.dim();
        let density = kept.elements() as f64 / (m * k) as f64;
        let block_size = kept.block_size;
        let pattern = Pattern::Random;
        let shape = BsrShape { m, n: tokens, k, block_size, density, pattern, dtype: DType::BF16 };
        let indices = (kept.row_ptr.clone(), kept.col_idx.clone());
        let case = PeerCase::new(OP, &shape, self.seed)
            .and_then(|case| case.with_pattern(&self.scratch, "", indices))
            .map_err(|error| Error::Option(error.to_string()))?;
        Ok(case.with_fresh_bytes(self.fresh_bytes))
    }

    /// Runs a window of a rival; it counts if a projection is given, otherwise it warms up.
    pub fn window(&mut self, rival: &mut Rival, ms: f64, projection: Option<usize>) {
        match (self.peers.window(&rival.name, ms), projection) {
            (Ok(window), Some(projection)) => rival.times[projection].push(window.us),
            (Ok(_), None) => {}
            (Err(failure), _) => rival.error = Some(failure.message),
        }
    }

    /// Frees the prepared case in the server.
    pub fn forget(&mut self) {
        self.peers.forget();
    }
}

impl Rival {
    /// Time of both projections together: the sum of their medians.
    #[must_use]
    pub fn finish(mut self) -> Self {
        let [up, down] = self.times.each_mut().map(|times| median(times));
        self.us = up.zip(down).filter(|_| self.error.is_none()).map(|(up, down)| up + down);
        self
    }
}

impl Drop for Rivals {
    fn drop(&mut self) {
        // The folder contains only patterns, so a leftover in the temporary folder is harmless.
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}
