//! A call as plain numbers, and what the ranks compare of it.

use crate::band::Band;
use crate::grid::Grid;
use crate::mask_sizes::mask_arguments;
use crate::{Communicator, Pass, Result};
use blockflash_ops::{
    AttentionBackward, AttentionMergeProblem, AttentionProblem, Stream, View, attention_merge,
};

/// A call as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Problem {
    /// On the rows of this rank.
    pub(crate) local: AttentionProblem,
    pub(crate) grid: Grid,
    pub(crate) band: Band,
    /// Identifies the block mask.
    pub(crate) block_mask: Option<u64>,
    /// Identifies the sequences of a packed batch.
    pub(crate) cu_seqlens: Option<u64>,
}

/// Checks that the call and the communicator are on the device of the stream.
pub(crate) fn on_device(
    comm: &dyn Communicator,
    stream: &Stream,
    operands: &[(&'static str, View<'_>)],
) -> Result<()> {
    let expected = *stream.device();
    let operands = operands.iter().map(|(what, view)| (*what, *view.device()));
    let all = operands.chain([("the communicator", *comm.stream().device())]);
    match all.into_iter().find(|(_, found)| *found != expected) {
        None => Ok(()),
        Some((what, found)) => {
            Err(blockflash_ops::Error::DeviceMismatch { what, expected, found }.into())
        }
    }
}

/// How many things have to be the same on every rank.
pub(crate) const ARGUMENTS: usize = 17;

impl Problem {
    /// Checks the operands of the backward pass, and that parts of gradients can be added.
    pub(crate) fn check_backward(
        &self,
        call: &AttentionBackward<'_>,
        comm: &dyn Communicator,
    ) -> Result<()> {
        call.problem()?;
        let Some(gpu) = comm.stream().device().cuda_properties() else { return Ok(()) };
        if self.grid.scheme.keys > 1 {
            let AttentionProblem { types, num_heads_q: num_heads, head_dims, .. } = self.local;
            let sum = AttentionMergeProblem {
                parts_dtype: types.o,
                o_dtype: types.o,
                parts: self.grid.scheme.keys,
                rows: self.local.seqlen_q,
                num_heads,
                head_dim: head_dims.max(),
                parts_o: [0; 3],
                parts_lse: None,
                o: [0; 2],
                lse: None,
            };
            attention_merge::select(&sum, gpu)?;
        }
        Ok(())
    }

    /// What has to be the same on every rank.
    pub(crate) fn arguments(&self) -> [(&'static str, u64); ARGUMENTS] {
        let local = &self.local;
        let [kind, left, right] = mask_arguments(local.scores.mask);
        let [scale, cap, sink] = local.scores.numbers();
        [
            ("element type", local.types.q as u64),
            ("batch", local.batch as u64),
            ("seqlen", self.grid.shard.seqlen() as u64),
            ("block of shard", self.grid.shard.block() as u64),
            ("num_heads_q", local.num_heads_q as u64),
            ("num_heads_kv", local.num_heads_kv as u64),
            ("head_dim", local.head_dims.qk as u64),
            ("heads of scheme", self.grid.scheme.heads as u64),
            ("kind of mask", kind),
            ("left side of mask", left),
            ("right side of mask", right),
            scale,
            cap,
            sink,
            ("block mask", self.block_mask.unwrap_or(0)),
            ("cu_seqlens", self.cu_seqlens.unwrap_or(0)),
            ("world", self.grid.shard.world() as u64),
        ]
    }

    /// Bytes that a rank sends in a pass, given the rows of keys that it sends for all entries of
    /// the batch, and the rows of their gradients.
    pub(crate) fn sent_bytes(&self, [keys, gradients]: [usize; 2], pass: Pass) -> usize {
        let AttentionProblem { types, batch, num_heads_q, num_heads_kv, head_dims, .. } =
            self.local;
        let (rows, members) = (self.grid.shard.rows(), self.grid.scheme.heads);
        let of_group = self.grid.rows_of(self.grid.group()).rows();
        let row = |heads: usize| heads / members * head_dims.qk * types.q.size();
        let (q, k, log) = (row(num_heads_q), row(num_heads_kv), num_heads_q / members * 4);
        // Rows of this rank with the heads of each other member, and back.
        let (there, back) = (batch * rows * (members - 1), batch * (of_group - rows));
        match pass {
            Pass::Forward => there * (q + 2 * k) + back * (q + log) + keys * 2 * k,
            Pass::Backward => {
                let sink =
                    if self.local.scores.sink { (self.grid.shard.world() - 1) * log } else { 0 };
                let heads = there * (3 * q + 2 * k + log) + back * (q + 2 * k);
                heads + (keys + gradients) * 2 * k + sink
            }
        }
    }
}
