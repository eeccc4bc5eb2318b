//! stdout, which may be closed at any time.

use crate::failure::Result;
use std::io::{ErrorKind, Write, stdout};

/// Prints a text and a newline. A reader that went away (`blockflash … | head -1`) has seen what it wanted.
pub fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
