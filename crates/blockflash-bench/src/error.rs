use std::path::PathBuf;

/// Reason why something cannot be measured or reported. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The folder with suites and competitors is nowhere to be found.
    #[error(
        "found no folder benches/ with suites/ in it, neither above {from} nor above the program; \
         set BLOCKFLASH_BENCHES"
    )]
    NoBenches {
        /// Where the search began.
        from: PathBuf,
    },
    /// No suite of this name.
    #[error("there is no suite {name:?} (there are {present})")]
    NoSuite {
        /// The name that was asked for.
        name: String,
        /// The names that exist.
        present: String,
    },
    /// A suite file with a mistake.
    #[error("{}: {problem}", path.display())]
    Suite {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A line that is no valid record.
    #[error("{}, line {line}: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// The operating system reports an error.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The GPU's counter of energy cannot be read.
    #[error("the energy of launches cannot be measured: {why}")]
    Energy {
        /// The reason.
        why: String,
    },
    /// A case has no operands, or cannot be verified.
    #[error(transparent)]
    Cases(#[from] blockflash_cases::Error),
    /// An option with an invalid value.
    #[error("{0}")]
    Option(String),
    /// The operation itself fails.
    #[error(transparent)]
    Ops(#[from] blockflash_ops::Error),
    /// A result cannot be compared.
    #[error(transparent)]
    Check(#[from] blockflash_oracle::Mismatch),
    /// The device fails.
    #[error(transparent)]
    Device(#[from] blockflash_safe::Error),
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}

/// Result of measuring and reporting.
pub type Result<T, E = Error> = std::result::Result<T, E>;
