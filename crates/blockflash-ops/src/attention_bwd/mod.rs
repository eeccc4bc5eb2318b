//! Gradients of attention: `dq`, `dk`, `dv` and those of sink and bias, given the one of `o`.

pub(crate) mod cpu;
mod parts;
mod plan;
mod problem;
mod select;

pub use plan::{AttentionBackwardPlan, plan, workspace_bytes};
pub use problem::AttentionBackwardProblem;
pub use select::{accepts, select};

pub(crate) use plan::{statistics_alone, statistics_bytes};
pub(crate) use select::support;

use crate::attention::{Attention, AttentionOutput};
use crate::check::{Operand, aligned, contiguous};
use crate::operation::{Operation, Prepared, Steps};
use crate::{BlockMask, Error, Result};
use blockflash_safe::{
    AttentionBwdOperands, CudaProperties, Device, Stream, Tensor, View, ViewMut,
};
use blockflash_sys::manifest::{AttentionBwd, AttentionBwdHopper, Variant};
use blockflash_sys::{DType, ElementTypes, Kernel};

/// A call of the attention backward pass: the gradients of a scalar with respect to q, k, v, the
/// sink and the bias, given its gradient with respect to `o`.
///
/// ```
/// # use blockflash_ops::{Attention, Device, Mask, Tensor};
/// let stream = Device::cpu().stream()?;
/// let data: Vec<f32> = (0..50 * 2 * 8).map(|i| (i as f32).sin()).collect();
/// let q = Tensor::from_slice(&stream, &data, &[1, 50, 2, 8])?;
/// let scores = Mask::causal().into();
/// let attention = Attention { scores, ..Attention::new(q.view(), q.view(), q.view()) };
///
/// let output = attention.forward(&stream)?;
/// let d_o = Tensor::from_slice(&stream, &data, &[1, 50, 2, 8])?; // from the layers above
/// let gradients = attention.backward(&output, d_o.view(), &stream)?;
/// assert_eq!(gradients.dk.shape(), [1, 50, 2, 8]);
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// Every option of [`Attention`] works; where heads are shared, `dk` and `dv` are summed over the
/// query heads of a group. All tensors may have
/// any strides but a contiguous last dimension. Sums are f32, and the gradients are rounded once.
/// The same call gives the same bits every time, on a CPU with any number of threads.
///
/// - Every element of the gradients is written. A query that attends nothing, a key that nobody
///   attends, and packed rows that belong to no sequence have gradient 0. Rows of `o`, `lse` and
///   `d_o` that belong to no sequence are not read.
/// - A pair that the mask hides contributes exactly nothing as long as q, k, v, `o` and `d_o` are
///   finite. This is less than the forward pass promises: a NaN or an infinity may also reach the
///   gradients of rows that are hidden from it. It stays within its sequence and its group of heads
///   (all query heads that share a head of keys), and within the blocks that a
///   [block mask](Attention::block_mask) visits: a pair in any other block contributes exactly
///   nothing whatever it holds. The gradient of a sink sums over all queries of its head.
/// - The log-sum-exp is an input, but not differentiated: a function of `lse` needs its own
///   gradient.
///
/// The CPU takes every problem that the forward pass takes there. A GPU takes f16 and bf16 with a
/// `head_dim` of any multiple of 8 up to 512, and pointers and strides must be multiples of 16
/// bytes. A block mask needs its [transpose](crate::BlockMask::with_transpose) there, also when a
/// [buffer](crate::BlockMaskBuffer::with_transpose) builds it, and blocks of multiples of 64.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward<'a> {
    /// The call whose gradients are wanted.
    pub attention: Attention<'a>,
    /// The output of that call, in the shape of q with the `head_dim` of v.
    pub o: View<'a>,
    /// The log-sum-exp of that call, f32 `[batch, num_heads_q, seqlen_q]`, or
    /// `[num_heads_q, total_q]` when variable-length.
    pub lse: View<'a>,
    /// The gradient with respect to `o`, in its shape and element type.
    pub d_o: View<'a>,
}

