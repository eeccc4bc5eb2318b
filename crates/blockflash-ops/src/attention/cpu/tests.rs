use super::reference::{Case, assert_close, case, cpu};
use crate::fixtures::values;
use crate::{Align, Attention, CuSeqlens, Element, Error, Mask, Operation, Tensor, View, ViewMut};
use blockflash_sys::{DType, manifest};
use half::{bf16, f16};

/// Lengths around the block sizes of the backend, and both ways of being unequal.
const LENGTHS: [[usize; 3]; 6] =
    [[1, 1, 1], [2, 5, 7], [1, 130, 3], [1, 3, 300], [1, 257, 129], [1, 150, 600]];

#[test]
fn full() {
    for sizes in LENGTHS {
        case(sizes, [4, 2], 8, Mask::Full).check();
    }
    case([1, 20, 30], [2, 2], 72, Mask::Full).check();
    case([1, 20, 30], [3, 1], 1, Mask::Full).check();
}

#[test]
fn masks() {
    for align in [Align::TopLeft, Align::BottomRight] {
        for sizes in LENGTHS {
            case(sizes, [2, 1], 8, Mask::Causal { align }).check();
            for (left, right) in
                [(Some(0), Some(0)), (Some(40), Some(3)), (Some(2), None), (None, Some(300))]
            {
                case(sizes, [1, 1], 8, Mask::Window { left, right, align }).check();
            }
        }
    }
}

#[test]
fn softcap_and_sink() {
    for sizes in LENGTHS {
        let plain = case(sizes, [4, 2], 8, Mask::causal());
        Case { softcap: Some(0.5), ..plain.clone() }.check();
        let sink = Some(vec![0.3, -2.0, 50.0, f32::NEG_INFINITY]);
        Case { sink, softcap: Some(20.0), ..plain }.check();
    }
}

