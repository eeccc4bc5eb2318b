use super::*;

const TILE: BsrMatmulHopper = BsrMatmulHopper {
    filled: false,
    dtype: DType::F16,
    block_size: 128,
    block_rows: 1,
    block_n: 256,
    stages: 4,
    cluster: 1,
    blocks_per_multiprocessor: 1,
    a_transposed: false,
    b_column_major: false,
};

/// Memory as on a GPU.
fn workspace() -> BsrWorkspace {
    let stream = Device::cpu().stream().unwrap();
    let memory = Tensor::empty(&stream, DType::U8, &[BsrWorkspace::BYTES]).unwrap();
    let workspace = BsrWorkspace::from_tensor(memory).unwrap();
    let room = (workspace.memory.sums(), workspace.memory.words());
    assert_eq!(room, (8 << 20, 8 << 10));
    workspace
}

/// Parts of the tile at each position, as a kernel counts them, and the positions that each part
/// number has a place for.
fn counted(lengths: &[i32], (steps, begin): (i32, [i32; MOST_PARTS])) -> (Vec<usize>, Vec<usize>) {
    let parts = |length: i32| (((length - 1) / steps + 1) as usize).min(MOST_PARTS);
    let places = (1..MOST_PARTS).map(|part| (begin[part - 1] - begin[part]) as usize).collect();
    (lengths.iter().map(|&length| parts(length)).collect(), places)
}

#[test]
fn every_part_has_a_place() {
    let cases: [&[i32]; 6] = [
        &[64, 20, 13, 13, 12, 12, 1, 0, 0],
        &[100],
        &[16; 40],
        // Not by length: what shares B comes first.
        &[30, 9, 31, 30, 8, 8, 2, 9],
        &[8, 8, 8, 1],
        &[1 << 30, 5, 0],
    ];
    for lengths in cases {
        let longest = *lengths.iter().max().unwrap();
        for most in 2..=MOST_PARTS {
            let cut = Lengths::new(lengths.to_vec()).cut(most).unwrap();
            let (parts, places) = counted(lengths, cut);
            assert_eq!(cut.1[MOST_PARTS - 1], 0);
            assert!(parts.iter().all(|&parts| parts <= most), "{lengths:?} {most}");
            // The longest has as many as asked for unless its steps cannot be cut so.
            assert_eq!(*parts.iter().max().unwrap(), (longest as usize).div_ceil(cut.0 as usize));
            for (position, &parts) in parts.iter().enumerate() {
                for part in 1..parts {
                    assert!(
                        position < places[part - 1],
                        "part {part} of {position} in {lengths:?}"
                    );
                }
            }
            // The last place of each number is needed, or there is none.
            for (part, &places) in places.iter().enumerate().filter(|(_, places)| **places > 0) {
                assert!(
                    parts[places - 1] > part + 1,
                    "{lengths:?} {most}: {places} places of {}",
                    part + 1
                );
            }
        }
    }
}

#[test]
fn short_tiles_are_not_cut() {
    assert!(Lengths::new(vec![]).cut(2).is_none());
    assert!(Lengths::new(vec![0, 0]).cut(2).is_none());
    assert!(Lengths::new(vec![3, 1]).cut(4).is_none());
    assert_eq!((Lengths::default().longest(), Lengths::new(vec![2, 7, 3]).longest()), (0, 7));
}

#[test]
fn there_are_as_many_parts_as_there_is_room_for() {
    let workspace = workspace();
    let lengths = Lengths::new(vec![64; 64]);
    let parts = |tiles_n, most| {
        workspace.parts(&TILE, &lengths, tiles_n, most).map(|parts| (parts.steps, parts.begin[0]))
    };
    // 256 tiles of 128 KiB.
    assert_eq!(
        [1, 2, 4, 8, 9].map(|most| parts(1, most)),
        [None, Some((32, 64)), Some((16, 192)), Some((13, 256)), Some((13, 256)),]
    );
    assert_eq!(
        [2, 3, 4, 5].map(|tiles_n| parts(tiles_n, 8)),
        [Some((22, 128)), Some((32, 64)), Some((32, 64)), None]
    );
    // A quarter of the memory, and too little for a tile.
    let lent = |bytes: usize| {
        let memory = Tensor::empty(&Device::cpu().stream().unwrap(), DType::F16, &[bytes / 2]);
        let workspace = BsrWorkspace::from_tensor(memory.unwrap()).unwrap();
        workspace.parts(&TILE, &lengths, 1, 8).map(|parts| (parts.steps, parts.begin[0]))
    };
    assert_eq!(
        [BsrWorkspace::BYTES, BsrWorkspace::BYTES / 4, 1 << 10, 0].map(lent),
        [Some((13, 256)), Some((32, 64)), None, None]
    );
    let pairs = BsrMatmulHopper { block_size: 64, block_rows: 2, ..TILE };
    assert!(
        workspace.parts(&pairs, &lengths, 1, 8).is_none(),
        "two block rows are cut nowhere at once"
    );
    let short = Lengths::new(vec![1; 4]);
    assert!(workspace.parts(&TILE, &short, 1, 8).is_none());
    assert!(matches!(
        self::workspace().with_parts(9),
        Err(Error::TooLarge { what: "parts", value: 9, limit: 8 })
    ));
    let asked = self::workspace().with_parts(2).unwrap();
    assert_eq!(asked.parts(&TILE, &lengths, 1, 8).map(|parts| parts.steps), Some(32));
    let on_cpu = BsrWorkspace::new(&Device::cpu().stream().unwrap()).unwrap();
    assert!(on_cpu.parts(&TILE, &lengths, 1, 8).is_none(), "there is nothing to split for");
}
