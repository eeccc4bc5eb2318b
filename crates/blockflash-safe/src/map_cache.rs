//! Encoded tensor maps of the calls that a thread repeats: the driver takes 0.12 µs for a map, and
//! attention needs four.

use crate::{DType, Device, Swizzle, TensorMapSpec, View};
use std::cell::RefCell;

/// Everything that a map depends on, so that an entry never becomes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Key {
    pub(crate) device: Device,
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    pub(crate) swizzle: Swizzle,
    pub(crate) rank: usize,
    /// The arrays are padded to the largest rank, so that no length can be wrong for the driver.
    /// Padding has one value for all keys.
    pub(crate) shape: [u64; 5],
    pub(crate) strides_bytes: [u64; 5],
    pub(crate) box_shape: [u32; 5],
}

/// A map as the driver writes it.
pub(crate) type Words = [u64; 16];

/// Entries of a thread: a power of two. A map replaces the one in its place.
const ENTRIES: usize = 64;

type Maps = RefCell<Vec<Option<(Key, Words)>>>;

thread_local! {
    /// Empty until the first map is kept.
    static MAPS: Maps = const { RefCell::new(Vec::new()) };
}

impl Key {
    /// The key of a map of a view. `None` for host memory, and where the numbers of dimensions,
    /// strides and extents do not fit each other.
    pub(crate) fn of(spec: &TensorMapSpec<'_>, view: &View<'_>) -> Option<Key> {
        let (rank, address) = (spec.shape.len(), view.device_ptr()?);
        let (mut shape, mut strides_bytes, mut box_shape) = ([1; 5], [16; 5], [1; 5]);
        if spec.strides_bytes.len() + 1 != rank || spec.box_shape.len() != rank {
            return None;
        }
        shape.get_mut(..rank)?.copy_from_slice(spec.shape);
        strides_bytes[..rank - 1].copy_from_slice(spec.strides_bytes);
        box_shape[..rank].copy_from_slice(spec.box_shape);
        let (device, dtype, swizzle) = (*view.device(), spec.dtype, spec.swizzle);
        Some(Key { device, address, dtype, swizzle, rank, shape, strides_bytes, box_shape })
    }

    /// The place of the map: by the address and the box, in which two maps of one call may differ.
    fn place(&self) -> usize {
        let mixed =
            (self.address ^ u64::from(self.box_shape[1])).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> (u64::BITS - ENTRIES.trailing_zeros())) as usize
    }

    /// The map, if this thread has kept it.
    pub(crate) fn find(&self) -> Option<Words> {
        let find = |maps: &Maps| {
            let maps = maps.borrow();
            let (key, words) = maps.get(self.place())?.as_ref()?;
            (key == self).then_some(*words)
        };
        // A thread that ends has no cache any more.
        MAPS.try_with(find).ok().flatten()
    }

    pub(crate) fn keep(self, words: Words) {
        let _ = MAPS.try_with(|maps| {
            let mut maps = maps.borrow_mut();
            if maps.is_empty() {
                maps.resize(ENTRIES, None);
            }
            maps[self.place()] = Some((self, words));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_found_by_everything_that_it_depends_on() {
        let key = Key {
            device: Device::cpu(),
            address: 0x7f00_0000_1000,
            dtype: DType::F16,
            swizzle: Swizzle::B128,
            rank: 2,
            shape: [64, 128, 1, 1, 1],
            strides_bytes: [128, 16, 16, 16, 16],
            box_shape: [64, 64, 1, 1, 1],
        };
        assert_eq!(key.find(), None);
        key.keep([7; 16]);
        assert_eq!(key.find(), Some([7; 16]));
        for other in [
            Key { address: 0x7f00_0000_2000, ..key },
            Key { dtype: DType::BF16, ..key },
            Key { swizzle: Swizzle::None, ..key },
            Key { rank: 3, ..key },
            Key { shape: [64, 129, 1, 1, 1], ..key },
            Key { strides_bytes: [256, 16, 16, 16, 16], ..key },
            Key { box_shape: [64, 128, 1, 1, 1], ..key },
        ] {
            assert_eq!(other.find(), None, "{other:?}");
        }
        assert_eq!(std::thread::spawn(move || key.find()).join().unwrap(), None);
        // Far more maps than there are places: each is found until another one takes its place.
        for address in (0..1000).map(|number| number << 12) {
            let key = Key { address, ..key };
            key.keep([address; 16]);
            assert_eq!(key.find(), Some([address; 16]));
        }
    }
}
