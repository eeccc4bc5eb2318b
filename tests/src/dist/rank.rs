//! One rank of a case: its tensors, and its calls.

use super::DistCase;
use crate::attention::{AttentionCase, AttentionData};
use crate::attention_bwd::BackwardData;
use crate::host::{download, upload};
use crate::number::encode;
use blockflash_dist::{
    Communicator, DistributedAttention, DistributedBlockMask, Error, Memory, Pass,
    PreparedAttention, Shard,
};
use blockflash_ops::{Attention, AttentionOutput, DType, Scores, Stream, Tensor, View, ViewMut};
use std::cell::Cell;

/// How ranks exchange keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Step by step.
    Plain,
    /// All at once, in the forward pass.
    Gathered,
}

/// Counts the bytes that a rank sends.
pub struct Counted {
    pub(super) comm: Memory,
    pub(super) sent: Cell<usize>,
    /// All-gathers of this rank.
    pub(super) gathered: Cell<usize>,
}

impl Communicator for Counted {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn world(&self) -> usize {
        self.comm.world()
    }

    fn stream(&self) -> &Stream {
        self.comm.stream()
    }

    fn exchange(
        &self,
        sends: &[(usize, View<'_>)],
        receives: &mut [(usize, ViewMut<'_>)],
    ) -> Result<(), Error> {
        let bytes = sends.iter().map(|(_, view)| view.layout().elements() * view.dtype().size());
        self.sent.set(self.sent.get() + bytes.sum::<usize>());
        self.comm.exchange(sends, receives)
    }

    fn gathers(&self) -> bool {
        self.comm.gathers()
    }

    fn reserve_gather(&self, bytes: usize) -> Result<bool, Error> {
        self.comm.reserve_gather(bytes)
    }

    /// NaN wherever nothing is gathered.
    fn window(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Error> {
        let mut window = self.comm.window(dtype, shape)?;
        window.fill_bytes(self.stream(), 0xff)?;
        Ok(window)
    }

    fn all_gather(&self, slots: ViewMut<'_>) -> Result<(), Error> {
        assert!(slots.as_view().layout().is_contiguous());
        let bytes = slots.as_view().layout().elements() * slots.dtype().size() / self.world();
        self.sent.set(self.sent.get() + (self.world() - 1) * bytes);
        self.gathered.set(self.gathered.get() + 1);
        self.comm.all_gather(slots)
    }

    fn wait(&self, stream: &Stream) -> Result<(), Error> {
        self.comm.wait(stream)
    }

    fn give_up(&self, why: &str) {
        self.comm.give_up(why);
    }
}

/// One rank of a case.
pub struct Rank<'a> {
    pub(super) case: &'a DistCase,
    /// Its way to the others.
    pub comm: &'a Counted,
    pub(super) shard: Shard,
    /// Where it computes.
    pub stream: Stream,
    pub(super) block_mask: Option<DistributedBlockMask>,
    pub(super) cu_seqlens: Option<Vec<i32>>,
}

impl Rank<'_> {
    /// This rank's rows of a tensor `[batch, seqlen, heads, head_dim]`.
    pub fn rows(&self, values: &[f32], heads: usize) -> Result<Tensor, String> {
        let ([batch, seqlen], whole) = (self.case.sizes(), &self.case.whole);
        let (width, dtype) = (heads * whole.head_dim, whole.dtype);
        let rows = |entry: usize| {
            let ranges = self.shard.ranges().into_iter();
            let row = move |range: std::ops::Range<usize>| {
                (entry * seqlen + range.start) * width..(entry * seqlen + range.end) * width
            };
            ranges.flat_map(move |range| &values[row(range)])
        };
        let bits: Vec<u32> = (0..batch).flat_map(rows).map(|&x| encode(dtype, x)).collect();
        let shape = [batch, self.shard.rows(), heads, whole.head_dim];
        upload(&self.stream, dtype, &bits, &shape)
    }

    /// This rank's part of a log-sum-exp `[batch, heads, seqlen]`.
    pub fn logs(&self, values: &[f32]) -> Result<Tensor, String> {
        let ([batch, seqlen], heads) = (self.case.sizes(), self.case.whole.heads_q);
        let rows = |at: usize| {
            let ranges = self.shard.ranges().into_iter();
            ranges.flat_map(move |range| &values[at * seqlen..][range])
        };
        let bits: Vec<u32> = (0..batch * heads).flat_map(rows).map(|x| x.to_bits()).collect();
        upload(&self.stream, DType::F32, &bits, &[batch, heads, self.shard.rows()])
    }

    /// The call on rows of q, k and v, and a sink.
    pub fn call<'t>(
        &'t self,
        [q, k, v]: [View<'t>; 3],
        sink: Option<View<'t>>,
    ) -> DistributedAttention<'t> {
        let attention = Attention {
            scores: Scores { sink, ..self.case.whole.scores.without_tensors() },
            ..Attention::new(q, k, v)
        };
        let (shard, scheme, block_mask) = (self.shard, self.case.scheme, self.block_mask.as_ref());
        let cu_seqlens = self.cu_seqlens.as_deref();
        DistributedAttention { attention, shard, scheme, block_mask, cu_seqlens }
    }

    fn sink(&self, data: &AttentionData) -> Result<Option<Tensor>, String> {
        let bits: Vec<u32> = data.sink.iter().map(|x| x.to_bits()).collect();
        let sink = |()| upload(&self.stream, DType::F32, &bits, &[bits.len()]);
        self.case.whole.scores.sink.map(sink).transpose()
    }

    /// The forward pass of the data of a case.
    pub fn forward(&self, data: &AttentionData) -> Result<AttentionOutput, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let (q, sink) = (self.rows(&data.q, heads_q)?, self.sink(data)?);
        let [k, v] = [self.rows(&data.k, heads_kv)?, self.rows(&data.v, heads_kv)?];
        let sink = sink.as_ref().map(Tensor::view);
        let call = self.call([q.view(), k.view(), v.view()], sink);
        let output = self.counted(&call, Pass::Forward, |prepared| {
            call.forward_prepared(prepared, self.comm, &self.stream)
        })?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        Ok(output)
    }

    /// The bits of the gradients of q, k, v and the sink, of the data of a case.
    pub fn backward(&self, data: &BackwardData) -> Result<Vec<Vec<u32>>, String> {
        let AttentionCase { heads_q, heads_kv, .. } = self.case.whole;
        let (q, sink) = (self.rows(&data.forward.q, heads_q)?, self.sink(&data.forward)?);
        let k = self.rows(&data.forward.k, heads_kv)?;
        let v = self.rows(&data.forward.v, heads_kv)?;
        let output =
            AttentionOutput { o: self.rows(&data.o, heads_q)?, lse: self.logs(&data.lse)? };
        let d_o = self.rows(&data.d_o, heads_q)?;
        let sink = sink.as_ref().map(Tensor::view);
        let call = self.call([q.view(), k.view(), v.view()], sink);
        let gradients = self.counted(&call, Pass::Backward, |prepared| {
            call.backward_prepared(prepared, &output, d_o.view(), self.comm, &self.stream)
        })?;
        self.comm.wait(&self.stream).map_err(|error| error.to_string())?;
        let mut all = vec![&gradients.dq, &gradients.dk, &gradients.dv];
        all.extend(&gradients.d_sink);
        self.bits(&all)
    }

    /// Runs a prepared call, which sends as many bytes as it says.
    fn counted<T>(
        &self,
        call: &DistributedAttention<'_>,
        pass: Pass,
        run: impl FnOnce(&PreparedAttention) -> Result<T, Error>,
    ) -> Result<T, String> {
        let prepared = call.prepare(self.comm).map_err(|error| error.to_string())?;
        self.comm.sent.set(0);
        let result = run(&prepared).map_err(|error| error.to_string())?;
        let (expected, found) = (prepared.sent_bytes(pass), self.comm.sent.get());
        match expected == found {
            true => Ok(result),
            false => Err(format!("{pass:?} sends {found} bytes, not {expected}")),
        }
    }

    /// The bits of tensors.
    pub fn bits(&self, tensors: &[&Tensor]) -> Result<Vec<Vec<u32>>, String> {
        tensors.iter().map(|tensor| download(&self.stream, tensor)).collect()
    }
}
