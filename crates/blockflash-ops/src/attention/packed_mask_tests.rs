use super::super::{Attention, AttentionProblem, CuSeqlens, PackedRows, as_asked, plan};
use super::*;
use crate::fixtures::{gpu, values};
use crate::{BlockGeometry, Device, ElementTypes};
use blockflash_safe::View;
use blockflash_sys::DType;
use blockflash_sys::manifest;

/// Queries and keys of the sequences: tails, nothing on either side or both, several rows.
const LENGTHS: [[usize; 2]; 6] = [[100, 200], [0, 70], [320, 1], [0, 0], [65, 0], [1, 300]];

fn offsets(lengths: &[[usize; 2]], side: usize) -> Vec<i32> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length[side] as i32;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// A random mask of these sequences in blocks of 128 × 64.
fn mask(lengths: &[[usize; 2]], heads: usize) -> BlockMask {
    let of = |(at, &[q, kv]): (usize, &[usize; 2])| {
        let geometry = BlockGeometry::new(q, kv, 128, 64).unwrap();
        let blocks = values(heads * geometry.rows() * geometry.cols(), at as u64);
        let blocks: Vec<bool> = blocks.into_iter().map(|value| value > 0.0).collect();
        BlockMask::from_bool(geometry, 1, heads, &blocks).unwrap()
    };
    let masks: Vec<BlockMask> = lengths.iter().enumerate().map(of).collect();
    BlockMask::packed(&masks.iter().collect::<Vec<_>>()).unwrap()
}

