//! `cargo xtask bundle`: one folder that tests and measures on a GPU machine without Rust.

use crate::{
    kernels,
    workspace::{cargo, create_dir, list, output, root, write},
};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Where to write; what an earlier bundle left there is replaced [default: target/bundle].
    folder: Option<PathBuf>,
}

const MAX_BYTES: u64 = 60_000_000;

/// Packages whose tests go along: what touches the GPU, and nothing that needs the repository at run time.
const TESTED: [&str; 3] = ["blockflash-safe", "blockflash-ops", "blockflash-tests"];

/// Symbols are dropped by the linker, so the usual release build of the dependencies is used again. Panics still say where.
const STRIP: [&str; 2] = ["--config", "profile.release.strip=\"symbols\""];

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => root().join("target/bundle"),
    };
    let missing = kernels::missing()?;
    if !missing.is_empty() {
        eprintln!("warning: {} kernel images are missing: run `cargo xtask kernels` first", missing.len());
    }
    clear(&folder)?;
    let programs = build()?;
    create_dir(&folder.join("tests"))?;
    for program in &programs {
        let path = if program.is_test {
            folder.join("tests").join(&program.name)
        } else {
            folder.join(&program.name)
        };
        copy(&program.path, &path)?;
    }
    copy_folder(&root().join("examples"), &folder.join("examples"))?;
    for part in ["suites", "peers"] {
        copy_folder(&root().join("benches").join(part), &folder.join("benches").join(part))?;
    }
    write(&folder.join("commit"), commit()?)?;
    let script = folder.join("run-all");
    write(&script, RUN_ALL)?;
    make_executable(&script)?;
    let bytes = size(&folder)?;
    println!(
        "{}: {} programs, {:.1} MB; start ./run-all there",
        folder.display(),
        programs.len(),
        bytes as f64 / 1e6
    );
    ensure!(bytes < MAX_BYTES, "a bundle of {bytes} bytes is too large, at most {MAX_BYTES}");
    Ok(())
}

/// A compiled program.
struct Program {
    name: String,
    path: PathBuf,
    is_test: bool,
}

/// What cargo says about something it has built.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
    target: Target,
    profile: Profile,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

fn build() -> Result<Vec<Program>> {
    let common = ["--release", "--locked", "--message-format=json-render-diagnostics"];
    let mut command = cargo();
    command.arg("build").args(common).args(STRIP).args([
        "--package",
        "blockflash-bench",
        "--bin",
        "blockflash",
    ]);
    let mut programs = artifacts(&mut command)?;
    programs.retain(|program| !program.is_test);
    let mut command = cargo();
    // No documentation tests and no command: `--tests` would build the package's programs, too.
    command.arg("test").args(["--no-run", "--lib", "--test", "*"]).args(common).args(STRIP);
    TESTED.iter().for_each(|package| {
        command.args(["--package", package]);
    });
    programs.extend(artifacts(&mut command)?.into_iter().filter(|program| program.is_test));
    Ok(programs)
}