/// The gradients, as tensors.
#[derive(Debug)]
pub struct AttentionGradients {
    /// Gradient of q, in its shape and element type, contiguous.
    pub dq: Tensor,
    /// Gradient of k, in its shape and element type, contiguous.
    pub dk: Tensor,
    /// Gradient of v, in its shape and element type, contiguous.
    pub dv: Tensor,
    /// Gradient of the sink, f32 `[num_heads_q]`; `None` if there is no sink.
    pub d_sink: Option<Tensor>,
    /// Gradient of the bias, in its shape and element type, contiguous; `None` if there is no bias.
    pub dbias: Option<Tensor>,
}

/// The gradients, as memory of the caller that is written completely.
#[derive(Debug)]
pub struct AttentionGradientsMut<'a> {
    /// Gradient of q, in its shape and element type.
    pub dq: ViewMut<'a>,
    /// Gradient of k, in its shape and element type.
    pub dk: ViewMut<'a>,
    /// Gradient of v, in its shape and element type.
    pub dv: ViewMut<'a>,
    /// Gradient of the sink, f32 `[num_heads_q]`; `None` does not compute it.
    pub d_sink: Option<ViewMut<'a>>,
    /// Gradient of the bias, in its shape, in its element type or f32, with any strides; `None`
    /// does not compute it. An element that serves several pairs has the sum of all, in a fixed
    /// order.
    pub dbias: Option<ViewMut<'a>>,
}

impl<'a> AttentionGradientsMut<'a> {
    /// Those of q, k and v alone.
    pub const fn new(dq: ViewMut<'a>, dk: ViewMut<'a>, dv: ViewMut<'a>) -> Self {
        Self { dq, dk, dv, d_sink: None, dbias: None }
    }
}

/// See [`Operation::prepare`].
pub type PreparedAttentionBackward = Prepared<AttentionBackwardProblem>;

impl AttentionGradients {
    /// Those of q, k and v alone.
    pub const fn new(dq: Tensor, dk: Tensor, dv: Tensor) -> Self {
        Self { dq, dk, dv, d_sink: None, dbias: None }
    }

    /// All gradients for writing.
    pub fn view_mut(&mut self) -> AttentionGradientsMut<'_> {
        AttentionGradientsMut {
            dq: self.dq.view_mut(),
            dk: self.dk.view_mut(),
            dv: self.dv.view_mut(),
            d_sink: self.d_sink.as_mut().map(Tensor::view_mut),
            dbias: self.dbias.as_mut().map(Tensor::view_mut),
        }
    }
}

impl Attention<'_> {
    /// The gradients, given the output of [`forward`](Self::forward) of this call and the gradient
    /// with respect to its `o`. For other strides, for memory of the caller, or to capture a graph
    /// see [`AttentionBackward`].
    ///
    /// # Errors
    /// As [`AttentionBackward::backward`].
    pub fn backward(
        &self,
        output: &AttentionOutput,
        d_o: View<'_>,
        stream: &Stream,
    ) -> Result<AttentionGradients> {
        let (o, lse) = (output.o.view(), output.lse.view());
        AttentionBackward { attention: *self, o, lse, d_o }.backward(stream)
    }
}

