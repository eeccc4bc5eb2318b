//! `cargo xtask emulate`: runs portable kernels on the CPU, compiled from their own sources
//! (`tests/emulator`).

use crate::{
    kernels::{
        sources::{fingerprint, sha256, source},
        toolchain::site_packages,
    },
    sample,
    workspace::{list, read, root, target_dir, write},
};
use anyhow::{Context, Result, bail, ensure};
use blockflash_sys::{
    Kernel,
    manifest::{self, Variant},
};
use indicatif::{ProgressBar, ProgressStyle};
use rayon::prelude::*;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

/// Sources that have a program in tests/emulator.
const SOURCES: [&str; 18] = [
    "attention_decode_sm80",
    "attention_latent_index_sm80",
    "attention_latent_sm80",
    "attention_fwd_sm80",
    "attention_bwd_q_sm80",
    "attention_bwd_kv_sm80",
    "attention_bwd_bias_sm80",
    "attention_index_bwd_kv_sm80",
    "attention_index_bwd_sums_sm80",
    "block_bits_sm80",
    "bsr_matmul_sm80",
    "bsr_matmul_narrow_sm80",
    "index_scores_sm80",
    "index_transpose_sm80",
    "index_union_sm80",
    "kv_append_codes_sm80",
    "quantize_sm80",
    "top_k_sm80",
];

/// Run portable kernels on the CPU in several orders of their warps and copies, and compare results
/// with a reference and with each other.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Run only kernels whose symbol contains this text.
    #[arg(long, value_name = "SUBSTRING")]
    only: Vec<String>,
    /// Run those that have not passed as they are (tests/emulated.txt), and a sixth of the
    /// others.
    #[arg(long)]
    check: bool,
}