/// Calls with the offsets of [`LENGTHS`], 4 and 2 heads; the longest sequences have these lengths.
fn call<T>(mask: &BlockMask, [max_q, max_kv]: [usize; 2], run: impl Fn(&Attention<'_>) -> T) -> T {
    let [q, kv] = [0, 1].map(|side| offsets(&LENGTHS, side));
    let [total_q, total_kv] = [&q, &kv].map(|offsets| *offsets.last().unwrap() as usize);
    let (q_data, k_data) = (values(total_q * 4 * 8, 1), values(total_kv * 2 * 8, 2));
    let rows_q = View::from_slice(&q_data, &[total_q, 4, 8]).unwrap();
    let rows_kv = View::from_slice(&k_data, &[total_kv, 2, 8]).unwrap();
    let [q, kv] = [&q, &kv].map(|offsets| View::from_slice(offsets, &[offsets.len()]).unwrap());
    let cu_seqlens = Some(CuSeqlens { q, kv, max_seqlen_q: max_q, max_seqlen_kv: max_kv });
    run(&Attention {
        cu_seqlens,
        block_mask: Some(mask),
        ..Attention::new(rows_q, rows_kv, rows_kv)
    })
}

#[test]
fn masks_that_fit() {
    for heads in [1, 2, 4] {
        for longest in [[320, 300], [1000, 1000]] {
            let problem = call(&mask(&LENGTHS, heads), longest, |call| call.problem()).unwrap();
            let sizes = BlockMaskSizes {
                block_q: 128,
                block_kv: 64,
                batch: 6,
                heads: heads as u32,
                packed_rows: Some(1 + 3 + 1 + 1),
                bits: false,
            };
            assert_eq!(problem.block_mask, Some(sizes));
        }
    }
}

#[test]
fn masks_that_do_not_fit() {
    let geometry = BlockGeometry::new(320, 300, 128, 64).unwrap();
    let problem = |mask: &BlockMask| match call(mask, [320, 300], |call| call.problem()) {
        Err(error @ Error::Shape { what: "block_mask", .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let expected = "expected [6, 1 or 2 or 4, up to 320, up to 300] in queries and keys";
    for (lengths, heads, found) in [
        (&LENGTHS[..5], 1, "[5, 1, 320, 200]"),
        (&[LENGTHS.as_slice(), &[[9, 9]]].concat(), 1, "[7, 1, 320, 300]"),
        (&[&LENGTHS[..5], &[[321, 300]]].concat(), 1, "[6, 1, 321, 300]"),
        (&[&LENGTHS[..5], &[[1, 301]]].concat(), 1, "[6, 1, 320, 301]"),
        (&LENGTHS, 3, "[6, 3, 320, 300]"),
    ] {
        assert_eq!(
            problem(&mask(lengths, heads)),
            format!("block_mask has shape {found}, {expected}")
        );
    }
    assert_eq!(
        problem(&BlockMask::full(geometry).unwrap()),
        "block_mask has shape [1, 1, 320, 300], expected a packed mask, as the batch is \
         variable-length"
    );
    let data = values(320 * 8, 1);
    let dense = View::from_slice(&data, &[1, 320, 1, 8]).unwrap();
    let packed = mask(&[[320, 320]], 1);
    let error = Attention { block_mask: Some(&packed), ..Attention::new(dense, dense, dense) }
        .problem()
        .unwrap_err();
    let expected = "expected a mask that is not packed, as the batch is not variable-length";
    assert_eq!(error.to_string(), format!("block_mask has shape [1, 1, 320, 320], {expected}"));
}

/// Lengths are compared where they can be read.
#[test]
fn sequences_are_those_of_the_mask() {
    let stream = Device::cpu().stream().unwrap();
    let both = |lengths: &[[usize; 2]]| {
        let mask = mask(lengths, 2);
        call(&mask, [400, 400], |call| {
            let (checked, run) =
                (call.check_cu_seqlens(&stream), call.forward(&stream).map(|_| ()));
            assert_eq!(format!("{checked:?}"), format!("{run:?}"));
            run
        })
    };
    both(&LENGTHS).unwrap();
    let mut other = LENGTHS;
    other[2] = [319, 1];
    let error = both(&other).unwrap_err();
    assert!(matches!(error, Error::InvalidCuSeqlens { which: "q", index: 3, value: 420, .. }));
    assert!(
        error.to_string().ends_with("sequence 2 has 320 rows, but 319 in the block mask"),
        "{error}"
    );
    other = LENGTHS;
    other[4] = [65, 64];
    let error = both(&other).unwrap_err();
    assert!(matches!(error, Error::InvalidCuSeqlens { which: "kv", index: 5, .. }), "{error}");
}

/// What kernels do with the parameters and arrays (`block_walk.cuh`): every tile of queries of
/// every sequence is taken once, longer block rows first, and has the columns of its row.
#[test]
fn kernels_find_every_tile_and_its_columns() {
    let h200 = gpu(9, 0);
    let (max_q, heads_q) = (700, 4);
    let read = |tensor: &blockflash_safe::Tensor| tensor.view().as_slice::<i32>().unwrap().to_vec();
    for (heads, tile_q) in
        [1, 2, 4].into_iter().flat_map(|heads| [64, 128].map(|tile| (heads, tile)))
    {
        let packed = mask(&LENGTHS, heads);
        let problem = call(&packed, [max_q, 300], |call| call.problem()).unwrap();
        let fits = |kernel: &&manifest::Kernel| {
            kernel.attention_tile().is_some_and(|tile| {
                let sizes = (tile.types.q, tile.block_q, tile.block_kv);
                !tile.terms && sizes == (DType::F16, tile_q, 64)
            })
        };
        let kernel = manifest::kernels().iter().find(fits).unwrap();
        let types = ElementTypes::all(DType::F16);
        let plan = plan(kernel, &AttentionProblem { types, ..problem }, &h200).unwrap();
        let [block_q, _] = plan.plan.scalars.blocks;
        // As the launch writes them from the lists.
        let (groups_per_batch, heads_per_group) = (0, heads_q / heads as i32);
        let [row_ptr, col_idx, row_order, cu_rows] =
            [packed.row_ptr(), packed.col_idx(), packed.row_order(), packed.cu_rows().unwrap()]
                .map(read);
        let rows_of_all = *cu_rows.last().unwrap();

        let tiles_per_row = block_q / tile_q as i32;
        // The grid of portable kernels is for the longest sequence; Hopper kernels count the tiles
        // of each sequence.
        let tiles = (max_q as i32 + block_q - 1) / block_q * tiles_per_row;
        for (entry, head) in (0..6).flat_map(|entry| (0..heads_q).map(move |head| (entry, head))) {
            let (first, rows) = (cu_rows[entry], cu_rows[entry + 1] - cu_rows[entry]);
            let group = entry as i32 * groups_per_batch + head / heads_per_group;
            let mut lengths = Vec::new();
            let mut taken: Vec<i32> = (0..tiles)
                .map(|turn| {
                    let place = turn / tiles_per_row;
                    if place >= rows {
                        return turn;
                    }
                    let row = row_order[(group * rows_of_all + first + place) as usize];
                    let at = (group * (rows_of_all + 1) + first + row) as usize;
                    let columns = &col_idx[row_ptr[at] as usize..row_ptr[at + 1] as usize];
                    let expected =
                        packed.row(entry, head as usize * heads / 4, row as usize).unwrap();
                    assert!(
                        expected.eq(columns.iter().map(|&col| col as usize)),
                        "{entry} {head} {row}"
                    );
                    lengths.push(columns.len());
                    (row + 1) * tiles_per_row - 1 - turn % tiles_per_row
                })
                .collect();
            assert!(lengths.is_sorted_by(|a, b| a >= b));
            taken.sort_unstable();
            assert_eq!(taken, (0..tiles).collect::<Vec<_>>());
            // Those of the rows that are there hold all queries.
            assert!(rows * block_q >= LENGTHS[entry][0] as i32);
        }
    }
}

#[test]
fn plans_say_how_the_mask_is_read() {
    let rows = PackedRows { total_q: 486, total_kv: 571 };
    let sizes = BlockMaskSizes {
        block_q: 256,
        block_kv: 256,
        batch: 6,
        heads: 2,
        packed_rows: Some(8),
        bits: false,
    };
    let dense = AttentionProblem::dense(DType::F16, [6, 300, 300], [8, 2], 64);
    let problem = AttentionProblem { packed: Some(rows), ..dense };
    for kernel in manifest::kernels() {
        let Some(tile) = kernel
            .attention_tile()
            .filter(|tile| tile.head_dims.qk >= 64 && 256 % tile.block_q == 0 && !tile.terms)
        else {
            continue;
        };
        if 256 % tile.block_kv != 0 || !tile.block_masks {
            continue;
        }
        let sizes = BlockMaskSizes { bits: tile.terms, ..sizes };
        let problem = AttentionProblem { types: tile.types, block_mask: Some(sizes), ..problem };
        let plan = plan(kernel, &as_asked(problem, &tile), &gpu(9, 0)).unwrap();
        assert_eq!(plan.plan.scalars.blocks, [256; 2]);
        // As many tiles as if all sequences were the longest: two rows, for 8 heads of 6 sequences.
        let tiles = 2 * (256 / tile.block_q) * 8 * 6;
        let family = kernel.family();
        let stay = match family.is_persistent() {
            true => 108 * family.blocks_per_multiprocessor(),
            false => u32::MAX,
        };
        assert_eq!(plan.config.grid, [tiles.min(stay), 1, 1]);
    }
}
