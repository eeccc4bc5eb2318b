use super::*;
use crate::attention::LseStrides;
use crate::{Attention, BiasProblem, CuSeqlens, Device, PackedRows, Scores, ScoresProblem, Tensor};
use blockflash_safe::{Layout, View};

const HALVES: [half::f16; 1024] = [half::f16::ONE; 1024];
const FLOATS: [f32; 1024] = [1.0; 1024];
const OFFSETS: [i32; 4] = [0, 3, 3, 5];

fn halves(shape: &[usize]) -> View<'static> {
    View::from_slice_strided(&HALVES, shape, Layout::contiguous(shape).unwrap().strides()).unwrap()
}

fn floats(shape: &[usize]) -> View<'static> {
    View::from_slice_strided(&FLOATS, shape, Layout::contiguous(shape).unwrap().strides()).unwrap()
}

/// batch 2, 5 queries, 7 keys, 4 and 2 heads, head_dim 8
fn dense() -> AttentionBackward<'static> {
    let (q, kv) = (halves(&[2, 5, 4, 8]), halves(&[2, 7, 2, 8]));
    let attention = Attention::new(q, kv, kv);
    AttentionBackward { attention, o: q, lse: floats(&[2, 4, 5]), d_o: q }
}

fn message(call: &AttentionBackward<'_>) -> String {
    call.problem().unwrap_err().to_string()
}

#[test]
fn numbers_of_dense_and_packed_tensors() {
    let problem = dense().problem().unwrap();
    let forward = AttentionProblem::dense(DType::F16, [2, 5, 7], [4, 2], 8);
    assert_eq!(problem, AttentionBackwardProblem::of(forward));
    assert_eq!(problem.forward.lse, Some(LseStrides { batch: 20, head: 5 }));
    assert_eq!(problem.dk, Strides { batch: 112, seq: 16, head: 8 });

    let offsets = View::from_slice(&OFFSETS, &[4]).unwrap();
    let cu_seqlens = Some(CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: 4, max_seqlen_kv: 3 });
    let (q, kv) = (halves(&[6, 4, 8]), halves(&[9, 2, 8]));
    let attention = Attention { cu_seqlens, ..Attention::new(q, kv, kv) };
    let packed = AttentionBackward { attention, o: q, lse: floats(&[4, 6]), d_o: q };
    let problem = packed.problem().unwrap();
    assert_eq!(problem.forward.packed, Some(PackedRows { total_q: 6, total_kv: 9 }));
    assert_eq!(problem.dq, Strides { batch: 0, seq: 32, head: 8 });
    assert_eq!(problem, AttentionBackwardProblem::of(problem.forward));
}

#[test]
fn inputs_are_checked() {
    let (wrong, call) = (halves(&[2, 5, 4, 16]), dense());
    assert!(message(&AttentionBackward { o: wrong, ..call }).contains("o has shape [2, 5, 4, 16]"));
    assert!(message(&AttentionBackward { d_o: wrong, ..call }).starts_with("d_o has shape"));
    let lse = floats(&[2, 5, 4]);
    assert!(message(&AttentionBackward { lse, ..call }).starts_with("lse has shape [2, 5, 4]"));
    let d_o = floats(&[2, 5, 4, 8]);
    assert_eq!(message(&AttentionBackward { d_o, ..call }), "d_o is f32, expected f16");
    let lse = halves(&[2, 4, 5]);
    assert_eq!(message(&AttentionBackward { lse, ..call }), "lse is f16, expected f32");
    let o = View::from_slice_strided(&HALVES, &[2, 5, 4, 8], &[320, 64, 16, 2]).unwrap();
    assert!(message(&AttentionBackward { o, ..call }).starts_with("o has strides"));
    let attention = Attention {
        scores: Scores { softcap: Some(-1.0), ..call.attention.scores },
        ..call.attention
    };
    assert!(message(&AttentionBackward { attention, ..call }).starts_with("softcap is -1"));
}

