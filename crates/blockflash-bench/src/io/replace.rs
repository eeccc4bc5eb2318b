//! Files that appear complete or not at all.

use super::error::{Error, Problem, Result};
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// A file that is being written: beside the place where it belongs, to which
/// [`commit`](Self::commit) moves it. Dropped before that, it leaves nothing behind, and an old
/// file stays as it is.
#[derive(Debug)]
pub struct Replacement {
    temporary: NamedTempFile,
    /// As it was named, for errors.
    path: PathBuf,
    destination: PathBuf,
}

impl Replacement {
    /// Starts an empty file for this path. Where that works the path can be written, so starting
    /// and dropping is a check.
    ///
    /// # Errors
    /// Those of [`destination`]; [`Problem::Io`] if the folder, or a file that exists, cannot be
    /// written.
    pub fn begin(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let destination = destination(path)?;
        let temporary = create(&destination).map_err(|error| failed(path, error))?;
        Ok(Self { temporary, path: path.to_owned(), destination })
    }

    /// Puts all files into their places. If that fails for one, those before it are taken back.
    ///
    /// # Errors
    /// [`Problem::Io`] names the file that does not reach the disk or cannot be moved.
    pub fn commit(files: Vec<Self>) -> Result<()> {
        for file in &files {
            file.temporary.as_file().sync_all().map_err(|error| failed(&file.path, error))?;
        }
        let several = files.len() > 1;
        let mut done: Vec<(PathBuf, Option<NamedTempFile<()>>)> = Vec::new();
        for Self { temporary, path, destination } in files {
            let old = if several { second_name(&destination) } else { Ok(None) };
            let moved = old
                .and_then(|old| temporary.persist(&destination).map(|_| old).map_err(Into::into));
            match moved {
                Ok(old) => done.push((destination, old)),
                Err(error) => {
                    for (destination, old) in done.into_iter().rev() {
                        // The first error is the one to report: nothing is left to try if this
                        // fails, too.
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
        self.temporary.as_file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.temporary.as_file_mut().flush()
    }
}

/// Where a file of this name is or would be. Links are followed, so that all names of one file give
/// the same.
///
/// # Errors
/// [`Problem::NotAFile`] for what is there and no regular file, [`Problem::NoFolder`],
/// [`Problem::Io`] for a link to nothing and for what the operating system refuses.
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

/// A temporary file beside this one, with the permissions that this one has or would get.
fn create(destination: &Path) -> io::Result<NamedTempFile> {
    let permissions = match OpenOptions::new().write(true).open(destination) {
        // It is opened for writing because a rename would also replace a file that is protected
        // against that.
        Ok(old) => Some(old.metadata()?.permissions()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => of_new_files(),
        Err(error) => return Err(error),
    };
    let mut builder = Builder::new();
    builder.prefix(PREFIX);
    permissions.map(|permissions| builder.permissions(permissions));
    builder.tempfile_in(folder_of(destination))
}

/// Another name of a file that exists, by which it can be put back; a copy where the file system
/// has no links.
fn second_name(file: &Path) -> io::Result<Option<NamedTempFile<()>>> {
    if !file.exists() {
        return Ok(None);
    }
    let name = |at: &Path| fs::hard_link(file, at).or_else(|_| fs::copy(file, at).map(|_| ()));
    Builder::new().prefix(PREFIX).make_in(folder_of(file), name).map(Some)
}

const PREFIX: &str = ".blockflash-";

/// The process's mask takes its part of these.
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
