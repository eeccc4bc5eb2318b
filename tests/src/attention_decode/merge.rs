//! Merging of attention over parts of the keys: random parts against the oracle.

use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, upload};
use crate::number::{decode, encode, normal_rounded, rng};
use crate::tolerance::{Reference, check};
use blockflash_ops::{AttentionMerge, DType, Device, Operation, Stream, Tensor, View};
use blockflash_oracle::{AttentionRow, Rounding, merged_row};
use blockflash_sys::Kernel;
use proptest::prelude::*;
use proptest::sample::select;
use rand::Rng;

/// One merge.
#[derive(Clone, Debug)]
pub struct MergeCase {
    /// Seed of the data.
    pub seed: u64,
    /// Types of the parts and of the output.
    pub dtypes: [DType; 2],
    /// Parts, rows, heads and elements of a row.
    pub shape: [usize; 4],
    /// Part of the rows of parts that are empty, and hold NaN.
    pub empty: f64,
    /// The log-sum-exps are rows before heads.
    pub rows_first: bool,
    /// The parts begin one element behind an aligned address, with an element between rows.
    pub apart: bool,
}

impl MergeCase {
    fn upload(&self, stream: &Stream, bits: &[u32]) -> Result<Tensor, String> {
        let [count, rows, heads, d] = self.shape;
        if !self.apart {
            return upload(stream, self.dtypes[0], bits, &self.shape);
        }
        let apart: Vec<u32> = bits.chunks(d).flat_map(|row| [&[0], row].concat()).collect();
        upload(stream, self.dtypes[0], &apart, &[count, rows, heads, d + 1])
    }

    fn parts<'a>(&self, parts: &'a Tensor) -> View<'a> {
        let columns = parts.shape()[3] - self.shape[3]..parts.shape()[3];
        parts.view().slice(3, columns).expect("the last columns")
    }
}

/// Random merges of `least` parts and more.
pub fn merge_cases(least: usize, head_dims: Vec<usize>) -> impl Strategy<Value = MergeCase> {
    let dtype = || select(vec![DType::F16, DType::BF16, DType::F32]);
    let empty = prop_oneof![1 => Just(0.0), 2 => 0.0..1.0f64, 1 => Just(1.0)];
    let sizes = (least..=9usize, 0..=5usize, 1..=4usize, select(head_dims));
    let layout = (any::<bool>(), any::<bool>());
    (any::<u32>(), dtype(), dtype(), sizes, empty, layout).prop_map(
        |(seed, parts, o, (count, rows, heads, head_dim), empty, layout)| MergeCase {
            seed: seed.into(),
            dtypes: [parts, o],
            shape: [count, rows, heads, head_dim],
            empty,
            rows_first: layout.0,
            apart: layout.1,
        },
    )
}

