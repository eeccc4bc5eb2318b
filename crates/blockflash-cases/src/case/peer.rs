//! A case as the server of competitors takes it.

use crate::io::{self, Array};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Why competitors are not asked for a case.
#[derive(Debug, thiserror::Error)]
pub enum PeerCaseError {
    /// The protocol has no packed sequences in the backward pass.
    #[error("dense batches only")]
    DenseOnly,
    /// The protocol has one head dimension for q, k, v and o, but for dense attention.
    #[error("one head_dim only")]
    OneHeadDim,
    /// The protocol has one type for q and the cache.
    #[error("one dtype only")]
    OneDType,
    /// No competitor does this.
    #[error("ours only")]
    OursOnly,
    /// The pattern of blocks cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The sizes cannot be written.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// A case as the server takes it. Inputs are drawn by the server.
#[derive(Clone, Debug, Serialize)]
pub struct PeerCase {
    op: &'static str,
    #[serde(flatten)]
    shape: Value,
    seed: u64,
    #[serde(flatten)]
    pattern: Option<PatternFiles>,
}

/// i32 `.npy` files of a pattern, so that both sides visit the same blocks.
#[derive(Clone, Debug, Serialize)]
struct PatternFiles {
    row_ptr: PathBuf,
    col_idx: PathBuf,
}

impl PeerCase {
    /// Sizes, mask and type of an operation.
    ///
    /// # Errors
    /// [`PeerCaseError::Json`] for a shape that is no object.
    pub fn new(op: &'static str, shape: &impl Serialize, seed: u64) -> Result<Self, PeerCaseError> {
        let shape = serde_json::to_value(shape)?;
        Ok(Self { op, shape, seed, pattern: None })
    }

    /// The same with a pattern of blocks, which is written into `folder` under a name that begins
    /// with `stem`.
    ///
    /// # Errors
    /// [`PeerCaseError::Io`].
    pub fn with_pattern(
        self,
        folder: &Path,
        stem: &str,
        (row_ptr, col_idx): (Vec<i32>, Vec<i32>),
    ) -> Result<Self, PeerCaseError> {
        let save = |name: &str, values: Vec<i32>| {
            let path = folder.join(format!("{stem}{name}.npy"));
            io::write(&path, &[(name, &Array::from(values))]).map(|()| path)
        };
        let (row_ptr, col_idx) = (save("row_ptr", row_ptr)?, save("col_idx", col_idx)?);
        Ok(Self { pattern: Some(PatternFiles { row_ptr, col_idx }), ..self })
    }
}
