use super::super::{Attention, CuSeqlens, accepts, plan, select};
use super::*;
use crate::BlockGeometry;
use crate::fixtures::gpus;
use blockflash_safe::View;
use blockflash_sys::{DType, manifest};
use half::f16;

fn mask([seqlen_q, seqlen_kv]: [usize; 2], batch: usize, heads: usize) -> BlockMask {
    let geometry = BlockGeometry::new(seqlen_q, seqlen_kv, 64, 128).unwrap();
    let blocks = vec![true; batch * heads * geometry.rows() * geometry.cols()];
    BlockMask::from_bool(geometry, batch, heads, &blocks).unwrap()
}

/// Batch 2, 100 queries, 200 keys, 4 and 2 heads.
fn of(mask: &BlockMask) -> Result<AttentionProblem> {
    let (q, k) = (vec![f16::ONE; 2 * 100 * 4 * 8], vec![f16::ONE; 2 * 200 * 2 * 8]);
    let q = View::from_slice(&q, &[2, 100, 4, 8]).unwrap();
    let k = View::from_slice(&k, &[2, 200, 2, 8]).unwrap();
    Attention { block_mask: Some(mask), ..Attention::new(q, k, k) }.problem()
}

#[test]
fn masks_that_fit() {
    for (batch, heads) in [1, 2].into_iter().flat_map(|batch| [1, 2, 4].map(|heads| (batch, heads))) {
        let sizes = of(&mask([100, 200], batch, heads)).unwrap().block_mask.unwrap();
        let [batch, heads] = [batch, heads].map(|count| count as u32);
        let nnz = batch * heads * 4;
        assert_eq!(sizes, BlockMaskSizes { block_q: 64, block_kv: 128, batch, heads, nnz });
        let followed = [0, 1, 2, 3].map(|head| sizes.head(head, 4));
        assert_eq!(followed, [0, 1, 2, 3].map(|head| head * heads as usize / 4));
    }
}

#[test]
fn masks_that_do_not_fit() {
    for (seqlens, batch, heads) in [
        ([101, 200], 1, 1),
        ([100, 199], 1, 1),
        ([200, 100], 1, 1),
        ([100, 200], 3, 1),
        ([100, 200], 1, 3),
        ([100, 200], 1, 8),
    ] {
        match of(&mask(seqlens, batch, heads)) {
            Err(Error::Shape { what: "block_mask", found, .. }) => {
                assert_eq!(found, [batch, heads, seqlens[0], seqlens[1]]);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        of(&mask([100, 200], 3, 1)).unwrap_err().to_string(),
        "block_mask has shape [3, 1, 100, 200], expected [1 or 2, 1 or 2 or 4, 100, 200] in queries and keys"
    );
}

#[test]
fn variable_length_is_refused() {
    let (data, offsets) = (vec![f16::ONE; 100 * 8], [0i32, 100]);
    let rows = View::from_slice(&data, &[100, 1, 8]).unwrap();
    let offsets = View::from_slice(&offsets, &[2]).unwrap();
    let cu_seqlens = Some(CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: 100, max_seqlen_kv: 100 });
    let mask = mask([100, 100], 1, 1);
    let error = Attention { cu_seqlens, block_mask: Some(&mask), ..Attention::new(rows, rows, rows) }
        .problem()
        .unwrap_err();
    assert!(matches!(error, Error::Unsupported { op: "attention", .. }));
    assert_eq!(
        error.to_string(),
        "attention is not supported on cpu: block masks of variable-length batches"
    );
}

#[test]
fn no_kernel_takes_a_block_mask() {
    let dense = AttentionProblem::dense(DType::F16, [2, 100, 200], [4, 2], 64);
    let sizes = BlockMaskSizes { block_q: 64, block_kv: 128, batch: 1, heads: 1, nnz: 0 };
    let problem = AttentionProblem { block_mask: Some(sizes), ..dense };
    let refused = |result: Result<()>| match result {
        Err(Error::Unsupported { op: "attention", what, .. }) => {
            assert!(what.contains("block masks have no kernel yet"), "{what}");
        }
        other => panic!("{other:?}"),
    };
    for gpu in gpus() {
        select(&dense, &gpu).unwrap();
        refused(select(&problem, &gpu).map(drop));
        for row in manifest::all_rows().iter().filter(|row| row.attention_tile().is_some()) {
            refused(accepts(row, &problem, &gpu));
            let tile = row.attention_tile().unwrap();
            if tile.head_dim >= 64 {
                refused(plan(row, &problem, &gpu).map(drop));
            }
        }
    }
}
