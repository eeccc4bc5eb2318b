use crate::words::text;

/// Reason why a case has no operands or cannot be verified. Every message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// More host memory than there is.
    #[error(
        "{what} need {} of host memory, but only {} are available",
        text(*needed),
        text(*available)
    )]
    HostMemory {
        /// What needs it.
        what: String,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
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

/// Result of making operands and of verifying them.
pub type Result<T, E = Error> = std::result::Result<T, E>;
