//! Attention by an index and the choice of blocks, against loops over keys.

use super::blockflash_candle::{
    BlockReduction, IndexAttention, IndexScores, IndexTopK, Mask, Offsets, Sequences,
};
use super::candle_core::{DType, Device, Result, Tensor, Var};
use super::harness::{devices, normal, normal_on, types};

const SLOTS: usize = 16;
const TABLE: [[u32; 4]; 2] = [[5, 2, 7, 1], [3, 0, 6, 4]];
const LENGTHS: [u32; 2] = [57, 21];
const NONE: u32 = u32::MAX;

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// The output of one query in one head: for the keys and values that it sees, in f64.
fn attention(q: &[f32], keys: &[(&[f32], &[f32])], width: usize) -> Vec<f64> {
    let scale = 1.0 / (q.len() as f64).sqrt();
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let scores: Vec<f64> = keys.iter().map(|(k, _)| dot(k) * scale).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let column = |d: usize| {
        let products = weights.iter().zip(keys).map(|(weight, (_, v))| weight * f64::from(v[d]));
        if sum > 0.0 { products.sum::<f64>() / sum } else { 0.0 }
    };
    (0..width).map(column).collect()
}

#[track_caller]
fn near(found: &[f32], expected: &[f64], dtype: DType, what: &str) {
    let most = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*found) - expected).abs() <= most, "{what} {at}: {found} {expected}");
    }
}

#[test]
fn listed_blocks_of_pages_are_attended() -> Result<()> {
    devices()?.iter().try_for_each(pages)
}

fn pages(device: &Device) -> Result<()> {
    let (heads, heads_kv, queries, dim, width) = (6, 2, 2, 24, 16);
    let table = Tensor::new(&TABLE, device)?;
    let lengths = Tensor::new(&LENGTHS, device)?;
    // Of one group or of two; out of order, twice, −1 and beyond in any place.
    let lists = [
        [3, NONE, 0, 9, 0],
        [2, 1, NONE, NONE, 1000],
        [1, 0, 3, NONE, NONE],
        [NONE; 5],
        [0, 1, 2, 3, NONE],
        [NONE, 3, NONE, 1, NONE],
        [NONE, 0, NONE, NONE, 7],
        [5, 1, 0, 1, 1],
    ];
    for &dtype in types(device) {
        let k = normal_on(device, &[8, SLOTS, heads_kv, dim], dtype)?;
        let v = normal_on(device, &[8, SLOTS, heads_kv, width], dtype)?;
        let q = normal_on(device, &[2, queries, heads, dim], dtype)?;
        let [of_q, of_k, of_v] = [numbers(&q)?, numbers(&k)?, numbers(&v)?];
        for groups in [1, 2] {
            let of_lists: Vec<u32> = lists.iter().take(4 * groups).flatten().copied().collect();
            let entries = Tensor::from_vec(of_lists.clone(), (groups, 4, 5), device)?;
            let sequences = Sequences {
                lengths: Some(&lengths),
                block_table: Some(&table),
                ..Sequences::default()
            };
            let call = IndexAttention::new(&q, &k, &v, &entries, SLOTS);
            let o =
                IndexAttention { sequences, scores: Mask::causal().into(), ..call }.forward()?;
            assert_eq!((o.dims(), o.dtype()), (&[2, queries, heads, width][..], dtype));
            let mut expected = Vec::new();
            for row in 0..2 * queries {
                let (sequence, length) = (row / queries, LENGTHS[row / queries] as usize);
                let last = length - queries + row % queries;
                for head in 0..heads {
                    let head_kv = head / (heads / heads_kv);
                    let list = &of_lists[(head_kv % groups * 4 + row) * 5..][..5];
                    let listed = list.iter().flat_map(|&e| (0..SLOTS).map(move |i| (e, i)));
                    let seen = listed.filter(|&(e, i)| e < 4 && e as usize * SLOTS + i <= last);
                    let keys: Vec<_> = seen
                        .map(|(e, slot)| {
                            let page = TABLE[sequence][e as usize] as usize;
                            let at = (page * SLOTS + slot) * heads_kv + head_kv;
                            (&of_k[at * dim..][..dim], &of_v[at * width..][..width])
                        })
                        .collect();
                    let q = &of_q[(row * heads + head) * dim..][..dim];
                    expected.extend(attention(q, &keys, width));
                }
            }
            near(&numbers(&o)?, &expected, dtype, &format!("{dtype:?} {groups}"));
        }
    }
    Ok(())
}

#[test]
fn listed_blocks_of_packed_keys_are_attended() -> Result<()> {
    devices()?.iter().try_for_each(packed)
}

