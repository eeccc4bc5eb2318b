//! Encoded tensor maps of the calls that a thread repeats: the driver takes 0.12 µs for a map, and
//! attention needs four.
//!
//! A map is a function of what it is encoded from and does not keep memory alive, so it may outlive
//! the memory: it is found again only for a view that has the same address and reaches as far.

use crate::View;
use std::cell::RefCell;

/// Everything that a map and its checks depend on, so that an entry never becomes wrong: address
/// and span of the view; device, element types, swizzle and rank; the shape; the strides; the
/// extents of the box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) [u64; WORDS]);

pub(crate) const WORDS: usize = 13;
/// Where shape, strides and extents are.
pub(crate) const SHAPE: usize = 3;
pub(crate) const STRIDES: usize = 8;
pub(crate) const EXTENTS: usize = 12;

/// A map as the driver writes it.
pub(crate) type Words = [u64; 16];

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
    /// What a map is kept by that follows from a whole view and three extents of the box, each of
    /// at most 256. `None` for host memory.
    #[inline]
    pub(crate) fn of_view(view: &View<'_>, boxes: [u32; 3]) -> Option<Key> {
        let (layout, ordinal) = (view.layout(), view.device().context()?.ordinal as u64);
        let mut words = [0; WORDS];
        words[0] = view.device_ptr()?;
        // No view has this span, so keys of specifications differ.
        words[1] = u64::MAX;
        words[2] = ordinal << 16 | (view.dtype() as u64) << 8 | layout.rank() as u64;
        let padded = layout.padded();
        for (at, (&size, &stride)) in padded[0].iter().zip(padded[1]).enumerate() {
            (words[SHAPE + at], words[STRIDES + at]) = (size as u64, stride as u64);
        }
        words[EXTENTS] = boxes.iter().fold(0, |all, &extent| all << 16 | u64::from(extent));
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
