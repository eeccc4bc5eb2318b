use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

#[test]
fn contiguous_is_row_major() -> Result<()> {
    let layout = Layout::contiguous(&[2, 3, 4])?;
    assert_eq!(layout.strides(), [12, 4, 1]);
    assert_eq!((layout.rank(), layout.elements(), layout.span()), (3, 24, 24));
    assert!(layout.is_contiguous() && !layout.overlaps_itself());
    assert!(layout.offsets().eq(0..24));
    let scalar = Layout::contiguous(&[])?;
    assert_eq!((scalar.rank(), scalar.elements(), scalar.span()), (0, 1, 1));
    Ok(())
}

#[test]
fn empty_tensors_have_no_span() -> Result<()> {
    for shape in [&[0][..], &[3, 0, 5], &[0, 7]] {
        let layout = Layout::contiguous(shape)?;
        assert_eq!((layout.elements(), layout.span()), (0, 0));
        assert!(layout.is_contiguous() && !layout.overlaps_itself());
        assert_eq!(layout.offsets().count(), 0);
    }
    // Strides of an empty tensor are never used, however large.
    assert_eq!(Layout::strided(&[0, 2], &[usize::MAX, usize::MAX])?.span(), 0);
    Ok(())
}

#[test]
fn what_cannot_be_addressed_is_refused() {
    assert!(matches!(Layout::contiguous(&[1; 5]), Err(Error::Rank { found: 5, .. })));
    assert!(matches!(
        Layout::strided(&[1, 2], &[1]),
        Err(Error::ShapeStrides { shape: 2, strides: 1 })
    ));
    for (shape, strides) in [
        (&[usize::MAX, 2][..], &[2, 1][..]),
        (&[2, 2], &[usize::MAX, usize::MAX]),
        (&[1 << 40, 1 << 40], &[0, 0]),
        (&[2], &[isize::MAX as usize / 4]),
        (&[0, usize::MAX, usize::MAX], &[0, 0, 0]),
    ] {
        assert!(
            matches!(Layout::strided(shape, strides), Err(Error::TooLarge)),
            "{shape:?} {strides:?}"
        );
    }
    assert!(matches!(Layout::contiguous(&[usize::MAX, usize::MAX]), Err(Error::TooLarge)));
    // Beyond 2^31 elements is fine.
    assert_eq!(Layout::contiguous(&[1 << 20, 1 << 20]).unwrap().span(), 1 << 40);
}

#[test]
fn only_single_entries_are_expanded() -> Result<()> {
    let layout = Layout::strided(&[1, 3], &[7, 2])?;
    let expanded = layout.expand(0, 5)?;
    assert_eq!(
        (expanded.shape(), expanded.strides(), expanded.span()),
        (&[5, 3][..], &[0, 2][..], layout.span())
    );
    assert!(expanded.overlaps_itself());
    assert!(matches!(layout.expand(1, 5), Err(Error::Expand { dim: 1, .. })));
    assert!(matches!(layout.expand(2, 5), Err(Error::Expand { dim: 2, .. })));
    assert!(matches!(layout.expand(0, usize::MAX), Err(Error::TooLarge)));
    Ok(())
}

#[test]
fn permutations_and_slices_are_checked() -> Result<()> {
    let layout = Layout::contiguous(&[2, 3, 4])?;
    let permuted = layout.permute(&[1, 2, 0])?;
    assert_eq!((permuted.shape(), permuted.strides()), (&[3, 4, 2][..], &[4, 1, 12][..]));
    for order in [&[0, 1][..], &[0, 1, 1], &[0, 1, 3], &[0, 1, 2, 3]] {
        assert!(
            matches!(layout.permute(order), Err(Error::Permutation { rank: 3, .. })),
            "{order:?}"
        );
    }
    let (part, offset) = layout.slice(1, 1..3)?;
    assert_eq!((part.shape(), offset), (&[2, 2, 4][..], 4));
    assert!(!part.is_contiguous());
    assert_eq!(layout.slice(1, 3..3)?.1, 0, "an empty part points nowhere else");
    #[expect(clippy::reversed_empty_ranges)]
    for (dim, range) in [(3, 0..1), (0, 0..3), (0, 2..1)] {
        assert!(matches!(layout.slice(dim, range), Err(Error::Slice { .. })));
    }
    Ok(())
}