#[test]
fn gradients_are_checked() {
    let problem = dense().problem().unwrap();
    let sinks = AttentionBackwardProblem {
        forward: AttentionProblem {
            scores: ScoresProblem { sink: true, ..problem.forward.scores },
            ..problem.forward
        },
        ..problem
    };
    let with = |problem: AttentionBackwardProblem, shapes: [&[usize]; 3], d_sink: Option<usize>| {
        let mut data = shapes.map(|shape| vec![half::f16::ONE; shape.iter().product()]);
        let mut sink_data = vec![0f32; d_sink.unwrap_or(0)];
        let [dq, dk, dv] = &mut data;
        let gradients = AttentionGradientsMut {
            dq: ViewMut::from_slice(dq, shapes[0]).unwrap(),
            dk: ViewMut::from_slice(dk, shapes[1]).unwrap(),
            dv: ViewMut::from_slice(dv, shapes[2]).unwrap(),
            d_sink: d_sink.map(|heads| ViewMut::from_slice(&mut sink_data, &[heads]).unwrap()),
            dbias: None,
        };
        problem.with_gradients(&gradients).map_err(|error| error.to_string())
    };
    let (q, kv): (&[usize], &[usize]) = (&[2, 5, 4, 8], &[2, 7, 2, 8]);
    assert_eq!(with(problem, [q, kv, kv], None).unwrap(), problem);
    assert!(!with(sinks, [q, kv, kv], None).unwrap().d_sink);
    assert!(with(sinks, [q, kv, kv], Some(4)).unwrap().d_sink);
    let error = |result: Result<AttentionBackwardProblem, String>| result.unwrap_err();
    assert!(error(with(problem, [kv, kv, kv], None)).starts_with("dq has shape"));
    assert!(error(with(problem, [q, q, kv], None)).starts_with("dk has shape"));
    assert!(error(with(problem, [q, kv, q], None)).starts_with("dv has shape"));
    assert!(error(with(problem, [q, kv, kv], Some(4))).contains("as there is no sink"));
    assert!(error(with(sinks, [q, kv, kv], Some(2))).contains("d_sink has shape [2]"));
}

#[test]
fn empty_is_only_what_has_no_gradient() {
    let empty = |sizes, heads| {
        AttentionBackwardProblem::of(AttentionProblem::dense(DType::F16, sizes, heads, 8))
            .is_empty()
    };
    assert!(empty([0, 5, 5], [2, 1]) && empty([2, 0, 0], [2, 1]) && empty([2, 5, 5], [0, 0]));
    assert!(!empty([2, 0, 5], [2, 1]) && !empty([2, 5, 0], [2, 1]));
    let forward = AttentionProblem::dense(DType::F16, [0, 5, 5], [2, 1], 8);
    let sink =
        AttentionProblem { scores: ScoresProblem { sink: true, ..forward.scores }, ..forward };
    assert!(!AttentionBackwardProblem::of(sink).is_empty(), "its gradient is 0");
}

#[test]
fn gradients_of_biases_are_checked() {
    let forward = AttentionProblem::dense(DType::F16, [2, 5, 7], [4, 2], 8);
    let with = |of: Option<DType>, shape: &[usize], dtype: DType| {
        let broadcast = [true, false, false, true];
        let bias = of.map(|dtype| BiasProblem { dtype, broadcast, mapped: false });
        let scores = ScoresProblem { bias, ..forward.scores };
        let problem = AttentionBackwardProblem::of(AttentionProblem { scores, ..forward });
        assert_eq!(problem.dbias, of);
        let stream = Device::cpu().stream().unwrap();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
        let [mut dq, mut dk, mut dv] = [forward.q_shape(), forward.k_shape(), forward.v_shape()]
            .map(|s| zeros(DType::F16, &s));
        let mut dbias = zeros(dtype, shape);
        let gradients = AttentionGradientsMut {
            dbias: Some(dbias.view_mut()),
            ..AttentionGradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut())
        };
        let problem = problem.with_gradients(&gradients).map_err(|error| error.to_string())?;
        assert_eq!(problem.dbias_shape(), shape);
        problem.dbias.ok_or_else(|| "no dbias".to_owned())
    };
    let shape = [1, 4, 5, 1];
    for (bias, dtype) in [(DType::F16, DType::F16), (DType::BF16, DType::F32)] {
        assert_eq!(with(Some(bias), &shape, dtype), Ok(dtype));
    }
    let error = |result: Result<DType, String>| result.unwrap_err();
    assert!(error(with(None, &shape, DType::F32)).contains("as there is no bias"));
    assert!(
        error(with(Some(DType::F16), &shape, DType::BF16))
            .contains("dbias is bf16, expected f16 or f32")
    );
    assert!(error(with(Some(DType::F32), &shape, DType::F16)).contains("expected f32"));
    assert!(
        error(with(Some(DType::F16), &[2, 4, 5, 7], DType::F16))
            .contains("dbias has shape [2, 4, 5, 7], expected [1, 4, 5, 1]")
    );
}
