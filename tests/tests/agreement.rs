//! The two devices agree through the public calls: `forward` and `matmul`, with the kernel that the
//! library selects.

use blockflash_ops::attention::{Align, Attention, Mask};
use blockflash_ops::{BsrMatmul, DType, Stream};
use blockflash_tests::attention::{
    AttentionCase, AttentionData, AttentionInputs, AttentionReference, Lengths, Limits,
    attention_cases, head_dims,
};
use blockflash_tests::bsr::{self, BsrCase, BsrData, BsrReference, bsr_cases};
use blockflash_tests::gpu::{gpu, wait};
use blockflash_tests::host::{cpu, download};
use blockflash_tests::number::decode;
use blockflash_tests::property::samples;
use blockflash_tests::tolerance::{Reference, check, check_agreement};

fn numbers(stream: &Stream, tensor: &blockflash_ops::Tensor) -> Vec<f64> {
    let bits = download(stream, tensor).unwrap();
    bits.into_iter().map(|bits| f64::from(decode(tensor.dtype(), bits))).collect()
}

/// o and lse of the allocating call.
fn attention(case: &AttentionCase, data: &AttentionData, stream: &Stream) -> [Vec<f64>; 2] {
    let inputs = AttentionInputs::upload(case, data, stream).unwrap();
    let call: Attention<'_> = inputs.attention();
    let output = call
        .forward(stream)
        .unwrap_or_else(|error| panic!("{error} on {}: {case:?}", stream.device()));
    wait(stream, &|| format!("{case:?}")).unwrap();
    let [o_shape, _, lse_shape] = case.shapes();
    assert_eq!((output.o.shape(), output.lse.shape()), (&o_shape[..], &lse_shape[..]));
    assert_eq!((output.o.dtype(), output.lse.dtype()), (case.dtype, DType::F32));
    [numbers(stream, &output.o), numbers(stream, &output.lse)]
}

fn attention_problems() -> Vec<AttentionCase> {
    let limits = Limits {
        dtypes: vec![DType::F16, DType::BF16],
        head_dims: head_dims(8..=512),
        seqlen: 300,
        alignment: 8,
        work: 10_000_000,
    };
    samples(60, attention_cases(limits))
}

/// The rows of the reference in the order of a tensor, for the rule that compares two results.
fn scattered(case: &AttentionCase, reference: &AttentionReference) -> [Reference; 2] {
    let [rows_q, _] = case.rows().1;
    let (d, heads) = (case.head_dim, case.heads_q);
    let sequences = case.sequences();
    let blank = |n: usize, width| Reference {
        width,
        exact: vec![0.0; n],
        plain: vec![0.0; n],
        magnitude: vec![0.0; n],
        partial: vec![0.0; n],
    };
    let mut o = blank(rows_q * heads * d, d);
    let mut lse = blank(rows_q * heads, rows_q * heads);
    for (row, &[b, i, h]) in reference.rows.iter().enumerate() {
        let (from, to) = (row * d, ((sequences[b].q_start + i) * heads + h) * d);
        let at = case.lse_index(b, h, i);
        for (source, target) in [
            (&reference.o.exact, &mut o.exact),
            (&reference.o.plain, &mut o.plain),
            (&reference.o.magnitude, &mut o.magnitude),
            (&reference.o.partial, &mut o.partial),
        ] {
            target[to..to + d].copy_from_slice(&source[from..from + d]);
        }
        lse.exact[at] = reference.lse.exact[row];
        lse.plain[at] = reference.lse.plain[row];
        lse.magnitude[at] = reference.lse.magnitude[row];
    }
    [o, lse]
}

/// The allocating call equals the oracle, and rows that belong to no sequence are 0 there.
#[test]
fn forward_allocates_what_forward_into_fills() {
    let stream = cpu();
    for case in attention_problems().into_iter().step_by(3) {
        let data = AttentionData::generate(&case);
        let reference = AttentionReference::compute(&case, &data, f64::INFINITY);
        let [o_expected, lse_expected] = scattered(&case, &reference);
        let [o, lse] = attention(&case, &data, &stream);
        let name = |i: usize| format!("element {i} of {case:?}");
        check(&o, &o_expected, &reference.rounding(&case), name)
            .unwrap_or_else(|e| panic!("o: {e}"));
        check(&lse, &lse_expected, &AttentionReference::lse_rounding(&case), name)
            .unwrap_or_else(|e| panic!("lse: {e}"));
    }
}

