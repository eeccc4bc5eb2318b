//! Caches whose values are the first columns of their keys, against those with copies of them.

use super::*;
use crate::attention::Align;
use crate::fixtures::{cpu, f32s, rounded, values, widened};

/// Pages of 4 slots, a table with garbage, and lengths, which count as 5, 12, 0 and 12.
const PAGES: usize = 7;
const TABLE: [i32; 12] = [3, 0, -1, 6, 2, 1, i32::MAX, i32::MIN, 9, 1, 4, 5];
const LENGTHS: [i32; 4] = [5, 12, -3, i32::MAX];

fn ints(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Rows of a cache in which slots that no length covers are NaN, and copies of their columns.
fn rows(dtype: DType, [pages, slots, heads, qk]: [usize; 4], v: usize) -> [Tensor; 2] {
    let mut all = values(pages * slots * heads * qk, 5);
    // Slots 1 to 3 of page 0 are behind the 5 keys of sequence 0; no other sequence has them.
    all[heads * qk..4 * heads * qk].fill(f32::NAN);
    let copied: Vec<f32> = all.chunks_exact(qk).flat_map(|row| row[..v].to_vec()).collect();
    let shape = [pages, slots, heads];
    [(all, qk), (copied, v)]
        .map(|(values, width)| rounded(dtype, &values, &[&shape[..], &[width]].concat()))
}

fn same(output: &AttentionOutput, expected: &AttentionOutput, what: &str) {
    for (found, expected) in [(&output.o, &expected.o), (&output.lse, &expected.lse)] {
        assert_eq!(found.shape(), expected.shape(), "{what}");
        assert_eq!(widened(found), widened(expected), "{what}");
    }
    assert!(widened(&output.o).iter().all(|x| x.is_finite()), "{what}");
}

#[test]
fn values_in_the_keys_are_as_good_as_copies() {
    let (table, lengths) = (ints(&TABLE, &[4, 3]), ints(&LENGTHS, &[4]));
    let offsets = ints(&[0, 2, 2, 5, 6], &[5]);
    for (dtype, [heads, qk, v]) in [
        (DType::F32, [1, 36, 32]),
        (DType::BF16, [1, 576, 512]),
        (DType::F16, [1, 512, 512]),
        (DType::F32, [2, 9, 1]),
        (DType::BF16, [2, 7, 7]),
    ] {
        let [k, copied] = rows(dtype, [PAGES, 4, heads, qk], v);
        let window = Mask::Window { left: Some(2), right: Some(0), align: Align::BottomRight };
        for (queries, mask) in
            [(1, Mask::Full), (3, Mask::causal()), (8, Mask::causal()), (4, window)]
        {
            let q = rounded(dtype, &values(4 * queries * 16 * qk, 6), &[4, queries, 16, qk]);
            let decode = AttentionDecode { scores: mask.into(), ..AttentionDecode::new(q.view()) };
            let paged = |cache| KvCache {
                block_table: Some(table.view()),
                seqused_kv: Some(lengths.view()),
                ..cache
            };
            let of = |cache| decode.forward(paged(cache), &cpu()).unwrap();
            let latent = KvCache::latent(k.view(), v).unwrap();
            let what = format!("{dtype} {qk}/{v}, {queries} queries");
            assert!(decode.problem(&paged(latent)).unwrap().cache.shared, "{what}");
            same(&of(latent), &of(KvCache::new(k.view(), copied.view())), &what);
        }
        let q = rounded(dtype, &values(6 * 16 * qk, 7), &[6, 16, qk]);
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 3 });
        let scores = Mask::causal().into();
        let decode = AttentionDecode { packed, scores, ..AttentionDecode::new(q.view()) };
        let of = |cache| {
            let (block_table, seqused_kv) = (Some(table.view()), Some(lengths.view()));
            decode.forward(KvCache { block_table, seqused_kv, ..cache }, &cpu()).unwrap()
        };
        let latent = KvCache::latent(k.view(), v).unwrap();
        same(&of(latent), &of(KvCache::new(k.view(), copied.view())), "packed");
    }
}

#[test]
fn contiguous_caches_and_those_with_heads_before_slots() {
    let [k, copied] = rows(DType::F32, [4, 12, 1, 20], 16);
    let lengths = ints(&[1, 12, 0, 7], &[4]);
    let q = f32s(&values(4 * 2 * 3 * 20, 8), &[4, 2, 3, 20]);
    let decode =
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(q.view()) };
    let of = |cache| {
        decode.forward(KvCache { seqused_kv: Some(lengths.view()), ..cache }, &cpu()).unwrap()
    };
    let latent = KvCache::latent(k.view(), 16).unwrap();
    let expected = of(KvCache::new(k.view(), copied.view()));
    same(&of(latent), &expected, "contiguous");
    let turned = k.view().flatten(1..3).unwrap().insert(1).unwrap().permute(&[0, 2, 1, 3]).unwrap();
    same(&of(KvCache::latent(turned, 16).unwrap()), &expected, "heads first");
}
