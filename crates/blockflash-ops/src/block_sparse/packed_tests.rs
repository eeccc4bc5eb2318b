use super::super::fixtures::{geometries, random_mask, token_masks};
use super::super::{BlockChoice, BlockMaskBuffer, BlockSource};
use super::*;
use crate::{Align, Mask};
use blockflash_safe::View;
use blockflash_sys::DType;

fn geometry(seqlen_q: usize, seqlen_kv: usize) -> BlockGeometry {
    BlockGeometry::new(seqlen_q, seqlen_kv, 128, 64).unwrap()
}

/// Sequences with 2 × 3, 0 × 1 and 1 × 2 blocks; the first has one list for both heads.
fn masks() -> [BlockMask; 3] {
    let of = |geometry, heads, row_ptr: &[i32], col_idx: &[i32]| {
        BlockMask::from_parts(geometry, 1, heads, row_ptr, col_idx).unwrap()
    };
    [
        of(geometry(200, 150), 1, &[0, 1, 4], &[2, 0, 1, 2]),
        of(geometry(0, 10), 2, &[0, 0], &[]),
        of(geometry(100, 128), 2, &[0, 2, 2, 3], &[0, 1, 1]),
    ]
}

fn pack(masks: &[BlockMask]) -> Result<BlockMask> {
    BlockMask::packed(&masks.iter().collect::<Vec<_>>())
}

fn numbers(tensor: &Tensor) -> (Vec<usize>, Vec<i32>) {
    (tensor.shape().to_vec(), tensor.view().as_slice().unwrap().to_vec())
}

/// One mask per geometry that has such blocks, with 1 head or `heads`.
fn random_masks(block_q: usize, block_kv: usize, heads: usize, seed: u64) -> Vec<BlockMask> {
    let of_size = |g: &BlockGeometry| (g.block_q(), g.block_kv()) == (block_q, block_kv);
    let with_heads =
        |(at, g)| random_mask(g, 1, if at % 3 == 1 { 1 } else { heads }, seed + at as u64);
    geometries().into_iter().filter(of_size).enumerate().map(with_heads).collect()
}

#[test]
fn sequences_follow_one_another() {
    let packed = pack(&masks()).unwrap();
    assert_eq!((packed.batch(), packed.heads(), packed.geometry()), (3, 2, geometry(200, 150)));
    assert_eq!(
        packed.sequences().unwrap(),
        [geometry(200, 150), geometry(0, 10), geometry(100, 128)]
    );
    assert_eq!(numbers(packed.cu_rows().unwrap()), (vec![4], vec![0, 2, 2, 3]));
    assert_eq!(numbers(packed.row_ptr()), (vec![2, 4], vec![0, 1, 4, 6, 6, 7, 10, 11]));
    assert_eq!(numbers(packed.col_idx()), (vec![11], vec![2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 1]));
    assert_eq!(numbers(packed.row_order()), (vec![2, 3], vec![1, 0, 0, 1, 0, 0]));
    assert_eq!((packed.nnz(), packed.density()), (11, 11.0 / (2.0 * (6.0 + 0.0 + 2.0))));
    assert_eq!(packed.imbalance().unwrap(), 3.0 * 6.0 / 11.0);
    let row = |batch, head, row| packed.row(batch, head, row).unwrap().collect::<Vec<_>>();
    assert_eq!(
        [row(0, 0, 1), row(0, 1, 0), row(2, 0, 0), row(2, 1, 0)],
        [vec![0, 1, 2], vec![2], vec![0, 1], vec![1]]
    );
    let problem = |batch, head, row| packed.row(batch, head, row).err().unwrap().to_string();
    assert_eq!(problem(3, 0, 0), "invalid block mask: batch is 3, but there are 3");
    assert_eq!(problem(1, 0, 0), "invalid block mask: row is 0, but there are 0");
    assert_eq!(problem(2, 1, 1), "invalid block mask: row is 1, but there are 1");
    let plain = &masks()[0];
    assert!(plain.sequences().is_none() && plain.cu_rows().is_none());
}

