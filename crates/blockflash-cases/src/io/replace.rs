//! Files that appear completely or not at all.

use super::error::{Error, Problem, Result};
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// A file that is being written beside its destination; [`commit`](Self::commit) moves it there. If
/// it is dropped before, nothing is left behind and the old file stays unchanged.
#[derive(Debug)]
pub struct Replacement {
    temporary: NamedTempFile,
    /// Bytes that were written.
    written: u64,
    /// The path as the caller named it, for errors.
    path: PathBuf,
    destination: PathBuf,
}

impl Replacement {
    /// Starts an empty file for this path. Success proves that the path can be written, so starting
    /// and dropping is a cheap check.
    ///
    /// # Errors
    /// The errors of [`destination`]; [`Problem::Io`] if the folder, or a file that exists, cannot
    /// be written.
    pub fn begin(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let destination = destination(path)?;
        let temporary = create(&destination).map_err(|error| failed(path, error))?;
        Ok(Self { temporary, written: 0, path: path.to_owned(), destination })
    }

    /// Moves all files to their destinations. If one move fails, the earlier ones are undone.
    ///
    /// # Errors
    /// [`Problem::Io`] names the file that cannot be flushed to disk or moved.
    pub fn commit(files: Vec<Self>) -> Result<()> {
        for file in &files {
            file.temporary.as_file().sync_all().map_err(|error| failed(&file.path, error))?;
        }
        let several = files.len() > 1;
        let mut done: Vec<(PathBuf, Option<NamedTempFile<()>>)> = Vec::new();
        for Self { temporary, path, destination, .. } in files {
            let old = if several { second_name(&destination) } else { Ok(None) };
            let moved = old
                .and_then(|old| temporary.persist(&destination).map(|_| old).map_err(Into::into));
            match moved {
                Ok(old) => done.push((destination, old)),
                Err(error) => {
                    for (destination, old) in done.into_iter().rev() {
                        // The first error is the one to report: if undoing fails too, there is
                        // nothing left to try.
                        let _ = match old {
                            Some(old) => old.persist(destination).map(|_| ()).map_err(Into::into),
                            None => fs::remove_file(destination),
                        };
                    }
                    return Err(failed(&path, error));
                }
            }
        }
        Ok(())
    }
}

/// Writes texts to files: all of them, or none.
///
/// # Errors
/// As for [`Replacement`].
pub fn write_texts(files: &[(&Path, &str)]) -> Result<()> {
    let beside = |&(path, text): &(&Path, &str)| {
        let mut file = Replacement::begin(path)?;
        file.write_all(text.as_bytes()).map_err(|error| failed(path, error))?;
        Ok(file)
    };
    Replacement::commit(files.iter().map(beside).collect::<Result<_>>()?)
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        room(self.written.saturating_add(bytes.len() as u64))?;
        let count = self.temporary.as_file_mut().write(bytes)?;
        self.written += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.temporary.as_file_mut().flush()
    }
}

/// Refuses a file of this size beyond the limit of the process (`ulimit -f`). Writing it would end
/// the process by a signal, without a word and without removing temporary files.
pub fn room(bytes: u64) -> io::Result<()> {
    match limit() {
        Some(limit) if bytes > limit => {
            let text = format!("a file may have {limit} bytes here (ulimit -f), not {bytes}");
            Err(io::Error::new(io::ErrorKind::FileTooLarge, text))
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}

#[cfg(not(unix))]
fn limit() -> Option<u64> {
    None
}

/// The file that this path refers to or would create. Links are followed, so that all names of one
/// file give the same result.
///
/// # Errors
/// [`Problem::NotAFile`] if the path exists and is no regular file, [`Problem::NoFolder`], and
/// [`Problem::Io`] for a dangling link and for failures of the operating system.
pub fn destination(path: impl AsRef<Path>) -> Result<PathBuf> {
    let path = path.as_ref();
    let find = || match fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(Problem::NotAFile),
        Ok(_) => Ok(path.canonicalize()?),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => {
            let folder = folder_of(path);
            match (path.file_name(), folder.canonicalize()) {
                (Some(name), Ok(folder)) => Ok(folder.join(name)),
                _ => Err(Problem::NoFolder(folder.to_owned())),
            }
        }
        Err(error) => Err(error.into()),
    };
    find().map_err(|problem| Error { path: path.to_owned(), problem })
}

/// Creates a temporary file beside the destination, with the permissions that the destination has
/// or would get.
fn create(destination: &Path) -> io::Result<NamedTempFile> {
    let permissions = match OpenOptions::new().write(true).open(destination) {
        // The old file is opened for writing because a rename would replace even a write-protected
        // file.
        Ok(old) => Some(old.metadata()?.permissions()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => of_new_files(),
        Err(error) => return Err(error),
    };
    let mut builder = Builder::new();
    builder.prefix(PREFIX);
    permissions.map(|permissions| builder.permissions(permissions));
    builder.tempfile_in(folder_of(destination))
}

/// A second name of an existing file, from which it can be restored; a copy where the file system
/// has no hard links.
fn second_name(file: &Path) -> io::Result<Option<NamedTempFile<()>>> {
    if !file.exists() {
        return Ok(None);
    }
    let name = |at: &Path| fs::hard_link(file, at).or_else(|_| fs::copy(file, at).map(|_| ()));
    Builder::new().prefix(PREFIX).make_in(folder_of(file), name).map(Some)
}

const PREFIX: &str = ".blockflash-";

/// Permissions before the process's umask is applied.
#[cfg(unix)]
fn of_new_files() -> Option<Permissions> {
    Some(std::os::unix::fs::PermissionsExt::from_mode(0o666))
}

#[cfg(not(unix))]
fn of_new_files() -> Option<Permissions> {
    None
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn failed(path: &Path, error: io::Error) -> Error {
    Error { path: path.to_owned(), problem: error.into() }
}

#[cfg(test)]
#[path = "replace_tests.rs"]
mod tests;
