//! Memory for messages on the CPU, and whether both ends of each message lie in it or neither.

use blockflash_dist::Error;
use blockflash_ops::{DType, Stream, Tensor, View};
use half::{bf16, f16};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Addresses of a rank's memory for messages.
type Places = Arc<Mutex<Vec<Range<usize>>>>;

/// What senders have said of messages under way, by sender and receiver.
pub(super) type Said = Arc<Mutex<HashMap<[usize; 2], VecDeque<bool>>>>;

/// The memory of a rank.
pub(super) struct Lent {
    /// Bytes that were reserved.
    pub(super) reserved: usize,
    /// Of all ranks.
    said: Said,
    places: Places,
}

/// Memory of a tensor.
struct Place {
    words: Vec<u64>,
    places: Places,
}

impl Drop for Place {
    fn drop(&mut self) {
        let start = self.words.as_ptr().addr();
        self.places.lock().unwrap().retain(|place| place.start != start);
    }
}

impl Lent {
    /// Nothing yet.
    pub(super) fn new(said: Said) -> Lent {
        Lent { reserved: 0, said, places: Places::default() }
    }

    /// A tensor in such memory, if it is not larger than what was reserved.
    pub(super) fn tensor(
        &self,
        stream: &Stream,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Tensor, Error> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        if bytes == 0 || bytes > self.reserved {
            return Ok(Tensor::empty(stream, dtype, shape)?);
        }
        let mut words = vec![u64::MAX; bytes.div_ceil(8)];
        let ptr = words.as_mut_ptr();
        self.places.lock().unwrap().push(ptr.addr()..ptr.addr() + 8 * words.len());
        let place = Place { words, places: self.places.clone() };
        // SAFETY: 1. So many bytes, which `place` keeps. 2. Nobody else uses them.
        Ok(unsafe { Tensor::from_raw(stream, ptr.cast(), dtype, shape, place)? })
    }

    fn holds(&self, view: &View<'_>) -> bool {
        let address = match view.dtype() {
            DType::F32 => view.as_slice::<f32>().map(|x| x.as_ptr().addr()),
            DType::F16 => view.as_slice::<f16>().map(|x| x.as_ptr().addr()),
            DType::BF16 => view.as_slice::<bf16>().map(|x| x.as_ptr().addr()),
            DType::I32 => view.as_slice::<i32>().map(|x| x.as_ptr().addr()),
            DType::U8 => view.as_slice::<u8>().map(|x| x.as_ptr().addr()),
            other => panic!("a message of {other}"),
        };
        let address = address.expect("messages are contiguous");
        self.places.lock().unwrap().iter().any(|place| place.contains(&address))
    }

    /// Notes where a message lies at its sender.
    pub(super) fn send(&self, [from, to]: [usize; 2], view: &View<'_>) {
        let holds = self.holds(view);
        self.said.lock().unwrap().entry([from, to]).or_default().push_back(holds);
    }

    /// Compares that with where it lies at its receiver.
    pub(super) fn receive(&self, [from, to]: [usize; 2], view: &View<'_>) {
        let said = self.said.lock().unwrap().get_mut(&[from, to]).and_then(VecDeque::pop_front);
        let holds = self.holds(view);
        assert_eq!(said, Some(holds), "memory for messages at one end, from {from} to {to}");
    }
}
