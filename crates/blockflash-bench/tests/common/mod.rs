//! Helpers that several tests of the command share.

#![allow(dead_code)] // Not every program of tests calls everything.

use blockflash_ops::Device;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};

pub(crate) fn blockflash(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_blockflash")).args(args).output().unwrap()
}

/// Runs the command on the CPU without repeats; it must succeed. Returns its JSON object.
pub(crate) fn json(args: &[&str]) -> serde_json::Value {
    json_on("cpu", args)
}

/// The same on a device.
pub(crate) fn json_on(device: &str, args: &[&str]) -> serde_json::Value {
    let output = blockflash(&[args, &["--device", device, "--repeat", "0", "--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stderr.as_ref()), (Some(0), ""), "{args:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether there is a GPU for a test. Without one a line on stderr says that the test was skipped,
/// and with `BLOCKFLASH_REQUIRE_GPU=1` in the environment it fails.
pub(crate) fn has_gpu(test: &str) -> bool {
    if !Device::best().is_cpu() {
        return true;
    }
    let required = std::env::var("BLOCKFLASH_REQUIRE_GPU").is_ok_and(|value| value == "1");
    assert!(!required, "{test} needs a GPU because BLOCKFLASH_REQUIRE_GPU=1, but there is none");
    // Unlike `eprintln`, this is not captured.
    let _ = writeln!(std::io::stderr(), "SKIPPED (no GPU): {test}");
    false
}

/// Must fail with code 2, print nothing on stdout and one line without control characters on
/// stderr, which is returned.
pub(crate) fn refused(args: &[&str]) -> String {
    let output = blockflash(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(2), &b""[..]),
        "{args:?}: {stderr}"
    );
    let line = stderr.strip_prefix("error: ").and_then(|line| line.strip_suffix('\n'));
    assert!(line.is_some_and(|line| !line.contains(char::is_control)), "{args:?}: {stderr:?}");
    stderr
}

/// A folder of one test, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// `name` is the name of the test and must be unique in this program.
    pub(crate) fn new(name: &str) -> Self {
        let program = env!("CARGO_CRATE_NAME");
        let path = std::env::temp_dir()
            .join(format!("blockflash-{program}-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
