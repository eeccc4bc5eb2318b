use super::*;
use crate::attention::{Attention, Mask, Scores};
use crate::attention_index::IndexLists;
use crate::fixtures::{cpu, gpu, values};
use crate::kv_cache::PackedTokens;
use blockflash_safe::View;

const HEADS: [usize; 2] = [4, 2];
const D: usize = 8;

fn rows<'a>(data: &'a [f32], heads: usize) -> View<'a> {
    View::from_slice(data, &[1, data.len() / heads / D, heads, D]).unwrap()
}

fn numbers(gradients: &AttentionGradients) -> [Vec<f32>; 3] {
    let AttentionGradients { dq, dk, dv, .. } = gradients;
    [dq, dk, dv].map(|tensor| tensor.to_vec(&cpu()).unwrap())
}

fn close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (at, (x, y)) in found.iter().zip(expected).enumerate() {
        assert!((x - y).abs() <= 2e-5 * (1.0 + y.abs()), "{at}: {x} and {y}");
    }
}

/// Lists of all blocks give the gradients of attention to all keys, in whatever order.
#[test]
fn lists_of_all_blocks() {
    let (queries, keys) = (20, 50);
    let [q, d_o] = [1, 2].map(|seed| values(queries * HEADS[0] * D, seed));
    let [k, v] = [3, 4].map(|seed| values(keys * HEADS[1] * D, seed));
    let (q, d_o, k, v) =
        (rows(&q, HEADS[0]), rows(&d_o, HEADS[0]), rows(&k, HEADS[1]), rows(&v, HEADS[1]));
    let scores = Scores { softcap: Some(3.0), ..Mask::causal().into() };
    let dense = Attention { scores, ..Attention::new(q, k, v) };
    let output = dense.forward(&cpu()).unwrap();
    let expected = numbers(&dense.backward(&output, d_o, &cpu()).unwrap());
    for groups in [1, 2, 4] {
        let entries: Vec<i32> = (0..groups * queries).flat_map(|_| [3, -1, 0, 2, 9, 1]).collect();
        let entries = View::from_slice(&entries, &[groups, queries, 6]).unwrap();
        let lists = IndexLists { entries, granularity: 16 };
        let call = IndexAttention { scores, ..IndexAttention::new(q, lists) };
        let cache = KvCache::new(k, v);
        let own = call.forward(cache, &cpu()).unwrap();
        let found = numbers(&call.backward(cache, &own, d_o, &cpu()).unwrap());
        found.iter().zip(&expected).for_each(|(found, expected)| close(found, expected));
    }
}

/// A block that is listed twice is as two blocks with the same keys.
#[test]
fn repeated_blocks_count_twice() {
    let (queries, keys) = (3, 8);
    let [q, d_o] = [1, 2].map(|seed| values(queries * HEADS[0] * D, seed));
    let [k, v] = [3, 4].map(|seed| values(keys * HEADS[1] * D, seed));
    let [twice_k, twice_v] = [&k, &v].map(|rows| [&rows[..], &rows[..]].concat());
    let (q, d_o) = (rows(&q, HEADS[0]), rows(&d_o, HEADS[0]));
    let gradients = |k: View<'_>, v: View<'_>, list: [i32; 3]| {
        let entries: Vec<i32> = (0..queries).flat_map(|_| list).collect();
        let entries = View::from_slice(&entries, &[1, queries, 3]).unwrap();
        let call = IndexAttention::new(q, IndexLists { entries, granularity: 4 });
        let cache = KvCache::new(k, v);
        let output = call.forward(cache, &cpu()).unwrap();
        numbers(&call.backward(cache, &output, d_o, &cpu()).unwrap())
    };
    let of = |rows_of| rows(rows_of, HEADS[1]);
    let [dq, dk, dv] = gradients(of(&k), of(&v), [0, 1, 0]);
    let [dq_apart, dk_apart, dv_apart] = gradients(of(&twice_k), of(&twice_v), [0, 1, 2]);
    close(&dq, &dq_apart);
    for (found, apart) in [(dk, dk_apart), (dv, dv_apart)] {
        let (first, second) = apart.split_at(found.len());
        let sums: Vec<f32> = first.iter().zip(second).map(|(x, y)| x + y).collect();
        close(&found, &sums);
    }
}

