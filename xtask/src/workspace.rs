//! Paths of the workspace, and running of other programs.

use anyhow::{Context, Result, bail};
use comfy_table::{Cell, CellAlignment};
use std::{
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
    process::Command,
};

/// The workspace root.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// A folder below `target/` of the workspace, made when missing. It does not follow
/// `CARGO_TARGET_DIR`: the compiler wheels are the same for every build directory.
pub fn target_dir(name: &str) -> Result<PathBuf> {
    let path = root().join("target").join(name);
    create_dir(&path)?;
    Ok(path)
}

/// Where cargo builds the workspace.
pub fn build_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The compressed kernel images of Hopper, and the lock file of all images.
pub fn prebuilt() -> PathBuf {
    root().join("crates/blockflash-sys/prebuilt")
}

/// The compressed kernel images of other GPUs.
pub fn prebuilt_others() -> PathBuf {
    root().join("crates/blockflash-images/prebuilt")
}

/// Makes a folder and its parents.
pub fn create_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

/// Reads a text file.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Reads a file.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Prints a text unchanged. A reader that closes the pipe early, such as `head`, is no error.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to stdout")
        }
        _ => Ok(()),
    }
}

/// Sorted paths of the files and folders in a folder.
pub fn list(path: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        std::fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// The command line as a user would type it.
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Runs a command with its output going to the terminal; an error when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a command and returns what it wrote to stdout; an error with its stderr when it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}):\n{stderr}", shown(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The commit of the working tree, with `-dirty` when tracked files differ from it.
pub fn head() -> Result<String> {
    let git = |arguments: &[&str]| output(Command::new("git").current_dir(root()).args(arguments));
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Ok(format!("{}{}", commit.trim(), if changed.is_empty() { "" } else { "-dirty" }))
}

/// Formats a plain-text table: the first column left-aligned, the others right-aligned.
pub fn table<R: IntoIterator<Item = String>>(rows: impl IntoIterator<Item = R>) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    for row in rows {
        let cells = row.into_iter().enumerate().map(|(column, text)| {
            let right = if column == 0 { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(right)
        });
        table.add_row(cells.collect::<Vec<_>>());
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt() + "\n"
}
