//! Encoded tensor maps of the calls that a thread repeats: the driver takes 0.12 µs for a map, and
//! attention needs four.
//!
//! A map is a function of what it is encoded from and does not keep memory alive, so it may outlive
//! the memory: it is found again only for a view that has the same address and reaches as far.

use crate::{TensorMapSpec, View};
use std::cell::RefCell;

/// Everything that a map and its checks depend on, so that an entry never becomes wrong: address
/// and span of the view; device, element types, swizzle and rank; the shape; the strides; the
/// extents of the box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u64; WORDS]);

const WORDS: usize = 13;
/// Where shape, strides and extents are.
const SHAPE: usize = 3;
const STRIDES: usize = 8;
const EXTENTS: usize = 12;

/// A map as the driver writes it.
pub(crate) type Words = [u64; 16];

/// Bits of an extent in a key: the driver takes at most 256.
const EXTENT_BITS: usize = 12;

/// Sets of entries of a thread, a power of two, and entries of a set. A map is in the set that
/// address and box choose, in which it takes the place of the oldest one.
const SETS: usize = 16;
const WAYS: usize = 4;

#[derive(Clone, Copy)]
struct Set {
    entries: [Option<(Key, Words)>; WAYS],
    next: usize,
}

thread_local! {
    /// Empty until the first map is kept.
    static SETS_OF_THREAD: RefCell<Vec<Set>> = const { RefCell::new(Vec::new()) };
}

impl Key {
    /// The key of a map of a view. `None` for host memory, and for some of the specifications that
    /// [`TensorMapSpec::check`] refuses.
    pub(crate) fn of(spec: &TensorMapSpec<'_>, view: &View<'_>) -> Option<Key> {
        let rank = spec.shape.len();
        let ordinal = view.device().context()?.ordinal as u64;
        if rank > 5 || spec.strides_bytes.len() + 1 != rank || spec.box_shape.len() != rank {
            return None;
        }
        let small = [view.dtype() as u64, spec.dtype as u64, spec.swizzle as u64, rank as u64];
        let mut words = [0; WORDS];
        words[0] = view.device_ptr()?;
        words[1] = view.layout().span() as u64;
        words[2] = small.into_iter().fold(ordinal, |word, part| word << 8 | part);
        words[SHAPE..].iter_mut().zip(spec.shape).for_each(|(word, &size)| *word = size);
        words[STRIDES..].iter_mut().zip(spec.strides_bytes).for_each(|(word, &step)| *word = step);
        for &extent in spec.box_shape {
            if extent >> EXTENT_BITS != 0 {
                return None;
            }
            words[EXTENTS] = words[EXTENTS] << EXTENT_BITS | u64::from(extent);
        }
        Some(Key(words))
    }

    fn set(&self) -> usize {
        let mixed = (self.0[0] ^ self.0[EXTENTS]).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> (u64::BITS - SETS.trailing_zeros())) as usize
    }

    /// The map, if this thread has kept it.
    pub(crate) fn find(&self) -> Option<Words> {
        let find = |sets: &RefCell<Vec<Set>>| {
            let sets = sets.borrow();
            let mut entries = sets.get(self.set())?.entries.iter().flatten();
            entries.find(|(key, _)| key == self).map(|(_, words)| *words)
        };
        // A thread that ends keeps nothing any more.
        SETS_OF_THREAD.try_with(find).ok().flatten()
    }

    pub(crate) fn keep(self, words: Words) {
        let _ = SETS_OF_THREAD.try_with(|sets| {
            let mut sets = sets.borrow_mut();
            if sets.is_empty() {
                sets.resize(SETS, Set { entries: [None; WAYS], next: 0 });
            }
            let Set { entries, next } = &mut sets[self.set()];
            entries[*next] = Some((self, words));
            *next = (*next + 1) % WAYS;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_found_by_its_whole_key() {
        let key = Key([3; WORDS]);
        assert_eq!(key.find(), None);
        key.keep([7; 16]);
        assert_eq!(key.find(), Some([7; 16]));
        for at in 0..WORDS {
            let mut other = key;
            other.0[at] += 1;
            assert_eq!(other.find(), None, "{at}");
        }
        assert_eq!(std::thread::spawn(move || key.find()).join().unwrap(), None);
    }

    #[test]
    fn the_oldest_map_of_a_set_makes_room() {
        // Far more maps than there are places: the newest of each set are there.
        let at_address = |number: u64| {
            let mut key = Key([3; WORDS]);
            key.0[0] = number << 8;
            key
        };
        let keys: Vec<Key> = (1..1000).map(at_address).collect();
        for (at, key) in keys.iter().enumerate() {
            key.keep([at as u64; 16]);
            assert_eq!(key.find(), Some([at as u64; 16]));
        }
        for set in 0..SETS {
            let of_set = keys.iter().rev().filter(|key| key.set() == set);
            let found: Vec<bool> = of_set.map(|key| key.find().is_some()).collect();
            assert!(found.len() > WAYS && found[..WAYS].iter().all(|&found| found));
            assert!(!found[WAYS..].contains(&true), "{found:?}");
        }
    }
}
