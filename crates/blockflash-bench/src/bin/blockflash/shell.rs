//! `blockflash completions` and `blockflash man`.

use crate::failure::{Failure, Result};
use crate::output::print;
use clap::Command;
use std::process::ExitCode;

/// Prints the completions for a shell.
pub fn completions(mut command: Command, shell: clap_complete::Shell) -> Result<ExitCode> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "blockflash", &mut text);
    print(String::from_utf8_lossy(&text).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the man page of the program, or of one of its commands.
pub fn man(mut command: Command, name: Option<String>) -> Result<ExitCode> {
    command.build();
    let command = match name {
        None => command,
        Some(name) => {
            let found = command.find_subcommand(&name).cloned();
            found.ok_or_else(|| Failure::new(format!("there is no command {name:?}")))?
        }
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(command).render(&mut text)?;
    print(String::from_utf8_lossy(&text).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
