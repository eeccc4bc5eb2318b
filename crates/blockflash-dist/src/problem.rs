//! The checks of a call that need no other rank.

use crate::{Communicator, DistributedAttention, Error, Result, Scheme, Shard};
use blockflash_ops::{
    AttentionBackward, AttentionMergeProblem, AttentionProblem, Mask, Stream, View, attention,
    attention_merge,
};

/// A call as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Problem {
    /// On the rows of this rank.
    pub(crate) local: AttentionProblem,
    seqlen: usize,
    scheme: Scheme,
    pub(crate) rank: usize,
    world: usize,
}

impl DistributedAttention<'_> {
    /// Every check that needs no other rank.
    pub(crate) fn problem(&self, comm: &dyn Communicator) -> Result<Problem> {
        let Self { attention, seqlen, scheme } = *self;
        let local = attention.problem()?;
        let (rank, world) = (comm.rank(), comm.world());
        let options = [
            (attention.sink.is_some(), "a sink"),
            (attention.cu_seqlens.is_some(), "packed sequences"),
            (attention.block_mask.is_some(), "a block mask"),
            (
                scheme.keys > 1 && !matches!(local.mask, Mask::Full | Mask::Causal { .. }),
                "a mask that is neither full nor causal",
            ),
        ];
        if let Some((_, what)) = options.into_iter().find(|(given, _)| *given) {
            return Err(Error::Unsupported { scheme, what });
        }
        scheme.check(world, local.num_heads_q, local.num_heads_kv)?;
        let expected = Shard::new(seqlen, world, rank)?.rows();
        for (what, found) in [("q", local.seqlen_q), ("k", local.seqlen_kv)] {
            if found != expected {
                return Err(Error::Rows { what, rank, world, seqlen, expected, found });
            }
        }
        if let Some(gpu) = comm.stream().device().cuda_properties() {
            attention::select(&local, gpu)?;
        }
        Ok(Problem { local, seqlen, scheme, rank, world })
    }
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

/// What has to be the same on every rank.
pub(crate) const ARGUMENTS: [&str; 13] = [
    "element type",
    "batch",
    "seqlen",
    "num_heads_q",
    "num_heads_kv",
    "head_dim",
    "heads of scheme",
    "kind of mask",
    "left side of mask",
    "right side of mask",
    "softmax_scale",
    "softcap",
    "world",
];

impl Problem {
    /// Checks the operands of the backward pass, and that parts of gradients can be added.
    pub(crate) fn check_backward(
        &self,
        call: &AttentionBackward<'_>,
        comm: &dyn Communicator,
    ) -> Result<()> {
        call.problem()?;
        let Some(gpu) = comm.stream().device().cuda_properties() else { return Ok(()) };
        if self.scheme.keys > 1 {
            let AttentionProblem { dtype, num_heads_q: num_heads, head_dim, .. } = self.local;
            let sum = AttentionMergeProblem {
                parts_dtype: dtype,
                o_dtype: dtype,
                parts: self.scheme.keys,
                rows: self.local.seqlen_q,
                num_heads,
                head_dim,
                parts_o: [0; 3],
                parts_lse: None,
                o: [0; 2],
                lse: None,
            };
            attention_merge::select(&sum, gpu)?;
        }
        Ok(())
    }

    pub(crate) fn arguments(&self) -> [u64; ARGUMENTS.len()] {
        let local = &self.local;
        let side = |side: Option<usize>| side.map_or(u64::MAX, |side| side as u64);
        let [kind, left, right] = match local.mask {
            Mask::Full => [0, 0, 0],
            Mask::Causal { .. } => [1, 0, 0],
            Mask::Window { left, right, .. } => [2, side(left), side(right)],
            _ => [3, 0, 0],
        };
        [
            local.dtype as u64,
            local.batch as u64,
            self.seqlen as u64,
            local.num_heads_q as u64,
            local.num_heads_kv as u64,
            local.head_dim as u64,
            self.scheme.heads as u64,
            kind,
            left,
            right,
            local.softmax_scale.to_bits().into(),
            local.softcap.map_or(u64::MAX, |softcap| softcap.to_bits().into()),
            self.world as u64,
        ]
    }
}
