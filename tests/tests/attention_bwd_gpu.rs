//! Every kernel of the attention backward that the GPU can run against the oracle.

use blockflash_ops::attention::{CuSeqlens, Mask};
use blockflash_ops::attention_bwd::workspace_bytes;
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradientsMut, DType, Error, Operation, Scores, Stream,
    Tensor,
};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionBwdStep as Step, AttentionBwdTile};
use blockflash_tests::attention::{
    AlibiCase, AttentionCase, BlockCase, BlockPattern, Choice, Lengths, MaskHeads, Terms,
};
use blockflash_tests::attention_bwd::{
    BackwardData, BackwardGroup, BackwardInputs, BackwardOutputs, BackwardReference,
    backward_groups, cases_of, run_case, run_or_refuse, same_gradients,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use half::f16;

#[test]
fn every_kernel() {
    let Some(gpu) = gpu("attention_bwd_gpu::every_kernel") else { return };
    let check = |((dtype, head_dim), kernels): BackwardGroup, gpu: &Gpu, report: &mut Report| {
        for case in cases_of(dtype, head_dim) {
            let data = BackwardData::generate(&case);
            let reference = BackwardReference::compute(&case, &data);
            report.run_each(gpu, &kernels, |kernel, _, stream| {
                run_or_refuse(&case, &data, &reference, kernel, stream)
            });
        }
        report.run_each(gpu, &kernels, keeps_promises);
    };
    gpu.check_groups("attention_bwd_gpu", &Report::default(), backward_groups(&gpu, false), check);
}

/// Those with score terms, whose results other suites compare, with slopes. That of the bias, which
/// packed sequences do not have, is left to them.
#[test]
fn every_kernel_with_score_terms() {
    let Some(gpu) = gpu("attention_bwd_gpu::every_kernel_with_score_terms") else { return };
    let check = |(_, mut kernels): BackwardGroup, gpu: &Gpu, report: &mut Report| {
        kernels.retain(|(_, tile)| tile.step != Step::Bias);
        report.run_each(gpu, &kernels, keeps_promises);
    };
    gpu.check_groups("attention_bwd_gpu", &Report::default(), backward_groups(&gpu, true), check);
}

fn keeps_promises(
    kernel: &'static Kernel,
    tile: &AttentionBwdTile,
    stream: &Stream,
) -> Result<usize, String> {
    let story =
        |what: &'static str| move |error| format!("{what} of {}: {error}", kernel.image_name());
    let survived = survives_any_offsets(kernel, tile, stream);
    Ok(replays_a_graph(kernel, tile, stream).map_err(story("graph"))?
        + repeats_its_bits(kernel, tile, stream).map_err(story("repeat"))?
        + survived.map_err(|error| error.to_string()).map_err(story("offsets"))?
        + keeps_sequences_apart(kernel, tile, stream).map_err(story("sequences"))?)
}

/// A case that a kernel takes, whatever its step is: packed where it only writes zeros.
fn case_of(tile: &AttentionBwdTile, seed: u64, seqlen: usize) -> AttentionCase {
    let simple =
        AttentionCase::simple(tile.types.q, (4, 2), tile.head_dims.min(), (seqlen, seqlen + 90));
    let lengths = match tile.step {
        Step::Zeros => {
            // The lengths of a graph may change, but not beyond the longest that were captured.
            let other = if seed.is_multiple_of(2) { seqlen / 2 - 7 } else { seqlen / 2 + 7 };
            let lengths = vec![(other, seqlen), (seqlen - other, 90)];
            Lengths::Packed { lengths, slack: (3, 5) }
        }
        _ => Lengths::Dense { batch: 2, seqlen_q: seqlen, seqlen_kv: seqlen + 90 },
    };
    AttentionCase {
        seed,
        terms: Terms { alibi: tile.terms.then_some(AlibiCase::PerHead), ..Terms::default() },
        scores: Scores { mask: Mask::causal(), sink: Some(()), ..Scores::default() },
        lengths,
        ..simple
    }
}

/// Captures a call once and replays it with other numbers.
fn replays_a_graph(
    kernel: &'static Kernel,
    tile: &AttentionBwdTile,
    stream: &Stream,
) -> Result<usize, String> {
    let prepared = |seed| {
        let case = case_of(tile, seed, 300);
        let data = BackwardData::generate(&case);
        (case, data)
    };
    let (case, data) = prepared(1);
    let mut inputs = BackwardInputs::upload(&case, &data, stream)?;
    let mut outputs = BackwardOutputs::of_any_kernel(&inputs, stream)?;
    let graph = stream
        .capture(|stream| outputs.launch(&inputs, Choice::This(kernel), stream))
        .map_err(|error| format!("capture: {error}"))?;
    let mut compared = 0;
    for (case, data) in [2, 1].map(prepared) {
        inputs.refill(&case, &data, stream)?;
        outputs.poison(stream)?;
        graph.launch(stream).map_err(|error| format!("replay: {error}"))?;
        wait(stream, &|| format!("replay of {} with {case:?}", kernel.image_name()))?;
        let reference = BackwardReference::compute(&case, &data);
        compared +=
            outputs.check(&reference, stream).map_err(|error| format!("{error}\n    {case:?}"))?;
    }
    Ok(compared)
}

fn repeats_its_bits(
    kernel: &'static Kernel,
    tile: &AttentionBwdTile,
    stream: &Stream,
) -> Result<usize, String> {
    let causal = case_of(tile, 5, 700);
    let full =
        AttentionCase { scores: Scores { mask: Mask::Full, ..causal.scores }, ..causal.clone() };
    Ok(same_gradients(&causal, kernel, stream)? + same_gradients(&full, kernel, stream)?)
}

/// Offsets of a packed batch that are garbage: the launch ends, writes nothing beyond the
/// gradients, and reads nothing beyond the inputs, where NaN is.
fn survives_any_offsets(
    kernel: &'static Kernel,
    tile: &AttentionBwdTile,
    stream: &Stream,
) -> Result<usize, Error> {
    const ROWS: usize = 150;
    const MARGIN: usize = 70;
    let (heads, d) = ([2, 1], tile.head_dims.min());
    let shape = |heads| [ROWS + 2 * MARGIN, heads, d];
    let poisoned = |dtype, shape: &[usize]| {
        let mut tensor = Tensor::empty(stream, dtype, shape)?;
        tensor.fill_bytes(stream, 0xff).map(|()| tensor)
    };
    let inner = MARGIN..MARGIN + ROWS;
    let input = |heads: usize| -> Result<Tensor, Error> {
        // Bits of small numbers in both types, between NaN.
        let row = heads * d;
        let number = |at: usize| match (at / row).checked_sub(MARGIN) {
            Some(at_row) if at_row < ROWS => 0x3800 + (at % 97) as u16,
            _ => u16::MAX,
        };
        let bits: Vec<f16> =
            (0..shape(heads).iter().product()).map(|at| f16::from_bits(number(at))).collect();
        match tile.types.q {
            DType::F16 => Ok(Tensor::from_slice(stream, &bits, &shape(heads))?),
            _ => {
                let bits: Vec<half::bf16> =
                    bits.iter().map(|x| half::bf16::from_bits(x.to_bits())).collect();
                Ok(Tensor::from_slice(stream, &bits, &shape(heads))?)
            }
        }
    };
    let (q, kv) = (input(heads[0])?, input(heads[1])?);
    let garbage: [&[i32]; 5] = [
        &[i32::MAX, i32::MIN, -1, 1 << 30],
        &[100, 0, 150, 20],
        &[-5, 149, 7, i32::MAX],
        &[0, 150, 0, 150],
        &[149, 150, 151, 152],
    ];
    let mut compared = 0;
    for (turn, offsets) in garbage.into_iter().enumerate() {
        let other = garbage[(turn + 2) % garbage.len()];
        let [cu_q, cu_kv] =
            [offsets, other].map(|entries| Tensor::from_slice(stream, entries, &[4]));
        let (cu_q, cu_kv) = (cu_q?, cu_kv?);
        let lse = Tensor::zeros(stream, DType::F32, &[heads[0], ROWS])?;
        let [sink, slopes] = [(); 2].map(|()| Tensor::zeros(stream, DType::F32, &[heads[0]]));
        let (sink, slopes) = (sink?, slopes?);
        let alibi = tile.terms.then(|| slopes.view());
        let [q, kv] = [q.view().slice(0, inner.clone())?, kv.view().slice(0, inner.clone())?];
        let (max_seqlen_q, max_seqlen_kv) = ([150, 40, 1000][turn % 3], [40, 1000, 150][turn % 3]);
        let cu_seqlens =
            Some(CuSeqlens { q: cu_q.view(), kv: cu_kv.view(), max_seqlen_q, max_seqlen_kv });
        let mask = [Mask::Full, Mask::causal()][turn % 2];
        let attention = Attention {
            scores: Scores { mask, sink: Some(sink.view()), alibi, ..Scores::default() },
            cu_seqlens,
            ..Attention::new(q, kv, kv)
        };
        let call = AttentionBackward { attention, o: q, lse: lse.view(), d_o: q };
        let gpu = stream.device().cuda_properties().unwrap();
        let bytes = workspace_bytes(kernel, &call.problem()?, gpu)?;
        let mut dq = poisoned(tile.types.q, &shape(heads[0]))?;
        let [mut dk, mut dv] = [(); 2].map(|()| poisoned(tile.types.q, &shape(heads[1])).unwrap());
        let mut d_sink = Tensor::zeros(stream, DType::F32, &[heads[0]])?;
        let mut workspace = poisoned(DType::U8, &[bytes])?;
        let gradients = AttentionGradientsMut {
            dq: dq.view_mut().slice(0, inner.clone())?,
            dk: dk.view_mut().slice(0, inner.clone())?,
            dv: dv.view_mut().slice(0, inner.clone())?,
            d_sink: Some(d_sink.view_mut()),
            dbias: None,
        };
        let out = (gradients, Some(workspace.view_mut()));
        call.run_with(kernel, out, stream)?;
        wait(stream, &|| format!("{} with offsets {offsets:?}", kernel.image_name())).unwrap();
        for (name, tensor) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            let bits = blockflash_tests::host::download(stream, tensor).unwrap();
            let row = tensor.shape()[1] * d;
            let inside = |at: usize| inner.contains(&(at / row));
            let is_nan = |bits: u32| blockflash_tests::number::decode(tile.types.q, bits).is_nan();
            let wrong = (0..bits.len()).find(|&at| inside(at) == is_nan(bits[at]));
            assert_eq!(wrong, None, "{name} of {}, offsets {offsets:?}", kernel.image_name());
            compared += 1;
        }
    }
    Ok(compared)
}

