use crate::view::Used;
use crate::{DType, Error, Result, Stream, Tensor, View};
use std::ops::Deref;

/// i32 entries, each of them at least 0 and below a limit, or −1 where that may stand for nothing,
/// in memory that nothing else can write.
///
/// Kernels compute addresses from such entries, so the soundness of the launches rests on it:
///
/// - **Made of host memory.** The entries are checked on the host and uploaded into memory of their
///   own, or are zeros. Device memory of somebody else is never taken over: a copy into it may be
///   pending on another stream, or a captured graph that writes to it may be launched later.
/// - **Handed out read-only.** There is no mutable view of the memory, so safe code can queue no
///   write to it, also not into a graph. Two launches of this crate write such arrays, which build
///   and transpose block masks. Their kernels leave entries below the limit at all times, whatever
///   runs beside them.
/// - **Ordered.** The upload is waited for; zeros and copies are queued on the stream that the
///   memory was allocated with, and the first use on another stream waits for that one.
#[derive(Debug)]
pub(crate) struct IndexTensor {
    tensor: Tensor,
    limit: i64,
}

impl IndexTensor {
    /// Uploads entries that are below a limit; `name` is for the error.
    pub(crate) fn new(
        name: &str,
        entries: &[i32],
        shape: &[usize],
        limit: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let limit = as_i64(limit);
        if let Some(at) = entries.iter().position(|&entry| entry < 0 || i64::from(entry) >= limit) {
            return invalid(format!("{name}[{at}] is {}, not from 0 to {limit} - 1", entries[at]));
        }
        Ok(Self { tensor: Tensor::from_slice(stream, entries, shape)?, limit })
    }

    /// Uploads entries that are −1, which stands for nothing, or below a limit.
    pub(crate) fn or_none(
        name: &str,
        entries: &[i32],
        shape: &[usize],
        limit: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let limit = as_i64(limit);
        let is_in_range = |&entry: &i32| (-1..limit).contains(&i64::from(entry));
        if let Some(at) = entries.iter().position(|entry| !is_in_range(entry)) {
            return invalid(format!("{name}[{at}] is {}, not from -1 to {limit} - 1", entries[at]));
        }
        Ok(Self { tensor: Tensor::from_slice(stream, entries, shape)?, limit })
    }

    /// Uploads offsets, which start with 0, ascend and end with `end`.
    pub(crate) fn offsets(
        name: &str,
        entries: &[i32],
        shape: &[usize],
        end: usize,
        stream: &Stream,
    ) -> Result<Self> {
        let (first, last) = (entries.first().copied(), entries.last().map(|&last| i64::from(last)));
        if first != Some(0) || last != Some(as_i64(end)) || !entries.is_sorted() {
            let at = entries.windows(2).position(|pair| pair[0] > pair[1]).map(|at| at + 1);
            let at = if first == Some(0) { at.or(entries.len().checked_sub(1)) } else { Some(0) };
            let found = at.and_then(|at| entries.get(at).map(|entry| (at, entry)));
            let found = found
                .map_or("it is empty".into(), |(at, entry)| format!("{name}[{at}] is {entry}"));
            return invalid(format!("{name} does not ascend from 0 to {end}: {found}"));
        }
        Self::new(name, entries, shape, end.saturating_add(1), stream)
    }

    /// Zeros, for kernels that write entries below the limit, which is positive.
    pub(super) fn zeros(shape: &[usize], limit: usize, stream: &Stream) -> Result<Self> {
        Ok(Self { tensor: Tensor::zeros(stream, DType::I32, shape)?, limit: as_i64(limit) })
    }

    /// A copy on the stream's device. Nobody else can write the source or the copy, so its entries
    /// are in range, too.
    pub(crate) fn copy_to(&self, stream: &Stream) -> Result<Self> {
        Ok(Self { tensor: self.tensor.copy_to(stream)?, limit: self.limit })
    }

    /// All entries are below this.
    pub(crate) fn limit(&self) -> i128 {
        self.limit.into()
    }
}

impl Deref for IndexTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

pub(super) fn as_i64(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

pub(super) fn invalid<T>(what: String) -> Result<T> {
    Err(Error::Indices { what })
}

/// Checks the length of an array.
pub(super) fn check_length(name: &str, entries: &[i32], expected: usize) -> Result<()> {
    match entries.len() {
        length if length == expected => Ok(()),
        length => invalid(format!("{name} has {length} entries, expected {expected}")),
    }
}

/// Checks that an array has every number below its length once.
pub(super) fn check_permutation(name: &str, order: &[i32]) -> Result<()> {
    let mut seen = vec![false; order.len()];
    for (at, &entry) in order.iter().enumerate() {
        let place = usize::try_from(entry).ok().and_then(|entry| seen.get_mut(entry));
        if place.is_none_or(|seen| std::mem::replace(seen, true)) {
            let range = 0..order.len();
            return invalid(format!(
                "{name} is not a permutation of {range:?}: {name}[{at}] is {entry}, twice or beyond"
            ));
        }
    }
    Ok(())
}

pub(super) fn used<const N: usize>(arrays: [Option<&IndexTensor>; N]) -> [Option<Used<'_>>; N] {
    arrays.map(|array| array.map(|array| array.used()))
}

pub(super) fn views<const N: usize>(arrays: [Option<&IndexTensor>; N]) -> [Option<View<'_>>; N] {
    arrays.map(|array| array.map(|array| array.view()))
}