/// Runs cargo; its messages for people go to the terminal.
fn artifacts(command: &mut Command) -> Result<Vec<Program>> {
    let output = command.stderr(std::process::Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the release build failed");
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(messages: &str) -> Vec<Program> {
    // Messages of other kinds lack one of the fields.
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let program = |artifact: Artifact| {
        Some(Program {
            name: artifact.target.name,
            path: artifact.executable?,
            is_test: artifact.profile.test,
        })
    };
    artifacts.filter_map(program).collect()
}

/// Removes an earlier bundle, and nothing else.
fn clear(folder: &Path) -> Result<()> {
    if folder.exists() && !list(folder)?.is_empty() {
        ensure!(folder.join("run-all").exists(), "{} holds something that is no bundle", folder.display());
        std::fs::remove_dir_all(folder).with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    create_dir(folder)
}

/// The commit that the record of a measurement names; there is no git where it runs.
fn commit() -> Result<String> {
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(root()).args(arguments));
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Ok(format!("{}{}\n", commit.trim(), if changed.is_empty() { "" } else { "-dirty" }))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    create_dir(to)?;
    for path in list(from)?.iter().filter(|path| path.is_file()) {
        copy(path, &to.join(path.file_name().unwrap_or_default()))?;
    }
    Ok(())
}

fn size(path: &Path) -> Result<u64> {
    if path.is_dir() {
        list(path)?.iter().map(|path| size(path)).sum()
    } else {
        Ok(std::fs::metadata(path)?.len())
    }
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    Ok(())
}

/// Keeps going after a failure, and ends with a non-zero exit status when there was one.
const RUN_ALL: &str = r#"#!/bin/sh
# Written by `cargo xtask bundle`. Tests and then measures this machine's GPU.
# usage: ./run-all [FOLDER]                     results go to FOLDER (default: out)
#        SUITES="attention_floor" ./run-all     measure these suites only; SUITES=none measures nothing
#        TESTS=none ./run-all                   test nothing
#        OPTIONS="--peers none" ./run-all       passed on to `blockflash bench`
#        SANITIZE=1 ./run-all                   memcheck and racecheck on some rows of each kernel, too
set -u
mkdir -p "${1:-out}" || exit 1
out=$(cd "${1:-out}" && pwd) || exit 1
cd "$(dirname "$0")" || exit 1
failed=""

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,memory.total --format=csv | tee "$out/gpu.txt"
./blockflash info | tee "$out/info.txt" || failed="$failed info"

if [ "${TESTS:-all}" != none ]; then
  export BLOCKFLASH_REQUIRE_GPU=1 BLOCKFLASH_GPU_RECORD="$out/gpu-passed.jsonl"
  : >"$BLOCKFLASH_GPU_RECORD"
  for program in tests/*; do
    name=$(basename "$program")
    echo "== $name"
    if "$program" >"$out/$name.log" 2>&1; then
      grep '^test result' "$out/$name.log"
    else
      failed="$failed $name"
      tail -n 40 "$out/$name.log"
    fi
  done
fi

if python3 -c 'import torch, safetensors' 2>/dev/null; then
  echo "== a layer compared with torch"
  python3 examples/compare_with_torch.py ./blockflash >"$out/compare_with_torch.txt" || failed="$failed compare_with_torch"
  cat "$out/compare_with_torch.txt"
fi

if [ -n "${SANITIZE:-}" ]; then
  while read -r arguments; do
    for tool in memcheck racecheck; do
      echo "== $tool: blockflash $arguments"
      # shellcheck disable=SC2086 # several words
      compute-sanitizer --tool "$tool" --error-exitcode 9 ./blockflash $arguments --check >"$out/$tool.log" 2>&1 ||
        { failed="$failed $tool"; tail -n 40 "$out/$tool.log"; }
    done
  done <<END
attention --random 1x200x4x64 --kv-heads 2 --mask causal --dtype bf16
attention --random 2x131x2x128 --seqlen-kv 257 --window 70,- --softcap 20
attention --random 1x130x1x256 --mask causal --dtype bf16
bsr-matmul --random 200x130x333 --block 16 --density 0.3 --bias random --activation gelu
bsr-matmul --random 200x300x333 --block 32 --density 0.3 --dtype bf16
bsr-matmul --random 300x257x400 --block 64 --density 0.3 --activation silu
bsr-matmul --random 300x128x400 --block 128 --density 0.5 --out-dtype f32
END
fi

for file in benches/suites/*.toml; do
  suite=$(basename "$file" .toml)
  case " ${SUITES:-$suite} " in
  *" $suite "*)
    echo "== $suite"
    # shellcheck disable=SC2086 # OPTIONS holds several words
    ./blockflash bench "$suite" --out "$out/$suite.jsonl" ${OPTIONS:-} || failed="$failed $suite"
    ;;
  esac
done

if [ -n "$failed" ]; then
  echo "FAILED:$failed"
  exit 1
fi
echo "all passed; results are in $out"
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_in_the_messages_of_cargo() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"a"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","target":{"name":"b"},"profile":{"test":true},"executable":"/x/b-1"}
{"reason":"build-finished","success":true}"#;
        let programs = parse(messages);
        assert_eq!(programs.len(), 1);
        assert!(programs[0].is_test && programs[0].name == "b" && programs[0].path == Path::new("/x/b-1"));
    }

    #[test]
    fn only_a_bundle_is_cleared() {
        assert!(clear(&root().join("xtask")).is_err());
    }
}
