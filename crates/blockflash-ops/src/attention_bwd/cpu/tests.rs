//! What holds whatever the numbers are; the numbers are compared with the oracle in
//! `tests/tests/cpu/attention_bwd.rs`.

use crate::fixtures::values;
use crate::{
    Align, Attention, AttentionBackward, AttentionGradients, AttentionGradientsMut, BlockGeometry,
    BlockMask, CuSeqlens, DType, Device, Mask, Operation, Scores, Stream, Tensor, View, ViewMut,
};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

/// Heads of 8 elements, 4 of queries and 2 of keys.
struct Case {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    sink: Option<Vec<f32>>,
    sizes: [usize; 3],
    mask: Mask,
}

type Gradients = [Vec<f32>; 4];

fn case(sizes: [usize; 3], mask: Mask) -> Case {
    let [batch, seqlen_q, seqlen_kv] = sizes;
    let (rows_q, rows_kv) = (batch * seqlen_q * 4 * 8, batch * seqlen_kv * 2 * 8);
    let [q, d_o] = [1, 4].map(|seed| values(rows_q, seed));
    let [k, v] = [2, 3].map(|seed| values(rows_kv, seed));
    Case { q, k, v, d_o, sink: None, sizes, mask }
}

impl Case {
    fn attention(&self) -> Attention<'_> {
        let [batch, seqlen_q, seqlen_kv] = self.sizes;
        let view =
            |data, seqlen, heads| View::from_slice(data, &[batch, seqlen, heads, 8]).unwrap();
        let sink = self.sink.as_ref().map(|sink| View::from_slice(sink, &[4]).unwrap());
        let (q, k, v) =
            (view(&self.q, seqlen_q, 4), view(&self.k, seqlen_kv, 2), view(&self.v, seqlen_kv, 2));
        Attention {
            scores: Scores { mask: self.mask, sink, ..Scores::default() },
            ..Attention::new(q, k, v)
        }
    }

    fn run(&self, block_mask: Option<&BlockMask>) -> Gradients {
        let stream = cpu();
        let attention = Attention { block_mask, ..self.attention() };
        let output = attention.forward(&stream).unwrap();
        let d_o = View::from_slice(&self.d_o, attention.q.shape()).unwrap();
        downloaded(&attention.backward(&output, d_o, &stream).unwrap())
    }
}

fn downloaded(gradients: &AttentionGradients) -> Gradients {
    let stream = cpu();
    let download = |tensor: &Tensor| tensor.to_vec::<f32>(&stream).unwrap();
    let AttentionGradients { dq, dk, dv, d_sink, .. } = gradients;
    let d_sink = d_sink.as_ref().map(download).unwrap_or_default();
    [download(dq), download(dk), download(dv), d_sink]
}

#[test]
fn every_block_is_no_block_mask() {
    for mask in [
        Mask::Full,
        Mask::causal(),
        Mask::Window { left: Some(70), right: Some(3), align: Align::TopLeft },
    ] {
        for sizes in [[1, 1, 1], [2, 130, 3], [1, 3, 300], [1, 300, 700]] {
            let case = case(sizes, mask);
            let geometry = BlockGeometry::new(sizes[1], sizes[2], 128, 128).unwrap();
            // Tasks are cut at multiples of 128 rows either way.
            let every = BlockMask::full(geometry).unwrap();
            assert!(case.run(Some(&every)) == case.run(None), "{mask:?} {sizes:?}");
        }
    }
}

#[test]
fn what_attends_nothing_has_no_gradient() {
    for sizes in [[2, 5, 0], [2, 0, 5], [0, 5, 5]] {
        let case = Case { sink: Some(vec![0.5; 4]), ..case(sizes, Mask::Full) };
        let gradients = case.run(None);
        assert_eq!(
            gradients.each_ref().map(Vec::len),
            [case.q.len(), case.k.len(), case.v.len(), 4]
        );
        assert!(gradients.iter().flatten().all(|&x| x == 0.0), "{sizes:?}");
    }
    // 60 queries stand before the first key.
    let [dq, dk, dv, _] = case([1, 100, 40], Mask::causal()).run(None);
    assert!(dq[..60 * 4 * 8].iter().all(|&x| x == 0.0));
    assert!([&dq[62 * 4 * 8..], &dk, &dv].iter().all(|d| d.iter().all(|&x| x != 0.0)));
    // The last 8 keys are beyond every window.
    let window = Mask::Window { left: Some(3), right: Some(1), align: Align::TopLeft };
    let far = case([1, 31, 40], window).run(None);
    assert!([&far[1], &far[2]].iter().all(|d| d[32 * 2 * 8..].iter().all(|&x| x == 0.0)));
}