#[test]
fn every_row_is_that_of_its_sequence() {
    let stream = Device::cpu().stream().unwrap();
    for (block_q, block_kv) in [(64, 64), (128, 64), (64, 128)] {
        let masks = random_masks(block_q, block_kv, 3, 5);
        let packed = pack(&masks).unwrap().to(&stream).unwrap();
        let blocks = packed.to_bool().unwrap();
        let (mut visited, mut pairs) = (0, 0);
        for (at, mask) in masks.iter().enumerate() {
            let entry = packed.entry(at).unwrap();
            assert_eq!((entry.geometry(), entry.batch(), entry.heads()), (mask.geometry(), 1, 3));
            for (head, row) in (0..3).flat_map(|head| (0..mask.rows()).map(move |row| (head, row)))
            {
                let columns: Vec<usize> = mask.row(0, head % mask.heads(), row).unwrap().collect();
                assert_eq!(packed.row(at, head, row).unwrap().collect::<Vec<_>>(), columns);
                assert_eq!(entry.row(0, head, row).unwrap().collect::<Vec<_>>(), columns);
                let first = ((at * 3 + head) * packed.rows() + row) * packed.cols();
                columns.iter().for_each(|col| assert!(blocks[first + col]));
                visited += columns.len();
            }
            pairs += mask.visited_pairs(Mask::causal()).unwrap() * (3 / mask.heads()) as u64;
        }
        assert_eq!(packed.nnz(), visited);
        assert_eq!(blocks.iter().filter(|&&block| block).count(), visited);
        assert_eq!(packed.visited_pairs(Mask::causal()).unwrap(), pairs);
    }
    assert!(matches!(pack(&masks()).unwrap().entry(3), Err(Error::InvalidBlockMask(_))));
    // Also of a mask that is not packed.
    let dense = random_mask(geometry(300, 300), 2, 2, 1);
    let half = |mask: &BlockMask| mask.to_bool().unwrap();
    let [a, b] = [0, 1].map(|at| half(&dense.entry(at).unwrap()));
    assert_eq!(half(&dense), [a, b].concat());
}

#[test]
fn what_does_not_fit_together() {
    let problem = |masks: &[BlockMask]| pack(masks).unwrap_err().to_string();
    let expect = |masks: &[BlockMask], what: &str| {
        assert_eq!(problem(masks), format!("invalid block mask: {what}"))
    };
    expect(&[], "there are 0 masks to pack, expected at least 1");
    let g = geometry(100, 100);
    let other = BlockGeometry::new(100, 100, 64, 64).unwrap();
    expect(
        &[random_mask(g, 1, 1, 0), random_mask(other, 1, 1, 0)],
        "mask 1 has blocks of 64 × 64, but the first one has 128 × 64",
    );
    expect(&[random_mask(g, 2, 1, 0)], "mask 0 has 2 batch entries, not 1");
    expect(
        &[random_mask(g, 1, 2, 0), random_mask(g, 1, 3, 0)],
        "mask 0 has 2 heads, neither 1 nor 3",
    );
    expect(&[random_mask(g, 1, 1, 0), pack(&masks()).unwrap()], "mask 1 is packed already");
}

#[test]
fn too_many_rows() {
    // 2^24 rows.
    let long =
        BlockMask::global(BlockGeometry::new(1 << 30, 1, 64, 64).unwrap(), &[], &[]).unwrap();
    let result = BlockMask::packed(&[&long; 128]);
    assert!(matches!(result, Err(Error::TooLarge { what: "rows", .. })));
    let heads =
        BlockMask::from_bool(BlockGeometry::new(0, 1, 64, 64).unwrap(), 1, 256, &[]).unwrap();
    let result = BlockMask::packed(&[&long, &heads]);
    assert!(matches!(result, Err(Error::TooLarge { what: "heads * (rows + 1)", .. })));
}