/// NaN in one packed sequence reaches no gradient of another one.
fn keeps_sequences_apart(
    kernel: &'static Kernel,
    tile: &AttentionBwdTile,
    stream: &Stream,
) -> Result<usize, String> {
    // The gradient of a sink is a sum over all sequences.
    if tile.step == Step::Sinks {
        return Ok(0);
    }
    let lengths = vec![(100, 150), (30, 70), (65, 129), (0, 9), (130, 5), (1, 1)];
    let simple = case_of(tile, 9, 300);
    for mask in [Mask::Full, Mask::causal()] {
        let lengths = Lengths::Packed { lengths: lengths.clone(), slack: (3, 5) };
        let case = AttentionCase { lengths, scores: mask.into(), ..simple.clone() };
        let run = |data: &BackwardData| {
            let inputs = BackwardInputs::upload(&case, data, stream)?;
            let mut outputs = BackwardOutputs::of_any_kernel(&inputs, stream)?;
            let launched = outputs.launch(&inputs, Choice::This(kernel), stream);
            launched.map_err(|error| error.to_string())?;
            wait(stream, &|| format!("NaN in {case:?}"))?;
            outputs.values(stream)
        };
        let right = BackwardData::generate(&case);
        let expected = run(&right)?;
        for (turn, nan) in case.sequences().into_iter().enumerate() {
            let mut data = right.clone();
            let rows =
                [nan.q_start..nan.q_start + nan.q_len, nan.kv_start..nan.kv_start + nan.kv_len];
            let width = [case.heads_q, case.heads_kv].map(|heads| heads * case.head_dim);
            let [of_q, of_kv] = [0, 1].map(|i| rows[i].start * width[i]..rows[i].end * width[i]);
            let forward = &mut data.forward;
            for values in [&mut forward.q, &mut data.o, &mut data.d_o] {
                values[of_q.clone()].fill(f32::NAN);
            }
            for values in [&mut forward.k, &mut forward.v] {
                values[of_kv.clone()].fill(f32::NAN);
            }
            let own = [&of_q, &of_kv, &of_kv];
            for (i, got) in run(&data)?.iter().enumerate() {
                let differs = |&at: &usize| got[at] != expected[i][at] && !own[i].contains(&at);
                if let Some(at) = (0..got.len()).find(differs) {
                    let (got, name) = (got[at], ["dq", "dk", "dv"][i]);
                    return Err(format!("{name}[{at}] is {got} where sequence {turn} is NaN"));
                }
            }
        }
    }
    Ok(3)
}