#[test]
fn masked_products_may_overflow() {
    // Only query 0 attends key 0, whose products with other queries overflow.
    let mask = Mask::Window { left: Some(0), right: None, align: Align::TopLeft };
    let mut case = case([1, 40, 40], mask);
    for row in case.q.chunks_exact_mut(8).chain(case.d_o.chunks_exact_mut(8)) {
        row[0] = 2.0;
    }
    let [expected, ..] = case.run(None);
    case.k[..16].fill(3e38);
    case.v[..16].fill(-3e38);
    let [found, ..] = case.run(None);
    assert_eq!(found[4 * 8..], expected[4 * 8..]);
    assert!(found[..8].iter().any(|x| !x.is_finite()));
}

/// Sequences, groups of heads and blocks keep NaN to themselves.
#[test]
fn nan_stays_in_its_sequence_its_heads_and_its_blocks() {
    let rows = |sequence: usize, group: usize, d: &[f32], heads: usize| -> Vec<f32> {
        let head = |at: usize| at / 8 % heads / (heads / 2) == group;
        let seqlen = d.len() / 2;
        let chosen = (sequence * seqlen..(sequence + 1) * seqlen).filter(|&at| head(at));
        chosen.map(|at| d[at]).collect()
    };
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = case([2, 70, 90], Mask::causal());
        let clean = case.run(None);
        // Of sequence 1, head 1 of keys; every query of it attends the key.
        case.k[(90 + 5) * 2 * 8 + 8] = bad;
        let found = case.run(None);
        for (found, clean, heads) in
            [(&found[0], &clean[0], 4), (&found[1], &clean[1], 2), (&found[2], &clean[2], 2)]
        {
            for (sequence, group) in [(0, 0), (0, 1), (1, 0)] {
                let pick = |d| rows(sequence, group, d, heads);
                assert_eq!(pick(found), pick(clean), "{bad} {sequence} {group}");
            }
        }
        let attending = rows(1, 1, &found[0], 4);
        assert!(attending.chunks_exact(8).all(|row| row.iter().any(|x| x.is_nan())), "{bad}");
    }
    // The second row of blocks visits neither the first column nor the other way round.
    let mut case = case([1, 200, 200], Mask::Full);
    let geometry = BlockGeometry::new(200, 200, 128, 128).unwrap();
    let mask = BlockMask::from_bool(geometry, 1, 1, &[true, false, false, true]).unwrap();
    let clean = case.run(Some(&mask));
    (case.k[3], case.v[77], case.d_o[5]) = (f32::NAN, f32::INFINITY, f32::NAN);
    let found = case.run(Some(&mask));
    let beyond = [128 * 4 * 8, 128 * 2 * 8, 128 * 2 * 8];
    for (at, start) in beyond.into_iter().enumerate() {
        assert_eq!(found[at][start..], clean[at][start..]);
        assert!(found[at][..start].iter().any(|x| x.is_nan()));
    }
}

#[test]
fn packed_rows_of_no_sequence_are_zeroed_and_not_read() {
    let (cu_q, cu_kv) = ([0i32, 4, 4, 9], [0i32, 6, 11, 11]);
    let [mut q, mut d_o] = [1, 4].map(|seed| values(10 * 4 * 8, seed));
    let [mut k, mut v] = [2, 3].map(|seed| values(12 * 2 * 8, seed));
    for data in [&mut q, &mut d_o] {
        data[9 * 4 * 8..].fill(f32::NAN);
    }
    for data in [&mut k, &mut v] {
        data[11 * 2 * 8..].fill(f32::NAN);
    }
    let stream = cpu();
    let rows = |data| View::from_slice(data, &[10, 4, 8]).unwrap();
    let keys = |data| View::from_slice(data, &[12, 2, 8]).unwrap();
    let offsets = |data| View::from_slice(data, &[4]).unwrap();
    let cu_seqlens =
        CuSeqlens { q: offsets(&cu_q), kv: offsets(&cu_kv), max_seqlen_q: 5, max_seqlen_kv: 6 };
    let attention =
        Attention { cu_seqlens: Some(cu_seqlens), ..Attention::new(rows(&q), keys(&k), keys(&v)) };
    let (mut o, mut lse) = (vec![f32::NAN; 320], vec![f32::NAN; 40]);
    let (o_view, lse_view) = (
        ViewMut::from_slice(&mut o, &[10, 4, 8]).unwrap(),
        ViewMut::from_slice(&mut lse, &[4, 10]).unwrap(),
    );
    attention.forward_into(o_view, Some(lse_view), &stream).unwrap();
    let lse = View::from_slice(&lse, &[4, 10]).unwrap();
    let backward = AttentionBackward { attention, o: rows(&o), lse, d_o: rows(&d_o) };
    let [dq, dk, dv, _] = downloaded(&backward.backward(&stream).unwrap());
    assert!([&dq, &dk, &dv].iter().all(|d| d.iter().all(|x| x.is_finite())));
    // The second sequence has no queries, the third no keys.
    assert!(dq[4 * 4 * 8..].iter().all(|&x| x == 0.0));
    assert!([&dk, &dv].iter().all(|d| d[6 * 2 * 8..].iter().all(|&x| x == 0.0)));
    // The first is alone.
    let alone = Case {
        q: q[..128].to_vec(),
        k: k[..96].to_vec(),
        v: v[..96].to_vec(),
        d_o: d_o[..128].to_vec(),
        sink: None,
        sizes: [1, 4, 6],
        mask: Mask::Full,
    };
    let [dq_alone, dk_alone, dv_alone, _] = alone.run(None);
    assert_eq!([&dq[..128], &dk[..96], &dv[..96]], [&dq_alone[..], &dk_alone, &dv_alone]);
}