/// What is done to a packed mask is done to each of its sequences.
#[test]
fn sequences_are_combined_one_by_one() {
    let same = |a: &BlockMask, b: &BlockMask| {
        let arrays = |m: &BlockMask| [m.row_ptr(), m.col_idx(), m.row_order()].map(numbers);
        assert_eq!(arrays(a), arrays(b));
        assert_eq!(a.sequences(), b.sequences());
    };
    let (masks, others) = (random_masks(64, 64, 2, 3), random_masks(64, 64, 2, 77));
    let (packed, other) = (pack(&masks).unwrap(), pack(&others).unwrap());
    let each = |change: &dyn Fn(usize) -> Result<BlockMask>| {
        pack(&(0..masks.len()).map(|at| change(at).unwrap()).collect::<Vec<_>>()).unwrap()
    };
    for tokens in token_masks() {
        same(
            &packed.intersect_mask(tokens).unwrap(),
            &each(&|at| masks[at].intersect_mask(tokens)),
        );
    }
    same(&packed.union(&other).unwrap(), &each(&|at| masks[at].union(&others[at])));
    same(&packed.intersection(&other).unwrap(), &each(&|at| masks[at].intersection(&others[at])));
    same(&packed.transpose().unwrap(), &each(&|at| masks[at].transpose()));
    let wide = pack(&random_masks(128, 64, 2, 9)).unwrap();
    let smaller = pack(
        &random_masks(128, 64, 2, 9).iter().map(|m| m.expand(2, 1).unwrap()).collect::<Vec<_>>(),
    );
    same(&wide.expand(2, 1).unwrap(), &smaller.unwrap());
    // With other sequences, or with a mask that is not packed.
    let fewer = pack(&masks[1..]).unwrap();
    for (other, found) in [(&fewer, masks.len() - 1), (&wide, 2), (&masks[0], 0)] {
        let problem = packed.union(other).unwrap_err().to_string();
        let said = "invalid block mask: they are not both packed from the same sequences: sequence";
        assert!(problem.starts_with(said), "{problem}");
        assert!(problem.contains(&format!("that of {found} is ")), "{problem}");
    }
    assert!(matches!(
        masks[0].intersection(&pack(&masks[..1]).unwrap()),
        Err(Error::InvalidBlockMask(_))
    ));
}

/// Masks that are built where the data is are not packed, nor is what they are joined with.
#[test]
fn buffers_are_not_packed() {
    let stream = Device::cpu().stream().unwrap();
    let g = geometry(100, 100);
    let always = pack(&[BlockMask::window(g, Some(0), Some(0), Align::TopLeft).unwrap()]).unwrap();
    let mut buffer = BlockMaskBuffer::new(g, 1, 1, 2, &stream).unwrap();
    let blocks = View::from_slice(&[1u8, 0], &[1, 1, 1, 2]).unwrap();
    assert_eq!(blocks.dtype(), DType::U8);
    let choice =
        BlockChoice { always: Some(&always), ..BlockChoice::new(BlockSource::Bool(blocks)) };
    let problem = buffer.build(&choice, &stream).unwrap_err().to_string();
    let said = "`always` is packed from 1 sequences, expected a mask that is not packed";
    assert_eq!(problem, format!("invalid block mask: {said}"));
}

#[test]
fn lengths_are_those_of_the_sequences() {
    let packed = pack(&masks()).unwrap();
    packed.check_lengths("q", &[0, 200, 200, 300], BlockGeometry::seqlen_q).unwrap();
    packed.check_lengths("kv", &[0, 150, 160, 288], BlockGeometry::seqlen_kv).unwrap();
    let problem = packed
        .check_lengths("kv", &[0, 150, 160, 287], BlockGeometry::seqlen_kv)
        .unwrap_err()
        .to_string();
    assert_eq!(
        problem,
        "cu_seqlens.kv[3] is 287: sequence 2 has 127 rows, but 128 in the block mask"
    );
}
