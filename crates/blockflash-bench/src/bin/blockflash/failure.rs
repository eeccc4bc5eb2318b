//! Errors on their way to one line on stderr.

use blockflash_bench::io::printable;
use std::fmt::{self, Display};
use std::io::Write;
use std::process::ExitCode;

/// Whatever stops the command. Any error converts into it.
#[derive(Debug)]
pub struct Failure(String);

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(message: impl Display) -> Self {
        Self(message.to_string())
    }

    /// Prints the line and gives the exit code 2.
    pub fn report(&self) -> ExitCode {
        // A closed stderr is no reason to panic.
        let _ = writeln!(std::io::stderr(), "error: {self}");
        ExitCode::from(2)
    }
}

/// Ends a function or closure with a failure, whose message is written as for `format!`.
macro_rules! bail {
    ($($message:tt)+) => {
        return Err($crate::failure::Failure::new(format!($($message)+)))
    };
}
pub(crate) use bail;

/// The same unless a condition holds: for options that contradict each other, and bad input.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            $crate::failure::bail!($($message)+);
        }
    };
}
pub(crate) use ensure;

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names that files made up may be a part of it.
        let mut lines = self.0.lines().map(str::trim).filter(|line| !line.is_empty());
        f.write_str(&printable(lines.next().unwrap_or_default()))?;
        lines.try_for_each(|line| write!(f, " {}", printable(line)))
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Transparent errors repeat the text of their cause.
            if !message.contains(&cause_text) {
                message = format!("{message}: {cause_text}");
            }
            source = cause.source();
        }
        Self(message)
    }
}

/// Prints a line on stderr that does not stop the command.
pub fn warn(message: impl Display) {
    let _ = writeln!(std::io::stderr(), "warning: {}", Failure::new(message));
}

/// A usage error of clap in the same form; help and version go to stdout as they are.
pub fn usage(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind::{
        DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion,
    };
    match error.kind() {
        DisplayHelp | DisplayVersion => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            return ExitCode::from(2);
        }
        _ => {}
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let end = text
        .find("\n\nUsage:")
        .or_else(|| text.find("\n\nFor more information"))
        .unwrap_or(text.len());
    Failure::new(text[..end].replace("\n\n  tip:", "; tip:")).report()
}
