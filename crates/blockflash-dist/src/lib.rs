#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agree;
mod attention;
mod communicator;
mod error;
mod grid;
mod heads;
mod memory;
mod planner;
mod problem;
mod ring;
mod ring_backward;
mod shard;

pub use attention::{DistributedAttention, PreparedAttention};
pub use communicator::{Communicator, Nccl};
pub use error::{Error, Result};
pub use grid::Scheme;
pub use memory::Memory;
pub use planner::{Forecast, Machine, Pass, Workload};
pub use shard::Shard;

pub use blockflash_safe::{NcclCommunicator, NcclId};
