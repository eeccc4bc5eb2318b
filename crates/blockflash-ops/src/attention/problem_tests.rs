use super::*;
use crate::{Align, Mask, Scores};
use blockflash_safe::{Layout, View};
use half::f16;

const DATA: [f16; 4096] = [f16::ONE; 4096];
const OFFSETS: [i32; 4] = [0, 3, 3, 5];

fn view(shape: &[usize]) -> View<'static> {
    View::from_slice_strided(&DATA, shape, Layout::contiguous(shape).unwrap().strides()).unwrap()
}

fn strided(shape: &[usize], strides: &[usize]) -> View<'static> {
    View::from_slice_strided(&DATA, shape, strides).unwrap()
}

/// batch 2, 5 queries, 7 keys, 4 and 2 heads, head_dim 8
fn dense() -> Attention<'static> {
    Attention::new(view(&[2, 5, 4, 8]), view(&[2, 7, 2, 8]), view(&[2, 7, 2, 8]))
}

/// 3 sequences in 6 and 9 rows
fn packed() -> Attention<'static> {
    let offsets = View::from_slice(&OFFSETS, &[4]).unwrap();
    let cu_seqlens = CuSeqlens { q: offsets, kv: offsets, max_seqlen_q: 4, max_seqlen_kv: 3 };
    let (q, kv) = (view(&[6, 4, 8]), view(&[9, 2, 8]));
    Attention { cu_seqlens: Some(cu_seqlens), ..Attention::new(q, kv, kv) }
}

fn message(attention: &Attention<'_>) -> String {
    attention.problem().unwrap_err().to_string()
}

#[test]
fn dense_numbers() {
    let problem = dense().problem().unwrap();
    let expected = AttentionProblem::dense(DType::F16, [2, 5, 7], [4, 2], 8);
    assert_eq!(problem, expected);
    assert_eq!(problem.q, Strides { batch: 160, seq: 32, head: 8 });
    assert_eq!(problem.lse, None, "nobody has asked for it");
    assert_eq!(problem.scores.softmax_scale, 1.0 / 8f32.sqrt());
    assert!(!problem.is_empty());
}

#[test]
fn packed_numbers() {
    let problem = packed().problem().unwrap();
    assert_eq!((problem.batch, problem.seqlen_q, problem.seqlen_kv), (3, 4, 3));
    assert_eq!(problem.packed, Some(PackedRows { total_q: 6, total_kv: 9 }));
    assert_eq!(problem.q, Strides { batch: 0, seq: 32, head: 8 });
    assert_eq!(
        (problem.lse, problem.with_lse().lse),
        (None, Some(LseStrides { batch: 0, head: 6 }))
    );
    assert_eq!((problem.o_shape(), problem.lse_shape()), (vec![6, 4, 8], vec![4, 6]));
}

#[test]
fn strides_are_taken_from_the_views() {
    let heads_first = view(&[2, 4, 5, 8]).permute(&[0, 2, 1, 3]).unwrap();
    let repeated = strided(&[2, 7, 2, 8], &[0, 16, 8, 1]);
    let problem = Attention::new(heads_first, repeated, repeated).problem().unwrap();
    assert_eq!(problem.q, Strides { batch: 160, seq: 8, head: 40 });
    assert_eq!(problem.k, Strides { batch: 0, seq: 16, head: 8 });
}

#[test]
fn options_are_taken() {
    let mask = Mask::Window { left: Some(3), right: None, align: Align::TopLeft };
    let sinks = [0f32; 4];
    let sink = Some(View::from_slice(&sinks, &[4]).unwrap());
    let options = Attention {
        scores: Scores { mask, softmax_scale: Some(0.5), softcap: Some(30.0), sink, ..mask.into() },
        ..dense()
    };
    let problem = options.problem().unwrap();
    assert_eq!(
        (
            problem.scores.mask,
            problem.scores.softmax_scale,
            problem.scores.softcap,
            problem.scores.sink
        ),
        (mask, 0.5, Some(30.0), true)
    );
}

