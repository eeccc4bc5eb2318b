//! `cargo xtask test`: runs the tests of the whole workspace and prints one line of counts.

use crate::{record, workspace};
use anyhow::{Context, Result, anyhow, bail};
use std::{
    collections::BTreeSet,
    fmt,
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
    thread,
};

/// Beginning of the line with which a test reports that it cannot run here.
const SKIPPED: &str = "SKIPPED (";

/// Run the tests of the whole workspace and count them.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Fail if a test finds no usable GPU, instead of skipping it, and record the images that
    /// passed in tests/gpu-passed.jsonl.
    #[arg(long)]
    require_gpu: bool,
    /// Arguments for every test binary, for example a part of a test's name.
    #[arg(last = true)]
    filter: Vec<String>,
}

/// Runs the command and prints the summary last.
pub fn run(args: &Args) -> Result<()> {
    let (summary, result) = tests(args)?;
    result.map_err(|error| anyhow!("{error:#}\n{summary}"))?;
    println!("{summary}");
    Ok(())
}

/// Runs the tests. Returns the counts, and an error if something failed.
pub fn tests(args: &Args) -> Result<(Summary, Result<()>)> {
    // Building is a step of its own, so that cargo shows its progress on the terminal.
    let built = workspace::run(workspace::cargo().args(["test", "--workspace", "--no-run"]));
    let mut command = workspace::cargo();
    command
        .args(["test", "--workspace", "--no-fail-fast", "--", "--show-output"])
        .args(&args.filter);
    let fresh = workspace::target_dir("gpu")?.join("passed.jsonl");
    if args.require_gpu {
        workspace::write(&fresh, "")?;
        command.env("BLOCKFLASH_REQUIRE_GPU", "1").env("BLOCKFLASH_GPU_RECORD", &fresh);
    }
    let mut summary = Summary::default();
    let mut succeeded = false;
    if built.is_ok() {
        succeeded = follow(&mut command, &mut summary)?;
        if args.require_gpu {
            record::merge(&fresh)?;
        }
    }
    Ok((summary, built.and_then(|()| verdict(&summary, succeeded))))
}

/// Runs the test programs, shows their output and counts; returns whether all of them succeeded.
fn follow(command: &mut Command, summary: &mut Summary) -> Result<bool> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no output")?;
    let stderr = child.stderr.take().context("cargo test has no error output")?;
    // A test may write past the harness, so both streams have to be read concurrently.
    let said = thread::spawn(move || {
        let mut skips = BTreeSet::new();
        for line in lines(stderr) {
            eprintln!("{line}");
            if line.starts_with(SKIPPED) {
                skips.insert(line);
            }
        }
        skips.len()
    });
    for line in lines(stdout) {
        if summary.read(&line) {
            println!("{line}");
        }
    }
    summary.skipped_itself += said.join().unwrap_or_default();
    Ok(child.wait()?.success())
}

/// Lines of a program's output, which need not be UTF-8.
fn lines(stream: impl Read) -> impl Iterator<Item = String> {
    let lines = BufReader::new(stream).split(b'\n').map_while(Result::ok);
    lines.map(|line| String::from_utf8_lossy(&line).into_owned())
}

fn verdict(summary: &Summary, cargo_succeeded: bool) -> Result<()> {
    if summary.failed > 0 {
        bail!("{} tests failed", summary.failed);
    }
    if !cargo_succeeded {
        bail!("a test program did not build or did not end properly");
    }
    if summary.reported_passed + summary.ignored == 0 {
        bail!("no test ran");
    }
    Ok(())
}

/// Counts over all test programs, parsed from their output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Tests that the harness reports as passed; tests that skipped themselves are among them.
    reported_passed: usize,
    failed: usize,
    ignored: usize,
    skipped_itself: usize,
    /// Whether the current line is in the section that repeats the output of successful tests.
    in_successes: bool,
    /// Whether the test that is being read has already been counted as skipped.
    counted: bool,
}

impl Summary {
    /// The counts of a report that pytest has written as JUnit XML.
    pub fn of_pytest(xml: &str) -> Self {
        let suite = xml.split("<testsuite ").nth(1).unwrap_or_default();
        let attribute = |name: &str| -> usize {
            let value = suite.split(&format!("{name}=\"")).nth(1).unwrap_or_default();
            value.split('"').next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
        };
        let (failed, skipped) = (attribute("failures") + attribute("errors"), attribute("skipped"));
        Self {
            reported_passed: attribute("tests").saturating_sub(failed + skipped),
            failed,
            ignored: skipped,
            ..Self::default()
        }
    }

