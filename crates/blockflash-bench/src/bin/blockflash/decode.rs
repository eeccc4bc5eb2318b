//! `blockflash attention-decode`.

use crate::decode_args::Args;
use crate::decode_operands::Operands;
use crate::failure::Result;
use crate::operand::Placed;
use crate::output::{RunReport, print};
use crate::progress::Progress;
use crate::{measure, table};
use blockflash_bench::case::{CacheRows, QueryRows, Scores, sides};
use blockflash_bench::io::Array;
use blockflash_ops::attention_decode::{AttentionDecodeProblem, select};
use blockflash_ops::{
    Align, AttentionDecode, AttentionDecodeOperands, AttentionDecodeWorkspace, CacheAccess, DType,
    KvCache, Mask, Operation, Tensor, View,
};
use blockflash_oracle::{self as oracle, AttentionCase, Comparison};
use std::process::ExitCode;

/// Runs attention to a cache once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let outputs = args.outputs()?;
    let device = args.common.device.open()?;
    let stream = device.stream()?;

    let operands = Operands::new(&args)?;
    let Operands { q, k, v, block_table, seqused_kv, sink, .. } = &operands;
    let place = |array| Placed::new(array, &stream);
    let place_some = |array: &Option<Array>| -> Result<Option<Tensor>> {
        Ok(array.as_ref().map(|array| array.upload(&stream)).transpose()?)
    };
    let [placed_q, placed_k, placed_v] = [place(q)?, place(k)?, place(v)?];
    let [block_table, seqused_kv, sink] =
        [place_some(block_table)?, place_some(seqused_kv)?, place_some(sink)?];
    let cache = KvCache {
        block_table: block_table.as_ref().map(Tensor::view),
        seqused_kv: seqused_kv.as_ref().map(Tensor::view),
        ..KvCache::new(placed_k.view()?, placed_v.view()?)
    };
    let call =
        AttentionDecode { sink: sink.as_ref().map(Tensor::view), ..call(&args, placed_q.view()?)? };
    let problem = call.problem(&cache)?;
    let kernel = match device.cuda_properties() {
        Some(gpu) if !problem.is_empty() => Some(select(&problem, gpu)?),
        _ => None,
    };
    let bytes = call.workspace_bytes(&cache, &device)?;
    let workspace = (bytes > 0).then(|| AttentionDecodeWorkspace::new(&stream, bytes));
    let workspace = workspace.transpose()?;
    let call = AttentionDecode { workspace: workspace.as_ref(), ..call };

    let with_lse = outputs.has("lse") || args.common.check;
    let attention = &problem.attention;
    let mut o = Tensor::empty(&stream, attention.dtype, q.shape())?;
    let lse_shape = [attention.batch, attention.num_heads_q, attention.seqlen_q];
    let mut lse = with_lse.then(|| Tensor::empty(&stream, DType::F32, &lse_shape)).transpose()?;
    let mut forward = || {
        let (o, lse) = (o.view_mut(), lse.as_mut().map(Tensor::view_mut));
        let cache = CacheAccess::Read(cache);
        Ok(call.run(AttentionDecodeOperands { cache, o, lse }, &stream)?)
    };
    let label = "attention to the cache";
    let first_us = measure::first(label, &stream, &mut forward)?;
    let again = format!("{label}, again");
    let timing = measure::repeat(&again, &stream, first_us, args.common.repeat, forward)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if outputs.has("o") || with_lse {
        let o = Array::download(&o, &stream)?;
        let lse = lse.as_ref().map(|lse| Array::download(lse, &stream)).transpose()?;
        let results = [Some(("o", &o)), lse.as_ref().map(|lse| ("lse", lse))];
        written = outputs.save(&results.into_iter().flatten().collect::<Vec<_>>())?;
        if let (Some(lse), true) = (&lse, args.common.check) {
            checks = check(&operands, &problem, [&o, lse], args.common.seed)?;
        }
    }

    let report = RunReport {
        operation: "attention-decode",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: [("q", q), ("k", k), ("v", v)]
            .map(|(name, array)| (name, array.shape().to_vec(), attention.dtype))
            .to_vec(),
        details: details(&operands, &problem),
        flops: flops(&operands, &problem),
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

/// The call that the options describe, without its sink.
pub fn call<'a>(args: &Args, q: View<'a>) -> Result<AttentionDecode<'a>> {
    let scores = args.scores.of(args.mask, Mask::causal())?;
    Ok(AttentionDecode {
        mask: scores.mask,
        softmax_scale: scores.softmax_scale,
        softcap: scores.softcap,
        ..AttentionDecode::new(q)
    })
}

fn details(operands: &Operands, problem: &AttentionDecodeProblem) -> Vec<(&'static str, String)> {
    let attention = &problem.attention;
    let mut details = Scores::details(attention, true);
    let cache = &problem.cache;
    let pages = match cache.table {
        None => "contiguous".to_owned(),
        Some(_) => format!("{} pages of {}", table::count(cache.pages as u64), cache.page_size),
    };
    let keys = table::count(operands.slots.len() as u64);
    details.push(("cache", format!("{pages}, {keys} keys of {} sequences", cache.batch)));
    details
}

/// Those of the pairs that are visited.
fn flops(operands: &Operands, problem: &AttentionDecodeProblem) -> f64 {
    let attention = &problem.attention;
    let queries = attention.seqlen_q;
    let visible = |&keys: &usize| -> usize {
        (0..queries).map(|query| attention.mask.visible(query, queries, keys).len()).sum()
    };
    let pairs: usize = operands.lengths.iter().map(visible).sum();
    4.0 * pairs as f64 * (attention.num_heads_q * attention.head_dim) as f64
}

/// Compares o and lse with the reference, sequence by sequence.
fn check(
    operands: &Operands,
    problem: &AttentionDecodeProblem,
    [o, lse]: [&Array; 2],
    seed: u64,
) -> Result<Vec<(&'static str, Comparison)>> {
    let attention = &problem.attention;
    let (left, right, align) = sides(attention.mask)?;
    let Operands { q, k, v, sink, lengths, slots, .. } = operands;
    let queries = vec![attention.seqlen_q; lengths.len()];
    let case = AttentionCase {
        q: &QueryRows::new(q),
        k: &CacheRows::new(k, slots),
        v: &CacheRows::new(v, slots),
        sink: sink.as_ref().map(|sink| sink as _),
        lengths: Some([&queries, lengths]),
        blocks: None,
        bottom_right: align == Align::BottomRight,
        left,
        right,
        softmax_scale: attention.softmax_scale,
        softcap: attention.softcap,
    };
    let progress = Progress::fractions("checking");
    let progress = |done| progress.fraction(done);
    // The oracle's packed sequences have the rows of a head side by side.
    let lse = by_heads(lse);
    let [o, lse] = oracle::attention(&case, &QueryRows::new(o), &lse, seed, progress)?;
    Ok(vec![("o", o), ("lse", lse)])
}

/// `[batch, heads, queries]` as `[heads, batch * queries]`.
fn by_heads(lse: &Array) -> Array {
    let &[batch, heads, queries] = lse.shape() else { return lse.clone() };
    let values = lse.to_f32(0..lse.len());
    let row = |entry: usize, head: usize| &values[(entry * heads + head) * queries..][..queries];
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| (0..batch).flat_map(move |entry| row(entry, head)))
        .copied()
        .collect();
    Array::new(&[heads, batch * queries], values).unwrap_or_else(|| lse.clone())
}