#[test]
fn prepared_calls_repeat() {
    let case = case([1, 50, 60], Mask::causal());
    let stream = cpu();
    let attention = case.attention();
    let output = attention.forward(&stream).unwrap();
    let d_o = View::from_slice(&case.d_o, attention.q.shape()).unwrap();
    let call = AttentionBackward { attention, o: output.o.view(), lse: output.lse.view(), d_o };
    assert_eq!(call.workspace_bytes(stream.device()).unwrap(), 0);
    let expected = downloaded(&call.backward(&stream).unwrap());
    let mut gradients = call.backward(&stream).unwrap();
    for tensor in [&mut gradients.dq, &mut gradients.dk, &mut gradients.dv] {
        tensor.fill_bytes(&stream, 0xff).unwrap();
    }
    let prepared = call.prepare(&(gradients.view_mut(), None), &stream).unwrap();
    assert!(prepared.kernel().is_none());
    call.run_prepared(&prepared, (gradients.view_mut(), None), &stream).unwrap();
    assert_eq!(downloaded(&gradients), expected);
    let other = AttentionBackward {
        attention: Attention {
            scores: Scores { mask: Mask::Full, ..attention.scores },
            ..attention
        },
        ..call
    };
    let error = other.run_prepared(&prepared, (gradients.view_mut(), None), &stream).unwrap_err();
    assert!(error.to_string().contains("this attention_bwd call differs"), "{error}");
    // A workspace is welcome where none is needed, if it is one.
    let mut bytes = Tensor::empty(&stream, DType::U8, &[3]).unwrap();
    call.backward_into(gradients.view_mut(), Some(bytes.view_mut()), &stream).unwrap();
    let mut floats = [0f32; 3];
    let floats = ViewMut::from_slice(&mut floats, &[3]).unwrap();
    let error = call.backward_into(gradients.view_mut(), Some(floats), &stream).unwrap_err();
    assert_eq!(error.to_string(), "workspace is f32, expected u8");
}

#[test]
fn gradients_share_no_order_with_their_tensors() {
    let case = case([2, 5, 7], Mask::Full);
    let stream = cpu();
    let attention = case.attention();
    let output = attention.forward(&stream).unwrap();
    let d_o = View::from_slice(&case.d_o, attention.q.shape()).unwrap();
    let call = AttentionBackward { attention, o: output.o.view(), lse: output.lse.view(), d_o };
    let [dq_expected, ..] = downloaded(&call.backward(&stream).unwrap());
    // dq as [batch, heads, seqlen, head_dim] with rows 3 elements apart.
    let mut dq = vec![7f32; 2 * 4 * 5 * 11];
    let (mut dk, mut dv) = (vec![7f32; 224], vec![7f32; 224]);
    let gradients = AttentionGradientsMut::new(
        ViewMut::from_slice_strided(&mut dq, &[2, 5, 4, 8], &[220, 11, 55, 1]).unwrap(),
        ViewMut::from_slice(&mut dk, &[2, 7, 2, 8]).unwrap(),
        ViewMut::from_slice(&mut dv, &[2, 7, 2, 8]).unwrap(),
    );
    call.backward_into(gradients, None, &stream).unwrap();
    for (at, &x) in dq.iter().enumerate() {
        let (b, h, i, e) = (at / 220, at / 55 % 4, at / 11 % 5, at % 11);
        let expected = if e < 8 { dq_expected[((b * 5 + i) * 4 + h) * 8 + e] } else { 7.0 };
        assert_eq!(x, expected, "dq[{b}, {i}, {h}, {e}]");
    }
}