#[test]
fn shapes_are_checked() {
    let with = |q, k, v| message(&Attention::new(q, k, v));
    let (q, kv) = (view(&[2, 5, 4, 8]), view(&[2, 7, 2, 8]));
    assert!(with(view(&[5, 4, 8]), kv, kv).contains("q has shape [5, 4, 8], expected [batch"));
    assert!(with(q, view(&[7, 2, 8]), kv).contains("k has shape [7, 2, 8], expected [batch"));
    assert!(
        with(q, view(&[1, 7, 2, 8]), kv)
            .contains("k has shape [1, 7, 2, 8], expected [2, 7, 2, 8]")
    );
    assert!(with(q, view(&[2, 7, 2, 16]), kv).contains("expected [2, 7, 2, 8]"));
    assert!(
        with(q, kv, view(&[2, 6, 2, 8]))
            .contains("v has shape [2, 6, 2, 8], expected [2, 7, 2, 8]")
    );
    assert!(
        with(view(&[2, 5, 4, 0]), view(&[2, 7, 2, 0]), view(&[2, 7, 2, 0]))
            .contains("head_dim of at least 1")
    );
    for heads in [0, 3] {
        let kv = view(&[2, 7, heads, 8]);
        let error = Attention::new(q, kv, kv).problem().unwrap_err();
        let Error::HeadGroups { num_heads_q: 4, num_heads_kv } = error else { panic!("{error}") };
        assert_eq!(num_heads_kv, heads);
    }
}

#[test]
fn packed_shapes_are_checked() {
    let offsets = |length| View::from_slice(&[0i32; 9][..length], &[length]).unwrap();
    let with = |q, kv| {
        let cu_seqlens = packed().cu_seqlens.map(|cu_seqlens| CuSeqlens { q, kv, ..cu_seqlens });
        message(&Attention { cu_seqlens, ..packed() })
    };
    assert!(
        with(offsets(0), offsets(0)).contains("cu_seqlens.q has shape [0], expected [batch + 1]")
    );
    assert!(with(offsets(4), offsets(5)).contains("cu_seqlens.kv has shape [5], expected [4]"));
    assert!(with(view(&[4]), offsets(4)).contains("cu_seqlens.q is f16, expected i32"));
    assert!(with(offsets(4), view(&[4])).contains("cu_seqlens.kv is f16, expected i32"));
    let every_other = View::from_slice_strided(&[0i32; 8], &[4], &[2]).unwrap();
    assert!(with(every_other, offsets(4)).contains("cu_seqlens.q has strides [2]"));
    assert!(
        message(&Attention { q: view(&[1, 6, 4, 8]), ..packed() }).contains("expected [total_q")
    );
    assert!(
        message(&Attention { k: view(&[1, 9, 2, 8]), ..packed() }).contains("expected [total_kv")
    );
    assert!(
        message(&Attention { k: view(&[9, 2, 16]), ..packed() }).contains("expected [9, 2, 8]")
    );
    assert!(message(&Attention { v: view(&[8, 2, 8]), ..packed() }).contains("expected [9, 2, 8]"));
}

#[test]
fn types_are_checked() {
    let (floats, ints) = ([0f32; 112], [0i32; 320]);
    let f32s = View::from_slice(&floats, &[1, 7, 2, 8]).unwrap();
    let i32s = View::from_slice(&ints, &[2, 5, 4, 8]).unwrap();
    let expected = "q is i32, expected f16 or bf16 or f32 or e4m3 or e5m2 or i8";
    assert_eq!(message(&Attention { q: i32s, ..dense() }), expected);
    assert_eq!(message(&Attention { k: f32s, ..dense() }), "k is f32, expected f16");
    assert_eq!(message(&Attention { v: f32s, ..dense() }), "v is f32, expected f16");
}

#[test]
fn the_last_dimension_is_contiguous() {
    let q = strided(&[2, 5, 4, 8], &[640, 128, 32, 2]);
    let error = Attention { q, ..dense() }.problem().unwrap_err();
    assert!(matches!(error, Error::Stride { what: "q", .. }), "{error}");
    // With one element there is nothing to be contiguous.
    let one = strided(&[2, 5, 4, 1], &[640, 128, 32, 7]);
    Attention::new(one, one, one).problem().unwrap();
}

#[test]
fn factors_are_checked() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scale =
            Attention { scores: Scores { softmax_scale: Some(bad), ..dense().scores }, ..dense() }
                .problem();
        assert!(matches!(scale, Err(Error::InvalidScale { what: "softmax_scale", .. })), "{bad}");
        let softcap =
            Attention { scores: Scores { softcap: Some(bad), ..dense().scores }, ..dense() }
                .problem();
        assert!(matches!(softcap, Err(Error::InvalidScale { what: "softcap", .. })), "{bad}");
    }
    let error =
        message(&Attention { scores: Scores { softcap: Some(-1.0), ..dense().scores }, ..dense() });
    assert_eq!(error, "softcap is -1, but must be finite and greater than 0");
}

