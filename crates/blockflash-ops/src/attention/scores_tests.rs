use super::*;
use crate::attention::CuSeqlens;
use crate::{Attention, AttentionDecode, KvCache, PackedTokens};
use blockflash_safe::Layout;
use half::f16;

const DATA: [f16; 4096] = [f16::ONE; 4096];

fn view(shape: &[usize]) -> View<'static> {
    strided(shape, Layout::contiguous(shape).unwrap().strides())
}

fn strided(shape: &[usize], strides: &[usize]) -> View<'static> {
    View::from_slice_strided(&DATA, shape, strides).unwrap()
}

/// batch 2, 5 queries, 7 keys, 4 and 2 heads, head_dim 8
fn dense() -> Attention<'static> {
    Attention::new(view(&[2, 5, 4, 8]), view(&[2, 7, 2, 8]), view(&[2, 7, 2, 8]))
}

fn message(attention: &Attention<'_>) -> String {
    attention.problem().unwrap_err().to_string()
}

#[test]
fn biases_are_checked() {
    let with = |bias: View<'static>| Attention {
        scores: Scores { bias: Some(bias), ..dense().scores },
        ..dense()
    };
    for (shape, broadcast, mapped) in [
        ([2, 4, 5, 7], [false; 4], false),
        ([1, 4, 5, 7], [true, false, false, false], false),
        ([2, 1, 5, 1], [false, true, false, true], false),
        ([1, 1, 1, 7], [true, true, true, false], true),
        ([1; 4], [true; 4], true),
    ] {
        let bias = BiasProblem { dtype: DType::F16, broadcast, mapped };
        let problem = with(view(&shape)).problem().unwrap();
        assert_eq!((problem.scores.bias, problem.terms()), (Some(bias), Some("bias")));
        assert_eq!(bias.shape(&problem), shape);
    }
    // Any strides.
    let spread = strided(&[2, 4, 5, 7], &[0, 3, 0, 2]);
    assert!(with(spread).problem().unwrap().scores.bias.is_some());
    // A tensor map describes rows of keys at multiples of 16 bytes.
    for (strides, mapped) in [
        ([160, 40, 8, 1], true),
        ([168, 40, 8, 1], true),
        ([160, 40, 7, 1], false),
        ([160, 36, 8, 1], false),
        ([164, 40, 8, 1], false),
        ([0, 40, 8, 1], false),
        ([160, 40, 16, 2], false),
    ] {
        let bias = with(strided(&[2, 4, 5, 7], &strides)).problem().unwrap().scores.bias;
        assert_eq!(bias.unwrap().mapped, mapped, "{strides:?}");
    }
    // A dimension of extent 1 has no stride.
    let one_batch = with(strided(&[1, 4, 5, 7], &[3, 40, 8, 1])).problem().unwrap();
    assert!(one_batch.scores.bias.unwrap().mapped);
    // An extent of 1 is that of the problem, where it has no other.
    let one = view(&[1, 1, 1, 8]);
    let call = Attention::new(one, one, one);
    let call = Attention { scores: Scores { bias: Some(view(&[1; 4])), ..call.scores }, ..call };
    assert_eq!(call.problem().unwrap().scores.bias.unwrap().broadcast, [false; 4]);

    for shape in [&[2, 4, 5][..], &[2, 4, 5, 6], &[3, 4, 5, 7], &[2, 2, 5, 7], &[2, 4, 1, 0]] {
        let message = message(&with(view(shape)));
        let expected = "expected [2 or 1, 4 or 1, 5 or 1, 7 or 1]";
        assert!(message.contains(&format!("bias has shape {shape:?}, {expected}")), "{message}");
    }
    let numbers = [0i32; 7];
    let numbers = View::from_slice(&numbers, &[1, 1, 1, 7]).unwrap();
    let call = Attention { scores: Scores { bias: Some(numbers), ..dense().scores }, ..dense() };
    assert!(message(&call).contains("bias is i32, expected f16 or bf16 or f32"));
}

#[test]
fn packed_sequences_take_no_bias() {
    let offsets = [0, 2, 5];
    let offsets = View::from_slice(&offsets, &[3]).unwrap();
    let cu_seqlens = Some(CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: 3, max_seqlen_kv: 3 });
    let rows = view(&[5, 2, 8]);
    let packed = Attention { cu_seqlens, ..Attention::new(rows, rows, rows) };
    let bias = Some(view(&[1, 1, 3, 3]));
    let call = Attention { scores: Scores { bias, ..packed.scores }, ..packed };
    assert!(message(&call).contains("expected no bias, as sequences are packed (cu_seqlens)"));
    let slopes = [0f32; 4];
    for shape in [&[2][..], &[2, 2]] {
        let alibi = Some(View::from_slice(&slopes[..shape.iter().product()], shape).unwrap());
        let call = Attention { scores: Scores { alibi, ..packed.scores }, ..packed };
        assert!(call.problem().unwrap().scores.alibi);
    }
}

