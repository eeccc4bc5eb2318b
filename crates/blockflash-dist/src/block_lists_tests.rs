use super::*;
use crate::Scheme;
use crate::band::Band;
use crate::grid::Grid;
use blockflash_ops::Mask;

/// Rank 0 of two, with blocks 0 and 3 of four.
fn sizes(heads: usize) -> Sizes {
    let scheme = Scheme { heads, keys: 2 / heads };
    let shard = Shard::new(256, 2, 0).unwrap().in_blocks(64, 64).unwrap();
    let geometry = BlockGeometry::new(256, 256, 64, 64).unwrap();
    let (mask, band) = (Mask::Full, Band::of(Mask::Full, 256).unwrap());
    Sizes { grid: Grid { scheme, shard }, mask, band, geometry, batch: 1, heads: 1 }
}

/// What another rank sends is checked before it is used.
#[test]
fn messages_are_checked() {
    let read = |heads, message: &[i32]| {
        let sizes = sizes(heads);
        Visits::new(&sizes).read(&sizes, 1, message)
    };
    read(1, &[2, 0, 3]).unwrap();
    read(2, &[1, 2, 0]).unwrap();
    let bad: [(&[i32], &str); 9] = [
        (&[], "sends an end, expected lists of blocks that ascend below 4"),
        (&[-1], "a list of -1, with 0 numbers left"),
        (&[2, 0], "a list of 2, with 1 numbers left"),
        (&[2, 3, 0], "block 0 after 3"),
        (&[2, 3, 3], "block 3 after 3"),
        (&[1, 4], "block 4 after -1"),
        (&[1, -1], "block -1 after -1"),
        (&[i32::MAX], "a list of 2147483647, with 0 numbers left"),
        (&[0, 0], "sends 1 numbers after them, expected lists of blocks"),
    ];
    for (message, said) in bad {
        let error = read(1, message).unwrap_err();
        assert!(matches!(error, Error::Message { from: 1, .. }), "{message:?}: {error}");
        assert!(error.to_string().contains(said), "{message:?}: {error}");
    }
    let error = sizes(2).grid.scheme.check_heads(3, 4).unwrap_err().to_string();
    assert!(
        error.ends_with("there are 3 heads of q and 4 of k, expected multiples of 2"),
        "{error}"
    );
    assert!(read(2, &[1, 2]).is_err() && read(2, &[0, 0, 0]).is_err());
}

#[test]
fn columns_of_the_sequence_and_of_a_group() {
    let columns = Columns::of(&sizes(1).grid.shard, 64);
    let list = [0, 1, 2, 3];
    assert_eq!(columns.within(&list).collect::<Vec<_>>(), [0, 1]);
    assert!(columns.of_sequence(&list).eq(&[0, 3]));
    assert_eq!(columns.rows(&[0, 1]), vec![0..128; 1]);
}

/// Rank 1 has blocks 1 and 2 of the sequence. Its slot is behind that of rank 0, which has two
/// blocks of keys and two of values.
#[test]
fn columns_of_gathered_keys() {
    let sizes = sizes(1);
    let mut visits = Visits::new(&sizes);
    visits.read(&sizes, 0, &[3, 0, 1, 3, 1, 2]).unwrap();
    let together = visits.together(&sizes, 0, 1).unwrap().unwrap();
    let rows: Vec<Vec<usize>> =
        (0..2).map(|row| together.masks[0].row(0, 0, row).unwrap().collect()).collect();
    assert_eq!(rows, [[4], [5]]);
    // The last block of the sequence is not whole: other rows would be behind its keys.
    let shard = Shard::new(250, 2, 0).unwrap().in_blocks(64, 64).unwrap();
    let grid = Grid { shard, ..sizes.grid };
    let geometry = BlockGeometry::new(250, 250, 64, 64).unwrap();
    let sizes = Sizes { grid, geometry, ..sizes };
    assert!(visits.together(&sizes, 0, 1).unwrap().is_none());
}
