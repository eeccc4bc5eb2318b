use super::*;
use crate::attention::Mask;
use crate::fixtures::{cpu, f32s, gpu, values};
use crate::selection::select;
use crate::{DType, Error, KvCache, Operation, PackedTokens, Tensor};

const D: usize = 8;

fn i32s(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Two sequences in 6 pages of 4 slots with one head of keys, the pages in reverse order.
struct Fixture {
    k: Tensor,
    table: Tensor,
    lengths: Tensor,
}

impl Fixture {
    fn new(lengths: [i32; 2]) -> Self {
        let k = f32s(&values(6 * 4 * D, 7), &[6, 4, 1, D]);
        Self { k, table: i32s(&[5, 4, 3, 2, 1, 0], &[2, 3]), lengths: i32s(&lengths, &[2]) }
    }

    fn cache(&self) -> KvCache<'_> {
        KvCache {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCache::new(self.k.view(), self.k.view())
        }
    }
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec(&cpu()).unwrap()
}

#[test]
fn scores_lead_to_lists_of_the_same_queries() {
    let fixture = Fixture::new([11, 3]);
    let q = f32s(&values(2 * 2 * 2 * D, 3), &[2, 2, 2, D]);
    let call =
        IndexScores { mask: Mask::causal(), ..IndexScores::new(q.view(), fixture.cache(), 4) };
    let scores = call.compute(2, &cpu()).unwrap();
    assert_eq!(scores.shape(), [2, 4, 3]);
    let shown: Vec<usize> = floats(&scores)
        .chunks_exact(3)
        .map(|row| row.iter().filter(|x| x.is_finite()).count())
        .collect();
    // Queries of 11 keys stand at keys 9 and 10, those of 3 at 1 and 2.
    assert_eq!(shown, [3, 3, 1, 1, 3, 3, 1, 1]);
    let top_k = TopK { last: 1, ..call.top_k(scores.view()).unwrap() };
    let lists: Vec<i32> = top_k.choose(2, &cpu()).unwrap().to_vec(&cpu()).unwrap();
    for (row, list) in floats(&scores).chunks_exact(3).zip(lists.chunks_exact(2)) {
        let expected = match row {
            [a, b, c] if c.is_finite() => [i32::from(b > a), 2],
            _ => [0, -1],
        };
        assert_eq!(list, expected, "{row:?}");
    }
}

