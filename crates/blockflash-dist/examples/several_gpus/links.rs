//! What NCCL and the memory of a GPU reach, for the planner.

use crate::Failure;
use crate::measure::Ranks;
use crate::report::Report;
use blockflash_dist::Communicator;
use blockflash_ops::{DType, Tensor};
use serde::Serialize;

/// Rates of this machine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Links {
    /// Bytes per second that a rank sends to the next one while it receives from the one before.
    pub link: f64,
    /// Seconds of an exchange of 1 KB.
    pub latency: f64,
    /// Bytes per second of a copy in the memory of a GPU.
    pub copies: f64,
}

/// One exchange of a ring for a few sizes, and a copy.
pub fn measure(ranks: &Ranks, report: &mut Report) -> Result<Links, Failure> {
    let (comm, stream) = (&ranks.comm, ranks.comm.stream());
    let (rank, world) = (comm.rank(), comm.world());
    let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
    let mut times = Vec::new();
    const SIZES: [usize; 5] = [1 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];
    for bytes in SIZES {
        let own = Tensor::zeros(stream, DType::U8, &[bytes])?;
        let mut theirs = Tensor::empty(stream, DType::U8, &[bytes])?;
        let seconds = ranks.median(9, stream, &mut || {
            comm.exchange(&[(to, own.view())], &mut [(from, theirs.view_mut())])
        })?;
        times.push(seconds);
        report.link(comm, bytes, seconds)?;
    }
    let bytes = SIZES[4];
    let own = Tensor::zeros(stream, DType::U8, &[4 * bytes])?;
    let mut copy = Tensor::empty(stream, DType::U8, &[4 * bytes])?;
    let seconds =
        ranks.median(5, stream, &mut || Ok(copy.view_mut().copy_from(&own.view(), stream)?))?;
    Ok(Links {
        link: bytes as f64 / (times[4] - times[0]),
        latency: times[0],
        copies: 4.0 * bytes as f64 / seconds,
    })
}
