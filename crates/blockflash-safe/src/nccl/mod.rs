//! Exchange between GPUs by NCCL.

mod communicator;
mod gather;
mod guard;
mod join;
mod library;
mod watch;
mod window;

pub use communicator::NcclCommunicator;

use crate::Result;
use library::{Nccl, UniqueId};

/// What the ranks of one communicator have in common. One rank makes it, and hands its bytes to the
/// others in any way.
#[derive(Clone, Copy)]
pub struct NcclId(UniqueId);

impl NcclId {
    /// A new one, for one communicator.
    ///
    /// # Errors
    /// [`Error::NoNccl`](crate::Error::NoNccl), [`Error::Nccl`](crate::Error::Nccl).
    pub fn new() -> Result<NcclId> {
        let nccl = Nccl::get()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is valid for writes during the call.
        nccl.check("ncclGetUniqueId", unsafe { (nccl.get_unique_id)(&mut id) })?;
        Ok(NcclId(id))
    }

    /// For the way to another process.
    pub fn to_bytes(&self) -> [u8; 128] {
        self.0.0
    }

    /// What [`to_bytes`](Self::to_bytes) gave in another process. With other bytes, creating a
    /// communicator fails or times out.
    pub fn from_bytes(bytes: [u8; 128]) -> NcclId {
        NcclId(UniqueId(bytes))
    }
}

impl std::fmt::Debug for NcclId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NcclId")
    }
}

/// Without the library every way to a communicator is an error value that says so.
#[test]
fn a_missing_library_is_an_error() {
    if let Err(error) = NcclId::new() {
        assert!(matches!(error, crate::Error::NoNccl { .. } | crate::Error::Nccl { .. }));
        assert!(error.to_string().contains("ccl"), "{error}");
    }
}