impl AttentionBackward<'_> {
    /// Computes into the caller's tensors. On a GPU nothing is allocated and the stream is not
    /// synchronised, so a graph can capture the call. On the CPU it returns when the result is
    /// there.
    ///
    /// `workspace` is u8 memory without gaps, whose content neither matters before nor has a
    /// meaning after the call. Nobody else may write to it until the work is done; the gradients
    /// are unspecified otherwise. With [`workspace_bytes`](Self::workspace_bytes) the fastest
    /// scheme runs. With less, but at least [`least_workspace_bytes`](Self::least_workspace_bytes),
    /// query heads that share keys are not split over CTAs, or dq has a kernel of its own, which
    /// gives other roundings. It may be `None` where that is 0.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`; [`Error::Shape`] for a workspace
    /// that is too small; [`Error::DeviceMismatch`] if an operand is not on the stream's device.
    ///
    /// [`Error::Shape`]: crate::Error::Shape
    /// [`Error::DeviceMismatch`]: crate::Error::DeviceMismatch
    pub fn backward_into(
        &self,
        gradients: AttentionGradientsMut<'_>,
        workspace: Option<ViewMut<'_>>,
        stream: &Stream,
    ) -> Result<()> {
        self.run((gradients, workspace), stream)
    }

    /// Allocates the gradients and the workspace, and computes: those of the sink and of the bias,
    /// too, if there are such.
    ///
    /// # Errors
    /// As [`backward_into`](Self::backward_into), and out of memory.
    pub fn backward(&self, stream: &Stream) -> Result<AttentionGradients> {
        let problem = self.problem()?;
        let forward = &problem.forward;
        let new = |dtype, shape: &[usize]| Tensor::empty(stream, dtype, shape);
        let ElementTypes { q, kv, .. } = forward.types;
        let d_sink = || Tensor::empty(stream, DType::F32, &[forward.num_heads_q]);
        let mut gradients = AttentionGradients {
            dq: new(q, &forward.q_shape())?,
            dk: new(kv, &forward.k_shape())?,
            dv: new(kv, &forward.v_shape())?,
            d_sink: forward.scores.sink.then(d_sink).transpose()?,
            dbias: problem.dbias.map(|dtype| new(dtype, &problem.dbias_shape())).transpose()?,
        };
        let mut workspace = match self.workspace_bytes(stream.device())? {
            0 => None,
            bytes => Some(Tensor::empty(stream, DType::U8, &[bytes])?),
        };
        let workspace = workspace.as_mut().map(Tensor::view_mut);
        self.backward_into(gradients.view_mut(), workspace, stream)?;
        Ok(gradients)
    }

    /// Bytes of workspace with which [`backward_into`](Self::backward_into) is the fastest on a
    /// device; 0 on the CPU.
    ///
    /// # Errors
    /// All checks of [`problem`](Self::problem) and `select`.
    pub fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        bytes_of(self.problem()?, device)
    }

    /// Fewest bytes of workspace that [`backward_into`](Self::backward_into) takes on a device; 0
    /// on the CPU.
    ///
    /// # Errors
    /// As [`workspace_bytes`](Self::workspace_bytes).
    pub fn least_workspace_bytes(&self, device: &Device) -> Result<usize> {
        bytes_of(self.problem()?.with_workspace(0), device)
    }
}

impl<'a> AttentionBackward<'a> {
    /// Those of a launch.
    pub(crate) fn operands(
        &self,
        gradients: AttentionGradientsMut<'a>,
        workspace: Option<ViewMut<'a>>,
    ) -> AttentionBwdOperands<'a> {
        let Self { attention, o, lse, d_o } = *self;
        AttentionBwdOperands {
            q: attention.q,
            k: attention.k,
            v: attention.v,
            o,
            lse,
            d_o,
            dq: gradients.dq,
            dk: gradients.dk,
            dv: gradients.dv,
            sink: attention.scores.sink,
            d_sink: gradients.d_sink,
            workspace,
            cu_seqlens: attention.cu_seqlens.map(|cu_seqlens| [cu_seqlens.q, cu_seqlens.kv]),
            block_mask: attention.block_mask.and_then(BlockMask::for_backward),
            terms: attention.scores.terms(),
            dbias: gradients.dbias,
        }
    }
}

/// Bytes of the selected scheme.
fn bytes_of(problem: AttentionBackwardProblem, device: &Device) -> Result<usize> {
    match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => workspace_bytes(select(&problem, gpu)?, &problem, gpu),
        _ => Ok(0),
    }
}

