//! candle's repository and mistral.rs, with blockflash-candle in place of their attention. Their
//! manifests change, but no code.

use super::{CANDLE, MISTRAL, cargo_in};
use crate::candle::{DROP_IN, without_toolkit};
use crate::workspace::{read, root, run, shown, write};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// Tests of mistral.rs' attention that fail, and why.
const REFUSED: [&str; 1] = ["flash_attn_varlen_paged_mm_prefix_windowed"]; // no mask of prefixes
/// How many pass.
const PASSES: usize = 11;

/// Type-checks candle-transformers of candle's repository, as it is there.
pub fn candle(work: &Path, mirror: Option<&Path>) -> Result<()> {
    let folder = CANDLE.files(work, mirror)?;
    let manifest = folder.join("Cargo.toml");
    let ours = format!("path = {:?}", root().join(DROP_IN).join("0.11/candle-flash-attn"));
    let text = read(&manifest)?.replace("path = \"./candle-flash-attn\"", &ours);
    // What was left out.
    let text = text.replace("    \"candle-wasm-examples/*\",\n    \"candle-wasm-tests\",\n", "");
    write(&manifest, text + &patch(&folder))?;
    let mut check = cargo_in(&folder, work);
    without_toolkit(&mut check)?;
    run(check.args(["check", "--package", "candle-transformers", "--features", "flash-attn"]))
}

/// Type-checks mistral.rs and runs the tests of its attention on the CPU.
pub fn mistral(work: &Path, mirror: Option<&Path>) -> Result<()> {
    let candle = CANDLE.files(work, mirror)?;
    let folder = MISTRAL.files(work, mirror)?;
    let manifest = folder.join("Cargo.toml");
    let lines = read(&manifest)?.lines().map(|line| from_candle(line, &candle)).collect::<Vec<_>>();
    write(&manifest, lines.join("\n") + &patch(&candle))?;
    let lock = folder.join("Cargo.lock");
    let of_candle = "source = \"git+https://github.com/huggingface/candle.git";
    let text = read(&lock)?;
    let kept = text.lines().filter(|line| !line.starts_with(of_candle)).collect::<Vec<_>>();
    write(&lock, kept.join("\n") + "\n")?;
    replace_attention(&folder.join("mistralrs-flash-attn"))?;
    // CUTLASS, which only kernels need, is not downloaded.
    let build = folder.join("mistralrs-quant/build.rs");
    let with = "builder = builder.with_cutlass(Some(&cutlass_commit));";
    write(&build, read(&build)?.replace(with, "let _ = cutlass_commit;"))?;

    let mut check = cargo_in(&folder, work);
    without_toolkit(&mut check)?;
    // For Hopper it would download CUTLASS again.
    check.env("CUDA_COMPUTE_CAP", "80");
    check.args(["check", "--package", "mistralrs-core", "--features", "flash-attn,flash-attn-v3"]);
    run(&mut check)?;

    let mut test = cargo_in(&folder, work);
    test.args(["test", "--package", "mistralrs-flash-attn", "--test", "flash_attn_tests"]);
    judge(&mut test)
}

/// A dependency on candle's repository as one on its files.
fn from_candle(line: &str, candle: &Path) -> String {
    let Some((name, _)) = line.split_once(" = { git = \"https://github.com/huggingface/candle.git")
    else {
        return line.to_owned();
    };
    let folder = match name {
        "candle-flash-attn-v3" => root().join(DROP_IN).join("0.11").join(name),
        name => candle.join(name),
    };
    format!("{name} = {{ path = {folder:?} }}")
}

/// Lets this crate and others take candle's repository, as a user's patch by git does.
fn patch(candle: &Path) -> String {
    let line = |name: &str| format!("{name} = {{ path = {:?} }}\n", candle.join(name));
    format!("\n[patch.crates-io]\n{}{}", line("candle-core"), line("candle-nn"))
}

/// Makes blockflash-candle of mistral.rs' fork of candle-flash-attn, but for its tests.
fn replace_attention(folder: &Path) -> Result<()> {
    std::fs::remove_file(folder.join("build.rs"))?;
    std::fs::remove_dir_all(folder.join("kernels"))?;
    let manifest = format!(
        r#"[package]
name = "mistralrs-flash-attn"
version.workspace = true
edition.workspace = true

[features]
cuda = ["blockflash-candle/cuda"]
cudnn = ["cuda", "candle-core/cudnn"]

[dependencies]
blockflash-candle = {{ path = {:?} }}
candle-core.workspace = true

[dev-dependencies]
anyhow.workspace = true
candle-nn.workspace = true
"#,
        root().join("crates/blockflash-candle")
    );
    write(&folder.join("Cargo.toml"), manifest)?;
    write(&folder.join("src/lib.rs"), "pub use blockflash_candle::*;\n")?;
    let tests = folder.join("tests/flash_attn_tests.rs");
    let text = read(&tests)?.replace("#![cfg(feature = \"cuda\")]", "");
    write(&tests, text.replace("Device::new_cuda(0)?", "Device::Cpu"))
}

/// Runs tests of which some are expected to fail.
fn judge(test: &mut Command) -> Result<()> {
    let output = test.output().with_context(|| shown(test))?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    let named = |end: &str| -> Vec<&str> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(end));
        lines.collect()
    };
    let (passed, failed) = (named(" ... ok"), named(" ... FAILED"));
    if passed.len() != PASSES || failed != REFUSED {
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("{} tests passed, failed: {failed:?}; {PASSES} and {REFUSED:?} were expected", {
            passed.len()
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_on_the_repository_become_paths() {
        let line =
            "candle-nn = { git = \"https://github.com/huggingface/candle.git\", rev = \"1\" }";
        assert_eq!(from_candle(line, Path::new("/c")), "candle-nn = { path = \"/c/candle-nn\" }");
        assert_eq!(from_candle("a = \"1\"", Path::new("/c")), "a = \"1\"");
        let attention = line.replace("candle-nn", "candle-flash-attn-v3");
        assert!(from_candle(&attention, Path::new("/c")).contains("drop-in/0.11"));
    }
}
