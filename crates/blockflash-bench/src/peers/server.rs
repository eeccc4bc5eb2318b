use serde_json::Value;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of stderr lines that are kept to explain why the process exited.
const KEPT_LINES: usize = 40;

/// Command that starts the server.
#[derive(Clone, Debug)]
pub struct Command {
    /// Program, `python3` for the real one.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Whether its stderr is shown.
    pub verbose: bool,
}

/// Reason why there is no usable answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The reason as one line.
    pub message: String,
    /// Whether the process died, hung or lost its GPU context, and cannot be used any more.
    pub lost: bool,
}

impl Failure {
    pub(super) fn of(message: impl Into<String>) -> Self {
        Self { message: message.into(), lost: false }
    }

    fn lost(message: impl Into<String>) -> Self {
        Self { message: message.into(), lost: true }
    }
}

/// A running process that answers one JSON line with another. It is killed when dropped.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    answers: Receiver<String>,
    last_words: Arc<Mutex<VecDeque<String>>>,
}

impl Server {
    pub(super) fn start(command: &Command) -> Result<Self, Failure> {
        let mut process = std::process::Command::new(&command.program);
        process
            .args(&command.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let program = command.program.to_string_lossy();
        let mut child = process
            .spawn()
            .map_err(|error| Failure::of(format!("cannot start {program}: {error}")))?;
        let (sender, answers) = channel();
        if let Some(stdout) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
                lines.try_for_each(|line| sender.send(line))
            });
        }
        let last_words = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(stderr) = child.stderr.take() {
            let (kept, verbose) = (Arc::clone(&last_words), command.verbose);
            std::thread::spawn(move || {
                // Libraries may write bytes that are not UTF-8.
                for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                    let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                    if verbose {
                        let _ = writeln!(std::io::stderr(), "  peers: {line}");
                    }
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    if !line.is_empty() {
                        kept.push_back(line);
                    }
                    if kept.len() > KEPT_LINES {
                        kept.pop_front();
                    }
                }
            });
        }
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, answers, last_words })
    }

    /// Sends a request and waits for its answer.
    pub(super) fn ask(&mut self, request: &Value, timeout: Duration) -> Result<Value, Failure> {
        let line = format!("{request}\n");
        let sent =
            self.stdin.as_mut().is_some_and(|stdin| stdin.write_all(line.as_bytes()).is_ok());
        if !sent {
            return Err(self.died());
        }
        let answer = match self.answers.recv_timeout(timeout) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                let message = format!("no answer within {} s, so it was killed", timeout.as_secs());
                return Err(Failure::lost(message));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
        };
        let answer: Value = serde_json::from_str(&answer).map_err(|error| {
            Failure::lost(format!("the server of the rivals does not answer in JSON: {error}"))
        })?;
        match answer.get("error").and_then(Value::as_str) {
            None => Ok(answer),
            Some(message) => {
                Err(Failure { message: message.to_owned(), lost: answer.get("fatal").is_some() })
            }
        }
    }

    /// Failure for a process that exited: its exit status and its last line.
    fn died(&mut self) -> Failure {
        self.stdin = None;
        // The exit status and the last lines may take a moment to arrive.
        let patience = Instant::now() + Duration::from_secs(2);
        let mut status = None;
        while status.is_none() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(20));
            status = self.child.try_wait().ok().flatten();
        }
        let status = status
            .map_or_else(|| "closed its output".to_owned(), |status| format!("ended: {status}"));
        let last_words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner);
        let last = last_words.back().map(|line| format!(" ({})", line.trim())).unwrap_or_default();
        Failure::lost(format!("the server of the rivals {status}{last}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server exits when its input is closed; a process that hangs is killed.
        self.stdin = None;
        let patience = Instant::now() + Duration::from_secs(1);
        while Instant::now() < patience {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        // A process that is stuck in the driver cannot be waited for, so the wait is bounded.
        let patience = Instant::now() + Duration::from_secs(5);
        while Instant::now() < patience && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
