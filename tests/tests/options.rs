//! Every option acts: changing any argument changes the output or is an error. On the CPU, and on
//! the GPU when there is one.

use blockflash_cases::case::Operands;
use blockflash_ops::attention::{Align, Mask, Scores};
use blockflash_ops::bsr_matmul::Activation;
use blockflash_ops::{DType, Stream};
use blockflash_tests::attention::{
    AlibiCase, AttentionCase, AttentionData, AttentionInputs, AttentionOutputs, BiasCase,
    BlockCase, BlockPattern, Choice, Lengths, MaskHeads, Terms,
};
use blockflash_tests::bsr::{BiasKind, BsrCase, BsrData, Pattern};
use blockflash_tests::gpu::{gpu, wait};
use blockflash_tests::host::{cpu, download};

/// Bits of o and of the lse.
fn attention(
    case: &AttentionCase,
    data: &AttentionData,
    stream: &Stream,
) -> Result<[Vec<u32>; 2], String> {
    let inputs = AttentionInputs::upload(case, data, stream)?;
    let mut outputs = AttentionOutputs::poisoned(case, stream)?;
    outputs.launch(&inputs, Choice::Selected, stream).map_err(|error| error.to_string())?;
    wait(stream, &|| format!("{case:?}"))?;
    outputs.bits(stream)
}

fn attention_options_act(stream: &Stream) {
    let base = AttentionCase::simple(DType::F16, (4, 2), 64, (90, 150));
    let packed = |lengths: &[(usize, usize)]| AttentionCase {
        lengths: Lengths::Packed { lengths: lengths.to_vec(), slack: (0, 0) },
        ..base.clone()
    };
    let with = |scores| AttentionCase { scores, ..base.clone() };
    let mask = |mask: Mask| with(mask.into());
    let sinks = Scores { sink: Some(()), ..Scores::default() };
    let window = |left, right, align| mask(Mask::Window { left, right, align });
    let (top, bottom) = (Align::TopLeft, Align::BottomRight);
    let blocks = |block_q, block_kv, heads, density| {
        let pattern = BlockPattern::Random(density);
        let block_mask = Some(BlockCase { block_q, block_kv, per_entry: false, heads, pattern });
        AttentionCase { block_mask, ..base.clone() }
    };
    // All pairwise different in o, whatever they are compared with.
    let mut cases = vec![
        base.clone(),
        mask(Mask::Causal { align: top }),
        mask(Mask::Causal { align: bottom }),
        window(Some(10), None, top),
        window(Some(10), None, bottom),
        window(Some(11), None, bottom),
        window(None, Some(10), top),
        window(None, Some(10), bottom),
        window(None, Some(11), bottom),
        window(Some(10), Some(10), top),
        window(Some(10), Some(10), bottom),
        with(Scores { softmax_scale: Some(0.2), ..base.scores }),
        with(Scores { softmax_scale: Some(0.1), ..base.scores }),
        with(Scores { softcap: Some(1.0), ..base.scores }),
        with(Scores { softcap: Some(3.0), ..base.scores }),
        with(sinks),
        with(Scores { softcap: Some(1.0), ..sinks }),
        AttentionCase { seed: 2, ..with(sinks) },
        blocks(64, 64, MaskHeads::One, 0.5),
        blocks(64, 64, MaskHeads::KeyValue, 0.5),
        blocks(64, 64, MaskHeads::Query, 0.5),
        blocks(128, 64, MaskHeads::One, 0.5),
        blocks(64, 128, MaskHeads::One, 0.5),
        packed(&[(40, 100), (50, 50)]),
        packed(&[(41, 100), (49, 50)]),
        packed(&[(40, 101), (50, 49)]),
        AttentionCase { scores: Mask::causal().into(), ..packed(&[(40, 100), (50, 50)]) },
        AttentionCase {
            block_mask: blocks(64, 64, MaskHeads::Query, 0.5).block_mask,
            ..packed(&[(40, 100), (50, 50)])
        },
    ];
    let added = |bias, alibi| AttentionCase {
        terms: Terms { bias, alibi, ..Terms::default() },
        ..base.clone()
    };
    let bias = |dtype, broadcast| Some(BiasCase { broadcast, ..BiasCase::full(dtype) });
    cases.extend([
        added(bias(DType::F32, [false; 4]), None),
        added(bias(DType::BF16, [false; 4]), None),
        added(bias(DType::F32, [false, true, false, false]), None),
        added(bias(DType::F32, [false, false, true, false]), None),
        added(None, Some(AlibiCase::PerHead)),
        added(None, Some(AlibiCase::PerEntry)),
        added(bias(DType::F32, [false; 4]), Some(AlibiCase::PerHead)),
        AttentionCase {
            terms: Terms { alibi: Some(AlibiCase::PerHead), ..Terms::default() },
            ..mask(Mask::causal())
        },
        AttentionCase {
            terms: Terms { partial: true, ..Terms::default() },
            ..blocks(64, 64, MaskHeads::One, 0.5)
        },
    ]);
    // The same q, k, v for all: of the options alone comes the difference.
    let data = AttentionData::generate(&base);
    let outputs: Vec<_> = cases
        .iter()
        .map(|case| {
            let AttentionData { sink, bias, alibi, .. } = AttentionData::generate(case);
            attention(case, &AttentionData { sink, bias, alibi, ..data.clone() }, stream)
                .unwrap_or_else(|e| panic!("{e}: {case:?}"))
        })
        .collect();
    for (i, j) in (0..cases.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
        assert!(
            outputs[i][0] != outputs[j][0],
            "the same o on {}:\n{:?}\n{:?}",
            stream.device(),
            cases[i],
            cases[j]
        );
        assert!(
            outputs[i][1] != outputs[j][1],
            "the same lse on {}:\n{:?}\n{:?}",
            stream.device(),
            cases[i],
            cases[j]
        );
    }
    // Asking for no lse changes nothing else.
    let without = attention(&AttentionCase { lse: false, ..base.clone() }, &data, stream).unwrap();
    assert_eq!(without[0], outputs[0][0]);
    assert!(without[1].is_empty());
}

