use crate::Pass;
use crate::gathered::Gather;
use crate::plan::Plan;
use crate::problem::Problem;
use blockflash_ops::AttentionProblem;
use std::sync::Arc;

/// A call whose arguments all ranks have compared: see [`DistributedAttention::prepare`].
///
/// [`DistributedAttention::prepare`]: crate::DistributedAttention::prepare
#[derive(Clone, Debug)]
pub struct PreparedAttention {
    pub(crate) problem: Problem,
    pub(crate) plans: Arc<[Plan]>,
    /// Whether the forward pass gathers keys, which all ranks have decided.
    pub(crate) gather: Option<Gather>,
}

impl PreparedAttention {
    /// Bytes that this rank sends to others in a pass.
    pub fn sent_bytes(&self, pass: Pass) -> usize {
        let AttentionProblem { batch, types, .. } = self.problem.local;
        if let (Some(gather), Pass::Forward) = (self.gather, pass) {
            let others = self.problem.grid.shard.world() - 1;
            return batch * others * gather.bytes(types.kv.size());
        }
        let mut rows = [0; 2];
        for plan in self.plans.iter().cycle().take(batch) {
            rows = std::array::from_fn(|at| rows[at] + plan.rows_sent()[at]);
        }
        self.problem.sent_bytes(rows, pass)
    }
}
