//! The passes of a call, given what the ranks have agreed about.

use crate::attention::DistributedAttention;
use crate::heads::{LOGS, ROWS, Scattering, gather, scatter};
use crate::problem::{Problem, on_device};
use crate::ring::Ring;
use crate::ring_backward::Operands;
use crate::{Communicator, PreparedAttention, Result, ring, ring_backward, sink};
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradients, AttentionOutput, AttentionProblem, DType,
    Stream, Tensor, View,
};

impl DistributedAttention<'_> {
    /// Compares the arguments of all ranks, and waits for that. A call that is repeated needs it
    /// once: the ranks do not wait for each other then, but on their devices.
    ///
    /// # Errors
    /// All checks of [`Attention::problem`]; [`Error::Rows`], [`Error::Scheme`],
    /// [`Error::BlockMask`], [`Error::CuSeqlens`], [`Error::Unsupported`], [`Error::Size`];
    /// [`Error::Refused`] if another rank has one of these errors; [`Error::Mismatch`] if the
    /// arguments differ; those of [`Communicator::exchange`].
    ///
    /// [`Error::Rows`]: crate::Error::Rows
    /// [`Error::Scheme`]: crate::Error::Scheme
    /// [`Error::BlockMask`]: crate::Error::BlockMask
    /// [`Error::CuSeqlens`]: crate::Error::CuSeqlens
    /// [`Error::Unsupported`]: crate::Error::Unsupported
    /// [`Error::Size`]: crate::Error::Size
    /// [`Error::Refused`]: crate::Error::Refused
    /// [`Error::Mismatch`]: crate::Error::Mismatch
    pub fn prepare(&self, comm: &dyn Communicator) -> Result<PreparedAttention> {
        self.agreed(self.problem(comm), comm, true)
    }

    /// The output of the rows of this rank, and their log-sum-exp. On a GPU the result is there
    /// when the stream has done its work: wait with [`Communicator::wait`].
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`Attention::forward`].
    pub fn forward(&self, comm: &dyn Communicator, stream: &Stream) -> Result<AttentionOutput> {
        self.forward_prepared(&self.prepare(comm)?, comm, stream)
    }

    /// Like [`forward`](Self::forward) without comparing the arguments again. Tensors may differ
    /// from the prepared ones.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); [`NotPrepared`](blockflash_ops::Error::NotPrepared).
    pub fn forward_prepared(
        &self,
        prepared: &PreparedAttention,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<AttentionOutput> {
        self.check_prepared(prepared, comm)?;
        on_device(comm, stream, &self.operands())?;
        let result = self.run_forward(prepared, comm, stream);
        result.inspect_err(|error| comm.give_up(&error.to_string()))
    }

    fn run_forward(
        &self,
        prepared: &PreparedAttention,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<AttentionOutput> {
        let PreparedAttention { problem, plans, .. } = prepared;
        let Attention { q, k, v, .. } = self.attention;
        let grid = &problem.grid;
        let attention = self.of_heads(problem)?;
        let ring = Ring { comm, plans, attention: &attention, gather: prepared.gather };
        comm.stream().wait_for(stream)?;
        if self.scheme.heads == 1 {
            return ring::forward(ring, [q, k, v], stream);
        }
        let gathered = gather(comm, grid, &[(q, ROWS), (k, ROWS), (v, ROWS)])?;
        let [q, k, v] = &gathered[..] else { unreachable!("one for each operand") };
        stream.wait_for(comm.stream())?;
        let all = ring::forward(ring, [q.view(), k.view(), v.view()], stream)?;
        comm.stream().wait_for(stream)?;
        let AttentionProblem { types, batch, seqlen_q, num_heads_q, .. } = problem.local;
        let mut o = Tensor::empty(stream, types.o, self.attention.q.shape())?;
        let mut lse = Tensor::empty(stream, DType::F32, &[batch, num_heads_q, seqlen_q])?;
        let rows = Scattering { all: all.o.view(), axes: ROWS, x: o.view_mut() };
        let logs = Scattering { all: all.lse.view(), axes: LOGS, x: lse.view_mut() };
        scatter(comm, grid, &mut [rows, logs])?;
        stream.wait_for(comm.stream())?;
        Ok(AttentionOutput { o, lse })
    }

    fn operands(&self) -> Vec<(&'static str, View<'_>)> {
        let Attention { q, k, v, scores, .. } = self.attention;
        let sink = scores.sink.map(|sink| ("sink", sink));
        [("q", q), ("k", k), ("v", v)].into_iter().chain(sink).collect()
    }

    /// The options of the call for the heads of this rank.
    fn of_heads(&self, problem: &Problem) -> Result<Attention<'_>> {
        let heads = problem.grid.heads(problem.local.num_heads_q);
        let scores = self.attention.scores.of_heads(heads)?;
        Ok(Attention { scores, ..self.attention })
    }

    /// The gradients of the rows of this rank, given the output of [`forward`](Self::forward) and
    /// the gradient with respect to its `o`.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) and [`AttentionBackward::backward`].
    pub fn backward(
        &self,
        output: &AttentionOutput,
        d_o: View<'_>,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<AttentionGradients> {
        let (o, lse) = (output.o.view(), output.lse.view());
        let call = AttentionBackward { attention: self.attention, o, lse, d_o };
        let problem = self.problem(comm).and_then(|problem| {
            problem.check_backward(&call, comm)?;
            Ok(problem)
        });
        let prepared = self.agreed(problem, comm, false)?;
        self.backward_prepared(&prepared, output, d_o, comm, stream)
    }

    /// Like [`backward`](Self::backward) without comparing the arguments again. Forward and
    /// backward pass are prepared as one.
    ///
    /// # Errors
    /// As [`backward`](Self::backward); [`NotPrepared`](blockflash_ops::Error::NotPrepared).
    pub fn backward_prepared(
        &self,
        prepared: &PreparedAttention,
        output: &AttentionOutput,
        d_o: View<'_>,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<AttentionGradients> {
        self.check_prepared(prepared, comm)?;
        let (o, lse) = (output.o.view(), output.lse.view());
        let call = AttentionBackward { attention: self.attention, o, lse, d_o };
        prepared.problem.check_backward(&call, comm)?;
        let mut operands = self.operands();
        operands.extend([("o", o), ("lse", lse), ("d_o", d_o)]);
        on_device(comm, stream, &operands)?;
        let result = self.run_backward(prepared, &call, comm, stream);
        result.inspect_err(|error| comm.give_up(&error.to_string()))
    }

    fn run_backward(
        &self,
        PreparedAttention { problem, plans, .. }: &PreparedAttention,
        call: &AttentionBackward<'_>,
        comm: &dyn Communicator,
        stream: &Stream,
    ) -> Result<AttentionGradients> {
        let Attention { q, k, v, .. } = self.attention;
        let AttentionBackward { o, lse, d_o, .. } = *call;
        let grid = &problem.grid;
        let attention = self.of_heads(problem)?;
        let ring = Ring { comm, plans, attention: &attention, gather: None };
        comm.stream().wait_for(stream)?;
        let mut gradients = if self.scheme.heads == 1 {
            let operands = Operands { qkv: [q, k, v], o, lse, d_o };
            ring_backward::backward(ring, operands, stream)?
        } else {
            let empty = |x: View<'_>| Tensor::empty(stream, x.dtype(), x.shape());
            let (mut dq, mut dk, mut dv) = (empty(q)?, empty(k)?, empty(v)?);
            let rows = [q, k, v, o, d_o].map(|x| (x, ROWS));
            let gathered = gather(comm, grid, &[&rows[..], &[(lse, LOGS)]].concat())?;
            let [q, k, v, o, d_o, lse] = &gathered[..] else {
                unreachable!("one for each operand")
            };
            stream.wait_for(comm.stream())?;
            let qkv = [q.view(), k.view(), v.view()];
            let operands = Operands { qkv, o: o.view(), lse: lse.view(), d_o: d_o.view() };
            let all = ring_backward::backward(ring, operands, stream)?;
            comm.stream().wait_for(stream)?;
            let rows = |all, x| Scattering { all, axes: ROWS, x };
            let dq_rows = rows(all.dq.view(), dq.view_mut());
            let dk_rows = rows(all.dk.view(), dk.view_mut());
            let dv_rows = rows(all.dv.view(), dv.view_mut());
            scatter(comm, grid, &mut [dq_rows, dk_rows, dv_rows])?;
            stream.wait_for(comm.stream())?;
            AttentionGradients { d_sink: all.d_sink, ..AttentionGradients::new(dq, dk, dv) }
        };
        if let Some(part) = gradients.d_sink.take() {
            gradients.d_sink = Some(sink::total(comm, grid, &part, stream)?);
        }
        Ok(gradients)
    }
}
