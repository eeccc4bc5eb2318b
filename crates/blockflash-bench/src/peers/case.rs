use crate::case::{AttentionShape, BlockSparseShape, BsrShape, Case};
use crate::io;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Why rivals are not asked for a case.
#[derive(Debug, thiserror::Error)]
pub enum PeerCaseError {
    /// The protocol has no packed sequences.
    #[error("dense batches only")]
    DenseOnly,
    /// No rival does this.
    #[error("ours only")]
    OursOnly,
    /// The pattern of blocks cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A case as the server takes it.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum PeerCase {
    /// Inputs are drawn by the server.
    AttentionFwd {
        /// Sizes, mask and type.
        #[serde(flatten)]
        shape: AttentionShape,
        /// Seed of the inputs.
        seed: u64,
    },
    /// The pattern comes from files, so that both sides visit the same blocks; inputs are drawn by
    /// the server.
    BlockSparseFwd {
        /// Sizes, mask and type.
        #[serde(flatten)]
        shape: BlockSparseShape,
        /// i32 `.npy` file.
        row_ptr: PathBuf,
        /// i32 `.npy` file.
        col_idx: PathBuf,
        /// Seed of the inputs.
        seed: u64,
    },
    /// The pattern comes from files, so that both sides multiply the same blocks; values are drawn
    /// by the server.
    BsrMatmul {
        /// Sizes and type.
        #[serde(flatten)]
        shape: BsrShape,
        /// i32 `.npy` file.
        row_ptr: PathBuf,
        /// i32 `.npy` file.
        col_idx: PathBuf,
        /// Seed of the values.
        seed: u64,
        /// The values are stored so often that they have this many bytes, and launches take them in
        /// turns, so that none finds its own in a cache of half that size; 0: once.
        fresh_bytes: usize,
    },
}

impl PeerCase {
    /// Describes a case; a block pattern is written into `folder`.
    ///
    /// # Errors
    /// If no rival computes it, or the files cannot be written.
    pub fn new(case: &Case, seed: u64, folder: &Path) -> Result<Self, PeerCaseError> {
        let save = |name: &str, values: Vec<i32>| {
            let path = folder.join(format!("{case}_{name}.npy"));
            let shape = [values.len()];
            match io::Array::new(&shape, io::Values::I32(values)) {
                Some(array) => io::write(&path, &[(name, &array)]).map(|()| path),
                None => Ok(path), // a vector always has its own length
            }
        };
        match *case {
            Case::VarlenFwd(_) => Err(PeerCaseError::DenseOnly),
            Case::BlockMaskBuild(_) | Case::BsrSddmm(_) => Err(PeerCaseError::OursOnly),
            Case::AttentionFwd(shape) => Ok(Self::AttentionFwd { shape, seed }),
            Case::BlockSparseFwd(shape) => {
                // The protocol has lists of every query head.
                let (row_ptr, col_idx) = shape.pattern_of_query_heads(seed);
                let (row_ptr, col_idx) = (save("row_ptr", row_ptr)?, save("col_idx", col_idx)?);
                Ok(Self::BlockSparseFwd { shape, row_ptr, col_idx, seed })
            }
            Case::BsrMatmul(shape) => {
                let (row_ptr, col_idx) = shape.pattern(seed);
                let (row_ptr, col_idx) = (save("row_ptr", row_ptr)?, save("col_idx", col_idx)?);
                Ok(Self::BsrMatmul { shape, row_ptr, col_idx, seed, fresh_bytes: 0 })
            }
        }
    }
}
