use serde_json::Value;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

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
    /// Lines of stderr, the last of which explains why the process exited.
    complaints: Receiver<String>,
}

impl Server {
    pub(super) fn start(command: &Command) -> Result<Self, Failure> {
        let mut process = std::process::Command::new(&command.program);
        process.args(&command.arguments);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.program.to_string_lossy();
        let mut child = process
            .spawn()
            .map_err(|error| Failure::of(format!("cannot start {program}: {error}")))?;
        let answers = lines(child.stdout.take(), false);
        let complaints = lines(child.stderr.take(), command.verbose);
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, answers, complaints })
    }

    /// Sends a request and waits for its answer.
    pub(super) fn ask(&mut self, request: &Value, timeout: Duration) -> Result<Value, Failure> {
        let line = format!("{request}\n");
        let sent = self.stdin.as_mut().map(|stdin| stdin.write_all(line.as_bytes()));
        let answer = match sent {
            Some(Ok(())) => self.answers.recv_timeout(timeout),
            _ => Err(RecvTimeoutError::Disconnected),
        };
        let answer = answer.map_err(|error| match error {
            RecvTimeoutError::Disconnected => self.died(),
            RecvTimeoutError::Timeout => {
                Failure::lost(format!("no answer within {} s, so it was killed", timeout.as_secs()))
            }
        })?;
        let answer: Value = serde_json::from_str(&answer).map_err(|error| {
            Failure::lost(format!("the server of the competitors does not answer in JSON: {error}"))
        })?;
        match answer.get("error").and_then(Value::as_str) {
            None => Ok(answer),
            Some(error) => {
                Err(Failure { message: error.to_owned(), lost: answer.get("fatal").is_some() })
            }
        }
    }

    /// Failure for a process that exited: its exit status and its last line.
    fn died(&mut self) -> Failure {
        self.stdin = None;
        // The exit status and the last lines may take a moment to arrive.
        let ended = match self.wait(Duration::from_secs(2)) {
            Some(status) => format!("ended: {status}"),
            None => "closed its output".to_owned(),
        };
        let last = self.complaints.try_iter().filter(|line| !line.trim().is_empty()).last();
        let last = last.map(|line| format!(" ({})", line.trim())).unwrap_or_default();
        Failure::lost(format!("the server of the competitors {ended}{last}"))
    }

    fn wait(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let start = Instant::now();
        loop {
            std::thread::sleep(Duration::from_millis(10));
            match self.child.try_wait() {
                Ok(None) if start.elapsed() < limit => {}
                status => return status.ok().flatten(),
            }
        }
    }
}

/// The lines of a stream, which a thread reads.
fn lines(stream: Option<impl std::io::Read + Send + 'static>, verbose: bool) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        // Libraries may write bytes that are not UTF-8.
        for line in stream.into_iter().flat_map(|stream| BufReader::new(stream).split(b'\n')) {
            let Ok(line) = line else { return };
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if verbose {
                let _ = writeln!(std::io::stderr(), "  peers: {line}");
            }
            // Nobody may be interested any more.
            let _ = sender.send(line);
        }
    });
    lines
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server exits when its input is closed; a process that hangs is killed. One that is
        // stuck in the driver cannot be waited for, so the wait is bounded.
        self.stdin = None;
        if self.wait(Duration::from_secs(1)).is_none() {
            let _ = self.child.kill();
            self.wait(Duration::from_secs(5));
        }
    }
}