fn attention_operands_act(stream: &Stream) {
    let case = AttentionCase {
        scores: Scores { sink: Some(()), ..Scores::default() },
        ..AttentionCase::simple(DType::BF16, (6, 2), 40, (70, 130))
    };
    let data = AttentionData::generate(&case);
    let base = attention(&case, &data, stream).unwrap();
    let (q_row, kv_row) = (6 * 40, 2 * 40);
    let changed = |change: &dyn Fn(&mut AttentionData)| {
        let mut data = data.clone();
        change(&mut data);
        attention(&case, &data, stream).unwrap()
    };
    // One number of q changes exactly its own row of o and of the lse.
    let at = 33 * q_row + 4 * 40 + 7;
    let q = changed(&|data| data.q[at] = 4.0);
    let rows: Vec<usize> = differing(&q[0], &base[0]).map(|i| i / 40).collect();
    assert!(!rows.is_empty() && rows.iter().all(|&row| row == at / 40), "q acts on rows {rows:?}");
    assert_eq!(differing(&q[1], &base[1]).collect::<Vec<_>>(), [4 * 70 + 33], "q acts on the lse");
    // One number of k or v of a kv head reaches the heads of its group, all queries, and no other
    // head.
    for (what, output) in [
        ("k", changed(&|data| data.k[129 * kv_row + 40 + 5] = 8.0)),
        ("v", changed(&|data| data.v[129 * kv_row + 40 + 5] = 800.0)),
    ] {
        let heads: Vec<usize> = differing(&output[0], &base[0]).map(|i| i / 40 % 6).collect();
        assert!(heads.iter().all(|&head| head >= 3), "{what} of kv head 1 acts on heads {heads:?}");
        assert!(
            (3..6).all(|head| heads.contains(&head)),
            "{what} of kv head 1 acts on heads {heads:?}"
        );
    }
    let v = changed(&|data| data.v[129 * kv_row + 40 + 5] = 800.0);
    assert!(differing(&v[0], &base[0]).all(|i| i % 40 == 5), "v acts on its own column");
    assert_eq!(v[1], base[1], "v does not act on the lse");
    // A sink of one head acts on that head.
    let sink = changed(&|data| data.sink[2] += 3.0);
    assert!(differing(&sink[0], &base[0]).all(|i| i / 40 % 6 == 2) && sink[0] != base[0]);
    assert!(differing(&sink[1], &base[1]).all(|i| i / 70 == 2) && sink[1] != base[1]);
}

fn differing<'a>(a: &'a [u32], b: &'a [u32]) -> impl Iterator<Item = usize> + 'a {
    assert_eq!(a.len(), b.len());
    (0..a.len()).filter(|&i| a[i] != b[i])
}

fn product(case: &BsrCase, data: &BsrData, stream: &Stream) -> Vec<u32> {
    let mut operands = data.operands(case, stream).unwrap();
    operands.launch(None, stream).unwrap_or_else(|error| panic!("{error}: {case:?}"));
    wait(stream, &|| format!("{case:?}")).unwrap();
    download(stream, operands.c()).unwrap()
}