fn packed(device: &Device) -> Result<()> {
    let (starts_q, starts_k, heads, dim) = ([0usize, 3, 4], [0usize, 40, 70], 3, 16);
    for &dtype in types(device) {
        let [q, k, v] = [5, 70, 70].map(|rows| normal_on(device, &[rows, heads, dim], dtype));
        let (q, k, v) = (q?, k?, v?);
        let list = |row: u32| [row % 3, NONE, 4, row % 2];
        let lists: Vec<u32> = (0..5).flat_map(list).collect();
        let entries = Tensor::from_vec(lists, (1, 5, 4), device)?;
        let offsets = |of: [usize; 3]| Tensor::new(&of.map(|at| at as u32), device);
        let (offsets_q, offsets_k) = (offsets(starts_q)?, offsets(starts_k)?);
        let sequences = Sequences {
            q: Some(Offsets { offsets: &offsets_q, max_seqlen: 3 }),
            kv: Some(Offsets { offsets: &offsets_k, max_seqlen: 40 }),
            ..Sequences::default()
        };
        let call = IndexAttention::new(&q, &k, &v, &entries, 16);
        let o = IndexAttention { sequences, ..call }.forward()?;
        let [of_q, of_k, of_v] = [numbers(&q)?, numbers(&k)?, numbers(&v)?];
        let mut expected = Vec::new();
        for row in 0..5 {
            let sequence = usize::from(row >= 3);
            let length = starts_k[sequence + 1] - starts_k[sequence];
            for head in 0..heads {
                let listed = list(row as u32).into_iter().filter(|&e| e != NONE && row < 4);
                let tokens = listed.flat_map(|e| (0..16).map(move |i| e as usize * 16 + i));
                let at = |token| ((starts_k[sequence] + token) * heads + head) * dim;
                let keys: Vec<_> = tokens
                    .filter(|&token| token < length)
                    .map(|token| (&of_k[at(token)..][..dim], &of_v[at(token)..][..dim]))
                    .collect();
                expected.extend(attention(&of_q[(row * heads + head) * dim..][..dim], &keys, dim));
            }
        }
        near(&numbers(&o)?, &expected, dtype, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn the_blocks_with_the_largest_scores_are_chosen() -> Result<()> {
    devices()?.iter().try_for_each(scores)
}

fn scores(device: &Device) -> Result<()> {
    let (heads, dim, blocks) = (4, 16, 4);
    let (table, lengths) = (Tensor::new(&TABLE, device)?, Tensor::new(&LENGTHS, device)?);
    for &dtype in types(device) {
        let q = normal_on(device, &[2, 1, heads, dim], dtype)?;
        let k = normal_on(device, &[8, SLOTS, 1, dim], dtype)?;
        let weights = normal_on(device, &[2, heads], DType::F32)?;
        let [of_q, of_k, of_weights] = [numbers(&q)?, numbers(&k)?, numbers(&weights)?];
        let sequences = Sequences {
            lengths: Some(&lengths),
            block_table: Some(&table),
            ..Sequences::default()
        };
        let index = IndexScores {
            sequences,
            weights: Some(&weights),
            mask: Mask::causal(),
            relu: true,
            scale: 0.25,
            ..IndexScores::new(&q, &k, SLOTS)
        };
        for reduction in [BlockReduction::Max, BlockReduction::Mean] {
            let index = IndexScores { reduction, ..index };
            let scores = index.compute(1)?;
            assert_eq!((scores.dims(), scores.dtype()), (&[1, 2, blocks][..], DType::F32));
            let mut expected = Vec::new();
            for sequence in 0..2 {
                for (block, page) in TABLE[sequence].into_iter().enumerate() {
                    let (first, page) = (block * SLOTS, page as usize);
                    let end = (first + SLOTS).min(LENGTHS[sequence] as usize);
                    let of_key = |slot: usize| -> f64 {
                        let k = &of_k[(page * SLOTS + slot) * dim..][..dim];
                        let of_head = |head: usize| {
                            let q = &of_q[(sequence * heads + head) * dim..][..dim];
                            let dot: f64 =
                                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                            f64::from(of_weights[sequence * heads + head]) * (dot * 0.25).max(0.0)
                        };
                        (0..heads).map(of_head).sum()
                    };
                    let keys: Vec<f64> = (first..end).map(|key| of_key(key - first)).collect();
                    expected.push(match reduction {
                        _ if keys.is_empty() => f64::NEG_INFINITY,
                        BlockReduction::Mean => keys.iter().sum::<f64>() / keys.len() as f64,
                        _ => keys.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                    });
                }
            }
            let found = numbers(&scores)?;
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let same = f64::from(*found) == *expected;
                assert!(same || (f64::from(*found) - expected).abs() < 1e-3, "{dtype:?} {at}");
            }

            // Two by their scores; with the first one forced, it and the best of the others.
            for first in [0, 1] {
                let lists = index.top_k(1, IndexTopK { first, ..IndexTopK::new(2) })?;
                assert_eq!(lists.dims(), [1, 2, 2]);
                let lists = lists.to_device(&Device::Cpu)?.to_dtype(DType::U32)?;
                let lists = lists.flatten_all()?.to_vec1::<u32>()?;
                for sequence in 0..2 {
                    let of_row = &found[sequence * blocks..][..blocks];
                    let seen = LENGTHS[sequence].div_ceil(SLOTS as u32);
                    let mut order: Vec<u32> = (0..seen).collect();
                    order.sort_by(|&a, &b| {
                        let forced = |block: u32| block < first as u32;
                        let score = |block: u32| of_row[block as usize];
                        forced(b).cmp(&forced(a)).then(score(b).total_cmp(&score(a)))
                    });
                    order.truncate(2);
                    order.sort_unstable();
                    assert_eq!(lists[sequence * 2..][..2], order, "{dtype:?} {sequence} {first}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_named() -> Result<()> {
    let device = Device::Cpu;
    let (table, lengths) = (Tensor::new(&TABLE, &device)?, Tensor::new(&LENGTHS, &device)?);
    let (q, k) = (normal(&[2, 1, 4, 16], DType::F32)?, normal(&[8, SLOTS, 2, 16], DType::F32)?);
    let lists = Tensor::zeros((1, 2, 3), DType::U32, &device)?;
    let message = |q: &Tensor, lists: &Tensor, table: &Tensor, lengths: &Tensor, granularity| {
        let sequences =
            Sequences { lengths: Some(lengths), block_table: Some(table), ..Sequences::default() };
        let call = IndexAttention::new(q, &k, &k, lists, granularity);
        IndexAttention { sequences, ..call }.forward().unwrap_err().to_string()
    };
    let floats = lists.to_dtype(DType::F32)?;
    let rows = Tensor::zeros((1, 3, 3), DType::U32, &device)?;
    let long = Tensor::new(&[65u32, 6], &device)?;
    let beyond = Tensor::new(&[[3u32, 8, 0, 0], [0; 4]], &device)?;
    let var = Var::from_tensor(&q)?;
    let keys = normal(&[2, SLOTS, 2, 16], DType::F32)?;
    let scores = |q: &Tensor, granularity, groups| {
        IndexScores::new(q, &keys, granularity).compute(groups).unwrap_err().to_string()
    };
    for (found, expected) in [
        (message(&q, &floats, &table, &lengths, 16), "lists"),
        (message(&q, &rows, &table, &lengths, 16), "lists"),
        (message(&q, &lists, &table, &lengths, 0), "granularity"),
        (message(&q, &lists, &table, &long, 16), "lengths has 65 keys of sequence 0"),
        (message(&q, &lists, &beyond, &lengths, 16), "block_table has page 8 of sequence 0"),
        (message(&q.narrow(3, 0, 8)?, &lists, &table, &lengths, 16), "q has shape"),
        (message(var.as_tensor(), &lists, &table, &lengths, 16), "no gradient"),
        (scores(&q, 0, 1), "granularity"),
        (scores(&q, 16, 3), "groups is 3, expected a multiple of 2 that divides 4"),
        (scores(&q, 16, 0), "groups is 0"),
        (scores(&q, 16, usize::MAX), "groups is"),
        (scores(var.as_tensor(), 16, 1), "no gradient"),
    ] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
    let index = IndexScores::new(&q, &keys, 16);
    for count in [0, 1 << 44, usize::MAX] {
        let found = index.top_k(2, IndexTopK::new(count)).unwrap_err().to_string();
        assert!(found.contains("count is") || found.contains("a result has"), "{found}");
    }
    // Packed keys beside lengths, and ranks that are wrong.
    let offsets = Tensor::new(&[0u32, 9, SLOTS as u32], &device)?;
    let kv = Some(Offsets { offsets: &offsets, max_seqlen: 9 });
    let packed = keys.narrow(0, 0, 1)?.squeeze(0)?;
    let both = Sequences {
        lengths: Some(&lengths),
        block_table: Some(&table),
        kv,
        ..Sequences::default()
    };
    for (k, sequences) in [(&packed, both), (&table, Sequences { kv: None, ..both })] {
        let call = IndexAttention::new(&q, k, k, &lists, 16);
        let found = IndexAttention { sequences, ..call }.forward().unwrap_err().to_string();
        assert!(!found.contains("unexpected rank"), "{found}");
    }
    Ok(())
}

/// A bound on the rows of a sequence may be more than there are.
#[test]
fn bounds_of_packed_keys_may_be_large() -> Result<()> {
    let device = Device::Cpu;
    let (q, k) = (normal(&[3, 2, 16], DType::F32)?, normal(&[40, 1, 16], DType::F32)?);
    let offsets = [[0u32, 1, 3], [0, 30, 40]];
    let [of_q, of_k] = offsets.map(|of| Tensor::new(&of, &device));
    let (of_q, of_k) = (of_q?, of_k?);
    let index = |max_seqlen| {
        let sequences = Sequences {
            q: Some(Offsets { offsets: &of_q, max_seqlen: 2 }),
            kv: Some(Offsets { offsets: &of_k, max_seqlen }),
            ..Sequences::default()
        };
        let index = IndexScores { sequences, mask: Mask::causal(), ..IndexScores::new(&q, &k, 16) };
        index.top_k(1, IndexTopK::new(2))?.flatten_all()?.to_vec1::<u32>()
    };
    let lists = index(30)?;
    for max_seqlen in [3000, 1 << 30] {
        assert_eq!(index(max_seqlen)?, lists);
    }
    let found = index(usize::MAX).unwrap_err().to_string();
    assert!(found.contains("max_seqlen is 18446744073709551615, the limit is"), "{found}");
    Ok(())
}
