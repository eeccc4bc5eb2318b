//! The trait that all cases implement.

use super::operands::Operands;
use super::peer::{PeerCase, PeerCaseError};
use super::work::Work;
use crate::error::Result;
use blockflash_ops::Stream;
use blockflash_sys::{DType, HeadDims};
use serde::Serializer;
use std::fmt::Display;
use std::path::Path;

/// One shape of one operation. Its [`Display`] is its id.
pub trait Shape: Display {
    /// Checks that the case can be counted and drawn, before either is done.
    ///
    /// # Errors
    /// One line that says which size is wrong.
    fn check(&self) -> Result<(), String>;
    /// Name of the operation in records.
    fn op(&self) -> &'static str;
    /// Element type of the inputs.
    fn dtype(&self) -> DType;
    /// Work of a launch.
    fn work(&self) -> Work;
    /// Heading in reports. It holds the properties that change the character of a case, but neither
    /// length nor density.
    fn group(&self) -> String;
    /// The operation by which the server of competitors knows those that compute this case.
    fn peer_op(&self) -> &'static str {
        self.op()
    }
    /// The case in the format of the server of competitors; files for it are written into `folder`.
    ///
    /// # Errors
    /// If no competitor computes it, or the files cannot be written.
    fn peer_case(&self, _seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        Err(PeerCaseError::OursOnly)
    }
    /// Draws inputs and allocates the outputs.
    ///
    /// # Errors
    /// If there is not enough memory, or the library refuses the shape.
    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>>;
}

/// Writes the head dimension of all tensors, or of q and k.
pub(super) fn head_dim_of_all<S: Serializer>(
    head_dims: &HeadDims,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(head_dims.qk as u64)
}