/// Uploads, merges, waits and checks. Returns the number of compared outputs.
pub fn run_merge(case: &MergeCase, kernel: Choice, stream: &Stream) -> Result<usize, String> {
    let [count, rows, heads, d] = case.shape;
    let [parts_dtype, o_dtype] = case.dtypes;
    let mut random = rng(case.seed);
    let mut parts = normal_rounded(case.seed, count * rows * heads * d, parts_dtype);
    // Log-sum-exps `[parts, heads, rows]`, or `[parts, rows, heads]`.
    let mut logs = vec![0f32; count * rows * heads];
    let at = |part: usize, row: usize, head: usize| {
        let place = if case.rows_first { row * heads + head } else { head * rows + row };
        part * rows * heads + place
    };
    for (part, row, head) in
        (0..count).flat_map(|p| (0..rows).flat_map(move |r| (0..heads).map(move |h| (p, r, h))))
    {
        let empty = random.random_bool(case.empty);
        logs[at(part, row, head)] =
            if empty { f32::NEG_INFINITY } else { random.random_range(-30.0..30.0) };
        if empty {
            parts[((part * rows + row) * heads + head) * d..][..d].fill(f32::NAN);
        }
    }
    let bits = |dtype, values: &[f32]| values.iter().map(|&x| encode(dtype, x)).collect::<Vec<_>>();
    let o = case.upload(stream, &bits(parts_dtype, &parts))?;
    let log_shape = if case.rows_first { [count, rows, heads] } else { [count, heads, rows] };
    let lse = upload(stream, DType::F32, &bits(DType::F32, &logs), &log_shape)?;
    let order: [usize; 3] = if case.rows_first { [0, 2, 1] } else { [0, 1, 2] };
    let text = |error: blockflash_ops::Error| format!("{error}\n    {case:?}");
    let lse = lse.view().permute(&order).map_err(|error| text(error.into()))?;
    let tensor = |dtype, shape: &[usize]| crate::host::poisoned(stream, dtype, shape);
    let (mut merged, mut merged_lse) =
        (tensor(o_dtype, &[rows, heads, d])?, tensor(DType::F32, &[heads, rows])?);
    let merge = AttentionMerge::new(case.parts(&o), lse);
    let out = (merged.view_mut(), Some(merged_lse.view_mut()));
    match kernel {
        Choice::Selected => merge.run(out, stream),
        Choice::This(kernel) => merge.run_with(kernel, out, stream),
    }
    .map_err(text)?;
    wait(stream, &|| format!("{case:?}"))?;

    let (mut o_reference, mut lse_reference) = (Reference::default(), Reference::default());
    for row in 0..rows {
        for head in 0..heads {
            let part = |part: usize| {
                let o = &parts[((part * rows + row) * heads + head) * d..][..d];
                (o, logs[at(part, row, head)])
            };
            let all: Vec<_> = (0..count).map(part).collect();
            let AttentionRow { o, lse } = merged_row(o_dtype, &all, d);
            o_reference.extend(o);
            lse_reference.extend([lse]);
        }
    }
    (o_reference.width, lse_reference.width) = (d, rows * heads);
    let values = |tensor: &Tensor| -> Result<Vec<f64>, String> {
        let bits = download(stream, tensor)?;
        Ok(bits.into_iter().map(|bits| decode(tensor.dtype(), bits).into()).collect())
    };
    // Weights are powers of a difference of up to 60.
    let exponent = 60.0 * 2f64.powi(-24);
    let rounding = Rounding { exponent, ..Rounding::of_products(0, count + 3, o_dtype) };
    let name =
        |at: usize| format!("o[row {}, head {}, {}]", at / d / heads, at / d % heads, at % d);
    check(&values(&merged)?, &o_reference, &rounding, name)
        .map_err(|e| format!("{e}\n{case:?}"))?;
    let found = values(&merged_lse)?;
    let found: Vec<f64> =
        (0..rows * heads).map(|at| found[at % heads * rows + at / heads]).collect();
    let rounding = Rounding::of_products(0, count + 8, DType::F32);
    check(&found, &lse_reference, &rounding, |at| format!("lse {at}"))
        .map_err(|error| format!("{error}\n    {case:?}"))?;
    Ok(2)
}

/// Adds the parts of a case without weights, with this kernel and on the CPU, whose bits it has.
/// Returns the number of compared outputs.
pub fn run_sum(
    case: &MergeCase,
    kernel: &'static Kernel,
    stream: &Stream,
) -> Result<usize, String> {
    let [count, rows, heads, d] = case.shape;
    let [parts_dtype, o_dtype] = case.dtypes;
    let parts = normal_rounded(case.seed, count * rows * heads * d, parts_dtype);
    let bits: Vec<_> = parts.iter().map(|&x| encode(parts_dtype, x)).collect();
    let sum = |kernel: Option<&'static Kernel>, stream: &Stream| -> Result<_, String> {
        let parts = case.upload(stream, &bits)?;
        let mut o = crate::host::poisoned(stream, o_dtype, &[rows, heads, d])?;
        let (sum, out) = (AttentionMerge::sum(case.parts(&parts)), (o.view_mut(), None));
        match kernel {
            None => sum.run(out, stream),
            Some(kernel) => sum.run_with(kernel, out, stream),
        }
        .map_err(|error| format!("{error}\n    {case:?}"))?;
        wait(stream, &|| format!("{case:?}"))?;
        download(stream, &o)
    };
    let cpu = Device::cpu().stream().map_err(|error| error.to_string())?;
    let (found, expected) = (sum(Some(kernel), stream)?, sum(None, &cpu)?);
    match found == expected {
        true => Ok(1),
        false => Err(format!("sums differ from those of the CPU\n    {case:?}")),
    }
}