/// Formatted files of the emulator.
pub fn files() -> Result<Vec<PathBuf>> {
    list(&root().join("tests/emulator"))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let programs: BTreeMap<String, &Kernel> = manifest::kernels()
        .iter()
        .filter(|kernel| SOURCES.contains(&kernel.source()))
        .map(|kernel| (kernel.symbol(), kernel))
        .collect();
    let mut record = Record::load(&programs)?;
    let is_wanted =
        |symbol: &str| args.only.is_empty() || args.only.iter().any(|part| symbol.contains(part));
    let mut wanted: Vec<&String> = programs.keys().filter(|symbol| is_wanted(symbol)).collect();
    ensure!(!wanted.is_empty(), "no kernel is selected that runs on the CPU");
    if args.check {
        let (passed, mut others): (Vec<_>, _) =
            wanted.into_iter().partition(|symbol| record.has_passed(symbol));
        others.extend(sample::of_commit(passed)?);
        wanted = others;
    }
    let headers = headers()?;
    let started = Instant::now();
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}")?;
    let bar = ProgressBar::new(wanted.len() as u64).with_style(style);
    let results: Vec<(&String, Result<()>)> = wanted
        .into_par_iter()
        .map(|symbol| {
            let result = emulate(symbol, programs[symbol], &headers);
            bar.set_message(symbol.clone());
            bar.inc(1);
            (symbol, result)
        })
        .collect();
    bar.finish_and_clear();
    let (seconds, count) = (started.elapsed().as_secs_f64(), results.len());
    let mut failed = Vec::new();
    for (symbol, result) in results {
        record.set(symbol, result.is_ok());
        failed.extend(result.err().map(|error| format!("{symbol}: {error:#}")));
    }
    println!("{count} kernels on the CPU in {seconds:.0} s, {} wrong", failed.len());
    if !args.check {
        record.store()?;
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

/// Which programs have passed (`tests/emulated.txt`): a line for each, with the fingerprint of what
/// it is made of. It computes the same whenever it runs.
struct Record {
    /// Of all programs, as they are now.
    current: BTreeMap<String, String>,
    passed: BTreeMap<String, String>,
}

impl Record {
    /// Lines of kernels that are no more are dropped.
    fn load(programs: &BTreeMap<String, &Kernel>) -> Result<Self> {
        let mut shared = String::new();
        for header in files()?.iter().filter(|path| path.extension().is_some_and(|e| e == "h")) {
            shared += &read(header)?;
        }
        let current = programs.iter().map(|(symbol, kernel)| {
            let program = read(&root().join(program(kernel)))?;
            let parts =
                [fingerprint(kernel)?, sha256(shared.as_bytes()), sha256(program.as_bytes())];
            Ok((symbol.clone(), sha256(parts.concat().as_bytes())))
        });
        let current = current.collect::<Result<BTreeMap<_, _>>>()?;
        let text = read(&Self::path())?;
        let line = |line: &str| line.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        let passed = text.lines().filter_map(line);
        let passed = passed.filter(|(symbol, _)| current.contains_key(symbol)).collect();
        Ok(Self { current, passed })
    }

    fn path() -> PathBuf {
        root().join("tests/emulated.txt")
    }

    fn has_passed(&self, symbol: &str) -> bool {
        self.current.get(symbol) == self.passed.get(symbol)
    }

    fn set(&mut self, symbol: &str, passed: bool) {
        match self.current.get(symbol).filter(|_| passed) {
            Some(fingerprint) => self.passed.insert(symbol.to_owned(), fingerprint.clone()),
            None => self.passed.remove(symbol),
        };
    }

    fn store(&self) -> Result<()> {
        let line = |(symbol, fingerprint)| format!("{symbol} {fingerprint}\n");
        write(&Self::path(), self.passed.iter().map(line).collect::<String>())
    }
}

/// The program of a kernel, relative to the root of the repository.
fn program(kernel: &Kernel) -> String {
    let name = match kernel.variant {
        Variant::AttentionIndex(_) => "attention_index",
        _ => kernel.source().trim_end_matches("_sm80"),
    };
    format!("tests/emulator/{name}.cpp")
}

/// A folder in which the headers of instructions are those of the emulator, and a precompiled one
/// of what all programs begin with, which is a third of their compilation.
fn headers() -> Result<PathBuf> {
    let (folder, instructions) =
        (target_dir("emulator/include")?, target_dir("emulator/include/blockflash/ptx")?);
    for header in list(&root().join("kernels/include/blockflash/ptx"))? {
        let name = header.file_name().context("a header without a name")?;
        write(&instructions.join(name), "#include \"ptx.h\"\n")?;
    }
    let mut compile = compiler(&folder)?;
    compile.args(["-x", "c++-header", "tests/emulator/simt.h", "-o"]);
    complete(compile.arg(folder.join("simt.h.gch")))?;
    Ok(folder)
}

/// The compiler with the options that a precompiled header and its programs must share.
fn compiler(headers: &Path) -> Result<Command> {
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "g++".into()));
    compiler
        .args(["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"])
        .arg("-I")
        .arg(headers)
        .arg("-I")
        .arg(site_packages()?.join("nvidia/cu13/include"))
        .args(["-I", "tests/emulator", "-I", "kernels/include"]);
    Ok(compiler)
}

/// Compiles a kernel with its program and runs it.
fn emulate(symbol: &str, kernel: &Kernel, headers: &Path) -> Result<()> {
    let folder = target_dir(&format!("emulator/{symbol}"))?;
    // Shared memory is a global variable of the program.
    let text = read(&root().join(source(kernel)))?.replace("extern __shared__", "extern");
    write(&folder.join("kernel.cu"), text)?;
    let emulated = folder.join("emulated");
    let mut compile = compiler(headers)?;
    compile
        .arg("-I")
        .arg(&folder)
        .arg("-I")
        .arg(format!("kernels/{}", kernel.source()))
        .args(["-include", "simt.h"])
        .args(kernel.macros().iter().map(|(name, value)| format!("-D{name}={value}")))
        .arg(program(kernel))
        .arg("-o")
        .arg(&emulated);
    complete(&mut compile)?;
    complete(&mut Command::new(&emulated))
}

/// Runs a program; the error is what it wrote.
fn complete(command: &mut Command) -> Result<()> {
    let output = command
        .current_dir(root())
        .output()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        bail!("{}\n{}", output.status, text.trim());
    }
    Ok(())
}
