//! Streams, what is captured from them, and the objects that graphs own.

use crate::calls::driver;
use crate::driver::{INVALID_VALUE, SUCCESS};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A stream. Streams, graphs and objects are few, and none is freed.
pub(crate) struct Stream {
    pub(crate) number: u64,
    /// The number of the capture, from 1; 0 without one.
    capture: AtomicU64,
    graph: Mutex<Option<&'static Graph>>,
}

/// A graph, or one that can be launched: what it owns.
struct Graph(Mutex<Vec<&'static UserObject>>);

struct UserObject {
    references: AtomicU64,
    destroy: extern "C" fn(usize),
    data: usize,
}

/// A number that nothing else of the process has.
fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Stream {
    pub(crate) fn new() -> &'static Stream {
        let (capture, graph) = (AtomicU64::new(0), Mutex::default());
        Box::leak(Box::new(Stream { number: number(), capture, graph }))
    }
}

impl Graph {
    fn new(objects: Vec<&'static UserObject>) -> &'static Graph {
        Box::leak(Box::new(Graph(Mutex::new(objects))))
    }

    fn destroy(&self) -> u32 {
        let objects = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        objects.into_iter().for_each(UserObject::release);
        SUCCESS
    }
}

impl UserObject {
    fn release(&self) {
        if self.references.fetch_sub(1, Ordering::AcqRel) == 1 {
            (self.destroy)(self.data);
        }
    }
}

driver! {
    fn cuStreamBeginCapture = "cuStreamBeginCapture_v2"(stream: &Stream, _mode: u32) {
        *stream.graph.lock().unwrap_or_else(PoisonError::into_inner) = Some(Graph::new(Vec::new()));
        stream.capture.store(number(), Ordering::Release);
        SUCCESS
    }
    fn cuStreamEndCapture = "cuStreamEndCapture"(stream: &Stream, graph: &mut Option<&Graph>) {
        *graph = stream.graph.lock().unwrap_or_else(PoisonError::into_inner).take();
        stream.capture.store(0, Ordering::Release);
        if graph.is_some() { SUCCESS } else { INVALID_VALUE }
    }
    fn cuStreamIsCapturing = "cuStreamIsCapturing"(stream: Option<&Stream>, status: &mut u32) {
        let capture = stream.map_or(0, |stream| stream.capture.load(Ordering::Acquire));
        *status = u32::from(capture > 0);
        SUCCESS
    }
    fn cuStreamGetCaptureInfo = "cuStreamGetCaptureInfo_v3"(
        stream: &Stream,
        status: &mut u32,
        number: &mut u64,
        graph: &mut Option<&Graph>,
        _dependencies: usize,
        _edges: usize,
        _count: usize,
    ) {
        *number = stream.capture.load(Ordering::Acquire);
        *status = u32::from(*number > 0);
        *graph = *stream.graph.lock().unwrap_or_else(PoisonError::into_inner);
        SUCCESS
    }
    fn cuGraphInstantiate = "cuGraphInstantiateWithFlags"(
        executable: &mut &'static Graph,
        graph: &Graph,
        _flags: u64,
    ) {
        let objects = graph.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for object in &objects {
            object.references.fetch_add(1, Ordering::Relaxed);
        }
        *executable = Graph::new(objects);
        SUCCESS
    }
    fn cuGraphLaunch = "cuGraphLaunch"(_graph: &Graph, _stream: Option<&Stream>) { SUCCESS }
    fn cuGraphDestroy = "cuGraphDestroy"(graph: &Graph) { graph.destroy() }
    fn cuGraphExecDestroy = "cuGraphExecDestroy"(graph: &Graph) { graph.destroy() }
    fn cuUserObjectCreate = "cuUserObjectCreate"(
        object: &mut &'static UserObject,
        data: usize,
        destroy: extern "C" fn(usize),
        count: u32,
        _flags: u32,
    ) {
        let references = AtomicU64::new(count.into());
        *object = Box::leak(Box::new(UserObject { references, destroy, data }));
        SUCCESS
    }
    fn cuUserObjectRelease = "cuUserObjectRelease"(object: &UserObject, _count: u32) {
        object.release();
        SUCCESS
    }
    fn cuGraphRetainUserObject = "cuGraphRetainUserObject"(
        graph: &Graph,
        object: &'static UserObject,
        _count: u32,
        _flags: u32,
    ) {
        graph.0.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        SUCCESS
    }
    fn cuLaunchHostFunc = "cuLaunchHostFunc"(
        _stream: Option<&Stream>,
        function: extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) {
        function(data);
        SUCCESS
    }
}