#[test]
fn offsets_of_packed_keys_tell_lengths() {
    let (q, k) = (f32s(&values(3 * D, 1), &[3, 1, D]), f32s(&values(9 * D, 2), &[1, 9, 1, D]));
    let (of_q, of_kv) = (i32s(&[0, 1, 3], &[3]), i32s(&[0, 7, 9], &[3]));
    let call = IndexScores {
        packed: Some(PackedTokens { cu_seqlens: of_q.view(), max_seqlen: 2 }),
        packed_kv: Some(PackedTokens { cu_seqlens: of_kv.view(), max_seqlen: 7 }),
        mask: Mask::causal(),
        ..IndexScores::new(q.view(), KvCache::new(k.view(), k.view()), 1)
    };
    let scores = call.compute(1, &cpu()).unwrap();
    assert_eq!(scores.shape(), [1, 3, 7]);
    let shown: Vec<usize> = floats(&scores)
        .chunks_exact(7)
        .map(|row| row.iter().filter(|x| x.is_finite()).count())
        .collect();
    assert_eq!(shown, [7, 1, 2]);
    let lists = call.top_k(scores.view()).unwrap().choose(7, &cpu()).unwrap();
    let lists: Vec<i32> = lists.to_vec(&cpu()).unwrap();
    assert_eq!(lists[..7], [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(lists[7..], [0, -1, -1, -1, -1, -1, -1, 0, 1, -1, -1, -1, -1, -1]);
}

#[test]
fn calls_can_be_prepared() {
    let scores = f32s(&values(2 * 5, 4), &[1, 2, 5]);
    let top_k = TopK { mask: Mask::causal(), ..TopK::new(scores.view(), 16) };
    let (mut first, mut second) = (i32s(&[7; 6], &[1, 2, 3]), i32s(&[7; 6], &[1, 2, 3]));
    let prepared = top_k.prepare(&first.view_mut(), &cpu()).unwrap();
    assert!(prepared.kernel().is_none());
    top_k.run_prepared(&prepared, first.view_mut(), &cpu()).unwrap();
    top_k.choose_into(second.view_mut(), &cpu()).unwrap();
    assert_eq!(first.to_vec::<i32>(&cpu()).unwrap(), second.to_vec::<i32>(&cpu()).unwrap());
    let other = TopK { last: 1, ..top_k };
    let error = other.run_prepared(&prepared, first.view_mut(), &cpu()).unwrap_err();
    assert!(matches!(error, Error::NotPrepared { op: "top_k" }), "{error}");
}

#[test]
fn nothing_to_compute_is_valid() {
    let none = Tensor::zeros(&cpu(), DType::F32, &[2, 0, 2, D]).unwrap();
    let fixture = Fixture::new([11, 3]);
    let scores = IndexScores::new(none.view(), fixture.cache(), 4).compute(2, &cpu()).unwrap();
    assert_eq!(scores.shape(), [2, 0, 3]);
    assert_eq!(TopK::new(scores.view(), 4).choose(5, &cpu()).unwrap().shape(), [2, 0, 5]);
    let none = Tensor::zeros(&cpu(), DType::F32, &[1, 2, 0]).unwrap();
    let lists = TopK::new(none.view(), 4).choose(2, &cpu()).unwrap();
    assert_eq!(lists.to_vec::<i32>(&cpu()).unwrap(), [-1; 4]);
}

#[test]
fn what_does_not_fit_is_named() {
    let fixture = Fixture::new([11, 3]);
    let q = |shape: &[usize]| Tensor::zeros(&cpu(), DType::F32, shape).unwrap();
    let plain = q(&[2, 1, 4, D]);
    let call = IndexScores::new(plain.view(), fixture.cache(), 4);
    let message =
        |call: IndexScores<'_>, groups| call.compute(groups, &cpu()).unwrap_err().to_string();
    for (groups, expected) in [(0, "groups is 0"), (3, "divides 4 heads")] {
        let found = message(call, groups);
        assert!(found.contains(expected), "{found}");
    }
    let other = q(&[3, 1, 4, D]);
    let found = message(IndexScores { q: other.view(), ..call }, 1);
    assert!(found.contains("q has shape") && found.contains("[2, seqlen_q"), "{found}");
    let half = Tensor::zeros(&cpu(), DType::F16, &[2, 1, 4, D]).unwrap();
    assert!(message(IndexScores { q: half.view(), ..call }, 1).contains("q is f16"));
    let found = message(IndexScores { granularity: 0, ..call }, 1);
    assert!(found.contains("granularity is 0, expected at least 1"), "{found}");
    let found = message(IndexScores { scale: -1.0, ..call }, 1);
    assert!(found.contains("scale is -1"), "{found}");
    let weights = q(&[3, 4]);
    let found = message(IndexScores { weights: Some(weights.view()), ..call }, 1);
    assert!(found.contains("weights has shape [3, 4], expected [2, 4]"), "{found}");

    let scores = q(&[1, 2, 3]);
    let top_k = TopK::new(scores.view(), 4);
    let message = |top_k: TopK<'_>, k| top_k.choose(k, &cpu()).unwrap_err().to_string();
    assert!(message(top_k, 0).contains("at least 1"));
    let found = message(TopK { first: 2, last: 1, ..top_k }, 2);
    assert!(found.contains("first + last is 3, the limit is 2"), "{found}");
    assert!(message(TopK { capacity: 13, ..top_k }, 2).contains("blocks of 4 of 13 keys"));
    assert!(message(TopK { batch: 3, ..top_k }, 2).contains("a multiple of 3 sequences"));
    let lengths = i32s(&[1, 2, 3], &[3]);
    let found = message(TopK { seqused_kv: Some(lengths.view()), ..top_k }, 2);
    assert!(found.contains("seqused_kv has shape [3]"), "{found}");
}

#[test]
fn wrong_lengths_are_found_on_request() {
    let scores = f32s(&[0.0; 6], &[1, 2, 3]);
    let lengths = i32s(&[5, 13], &[2]);
    let top_k = TopK { batch: 2, seqused_kv: Some(lengths.view()), ..TopK::new(scores.view(), 4) };
    let mut lists = i32s(&[0; 4], &[1, 2, 2]);
    // They count as the capacity otherwise.
    top_k.choose_into(lists.view_mut(), &cpu()).unwrap();
    let error = top_k.check(&lists.view_mut(), &cpu()).unwrap_err().to_string();
    assert!(error.contains("seqused_kv[1] is 13"), "{error}");
}

#[test]
fn without_a_kernel_the_reason_is_named() {
    let fixture = Fixture::new([11, 3]);
    let q = Tensor::zeros(&cpu(), DType::F32, &[2, 1, 4, D]).unwrap();
    let mut scores = Tensor::zeros(&cpu(), DType::F32, &[1, 2, 3]).unwrap();
    let problem = IndexScores::new(q.view(), fixture.cache(), 4).problem(&scores.view_mut());
    assert!(select(&problem.unwrap(), &gpu(9, 0)).is_err());
}
