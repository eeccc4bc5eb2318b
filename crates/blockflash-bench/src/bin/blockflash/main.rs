//! The `blockflash` command: what can this machine do, run one operation on real tensors, check it,
//! measure.
#![forbid(unsafe_code)]
// Nothing is outside of a binary: `pub` is `pub(crate)` here.
#![allow(unreachable_pub)]

mod args;
mod attention;
mod attention_args;
mod attention_mask;
mod bench;
mod bsr_args;
mod bsr_file;
mod bsr_matmul;
mod decode;
mod decode_args;
mod drawn_args;
mod failure;
mod info;
mod launch;
mod list_args;
mod mask;
mod mask_file;
mod measure;
mod offsets;
mod operand;
mod output;
mod outputs;
mod pace;
mod progress;
mod qkv_args;
mod recording;
mod report;
mod rest;
mod run;
mod sddmm;
mod sddmm_args;
mod shell;
mod suite_args;
mod swap_check;
mod table;

use clap::{CommandFactory, Parser};
use std::process::ExitCode;
use std::sync::LazyLock;

/// What the program was built from, for what, and with how many kernels.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let [version, commit, target] =
        [env!("CARGO_PKG_VERSION"), env!("BLOCKFLASH_BUILD_COMMIT"), env!("BLOCKFLASH_TARGET")];
    let kernels = blockflash_sys::manifest::kernels().len();
    format!("{version} ({commit}, {target}, {kernels} kernel images)")
});

/// Fast attention and block-sparse matrix multiplication, on an NVIDIA GPU or the CPU.
#[derive(Parser)]
#[command(
    name = "blockflash",
    version = VERSION.as_str(),
    max_term_width = 100,
    arg_required_else_help = true,
    hide_possible_values = true,
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Show the devices of this machine and what runs on them
    Info(info::Args),
    /// Run attention on tensors from files or on random ones
    Attention(Box<attention_args::Args>),
    /// Run attention of the last queries of sequences to a cache of keys and values
    AttentionDecode(Box<decode_args::Args>),
    /// Multiply a block-sparse (BSR) matrix with a dense one
    BsrMatmul(Box<bsr_args::Args>),
    /// Run a dense times dense product at the blocks of a block-sparse matrix
    Sddmm(Box<sddmm_args::Args>),
    /// Measure the benchmark suites
    Bench(bench::Args),
    /// Launch one case of a suite a few times, for profilers
    Launch(launch::Args),
    /// Count and draw block masks
    Mask(mask::Args),
    /// Draw tables and plots from measurements
    Report(report::Args),
    /// Print the completions of commands and options for a shell
    Completions {
        /// bash, elvish, fish, powershell or zsh
        shell: clap_complete::Shell,
    },
    /// Print the man page, or that of one command
    Man {
        /// Name of a command
        command: Option<String>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(Cli { command: Command::Info(args) }) => info::run(args),
        Ok(Cli { command: Command::Attention(args) }) => attention::run(*args),
        Ok(Cli { command: Command::AttentionDecode(args) }) => decode::run(*args),
        Ok(Cli { command: Command::BsrMatmul(args) }) => bsr_matmul::run(*args),
        Ok(Cli { command: Command::Sddmm(args) }) => sddmm::run(*args),
        Ok(Cli { command: Command::Bench(args) }) => bench::run(args),
        Ok(Cli { command: Command::Launch(args) }) => launch::run(args),
        Ok(Cli { command: Command::Mask(args) }) => mask::run(args),
        Ok(Cli { command: Command::Report(args) }) => report::run(args),
        Ok(Cli { command: Command::Completions { shell } }) => {
            shell::completions(Cli::command(), shell)
        }
        Ok(Cli { command: Command::Man { command } }) => shell::man(Cli::command(), command),
        Err(error) => return failure::usage(&error),
    };
    result.unwrap_or_else(|failure| failure.report())
}