#[test]
fn sinks_are_checked() {
    let sinks = [0f32; 8];
    let sink = |shape: &[usize], strides: &[usize]| Attention {
        scores: Scores {
            sink: Some(View::from_slice_strided(&sinks, shape, strides).unwrap()),
            ..dense().scores
        },
        ..dense()
    };
    assert!(message(&sink(&[3], &[1])).contains("sink has shape [3], expected [4]"));
    assert!(message(&sink(&[4, 1], &[1, 1])).contains("expected [4]"));
    assert!(message(&sink(&[4], &[2])).contains("sink has strides [2]"));
    assert!(
        message(&Attention {
            scores: Scores { sink: Some(view(&[4])), ..dense().scores },
            ..dense()
        })
        .contains("sink is f16, expected f32")
    );
}

#[test]
fn sequences_have_a_limit() {
    // A million repetitions of one row need no memory.
    let long = |seqlen| strided(&[1, seqlen, 1, 8], &[0, 0, 0, 1]);
    let (at, beyond) = (long(MAX_SEQLEN), long(MAX_SEQLEN + 1));
    Attention::new(at, at, at).problem().unwrap();
    let error = Attention::new(beyond, at, at).problem().unwrap_err();
    assert!(
        matches!(error, Error::TooLarge { what: "seqlen_q", limit: MAX_SEQLEN, .. }),
        "{error}"
    );
    let error = Attention::new(at, beyond, beyond).problem().unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "seqlen_kv", .. }), "{error}");
    let many = strided(&[1 << 31, 1, 1, 8], &[0, 0, 0, 1]);
    let error = Attention::new(many, many, many).problem().unwrap_err();
    assert!(matches!(error, Error::TooLarge { what: "batch", .. }), "{error}");
}

#[test]
fn outputs_are_checked() {
    let problem = dense().problem().unwrap();
    let with = |o: &[usize], lse: &[usize]| {
        let (mut o_data, mut lse_data) =
            (vec![f16::ONE; o.iter().product()], vec![0f32; lse.iter().product()]);
        let (o, lse) = (
            ViewMut::from_slice(&mut o_data, o).unwrap(),
            ViewMut::from_slice(&mut lse_data, lse).unwrap(),
        );
        problem.with_outputs(&o, Some(&lse)).map_err(|error| error.to_string())
    };
    assert_eq!(with(&[2, 5, 4, 8], &[2, 4, 5]).unwrap(), problem.with_lse());
    assert_eq!(problem.with_lse().lse, Some(LseStrides { batch: 20, head: 5 }));
    assert!(with(&[2, 5, 4, 16], &[2, 4, 5]).unwrap_err().contains("o has shape [2, 5, 4, 16]"));
    assert!(
        with(&[2, 5, 4, 8], &[2, 5, 4])
            .unwrap_err()
            .contains("lse has shape [2, 5, 4], expected [2, 4, 5]")
    );

    let mut halves = vec![f16::ONE; 2 * 320];
    let mut floats = vec![0f32; 640];
    let o = ViewMut::from_slice(&mut floats[..320], &[2, 5, 4, 8]).unwrap();
    assert_eq!(problem.with_outputs(&o, None).unwrap_err().to_string(), "o is f32, expected f16");
    let o = ViewMut::from_slice_strided(&mut halves, &[2, 5, 4, 8], &[320, 64, 16, 2]).unwrap();
    assert!(problem.with_outputs(&o, None).unwrap_err().to_string().contains("o has strides"));
    let o = ViewMut::from_slice_strided(&mut halves, &[2, 5, 4, 8], &[320, 8, 40, 1]).unwrap();
    let lse = ViewMut::from_slice_strided(&mut floats, &[2, 4, 5], &[80, 20, 1]).unwrap();
    let strided = problem.with_outputs(&o, Some(&lse)).unwrap();
    assert_eq!(strided.o, Strides { batch: 320, seq: 8, head: 40 });
    assert_eq!(strided.lse, Some(LseStrides { batch: 80, head: 20 }));
    assert_eq!(problem.with_outputs(&o, None).unwrap().lse, None);
    let lse = ViewMut::from_slice_strided(&mut floats, &[2, 4, 5], &[80, 20, 2]).unwrap();
    assert!(
        problem.with_outputs(&o, Some(&lse)).unwrap_err().to_string().contains("lse has strides")
    );
}

#[test]
fn empty_problems_are_known() {
    for (sizes, heads) in [([0, 5, 7], [4, 2]), ([2, 0, 7], [4, 2]), ([2, 5, 7], [0, 0])] {
        assert!(AttentionProblem::dense(DType::F16, sizes, heads, 8).is_empty());
    }
    // Without keys there are still outputs: zeros.
    assert!(!AttentionProblem::dense(DType::F16, [2, 5, 0], [4, 2], 8).is_empty());
    let nothing = view(&[0, 4, 8]);
    assert!(Attention { q: nothing, ..packed() }.problem().unwrap().is_empty());
}
