use super::tensor::IndexTensor;
use super::*;
use crate::{Device, Error, Result, Stream};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

#[test]
fn entries_are_in_their_range() {
    let of =
        |entries: &[i32], limit| IndexTensor::new("x", entries, &[entries.len()], limit, &cpu());
    for (entries, limit) in [(&[0, 2, 1][..], 3), (&[], 0), (&[i32::MAX], usize::MAX)] {
        assert_eq!(of(entries, limit).unwrap().to_vec::<i32>(&cpu()).unwrap(), entries);
    }
    for (entries, limit, said) in [
        (&[0, 3, 1][..], 3, "x[1] is 3, not from 0 to 3 - 1"),
        (&[-1], 3, "x[0] is -1, not from 0 to 3 - 1"),
        (&[0], 0, "x[0] is 0, not from 0 to 0 - 1"),
    ] {
        assert_eq!(of(entries, limit).unwrap_err().to_string(), said);
    }
    let shape = IndexTensor::new("x", &[0; 3], &[2, 2], 1, &cpu());
    assert!(matches!(shape, Err(Error::OutOfBounds { needed: 4, available: 3 })));
}

#[test]
fn offsets_ascend_from_zero_to_their_end() {
    let of =
        |entries: &[i32], end| IndexTensor::offsets("x", entries, &[entries.len()], end, &cpu());
    for (entries, end) in [(&[0, 0, 2, 5][..], 5), (&[0], 0), (&[0, i32::MAX], i32::MAX as usize)] {
        assert_eq!(of(entries, end).unwrap().limit(), end as i128 + 1);
    }
    for (entries, end) in
        [(&[][..], 0), (&[1, 5], 5), (&[0, 4], 5), (&[0, 6], 5), (&[0, 3, 2, 5], 5), (&[-1, 5], 5)]
    {
        assert!(
            of(entries, end).unwrap_err().to_string().starts_with("x does not ascend from 0 to")
        );
    }
}

/// 3 × 4 blocks: columns 0 and 3, none, 1.
const PATTERN: BsrIndexArrays<'static> = BsrIndexArrays {
    block_cols: 4,
    row_ptr: &[0, 2, 2, 3],
    col_idx: &[0, 3, 1],
    row_order: &[0, 2, 1],
    block_idx: None,
    stages: None,
};

#[test]
fn patterns_that_kernels_may_follow() {
    for block_idx in [None, Some(&[2, 0, 1][..])] {
        let indices = BsrIndices::new(&BsrIndexArrays { block_idx, ..PATTERN }, &cpu()).unwrap();
        let copy = indices.copy_to(&cpu()).unwrap();
        for found in [&indices, &copy] {
            assert_eq!(found.row_ptr().to_vec::<i32>(&cpu()).unwrap(), PATTERN.row_ptr);
            let rows = found.arrays()[6].unwrap().to_vec::<i32>(&cpu()).unwrap();
            assert_eq!(rows, [0, 0, 2, 0, 2, 2, 3, 1, 1, 2, 2, 0]);
            assert_eq!(
                found.block_idx().map(|index| index.to_vec::<i32>(&cpu()).unwrap()).as_deref(),
                block_idx
            );
            assert_eq!([0, 1, 2, 3, 9].map(|at| found.longest_from(at, false)), [2, 1, 0, 0, 0]);
            assert!(
                found.has_columns_below(4)
                    && !found.has_columns_below(3)
                    && !found.has_stages_of(16)
            );
        }
    }
    let nothing = BsrIndexArrays { row_ptr: &[0], col_idx: &[], row_order: &[], ..PATTERN };
    assert_eq!(BsrIndices::new(&nothing, &cpu()).unwrap().blocks(), 0);
}

#[test]
fn patterns_that_kernels_may_not_follow() {
    let refused = |said: &str, arrays: BsrIndexArrays<'_>| {
        let error = BsrIndices::new(&arrays, &cpu()).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    };
    refused("from 0 to 3: row_ptr[2] is 1", BsrIndexArrays { row_ptr: &[0, 2, 1, 3], ..PATTERN });
    refused("from 0 to 3: row_ptr[0] is 1", BsrIndexArrays { row_ptr: &[1, 2, 2, 3], ..PATTERN });
    refused("from 0 to 3: row_ptr[3] is 4", BsrIndexArrays { row_ptr: &[0, 2, 2, 4], ..PATTERN });
    refused("row_ptr has 3 entries, expected 4", BsrIndexArrays { row_ptr: &[0, 2, 3], ..PATTERN });
    refused("col_idx[1] is 4", BsrIndexArrays { col_idx: &[0, 4, 1], ..PATTERN });
    refused(
        "permutation of 0..3: row_order[2] is 2",
        BsrIndexArrays { row_order: &[0, 2, 2], ..PATTERN },
    );
    refused("row_order is not a permutation", BsrIndexArrays { row_order: &[0, 2, 3], ..PATTERN });
    refused("row_order is not a permutation", BsrIndexArrays { row_order: &[0, -1, 2], ..PATTERN });
    refused("block_idx[0] is 3", BsrIndexArrays { block_idx: Some(&[3, 1, 2]), ..PATTERN });
    refused(
        "block_idx has 2 entries, expected 3",
        BsrIndexArrays { block_idx: Some(&[1, 2]), ..PATTERN },
    );
}

