use super::*;
use crate::fixtures::{cpu, f32s, values};
use crate::{AttentionDecode, Error};

fn i32s(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Two sequences with 3 queries of 4 heads, in 6 pages of 4 slots with 2 heads: 11 and 7 keys.
struct Fixture {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
}

impl Fixture {
    fn new() -> Self {
        Self {
            q: f32s(&values(2 * 3 * 4 * 8, 1), &[2, 3, 4, 8]),
            k: f32s(&values(6 * 4 * 2 * 8, 2), &[6, 4, 2, 8]),
            v: f32s(&values(6 * 4 * 2 * 8, 3), &[6, 4, 2, 8]),
            table: i32s(&[3, 1, 4, 2, 0, 5], &[2, 3]),
            lengths: i32s(&[11, 7], &[2]),
        }
    }

    fn cache(&self) -> KvCache<'_> {
        KvCache {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCache::new(self.k.view(), self.v.view())
        }
    }

    fn index<'a>(&'a self, entries: &'a Tensor, granularity: usize) -> IndexAttention<'a> {
        let lists = IndexLists { entries: entries.view(), granularity };
        let scores = Mask::causal().into();
        IndexAttention { scores, ..IndexAttention::new(self.q.view(), lists) }
    }

    fn operands<'o>(&'o self, o: &'o mut Tensor) -> IndexAttentionOperands<'o> {
        IndexAttentionOperands { cache: self.cache(), o: o.view_mut(), lse: None }
    }

    /// The outputs for a list that all queries have.
    fn of_list(&self, list: &[i32], granularity: usize) -> [Vec<f32>; 2] {
        let entries = i32s(&list.repeat(6), &[1, 6, list.len()]);
        self.run(self.index(&entries, granularity))
    }

    fn run(&self, attention: IndexAttention<'_>) -> [Vec<f32>; 2] {
        outputs(&attention.forward(self.cache(), &cpu()).unwrap())
    }
}

fn outputs(output: &AttentionOutput) -> [Vec<f32>; 2] {
    [output.o.to_vec(&cpu()).unwrap(), output.lse.to_vec(&cpu()).unwrap()]
}

#[track_caller]
fn assert_close(found: &[Vec<f32>; 2], expected: &[Vec<f32>; 2]) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!(found == expected || (found - expected).abs() < 2e-6, "{found}, not {expected}");
    }
}

#[test]
fn all_blocks_are_attention_to_the_cache() {
    let fixture = Fixture::new();
    let decode =
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(fixture.q.view()) };
    let expected = outputs(&decode.forward(fixture.cache(), &cpu()).unwrap());
    for (list, granularity) in [
        (&[0, 1, 2][..], 4),
        (&[2, 1, 0], 4),
        (&[10, 3, 5, 6, 7, 8, 9, 0, 1, 2, 4], 1),
        (&[0], 64),
        (&[1, 0, 3, 2, 5, 4], 2),
    ] {
        assert_close(&fixture.of_list(list, granularity), &expected);
    }
}

#[test]
fn neither_order_nor_what_names_nothing_counts() {
    let fixture = Fixture::new();
    let expected = fixture.of_list(&[0, 2], 3);
    for list in [
        &[2, 0][..],
        &[-1, 2, -1, 0, -1],
        &[i32::MIN, 0, i32::MAX, 2, 4, 5, -9],
        &[0, 2, 1_000_000_000],
    ] {
        assert_eq!(fixture.of_list(list, 3), expected, "{list:?}");
    }
    for list in [&[][..], &[-1], &[-1, 7, i32::MAX]] {
        let [o, lse] = fixture.of_list(list, 3);
        assert!(o.iter().all(|&x| x == 0.0), "{list:?}");
        assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY), "{list:?}");
    }
}

/// As if the keys were there as often.
#[test]
fn a_block_counts_as_often_as_it_is_listed() {
    let fixture = Fixture::new();
    let found = fixture.of_list(&[1, 0, 1, 1], 2);
    // Keys 0 to 3 of both sequences, of which the last two three times.
    let rows = [0, 1, 2, 3, 2, 3, 2, 3];
    let copied = |cache: &Tensor| {
        let all: Vec<f32> = cache.to_vec(&cpu()).unwrap();
        let of = |page: usize| rows.iter().flat_map(move |row| [page * 4 + row]);
        let rows = of(3).chain(of(2)).flat_map(|row| all[row * 16..][..16].to_vec());
        f32s(&rows.collect::<Vec<_>>(), &[2, 8, 2, 8])
    };
    let (k, v) = (copied(&fixture.k), copied(&fixture.v));
    let decode = AttentionDecode::new(fixture.q.view());
    let decoded = outputs(&decode.forward(KvCache::new(k.view(), v.view()), &cpu()).unwrap());
    assert_close(&found, &decoded);
}