#[test]
fn nothing_to_attend() {
    let (o, lse) = case([1, 3, 0], [2, 2], 8, Mask::Full).run();
    assert!(o.iter().all(|&o| o == 0.0) && lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
    let sink = Some(vec![0.5, -1.0]);
    let (o, lse) = Case { sink, ..case([1, 3, 0], [2, 2], 8, Mask::Full) }.run();
    assert!(o.iter().all(|&o| o == 0.0));
    assert_close(&lse, &[0.5, 0.5, 0.5, -1.0, -1.0, -1.0], 0.0);
}

#[test]
fn masked_nan_and_infinity_do_not_leak() {
    for bad in [f32::NAN, f32::INFINITY] {
        for (seqlen_q, seqlen_kv, key) in [(40, 40, 20), (300, 300, 150), (200, 500, 299)] {
            let mut case = case([1, seqlen_q, seqlen_kv], [1, 1], 8, Mask::causal());
            case.k[key * 8 + 3] = bad;
            case.v[key * 8 + 5] = bad;
            let ((o, lse), clean) = (
                case.run(),
                Case { k: values(case.k.len(), 2), v: values(case.v.len(), 3), ..case.clone() },
            );
            let (o_clean, lse_clean) = clean.reference();
            let before = (0..seqlen_q)
                .find(|&i| case.mask.visible(i, seqlen_q, seqlen_kv).contains(&key))
                .unwrap();
            assert_close(&o[..before * 8], &o_clean[..before * 8], 3e-6);
            assert_close(&lse[..before], &lse_clean[..before], 3e-6);
            // A query that attends the key is told.
            assert!(o[before * 8 + 5].is_nan());
        }
    }
}

#[test]
fn attended_infinite_values_arrive() {
    let mut case = case([1, 70, 70], [1, 1], 8, Mask::causal());
    case.v[10 * 8 + 2] = f32::INFINITY;
    let (o, _) = case.run();
    for (i, row) in o.chunks_exact(8).enumerate() {
        assert_eq!(row[2] == f32::INFINITY, i >= 10);
        assert!(row[3].is_finite());
    }
}

#[test]
fn minus_infinite_scores_are_nothing() {
    let mut case = case([1, 2, 3], [1, 1], 8, Mask::Full);
    (case.q, case.k) = (vec![1.0; 16], vec![f32::NEG_INFINITY; 24]);
    let (o, lse) = case.run();
    assert!(o.iter().all(|&o| o == 0.0) && lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
}

fn half_precision<T: Element>(convert: fn(f32) -> T, back: fn(T) -> f64, tolerance: f64) {
    let case = case([2, 33, 40], [2, 1], 16, Mask::causal());
    let [q, k, v] = [&case.q, &case.k, &case.v]
        .map(|data| data.iter().map(|&x| convert(x)).collect::<Vec<T>>());
    let q = View::from_slice(&q, &[2, 33, 2, 16]).unwrap();
    let [k, v] = [&k, &v].map(|data| View::from_slice(data, &[2, 40, 1, 16]).unwrap());
    let stream = cpu();
    let attention = Attention { scores: case.mask.into(), ..Attention::new(q, k, v) };
    let output = attention.forward(&stream).unwrap();
    assert_eq!((output.o.dtype(), output.lse.dtype()), (T::DTYPE, DType::F32));
    // The reference sees the rounded inputs, so that only the output is rounded once more.
    let [q, k, v] = [q, k, v].map(|view| {
        let rounded = view.as_slice::<T>().unwrap();
        rounded.iter().map(|&x| back(x) as f32).collect()
    });
    let (o, lse) = Case { q, k, v, ..case }.reference();
    let found: Vec<f32> =
        output.o.to_vec::<T>(&stream).unwrap().into_iter().map(|x| back(x) as f32).collect();
    assert_close(&found, &o, tolerance);
    assert_close(&output.lse.to_vec(&stream).unwrap(), &lse, 3e-6);
}

#[test]
fn f16_and_bf16() {
    half_precision(f16::from_f32, f16::to_f64, 1.0 / 2048.0);
    half_precision(bf16::from_f32, bf16::to_f64, 1.0 / 256.0);
}

#[test]
fn strides_are_followed_and_gaps_left_alone() {
    let case = case([2, 5, 7], [4, 2], 8, Mask::causal());
    let (o_reference, lse_reference) = case.run();
    let stream = cpu();
    // o as [batch, heads, seqlen, head_dim] with rows 3 elements apart, lse rows 2 apart.
    let (mut o, mut lse) = (vec![7f32; 2 * 4 * 5 * 11], vec![7f32; 2 * 4 * 7]);
    let o_view = ViewMut::from_slice_strided(&mut o, &[2, 5, 4, 8], &[220, 11, 55, 1]).unwrap();
    let lse_view = ViewMut::from_slice_strided(&mut lse, &[2, 4, 5], &[28, 7, 1]).unwrap();
    case.attention().forward_into(o_view, Some(lse_view), &stream).unwrap();
    for (at, &x) in o.iter().enumerate() {
        let (b, h, i, e) = (at / 220, at / 55 % 4, at / 11 % 5, at % 11);
        let expected = if e < 8 { o_reference[((b * 5 + i) * 4 + h) * 8 + e] } else { 7.0 };
        assert_eq!(x, expected, "o[{b}, {i}, {h}, {e}]");
    }
    for (at, &x) in lse.iter().enumerate() {
        let expected = if at % 7 < 5 { lse_reference[at / 7 * 5 + at % 7] } else { 7.0 };
        assert_eq!(x, expected, "lse {at}");
    }
    // The same inputs, heads first, and no lse.
    let permuted = |data: &[f32], seqlen: usize, heads: usize| -> Vec<f32> {
        let at = |b, h, i, e| data[((b * seqlen + i) * heads + h) * 8 + e];
        let indices = (0..data.len())
            .map(|x| (x / (8 * seqlen * heads), x / (8 * seqlen) % heads, x / 8 % seqlen, x % 8));
        indices.map(|(b, h, i, e)| at(b, h, i, e)).collect()
    };
    let [q, k, v] = [permuted(&case.q, 5, 4), permuted(&case.k, 7, 2), permuted(&case.v, 7, 2)];
    let view = |data, seqlen, heads| {
        View::from_slice(data, &[2, heads, seqlen, 8]).unwrap().permute(&[0, 2, 1, 3]).unwrap()
    };
    let mut contiguous = Tensor::empty(&stream, DType::F32, &[2, 5, 4, 8]).unwrap();
    Attention { q: view(&q, 5, 4), k: view(&k, 7, 2), v: view(&v, 7, 2), ..case.attention() }
        .forward_into(contiguous.view_mut(), None, &stream)
        .unwrap();
    assert_eq!(contiguous.to_vec::<f32>(&stream).unwrap(), o_reference);
}

#[test]
fn variable_length_is_each_sequence_alone() {
    // Three sequences, one of them without queries and one without keys, and packed rows that
    // belong to none.
    let (cu_q, cu_kv) = ([0i32, 4, 4, 9], [0i32, 6, 11, 11]);
    let (q, kv) = (values(10 * 2 * 8, 1), values(12 * 8, 2));
    let (q_view, kv_view) =
        (View::from_slice(&q, &[10, 2, 8]).unwrap(), View::from_slice(&kv, &[12, 1, 8]).unwrap());
    let offsets = |data| View::from_slice(data, &[4]).unwrap();
    let cu_seqlens =
        CuSeqlens { q: offsets(&cu_q), kv: offsets(&cu_kv), max_seqlen_q: 5, max_seqlen_kv: 6 };
    let call = Attention {
        scores: Mask::causal().into(),
        cu_seqlens: Some(cu_seqlens),
        ..Attention::new(q_view, kv_view, kv_view)
    };
    let stream = cpu();
    let (mut o, mut lse) = (vec![7f32; 160], vec![7f32; 20]);
    let (o_view, lse_view) = (
        ViewMut::from_slice(&mut o, &[10, 2, 8]).unwrap(),
        ViewMut::from_slice(&mut lse, &[2, 10]).unwrap(),
    );
    call.forward_into(o_view, Some(lse_view), &stream).unwrap();

    let mut alone = case([1, 4, 6], [2, 1], 8, Mask::causal());
    (alone.q, alone.k, alone.v) = (q[..64].to_vec(), kv[..48].to_vec(), kv[..48].to_vec());
    let (o_alone, lse_alone) = alone.run();
    assert_eq!(o[..64], o_alone);
    assert_eq!([&lse[..4], &lse[10..14]].concat(), lse_alone);
    assert!(o[64..144].iter().all(|&o| o == 0.0), "the last sequence has no keys");
    assert!(
        o[144..].iter().chain([&lse[9], &lse[19]]).all(|&x| x == 7.0),
        "rows of no sequence are left alone"
    );
    assert!(lse[4..9].iter().chain(&lse[14..19]).all(|&lse| lse == f32::NEG_INFINITY));

    let allocated = call.forward(&stream).unwrap();
    assert_eq!(allocated.o.to_vec::<f32>(&stream).unwrap()[144..], [0.0; 16]);
    call.check_cu_seqlens(&stream).unwrap();
    cu_seqlens.check(&stream).unwrap();
}

#[test]
fn bad_offsets_are_errors() {
    let data = values(12 * 8, 1);
    let rows = View::from_slice(&data, &[12, 1, 8]).unwrap();
    let stream = cpu();
    for (offsets, max_seqlen) in [([1, 4, 6], 9), ([0, 5, 4], 9), ([0, 4, 13], 9), ([0, 4, 12], 7)]
    {
        let good = [0, 6, 12];
        for (q, kv) in [(&offsets, &good), (&good, &offsets)] {
            let [q, kv] = [q, kv].map(|offsets| View::from_slice(offsets, &[3]).unwrap());
            let cu_seqlens =
                Some(CuSeqlens { q, kv, max_seqlen_q: max_seqlen, max_seqlen_kv: max_seqlen });
            let call = Attention { cu_seqlens, ..Attention::new(rows, rows, rows) };
            assert!(
                matches!(call.forward(&stream), Err(Error::InvalidCuSeqlens { .. })),
                "{offsets:?}"
            );
            assert!(
                matches!(call.check_cu_seqlens(&stream), Err(Error::InvalidCuSeqlens { .. })),
                "{offsets:?}"
            );
        }
    }
}

#[test]
fn nothing_to_compute_is_fine() {
    for (sizes, heads) in [([0, 5, 7], [2, 1]), ([2, 0, 7], [2, 1]), ([2, 5, 7], [0, 0])] {
        let (o, lse) = case(sizes, heads, 8, Mask::causal()).run();
        assert!(o.is_empty() && lse.is_empty());
    }
}

#[test]
fn kernels_do_not_run_here() {
    let case = case([1, 4, 4], [1, 1], 8, Mask::Full);
    let mut o = vec![0f32; 32];
    for kernel in manifest::kernels().iter().take(3) {
        let o = ViewMut::from_slice(&mut o, &[1, 4, 1, 8]).unwrap();
        let error = case.attention().run_with(kernel, (o, None), &cpu()).unwrap_err().to_string();
        assert!(
            error.contains("not supported on cpu") && error.contains(&kernel.symbol()),
            "{error}"
        );
    }
}

/// Rows that share keys, block by block of whatever size, and few of them in another way.
#[test]
fn a_sequence_has_its_bits_in_any_batch() {
    let masks = [
        Mask::Full,
        Mask::causal(),
        Mask::Window { left: Some(100), right: Some(3), align: Align::BottomRight },
    ];
    for (mask, [seqlen_q, seqlen_kv]) in
        masks.into_iter().flat_map(|mask| [[1, 300], [3, 300], [70, 400]].map(|l| (mask, l)))
    {
        let alone = case([1, seqlen_q, seqlen_kv], [4, 2], 24, mask);
        let mut alone = Case { softcap: Some(3.0), ..alone };
        // One element of a value that some rows do not see.
        alone.v[200 * 2 * 24 + 5] = f32::NAN;
        let repeated = |row: &[f32]| row.repeat(80);
        let many = Case {
            sizes: [80, seqlen_q, seqlen_kv],
            q: repeated(&alone.q),
            k: repeated(&alone.k),
            v: repeated(&alone.v),
            ..alone.clone()
        };
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let ((o, lse), (o_many, lse_many)) = (alone.run(), many.run());
        for (one, all) in [(o, o_many), (lse, lse_many)] {
            assert!(all.chunks_exact(one.len()).all(|row| bits(row) == bits(&one)), "{mask:?}");
        }
    }
}

/// Few queries: how many heads go together depends on the threads, bits do not.
#[test]
fn few_rows_have_the_same_bits_in_any_company() {
    let window = Mask::Window { left: Some(250), right: Some(3), align: Align::BottomRight };
    for (sizes, heads, head_dim) in
        [([2, 1, 900], [12, 6], 64), ([1, 3, 1300], [6, 6], 100), ([2, 4, 700], [8, 4], 72)]
    {
        let case = case(sizes, heads, head_dim, window);
        case.check();
        let [alone, two, five] = [1, 2, 5].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| case.run())
        });
        assert!(alone == two && alone == five, "{sizes:?}");
    }
}