fn bsr_options_act(stream: &Stream) {
    let base = BsrCase::simple(DType::F16, 32, [70, 50, 130], Pattern::Random(0.6));
    let cases = [
        base.clone(),
        BsrCase { alpha: 0.5, ..base.clone() },
        BsrCase { alpha: -1.0, ..base.clone() },
        BsrCase { beta: 1.0, ..base.clone() },
        BsrCase { beta: -0.5, ..base.clone() },
        BsrCase { bias: BiasKind::PerRow, ..base.clone() },
        BsrCase { bias: BiasKind::PerColumn, ..base.clone() },
        BsrCase { activation: Activation::Relu, ..base.clone() },
        BsrCase { activation: Activation::Gelu, ..base.clone() },
        BsrCase { activation: Activation::Silu, ..base.clone() },
        BsrCase { beta: 1.0, bias: BiasKind::PerRow, activation: Activation::Gelu, ..base.clone() },
        BsrCase { c_dtype: DType::BF16, ..base.clone() },
        BsrCase { c_dtype: DType::F32, ..base.clone() },
    ];
    let outputs: Vec<_> =
        cases.iter().map(|case| product(case, &BsrData::generate(case), stream)).collect();
    for (i, j) in (0..cases.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
        assert!(
            outputs[i] != outputs[j],
            "the same C on {}:\n{:?}\n{:?}",
            stream.device(),
            cases[i],
            cases[j]
        );
    }
    // Order of the epilogue: the activation comes after the bias.
    let relu = BsrCase { bias: BiasKind::PerRow, activation: Activation::Relu, ..base.clone() };
    let mut data = BsrData::generate(&relu);
    data.bias.fill(-1000.0);
    assert!(
        product(&relu, &data, stream).iter().all(|&bits| bits & 0x7FFF == 0),
        "relu(x - 1000) is 0"
    );
}

fn bsr_operands_act(stream: &Stream) {
    let case = BsrCase {
        bias: BiasKind::PerColumn,
        ..BsrCase::simple(DType::BF16, 16, [60, 40, 75], Pattern::Full)
    };
    let (data, [_, n, _]) = (BsrData::generate(&case), case.mnk);
    let base = product(&case, &data, stream);
    let changed = |change: &dyn Fn(&mut BsrData)| {
        let mut data = data.clone();
        change(&mut data);
        product(&case, &data, stream)
    };
    // Block 7 is block row 1, block column 2; its element (3, 5) multiplies row 37 of B into row 19
    // of C.
    let a = changed(&|data| data.values[7 * 256 + 3 * 16 + 5] = 50.0);
    let rows: Vec<usize> = differing(&a, &base).map(|i| i / n).collect();
    assert!(!rows.is_empty() && rows.iter().all(|&row| row == 19), "values act on rows {rows:?}");
    let b = changed(&|data| data.b[37 * n + 11] = 50.0);
    let columns: Vec<usize> = differing(&b, &base).map(|i| i % n).collect();
    assert!(
        columns.len() > 50 && columns.iter().all(|&column| column == 11),
        "b acts on columns {columns:?}"
    );
    let bias = changed(&|data| data.bias[3] += 100.0);
    assert!(bias != base && differing(&bias, &base).all(|i| i % n == 3));
    // The structure acts: the same values in another block column.
    let sparse = BsrCase {
        pattern: Pattern::OneColumn,
        nan_in_b: blockflash_tests::bsr::NanInB::Nowhere,
        ..case.clone()
    };
    let data = BsrData::generate(&sparse);
    let mut moved = data.clone();
    moved.col_idx.iter_mut().for_each(|col| *col = 1);
    assert!(product(&sparse, &data, stream) != product(&sparse, &moved, stream));
    moved.col_idx[2] = 3;
    let mut again = data.clone();
    again.col_idx.iter_mut().for_each(|col| *col = 1);
    let rows: Vec<usize> = {
        let (a, b) = (product(&sparse, &moved, stream), product(&sparse, &again, stream));
        differing(&a, &b).map(|i| i / n / 16).collect()
    };
    assert!(
        !rows.is_empty() && rows.iter().all(|&row| row == 2),
        "col_idx acts on block rows {rows:?}"
    );
}

#[test]
fn attention_on_the_cpu() {
    attention_options_act(&cpu());
    attention_operands_act(&cpu());
}

#[test]
fn bsr_on_the_cpu() {
    bsr_options_act(&cpu());
    bsr_operands_act(&cpu());
}

#[test]
fn attention_on_the_gpu() {
    let Some(gpu) = gpu("options::attention_on_the_gpu") else { return };
    attention_options_act(&gpu.stream);
    attention_operands_act(&gpu.stream);
}

#[test]
fn bsr_on_the_gpu() {
    let Some(gpu) = gpu("options::bsr_on_the_gpu") else { return };
    bsr_options_act(&gpu.stream);
    bsr_operands_act(&gpu.stream);
}
