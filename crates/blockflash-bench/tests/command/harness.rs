//! Runs commands in a folder of their own.

use blockflash_bench::io::{Array, TensorFile, write};
use blockflash_bench::random::normal;
use blockflash_ops::{DType, Device};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The program, and beside it the folder of the examples.
const PROGRAM: &str = env!("CARGO_BIN_EXE_blockflash");

/// A folder of one test, in which its commands run; it is removed at the end.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A command with words between spaces, to be changed before it runs.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(words.split_whitespace()).current_dir(self.0.path());
        command
    }

    pub(crate) fn run(&self, words: &str) -> Output {
        self.command(words).output().unwrap()
    }

    /// The same under a limit of the size of files, in the blocks of `ulimit -f`.
    #[cfg(unix)]
    pub(crate) fn limited(&self, blocks: usize, words: &str) -> Output {
        let script = format!("ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(PROGRAM).args(words.split_whitespace());
        command.current_dir(self.0.path()).output().unwrap()
    }

    /// Must end with this exit code; returns stdout and stderr.
    pub(crate) fn ends(&self, code: i32, words: &str) -> [String; 2] {
        let output = self.run(words);
        let texts = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert_eq!(output.status.code(), Some(code), "{words}: {texts:?}");
        texts
    }

    /// Must succeed without a word on stderr; returns stdout.
    pub(crate) fn ok(&self, words: &str) -> String {
        let [stdout, stderr] = self.ends(0, words);
        assert_eq!(stderr, "", "{words}");
        stdout
    }

    /// The JSON object of a command that computes, on the CPU and without repeats.
    pub(crate) fn json(&self, words: &str) -> Value {
        self.json_on("cpu", words)
    }

    pub(crate) fn json_on(&self, device: &str, words: &str) -> Value {
        let words = format!("{words} --device {device} --repeat 0 --json");
        serde_json::from_str(&self.ok(&words)).unwrap()
    }

    /// The same with `--check`: every row of each result must be compared and be right.
    pub(crate) fn right(&self, device: &str, words: &str) -> Value {
        let report = self.json_on(device, &format!("{words} --check"));
        assert_eq!(report["check"]["passed"], true, "{words}: {report}");
        let results = report["check"].as_object().unwrap().values();
        for result in results.filter(|result| result.is_object()) {
            assert_eq!(result["checked"], result["total"], "{words}: {report}");
        }
        report
    }

    /// Must fail with code 2, say nothing on stdout and one line without control characters on
    /// stderr, which contains these words and is returned.
    pub(crate) fn refused(&self, words: &str, expected: &str) -> String {
        let [stdout, stderr] = self.ends(2, words);
        // `bench` says what it begins before it has seen all of it.
        assert!(stdout.is_empty() || words.trim().starts_with("bench "), "{words}: {stdout}");
        let line = stderr.strip_prefix("error: ").and_then(|line| line.strip_suffix('\n'));
        assert!(line.is_some_and(|line| !line.contains(char::is_control)), "{words}: {stderr:?}");
        assert!(stderr.contains(expected), "{words}: {stderr} lacks {expected:?}");
        stderr
    }

    /// The same for a table of options behind the same words.
    pub(crate) fn refuses(&self, start: &str, table: &[(&str, &str)]) {
        for (words, expected) in table {
            self.refused(&format!("{start} {words}"), expected);
        }
    }

    /// Writes one tensor, or several by their names.
    pub(crate) fn write(&self, name: &str, tensors: &[(&str, &Array)]) {
        write(self.path(name), tensors).unwrap();
    }

    pub(crate) fn load(&self, file: &str, name: &str, dtype: DType) -> Array {
        TensorFile::open(self.path(file)).unwrap().load(name, dtype).unwrap()
    }

    pub(crate) fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn put(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }
}

/// N(0, 1) values.
pub(crate) fn random(dtype: DType, shape: &[usize], lane: u64) -> Array {
    normal(dtype, shape, 1, lane, |_| ()).unwrap()
}

pub(crate) fn integers(shape: &[usize], values: &[i32]) -> Array {
    Array::new(shape, values.to_vec()).unwrap()
}

/// A `.safetensors` file with one boolean tensor `mask`.
pub(crate) fn booleans(shape: &[usize], values: &[bool]) -> Vec<u8> {
    let end = values.len();
    let header =
        format!(r#"{{"mask":{{"dtype":"BOOL","shape":{shape:?},"data_offsets":[0,{end}]}}}}"#);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().map(|&value| u8::from(value)));
    bytes
}

/// Runs an example, which cargo builds with the tests.
pub(crate) fn example(name: &str, words: &str) -> Output {
    let folder = Path::new(PROGRAM).with_file_name("examples");
    let program = folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    let output = Command::new(&program).args(words.split_whitespace()).output();
    output.unwrap_or_else(|error| panic!("{}: {error}; cargo build --examples", program.display()))
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