/// The stage of `PATTERN` in blocks of 32: columns 0, 1 and 3 of its rows in their order.
fn stage() -> [i32; 64] {
    let mut stage = [0; 64];
    // The first row has columns 0 and 2 of the stage, the second one column 1 and is behind both.
    (stage[0], stage[1]) = (0, 0b101);
    (stage[2], stage[3]) = (2, 0b010 | 2 << 8);
    (stage[32], stage[34], stage[36]) = (0, 1, 3);
    (stage[48], stage[49]) = (3, 3);
    stage
}

fn with_stages(stages: &[i32], group_stages: &[i32], block_size: u32) -> Result<BsrIndices> {
    let stages = Some(BsrStageArrays { block_size, stages, group_stages });
    BsrIndices::new(&BsrIndexArrays { stages, ..PATTERN }, &cpu())
}

#[test]
fn stages_are_what_kernels_wait_for() {
    let indices = with_stages(&stage(), &[0, 1], 32).unwrap().copy_to(&cpu()).unwrap();
    assert!(indices.has_stages_of(32) && !indices.has_stages_of(16));
    assert_eq!([0, 1].map(|at| indices.longest_from(at, true)), [1, 0]);
    let refused = |said: &str, change: &dyn Fn(&mut [i32; 64])| {
        let mut stage = stage();
        change(&mut stage);
        let error = with_stages(&stage, &[0, 1], 32).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    };
    refused("0 columns, expected 1 to 4", &|stage| stage[48] = 0);
    refused("5 columns, expected 1 to 4", &|stage| stage[48] = 5);
    refused("11 blocks, the limit is 10", &|stage| stage[49] = 11);
    refused("2 blocks are counted, its rows have 3", &|stage| stage[49] = 2);
    refused("-3 blocks are counted, its rows have 3", &|stage| stage[49] = -3);
    refused("column 4, expected less than 4", &|stage| stage[36] = 4);
    refused("column -1, expected less than 4", &|stage| stage[34] = -1);
    refused("row 0 has -1 for its blocks, a negative number", &|stage| stage[1] = -1);
    refused("blocks of row 1 begin at 3, expected 2", &|stage| stage[3] = 0b010 | 3 << 8);
    refused("blocks of row 1 begin at 8388607, expected 2", &|stage| {
        stage[3] = 0b010 | 0x7F_FFFF << 8
    });
    refused("row 0 has columns 0b1001, there are 8 rows", &|stage| stage[1] = 0b1001);
    refused("row 8 has columns 0b1, there are 8 rows", &|stage| stage[2 * 8 + 1] = 1 | 3 << 8);
    refused("row 0 has 2 blocks from 2 on, there are 3", &|stage| stage[0] = 2);
    refused("row 1 has 1 blocks from -1 on, there are 3", &|stage| stage[2] = -1);
    // Numbers that nobody reads may be any.
    let mut padded = stage();
    (padded[38], padded[50], padded[33]) = (-7, 1 << 30, 9);
    with_stages(&padded, &[0, 1], 32).unwrap();
    for (stages, group_stages, block_size, said) in [
        (&stage()[..], &[0, 1][..], 64, "stages are of blocks of 64, expected 16 or 32"),
        (&stage(), &[0, 2], 32, "group_stages does not ascend from 0 to 1: group_stages[1] is 2"),
        (&stage(), &[0, 1, 1], 32, "group_stages has 3 entries, expected 2"),
        (&stage()[..62], &[0, 1], 32, "stages has 62 entries, expected 0"),
    ] {
        let error = with_stages(stages, group_stages, block_size).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    }
}

/// Two heads of two rows and three columns.
const LISTS: BlockListArrays<'static> = BlockListArrays {
    groups: &[1, 2],
    rows: 2,
    cols: 3,
    row_ptr: &[0, 1, 3, 3, 4, 4],
    col_idx: &[2, 0, 1, 1],
    row_order: &[1, 0, 0, 1],
    cu_rows: None,
};