#[test]
fn dimensions_that_continue_each_other_are_flattened() -> Result<()> {
    let batch = Layout::strided(&[5, 3, 4], &[24, 8, 1])?;
    let matrix = batch.flatten(0..2)?;
    assert_eq!((matrix.shape(), matrix.strides()), (&[15, 4][..], &[8, 1][..]));
    assert_eq!(batch.flatten(1..2)?, batch);
    let whole = Layout::contiguous(&[2, 3, 4])?.flatten(0..3)?;
    assert_eq!((whole.shape(), whole.strides()), (&[24][..], &[1][..]));
    // A gap between entries, rows that are not contiguous, a batch that repeats its entry, columns
    // before rows.
    let gap = Layout::strided(&[5, 3, 4], &[25, 8, 1])?;
    let repeated = Layout::strided(&[5, 3, 4], &[0, 8, 1])?;
    let transposed = batch.permute(&[0, 2, 1])?;
    for (layout, dims) in [(gap, 0..2), (batch, 1..3), (repeated, 0..2), (transposed, 0..2)] {
        assert!(matches!(layout.flatten(dims), Err(Error::Flatten { .. })), "{layout:?}");
    }
    // Strides that are never used.
    let single = Layout::strided(&[1, 3, 1], &[7, 2, 9])?;
    assert_eq!(
        (single.flatten(0..3)?.shape(), single.flatten(0..3)?.strides()),
        (&[3][..], &[2][..])
    );
    assert_eq!(Layout::strided(&[2, 0, 3], &[usize::MAX, 7, 7])?.flatten(0..2)?.shape(), [0, 3]);
    #[expect(clippy::reversed_empty_ranges)]
    for dims in [1..1, 2..1, 0..4, 3..3] {
        let error = batch.flatten(dims.clone()).unwrap_err();
        assert!(
            matches!(error, Error::Flatten { start, end, .. } if (start..end) == dims),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn repeated_elements_overlap() -> Result<()> {
    assert!(Layout::strided(&[3], &[0])?.overlaps_itself());
    assert!(Layout::strided(&[3, 3], &[1, 1])?.overlaps_itself());
    assert!(Layout::strided(&[2, 3], &[2, 1])?.overlaps_itself());
    assert!(!Layout::strided(&[2, 3], &[3, 1])?.overlaps_itself());
    assert!(
        !Layout::strided(&[1, 3], &[0, 1])?.overlaps_itself(),
        "a dimension of one entry repeats nothing"
    );
    Ok(())
}

fn layouts() -> impl Strategy<Value = Layout> {
    (0usize..=MAX_RANK)
        .prop_flat_map(|rank| {
            (prop::collection::vec(0usize..5, rank), prop::collection::vec(0usize..12, rank))
        })
        .prop_map(|(shape, strides)| Layout::strided(&shape, &strides).unwrap())
}

/// What slicing, stepping and permuting make of a contiguous tensor.
fn derived_layouts() -> impl Strategy<Value = Layout> {
    let dims = prop::collection::vec((1usize..4, 0usize..3), 1..=MAX_RANK);
    (dims, any::<prop::sample::Index>(), any::<bool>()).prop_map(|(dims, turn, reverse)| {
        let shape: Vec<usize> = dims.iter().map(|(size, _)| *size).collect();
        let padded: Vec<usize> = dims.iter().map(|(size, padding)| size + padding).collect();
        let strides = Layout::contiguous(&padded).unwrap().strides().to_vec();
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.rotate_left(turn.index(shape.len()));
        if reverse {
            order.reverse();
        }
        Layout::strided(&shape, &strides).unwrap().permute(&order).unwrap()
    })
}

proptest! {
    #[test]
    fn span_is_one_past_the_last_offset(layout in layouts()) {
        prop_assert_eq!(layout.offsets().max().map_or(0, |last| last + 1), layout.span());
        prop_assert_eq!(layout.offsets().count(), layout.elements());
    }

    #[test]
    fn overlap_is_never_missed(layout in layouts()) {
        let unique: HashSet<usize> = layout.offsets().collect();
        if unique.len() < layout.elements() {
            prop_assert!(layout.overlaps_itself());
        }
    }

    #[test]
    fn derived_layouts_do_not_overlap(layout in derived_layouts()) {
        prop_assert!(!layout.overlaps_itself(), "{:?}", layout);
    }

    #[test]
    fn contiguous_means_row_major_offsets(layout in layouts()) {
        prop_assert_eq!(layout.is_contiguous(), layout.offsets().eq(0..layout.elements()));
    }

    #[test]
    fn permuting_keeps_the_elements(layout in layouts(), turn in any::<prop::sample::Index>()) {
        let mut order: Vec<usize> = (0..layout.rank()).collect();
        if !order.is_empty() {
            order.rotate_left(turn.index(layout.rank()));
        }
        let permuted = layout.permute(&order).unwrap();
        let sorted = |layout: &Layout| {
            let mut offsets: Vec<usize> = layout.offsets().collect();
            offsets.sort_unstable();
            offsets
        };
        prop_assert_eq!(sorted(&permuted), sorted(&layout));
    }

    #[test]
    fn flattening_keeps_the_order(
        layout in layouts(), start in 0usize..MAX_RANK, end in 0usize..=MAX_RANK,
    ) {
        if let Ok(flat) = layout.flatten(start..end) {
            prop_assert!(flat.offsets().eq(layout.offsets()));
            let rank = layout.rank() + start + 1 - end;
            prop_assert_eq!((flat.span(), flat.rank()), (layout.span(), rank));
        }
    }

    #[test]
    fn an_inserted_dimension_changes_no_element(layout in layouts(), dim in 0usize..MAX_RANK + 2) {
        match layout.insert(dim) {
            Ok(more) => {
                prop_assert!(more.offsets().eq(layout.offsets()));
                prop_assert_eq!((more.span(), more.shape()[dim]), (layout.span(), 1));
            }
            Err(_) => prop_assert!(dim > layout.rank() || layout.rank() == MAX_RANK),
        }
    }

    #[test]
    fn slices_stay_inside(
        layout in layouts(), dim in 0usize..MAX_RANK, start in 0usize..5, len in 0usize..5,
    ) {
        match layout.slice(dim, start..start + len) {
            Ok((part, offset)) => {
                prop_assert!(offset + part.span() <= layout.span());
                let all: HashSet<usize> = layout.offsets().collect();
                prop_assert!(part.offsets().all(|own| all.contains(&(own + offset))));
            }
            Err(_) => prop_assert!(dim >= layout.rank() || start + len > layout.shape()[dim]),
        }
    }
}
