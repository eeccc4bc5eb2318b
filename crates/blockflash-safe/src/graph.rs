use crate::driver::check;
use crate::freed::free_deferred;
use crate::gpu::{Context, Handle};
use crate::stream::{Kept, Recording};
use crate::turns::Turns;
use crate::{Device, Error, Result, Stream, lock::lock};
use cudarc::driver::sys;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

/// Captured work that is launched as a whole, with the launch overhead of one kernel.
///
/// A graph repeats the captured work with the same addresses and parameters. It keeps all
/// [`Tensor`](crate::Tensor)s alive that the captured work uses, whatever their owners do; for
/// views of foreign memory, the code that made them has promised this. The contents of tensors are
/// read at each launch, so inputs may be overwritten between launches, in stream order.
pub struct Graph {
    device: Device,
    /// The driver does not allow two calls with the same executable graph at a time.
    raw: Mutex<Handle<sys::CUgraphExec_st>>,
    kept: Vec<Arc<dyn Kept>>,
}

impl Stream {
    /// Captures what `work` queues on this stream into a graph instead of running it.
    ///
    /// Inside `work`, launches, fills, copies between tensors and events work; allocating, copying
    /// from or to host memory, synchronising, and waiting for or on other streams are
    /// [`Error::InCapture`], and tensors that are dropped are freed after the capture. When `work`
    /// fails or panics, the capture is ended and the stream is usable as before.
    ///
    /// # Errors
    /// The error of `work`; [`Error::NotOnGpu`] on the CPU, [`Error::InCapture`] when the stream is
    /// being captured already, [`Error::Cuda`].
    pub fn capture<E: From<Error>>(
        &self,
        work: impl FnOnce(&Stream) -> Result<(), E>,
    ) -> Result<Graph, E> {
        let capture = Capture::begin(self)?;
        // On an error or a panic, dropping `capture` ends it.
        work(self)?;
        Ok(capture.into_graph()?)
    }
}

/// A capture in progress.
struct Capture<'s>(&'s Stream);

impl<'s> Capture<'s> {
    fn begin(stream: &'s Stream) -> Result<Capture<'s>> {
        let mut session = stream.session()?.ok_or(Error::NotOnGpu { what: "capturing a graph" })?;
        session.refuse_capture("a second capture")?;
        // Relaxed: the stricter modes make unrelated calls of this or any thread fail, among them
        // the loading of a kernel at its first launch. This crate itself refuses everything that a
        // graph must not contain.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives and its context is current.
        check("cuStreamBeginCapture", unsafe {
            sys::cuStreamBeginCapture_v2(session.raw(), mode)
        })?;
        *session.capture() = Some(Recording::begin());
        Ok(Capture(stream))
    }

    /// Ends the capture. Returns everything that it keeps even after an error, to be dropped
    /// outside of the session.
    fn end(&self) -> (Result<GraphTemplate>, Vec<Arc<dyn Kept>>) {
        let mut session = match self.0.session() {
            Ok(Some(session)) => session,
            Ok(None) => return (Err(Error::NotOnGpu { what: "capturing a graph" }), Vec::new()),
            Err(error) => return (Err(error), Vec::new()),
        };
        let kept = session.capture().take().map(|recording| recording.kept).unwrap_or_default();
        let mut raw = ptr::null_mut();
        // SAFETY: 1. The stream lives and its context is current. 2. The pointer is valid for
        // writes during the call. 3. In relaxed mode any thread may end the capture. 4. After a
        // failure the driver has ended it too and `raw` is null.
        let code = unsafe { sys::cuStreamEndCapture(session.raw(), &mut raw) };
        let template = GraphTemplate { context: session.context(), raw };
        (check("cuStreamEndCapture", code).map(|()| template), kept)
    }

    fn into_graph(self) -> Result<Graph> {
        let (template, kept) = self.end();
        let device = *self.0.device();
        // Nothing is left to do for `drop` but to free what the capture kept from being freed.
        drop(self);
        let template = template?;
        let _bound = template.context.bind()?;
        let mut raw = ptr::null_mut();
        // SAFETY: 1. The template is a graph of the current context. 2. The pointer is valid for
        // writes. 3. 0: no flags.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, template.raw, 0) };
        check("cuGraphInstantiate", code)?;
        Ok(Graph { device, raw: Mutex::new(Handle(raw)), kept })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let capturing = self
            .0
            .session()
            .is_ok_and(|session| session.is_some_and(|mut s| s.capture().is_some()));
        if capturing {
            drop(self.end());
        }
        free_deferred();
    }
}

/// The graph that a capture yields, before it is made executable.
struct GraphTemplate {
    context: &'static Context,
    /// Null after a failed capture.
    raw: sys::CUgraph,
}

impl Drop for GraphTemplate {
    fn drop(&mut self) {
        if !self.raw.is_null()
            && let Ok(_bound) = self.context.bind()
        {
            // SAFETY: the capture gave us the graph, and this is its only owner; an executable
            // graph is a copy. An error has no one to be reported to.
            let _ = unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

impl Graph {
    /// Queues the captured work on a stream of the same device. Launches of one graph run one after
    /// the other, whatever their streams; so do launches of graphs that use the same
    /// `BsrPartsMemory`.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`]; [`Error::InCapture`] while the stream is being captured, here or
    /// by another library, or the stream that used such memory last; [`Error::Cuda`].
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.device.expect(stream.device())?;
        for kept in &self.kept {
            kept.prepare(stream)?;
        }
        let mut turns = Turns::take(self.kept.iter().filter_map(|kept| kept.turn()), stream)?;
        let raw = lock(&self.raw);
        let Some(session) = stream.session()? else { return Ok(()) };
        session.refuse_capture("launching a graph")?;
        turns.begin(&session, stream)?;
        // SAFETY:
        // 1. Graph and stream live and belong to the current context.
        // 2. No other call uses the executable graph: its lock is held.
        // 3. The memory that the captured work uses is alive (`self.kept`, or the promise behind a
        //    foreign view), and will be freed after this launch: it was prepared for the stream.
        //    Where it is used in turns, this launch has them.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(raw.0, session.raw()) })
    }

    /// The device that it was captured on.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(context) = self.device.context()
            && let Ok(_bound) = context.bind()
        {
            // SAFETY: 1. We instantiated it, and this is its only owner. 2. Launches in flight are
            // finished by the driver before the graph goes. An error has no one to be reported to.
            let _ = unsafe { sys::cuGraphExecDestroy(lock(&self.raw).0) };
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} tensors)", self.device, self.kept.len())
    }
}
