use super::{AttentionDecodeOperands, AttentionDecodeScalars, KvCacheViews, Launch};
use crate::launch::attention_fixtures::PLAIN_SCORES;
use crate::launch::checked::zeros;
use crate::{DType, Device, ScoreTerms, Tensor, View};
use blockflash_sys::HeadDims;
use blockflash_sys::manifest::{AttentionLatent, kernels};

const SCALARS: AttentionDecodeScalars = AttentionDecodeScalars {
    scores: PLAIN_SCORES,
    longest: 0,
    most_queries: 1,
    splits: 1,
    chunk_min: 64,
    chunk_max: 4096,
    run_log2: 0,
    run: 1,
    even_ctas: 0,
    even_items: 0,
};

fn columns(of: &Tensor, range: std::ops::Range<usize>) -> View<'_> {
    of.view().slice(3, range).unwrap()
}

/// The values are the first columns of the keys, as many as the tile has, and nothing else.
#[test]
fn values_are_the_first_columns_of_the_keys() {
    let stream = Device::cpu().stream().unwrap();
    let rows = |rows, width| Tensor::zeros(&stream, DType::BF16, &[1, rows, 1, width]).unwrap();
    let (q, keys, other) = (rows(1, 576), rows(64, 576), rows(64, 576));
    let of_mla = |tile: &AttentionLatent| {
        tile.types.q == DType::BF16 && tile.head_dims == HeadDims { qk: 576, v: 512 }
    };
    let tile = kernels().iter().filter_map(AttentionLatent::of).find(of_mla).unwrap();
    let fit = |[of_q, of_k]: [usize; 2], v: View<'_>| {
        let of_v = v.shape()[3];
        let mut o = rows(1, of_v);
        let operands = AttentionDecodeOperands {
            q: Some(columns(&q, 0..of_q)),
            cache: KvCacheViews {
                k: columns(&keys, 0..of_k),
                v,
                block_table: None,
                seqused: None,
                scales: [None; 2],
            },
            o: o.view_mut(),
            lse: None,
            sink: None,
            cu_seqlens_q: None,
            pages: None,
            terms: ScoreTerms::default(),
            tail_mask: None,
            workspace: None,
        };
        tile.fit(&SCALARS, &operands, &mut zeros::<AttentionLatent>())
    };
    assert_eq!(fit([576, 576], columns(&keys, 0..512)), Ok(1));
    for (widths, v, reason) in [
        ([576, 576], columns(&other, 0..512), "v does not hold the first columns of k"),
        ([576, 576], columns(&keys, 64..576), "v does not hold the first columns of k"),
        ([576, 576], columns(&keys, 0..504), "576v504, expected exactly 576v512"),
        ([512, 512], columns(&keys, 0..512), "512, expected exactly 576v512"),
    ] {
        let found = fit(widths, v).unwrap_err();
        assert!(found.contains(reason), "{found}");
    }
}