#[test]
fn lists_that_kernels_may_follow() {
    let lists = BlockLists::new(&LISTS, &cpu()).unwrap().copy_to(&cpu()).unwrap();
    assert_eq!(lists.row_ptr().shape(), [1, 2, 3]);
    assert!(lists.has_columns_below(3) && !lists.has_columns_below(2) && !lists.may_be_filled(3));
    // Sequences of one and of two rows.
    let packed = BlockListArrays {
        groups: &[1],
        rows: 3,
        row_ptr: &[0, 1, 3, 4],
        row_order: &[0, 1, 0],
        cu_rows: Some(&[0, 1, 3]),
        ..LISTS
    };
    assert_eq!(BlockLists::new(&packed, &cpu()).unwrap().row_order().shape(), [1, 3]);
    let other_order = BlockListArrays { row_order: &[0, 1, 2], ..packed };
    assert!(BlockLists::new(&other_order, &cpu()).is_err());
}

#[test]
fn lists_that_kernels_may_not_follow() {
    let refused = |said: &str, arrays: BlockListArrays<'_>| {
        let error = BlockLists::new(&arrays, &cpu()).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    };
    refused("row_ptr does not ascend", BlockListArrays { row_ptr: &[0, 1, 3, 2, 4, 4], ..LISTS });
    refused("row_ptr does not ascend", BlockListArrays { row_ptr: &[0, 1, 3, 3, 4, 5], ..LISTS });
    refused("col_idx[0] is 3", BlockListArrays { col_idx: &[3, 0, 1, 1], ..LISTS });
    refused("is not a permutation", BlockListArrays { row_order: &[1, 1, 0, 1], ..LISTS });
    refused("row_order has 3 entries", BlockListArrays { row_order: &[1, 0, 0], ..LISTS });
    refused("groups are [2], expected [batch, heads]", BlockListArrays { groups: &[2], ..LISTS });
    let packed = BlockListArrays { groups: &[2], cu_rows: Some(&[0, 1, 2]), ..LISTS };
    refused("is not a permutation", packed);
    refused("cu_rows does not ascend", BlockListArrays { cu_rows: Some(&[0, 2, 1]), ..packed });
    refused("cu_rows does not ascend", BlockListArrays { cu_rows: Some(&[0, 1]), ..packed });
    let shape = BlockLists::new(&BlockListArrays { row_ptr: &[0, 4], ..LISTS }, &cpu());
    assert!(matches!(shape, Err(Error::OutOfBounds { .. })));
}

#[test]
fn bits_that_kernels_may_follow() {
    let lists = || BlockLists::new(&LISTS, &cpu()).unwrap();
    let words: Vec<u32> = (0..4 * 128).map(|word| u32::MAX - word).collect();
    let of = |tiles, bits: &[i32], words: &[u32]| lists().with_bits(tiles, bits, words, &cpu());
    let lists = of(2, &[2, -1, 0, 2], &words).unwrap().copy_to(&cpu()).unwrap();
    let [block_bits, found] = lists.bits().unwrap();
    assert_eq!(block_bits.to_vec::<i32>(&cpu()).unwrap(), [2, -1, 0, 2]);
    assert_eq!(found.shape(), [4, 128]);
    assert!(found.to_vec::<i32>(&cpu()).unwrap().iter().zip(words).all(|(&a, b)| a as u32 == b));
    assert!(of(1, &[-1; 4], &[]).is_ok());
    for (tiles, bits, words, said) in [
        (2, &[2, -1, 0][..], 512, "block_bits has 3 entries, expected 4"),
        (2, &[2, -1, 0, 2], 511, "511 words of bits, expected a multiple of 128 for each of the 2"),
        (2, &[0, -1, 0, 0], 384, "384 words of bits"),
        (0, &[-1; 4], 512, "the 0 tiles"),
        (2, &[0, -1, 0, 3], 512, "block_bits[3] is 3, neither -1 nor a multiple of the 2 tiles"),
        (2, &[0, -1, 4, 0], 512, "block_bits[2] is 4, not from -1 to 4 - 1"),
        (2, &[0, -2, 4, 0], 512, "block_bits[1] is -2, not from -1 to 4 - 1"),
    ] {
        let error = of(tiles, bits, &vec![0; words]).unwrap_err().to_string();
        assert!(error.contains(said), "{error} does not say {said}");
    }
    let filled = BlockLists::with_capacity([1, 1], 2, 2, 4, &cpu()).unwrap();
    assert!(filled.with_bits(1, &[-1; 4], &[], &cpu()).is_err());
}

#[test]
fn lists_that_a_kernel_fills_start_without_columns() {
    let lists = BlockLists::with_capacity([2, 1], 3, 33, 10, &cpu()).unwrap();
    assert_eq!(lists.row_ptr().to_vec::<i32>(&cpu()).unwrap(), [0; 8]);
    assert_eq!(lists.row_order().to_vec::<i32>(&cpu()).unwrap(), [2, 1, 0, 2, 1, 0]);
    // Columns are promised in whole words of 32 bits.
    assert!(lists.may_be_filled(33) && lists.may_be_filled(64));
    assert!(!lists.may_be_filled(32) && !lists.may_be_filled(65));
    assert!(lists.has_columns_below(33) && !lists.has_columns_below(32));
}
