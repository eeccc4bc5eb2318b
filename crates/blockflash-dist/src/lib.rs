#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod agree;
mod attention;
mod band;
mod block_exchange;
mod block_lists;
mod block_mask;
mod call;
mod check;
mod communicator;
mod error;
mod exchange;
mod forecast;
mod gathered;
mod grid;
mod heads;
mod mask_sizes;
mod memory;
mod pattern;
mod plan;
mod planner;
mod prepared;
mod problem;
mod ring;
mod ring_backward;
mod run;
mod scheme;
mod shard;
mod sink;
mod steps;

pub use attention::DistributedAttention;
pub use block_exchange::BlockMaskExchange;
pub use block_mask::DistributedBlockMask;
pub use communicator::{Communicator, Mark, Nccl};
pub use error::{Error, Result};
pub use memory::Memory;
pub use planner::{Density, Forecast, Machine, Pass, Workload};
pub use prepared::PreparedAttention;
pub use scheme::Scheme;
pub use shard::Shard;
pub use steps::{DensePlan, PlanCall, PlanStep};

pub use blockflash_safe::{NcclCommunicator, NcclId};
