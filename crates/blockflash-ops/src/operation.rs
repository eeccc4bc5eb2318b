//! Running, preparing and repeating calls, in the same way for every operation. An operation adds
//! only its own [`Steps`].

use crate::recent::{Chosen, Planned, planned};
use crate::selection::{Problem, accepts, select, unsupported};
use crate::threads::parallel;
use crate::verify::{checks, outside_of_captures};
use crate::{Error, Result};
use blockflash_safe::{CudaProperties, Device, Stream};
use blockflash_sys::Kernel;
use std::rc::Rc;

/// The steps of a call that are specific to an operation.
pub trait Steps: Sync {
    /// The call as plain numbers.
    type Problem: Problem + Sync;
    /// The launches as plain data: everything that follows from problem, kernel and GPU.
    type Plan: 'static;
    /// The outputs.
    type Out<'o>: Send;

    /// Whether there is no output element to compute.
    fn is_empty(problem: &Self::Problem) -> bool;
    /// The problem, after every check that needs no device. All operands are on the stream's
    /// device.
    fn checked(&self, out: &Self::Out<'_>, stream: &Stream) -> Result<Self::Problem>;
    /// Whether kernels read offsets, lengths or tables on the device.
    fn has_data(_: &Self::Problem) -> bool {
        false
    }
    /// Verifies that data, which may be on a GPU: waits for the stream.
    fn verify(&self, _: &Self::Problem, _: &Self::Out<'_>, _: &Stream) -> Result<()> {
        Ok(())
    }
    /// The kernel for a problem.
    fn select(problem: &Self::Problem, gpu: &CudaProperties) -> Result<&'static Kernel> {
        select(problem, gpu)
    }
    /// Plans the launches of a kernel that accepts the problem. The output is not empty.
    fn plan(
        kernel: &'static Kernel,
        problem: &Self::Problem,
        gpu: &CudaProperties,
    ) -> Result<Self::Plan>;
    /// Every kernel of a plan that was made for this one.
    fn kernels(kernel: &'static Kernel, _plan: &Self::Plan) -> Vec<&'static Kernel> {
        vec![kernel]
    }
    /// Queues the launches of a plan.
    fn launch(
        &self,
        kernel: &Kernel,
        plan: &Self::Plan,
        problem: &Self::Problem,
        out: Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()>;
    /// Computes on the CPU.
    fn compute(&self, problem: &Self::Problem, out: Self::Out<'_>, stream: &Stream) -> Result<()>;
}

/// The calls of any operation: [`Attention`](crate::Attention), whose outputs are `(o,
/// Option<lse>)`, [`AttentionBackward`](crate::AttentionBackward), whose outputs are gradients
/// and an optional workspace, [`BsrMatmul`](crate::BsrMatmul), whose output is C, and
/// [`BsrSddmm`](crate::BsrSddmm), whose output is the values. The `problem` method of each
/// documents which outputs fit. On a GPU nothing is allocated and the stream is not synchronised,
/// so a graph can capture a call. On the CPU it returns when the result is there. Outputs without
/// elements are valid and launch nothing.
///
/// A call that is repeated can be prepared:
///
/// ```
/// # use blockflash_ops::{Attention, DType, Device, Operation, Tensor};
/// # let stream = Device::best().stream()?;
/// # let q = Tensor::from_slice(&stream, &vec![half::f16::ONE; 16 * 2 * 64], &[1, 16, 2, 64])?;
/// # let mut o = Tensor::empty(&stream, DType::F16, &[1, 16, 2, 64])?;
/// let attention = Attention::new(q.view(), q.view(), q.view());
/// let prepared = attention.prepare(&(o.view_mut(), None), &stream)?;
/// for _ in 0..3 {
///     attention.run_prepared(&prepared, (o.view_mut(), None), &stream)?;
/// }
/// # Ok::<(), blockflash_ops::Error>(())
/// ```
///
/// On a GPU a loop over the same tensors costs the host least as a graph of one call, which
/// [`Stream::capture`] makes: a launch of it neither validates nor plans.
pub trait Operation: Steps {
    /// Computes into the caller's tensors, with the kernel that is selected for the problem.
    ///
    /// # Errors
    /// All checks of the operation's `problem` and `select`; [`Error::DeviceMismatch`] if an
    /// operand is not on the stream's device; for attention on a GPU [`Error::Misaligned`] for a
    /// pointer or stride that is no multiple of 16 bytes.
    #[inline]
    fn run(&self, out: Self::Out<'_>, stream: &Stream) -> Result<()> {
        let problem = self.checked(&out, stream)?;
        verified(self, &problem, &out, stream)?;
        if Self::is_empty(&problem) {
            return Ok(());
        }
        let Some(gpu) = stream.device().cuda_properties() else {
            return parallel(|| self.compute(&problem, out, stream));
        };
        let planned = selected::<Self>(&problem, stream.device(), gpu)?;
        self.launch(planned.kernel, &planned.plan, &problem, out, stream)
    }

    /// Like [`run`](Self::run) with this kernel instead of the selected one: for tests and
    /// measurements.
    ///
    /// # Errors
    /// Also [`Error::Unsupported`] if the kernel cannot compute this problem on this device.
    fn run_with(&self, kernel: &'static Kernel, out: Self::Out<'_>, stream: &Stream) -> Result<()> {
        let problem = self.checked(&out, stream)?;
        let Some(gpu) = stream.device().cuda_properties() else {
            return Err(no_kernel_on_cpu::<Self::Problem>(kernel));
        };
        accepts(kernel, &problem, gpu)?;
        verified(self, &problem, &out, stream)?;
        if Self::is_empty(&problem) {
            return Ok(());
        }
        self.launch(kernel, &Self::plan(kernel, &problem, gpu)?, &problem, out, stream)
    }

    /// Verifies the offsets, lengths, tables and lists that a kernel would read on the device, and
    /// computes nothing. Copies them to the host, which waits for the stream. `Ok` for calls
    /// without such data. [`set_checks`](crate::set_checks) lets every call begin with this.
    ///
    /// Of packed sequences: that offsets start at 0, do not descend, end within the rows, and make
    /// no sequence longer than its maximum. Of a cache: that no length is negative or beyond the
    /// capacity, that the pages of all keys exist, that lengths count the tokens that are appended,
    /// that no two sequences append to the same slot, and that the scales of keys that the call
    /// does not choose are finite and positive, and so of the scales that rows are quantised by. Of
    /// listed pages: that they exist and ascend.
    ///
    /// # Errors
    /// [`Error::InvalidCuSeqlens`] and [`Error::InvalidData`] name the first bad entry, and
    /// [`Error::InvalidScale`] a scale; all checks of the operation's `problem`; a stream that is
    /// being captured, or a failing device.
    fn check(&self, out: &Self::Out<'_>, stream: &Stream) -> Result<()> {
        let problem = self.checked(out, stream)?;
        if !Self::has_data(&problem) {
            return Ok(());
        }
        outside_of_captures(stream)?;
        self.verify(&problem, out, stream)
    }

    /// Selects the kernel of a call, plans its launches, and loads what they need.
    ///
    /// # Errors
    /// As [`run`](Self::run), and if the kernel cannot be loaded.
    fn prepare(&self, out: &Self::Out<'_>, stream: &Stream) -> Result<Prepared<Self::Problem>> {
        let (problem, device) = (self.checked(out, stream)?, *stream.device());
        let mut kernel = None;
        if let (false, Some(gpu)) = (Self::is_empty(&problem), device.cuda_properties()) {
            let planned = selected::<Self>(&problem, &device, gpu)?;
            for kernel in Self::kernels(planned.kernel, &planned.plan) {
                device.preload(kernel)?;
            }
            kernel = Some(planned.kernel);
        }
        Ok(Prepared { problem, device, kernel })
    }

    /// Like [`run`](Self::run) with the prepared kernel. The tensors may differ from the prepared
    /// ones; all checks are repeated.
    ///
    /// # Errors
    /// Also [`Error::NotPrepared`] if sizes, strides, types, options or the device differ. A block
    /// mask may visit other blocks.
    fn run_prepared(
        &self,
        prepared: &Prepared<Self::Problem>,
        out: Self::Out<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let problem = self.checked(&out, stream)?;
        if problem != prepared.problem || *stream.device() != prepared.device {
            return Err(Error::NotPrepared { op: Self::Problem::OP });
        }
        verified(self, &problem, &out, stream)?;
        match (prepared.kernel, stream.device().cuda_properties()) {
            (Some(kernel), Some(gpu)) => {
                let make = || Ok(Planned { kernel, plan: Self::plan(kernel, &problem, gpu)? });
                let planned = planned(&problem, stream.device(), Chosen::Ahead(kernel), make)?;
                self.launch(kernel, &planned.plan, &problem, out, stream)
            }
            _ if Self::is_empty(&problem) => Ok(()),
            _ => parallel(|| self.compute(&problem, out, stream)),
        }
    }
}

impl<T: Steps> Operation for T {}

/// Verifies the data of a call if the switch is on.
#[inline]
fn verified<S: Steps + ?Sized>(
    call: &S,
    problem: &S::Problem,
    out: &S::Out<'_>,
    stream: &Stream,
) -> Result<()> {
    if !S::has_data(problem) || !checks(stream.device()) {
        return Ok(());
    }
    outside_of_captures(stream)?;
    call.verify(problem, out, stream)
}

/// Kernel and launches of a problem whose output is not empty.
fn selected<S: Steps + ?Sized>(
    problem: &S::Problem,
    device: &Device,
    gpu: &CudaProperties,
) -> Result<Rc<Planned<S::Plan>>> {
    planned(problem, device, Chosen::Now, || {
        let kernel = S::select(problem, gpu)?;
        Ok(Planned { kernel, plan: S::plan(kernel, problem, gpu)? })
    })
}

/// The error for a call with a given kernel whose tensors are on the CPU.
pub(crate) fn no_kernel_on_cpu<P: Problem>(kernel: &Kernel) -> Error {
    unsupported::<P>(&"cpu", format!("{} runs on a GPU", kernel.symbol()))
}

/// A call whose kernel is selected and loaded, for repetition in loops: see [`Operation::prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Prepared<P> {
    problem: P,
    device: Device,
    /// `None` on the CPU, and where there is nothing to compute.
    kernel: Option<&'static Kernel>,
}

impl<P> Prepared<P> {
    /// The kernel; `None` on the CPU, and where there is nothing to compute.
    pub fn kernel(&self) -> Option<&'static Kernel> {
        self.kernel
    }
}