#[test]
fn groups_of_lists() {
    let fixture = Fixture::new();
    let list = |seed: i32| [seed % 3, -1, (seed + 1) % 3];
    let entries = |groups: usize| {
        let lists = (0..groups as i32 * 6).flat_map(|at| list(at / 6 * 2 + at % 6));
        i32s(&lists.collect::<Vec<_>>(), &[groups, 6, 3])
    };
    // One list for each head of keys is the same list for both of its heads of queries.
    let [two, four] = [2, 4].map(entries);
    let found = fixture.run(fixture.index(&two, 4));
    let doubled: Vec<i32> = two.to_vec(&cpu()).unwrap();
    let doubled: Vec<i32> =
        doubled.chunks(18).flat_map(|group| [group, group]).flatten().copied().collect();
    let doubled = i32s(&doubled, &[4, 6, 3]);
    assert_eq!(fixture.run(fixture.index(&doubled, 4)), found);
    assert_ne!(fixture.run(fixture.index(&four, 4)), found);
    let one = entries(1);
    let both: Vec<i32> = one.to_vec::<i32>(&cpu()).unwrap().repeat(2);
    let both = i32s(&both, &[2, 6, 3]);
    assert_eq!(fixture.run(fixture.index(&one, 4)), fixture.run(fixture.index(&both, 4)));
}

#[test]
fn packed_tensors_are_those_of_their_sequences() {
    let fixture = Fixture::new();
    let list: Vec<i32> = (0..6).flat_map(|query| [query % 4, 0]).collect();
    let entries = i32s(&list, &[1, 6, 2]);
    let expected = fixture.run(fixture.index(&entries, 3));
    // Queries one after another, behind which rows belong to no sequence.
    let offsets = i32s(&[0, 3, 6], &[3]);
    let q = fixture.q.view().flatten(0..2).unwrap();
    let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 3 });
    let index = IndexAttention { q, packed, ..fixture.index(&entries, 3) };
    let [o, lse] = fixture.run(index);
    assert_eq!(o, expected[0]);
    // `[heads, total]` in place of `[batch, heads, queries]`.
    let at = |b: usize, head: usize, query: usize| lse[head * 6 + b * 3 + query];
    let turned = (0..24).map(|i| at(i / 12, i / 3 % 4, i % 3)).collect::<Vec<_>>();
    assert_eq!(turned, expected[1]);
    // Keys one after another.
    let rows = |cache: &Tensor| {
        let all: Vec<f32> = cache.to_vec(&cpu()).unwrap();
        let keys = (0..11).map(|key| [3, 1, 4][key / 4] * 4 + key % 4);
        let keys = keys.chain((0..7).map(|key| [2, 0][key / 4] * 4 + key % 4));
        f32s(
            &keys.flat_map(|row| all[row * 16..][..16].to_vec()).collect::<Vec<_>>(),
            &[1, 18, 2, 8],
        )
    };
    let (k, v, offsets_kv) = (rows(&fixture.k), rows(&fixture.v), i32s(&[0, 11, 18], &[3]));
    let packed_kv = Some(PackedTokens { cu_seqlens: offsets_kv.view(), max_seqlen: 11 });
    for packed in [None, packed] {
        let q = if packed.is_some() { q } else { fixture.q.view() };
        let index = IndexAttention { q, packed, packed_kv, ..fixture.index(&entries, 3) };
        let found = index.forward(KvCache::new(k.view(), v.view()), &cpu()).unwrap();
        assert_eq!(outputs(&found)[0], expected[0]);
    }
}

#[test]
fn bits_are_equal_for_any_number_of_threads() {
    let fixture = Fixture::new();
    let first = fixture.of_list(&[2, 0, 1, 1], 3);
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| fixture.of_list(&[2, 0, 1, 1], 3)), first, "{threads} threads");
    }
}

#[test]
fn what_is_added_to_scores_belongs_to_listed_keys() {
    let fixture = Fixture::new();
    let decode =
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(fixture.q.view()) };
    let (bias, slopes) = (f32s(&values(4 * 3 * 12, 9), &[1, 4, 3, 12]), f32s(&[0.5; 4], &[4]));
    for (bias, alibi) in [
        (Some(bias.view()), None),
        (None, Some(slopes.view())),
        (Some(bias.view()), Some(slopes.view())),
    ] {
        let scores = Scores { bias, alibi, ..decode.scores };
        let decode = AttentionDecode { scores, ..decode };
        let expected = outputs(&decode.forward(fixture.cache(), &cpu()).unwrap());
        let entries = i32s(&[2, 0, 1].repeat(6), &[1, 6, 3]);
        let index = IndexAttention { scores, ..fixture.index(&entries, 4) };
        assert_close(&fixture.run(index), &expected);
    }
}