impl Steps for AttentionBackward<'_> {
    type Problem = AttentionBackwardProblem;
    type Plan = AttentionBackwardPlan<'static>;
    type Out<'o> = (AttentionGradientsMut<'o>, Option<ViewMut<'o>>);

    fn is_empty(problem: &AttentionBackwardProblem) -> bool {
        problem.is_empty()
    }

    #[inline]
    fn checked(
        &self,
        (gradients, workspace): &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<AttentionBackwardProblem> {
        let problem = self.problem()?.with_gradients(gradients)?;
        let device = stream.device();
        self.attention.inputs_on(device)?;
        for (what, view) in [("o", &self.o), ("lse", &self.lse), ("d_o", &self.d_o)] {
            Operand::new(what, view).on(device)?;
        }
        let AttentionGradientsMut { dq, dk, dv, d_sink, dbias } = gradients;
        for (what, view) in [("dq", Some(dq)), ("dk", Some(dk)), ("dv", Some(dv))]
            .into_iter()
            .chain([("d_sink", d_sink.as_ref()), ("dbias", dbias.as_ref())])
            .chain([("workspace", workspace.as_ref())])
        {
            view.map_or(Ok(()), |view| Operand::of_mut(what, view).on(device))?;
        }
        let mut bytes = 0;
        if let Some(workspace) = workspace {
            contiguous("workspace", &workspace.as_view(), DType::U8, workspace.shape())?;
            bytes = workspace.layout().elements();
        }
        Ok(if device.is_cpu() { problem } else { problem.with_workspace(bytes) })
    }

    fn has_data(problem: &AttentionBackwardProblem) -> bool {
        problem.forward.packed.is_some()
    }

    fn verify(
        &self,
        _: &AttentionBackwardProblem,
        _: &Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        self.attention.check_cu_seqlens(stream)
    }

    fn select(problem: &AttentionBackwardProblem, gpu: &CudaProperties) -> Result<&'static Kernel> {
        select(problem, gpu)
    }

    fn plan(
        kernel: &'static Kernel,
        problem: &AttentionBackwardProblem,
        gpu: &CudaProperties,
    ) -> Result<AttentionBackwardPlan<'static>> {
        plan::plan(kernel, &problem.led(gpu), gpu)
    }

    fn kernels(_: &'static Kernel, plan: &Self::Plan) -> Vec<&'static Kernel> {
        plan.launches.iter().map(|(kernel, _)| *kernel).collect()
    }

    fn launch(
        &self,
        kernel: &Kernel,
        AttentionBackwardPlan { plan, launches }: &Self::Plan,
        problem: &AttentionBackwardProblem,
        (gradients, workspace): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let needed = match stream.device().cuda_properties() {
            Some(gpu) => workspace_bytes(kernel, problem, gpu)?,
            None => 0,
        };
        if problem.workspace < needed {
            let expected = format!("[at least {needed}]");
            let found = vec![problem.workspace];
            return Err(Error::Shape { what: "workspace", expected, found });
        }
        let mut operands = self.operands(gradients, workspace);
        check_alignment(&operands)?;
        for (kernel, config) in launches {
            let operands = operands.reborrow();
            match kernel.variant {
                Variant::AttentionBwdHopper(_) => {
                    stream.launch::<AttentionBwdHopper>(kernel, config, plan, operands)?;
                }
                _ => stream.launch::<AttentionBwd>(kernel, config, plan, operands)?,
            }
        }
        Ok(())
    }

    fn compute(
        &self,
        problem: &AttentionBackwardProblem,
        (gradients, _): Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        cpu::backward(self, problem, gradients, stream)
    }
}

/// The kernels read and write 16 bytes at a time.
pub(crate) fn check_alignment(operands: &AttentionBwdOperands<'_>) -> Result<()> {
    let AttentionBwdOperands { q, k, v, o, d_o, dq, dk, dv, workspace, .. } = operands;
    for (what, view) in [("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o)] {
        aligned(what, view)?;
    }
    for (what, view) in [("dq", dq), ("dk", dk), ("dv", dv)] {
        aligned(what, &view.as_view())?;
    }
    workspace.as_ref().map_or(Ok(()), |view| aligned("workspace", &view.as_view()))
}
