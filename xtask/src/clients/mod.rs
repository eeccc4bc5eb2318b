//! `cargo xtask clients`: others' programs and this repository as they see it, from outside of the
//! checkout. Nothing of it needs a toolkit or a GPU.

mod checkout;
mod engines;
mod mistral;
mod releases;

use crate::workspace::{cargo, create_dir, root, run as run_command};
use anyhow::{Result, bail};
use checkout::Checkout;
use std::path::{Path, PathBuf};
use std::{env, fmt};

/// Type-check mistral.rs and users of candle against the crates, and run tests of theirs on the
/// CPU, and those of the Python package beside the engines that it adapts to.
#[derive(clap::Args)]
pub struct Args {
    /// Run only these steps; may be repeated [default: all].
    #[arg(long, value_enum)]
    only: Vec<Step>,
    /// Fetch from git directories FOLDER/OWNER/NAME instead of from GitHub.
    #[arg(long, value_name = "FOLDER")]
    mirror: Option<PathBuf>,
    /// Where the clients are built: outside of this checkout [default: blockflash-clients in the
    /// folder for temporary files].
    #[arg(long, value_name = "FOLDER")]
    work: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Step {
    /// The tests of blockflash-candle on the CPU, for all lines of candle.
    Lines,
    /// Versions of cudarc and of its bindings.
    Cudarc,
    /// candle-transformers of each line, with the drop-ins by git.
    DropIns,
    /// The drop-ins under the names that they have in a registry, with the oldest and the newest
    /// version of each line of candle.
    Published,
    /// candle's repository.
    Candle,
    /// mistral.rs: all that uses attention, and the tests of its attention.
    Mistral,
    /// The operator for ONNX Runtime in `examples/ort`.
    Ort,
    /// Engines in Python, whose versions crates/blockflash-python/clients.toml pins.
    Engines,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = clap::ValueEnum::to_possible_value(self);
        f.write_str(name.as_ref().map_or("", |name| name.get_name()))
    }
}

/// The revisions that are checked. Each is one that mistral.rs' own lock names together.
const MISTRAL: Checkout<'_> = Checkout {
    repository: "EricLBuehler/mistral.rs",
    revision: "9e922623f24b32d41f3892b74f0eed18707f4e6c",
    without: &["docs", "res", "website"],
};
const CANDLE: Checkout<'_> = Checkout {
    repository: "huggingface/candle",
    revision: "35d7ae7ca5c93e17c77359c3617376b8a72e96a4",
    without: &["candle-book", "candle-wasm-examples", "candle-wasm-tests"],
};

/// Runs every step even when an earlier one failed.
pub fn run(args: &Args) -> Result<()> {
    let work = args.work.clone().unwrap_or_else(|| env::temp_dir().join("blockflash-clients"));
    create_dir(&work)?;
    let work = work.canonicalize()?;
    let steps: [(Step, &dyn Fn() -> Result<()>); 8] = [
        (Step::Cudarc, &|| releases::cudarc(&work)),
        (Step::DropIns, &|| releases::drop_ins(&work)),
        (Step::Published, &|| releases::published(&work)),
        (Step::Candle, &|| mistral::candle(&work, args.mirror.as_deref())),
        (Step::Mistral, &|| mistral::mistral(&work, args.mirror.as_deref())),
        (Step::Ort, &|| {
            let folder = root().join("examples/ort");
            run_command(cargo_in(&folder, &work).args(["check", "--locked"]))
        }),
        (Step::Lines, &lines),
        (Step::Engines, &|| engines::engines(&work, args.mirror.as_deref())),
    ];
    let mut failed = Vec::new();
    for (step, work) in steps {
        if !args.only.is_empty() && !args.only.contains(&step) {
            continue;
        }
        println!("\n=== {step}");
        match work() {
            Ok(()) => println!("{step}: ok"),
            Err(error) => {
                eprintln!("error: {error:#}");
                failed.push(step.to_string());
            }
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

fn lines() -> Result<()> {
    let mut test = cargo();
    test.args(["test", "--locked", "--package", "blockflash-candle", "--test", "tensors"]);
    run_command(test.args(["--features", "candle-0-9,candle-0-10"]))
}

/// A cargo that builds a client, with one folder of outputs for all of them.
fn cargo_in(folder: &Path, work: &Path) -> std::process::Command {
    let mut command = cargo();
    command.current_dir(folder).env("CARGO_TARGET_DIR", work.join("target"));
    command.env("CARGO_PROFILE_DEV_DEBUG", "false");
    command
}