/// The difference of the devices is no larger than the sum of what each is allowed.
#[test]
fn attention_on_cpu_and_gpu() {
    let Some(gpu) = gpu("agreement::attention_on_cpu_and_gpu") else { return };
    for case in attention_problems() {
        let data = AttentionData::generate(&case);
        let reference = AttentionReference::compute(&case, &data, f64::INFINITY);
        let [on_cpu, on_gpu] =
            [attention(&case, &data, &cpu()), attention(&case, &data, &gpu.stream)];
        let expected = scattered(&case, &reference);
        let rounding = [reference.rounding(&case), AttentionReference::lse_rounding(&case)];
        for which in 0..2 {
            let name = |i: usize| format!("element {i} of {} of {case:?}", ["o", "lse"][which]);
            check_agreement(
                &on_gpu[which],
                &on_cpu[which],
                &expected[which],
                &rounding[which],
                name,
            )
            .unwrap_or_else(|error| panic!("gpu against cpu: {error}"));
        }
    }
}

fn products() -> Vec<BsrCase> {
    let limits = bsr::Limits {
        dtypes: vec![DType::F16, DType::BF16],
        block_sizes: vec![16, 32, 64, 128],
        blocks: 5,
        columns: 300,
        any_layout: false,
    };
    // `matmul` has no old C.
    samples(60, bsr_cases(limits)).into_iter().map(|case| BsrCase { beta: 0.0, ..case }).collect()
}

fn product(case: &BsrCase, data: &BsrData, stream: &Stream) -> Vec<f64> {
    let operands = data.operands(case, stream).unwrap();
    let call: BsrMatmul<'_> = operands.product().unwrap();
    let c = call
        .matmul(case.c_dtype, stream)
        .unwrap_or_else(|error| panic!("{error} on {}: {case:?}", stream.device()));
    wait(stream, &|| format!("{case:?}")).unwrap();
    assert_eq!((c.shape(), c.dtype()), (&case.mnk[..2], case.c_dtype));
    numbers(stream, &c)
}

#[test]
fn matmul_allocates_what_matmul_into_fills() {
    let stream = cpu();
    for case in products().into_iter().step_by(3) {
        let data = BsrData::generate(&case);
        let reference = BsrReference::compute(&case, &data, f64::INFINITY);
        let name = |i: usize| format!("element {i} of {case:?}");
        check(
            &product(&case, &data, &stream),
            &reference.c,
            &BsrReference::rounding(&case, &data),
            name,
        )
        .unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn bsr_on_cpu_and_gpu() {
    let Some(gpu) = gpu("agreement::bsr_on_cpu_and_gpu") else { return };
    for case in products() {
        let data = BsrData::generate(&case);
        let reference = BsrReference::compute(&case, &data, f64::INFINITY);
        let [on_cpu, on_gpu] = [product(&case, &data, &cpu()), product(&case, &data, &gpu.stream)];
        let name = |i: usize| format!("element {i} of {case:?}");
        check_agreement(
            &on_gpu,
            &on_cpu,
            &reference.c,
            &BsrReference::rounding(&case, &data),
            name,
        )
        .unwrap_or_else(|error| panic!("gpu against cpu: {error}"));
    }
}

/// Attention in which every query attends one key copies its value: exact in every bit.
fn one_visible_key_is_copied(stream: &Stream) {
    for dtype in [DType::F16, DType::BF16] {
        let mask = Mask::Window { left: Some(0), right: Some(0), align: Align::TopLeft };
        let lengths = Lengths::Dense { batch: 2, seqlen_q: 150, seqlen_kv: 150 };
        let case = AttentionCase {
            scores: mask.into(),
            lengths,
            ..AttentionCase::simple(dtype, (4, 2), 96, (0, 0))
        };
        let data = AttentionData::generate(&case);
        let [o, _] = attention(&case, &data, stream);
        for (at, &o) in o.iter().enumerate() {
            let (row, head, i) = (at / (4 * 96), at / 96 % 4, at % 96);
            let v = f64::from(data.v[(row * 2 + head / 2) * 96 + i]);
            assert_eq!(o, v, "o[{row}, {head}, {i}] on {}", stream.device());
        }
    }
}

#[test]
fn one_visible_key_on_the_cpu() {
    one_visible_key_is_copied(&cpu());
}

#[test]
fn one_visible_key_on_the_gpu() {
    let Some(gpu) = gpu("agreement::one_visible_key_on_the_gpu") else { return };
    one_visible_key_is_copied(&gpu.stream);
}