/// The scheme that the library selects, with its workspace and with the smallest one.
#[test]
fn selected_schemes() {
    let Some(gpu) = gpu("attention_bwd_gpu::selected_schemes") else { return };
    let stream = &gpu.stream;
    let [bf16, f16] = [DType::BF16, DType::F16];
    for (dtype, head_dim) in
        [(bf16, 64), (f16, 96), (f16, 128), (bf16, 192), (bf16, 256), (f16, 512)]
    {
        let simple = AttentionCase::simple(dtype, (4, 2), head_dim, (1100, 1300));
        for mask in [Mask::Full, Mask::causal()] {
            let case = AttentionCase {
                scores: Scores { mask, sink: Some(()), ..Scores::default() },
                ..simple.clone()
            };
            run_case(&case, Choice::Selected, stream).unwrap();
            let data = BackwardData::generate(&case);
            let reference = BackwardReference::compute(&case, &data);
            let inputs = BackwardInputs::upload(&case, &data, stream).unwrap();
            let least = inputs.backward().least_workspace_bytes(stream.device()).unwrap();
            let run = |bytes| {
                let mut outputs = BackwardOutputs::with_workspace(&inputs, bytes, stream).unwrap();
                outputs.launch(&inputs, Choice::Selected, stream).map(|()| outputs)
            };
            let outputs = run(least).unwrap();
            wait(stream, &|| format!("the smallest workspace of {case:?}")).unwrap();
            outputs.check(&reference, stream).unwrap();
            let error = run(least - 1).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::Shape { what: "workspace", .. }), "{error}");
        }
        for block in [64, 128] {
            let block_mask = Some(BlockCase {
                block_q: block,
                block_kv: block,
                per_entry: true,
                heads: MaskHeads::KeyValue,
                pattern: BlockPattern::Random(0.4),
            });
            let case = AttentionCase { block_mask, ..simple.clone() };
            run_case(&case, Choice::Selected, stream).unwrap();
        }
    }
}

/// A block mask needs its transpose.
#[test]
fn masks_without_a_transpose_are_refused() {
    let Some(gpu) = gpu("attention_bwd_gpu::masks_without_a_transpose_are_refused") else { return };
    let stream = &gpu.stream;
    let q = Tensor::zeros(stream, DType::BF16, &[1, 128, 2, 64]).unwrap();
    let geometry = blockflash_ops::BlockGeometry::new(128, 128, 128, 128).unwrap();
    let mask = blockflash_ops::BlockMask::from_bool(geometry, 1, 1, &[true]).unwrap();
    let mask = mask.to(stream).unwrap();
    let attention =
        Attention { block_mask: Some(&mask), ..Attention::new(q.view(), q.view(), q.view()) };
    let output = attention.forward(stream).unwrap();
    match attention.backward(&output, q.view(), stream) {
        Err(Error::Unsupported { op: "attention_bwd", what, .. }) => {
            assert!(what.contains("with_transpose"), "{what}");
        }
        other => panic!("{other:?}"),
    }
}