#[test]
fn slopes_are_checked() {
    let slopes = [0f32; 16];
    let with = |shape: &[usize], strides: &[usize]| {
        let alibi = Some(View::from_slice_strided(&slopes, shape, strides).unwrap());
        Attention { scores: Scores { alibi, ..dense().scores }, ..dense() }
            .problem()
            .map_err(|error| error.to_string())
    };
    for (shape, strides) in [(&[4][..], &[1][..]), (&[4], &[3]), (&[2, 4], &[4, 1])] {
        let problem = with(shape, strides).unwrap();
        assert_eq!((problem.scores.alibi, problem.terms()), (true, Some("alibi")));
    }
    assert!(with(&[2, 4], &[0, 2]).is_ok());
    for shape in [&[2][..], &[1, 4], &[4, 2], &[2, 4, 1]] {
        let error = with(shape, &[1; 3][..shape.len()]).unwrap_err();
        assert!(error.contains(&format!("alibi has shape {shape:?}, expected [4] or [2, 4]")));
    }
    let call =
        Attention { scores: Scores { alibi: Some(view(&[4])), ..dense().scores }, ..dense() };
    assert!(message(&call).contains("alibi is f16, expected f32"));
}

#[test]
fn some_heads_have_their_part_of_each_tensor() {
    let numbers: Vec<f32> = (0..24).map(|x| x as f32).collect();
    let of = |shape: &[usize]| {
        Some(View::from_slice(&numbers[..shape.iter().product()], shape).unwrap())
    };
    let scores =
        Scores { sink: of(&[4]), bias: of(&[1, 4, 2, 3]), alibi: of(&[2, 4]), ..Scores::default() };
    let stream = Device::cpu().stream().unwrap();
    let part = scores.of_heads(2..4).unwrap();
    let values = part.map(|tensor| (tensor.shape().to_vec(), tensor.to_vec(&stream).unwrap()));
    assert_eq!(values.sink, Some((vec![2], vec![2.0, 3.0])));
    let bias = (12..24).map(|x| x as f32).collect();
    assert_eq!(values.bias, Some((vec![1, 2, 2, 3], bias)));
    assert_eq!(values.alibi, Some((vec![2, 2], vec![2.0, 3.0, 6.0, 7.0])));

    let all = Scores { bias: of(&[2, 1, 2, 3]), ..Scores::default() };
    assert_eq!(all.of_heads(2..4).unwrap().bias.unwrap().shape(), [2, 1, 2, 3]);
    assert!(Scores { alibi: of(&[3]), ..Scores::default() }.of_heads(2..4).is_err());
}

#[test]
fn over_a_cache_a_bias_has_its_capacity() {
    let (q, slots) = (view(&[2, 3, 4, 8]), view(&[5, 4, 2, 8]));
    let table = [0i32; 6];
    let table = View::from_slice(&table, &[2, 3]).unwrap();
    let cache = KvCache { block_table: Some(table), ..KvCache::new(slots, slots) };
    let with = |q, packed, shape: &[usize]| {
        let scores = Scores { bias: Some(view(shape)), ..Scores::default() };
        let call = AttentionDecode { packed, scores, ..AttentionDecode::new(q) };
        call.problem(&cache).map_err(|error| error.to_string())
    };
    for shape in [[2, 4, 3, 12], [1, 1, 3, 12], [2, 1, 1, 1]] {
        assert_eq!(with(q, None, &shape).unwrap().attention.terms(), Some("bias"));
    }
    let error = with(q, None, &[2, 4, 3, 11]).unwrap_err();
    assert!(error.contains("expected [2 or 1, 4 or 1, 3 or 1, 12 or 1]"), "{error}");
    let offsets = [0, 1, 5];
    let packed =
        PackedTokens { cu_seqlens: View::from_slice(&offsets, &[3]).unwrap(), max_seqlen: 4 };
    let error = with(view(&[5, 4, 8]), Some(packed), &[2, 4, 4, 12]).unwrap_err();
    assert!(error.contains("expected no bias"), "{error}");
}