    /// The counts in a line that a summary has printed.
    pub fn of_line(line: &str) -> Option<Self> {
        let [passed, failed, skipped] = line
            .split(", ")
            .zip(["passed", "failed", "skipped"])
            .map(|(part, what)| part.strip_suffix(what)?.trim_end().parse().ok())
            .collect::<Option<Vec<usize>>>()?[..]
        else {
            return None;
        };
        Some(Self { reported_passed: passed, failed, ignored: skipped, ..Self::default() })
    }

    /// Counts the tests of another summary, too.
    pub fn add(&mut self, other: Self) {
        self.reported_passed += other.reported_passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.skipped_itself += other.skipped_itself;
    }

    /// Consumes one line of output; returns whether it should be shown.
    fn read(&mut self, line: &str) -> bool {
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.reported_passed += count(counts, "passed");
            self.failed += count(counts, "failed");
            self.ignored += count(counts, "ignored");
            return true;
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if !self.in_successes {
            return true;
        }
        if line.starts_with("---- ") {
            self.counted = false;
        }
        let skipped = line.starts_with(SKIPPED);
        if skipped && !self.counted {
            self.counted = true;
            self.skipped_itself += 1;
        }
        skipped
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let passed = self.reported_passed.saturating_sub(self.skipped_itself);
        write!(
            f,
            "{passed} passed, {} failed, {} skipped",
            self.failed,
            self.ignored + self.skipped_itself
        )
    }
}

/// The number before a word, as in `ok. 2 passed; 0 failed;`.
fn count(text: &str, what: &str) -> usize {
    let words: Vec<&str> = text.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "
running 3 tests
test gpu_row ... ok
test plain ... ok
test wrong ... FAILED

successes:

---- gpu_row stdout ----
SKIPPED (no GPU): gpu_row a
SKIPPED (no GPU): gpu_row b

---- plain stdout ----
chatter

successes:
    gpu_row
    plain

failures:

---- wrong stdout ----
SKIPPED is not what this test says

failures:
    wrong

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s

running 2 tests
test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn sums_over_programs_and_counts_skipped_tests_once() {
        let mut summary = Summary::default();
        let shown: Vec<&str> = OUTPUT.lines().filter(|line| summary.read(line)).collect();
        assert_eq!(summary.to_string(), "2 passed, 1 failed, 2 skipped");
        assert!(shown.contains(&"SKIPPED (no GPU): gpu_row a"));
        assert!(shown.contains(&"test wrong ... FAILED"));
        assert!(!shown.contains(&"chatter"));
    }

    #[test]
    fn counts_of_pytest_are_added() {
        let xml = r#"<?xml version="1.0"?><testsuites name="pytest tests"><testsuite name="pytest"
            errors="1" failures="2" skipped="3" tests="10" time="0.1"><testcase name="a" /><skipped
            message="skipped=&quot;7&quot;" /></testsuite></testsuites>"#;
        let mut summary = Summary::of_pytest(xml);
        assert_eq!(summary.to_string(), "4 passed, 3 failed, 3 skipped");
        summary.add(Summary { reported_passed: 3, skipped_itself: 1, ..Summary::default() });
        assert_eq!(summary.to_string(), "6 passed, 3 failed, 4 skipped");
        assert_eq!(Summary::of_pytest(""), Summary::default());
        let line = "6 passed, 3 failed, 4 skipped";
        assert_eq!(Summary::of_line(line).unwrap().to_string(), line);
        assert_eq!(Summary::of_line("6 passed, 3 failed"), None);
        assert_eq!(Summary::of_line("the last of 6 lines"), None);
    }

    #[test]
    fn failures_lost_programs_and_empty_runs_are_errors() {
        let some = Summary { reported_passed: 1, ..Summary::default() };
        assert!(verdict(&some, true).is_ok());
        assert!(verdict(&some, false).is_err());
        assert!(verdict(&Summary { failed: 1, ..some }, true).is_err());
        assert!(verdict(&Summary::default(), true).is_err());
        assert!(verdict(&Summary { ignored: 1, ..Summary::default() }, true).is_ok());
    }
}