/// Packed sequences have the gradients of each alone; rows of none are 0.
#[test]
fn packed_sequences() {
    let offsets = [[0, 5, 5, 12], [0, 20, 33, 40]];
    let (queries, keys) = (15, 44);
    let [q, d_o] = [1, 2].map(|seed| values(queries * HEADS[0] * D, seed));
    let [k, v] = [3, 4].map(|seed| values(keys * HEADS[1] * D, seed));
    let list: Vec<i32> = (0..queries * 2).map(|at| at as i32 % 3).collect();
    let part = |data: &[f32], heads: usize, range: std::ops::Range<i32>| {
        let width = heads * D;
        data[range.start as usize * width..range.end as usize * width].to_vec()
    };
    let packed = |data, heads| rows(data, heads).flatten(0..2).unwrap();
    let cu = offsets.each_ref().map(|offsets| View::from_slice(offsets, &[4]).unwrap());
    let entries = View::from_slice(&list, &[1, queries, 2]).unwrap();
    let call = IndexAttention {
        packed: Some(PackedTokens { cu_seqlens: cu[0], max_seqlen: 7 }),
        packed_kv: Some(PackedTokens { cu_seqlens: cu[1], max_seqlen: 20 }),
        scores: Mask::causal().into(),
        ..IndexAttention::new(packed(&q, HEADS[0]), IndexLists { entries, granularity: 8 })
    };
    let cache = KvCache::new(rows(&k, HEADS[1]), rows(&v, HEADS[1]));
    let output = call.forward(cache, &cpu()).unwrap();
    let [dq, dk, dv] =
        numbers(&call.backward(cache, &output, packed(&d_o, HEADS[0]), &cpu()).unwrap());
    for at in 0..3 {
        let [of_q, of_k] = offsets.map(|offsets| offsets[at]..offsets[at + 1]);
        let [q, d_o] = [&q, &d_o].map(|data| part(data, HEADS[0], of_q.clone()));
        let [k, v] = [&k, &v].map(|data| part(data, HEADS[1], of_k.clone()));
        let own = &list[of_q.start as usize * 2..of_q.end as usize * 2];
        let entries = View::from_slice(own, &[1, of_q.len(), 2]).unwrap();
        let call = IndexAttention {
            scores: Mask::causal().into(),
            ..IndexAttention::new(rows(&q, HEADS[0]), IndexLists { entries, granularity: 8 })
        };
        let cache = KvCache::new(rows(&k, HEADS[1]), rows(&v, HEADS[1]));
        let output = call.forward(cache, &cpu()).unwrap();
        let gradients = call.backward(cache, &output, rows(&d_o, HEADS[0]), &cpu()).unwrap();
        let [alone_q, alone_k, alone_v] = numbers(&gradients);
        assert_eq!(part(&dq, HEADS[0], of_q), alone_q);
        assert_eq!(part(&dk, HEADS[1], of_k.clone()), alone_k);
        assert_eq!(part(&dv, HEADS[1], of_k), alone_v);
    }
    assert!(dq[12 * HEADS[0] * D..].iter().all(|&x| x == 0.0));
    assert!(dk[40 * HEADS[1] * D..].iter().chain(&dv[40 * HEADS[1] * D..]).all(|&x| x == 0.0));
}

#[test]
fn caches_that_have_no_gradients_are_named() {
    let (q, k) = (values(8 * HEADS[0] * D, 1), values(16 * HEADS[1] * D, 2));
    let (q, k) = (rows(&q, HEADS[0]), rows(&k, HEADS[1]));
    let (entries, ints) = ([0; 8], [0]);
    let entries = View::from_slice(&entries, &[1, 8, 1]).unwrap();
    let ints = View::from_slice(&ints, &[1]).unwrap();
    let call = IndexAttention::new(q, IndexLists { entries, granularity: 16 });
    let lse = vec![0.0; 8 * HEADS[0]];
    let lse = View::from_slice(&lse, &[1, HEADS[0], 8]).unwrap();
    let cache = KvCache::new(k, k);
    let backward = IndexAttentionBackward { attention: call, cache, o: q, lse, d_o: q };
    backward.problem().unwrap();
    let table = ints.insert(0).unwrap();
    for (cache, what) in [
        (KvCache { block_table: Some(table), ..cache }, "cache.block_table"),
        (KvCache { seqused_kv: Some(ints), ..cache }, "cache.seqused_kv"),
    ] {
        let error = IndexAttentionBackward { cache, ..backward }.problem().unwrap_err();
        assert!(matches!(error, Error::Shape { what: found, .. } if found == what), "{error}");
    }
    let packed = Some(PackedTokens { cu_seqlens: ints, max_seqlen: 1 });
    let attention = IndexAttention { packed_kv: packed, ..call };
    let error = IndexAttentionBackward { attention, ..backward }.problem().unwrap_err();
    assert!(error.to_string().contains("packed_kv"), "{error}");
}

/// A problem of this many queries and as many keys of bf16, with lists of 16 blocks of 64.
fn problem(queries: usize, granularity: usize) -> IndexAttentionBackwardProblem {
    use crate::attention::AttentionProblem;
    use crate::attention_bwd::AttentionBackwardProblem;
    let forward = AttentionProblem::dense(DType::BF16, [1, queries, queries], [16, 4], 128);
    let lists = crate::attention_index::IndexListSizes {
        groups: 4,
        capacity: 16,
        granularity,
        strides: [16 * queries, 16],
    };
    IndexAttentionBackwardProblem { dense: AttentionBackwardProblem::of(forward), lists }
}

#[test]
fn passes_follow_from_the_workspace() {
    let gpu = gpu(9, 0);
    let planned = |problem: IndexAttentionBackwardProblem| {
        plan(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap()
    };
    let whole = planned(problem(65_536, 64));
    assert_eq!((whole.plan.pass_queries, whole.plan.item_visits), (65_536, 2048));
    // Parts of dq are most of it.
    assert!((4_295_000_000..5_500_000_000).contains(&whole.workspace_bytes));
    assert_eq!(planned(problem(8192, 64)).plan.item_visits, 512);
    let mut last = whole.workspace_bytes;
    for bytes in [2_900_000_000, 1_500_000_000, 0] {
        let passes = planned(problem(65_536, 64).with_workspace(bytes));
        assert!(passes.workspace_bytes < last);
        assert!(bytes == 0 || passes.workspace_bytes <= bytes);
        last = passes.workspace_bytes;
        assert_eq!(passes.plan.pass_queries % 256, 0);
    }
    assert_eq!(planned(problem(65_536, 64).with_workspace(0)).plan.pass_queries, 256);
    let error = select(&problem(64, 4), &gpu).unwrap_err().to_string();
    assert!(error.contains("blocks have 4 tokens, expected one of [16, 64, 128]"), "{error}");
}
