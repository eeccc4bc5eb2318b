//! Memory of other libraries, which are played by tensors that serve as owners.

use crate::common::{gpu, ramp};
use blockflash_safe::{DType, Error, Event, Graph, Layout, Result, Stream, Tensor, View, ViewMut};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Elements of a tensor that takes a GPU some time to fill.
const LARGE: usize = 1 << 26;
const COUNT: usize = 4096;

/// What a test knows of an owner.
struct Watch {
    /// Behind the last use of the memory.
    last_use: Event,
    drops: AtomicUsize,
    early_drops: AtomicUsize,
}

/// Its drop calls this crate: it looks at an event and frees memory.
struct Owner {
    watch: Arc<Watch>,
    _memory: Tensor,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let early = !self.watch.last_use.is_done().unwrap();
        self.watch.early_drops.fetch_add(usize::from(early), Ordering::SeqCst);
        self.watch.drops.fetch_add(1, Ordering::SeqCst);
    }
}

impl Watch {
    fn drops(&self) -> usize {
        assert_eq!(self.early_drops.load(Ordering::SeqCst), 0, "work still used the memory");
        self.drops.load(Ordering::SeqCst)
    }

    /// Another test may be about to drop the owner.
    fn expect_drop(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        let begun = Instant::now();
        while self.drops() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(10), "the owner is never dropped");
            Tensor::empty(stream, DType::U8, &[1])?;
        }
        stream.synchronize()?;
        assert_eq!(self.drops(), 1);
        Ok(())
    }
}

/// A tensor over memory that is valid in the order of `stream`.
fn owned(stream: &Stream, count: usize) -> Result<(Tensor, Arc<Watch>)> {
    let mut memory = Tensor::empty(stream, DType::F32, &[count])?;
    memory.fill_bytes(stream, 0)?;
    let address = memory.view().device_ptr().unwrap() as usize;
    let watch = Arc::new(Watch {
        last_use: Event::new(stream.device(), false)?,
        drops: AtomicUsize::new(0),
        early_drops: AtomicUsize::new(0),
    });
    let owner = Owner { watch: Arc::clone(&watch), _memory: memory };
    let ptr = ptr::without_provenance_mut(address);
    // SAFETY: 1. Memory of `count` elements, allocated in the order of the stream. 2. The owner
    // does not use it.
    Ok((unsafe { Tensor::from_raw(stream, ptr, DType::F32, &[count], owner)? }, watch))
}

#[test]
fn an_owner_is_dropped_once_and_after_the_work() -> Result<()> {
    let Some(device) = gpu("an_owner_is_dropped_once_and_after_the_work") else { return Ok(()) };
    let stream = device.stream()?;
    for _ in 0..8 {
        let (mut tensor, watch) = owned(&stream, LARGE)?;
        for value in 0..20 {
            tensor.fill_bytes(&stream, value)?;
        }
        watch.last_use.record(&stream)?;
        drop(tensor);
        watch.expect_drop(&stream)?;
    }
    // Nothing is queued: at once.
    let (tensor, watch) = owned(&stream, COUNT)?;
    stream.synchronize()?;
    drop(tensor);
    assert_eq!(watch.drops(), 1);
    Ok(())
}

#[test]
fn an_owner_waits_for_all_streams() -> Result<()> {
    let Some(device) = gpu("an_owner_waits_for_all_streams") else { return Ok(()) };
    let home = device.stream()?;
    for destroyed in [false, true] {
        let (mut tensor, watch) = owned(&home, LARGE)?;
        tensor.fill_bytes(&home, 3)?;
        // The first use on another stream waits for the home stream.
        let user = device.stream()?;
        let mut copy = Tensor::empty(&home, DType::F32, &[LARGE])?;
        for _ in 0..20 {
            copy.copy_from(&user, &tensor)?;
        }
        watch.last_use.record(&user)?;
        let user = if destroyed { device.stream()? } else { user };
        drop(tensor);
        watch.expect_drop(&home)?;
        let last = copy.view().slice(0, LARGE - 3..LARGE)?.to_vec::<f32>(&user)?;
        assert_eq!(last, [f32::from_ne_bytes([3; 4]); 3]);
    }
    Ok(())
}

#[test]
fn a_graph_keeps_the_owner() -> Result<()> {
    let Some(device) = gpu("a_graph_keeps_the_owner") else { return Ok(()) };
    let (stream, other) = (device.stream()?, device.stream()?);
    let (mut tensor, watch) = owned(&stream, LARGE)?;
    tensor.copy_from_slice(&stream, &vec![1.5f32; LARGE])?;
    let mut copy = Tensor::zeros(&stream, DType::F32, &[LARGE])?;
    let graph: Graph = stream.capture(|stream| copy.copy_from(stream, &tensor))?;
    drop(tensor);
    stream.synchronize()?;
    assert_eq!(watch.drops(), 0);
    for _ in 0..20 {
        graph.launch(&other)?;
    }
    watch.last_use.record(&other)?;
    drop(graph);
    watch.expect_drop(&stream)?;
    assert_eq!(copy.view().slice(0, 0..2)?.to_vec::<f32>(&other)?, [1.5; 2]);
    Ok(())
}

