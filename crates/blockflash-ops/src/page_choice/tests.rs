use super::*;
use crate::fixtures::values;
use crate::{AttentionDecode, DType, Device, PackedTokens, PageLists, Stream, Tensor};

const D: usize = 8;

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn i32s(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Two sequences in 8 pages of 4 slots with 2 heads of keys, the pages in reverse order.
struct Fixture {
    k: Tensor,
    table: Tensor,
    lengths: Tensor,
}

impl Fixture {
    fn new(lengths: [i32; 2]) -> Self {
        let k = Tensor::from_slice(&cpu(), &values(8 * 4 * 2 * D, 7), &[8, 4, 2, D]).unwrap();
        let table = i32s(&[7, 6, 5, 4, 3, 2, 1, 0], &[2, 4]);
        Self { k, table, lengths: i32s(&lengths, &[2]) }
    }

    fn cache(&self) -> KvCache<'_> {
        KvCache {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCache::new(self.k.view(), self.k.view())
        }
    }

    fn key(&self, [entry, key, head]: [usize; 3]) -> Vec<f32> {
        let page = 7 - 4 * entry - key / 4;
        let start = ((page * 4 + key % 4) * 2 + head) * D;
        self.k.to_vec::<f32>(&cpu()).unwrap()[start..][..D].to_vec()
    }

    fn summaries(&self, statistics: usize, tokens: usize) -> Tensor {
        let mut summaries = Tensor::empty(&cpu(), DType::F32, &[8, statistics, 2, D]).unwrap();
        SummarizePages { cache: self.cache(), tokens }
            .summarize_into(summaries.view_mut(), &cpu())
            .unwrap();
        summaries
    }
}

