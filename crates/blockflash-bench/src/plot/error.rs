//! Errors of plotting.

use std::path::PathBuf;

/// Maximum number of heads in one plot.
pub const MAX_SHOWN: usize = 16;

/// Reason why a plot cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// The drawing library has failed.
    #[error("drawing failed: {0}")]
    Drawing(String),
    /// A file name without the extension .svg.
    #[error("{}: the name of a picture must end in .svg", .0.display())]
    Format(PathBuf),
    /// Nothing to draw.
    #[error("the plot has no points")]
    NoPoints,
    /// Too many heads for a picture, or none.
    #[error("a picture shows 1 to {MAX_SHOWN} heads, not {0}")]
    Heads(usize),
    /// A head that the mask does not have.
    #[error("the mask has no head {head} of batch entry {batch}")]
    NoHead {
        /// Batch entry.
        batch: usize,
        /// Head.
        head: usize,
    },
    /// The mask cannot be read.
    #[error(transparent)]
    Mask(#[from] blockflash_ops::Error),
    /// The file cannot be written.
    #[error(transparent)]
    File(#[from] crate::io::Error),
}

impl<E: std::error::Error + Send + Sync> From<plotters::drawing::DrawingAreaErrorKind<E>>
    for PlotError
{
    fn from(error: plotters::drawing::DrawingAreaErrorKind<E>) -> Self {
        Self::Drawing(error.to_string())
    }
}