/// Whether the graph uses the memory or not, its owner is not dropped before the capture ends.
#[test]
fn owners_may_be_released_in_a_capture() -> Result<()> {
    let Some(device) = gpu("owners_may_be_released_in_a_capture") else { return Ok(()) };
    let stream = device.stream()?;
    let ((source, used), (unused, unrelated)) = (owned(&stream, COUNT)?, owned(&stream, COUNT)?);
    let mut copy = Tensor::from_slice(&stream, &ramp(COUNT), &[COUNT])?;
    let graph: Graph = stream.capture(|stream| -> Result<()> {
        copy.copy_from(stream, &source)?;
        drop((source, unused));
        assert_eq!((used.drops(), unrelated.drops()), (0, 0));
        Ok(())
    })?;
    unrelated.expect_drop(&stream)?;
    assert_eq!(used.drops(), 0);
    graph.launch(&stream)?;
    used.last_use.record(&stream)?;
    assert_eq!(copy.to_vec::<f32>(&stream)?, [0.0; COUNT]);
    drop(graph);
    used.expect_drop(&stream)?;
    // A capture that fails keeps nothing.
    let (mut tensor, watch) = owned(&stream, COUNT)?;
    let failed = stream.capture(|stream| -> Result<()> {
        tensor.fill_bytes(stream, 1)?;
        drop(tensor);
        Err(Error::TooLarge)
    });
    assert!(matches!(failed, Err(Error::TooLarge)), "{failed:?}");
    watch.expect_drop(&stream)
}

#[test]
fn owners_are_dropped_in_any_thread() -> Result<()> {
    let Some(device) = gpu("owners_are_dropped_in_any_thread") else { return Ok(()) };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                let [home, user] = [device.stream().unwrap(), device.stream().unwrap()];
                let mut watches = Vec::new();
                for _ in 0..50 {
                    let (tensor, watch) = owned(&home, COUNT).unwrap();
                    let mut copy = Tensor::empty(&user, DType::F32, &[COUNT]).unwrap();
                    copy.copy_from(&user, &tensor).unwrap();
                    watch.last_use.record(&user).unwrap();
                    watches.push(watch);
                }
                watches.iter().for_each(|watch| watch.expect_drop(&home).unwrap());
            });
        }
    });
    Ok(())
}

#[test]
fn foreign_streams_and_views() -> Result<()> {
    let Some(device) = gpu("foreign_streams_and_views") else { return Ok(()) };
    let owner = device.stream()?;
    let tensor = Tensor::from_slice(&owner, &ramp(12), &[3, 4])?;
    // SAFETY: 1. A stream of the device's primary context. 2. `owner` outlives it. 3. Nobody
    // captures it.
    let foreign = unsafe { Stream::from_raw(&device, owner.raw())? };
    let address = tensor.view().device_ptr().unwrap() as usize;
    let layout = Layout::contiguous(&[3, 4])?;
    let view = |address: usize| {
        // SAFETY: 1. Memory of 12 elements on the device, or refused. 2. `tensor` outlives the
        // view, and the work on it ends before.
        unsafe { View::from_raw(&device, ptr::without_provenance(address), DType::F32, layout) }
    };
    assert_eq!(view(address)?.slice(0, 1..2)?.to_vec::<f32>(&foreign)?, [4.0, 5.0, 6.0, 7.0]);
    for wrong in [0, address + 2] {
        assert!(matches!(view(wrong), Err(Error::Pointer { .. })));
    }
    // SAFETY: there are no elements.
    let empty = unsafe {
        ViewMut::from_raw(&device, ptr::null_mut(), DType::F32, Layout::contiguous(&[0])?)?
    };
    assert!(empty.as_view().to_vec::<f32>(&foreign)?.is_empty());
    // The legacy default stream.
    // SAFETY: 1. Null is allowed. 2. It always exists. 3. It cannot be captured.
    let default = unsafe { Stream::from_raw(&device, ptr::null_mut())? };
    let mut other = Tensor::zeros(&default, DType::F32, &[3, 4])?;
    other.copy_from(&default, &tensor)?;
    assert_eq!(other.to_vec::<f32>(&default)?, ramp(12));
    let (tensor, watch) = owned(&default, COUNT)?;
    drop(tensor);
    watch.expect_drop(&default)?;
    Ok(())
}