#[test]
fn summaries_are_those_of_the_keys_that_are_there() {
    let fixture = Fixture::new([11, 4]);
    for statistics in [1, 2] {
        let found = fixture.summaries(statistics, 100).to_vec::<f32>(&cpu()).unwrap();
        for (entry, page, head) in [(0, 0, 0), (0, 1, 1), (0, 2, 1), (1, 0, 0)] {
            let length = [11, 4][entry];
            let keys: Vec<Vec<f32>> = (page * 4..length.min(page * 4 + 4))
                .map(|key| fixture.key([entry, key, head]))
                .collect();
            let physical = 7 - 4 * entry - page;
            let row = |statistic| {
                let start = ((physical * statistics + statistic) * 2 + head) * D;
                &found[start..][..D]
            };
            for i in 0..D {
                let column = || keys.iter().map(|key| key[i]);
                if statistics == 1 {
                    let mean = column().sum::<f32>() / keys.len() as f32;
                    assert!((row(0)[i] - mean).abs() < 1e-6);
                } else {
                    assert_eq!(row(0)[i], column().fold(f32::INFINITY, f32::min));
                    assert_eq!(row(1)[i], column().fold(f32::NEG_INFINITY, f32::max));
                }
            }
        }
        // Pages without keys are not written.
        assert!(found[4 * statistics * 2 * D..][..statistics * 2 * D].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn only_pages_of_new_tokens_are_written() {
    let fixture = Fixture::new([11, 4]);
    let found = fixture.summaries(1, 3).to_vec::<f32>(&cpu()).unwrap();
    let written: Vec<usize> =
        (0..8).filter(|page| !found[page * 2 * D..][..2 * D].iter().any(|x| x.is_nan())).collect();
    assert_eq!(written, [3, 5]);
}

/// The definition of a score, for a query and a page of sequence 0.
fn score(fixture: &Fixture, statistics: usize, q: &[f32], page: usize, head: usize) -> f32 {
    let keys: Vec<Vec<f32>> =
        (page * 4..page * 4 + 4).map(|key| fixture.key([0, key, head])).collect();
    let of_element = |i: usize| {
        let products = keys.iter().map(|key| q[i] * key[i]);
        if statistics == 1 {
            products.sum::<f32>() / 4.0
        } else {
            products.fold(f32::NEG_INFINITY, f32::max)
        }
    };
    (0..D).map(of_element).sum()
}

#[test]
fn the_best_pages_and_the_ends_are_chosen() {
    let fixture = Fixture::new([16, 9]);
    for (statistics, seed) in [1, 2].into_iter().flat_map(|n| (0..10).map(move |s| (n, s))) {
        let summaries = fixture.summaries(statistics, 100);
        // Two queries of two heads for each head of keys, and none of sequence 1.
        let numbers = values(2 * 4 * D, seed);
        let q = Tensor::from_slice(&cpu(), &numbers, &[2, 4, D]).unwrap();
        let offsets = i32s(&[0, 2, 2], &[3]);
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 2 });
        let (mut lists, mut counts) = (i32s(&[-9; 12], &[2, 2, 3]), i32s(&[-9; 2], &[2]));
        let summaries = summaries.view();
        ChoosePages { packed, ..ChoosePages::new(q.view(), fixture.cache(), summaries) }
            .choose_into(lists.view_mut(), counts.view_mut(), &cpu())
            .unwrap();
        let best = |head: usize| {
            let rows = [2 * head, 2 * head + 1, 4 + 2 * head, 5 + 2 * head];
            let of_page = |page| {
                let q = rows.map(|row| &numbers[row * D..][..D]);
                let scores = q.map(|q| score(&fixture, statistics, q, page, head));
                scores.into_iter().fold(f32::NEG_INFINITY, f32::max)
            };
            if of_page(1) >= of_page(2) { 1 } else { 2 }
        };
        let expected = [0, best(0), 3, 0, best(1), 3, 0, 1, 2, 0, 1, 2];
        assert_eq!(lists.to_vec::<i32>(&cpu()).unwrap(), expected, "{statistics} {seed}");
        assert_eq!(counts.to_vec::<i32>(&cpu()).unwrap(), [3, 3]);
        let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
        let decode = AttentionDecode { packed, pages, ..AttentionDecode::new(q.view()) };
        decode.forward(fixture.cache(), &cpu()).unwrap();
    }
}

#[test]
fn without_a_score_the_first_pages_are_chosen() {
    let fixture = Fixture::new([16, 3]);
    let nan = Tensor::from_slice(&cpu(), &[f32::NAN; 2 * 2 * D], &[2, 1, 2, D]).unwrap();
    let (mut lists, mut counts) = (i32s(&[-9; 12], &[2, 2, 3]), i32s(&[-9; 2], &[2]));
    let summaries = fixture.summaries(1, 100);
    let (q, summaries) = (nan.view(), summaries.view());
    ChoosePages::new(q, fixture.cache(), summaries)
        .choose_into(lists.view_mut(), counts.view_mut(), &cpu())
        .unwrap();
    let lists = lists.to_vec::<i32>(&cpu()).unwrap();
    assert_eq!(lists, [0, 1, 3, 0, 1, 3, 0, 0, 0, 0, 0, 0]);
    assert_eq!(counts.to_vec::<i32>(&cpu()).unwrap(), [3, 1]);
}

#[test]
fn what_does_not_fit_is_named() {
    let fixture = Fixture::new([16, 3]);
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&cpu(), dtype, shape).unwrap();
    let summarize = |cache: KvCache<'_>, mut summaries: Tensor| {
        let op = SummarizePages { cache, tokens: 1 };
        op.summarize_into(summaries.view_mut(), &cpu()).unwrap_err().to_string()
    };
    let contiguous = KvCache { block_table: None, seqused_kv: None, ..fixture.cache() };
    let summaries = || zeros(DType::F32, &[8, 1, 2, D]);
    assert!(summarize(contiguous, summaries()).contains("block table"));
    for shape in [&[8, 3, 2, D][..], &[7, 1, 2, D], &[8, 2, D]] {
        assert!(summarize(fixture.cache(), zeros(DType::F32, shape)).contains("summaries has"));
    }
    assert!(summarize(fixture.cache(), zeros(DType::F16, &[8, 1, 2, D])).contains("is f16"));
    let (q, summaries) = (zeros(DType::F32, &[2, 1, 3, D]), summaries());
    let choose = |heads: usize, mut lists: Tensor, mut counts: Tensor| {
        let q = q.view().slice(2, 0..heads).unwrap();
        let (cache, summaries) = (fixture.cache(), summaries.view());
        let op = ChoosePages::new(q, cache, summaries);
        op.choose_into(lists.view_mut(), counts.view_mut(), &cpu()).unwrap_err().to_string()
    };
    let (lists, counts) = (|| i32s(&[0; 12], &[2, 2, 3]), || i32s(&[0; 2], &[2]));
    assert!(choose(3, lists(), counts()).contains("3 query heads"));
    assert!(choose(2, i32s(&[0; 4], &[2, 2, 1]), counts()).contains("at least 2"));
    assert!(choose(2, i32s(&[0; 6], &[1, 2, 3]), counts()).contains("lists has shape"));
    assert!(choose(2, lists(), i32s(&[0; 3], &[3])).contains("counts has shape"));
}