#[test]
fn wrong_operands_are_named() {
    let fixture = Fixture::new();
    let entries = i32s(&[0; 12], &[1, 6, 2]);
    let index = fixture.index(&entries, 4);
    let message = |index: IndexAttention<'_>, cache: KvCache<'_>| {
        index.problem(&cache).unwrap_err().to_string()
    };
    let of_lists = |entries: &Tensor, granularity: usize| {
        message(fixture.index(entries, granularity), fixture.cache())
    };
    let expected = "expected [1, 2 or 4, 6, capacity]";
    for shape in [&[3, 6, 2][..], &[1, 5, 2], &[1, 6], &[1, 2, 3, 2]] {
        let wrong = i32s(&vec![0; shape.iter().product()], shape);
        let message = of_lists(&wrong, 4);
        assert!(message.contains("lists.entries") && message.contains(expected), "{message}");
    }
    let found = of_lists(&entries, 0);
    assert!(found.contains("lists.granularity is 0, expected at least 1"), "{found}");
    let found = of_lists(&f32s(&[0.0; 12], &[1, 6, 2]), 4);
    assert!(found.contains("lists.entries is f32, expected i32"), "{found}");
    let turned = i32s(&[0; 12], &[1, 2, 6]);
    let lists = IndexLists { entries: turned.view().permute(&[0, 2, 1]).unwrap(), granularity: 4 };
    let found = message(IndexAttention { lists, ..index }, fixture.cache());
    assert!(found.contains("contiguous"), "{found}");

    let offsets = i32s(&[0, 4, 8], &[3]);
    let packed = PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 4 };
    let index = IndexAttention { packed_kv: Some(packed), ..index };
    let found = message(index, fixture.cache());
    assert!(found.contains("cache.block_table") && found.contains("none beside"), "{found}");
    let contiguous = KvCache::new(fixture.k.view(), fixture.v.view());
    let found = message(index, contiguous);
    assert!(found.contains("cache.k") && found.contains("[1, total_kv, "), "{found}");
    let (k, v) =
        (fixture.k.view().slice(0, 0..1).unwrap(), fixture.v.view().slice(0, 0..1).unwrap());
    let none = PackedTokens { max_seqlen: 0, ..packed };
    let found = message(IndexAttention { packed_kv: Some(none), ..index }, KvCache::new(k, v));
    assert!(found.contains("packed_kv.max_seqlen is 0"), "{found}");
    let error = index.forward(KvCache::new(k, v), &cpu()).unwrap_err().to_string();
    assert!(error.contains("cu_seqlens.kv[2] is 8: the packed tensor has 4 rows"), "{error}");
}

#[test]
fn checks_name_the_first_wrong_entry() {
    let fixture = Fixture::new();
    let mut o = f32s(&[0.0; 192], &[2, 3, 4, 8]);
    let mut check = |entries: &[i32]| {
        let mut all = vec![-1; 24];
        all[12..12 + entries.len()].copy_from_slice(entries);
        let entries = i32s(&all, &[1, 6, 4]);
        let index = fixture.index(&entries, 4);
        index.check(&fixture.operands(&mut o), &cpu()).map_err(|error| error.to_string())
    };
    // The second sequence has 7 keys, two blocks.
    for good in [&[-1; 4][..], &[1, -1, 0], &[0, 1]] {
        check(good).unwrap();
    }
    for (wrong, message) in [
        (&[0, 2][..], "lists.entries[0, 3, 1] is 2: the sequence has 7 keys, 2 blocks of 4"),
        (&[0, -2], "lists.entries[0, 3, 1] is -2: entries are blocks, or -1 for none"),
        (&[1, -1, 0, 1], "lists.entries[0, 3, 3] is 1: the list has this block at 0, too"),
    ] {
        assert_eq!(check(wrong).unwrap_err(), message);
    }
}

#[test]
fn prepared_calls() {
    let fixture = Fixture::new();
    let (first, second) = (i32s(&[0; 6], &[1, 6, 1]), i32s(&[1; 6], &[1, 6, 1]));
    let stream = cpu();
    let mut o = f32s(&[0.0; 192], &[2, 3, 4, 8]);
    let prepared = fixture.index(&first, 4).prepare(&fixture.operands(&mut o), &stream).unwrap();
    assert_eq!(prepared.kernel(), None);
    for entries in [&first, &second] {
        let index = fixture.index(entries, 4);
        index.run_prepared(&prepared, fixture.operands(&mut o), &stream).unwrap();
        assert_eq!(o.to_vec::<f32>(&stream).unwrap(), fixture.run(index)[0]);
    }
    let other = fixture.index(&first, 3);
    let error = other.run_prepared(&prepared, fixture.operands(&mut o), &stream);
    assert!(matches!(error, Err(Error::NotPrepared { op: "attention_index" })));
}
