use crate::Scheme;
use std::time::Duration;

/// Every error of this crate. When a call fails on one rank, it fails on every rank, on those that
/// wait for it after the timeout of the communicator at the latest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call on this rank's rows is not valid, or failed.
    #[error(transparent)]
    Ops(#[from] blockflash_ops::Error),

    /// The ranks were called with different arguments.
    #[error("rank {rank} has {what} {found}, but rank 0 has {expected}")]
    Mismatch {
        /// The argument; that of a mask, of a factor or of `cu_seqlens` is a number that stands for
        /// it.
        what: &'static str,
        /// The first rank that differs.
        rank: usize,
        /// Its argument.
        found: u64,
        /// The argument of rank 0.
        expected: u64,
    },

    /// Another rank did not accept its own arguments.
    #[error("rank {rank} refused its arguments")]
    Refused {
        /// The rank, which has an error that says why.
        rank: usize,
    },

    /// A tensor does not hold the rows of this rank.
    #[error("rank {rank} of {world} holds {expected} of {seqlen} rows, but {what} has {found}")]
    Rows {
        /// The tensor.
        what: &'static str,
        /// This rank.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// Rows of the whole sequence.
        seqlen: usize,
        /// Rows of this rank.
        expected: usize,
        /// Rows of the tensor.
        found: usize,
    },

    /// A scheme that does not fit the ranks or the heads.
    #[error("{scheme}: {what}")]
    Scheme {
        /// The scheme.
        scheme: Scheme,
        /// What does not fit.
        what: String,
    },

    /// An option of attention that cannot be computed over several ranks in this way.
    #[error("{scheme} does not support {what}")]
    Unsupported {
        /// The scheme.
        scheme: Scheme,
        /// The option.
        what: &'static str,
    },

    /// Offsets that are no sequences of a packed batch.
    #[error("cu_seqlens[{index}] is {value}: {problem}")]
    CuSeqlens {
        /// The first bad entry.
        index: usize,
        /// Its value.
        value: i32,
        /// The rule that it breaks.
        problem: String,
    },

    /// A block mask that does not fit its call or the rows of its rank.
    #[error("{what} of the block mask: {found}, expected {expected}")]
    BlockMask {
        /// What does not fit.
        what: &'static str,
        /// That of the mask.
        found: String,
        /// What it may be.
        expected: String,
    },

    /// A number of ranks or rows beyond what a sequence can be divided into.
    #[error("{what} is {value}, expected {expected}")]
    Size {
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        expected: String,
    },

    /// A peer sends something else than this rank expects.
    #[error("rank {from} sends {found}, expected {expected}")]
    Message {
        /// The sender.
        from: usize,
        /// What was expected, in words.
        expected: String,
        /// What came.
        found: String,
    },

    /// A peer has gone, or has given up.
    #[error("rank {rank} is gone")]
    Gone {
        /// The peer.
        rank: usize,
    },

    /// A peer did not answer.
    #[error("rank {rank} did not answer within {timeout:?}")]
    Timeout {
        /// The peer.
        rank: usize,
        /// How long this rank waited.
        timeout: Duration,
    },
}

impl Error {
    pub(crate) fn message(from: usize, expected: &str, found: &str) -> Error {
        Error::Message { from, expected: expected.into(), found: found.into() }
    }
}

impl From<blockflash_safe::Error> for Error {
    fn from(error: blockflash_safe::Error) -> Self {
        Error::Ops(error.into())
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
