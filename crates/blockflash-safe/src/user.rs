use crate::queue::{End, Queue};
use crate::stream::Inner;
use crate::{Error, Result, Stream};
use std::ptr;
use std::sync::{Arc, Weak};

/// A stream that memory was used on. It does not keep a stream of ours alive, so the stream may go
/// before the memory.
#[derive(Clone)]
pub(crate) struct User(Whose);

#[derive(Clone)]
enum Whose {
    Own {
        stream: Weak<Inner>,
        end: Arc<End>,
    },
    /// A foreign stream, which outlives the memory by point 2 of `from_raw`.
    Foreign(Stream),
}

impl User {
    pub(crate) fn is(&self, stream: &Stream) -> bool {
        match &self.0 {
            // Compared by identity: when a stream is gone, another one may get its handle.
            Whose::Own { stream: own, .. } => ptr::eq(own.as_ptr(), Arc::as_ptr(&stream.0)),
            Whose::Foreign(foreign) => foreign.is_same_queue(stream),
        }
    }

    /// The stream, while it exists.
    pub(crate) fn stream(&self) -> Option<Stream> {
        match &self.0 {
            Whose::Own { stream, .. } => stream.upgrade().map(Stream),
            Whose::Foreign(foreign) => Some(foreign.clone()),
        }
    }

    /// Makes `stream` wait for the work that was queued on this one.
    pub(crate) fn precede(&self, stream: &Stream) -> Result<()> {
        if let Some(user) = self.stream() {
            return stream.wait_for(&user);
        }
        let Whose::Own { end, .. } = &self.0 else { return Ok(()) };
        // The stream is gone, so its drop has begun; the end of the drop sets the value.
        match end.wait() {
            Some(end) => stream.session()?.map_or(Ok(()), |session| session.wait(end, None)),
            None => Err(Error::InCapture { what: "waiting for a stream that was destroyed" }),
        }
    }

    /// Whether the stream is gone and its work done, so that nothing has to be waited for.
    pub(crate) fn is_over(&self) -> bool {
        match &self.0 {
            Whose::Own { end, .. } => {
                end.get().and_then(Option::as_ref).is_some_and(|end| end.is_done().unwrap_or(false))
            }
            Whose::Foreign(_) => false,
        }
    }
}

impl Stream {
    /// For memory that is used on the stream to note. Not for the stream of the CPU.
    pub(crate) fn user(&self) -> User {
        let whose = match &self.0.queue {
            Some(Queue { owned: true, end, .. }) => {
                Whose::Own { stream: Arc::downgrade(&self.0), end: Arc::clone(end) }
            }
            _ => Whose::Foreign(self.clone()),
        };
        User(whose)
    }
}
