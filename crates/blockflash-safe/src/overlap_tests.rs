use super::*;
use crate::Result;
use proptest::prelude::*;
use std::collections::HashSet;

/// All bytes of the elements, in the order of their indices.
fn bytes(footprint: &Footprint<'_>) -> Vec<usize> {
    let size = footprint.dtype.size();
    let first = |offset: usize| footprint.address + offset * size;
    footprint.layout.offsets().flat_map(|offset| first(offset)..first(offset) + size).collect()
}

fn layouts() -> impl Strategy<Value = Layout> {
    proptest::collection::vec((0..5usize, 0..40usize), 0..=MAX_RANK).prop_map(|dims| {
        let (shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        Layout::strided(&shape, &strides).unwrap()
    })
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::U8), Just(DType::BF16), Just(DType::F32)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn sharing_is_what_enumeration_finds(
        (a, b) in (layouts(), layouts()),
        (of_a, of_b) in (dtypes(), dtypes()),
        (at_a, at_b) in (0..300usize, 0..300usize),
    ) {
        let a = Footprint { address: 1000 + at_a, dtype: of_a, layout: &a };
        let b = Footprint { address: 1000 + at_b, dtype: of_b, layout: &b };
        let seen: HashSet<_> = bytes(&a).into_iter().collect();
        let expected = bytes(&b).iter().any(|byte| seen.contains(byte));
        prop_assert_eq!(a.overlaps(&b), expected);
        prop_assert_eq!(b.overlaps(&a), expected);
    }

    #[test]
    fn repeats_are_what_enumeration_finds(layout in layouts()) {
        let mut seen = HashSet::new();
        let expected = !layout.offsets().all(|offset| seen.insert(offset));
        prop_assert_eq!(layout.overlaps_itself(), expected);
    }
}

/// Two parts of one buffer: of these shapes, with the strides of the whole, so far apart.
fn parts(shape: &[usize], strides: &[usize], apart: usize) -> Result<[bool; 2]> {
    let layout = Layout::strided(shape, strides)?;
    let [a, b] = [1 << 40, (1 << 40) + 2 * apart].map(|address| Footprint {
        address,
        dtype: DType::F16,
        layout: &layout,
    });
    Ok([a.interleaves(&b), a.overlaps(&b)])
}

/// Keys and values in one buffer, as large as a GPU's memory.
#[test]
fn caches_of_one_buffer() -> Result<()> {
    let (pages, slots, heads, width) = (1 << 18, 16, 8, 128);
    let row = heads * width;
    let shape = [pages, slots, heads, width];
    // 2 before the heads, before the slots, and in the width.
    for (strides, apart) in [
        ([slots * 2 * row, 2 * row, width, 1], row),
        ([2 * slots * row, row, width, 1], slots * row),
        ([slots * 2 * row, 2 * row, 2 * width, 1], width),
    ] {
        assert_eq!(parts(&shape, &strides, apart)?, [true, false]);
        assert_eq!(parts(&shape, &strides, apart - 1)?, [true, true]);
        assert_eq!(parts(&shape, &strides, apart + 1)?, [true, true]);
    }
    Ok(())
}

/// Strides that fit each other badly, over many elements: decided by what they have in common.
#[test]
fn rows_of_two_shapes() -> Result<()> {
    let [a, b] = [
        Layout::strided(&[1 << 20, 200], &[1000, 1])?,
        Layout::strided(&[1 << 20, 200], &[1500, 1])?,
    ];
    let at = |address, layout| Footprint { address, dtype: DType::U8, layout };
    for (distance, expected) in [(0, true), (199, true), (200, false), (300, false), (301, true)] {
        let far = (1 << 20) + 500 * 999 + distance;
        assert_eq!(at(1 << 20, &a).overlaps(&at(far, &b)), expected, "{distance}");
    }
    Ok(())
}
